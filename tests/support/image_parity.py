"""What transformers says of images beside text: logits and gradients of a model that sees, tiny and random."""

from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from tunix.huggingface.weights import save_weights
from tunix.inference.pretrained import Pretrained
from tunix.models.vision import Images
from tunix.training.loss import next_token_loss

Arrays = dict[str, np.ndarray]


def check_logits_and_gradients(model: Pretrained, images: Arrays, expected: Arrays, folder: Path, atol: float) -> None:
    """Compare logits [B, T, V] of rows with `images`, and the gradient of each weight, relative to its largest number."""
    tokens = expected["image_tokens"]
    mask = np.ones(tokens.shape, np.float32)
    mask[:, -1] = 0
    fields = images | {
        "tokens": tokens, "targets": np.roll(tokens, -1, 1), "loss_mask": mask, "segment_ids": np.zeros_like(tokens),
        "positions": np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1)),
    }  # fmt: skip

    def logits(params, rows):
        seen = Images(*(rows[name] for name in ("images", "image_index", "image_grids")))
        return model.arch.module(params)(rows["tokens"], rows["positions"], rows["segment_ids"], seen)

    def objective(params, rows):
        return next_token_loss(model.arch.module(params), rows, chunk_size=24, z_loss=0.0).objective

    with jax.set_mesh(model.mesh):
        rows = {name: model.rows(leaf) for name, leaf in fields.items()}
        run = jax.jit(lambda params, rows: (logits(params, rows), jax.grad(objective)(params, rows)))
        said, gradient = run(model.params, rows)
    np.testing.assert_allclose(np.asarray(said)[:2], expected["image_logits"], atol=atol)
    save_weights(folder, gradient, model.cfg, model.arch.weights, "float32", shard_gb=5)
    found = load_file(folder / "model.safetensors")
    theirs = {name: value for name, value in expected.items() if name.startswith("image_gradient.")}
    assert len(theirs) == len(found)
    for name, value in theirs.items():
        ours = found[name.removeprefix("image_gradient.")]
        np.testing.assert_allclose(ours, value, atol=atol * max(1, np.abs(value).max()), err_msg=name)
