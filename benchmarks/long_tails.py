"""Tokens per CPU second of rollouts whose answers are equally long, and of ones with a long tail.

`python -m benchmarks.long_tails [answers=64] [rows=8] [longest=256] [caches=slots,pages]`. The model has 35 million
random parameters in float32. Lengths are log-normal (sigma 1), as those of answers that reason; the equal ones have the
same mean. They are limits of the rows, so every sampler draws the same number of tokens. CPU time counts all threads of
the process, and compiling is not in it. Caches take turns in three rounds, of which the fastest counts.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.arguments import read_values
from benchmarks.models import write_model

MODEL = ["model.embed_dim=512", "model.mlp_dim=1536", "model.num_layers=8", "model.num_heads=8", "model.num_kv_heads=4"]
VOCAB, PROMPT = 8192, 16


def draw_lengths(kind: str, count: int, longest: int) -> list[int]:
    """Tokens of each answer; both kinds have about the same sum."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(longest / 10), 1.0, count), 4, longest).astype(int)
    lengths[rng.integers(count)] = longest
    return [int(lengths.mean())] * count if kind == "equal" else lengths.tolist()


def measure(model, weights, prompts: list[list[int]], lengths: list[int], rows: int, cache: str) -> tuple[float, int]:
    """Seconds of CPU time of all answers, and tokens that the loop draws one after the other."""
    from tunix.inference.sampling import NO_TOKEN, TOKENS_UNCHECKED, Sampling

    sampler, steps = model.sampler, 0
    engine = sampler.engine(weights, Sampling(max(lengths), cache=cache), 7, PROMPT + max(lengths), rows)
    decode = engine.programs.decode

    def decode_and_count(*arguments, **keywords):
        nonlocal steps
        cache, sampled = decode(*arguments, **keywords)
        count = int((np.asarray(sampled.tokens) != NO_TOKEN).sum(1).max())
        steps += -(-count // TOKENS_UNCHECKED) * TOKENS_UNCHECKED
        return cache, sampled

    engine.programs.decode = decode_and_count
    try:
        start_time = time.process_time()
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            engine.admit(prompt, [number], length)
        while engine.is_busy:
            for number, _ in engine.run():
                engine.release(number)
        return time.process_time() - start_time, steps
    finally:
        engine.programs.decode = decode


def main(words: list[str]) -> None:
    import jax

    import tunix

    given = read_values(words, answers="64", rows="8", longest="256", caches="slots")
    count, rows, longest = (int(given[name]) for name in ("answers", "rows", "longest"))
    rng = np.random.default_rng(1)
    prompts = rng.integers(3, VOCAB, (count, PROMPT)).tolist()
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), [*MODEL, f"model.vocab_size={VOCAB}"], "float32")
        model = tunix.load_pretrained(name)
    with jax.set_mesh(model.mesh):
        weights = model.sampler.gather(model.params)
    for kind in ("equal", "long-tailed"):
        lengths = draw_lengths(kind, count, longest)
        caches = given["caches"].split(",")
        rounds = [[measure(model, weights, prompts, lengths, rows, cache) for cache in caches] for _ in range(3)]
        label = f"{kind:11}  {count} answers of mean {np.mean(lengths):.0f}, at most {max(lengths)}, on {rows} rows"
        for cache, measured in zip(caches, zip(*rounds, strict=True), strict=True):
            (seconds, steps), load = min(measured), os.getloadavg()[0]
            rate = sum(lengths) / seconds
            print(f"{label}, {cache}: {steps:,} steps, {rate:,.0f} tokens per CPU second (load {load:.0f})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
