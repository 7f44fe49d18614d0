"""The state of step 0: new weights, or those of `model.init_from`."""

from jax.sharding import Mesh

from tunix.config import Config
from tunix.hf.hub import ABOUT, WEIGHTS, find
from tunix.hf.weights import check_weights, load_weights
from tunix.sharding.layout import Layout
from tunix.training.state import Architecture, State, init_state


def check_start(cfg: Config, arch: Architecture) -> None:
    """Fetch what `model.init_from` names and look at the heads of its files, before anything is written.

    Raises:
        UserError: files that are not whole, or that hold another model.
    """
    if cfg.model.init_from is not None and not cfg.resume:
        check_weights(find(cfg.model.init_from, ABOUT + WEIGHTS), cfg.model, arch.weights)


def start_state(cfg: Config, arch: Architecture, layout: Layout, init, mesh: Mesh) -> State:
    """The state of step 0: `model.init_from`'s weights, and new ones where it has none."""
    given = None
    if cfg.model.init_from is not None:
        folder = find(cfg.model.init_from, ABOUT + WEIGHTS)
        given = load_weights(folder, cfg.model, arch.weights, layout, mesh)
    return init_state(init, mesh, cfg.seed, given)
