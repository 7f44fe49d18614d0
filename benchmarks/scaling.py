"""Predicted steps on 8 to 4,096 devices: `python -m benchmarks.scaling`, the table of docs/scaling.md.

For each case and number of nodes the meshes are ranked by derived times, as `python -m tunix.plan` does first, and the
best one is compiled. *Weak* scaling gives each device the same number of sequences; *strong* scaling gives all devices
together the same batch. A run has 20 tokens for each parameter, as Hoffmann et al. (2022) found best ("Chinchilla").

Compiling needs JAX's CUDA plugin. `python -m benchmarks.scaling derived` compiles nothing. More words choose models,
kinds of scaling and numbers of nodes: `python -m benchmarks.scaling derived llama3_8b weak 1 8`.
"""

import sys
from dataclasses import replace
from itertools import product

from benchmarks.arguments import check_names
from tunix.config.compose import compose
from tunix.costs.devices import PLATFORM, read_topology
from tunix.costs.step import find_train_spec
from tunix.plan.ranking import Candidate, rank
from tunix.sharding.mesh import format_mesh_shape

MODELS = ("llama3_8b", "qwen3_30b_a3b")
NODES = (1, 8, 64, 512)  # of 8 devices
SEQUENCES = {"weak": 2, "strong": 1024}  # of 4,096 tokens: of each device, and of all together
TOKENS_PER_PARAMETER = 20
HEAD = "| model | scaling | devices | batch | mesh | derived s | compiled s | MFU | exposed s | tokens/s | GPU hours |"


def choose(model: str, scaling: str, nodes: int, compiled: bool) -> Candidate:
    """Return the mesh that derived times put first, compiled or not."""
    devices = 8 * nodes
    sequences = SEQUENCES[scaling] * (devices if scaling == "weak" else 1)
    # Few sequences for each device are taken one at a time, so that meshes with fewer data shards divide them too.
    micro = 2 if sequences >= 2 * devices else 1
    batch = f"training.global_batch_size={sequences}", f"training.micro_batch_size={micro}"
    words = [f"model={model}", "training.seq_len=4096", *batch]
    cluster = read_topology(f"h200:{nodes}x8")
    best = rank(compose([*words, "plan.num_compiled=0"]).config, cluster).fit[0]
    if compiled:
        words += [f"model.mesh_shape={format_mesh_shape(best.sizes)}", "plan.num_compiled=1"]
        best = (rank(compose(words).config, cluster).fit or [best])[0]
    return best


def describe(model: str, scaling: str, best: Candidate) -> str:
    """Return one row of the table."""
    devices, tokens = best.cluster.num_devices, best.costs.tokens_per_step
    derived = replace(best, compiled=None)
    parameters = find_train_spec(best.cfg, best.sizes, PLATFORM).arch.num_parameters
    hours = TOKENS_PER_PARAMETER * parameters / best.tokens_per_s / 3600 * devices
    source = f"{best.time.step_s:.3g}" if best.source == "compiled" else "not compiled"
    numbers = f"{derived.time.step_s:.3g} | {source} | {best.mfu:.0%} | {best.time.exposed_s:.2g}"
    mesh = format_mesh_shape(best.sizes)
    return (
        f"| `{model}` | {scaling} | {devices:,} | {best.cfg.training.global_batch_size:,} | {mesh} | {numbers} "
        f"| {tokens / best.time.step_s / devices:,.0f} | {hours:,.0f} |"
    )


def main(words: list[str]) -> None:
    check_names(words, ["derived", *MODELS, *SEQUENCES, *map(str, NODES)])
    models, scalings = ([name for name in names if name in words] or names for names in (MODELS, SEQUENCES))
    nodes = [count for count in NODES if str(count) in words] or NODES
    print(HEAD, "|---" * HEAD.count(" | ") + "|---|", sep="\n")
    for model, scaling, count in product(models, scalings, nodes):
        print(describe(model, scaling, choose(model, scaling, count, "derived" not in words)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
