"""Tokens per CPU second of answers beside transformers: `TRANSFORMERS_PYTHON=... python -m benchmarks.generation`.

Words: `batches=1,8,16,32,128`, `new=32` (mean tokens of an answer), `dtype=float32`, `rounds=2`. Answers are equally
long, or have long tails: lengths are log-normal (sigma 1), at most four times the mean. Both sides draw all answers of
a batch at one time, greedily, from the same files: a Llama with 35 million random parameters. transformers goes on
until the longest answer has ended. Each side runs in a process of its own, in turn, whose threads wait passively. CPU
time is that of all threads, prompts of 16 tokens included, compiling not: the less of two calls after one that is not
counted.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.arguments import read_values
from benchmarks.long_tails import MODEL, PROMPT, VOCAB
from benchmarks.models import ask, find_transformers, write_model

KINDS = "equal", "long-tailed"


def draw_lengths(kind: str, count: int, mean: int) -> list[int]:
    """Tokens of each answer; those with long tails have nearly the same sum."""
    if kind == "equal" or count == 1:
        return [mean] * count
    lengths = np.random.default_rng(0).lognormal(0.0, 1.0, count)
    return np.clip(lengths * mean / lengths.mean(), 1, 4 * mean).astype(int).tolist()


def measure_own(folder: str, question: dict) -> dict:
    """Return CPU seconds of each batch of answers."""
    import tunix
    from tunix.inference.sampling import Sampling

    model = tunix.load_pretrained(folder, question["dtype"])
    weights = model.sampler.gather(model.params)

    def answer(lengths: list[int], prompts: list[list[int]]) -> float:
        longest = max(lengths)
        start_time = time.process_time()
        engine = model.sampler.engine(weights, Sampling(longest, temperature=0.0), 0, PROMPT + longest, len(lengths))
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            engine.admit(prompt, [number], length)
        while engine.is_busy:
            for number, _ in engine.run():
                engine.release(number)
        return time.process_time() - start_time

    seconds = []
    for lengths, prompts in zip(question["lengths"], question["prompts"], strict=True):
        answer(lengths, prompts)
        seconds.append(min(answer(lengths, prompts) for _ in range(2)))
    return {"seconds": seconds}


def main(words: list[str]) -> None:
    given = read_values(words, batches="1,8,16,32,128", new="32", dtype="float32", rounds="2")
    rng = np.random.default_rng(1)
    cases = [(kind, int(batch)) for kind in KINDS for batch in given["batches"].split(",")]
    lengths = [draw_lengths(kind, batch, int(given["new"])) for kind, batch in cases]
    prompts = [rng.integers(3, VOCAB, (batch, PROMPT)).tolist() for _, batch in cases]
    question = {"lengths": lengths, "prompts": prompts, "dtype": given["dtype"]}
    with tempfile.TemporaryDirectory() as name:
        sides = {
            "transformers": find_transformers("lengths", name),
            "tunix": [sys.executable, "-m", "benchmarks.generation", "--own", name],
        }
        write_model(Path(name), [*MODEL, f"model.vocab_size={VOCAB}"], "float32")
        rounds = [
            {side: ask(command, question, OMP_WAIT_POLICY="PASSIVE")["seconds"] for side, command in sides.items()}
            for _ in range(int(given["rounds"]))
        ]
    print(f"{given['dtype']}, load {os.getloadavg()[0]:.0f}")
    print("| lengths | batch | tunix, tokens per CPU s | transformers | ratio, each round |")
    print("|---|---|---|---|---|")
    for case, ((kind, batch), tokens) in enumerate(zip(cases, map(sum, lengths), strict=True)):
        rates = {side: statistics.median(tokens / each[side][case] for each in rounds) for side in sides}
        ratios = ", ".join(f"{each['transformers'][case] / each['tunix'][case]:.2f}" for each in rounds)
        print(f"| {kind} | {batch} | {rates['tunix']:,.0f} | {rates['transformers']:,.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--own"]:
        print(json.dumps(measure_own(sys.argv[2], json.load(sys.stdin))))
    else:
        main(sys.argv[1:])
