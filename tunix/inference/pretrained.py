"""A trained model ready for use, out of a run's folder or Hugging Face's files: `tunix.load_pretrained`."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, PartitionSpec, reshard
from tokenizers import Tokenizer

from tunix.base.errors import UserError
from tunix.cli import architecture, compose
from tunix.config import Model
from tunix.hf.hub import ABOUT, WEIGHTS, find
from tunix.hf.weights import load_weights
from tunix.inference.sampling import Answer, Sampler, Sampling
from tunix.models.lora import merge
from tunix.run.run_folder import FILES, TOKENIZER
from tunix.sharding.arrays import local_rows, to_global
from tunix.sharding.layout import STRATEGIES, Layout
from tunix.sharding.mesh import device_mesh
from tunix.sharding.mesh_shape import ONE_DEVICE, data_shards, unsplit_dims
from tunix.tokenizer.vocabulary import Vocabulary, load, read_backend
from tunix.training.state import Architecture, abstract_params, describe

Params = dict[str, Any]


@dataclass(frozen=True)
class Pretrained:
    """Architecture, weights and tokenizer. Calling it gives logits."""

    cfg: Model
    mesh: Mesh
    layout: Layout
    arch: Architecture
    params: Params
    files: Path | None  # Hugging Face's files about it: where it comes from, or what the run began with
    tokenizer: Tokenizer | None
    tokenizer_files: Path  # of a run, its own folder of them

    def __call__(self, tokens: Any) -> jax.Array:
        """[B, T] int32 -> logits [B, T, V] float32."""
        with jax.set_mesh(self.mesh):
            return self._logits(self.params, self.rows(np.asarray(tokens, np.int32)), len(tokens))

    def rows(self, tokens: np.ndarray) -> jax.Array:
        """[B, ...] on the mesh, with rows of zeros added until the data shards divide them."""
        shards = data_shards(self.mesh.shape)
        padded = np.zeros((-(-len(tokens) // shards) * shards, *tokens.shape[1:]), tokens.dtype)
        padded[: len(tokens)] = tokens
        mine = padded[local_rows(self.mesh, len(padded))]
        return to_global({"rows": mine[None]}, self.mesh)["rows"][0]

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """Of a run: the tokenizer as it was trained with. Hugging Face's files say for themselves what it needs."""
        return None if self.tokenizer_files == self.files else load(str(self.tokenizer_files))

    @cached_property
    def sampler(self) -> Sampler:
        with jax.set_mesh(self.mesh):
            return Sampler(self.arch, self.params, self.cfg.context_length, self.cfg.num_layers, self.rows)

    def sample(self, prompts: list[list[int]], how: Sampling, seed: int = 0) -> list[Answer]:
        """An answer to each prompt of token ids."""
        with jax.set_mesh(self.mesh):
            return self.sampler(prompts, how, seed)

    @cached_property
    def _logits(self):
        def logits(params, tokens, num_rows):
            return reshard(self.arch.module(params)(tokens), PartitionSpec())[:num_rows]

        return jax.jit(logits, static_argnums=2)

    def merged(self) -> "Pretrained":
        """The same model with its low-rank updates, if it has any, added to the matrices."""
        if not self.cfg.lora.rank:
            return self
        cfg = self.cfg.model_copy(update={"lora": self.cfg.lora.model_copy(update={"rank": 0, "quantize_base": None})})
        with jax.set_mesh(self.mesh):
            params = jax.jit(lambda params: merge(params, self.arch.weights, self.cfg.lora, self.layout))(self.params)
            return replace(self, cfg=cfg, arch=describe(cfg, self.layout), params=params)


def load_pretrained(source: str | Path, dtype: str = "float32", mesh_shape: Any = ONE_DEVICE) -> Pretrained:
    """The model of a run's folder (or RUN_DIR/checkpoints/STEP), of a folder of Hugging Face's, or of an ID there.

    Weights and products are of `dtype`; weights are split over the tp axis of `mesh_shape` and whole on its others.

    Raises:
        UserError: a source that is neither, or that is not understood: the message names what.
    """
    run = compose.find_run(str(source))
    folder = run[0] if run else find(str(source), key="checkpoint")
    cfg = architecture.trained_model(folder, mesh_shape)
    mesh = device_mesh(cfg.mesh_shape, cfg.dims, allow_idle=True)
    unsplit = frozenset(unsplit_dims(cfg.dims, mesh.shape))
    layout = Layout(STRATEGIES["no_shard"], unsplit, dtype, dtype, "float32")
    with jax.set_mesh(mesh):
        arch = describe(cfg, layout)
        params, tokenizer = load_params(str(source), cfg, arch, layout, mesh)
    files = folder / FILES if run else folder
    tokenizer_files = folder / TOKENIZER if run else folder
    return Pretrained(cfg, mesh, layout, arch, params, files if files.is_dir() else None, tokenizer, tokenizer_files)


def load_params(
    source: str, cfg: Model, arch: Architecture, layout: Layout, mesh: Mesh
) -> tuple[Params, Tokenizer | None]:
    """Parameters as `layout` has them at rest, and the tokenizer, of a run or of Hugging Face's files."""
    if run := compose.find_run(source):
        return _restored(run[0] / "checkpoints", run[1], abstract_params(arch, mesh, layout))
    folder = find(source, ABOUT + WEIGHTS, key="checkpoint")
    return load_weights(folder, cfg, arch.weights, layout, mesh), read_backend(folder)


def _restored(checkpoints: Path, step: int | None, abstract: Params) -> tuple[Params, Tokenizer]:
    """Parameters and tokenizer of a checkpoint; None is the newest step."""
    steps = sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdigit())
    if not steps or step not in (None, *steps):
        asked = "no checkpoint yet" if step is None else f"no checkpoint of step {step}"
        raise UserError(f"checkpoint: {checkpoints} has {asked}; it has {', '.join(map(str, steps)) or 'none'}")
    folder = (checkpoints / str(step or steps[-1])).absolute()
    tree = {"params": abstract}
    arguments = ocp.args.PyTreeRestore(
        tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        params = reader.restore(folder / "state", args=arguments)["params"]
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        tokenizer = reader.restore(folder / "tokenizer", args=ocp.args.JsonRestore())
    return params, Tokenizer.from_str(json.dumps(tokenizer))
