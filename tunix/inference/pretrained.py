"""A trained model ready for use, out of a run's folder or Hugging Face's files: `tunix.load_pretrained`."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, reshard
from tokenizers import Tokenizer

from tunix.base.digests import refuse_damaged
from tunix.base.disk import list_numbers
from tunix.base.errors import UserError
from tunix.cli import architecture
from tunix.cli.runs import find_run
from tunix.config import Model
from tunix.hf.adapter import put_updates
from tunix.hf.adapter_config import read_adapter
from tunix.hf.hub import ABOUT, WEIGHTS, find
from tunix.hf.weights import CHANGED, load_weights
from tunix.inference.answers import Answer
from tunix.inference.drawing import Sampling
from tunix.inference.requests import Request
from tunix.inference.sampling import Sampler
from tunix.models.lora import merge
from tunix.processes import peers
from tunix.run.integrity import refuse_damaged_checkpoint
from tunix.run.items import find_parts, read_json, read_state
from tunix.run.run_folder import FILES, TOKENIZER
from tunix.sharding.arrays import rows_to_global
from tunix.sharding.layout import Layout
from tunix.sharding.mesh import device_mesh, whole_sequences
from tunix.sharding.mesh_shape import ONE_DEVICE, unsplit_dims
from tunix.sharding.placement import STRATEGIES
from tunix.tokenizer.vocabulary import Vocabulary, load_vocabulary, read_backend
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
        """Return logits [B, T, V] float32 of tokens [B, T] int32."""
        with jax.set_mesh(self.mesh):
            return self._logits(self.params, self.rows(np.asarray(tokens, np.int32)), len(tokens))

    def rows(self, tokens: np.ndarray) -> jax.Array:
        """Return [B, ...] on the mesh, with rows of zeros added until the data shards divide them."""
        return rows_to_global(tokens, self.mesh)

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer as a run trained with it: with its marks and template; None for Hugging Face's files."""
        return None if self.tokenizer_files == self.files else load_vocabulary(str(self.tokenizer_files))

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.arch, self.cfg.context_length, self.mesh)

    def sample(
        self,
        prompts: list[list[int]],
        how: Sampling,
        seed: int = 0,
        first_row: int = 0,
        answers_per_prompt: int = 1,
        prompts_at_once: int | None = None,
    ) -> list[Answer]:
        """Return answers to prompts of token ids; see `Sampler.rollout`."""
        with jax.set_mesh(self.mesh):
            request = Request(prompts, answers_per_prompt, seed, first_row)
            return self.sampler.rollout(self.params, request, how, prompts_at_once)

    @cached_property
    def _logits(self):
        def logits(params, tokens, num_rows):
            return reshard(self.arch.module(params)(tokens), PartitionSpec())[:num_rows]

        return jax.jit(logits, static_argnums=2)

    def merged(self) -> "Pretrained":
        """Return the model with its low-rank updates, if it has any, added to the matrices."""
        if not self.cfg.lora.rank:
            return self
        cfg = self.cfg.model_copy(update={"lora": self.cfg.lora.model_copy(update={"rank": 0, "quantize_base": None})})
        with jax.set_mesh(self.mesh):
            params = jax.jit(lambda params: merge(params, self.arch.weights, self.cfg.lora, self.layout))(self.params)
            return replace(self, cfg=cfg, arch=describe(cfg, self.layout), params=params)


def load_pretrained(
    source: str | Path,
    dtype: str = "float32",
    mesh_shape: Any = None,
    weights: str = "trained",
    strategy: str = "no_shard",
    family: str | None = None,
    adapter: str | Path | None = None,
) -> Pretrained:
    """Load the model of a run's folder (or RUN_DIR/checkpoints/STEP), of a folder of Hugging Face's, or of an ID there.

    Weights and products are of `dtype`; weights are split over the tp axis of `mesh_shape`, and over fsdp between uses
    if the `strategy` says so. Axes of `mesh_shape` that split the tokens of a sequence split sequences instead: a text
    is of any length, and grows by one token at a time. Without a mesh, it is one device; of several processes, which
    all call this, fsdp over all of their devices. `weights` names a copy of the parameters that the run has kept, like
    `ema`, or those that it has trained. `family` is the dotted path of a family of one's own, of a folder of Hugging
    Face's, and `adapter` a folder of low-rank updates for such a folder's weights.

    Raises:
        UserError: the source is neither a run nor a folder or an ID of Hugging Face's; one of its files is missing,
            damaged, or of a model that tunix does not know; `adapter` is given for a run.
    """
    run = find_run(str(source))
    if run and adapter is not None:
        raise UserError(
            f"adapter={adapter}: checkpoint={source} is a run of tunix, which has updates of its own or none; leave it "
            "out, or write the run's model first: python -m tunix.export checkpoint=RUN_DIR output=DIR merge_lora=true"
        )
    folder = run[0] if run else _fetch(str(source), ABOUT)
    if mesh_shape is None:
        mesh_shape = ONE_DEVICE if jax.process_count() == 1 else "auto"
    cfg = architecture.trained_model(folder, mesh_shape, family)
    if adapter is not None:
        updates = _fetch(str(adapter), ABOUT + WEIGHTS, key="adapter")
        lora = cfg.lora.model_copy(update=read_adapter(updates, cfg.family))
        cfg = cfg.model_copy(update={"lora": lora, "init_from": str(source), "init_adapter": str(updates)})
    # `allow_idle`: one device of several is enough for a small model.
    mesh = whole_sequences(device_mesh(cfg.mesh_shape, cfg.dims, allow_idle=True))
    unsplit = frozenset(unsplit_dims(cfg.dims, mesh.shape))
    layout = Layout(STRATEGIES[strategy], unsplit, dtype, dtype, "float32").for_generation()
    with jax.set_mesh(mesh):
        arch = describe(cfg, layout)
        params, tokenizer = load_params(str(source), cfg, arch, layout, mesh, weights)
    files = folder / FILES if run else folder
    tokenizer_files = folder / TOKENIZER if run else folder
    return Pretrained(cfg, mesh, layout, arch, params, files if files.is_dir() else None, tokenizer, tokenizer_files)


