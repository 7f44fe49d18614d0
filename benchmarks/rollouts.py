"""Tokens per second of rollouts, beside what the machine allows and beside transformers.

`TRANSFORMERS_PYTHON=... python -m benchmarks.rollouts [BATCH ...]`, with a Python that has torch and transformers. Both
sides run in processes of their own, in turn, with the same random weights in float32 (0.1 billion parameters), and take
the likeliest token. A rate is that of the tokens after the first: prompts are not in it. The limit is the bytes of
weights and cache that a token reads, over the bandwidth of reading memory, measured by the same process just before.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.models import SMALL, ask, find_transformers, write_model

PROMPT, NEW, TURNS = 64, 32, 2
BATCHES = (1, 8, 16, 32, 128)


def best(function, rounds: int = 3) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
    times = []
    for _ in range(rounds + 1):
        start_time = time.perf_counter()
        function()
        times.append(time.perf_counter() - start_time)
    return min(times[1:])


def measure(folder: str, batch: str) -> dict:
    """Seconds of a token of all rows, its bytes, and bytes per second that this machine reads."""
    import jax
    import jax.numpy as jnp

    import tunix
    from tunix.inference.rollout import Request
    from tunix.inference.sampling import Sampling

    large = jnp.ones(1 << 27, jnp.float32)  # 0.5 GB: no cache has it
    read = jax.jit(jnp.sum)
    read_s = best(lambda: read(large).block_until_ready())
    model = tunix.load_pretrained(folder)
    tokens = (np.arange(int(batch) * PROMPT) * 7919 % 32000).reshape(-1, PROMPT).tolist()
    with jax.set_mesh(model.mesh):
        weights = model.sampler.gather(model.params)
        long, short = (
            best(lambda new=new: model.sampler.rollout(weights, Request(tokens), Sampling(new, temperature=0.0)), 2)
            for new in (NEW + 1, 1)
        )
        sampled = best(lambda: model.sampler.rollout(weights, Request(tokens), Sampling(NEW + 1)), 2)
    cfg = model.cfg
    slots = (
        2 * sum(cfg.list_windows(PROMPT + NEW // 2)) * cfg.num_kv_heads * cfg.head_dim * 4
    )  # half way, as they are filled
    return {
        "seconds": (long - short) / NEW,
        "drawn_seconds": (sampled - short) / NEW,
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) + int(batch) * slots,
        "bytes_per_s": large.nbytes / read_s,
    }


def sides(folder: Path, batch: int) -> dict[str, dict]:
    """What each side answers."""
    ours = [sys.executable, "-m", "benchmarks.rollouts", "measure", folder, batch]
    return {"tunix": ask(ours), "transformers": ask(find_transformers("rate", folder, batch, PROMPT, NEW))}


def main(batches: list[int]) -> None:
    import jax

    find_transformers()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, SMALL, "float32")
        for batch in batches:
            turns = [sides(folder, batch) for _ in range(TURNS)]
            ours, theirs = (
                statistics.median(batch / turn[side]["seconds"] for turn in turns) for side in ("tunix", "transformers")
            )
            sampled = statistics.median(batch / turn["tunix"]["drawn_seconds"] for turn in turns)
            shares = [
                turn["tunix"]["bytes"] / turn["tunix"]["bytes_per_s"] / turn["tunix"]["seconds"] for turn in turns
            ]
            ratios = [turn["transformers"]["seconds"] / turn["tunix"]["seconds"] for turn in turns]
            print(
                f"batch {batch:3}  {ours:7.1f} tokens/s ({sampled:.1f} at temperature 1), transformers {theirs:7.1f}: "
                f"x {statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)}); "
                f"{statistics.median(shares):.0%} of the bandwidth limit",
                flush=True,
            )
    versions = turns[0]["transformers"]["versions"]
    speed = statistics.median(turn["tunix"]["bytes_per_s"] for turn in turns) / 1e9
    print(f"{platform.machine()}, {os.cpu_count()} cores, reads {speed:.1f} GB/s; jax {jax.__version__}; {versions}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        main([int(word) for word in sys.argv[1:]] or list(BATCHES))
