"""A model learns from rewards alone what no data show it, and learns nothing from rewards that do not depend on it."""

import numpy as np
import pytest
from support.harness import metrics
from support.rollouts import ONE, TASK

import tunix

STEPS = 40


def learn(folder, rewards: str) -> np.ndarray:
    """Share of digits in the answers of each step; a model that has learnt nothing writes one in 26."""
    words = [f"training.max_steps={STEPS}", f"task.rewards={rewards}", "checkpoint.save_every_steps=null"]
    tunix.train([*TASK, *ONE, *words, "evaluation.every_steps=null", f"hydra.run.dir={folder}"])
    return np.array([line["reward_digits"] for line in metrics(folder)])


def test_rewards_alone_teach(tmp_path):
    shares = learn(tmp_path / "learns", "[support.own_reward:digits]")
    assert shares[:5].mean() < 0.15
    assert shares[-5:].mean() > 0.7


@pytest.mark.nightly
def test_control_rewards_teach_nothing(tmp_path):
    terms = "[support.own_reward:places,{function: support.own_reward:digits, weight: 0}]"
    shares = learn(tmp_path / "control", terms)
    assert shares[-5:].mean() < 0.25
