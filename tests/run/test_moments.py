"""Moments that rest in 8 bits and in the host's memory: a run goes on with every digit, wherever they were saved."""

import pytest
from support.harness import ONE_LAYER, RUN, batch, metrics, program

import tunix


def numbers(folder) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(folder)]


@pytest.mark.nightly
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_run_goes_on_with_the_same_digits(offload, corpus, tmp_path, monkeypatch):
    """The state is saved from the host's memory, and the run that goes on keeps its moments there or on the device."""
    monkeypatch.chdir(tmp_path)
    words = [
        *RUN, "data=text", f"data.paths=['{corpus}']", "model.mesh_shape=[[1],[fsdp]]", "scheduler=constant",
        "distributed.allow_idle_devices=true", *ONE_LAYER, "optimizer.moments=int8",
        "training.offload=optimizer", "training.max_steps=4", "checkpoint.save_every_steps=2",
        "evaluation.every_steps=4", "evaluation.sample_tokens=0", "logging.sinks=[jsonl]",
    ]  # fmt: skip
    folder = tunix.train(words).folder
    before = numbers(folder)
    tunix.train([f"resume={folder / 'checkpoints' / '2'}", f"training.offload={offload}"])
    assert numbers(folder) == [*before, *before[2:]]
    assert before[2][1] != before[3][1]


@pytest.mark.nightly
def test_moments_of_8_bits_learn_as_whole_ones():
    """One batch learnt by heart: the losses stay together while they fall to a quarter."""
    words = ["model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", "scheduler=constant",
             "scheduler.warmup_ratio=0", "optimizer.learning_rate=1e-2"]  # fmt: skip
    whole, small = (
        [step["loss"] for step in program(*words, f"optimizer.moments={moments}").run(batch(), steps=40)]
        for moments in ("param", "int8")
    )
    assert whole[-1] < 0.5 * whole[0]
    assert small[-1] == pytest.approx(whole[-1], rel=0.05)
    assert small[20] == pytest.approx(whole[20], rel=0.05)
