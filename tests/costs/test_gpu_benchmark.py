"""`python -m benchmarks.gpu` at tiny sizes: each part runs here, so that it works the first time on a GPU.

And `make bench`, which no other test starts, and words that programs of this folder do not know.
"""

import sys

import jax
import pytest
from support.harness import ONE_LAYER, SMALL

from benchmarks import (
    answer_rows,
    chaos,
    faults,
    fuzz,
    generation,
    gpu,
    gpu_blocks,
    gpu_kernels,
    long_tails,
    minimal,
    published,
    rollout_prediction,
    scaling,
    soak,
    staleness,
    step,
)
from tunix.checkpoints.checkpoint import Checkpoints
from tunix.config.compose import compose
from tunix.models.kernels import EXPERT_BLOCKS, FLASH_BLOCKS
from tunix.run.metrics import Metrics


@pytest.mark.parametrize("name", gpu.CASES)
def test_each_case_is_a_config_that_transformers_can_have(name):
    cfg = compose(gpu.words_of(name, tiny=False)).config
    question = gpu.peer_question(name, tiny=False)
    assert question["length"] == cfg.training.seq_len
    assert question["config"]["hidden_size"] == cfg.model.embed_dim
    assert compose(gpu.words_of(name, tiny=True)).config.model.embed_dim == 32


@pytest.mark.nightly
def test_the_parts_and_the_table():
    compared = gpu_kernels.compare_all(tiny=True)
    # Experts, with their rounds too, groups, and attention.
    assert [row["kernel"] for row in compared["rows"]] == ["pages", *["xla"] * 4]
    assert all(row["difference"] < 0.05 for row in compared["rows"])
    measured = gpu.step("gemma3_270m", tiny=True)
    assert 4 < measured["loss"] < 8
    steps = {"gemma3_270m": measured, "llama3_8b": {"error": "does not fit: 90 GiB of 73", "predicted_gib": 90.0}}
    table = gpu._steps(steps, {"gemma3_270m": {"tokens_per_s": measured["tokens_per_s"] / 2}})
    assert len({line.count("|") for line in table}) == 1
    assert table[2].endswith("| 2.00 |")
    assert "| does not fit: 90 GiB of 73 |" in table[3]
    assert len({line.count("|") for line in gpu._kernels(compared)[2:]}) == 1
    drawn = gpu.rollout("slots", tiny=True)
    assert drawn["tokens_per_s"] > 0
    assert "| out of memory | - | - |" in gpu._rollouts({"slots": drawn, "pages": {"error": "out of memory"}})[3]


def test_a_part_that_fails_is_a_row_with_its_reason(tmp_path):
    parts = gpu.Parts(tiny=True, cache=str(tmp_path))
    assert parts.ask([sys.executable, "-c", "raise ValueError('no')"], 60) == {"error": "ValueError: no"}
    parts.end_time -= gpu.LIMIT_S
    assert parts.own("kernel") == {"error": "no time left"}


@pytest.mark.nightly
def test_blocks_of_kernels_are_compared(monkeypatch):
    """Interpreted kernels with two blocks each; on a GPU there are 33 and more."""
    monkeypatch.setattr(gpu_blocks, "FLASH_SIZES", [(64, 64, 4)])
    monkeypatch.setattr(gpu_blocks, "PRODUCT_SIZES", [(32, 32, 32, 4)])
    monkeypatch.setattr(gpu_blocks, "STAGES", (2,))
    monkeypatch.setattr(gpu_kernels, "STEPS", 1)
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])):
        attention = gpu_blocks.attention_kernels(64, (1, 128, 2, 1), FLASH_BLOCKS["H100"][64], interpret=True)
        experts = gpu_blocks.expert_kernels((2, 32, 1, 64, 64), EXPERT_BLOCKS["H100"], interpret=True)
        lines = list(gpu_blocks.measure([*attention, *experts]))
    assert len(lines) == 3 + 7
    assert lines[0].startswith("64 forward: (")
    assert all("ms" in line.split("|")[1] for line in lines)


@pytest.mark.nightly
def test_the_loop_around_the_step(corpus, monkeypatch, capsys):
    for kind, name in ((Metrics, "write"), (Checkpoints, "save")):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # comes back
    for module, values in (
        (minimal, {"V": 320, "D": 32, "F": 64, "L": 1, "N": 2, "H": 8, "WINDOW": 8}),
        (step, {"STEPS": 10, "ROUNDS": 1, "WARMUP": 2, "LAYERS": (1, 2)}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    words = [*step.WORDS, *SMALL, *ONE_LAYER, "data=text", f"data.paths=['{corpus}']"]
    monkeypatch.setattr(step, "WORDS", words)
    step.main()
    table = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[-7:])
    assert [*table] == ["machine", "work", "step", "wait", "writing", "checkpoint", "compiling"]
    assert table["checkpoint"].endswith("(1 saves)")
    assert "of 1 rounds of 10 steps" in table["work"]


PROGRAMS = [chaos, faults, fuzz, generation, long_tails, published, rollout_prediction, scaling, soak]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_word_that_a_measurement_does_not_know_is_refused(program):
    """It would measure something else, for an hour: `rollout_prediction cache_dtypes=int8` printed bfloat16's numbers."""
    with pytest.raises(SystemExit, match=r"no such word: countt; there are \w+"):
        program.main(["countt" if program in (faults, published, scaling) else "countt=3"])


@pytest.mark.parametrize(("program", "steps"), [(staleness, 10), (answer_rows, 2)])
def test_steps_of_which_none_counts_are_refused_before_they_are_trained(program, steps):
    with pytest.raises(SystemExit, match=f"steps={steps}: the first .* do not count; give more"):
        program.main([f"steps={steps}"])
