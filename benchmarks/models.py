"""Loading and generating beside transformers, in one run: `TRANSFORMERS_PYTHON=... python -m benchmarks.models`.

TRANSFORMERS_PYTHON is a Python with torch and transformers. Both sides run in processes of their own, in turn, from the
same files with random weights: 0.6 GB in bfloat16 to load, 0.1 billion parameters in float32 to decode with, greedily.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
LARGE = [
    "model.embed_dim=2048", "model.mlp_dim=8192", "model.num_layers=4", "model.num_heads=32", "model.num_kv_heads=8",
]  # fmt: skip
SMALL = [
    "model.embed_dim=768", "model.mlp_dim=2048", "model.num_layers=12", "model.num_heads=12", "model.num_kv_heads=4",
]  # fmt: skip
LLAMA = ["model=llama3_1b", "model.head_dim=64", "model.vocab_size=32000", "model.context_length=2048"]
PROMPT, NEW, ROUNDS, TURNS = 64, 64, 2, 2


def write_model(folder: Path, words: list[str], dtype: str) -> None:
    """A Llama of random weights in Hugging Face's files."""
    import jax
    import ml_dtypes
    from safetensors.numpy import save_file

    from tunix.config.compose import compose
    from tunix.huggingface.config_json import write_config
    from tunix.huggingface.table import FAMILIES
    from tunix.huggingface.weights import shape_in_files
    from tunix.models.layers import named
    from tunix.training.choices import build_layout, build_mesh
    from tunix.training.state import describe

    cfg = compose([*LLAMA, *words]).config
    mesh, rng = build_mesh(cfg), np.random.default_rng(0)
    with jax.set_mesh(mesh):
        arch = describe(cfg.model, build_layout(cfg, mesh))
    tensors = {}
    for path, _ in named(arch.weights):
        name = FAMILIES["llama"].names[path]
        shape = shape_in_files(name, cfg.model.dims)
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        for layer in range(cfg.model.num_layers if "{}" in name.tensor else 1):
            weight = rng.standard_normal(shape, np.float32) * scale if len(shape) > 1 else np.ones(shape, np.float32)
            tensors[name.tensor.format(layer)] = weight.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(write_config(cfg.model) | {"dtype": dtype}))


def load(folder: str, dtype: str) -> dict:
    import jax

    import tunix

    start_time, start_cpu = time.perf_counter(), time.process_time()
    model = tunix.load_pretrained(folder, dtype=dtype)
    for leaf in jax.tree.leaves(model.params):
        np.asarray(leaf).view(np.int16).reshape(-1)[::2048].sum()  # every page is there
    end_cpu = time.process_time()
    return {"seconds": time.perf_counter() - start_time, "cpu_s": end_cpu - start_cpu, "whole_cpu_s": end_cpu}


def decode(folder: str, batch: str, prompt: str, new: str, rounds: str) -> dict:
    import tunix
    from tunix.inference.sampling import Sampling

    model = tunix.load_pretrained(folder)
    tokens = (np.arange(int(batch) * int(prompt)) * 7919 % 32000).reshape(int(batch), int(prompt)).tolist()
    seconds, sampling = [], Sampling(int(new), temperature=0.0)
    for _ in range(int(rounds) + 1):
        start_time = time.perf_counter()
        answers = model.sample(tokens, sampling)
        seconds.append(time.perf_counter() - start_time)
    return {"seconds": seconds[1:], "tokens": [answer.tokens for answer in answers]}


def find_transformers(*words: object) -> list[object]:
    """Return the command by which transformers does what the words say; ends the program where no Python is named."""
    if "TRANSFORMERS_PYTHON" not in os.environ:
        sys.exit("TRANSFORMERS_PYTHON must name a Python with torch and transformers")
    return [os.environ["TRANSFORMERS_PYTHON"], "benchmarks/by_transformers.py", *words]


def ask(command: Iterable[object], question: dict | None = None, **environment: str) -> dict:
    """Return the answer of a side's process, the last line of its output; it reads the question as JSON on stdin."""
    words = list(map(str, command))
    settings: Any = {"cwd": ROOT, "env": os.environ | environment, "capture_output": True, "text": True}
    done = subprocess.run(words, input=json.dumps(question), check=False, **settings)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def sides(*words: object) -> dict[str, dict]:
    """What each side answers."""
    ours = [sys.executable, "-m", "benchmarks.models", *words]
    return {"tunix": ask(ours), "transformers": ask(find_transformers(*words))}


def main() -> None:
    import jax

    find_transformers()
    with tempfile.TemporaryDirectory() as name:
        large, small = Path(name) / "large", Path(name) / "small"
        for folder, words, dtype in ((large, LARGE, "bfloat16"), (small, SMALL, "float32")):
            folder.mkdir()
            write_model(folder, words, dtype)
        loads = {
            dtype: [sides("load", large, dtype) for _ in range(TURNS + 1)][1:]  # the first reads files from the disk
            for dtype in ("bfloat16", "float32")
        }
        versions = loads["float32"][0]["transformers"]["versions"]
        machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        print(f"machine       {machine}; jax {jax.__version__}; {versions}")
        size = (large / "model.safetensors").stat().st_size / 1e9
        for dtype, turns in loads.items():
            for side in turns[0]:
                seconds, cpu_s, whole_cpu_s = (
                    " ".join(f"{turn[side][key]:.2f}" for turn in turns) for key in ("seconds", "cpu_s", "whole_cpu_s")
                )
                peak = max(turn[side]["peak_gib"] for turn in turns)
                print(
                    f"load {size:.2f} GB to {dtype:8}  {side:12} {seconds} s, CPU {cpu_s} s, from the start of Python "
                    f"{whole_cpu_s} s; peak {peak:.2f} GiB resident"
                )
        for batch in (1, 16):
            turns = [sides("decode", small, batch, PROMPT, NEW, ROUNDS) for _ in range(TURNS)]
            rates = {
                side: [batch * NEW / seconds for turn in turns for seconds in turn[side]["seconds"]]
                for side in turns[0]
            }
            first, second = (statistics.median(rate) for rate in rates.values())
            same = np.mean(np.equal(*(np.array(turns[0][side]["tokens"]) for side in rates)))
            print(f"batch {batch:2}      tunix {first:.1f} tokens/s, transformers {second:.1f}: x {first / second:.2f}")
            print(
                f"              {same:.0%} of the tokens the same; rounds",
                *(np.round(rate, 1) for rate in rates.values()),
            )


if __name__ == "__main__":
    if sys.argv[1:]:
        answer = {"load": load, "decode": decode}[sys.argv[1]](*sys.argv[2:])
        status = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        print(json.dumps(answer | {"peak_gib": peak / 2**20}))
    else:
        main()
