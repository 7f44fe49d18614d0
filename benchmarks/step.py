"""What surrounds the step, in one run: `make bench`.

Step time of `tunix.train` beside a loop written by hand for the same decoder and the same batches, time to compile at
4 and 32 layers, time that the host waits for data and spends on metrics, and how long a checkpoint stalls the loop.
"""

import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import jax
from support import harness

import tunix
from benchmarks import minimal
from tunix.checkpoints.checkpoint import Checkpoints
from tunix.config.compose import compose
from tunix.data.batches import TrainBatches
from tunix.data.dataset import load_corpus
from tunix.run.metrics import Metrics
from tunix.training.choices import build_mesh

STEPS, ROUNDS, WARMUP = 60, 3, 10
QUIET = ["evaluation.sample_tokens=0", "evaluation.num_sequences=16", "evaluation.every_steps=null"]
# A run that keeps programs lets this process read them again, and then nothing would be compiled a second time.
WORDS = [*QUIET, "model=tiny", "mesh_shape=auto", "scheduler=constant", "training.compile_cache_gib=0"]
LAYERS = 4, 32


class Stopwatch:
    """Adds up the seconds spent in a method of a class."""

    def __init__(self, kind: type, name: str):
        self.calls: list[float] = []
        setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, method):
        def timed(*args, **kwargs):
            start_time = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.calls.append(time.perf_counter() - start_time)

        return timed


def lines(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "split" not in record]


def by_tunix() -> tuple[float, float]:
    """Median step and median wait for data, in seconds."""
    words = [*WORDS, f"training.max_steps={STEPS}", "checkpoint.save_every_steps=null"]
    records = lines(tunix.train(words).folder)[WARMUP:]
    return tuple(statistics.median(record[key] for record in records) for key in ("step_time_s", "data_wait_s"))


def by_hand(batches) -> float:
    """Median step in seconds; each loss is read while the next step runs, as tunix does."""
    tx, step = minimal.make_step(1.5e-2)
    params = minimal.init(jax.random.key(0))
    state, before, times, clock = (params, tx.init(params)), None, [], time.perf_counter()
    for batch in batches:
        state, loss = step(state, batch)
        if before is not None:
            float(before)
        before = loss
        times.append(time.perf_counter() - clock)
        clock = time.perf_counter()
    return statistics.median(times[WARMUP:])


def compile_s(num_layers: int) -> float:
    """Trace, lower and compile the train step of a model with so many layers."""
    built = harness.program(f"model.num_layers={num_layers}", "model.global_every=6")
    data = harness.batch(jax.device_count())
    start_time = time.perf_counter()
    built.compile(data)
    return time.perf_counter() - start_time


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        measure()


def measure() -> None:
    cfg = compose(WORDS).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        data = TrainBatches(load_corpus(cfg).train, cfg, cfg.training, mesh)
        host = [jax.tree.map(lambda x: x[0], data.read(n * data.batch_size)) for n in range(STEPS)]

    writing = Stopwatch(Metrics, "write")
    saving = Stopwatch(Checkpoints, "save")
    tunix_s, hand_s, wait_s = [], [], []
    for _ in range(ROUNDS):  # in turns: the machine's mood is the same for both
        step, wait = by_tunix()
        tunix_s.append(step)
        wait_s.append(wait)
        hand_s.append(by_hand(host))
    metrics_s = sum(writing.calls) / (ROUNDS * STEPS)
    saving.calls.clear()
    tunix.train([*WORDS, f"training.max_steps={STEPS}", "checkpoint.save_every_steps=10"])
    step_s = statistics.median(tunix_s)
    short, long = (statistics.median(compile_s(layers) for _ in range(ROUNDS)) for layers in LAYERS)

    median = statistics.median
    hand, wait, stall = median(hand_s), median(wait_s), median(saving.calls)
    size = sum(p.size for p in jax.tree.leaves(jax.eval_shape(minimal.init, jax.random.key(0))))
    table = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}; "
        f"Python {platform.python_version()}, jax {jax.__version__}",
        "work": f"{size:,} parameters, {data.batch_size} x {cfg.training.seq_len} tokens a step; "
        f"medians of {ROUNDS} rounds of {STEPS} steps",
        "step": f"{step_s * 1e3:.1f} ms, by hand {hand * 1e3:.1f} ms, ratio {step_s / hand:.3f} "
        f"(rounds {', '.join(f'{a / b:.3f}' for a, b in zip(tunix_s, hand_s, strict=True))})",
        "wait for data": f"{wait * 1e3:.2f} ms a step, {wait / step_s:.2%} of it",
        "writing metrics": f"{metrics_s * 1e3:.2f} ms a step, {metrics_s / step_s:.2%} of it",
        "checkpoint": f"stalls the loop {stall * 1e3:.0f} ms, {stall / step_s:.2f} steps ({len(saving.calls)} saves)",
        "compiling": f"{LAYERS[0]} layers {short:.2f} s, {LAYERS[1]} layers {long:.2f} s, ratio {long / short:.2f}",
    }
    print("\n" + "\n".join(f"{name:16} {value}" for name, value in table.items()))


if __name__ == "__main__":
    main()
