"""Weights that a run starts from: those of `model.init_from`."""

from typing import Any

from jax.sharding import Mesh

from tunix.base.digests import refuse_damaged
from tunix.config import Config
from tunix.hf.hub import ABOUT, WEIGHTS, find
from tunix.hf.weights import CHANGED, check_weights, load_weights
from tunix.processes import peers
from tunix.training.program import Program
from tunix.training.state import Architecture


def check_init_from(cfg: Config, arch: Architecture) -> None:
    """Fetch the files that `model.init_from` names and read their headers, before anything is written.

    Raises:
        UserError: files that are not complete, that are damaged, or that hold another model.
    """
    if cfg.model.init_from is not None and not cfg.resume:
        folder = find(cfg.model.init_from, ABOUT + WEIGHTS)
        if peers.first_of_host():
            refuse_damaged(folder, "model.init_from", CHANGED)
        check_weights(folder, cfg.model, arch.weights)


def load_init_from(program: Program, mesh: Mesh) -> dict[str, Any] | None:
    """Parameters of `model.init_from` on the mesh, with None for those that its files lack; None if it is not set."""
    model = program.cfg.model
    if model.init_from is None:
        return None
    folder = find(model.init_from, ABOUT + WEIGHTS)
    return load_weights(folder, model, program.arch.weights, program.layout, mesh)
