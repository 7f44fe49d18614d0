"""Norms of each layer, in the step and in the lines of a run."""

import jax
import numpy as np
import pytest
from support.harness import RUN, batch, metrics, program

import tunix
from tunix.models.paths import named
from tunix.sharding.arrays import to_global
from tunix.training.layer_norms import NORMS


@pytest.mark.parametrize("mesh", ["[[2,2],[fsdp,tp]]", "[[2,2],[pp,fsdp]]"])
def test_norms_are_those_of_numpy(mesh):
    words = [f"model.mesh_shape={mesh}", "model.num_layers=2", "model.global_every=2", "logging.layer_norms_every=2"]
    trained = program(*words, "distributed.allow_idle_devices=true")
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


def test_lines_of_a_run(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", "training.max_steps=3"]
    data = ["data=text", f"data.paths=['{corpus}']", "evaluation.every_steps=null"]
    run = tunix.train([*RUN, *words, *data, "logging.layer_norms_every=2", "model.num_layers=2"]).folder
    first, second, third = metrics(run)
    assert second.keys() - first.keys() >= {"gradient/blocks.attention.q.w/1", "change/embedding.table"}
    assert third.keys() == first.keys()
