"""A train step on this CPU beside transformers, in one run: `TRANSFORMERS_PYTHON=... python -m benchmarks.peers`.

TRANSFORMERS_PYTHON is a Python with torch and transformers. Each side trains the same decoder, of the Gemma 3
architecture with 27 million parameters, on 4 x 512 random tokens with AdamW and its own defaults. Sides run in
processes of their own, in turn, so that other work on the machine slows down both. CPU time is told beside wall time:
on a machine that is shared, its ratio is the more certain of the two.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import gpu

ROOT = Path(__file__).parents[1]
ROUNDS, STEPS = int(os.environ.get("ROUNDS", "2")), int(os.environ.get("STEPS", "5"))
WORDS = [
    "model=gemma3_1b", "model.embed_dim=512", "model.mlp_dim=2048", "model.num_layers=6", "model.num_heads=4",
    "model.num_kv_heads=1", "model.head_dim=128", "model.vocab_size=8192", "model.sliding_window=256",
    "model.query_scale=128", "model.context_length=512", "model.mesh_shape=[[1],[fsdp]]", "training=default",
    "training.seq_len=512", "training.micro_batch_size=4", "training.max_steps=1000", "scheduler=constant",
    "tokenizer.vocab_size=300",
]  # fmt: skip
PRECISIONS = {"float32": "fp32", "bf16": "bf16"}  # training.mixed_precision; transformers: autocast for bf16


def by_tunix(precision: str) -> dict[str, Any]:
    """Return what `gpu.train` measures."""
    import jax

    from tunix.cli.compose import compose

    cfg = compose([*WORDS, f"training.mixed_precision={PRECISIONS[precision]}"]).config
    return gpu.train(cfg, jax.devices()[0], STEPS)


def ask(command: list[str], question: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the answer of a side's process, the last line of its output."""
    text = None if question is None else json.dumps(question)
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def question(precision: str) -> dict[str, Any]:
    """Return what `benchmarks/trained_by_transformers.py` takes: the same model and batch, without torch.compile."""
    from tunix.cli.compose import compose
    from tunix.hf.config_json import write_config

    cfg = compose(WORDS).config
    return {
        "config": write_config(cfg.model), "rows": 4, "length": 512, "steps": STEPS, "warmup": gpu.WARMUP,
        "param_dtype": "float32", "compiled": False, "checkpointed": False, "autocast": precision == "bf16",
    }  # fmt: skip


def main() -> None:
    if "TRANSFORMERS_PYTHON" not in os.environ:
        sys.exit("TRANSFORMERS_PYTHON must name a Python with torch and transformers")
    other = [os.environ["TRANSFORMERS_PYTHON"], str(ROOT / "benchmarks" / "trained_by_transformers.py")]
    print("| precision | side | tokens/s | CPU s a step | peak GiB | tokens/s, ratio | CPU time, ratio |")
    print("|---|---|---|---|---|---|---|")
    for precision in PRECISIONS:
        rounds = []
        for _ in range(ROUNDS):
            own = ask([sys.executable, "-m", "benchmarks.peers", precision])
            rounds.append({"tunix": own, "transformers": ask(other, question(precision))})
        ratios = [
            (each["tunix"]["tokens_per_s"] / each["transformers"]["tokens_per_s"],
             each["transformers"]["cpu_s"] / each["tunix"]["cpu_s"])
            for each in rounds
        ]  # fmt: skip
        for side in rounds[0]:
            rate, cpu_s, peak = (
                statistics.median(each[side][figure] for each in rounds)
                for figure in ("tokens_per_s", "cpu_s", "peak_gib")
            )
            both = " | ".join(", ".join(f"{ratio:.2f}" for ratio in each) for each in zip(*ratios, strict=True))
            beside = both if side == "tunix" else "| "
            print(f"| {precision} | {side} | {rate:,.0f} | {cpu_s:.2f} | {peak:.2f} | {beside} |", flush=True)
    versions = rounds[0]["transformers"]["versions"]
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {versions}")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(by_tunix(sys.argv[1])))
    else:
        main()
