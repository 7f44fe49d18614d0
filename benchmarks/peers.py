"""A train step on this CPU beside other programs, in one run: `python -m benchmarks.peers`.

Each side is a Python of its own, which a variable of the environment names; a side without its variable is left out:

    TRANSFORMERS_PYTHON   has torch and transformers; eager, in bf16 under autocast
    GOOGLE_TUNIX_PYTHON   has google-tunix; in bf16 its weights are bf16 too, as it has no mixed precision

All train the same decoder, of the Gemma 3 architecture with 27 million parameters, on 4 x 512 random tokens with AdamW
and their own defaults. Sides run in processes of their own, in turn, so that other work on the machine slows down all.

CPU time is that of the process, user and system, of all threads. Threads of all sides wait passively
(OMP_WAIT_POLICY=PASSIVE): those of torch otherwise spin while they wait for a core, and on a shared machine count up to
three times the CPU time of their work. Wall clock says something on a quiet machine alone: where the load before the
first side is above half of the cores, the table has CPU time and no rate.

ROUNDS, STEPS and PRECISIONS (`float32,bf16`) in the environment say how often, how long and in what.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
from typing import Any

from benchmarks import gpu
from benchmarks.models import ask

ROUNDS, STEPS = int(os.environ.get("ROUNDS", "2")), int(os.environ.get("STEPS", "5"))
PRECISIONS = os.environ.get("PRECISIONS", "float32,bf16").split(",")
WORDS = [
    "model=gemma3_1b", "model.embed_dim=512", "model.mlp_dim=2048", "model.num_layers=6", "model.num_heads=4",
    "model.num_kv_heads=1", "model.head_dim=128", "model.vocab_size=8192", "model.sliding_window=256",
    "model.query_scale=128", "model.context_length=512", "model.mesh_shape=[[1],[fsdp]]", "training=default",
    "training.seq_len=512", "training.micro_batch_size=4", "training.max_steps=1000", "scheduler=constant",
    "tokenizer.vocab_size=300",
]  # fmt: skip
PRESETS = {"float32": "fp32", "bf16": "bf16"}  # values of training.mixed_precision


def by_tunix(precision: str) -> dict[str, Any]:
    """Return what `gpu.train` measures."""
    import jax

    from tunix.config.compose import compose

    cfg = compose([*WORDS, f"training.mixed_precision={PRESETS[precision]}"]).config
    return gpu.train(cfg, jax.devices()[0], STEPS)


def same_model() -> dict[str, Any]:
    """Return model and batch as the scripts of the other sides take them."""
    from tunix.config.compose import compose
    from tunix.huggingface.config_json import write_config

    config = write_config(compose(WORDS).config.model)
    return {"config": config, "rows": 4, "length": 512, "steps": STEPS, "warmup": gpu.WARMUP}


def of_transformers(precision: str) -> dict[str, Any]:
    """Return what differs for `trained_by_transformers.py`: no torch.compile, float32 weights."""
    return {"param_dtype": "float32", "compiled": False, "checkpointed": False, "autocast": precision == "bf16"}


def of_google_tunix(precision: str) -> dict[str, Any]:
    """Return what differs for `trained_by_google_tunix.py`."""
    return {"param_dtype": "bfloat16" if precision == "bf16" else "float32"}


# Name -> variable with its Python, its script, and its part of the question.
PEERS = {
    "transformers": ("TRANSFORMERS_PYTHON", "trained_by_transformers.py", of_transformers),
    "google-tunix": ("GOOGLE_TUNIX_PYTHON", "trained_by_google_tunix.py", of_google_tunix),
}


def compare(precision: str, peers: list[str], compiled: str) -> list[dict[str, dict[str, Any]]]:
    """Return the answers of all sides by name, for each round; the folder `compiled` keeps programs between rounds."""
    model, rounds = same_model(), []
    environment = {"JAX_COMPILATION_CACHE_DIR": compiled, "OMP_WAIT_POLICY": "PASSIVE"}
    for _ in range(ROUNDS):
        answers = {"tunix": ask([sys.executable, "-m", "benchmarks.peers", "--own", precision], **environment)}
        for name in peers:
            variable, script, differs = PEERS[name]
            command = [os.environ[variable], f"benchmarks/{script}"]
            answers[name] = ask(command, model | differs(precision), **environment)
        rounds.append(answers)
    return rounds


def rows(precision: str, rounds: list[dict[str, dict[str, Any]]], is_quiet: bool) -> list[str]:
    """Return a row for each side; those of peers say how many times as fast tunix is in each round.

    Numbers of the wall clock stand in it only where the machine is quiet.
    """
    lines = []
    for side in rounds[0]:
        rate, cpu_s = (statistics.median(each[side][key] for each in rounds) for key in ("tokens_per_s", "cpu_s"))
        peak = max(each[side]["peak_gib"] for each in rounds)  # a later round finds its program compiled
        ratios = ["", ""]
        if side != "tunix":
            faster = [each["tunix"]["tokens_per_s"] / each[side]["tokens_per_s"] for each in rounds]
            cheaper = [each[side]["cpu_s"] / each["tunix"]["cpu_s"] for each in rounds]
            ratios = [", ".join(f"{ratio:.2f}" for ratio in each) for each in (faster, cheaper)]
        shown = f"{rate:,.0f}" if is_quiet else "busy"
        ratios[0] = ratios[0] if is_quiet else ""
        lines.append(f"| {precision} | {side} | {shown} | {cpu_s:.2f} | {peak:.2f} | {' | '.join(ratios)} |")
    return lines


def main() -> None:
    peers = [name for name, (variable, *_) in PEERS.items() if variable in os.environ]
    if not peers:
        sys.exit(f"name a Python by {' or '.join(variable for variable, *_ in PEERS.values())}")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    print("| precision | side | tokens/s | CPU s a step | peak GiB | ratio of tokens/s | ratio of CPU time |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as compiled:
        for precision in PRECISIONS:
            rounds = compare(precision, peers, compiled)
            print("\n".join(rows(precision, rounds, load < cores / 2)), flush=True)
    versions = "; ".join(rounds[0][name]["versions"] for name in peers)
    print(
        f"\n{platform.machine()}, {cores} cores, load {load:.1f} before and {os.getloadavg()[0]:.1f} after; {versions}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--own"]:
        print(json.dumps(by_tunix(sys.argv[2])))
    else:
        main()
