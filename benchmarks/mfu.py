"""Predicted MFU of 270 million to 405 billion parameters on 1 to 1,024 H100s and H200s, for docs/performance.md.

    python -m benchmarks.mfu              derived: nothing is compiled, a few minutes
    python -m benchmarks.mfu compiled     one node, compiled with JAX's CUDA plugin: one to four minutes for each row
    python -m benchmarks.mfu compiled h200

Derived, a cell is the fastest of the meshes, policies and micro batches below that fits into memory. `training.overlap`
and all else is what `auto` takes.
"""

import sys
from collections.abc import Iterator, Sequence

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.compose import compose
from tunix.costs.devices import Cluster, read_topology
from tunix.costs.step import derive_costs, find_train_spec
from tunix.plan.ranking import GIB, Candidate, rank, replace_mesh
from tunix.sharding.mesh import check_divides, explicit_sizes

KINDS = ("h100", "h200")
MODELS = ("gemma3_270m", "gemma3_1b", "llama3_1b", "llama3_8b", "gemma3_27b", "llama3_70b", "llama3_405b")
NODES = {1: "1", 8: "8", 64: "8x8", 1024: "128x8"}  # devices, and how plan.topology writes them
NODE = 8  # devices
SEQ_LEN = 4096
REMAT = ("dots", "full")
MICRO_BATCHES = (1, 2, 4, 8)
COMPILED = {  # one node: sequences of a device, and the policy
    "gemma3_1b": (8, "dots"),
    "llama3_1b": (8, "dots"),
    "llama3_8b": (4, "dots"),
}


def compose_step(model: str, mesh: str, remat: str, micro_batch_size: int | str, *words: str) -> Config:
    return compose(
        [
            f"model={model}", f"model.mesh_shape={mesh}", f"training.seq_len={SEQ_LEN}", f"training.remat={remat}",
            f"training.micro_batch_size={micro_batch_size}", *words,
        ]
    ).config  # fmt: skip


def list_meshes(num_devices: int) -> list[str]:
    """Return the meshes that are tried: all devices on fsdp, replicas of a node, and tp inside a node."""
    if num_devices <= NODE:
        return [f"[[{num_devices}],[fsdp]]"]
    nodes = num_devices // NODE
    return [f"[[{num_devices}],[fsdp]]", f"[[{nodes},{NODE}],[dp,fsdp]]", f"[[{nodes},{NODE}],[fsdp,tp]]"]


def list_candidates(model: str, num_devices: int) -> Iterator[tuple[str, Candidate]]:
    """Yield the ways to run a model on so many devices, each for every kind."""
    clusters = [read_topology(f"{kind}:{NODES[num_devices]}") for kind in KINDS]
    for mesh in list_meshes(num_devices):
        for remat in REMAT:
            cfg = compose_step(model, mesh, remat, "auto")
            sizes = explicit_sizes(cfg.model.mesh_shape)
            assert sizes is not None
            try:
                check_divides(cfg.dims, sizes)
            except UserError:
                continue
            for count in MICRO_BATCHES:
                with_batch = replace_mesh(cfg, sizes, count)  # in the place of auto
                program = find_train_spec(with_batch, sizes, "gpu")
                costs = derive_costs(program)
                for kind, cluster in zip(KINDS, clusters, strict=True):
                    yield kind, Candidate(sizes, with_batch, program.choices, costs, cluster)


def describe(candidate: Candidate | None) -> str:
    if candidate is None:
        return "does not fit"
    axes = " x ".join(f"{axis}={size}" for axis, size in candidate.sizes.items() if size > 1) or "one device"
    training = candidate.cfg.training
    return f"{candidate.mfu:.0%} ({axes}, {training.remat}, {training.micro_batch_size})"


def fits(candidate: Candidate) -> bool:
    return candidate.memory <= candidate.cluster.kind.memory_gib * GIB * candidate.cfg.plan.memory_share


def print_derived() -> None:
    print(f"| model, kind | {' | '.join(map(str, NODES))} |\n|---|{'---|' * len(NODES)}")
    for model in MODELS:
        best: dict[tuple[str, int], Candidate] = {}
        for num_devices in NODES:
            for kind, candidate in list_candidates(model, num_devices):
                key = kind, num_devices
                if fits(candidate) and (key not in best or candidate.mfu > best[key].mfu):
                    best[key] = candidate
        for kind in KINDS:
            cells = [describe(best.get((kind, num_devices))) for num_devices in NODES]
            print(f"| {model}, {kind} | {' | '.join(cells)} |", flush=True)


def print_compiled(kinds: Sequence[str]) -> None:
    print("| model, kind | sequences a device | remat | step | hidden | MFU | memory |\n|---|---|---|---|---|---|---|")
    for model, (micro_batch_size, remat) in COMPILED.items():
        for kind in kinds:
            cluster: Cluster = read_topology(f"{kind}:{NODE}")
            cfg = compose_step(model, f"[[{NODE}],[fsdp]]", remat, micro_batch_size, "plan.num_compiled=1")
            ranking = rank(cfg, cluster)
            candidate = (ranking.fit or ranking.too_large)[0]
            hidden = 1 - candidate.time.exposed_s / candidate.time.communication_s
            print(
                f"| {model}, {kind} | {micro_batch_size} | {remat} | {candidate.time.step_s:.3f} s | {hidden:.0%} "
                f"| {candidate.mfu:.0%} | {candidate.memory / GIB:.1f} GiB |{candidate.note}",
                flush=True,
            )


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["compiled"]:
        print_compiled(words[1:] or KINDS)
    else:
        print_derived()


if __name__ == "__main__":
    main()