def load_params(
    source: str, cfg: Model, arch: Architecture, layout: Layout, mesh: Mesh, weights: str = "trained"
) -> tuple[Params, Tokenizer | None]:
    """Load the parameters as `layout` has them at rest, and the tokenizer, of a run or of Hugging Face's files.

    Low-rank updates beside Hugging Face's files are those of `model.init_adapter`.
    """
    if run := find_run(source):
        checkpoint = find_checkpoint(run[0] / "checkpoints", run[1])
        if peers.first_of_host():
            refuse_damaged_checkpoint(checkpoint)
        params = _restore_params(checkpoint, arch, abstract_params(arch, mesh), weights)
        return params, Tokenizer.from_str(json.dumps(read_json(checkpoint, "tokenizer")))
    folder = _fetch(source, ABOUT + WEIGHTS)
    if weights != "trained":
        raise UserError(f"weights={weights}: {folder} is no run of tunix and has one set of weights; weights=trained")
    if peers.first_of_host():
        refuse_damaged(folder, "checkpoint", CHANGED)
    params = load_weights(folder, cfg, arch.weights, layout, mesh)
    if cfg.init_adapter is not None:
        adapter = find_adapter(cfg.init_adapter)
        if peers.first_of_host():
            refuse_damaged(adapter, "adapter", CHANGED)
        params = put_updates(params, adapter, cfg, arch.weights, layout, mesh)
    return params, read_backend(folder)


def describe_files(source: str, cfg: Model) -> dict[str, Any]:
    """Return what `load_pretrained` takes about Hugging Face's files beside their folder; a run has all of it."""
    return {} if find_run(source) else {"family": cfg.family, "adapter": cfg.init_adapter}


def find_adapter(source: str) -> Path:
    """Return the folder of an adapter, downloaded if `source` is an ID."""
    return find(source, ABOUT + WEIGHTS, key="model.init_adapter")


def _fetch(source: str, patterns: tuple[str, ...], key: str = "checkpoint") -> Path:
    """Return the folder of Hugging Face's files; of several processes, the first of each host downloads them."""
    return peers.main_first(lambda: find(source, patterns, key=key), f"looking for the {key}")


def find_checkpoint(checkpoints: Path, step: int | None, key: str = "checkpoint") -> Path:
    """Return the folder of a run's checkpoint; step None is the newest, `key` is for messages."""
    steps = list_numbers(checkpoints)
    if not steps or step not in (None, *steps):
        asked = "no checkpoint yet" if step is None else f"no checkpoint of step {step}"
        raise UserError(f"{key}: {checkpoints} has {asked}; it has {', '.join(map(str, steps)) or 'none'}")
    return (checkpoints / str(steps[-1] if step is None else step)).absolute()


def _restore_params(checkpoint: Path, arch: Architecture, abstract: Params, weights: str) -> Params:
    """Read the parameters of a checkpoint: the trained ones, or one of the copies that the run has kept of them."""
    if weights == "trained":
        return read_state(checkpoint, {"params": abstract})["params"]
    names = ["trained", *find_parts(checkpoint)["copies"]]
    if weights not in names:
        raise UserError(
            f"weights={weights}: {checkpoint} has weights={', '.join(names)}; training.ema_decay keeps an average"
        )
    # A copy has the trained parameters only; frozen ones do not change, so they are those of the run.
    wanted = {"params": arch.frozen(abstract), "copies": {weights: arch.trained(abstract)}}
    state = read_state(checkpoint, wanted)
    return arch.merge(state["copies"][weights], state["params"])
