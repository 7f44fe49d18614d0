"""Rotations are those that transformers computes for the same keys."""

import math

import numpy as np
import pytest

from tunix.config import Model
from tunix.config.compose import compose
from tunix.models.rope import layer_rope


def make_model(scaling: str, *words: str) -> Model:
    keys = "model.head_dim=16", "model.rope_theta=1000", "model.local_rope_theta=null", "model.global_every=1"
    return compose([*keys, "model.sliding_window=null", f"++model.rope_scaling={{{scaling}}}", *words]).config.model


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (2.0, 2.0)], ids=["between them mixed", "as in Llama 4"])
def test_slow_rotations_of_llama_3_are_divided(low, high):
    words = f"name: llama3, factor: 4, original_context: 64, low_freq_factor: {low}, high_freq_factor: {high}"
    rope = layer_rope(make_model(words), [0], 64)
    plain = 1000.0 ** -(np.arange(0, 16, 2) / 16)
    length = 2 * math.pi / plain
    expected = np.where(length > 64 / low, plain / 4, plain)
    if high > low:
        smooth = (64 / length - low) / (high - low)
        between = (length >= 64 / high) & (length <= 64 / low)
        expected = np.where(between, (1 - smooth) * plain / 4 + smooth * plain, expected)
    assert 1 < (expected < plain).sum() < 7
    np.testing.assert_allclose(rope.frequencies[0], expected, rtol=1e-6)


def test_layers_without_positions_keep_the_length_of_their_vectors():
    words = "name: yarn, factor: 4, original_context: 16, beta_fast: 32, beta_slow: 1, attention_factor: null"
    model = make_model(f"{words}, truncate: true", "model.num_layers=4", "model.unrotated_every=2")
    rope = layer_rope(model, range(4), 64)
    magnitude = 0.1 * math.log(4) + 1
    np.testing.assert_allclose(rope.magnitude, [magnitude, 1, magnitude, 1], rtol=1e-6)
    assert rope.frequencies.any(1).tolist() == rope.rotates.tolist() == [True, False, True, False]
