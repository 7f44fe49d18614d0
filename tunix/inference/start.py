"""Weights that a run starts from: those of `model.init_from`, a run of tunix or a model of Hugging Face's."""

from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from tunix.base.digests import refuse_damaged
from tunix.base.errors import UserError
from tunix.cli.runs import find_run
from tunix.config import Config
from tunix.hf.adapter import check_adapter, put_updates
from tunix.hf.hub import ABOUT, WEIGHTS, find
from tunix.hf.weights import CHANGED, check_weights, load_weights
from tunix.inference.pretrained import find_adapter, find_checkpoint
from tunix.processes import peers
from tunix.run.integrity import refuse_damaged_checkpoint
from tunix.run.items import read_state
from tunix.training.program import Program
from tunix.training.state import Architecture, abstract_params


def check_init_from(cfg: Config, arch: Architecture) -> None:
    """Fetch the files that `model.init_from` names and read their headers, before anything is written.

    Raises:
        UserError: files that are not complete, damaged, or of another model; a run without a checkpoint.
    """
    source = cfg.model.init_from
    if source is None or cfg.resume:
        return
    if run := find_run(source, "model.init_from"):
        checkpoint = _find_checkpoint_of(cfg, *run)
        if peers.first_of_host():
            refuse_damaged_checkpoint(checkpoint)
    else:
        folder = find(source, ABOUT + WEIGHTS)
        if peers.first_of_host():
            refuse_damaged(folder, "model.init_from", CHANGED)
        check_weights(folder, cfg.model, arch.weights)
    if cfg.model.init_adapter is not None:
        folder = find_adapter(cfg.model.init_adapter)
        if peers.first_of_host():
            refuse_damaged(folder, "model.init_adapter", CHANGED)
        check_adapter(folder, cfg.model, arch.weights)


def load_init_from(program: Program, mesh: Mesh) -> dict[str, Any] | None:
    """Load the parameters of `model.init_from` on the mesh, with None for those that it lacks; None if it is not set.

    Low-rank updates are those of `model.init_adapter`, if it is set.
    """
    model = program.cfg.model
    if model.init_from is None:
        return None
    params = _load_base(program, mesh, model.init_from)
    if model.init_adapter is None:
        return params
    return put_updates(params, find_adapter(model.init_adapter), model, program.arch.weights, program.layout, mesh)


def _load_base(program: Program, mesh: Mesh, source: str) -> dict[str, Any]:
    if run := find_run(source, "model.init_from"):
        # A run without low-rank updates has no arrays for them: they are left out of the read, and made by step 0.
        abstract = abstract_params(program.arch, mesh)
        own, lacking = _split_updates(abstract)
        params = read_state(_find_checkpoint_of(program.cfg, *run), {"params": own})["params"]
        return _fill(params, lacking)
    folder = find(source, ABOUT + WEIGHTS)
    return load_weights(folder, program.cfg.model, program.arch.weights, program.layout, mesh)


def _find_checkpoint_of(cfg: Config, folder: Path, step: int | None) -> Path:
    if cfg.model.lora.quantize_base:
        raise UserError(
            f"model.lora.quantize_base={cfg.model.lora.quantize_base} quantizes weights of Hugging Face's files only; "
            f"write them first: python -m tunix.export checkpoint={folder} output=DIR, then model.init_from=DIR"
        )
    return find_checkpoint(folder / "checkpoints", step, "model.init_from")


def _split_updates(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tree of parameters without its low-rank updates, which a run of whole matrices lacks, and those."""
    own: dict[str, Any] = {}
    lacking: dict[str, Any] = {}
    for name, node in params.items():
        if name == "lora":
            lacking[name] = node
        elif isinstance(node, dict):
            own[name], lacking[name] = _split_updates(node)
        else:
            own[name] = node
    return own, lacking


def _fill(params: dict[str, Any], lacking: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with None in the places that it lacks."""
    filled = dict(params)
    for name, node in lacking.items():
        if name == "lora":
            filled[name] = dict.fromkeys(node)
        else:
            filled[name] = _fill(params[name], node)
    return filled
