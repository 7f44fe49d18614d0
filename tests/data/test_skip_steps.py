"""Samples of each step where some are left out: the rule counted out by hand, from any step on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunix.base.errors import UserError
from tunix.checkpoints.checkpoint import check_same
from tunix.config.compose import compose
from tunix.config.task import Cycle
from tunix.config.training import read_steps
from tunix.data.batches import BEGINNING, DataSchedule, Position
from tunix.training.train_spec import last_step


def by_hand(skip_steps: list[str], samples: int, num_steps: int) -> tuple[list[int], list[int]]:
    """First sample of each step, and the samples that are left out."""
    firsts, left_out, next_sample = [], [], 0
    for step in range(1, num_steps + 1):
        for text in skip_steps:
            if read_steps(text)[0] == step:
                count = len(read_steps(text)) * samples
                left_out += range(next_sample, next_sample + count)
                next_sample += count
        firsts.append(next_sample)
        next_sample += samples
    return firsts, left_out


@given(
    bounds=st.lists(st.integers(1, 40), max_size=6, unique=True), samples=st.integers(1, 5), start=st.integers(0, 40)
)
def test_a_course_is_the_one_counted_by_hand_and_goes_on_from_any_step(bounds, samples, start):
    bounds = sorted(bounds)
    skip_steps = [f"{a}:{b}" for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
    firsts, left_out = by_hand(skip_steps, samples, 60)
    whole = DataSchedule(Position(0, 0, "", ""), Cycle(samples, 1), skip_steps)
    saved = Position(start, whole.next_sample(start), "", "", left_out=whole.left_out(start))
    for data_schedule in (whole, DataSchedule(saved, Cycle(samples, 1), skip_steps)):
        steps = range(data_schedule.start.step + 1, 61)
        assert [data_schedule.samples(step).start for step in steps] == firsts[data_schedule.start.step :]
        assert [n for first, end in data_schedule.left_out(60) for n in range(first, end)] == left_out
    assert saved.num_samples == start * samples


def test_a_rollout_is_left_out_as_one():
    data_schedule = DataSchedule(Position(0, 0, "", ""), Cycle(8, 2), ["5:6"])
    assert [data_schedule.samples(step).start for step in range(1, 9)] == [0, 0, 8, 8, 24, 24, 32, 32]
    assert data_schedule.left_out(4) == []
    assert data_schedule.left_out(5) == [[16, 24]]
    assert [data_schedule.last_step_within(count) for count in (7, 8, 15, 16)] == [0, 2, 2, 4]


def test_samples_that_are_left_out_bring_the_end_of_an_epoch_nearer():
    keys = ["training.max_steps=null", "training.num_epochs=2", "training.skip_steps=[3:4,30]"]
    training = compose(keys).config.training
    after = Position(5, 28, "", "", left_out=[[8, 16]])
    assert (
        last_step(training, DataSchedule(BEGINNING, Cycle(4, 1), training.skip_steps), 100, 30) == 13
    )  # of 15 x 4 samples
    assert last_step(training, DataSchedule(after, Cycle(4, 1), training.skip_steps), 100, 30) == 13
    training = compose(
        ["training.max_steps=null", "training.max_tokens=1000", "training.skip_steps=[3:4]"]
    ).config.training
    assert last_step(training, DataSchedule(after, Cycle(4, 1), training.skip_steps), 100, 30) == 10


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[0:3]", r"training.skip_steps.0=0:3: expected a step, or a range of steps FIRST:LAST"),
        ("[9:8]", r"training.skip_steps.0=9:8: expected a step"),
        ("[5:9,7]", r"training.skip_steps=5:9,7: the range from 7 begins before the one to 9 ends"),
    ],
)
def test_ranges_that_mean_nothing_are_refused(value, message):
    with pytest.raises(UserError, match=message):
        compose([f"training.skip_steps={value}"])


def test_steps_that_a_checkpoint_has_learnt_from_are_not_left_out():
    saved, position = compose([]).config.model_dump(mode="json", by_alias=True), Position(3, 24, "data", "tokenizer")
    check_same(compose(["training.skip_steps=[4:5]"]).config, saved, position, position)
    with pytest.raises(UserError, match=r"skip_steps=3:5 begins before step 4, .*, or training.skip_steps=\[4:5\]"):
        check_same(compose(["training.skip_steps=[3:5]"]).config, saved, position, position)
    again = compose(["training.skip_steps=[3:5]"]).config  # of a run that has left them out
    check_same(again, again.model_dump(mode="json", by_alias=True), position, position)
