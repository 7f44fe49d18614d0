"""Compare bytes of collectives, derived and compiled, on more devices than tests have.

`XLA_FLAGS=--xla_force_host_platform_device_count=64 JAX_PLATFORMS=cpu python -m tools.compiled_scaling` compiles a tiny
model for 64 CPU devices on each axis in turn, and prints rows of a Markdown table; axes after the command are compiled
alone. XLA's CPU backend makes an all-reduce out of each reduce-scatter, so bytes are those of the arrays, and both
kinds are counted together.
"""

import sys
from typing import NamedTuple

import jax

from tunix.config.compose import compose
from tunix.costs.devices import read_topology
from tunix.costs.step import derive
from tunix.plan.compile import compile_for
from tunix.sharding.mesh import count_devices
from tunix.sharding.table import axis_names

AXES = ("dp", "fsdp", "ep", "cp", "tp", "pp")
KINDS = {"gathered": ("all-gather",), "summed": ("all-reduce", "reduce-scatter"),
         "exchanged": ("all-to-all", "collective-permute")}  # fmt: skip


class Moved(NamedTuple):
    """Collectives of a step: bytes of their arrays, derived from the config and compiled, and executions by kind."""

    num_bytes: dict[str, tuple[int, int]]  # by a name of `KINDS`
    counts: dict[str, int]
    iterations: int  # of a pipeline; 1 for each microbatch without stages


def words(axis: str, num_devices: int, largest: int) -> list[str]:
    """Return the words of a model whose sizes `largest` divides, on `num_devices` of this axis.

    The model is as small as compiling for many devices asks.
    """
    num_layers = largest if axis == "pp" else 2
    sizes = [
        f"model.num_layers={num_layers}", f"model.num_heads={largest}", f"model.num_kv_heads={largest}",
        "model.head_dim=8", f"model.embed_dim={8 * largest}", f"model.mlp_dim={16 * largest}",
        "model.vocab_size=1024", "tokenizer.vocab_size=300", f"training.seq_len={4 * largest}",
    ]  # fmt: skip
    same = ["training.mixed_precision=fp32", "training.remat=full", "plan.output=null"]
    rows = largest // num_devices if axis == "pp" else 1  # the same number of parts for every number of stages
    model = ["model=tiny", f"training.micro_batch_size={rows}"]
    if axis == "ep":
        model = ["model=tiny_moe", *model[1:], f"model.mlp.num_experts={largest}", "model.mlp.expert_dim=16"]
    return [*model, *sizes, *same, f"model.mesh_shape=[[{num_devices}],[{axis}]]"]


def measure(axis: str, num_devices: int, largest: int | None = None) -> Moved:
    """Compile a step on the first devices of this process, for a model whose sizes `largest` divides."""
    cfg = compose(words(axis, num_devices, largest or num_devices)).config
    sizes = dict.fromkeys(axis_names(), 1) | {axis: num_devices}
    transfers = [each for each in derive(cfg, sizes).transfers if count_devices(sizes, each.axes) > 1]
    devices = jax.devices()[:num_devices]
    compiled, _ = compile_for(cfg, read_topology(f"h100:{num_devices}"), devices, timed=False)
    num_bytes = {}
    for name, kinds in KINDS.items():
        derived = sum(each.num_bytes for each in transfers if each.kind in kinds)
        num_bytes[name] = derived, sum(each.num_bytes for each in compiled.traffic if each.kind in kinds)
    counts: dict[str, int] = {}
    for each in compiled.traffic:
        counts[each.kind] = counts.get(each.kind, 0) + each.count
    return Moved(num_bytes, counts, cfg.training.pipeline(sizes).num_iterations)


def main() -> None:
    """Print a row for each axis."""
    for axis in sys.argv[1:] or AXES:
        number = len(jax.devices())
        cells = [f"{derived:,} / {compiled:,}" for derived, compiled in measure(axis, number).num_bytes.values()]
        print(f"| {axis}={number} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
