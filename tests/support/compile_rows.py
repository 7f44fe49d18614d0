"""Compile a small step whose experts exchange rows, for eight H100s that are not there: `python compile_rows.py`.

Prints as JSON, for each kind of collective over the axis of the experts, executions and bytes in one step, derived and
compiled; the kernels of the program; and whether its time is known.
"""

import json
import math
import re
import sys
from collections import Counter

from support.harness import experts

from tunix.config.compose import compose
from tunix.costs.devices import read_topology
from tunix.costs.step import derive
from tunix.plan.compile import compile_for, describe_devices
from tunix.sharding.mesh import explicit_sizes

WORDS = [
    "model=tiny", "model.embed_dim=256", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2",
    "model.head_dim=64", "model.vocab_size=1024", "tokenizer.vocab_size=1024", "model.global_every=1",
    "model.sliding_window=null", "training.seq_len=512", "training.micro_batch_size=1", "training.mixed_precision=bf16",
    "training.remat=full", "plan.output=null", "model.mesh_shape=[[2,4],[fsdp,ep]]",
    experts(expert_dim=128, experts_per_token=2),
]  # fmt: skip


def main() -> None:
    cluster = read_topology("h100:8")
    cfg = compose([*WORDS, *sys.argv[1:]]).config
    compiled, hlo = compile_for(cfg, cluster, describe_devices(cluster))
    sizes = explicit_sizes(cfg.model.mesh_shape)
    bytes_of: dict[str, dict[str, list[int]]] = {"derived": {}, "compiled": {}}
    transfers = {"derived": derive(cfg, sizes, "gpu").transfers, "compiled": compiled.traffic}
    for name, found in transfers.items():
        for each in found:
            if [axis for axis in each.axes if sizes[axis] > 1] == ["ep"]:
                count, num_bytes = bytes_of[name].get(each.kind, [0, 0])
                bytes_of[name][each.kind] = [count + each.count, num_bytes + each.num_bytes]
    kernels = Counter(re.findall(r'name = "((?:grouped|experts)_\w+)"', hlo))
    assert compiled.step_time is not None
    is_timed = not math.isnan(compiled.step_time.step_s)
    print(json.dumps({**bytes_of, "kernels": kernels, "is_timed": is_timed, "temporary": compiled.temporary_bytes}))


if __name__ == "__main__":
    main()
