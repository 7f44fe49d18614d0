"""A run whose reward falls, or whose rollouts teach nothing, says so; noise is no fall."""

import numpy as np

from tunix.rl.rollouts import NUM_USELESS, WINDOW, RewardTrend, UselessRollouts

NOISE = np.random.default_rng(0).normal(0, 0.1, 6 * WINDOW)


def warnings(rewards, steps_per_rollout=1) -> dict[int, str]:
    trend = RewardTrend(steps_per_rollout)
    answers = {number: trend.add(float(reward)) for number, reward in enumerate(rewards, 1)}
    return {number: text for number, text in answers.items() if text}


def test_a_reward_that_falls_is_named_once_in_a_window():
    falling = warnings(0.5 - 0.002 * np.arange(6 * WINDOW) + NOISE)
    assert falling
    assert min(falling) >= 2 * WINDOW  # both windows are full
    assert min(np.diff(sorted(falling))) >= WINDOW
    assert "over the first 50 it was 0.4" in falling[min(falling)]
    assert "lower optimizer.learning_rate" in falling[min(falling)]
    assert min(warnings(1.0 - np.arange(40), steps_per_rollout=25)) == 4  # windows of two rollouts


def test_a_reward_that_stays_or_rises_is_quiet():
    assert not warnings(0.5 + NOISE)
    assert not warnings(0.002 * np.arange(6 * WINDOW) + NOISE)
    assert not warnings(np.full(6 * WINDOW, 0.25))


def test_rollouts_in_a_row_that_teach_nothing_are_named_once():
    cut, equal, useful = ({"truncated": a, "no_signal": b} for a, b in ((1.0, 0.5), (0.5, 1.0), (0.5, 0.5)))
    numbers = [cut] * (NUM_USELESS - 1) + [useful] + [cut] * 3 * NUM_USELESS + [equal] * 3 * NUM_USELESS
    useless = UselessRollouts(8)
    said = {number: warnings for number, each in enumerate(numbers, 1) if (warnings := useless.add(each))}
    assert [*said] == [2 * NUM_USELESS, 5 * NUM_USELESS]
    assert (
        "were cut at their longest length; raise sampling.max_new_tokens or task.max_turns=8"
        in said[2 * NUM_USELESS][0]
    )
    assert "those of the answers to each prompt were equal" in said[5 * NUM_USELESS][0]
