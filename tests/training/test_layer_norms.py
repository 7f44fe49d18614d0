"""Norms of each layer are those of numpy."""

import jax
import numpy as np
import pytest
from support.harness import batch, program

from tunix.models.layers import named
from tunix.sharding.arrays import to_global
from tunix.training.step import NORMS


@pytest.mark.nightly
def test_norms_are_those_of_numpy():
    """On layers and matrices that are split, and in whole ones; run/test_guards.py has the lines of a run."""
    words = ["model.num_layers=2", "model.global_every=2", "logging.layer_norms_every=2"]
    trained = program(*words, "model.mesh_shape=[[2,2,2],[pp,fsdp,tp]]")
    with jax.set_mesh(trained.mesh):
        step = trained.compile(batch())
        states, lines = [jax.tree.map(np.asarray, trained.state["params"])], []
        state = trained.state
        for _ in range(2):
            state, numbers = step(state, to_global(batch(), trained.mesh))
            states.append(jax.tree.map(np.asarray, state["params"]))
            lines.append(jax.tree.map(np.asarray, numbers))
    assert not any(norm.any() for norm in lines[0][NORMS].values())  # step 1 is not due
    norms = lines[1][NORMS]
    before, after = dict(named(states[1])), dict(named(states[2]))
    for name, weight in after.items():
        over = tuple(range(1, weight.ndim)) if name.startswith("blocks.") else None
        np.testing.assert_allclose(norms[f"weight/{name}"], np.sqrt((weight**2).sum(over)), rtol=1e-5)
        change = weight.astype(np.float64) - before[name]
        np.testing.assert_allclose(norms[f"change/{name}"], np.sqrt((change**2).sum(over)), rtol=1e-3)
    squares = sum((norms[f"gradient/{name}"] ** 2).sum() for name in after)
    np.testing.assert_allclose(np.sqrt(squares), lines[1]["grad_norm"], rtol=1e-5)
