"""A run whose reward falls says so, and noise is no fall."""

import numpy as np

from tunix.rl.rollouts import WINDOW, RewardTrend

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
