"""Qwen 3 VL: what transformers says of images of several sizes in one row, and its gradients, on several meshes."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.harness import ROOT

import tunix
from tunix.huggingface.weights import save_weights
from tunix.inference.sampling import Sampling
from tunix.models.vision import Images, find_grid, find_positions
from tunix.training.loss import next_token_loss

SEEING = ROOT / "tests/models/parity/qwen3_vl"
MESHES = [((1,), ("fsdp",)), ((2, 2), ("fsdp", "tp")), ((2, 2), ("dp", "cp"))]


@pytest.fixture(scope="module")
def expected():
    return load_file(SEEING / "expected.safetensors")


@pytest.mark.parametrize("mesh_shape", MESHES, ids=["one", "fsdp-tp", "dp-cp"])
def test_logits_and_gradients_are_those_of_transformers(mesh_shape, expected, tmp_path):
    model = tunix.load_pretrained(SEEING, mesh_shape=mesh_shape)
    names = ("images", "image_index", "image_rows", "image_columns")

    def logits(params, rows):
        images = Images(*(rows[name] for name in names))
        return model.arch.module(params)(rows["tokens"], rows["positions"], rows["segment_ids"], images)

    def objective(params, rows):
        return next_token_loss(model.arch.module(params), rows, chunk_size=24, z_loss=0.0).objective

    tokens = expected["image_tokens"]
    mask = np.ones(tokens.shape, np.float32)
    mask[:, -1] = 0
    fields = {name: expected[name] for name in names} | {
        "tokens": tokens, "targets": np.roll(tokens, -1, 1), "loss_mask": mask, "segment_ids": np.zeros_like(tokens),
        "positions": np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1)),
    }  # fmt: skip
    with jax.set_mesh(model.mesh):
        rows = {name: model.rows(leaf) for name, leaf in fields.items()}
        run = jax.jit(lambda params, rows: (logits(params, rows), jax.grad(objective)(params, rows)))
        said, gradient = run(model.params, rows)
    np.testing.assert_allclose(np.asarray(said)[:2], expected["image_logits"], atol=1e-4)
    save_weights(tmp_path, gradient, model.cfg, model.arch.weights, "float32", shard_gb=5)
    found = load_file(tmp_path / "model.safetensors")
    theirs = {name: value for name, value in expected.items() if name.startswith("image_gradient.")}
    assert len(theirs) == len(found)
    for name, value in theirs.items():
        ours = found[name.removeprefix("image_gradient.")]
        np.testing.assert_allclose(ours, value, atol=1e-4 * max(1, np.abs(value).max()), err_msg=name)


def test_places_of_packed_patches():
    grid = find_grid(np.array([[2, 2, 0]]), np.array([[4, 2, 0]]), 14, 2)
    assert grid.image[0].tolist() == [0] * 8 + [1] * 4 + [3] * 2
    assert grid.end[0].tolist() == [8] * 8 + [12] * 4 + [14] * 2
    assert grid.row[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert grid.column[0].tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 0, 0]


def test_positions_are_those_of_transformers_also_behind_another_document(expected):
    index, rows, columns = (expected[name] for name in ("image_index", "image_rows", "image_columns"))
    num_patches = expected["images"].shape[1]
    places = np.tile(np.arange(24, dtype=np.int32), (2, 1))
    found = find_positions(places, index, rows, columns, num_patches, 2)
    np.testing.assert_array_equal(found, expected["image_positions"])
    # The second image alone, behind another document, has the positions that it has alone.
    places[0, 12:] -= 12
    alone = np.where(index[:1, 12:] >= 0, index[:1, 12:] - index[0, 12:].max() - 1 + 2, -1)
    packed = find_positions(places, index, rows, columns, num_patches, 2)[0, 12:]
    own = find_positions(places[:1, 12:], alone, rows[:1, 1:], columns[:1, 1:], num_patches, 2)[0]
    np.testing.assert_array_equal(packed, own)


def test_greedy_generation_behind_images(expected):
    """Token for token, beside a prompt of text alone and one with two images."""
    model = tunix.load_pretrained(SEEING)
    whole, tokens = expected["image_greedy"].tolist(), expected["image_tokens"]
    images = [
        Images(expected["images"][row, :count], expected["image_index"][row, :length],
               expected["image_rows"][row, :num], expected["image_columns"][row, :num])
        for row, count, length, num in ((1, 16, 19, 1), (0, 32, 24, 2))
    ]  # fmt: skip
    prompts = [whole[:19], tokens[0].tolist(), whole[:3]]
    for sampling in (
        Sampling(max_new_tokens=16, temperature=0.0),
        Sampling(max_new_tokens=16, temperature=0.0, guess=2),
    ):
        answers = model.sample(prompts, sampling, images=[*images, None])
        assert answers[0].tokens == whole[19:]
        assert answers[1].tokens[0] == expected["image_logits"][0, -1].argmax()


def test_rows_of_text_alone(expected):
    model = tunix.load_pretrained(SEEING)
    with jax.set_mesh(model.mesh):
        said = model.arch.module(model.params)(model.rows(expected["tokens"]))
    np.testing.assert_allclose(said, expected["logits"], atol=1e-4)
