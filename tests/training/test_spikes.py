"""A spike is skipped on the devices: its numbers are those made by hand, and the loss recovers."""

import jax
import numpy as np
import pytest
from support.harness import ONE_LAYER, batch, program

from tunix.sharding.arrays import to_global
from tunix.training.loss import RESERVED
from tunix.training.optimizer import WATCHED, SpikeGuard

SMALLER = [
    "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", *ONE_LAYER,
]  # fmt: skip
SGD = [
    "optimizer=sgd", "optimizer.momentum=0", "optimizer.learning_rate=0.5", "scheduler=constant",
    "scheduler.warmup_ratio=0", "training.max_grad_norm=null",
]  # fmt: skip


def garbage() -> dict[str, np.ndarray]:
    """A batch with one target, which no other batch has."""
    leaves = batch()
    return leaves | {"targets": leaves["targets"] * 0 + 319}


def clean() -> dict[str, np.ndarray]:
    """A batch without the token of `garbage`."""
    leaves = batch()
    return leaves | {name: leaves[name] % 300 for name in ("tokens", "targets")}


def train(steps_of: dict[str, range], *words: str) -> dict[str, list[dict[str, float]]]:
    """Reported numbers of 24 steps of several runs; the steps in the range of a run get garbage."""
    trained, found = program(*SMALLER, *SGD, *words), {}
    start = jax.tree.map(np.asarray, trained.state)
    with jax.set_mesh(trained.mesh):
        step = trained.compile(clean())
        good, spoiled = to_global(clean(), trained.mesh), to_global(garbage(), trained.mesh)
        for name, bad in steps_of.items():
            state, found[name] = jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), start, trained.state), []
            for number in range(1, 25):
                state, metrics = step(state, spoiled if number in bad else good)
                found[name].append({key: float(value) for key, value in metrics.items()})
        trained.state = state
    return found


@pytest.mark.nightly
def test_with_the_guard_the_loss_recovers():
    spike = range(13, 16)
    with_guard = train({"calm": range(0), "spike": spike}, "training.spike_deviations=8", "training.spike_window=8")
    calm, guarded = with_guard["calm"], with_guard["spike"]
    plain = train({"spike": spike})["spike"]
    assert [line["spikes"] for line in guarded[11:17]] == [0, 1, 2, 3, 0, 0]
    assert guarded[-1]["spikes_total"] == 3
    assert guarded[12]["grad_norm_deviations"] > 8
    # Three updates are missing, so step 24 stands where step 21 stands without the spikes, bit by bit.
    assert guarded[-1]["loss"] == calm[-4]["loss"]
    assert max(line["loss"] for line in guarded[15:]) < 4.1
    assert max(line["loss"] for line in plain[15:]) > 10  # without the guard the run is thrown back
    assert plain[-1]["loss"] > guarded[-1]["loss"] + 0.5


def test_the_window_is_the_one_made_by_hand():
    """Against numpy, step by step: a ring that has gone round, spikes, and numbers that are not finite."""
    rng, guard = np.random.default_rng(0), SpikeGuard(3.0, 6)
    numbers = {name: rng.normal(5, 0.1, 40).astype(np.float32) for name in ("loss", "grad_norm")}
    numbers["loss"][[10, 20, 21]], numbers["grad_norm"][30], numbers["loss"][22] = 9, 40, np.nan
    spikes, check = guard.start()["spikes"], jax.jit(guard.check)
    kept, row, rows = [], 0, []
    for n in range(40):
        values = {name: series[n] for name, series in numbers.items()}
        finite = np.isfinite(values["loss"])
        is_spike, new, reported = check(spikes, values, finite)
        spikes, expected = new["spikes"], False
        for name, value in values.items():
            last = [each[name] for each in kept[-6:]]
            if len(last) < 3:
                assert np.isnan(reported[f"{name}_deviations"])
                continue
            deviations = (value - np.mean(last)) / np.std(last)
            if finite:
                assert reported[f"{name}_deviations"] == pytest.approx(deviations, rel=1e-3, abs=1e-3)
            expected |= bool(finite and deviations > 3)
        row = row + expected if expected or not finite else 0
        rows.append(row)
        assert (bool(is_spike), int(reported["spikes"])) == (expected, row)
        if finite and not expected:
            kept.append(values)
    assert {10, 20, 21, 30} <= {n for n, row in enumerate(rows) if row}
    assert rows[22] == rows[21]  # a step that is not finite ends no row


def test_a_loss_of_ones_own_takes_no_name_of_the_guard():
    """The guard's numbers stood in the place of the user's, without a word."""
    guard = SpikeGuard(8.0, 4)
    _, _, reported = guard.check(guard.start()["spikes"], dict.fromkeys(WATCHED, np.float32(0)), np.True_)
    assert reported.keys() <= RESERVED
