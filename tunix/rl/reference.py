"""The reference: the model of step 0, from which a policy may be kept near (task.kl_coefficient)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.config import Config
from tunix.costs.rollout_memory import describe_reference
from tunix.data.batch import Batch
from tunix.inference.start import load_init_from
from tunix.models.paths import parameter_name
from tunix.rl.rollouts import Reference
from tunix.training.program import Program
from tunix.training.scores import compute_token_log_probs


def make_reference(cfg: Config, program: Program, mesh: Mesh) -> Reference:
    """Return the function that gives log-probabilities of the targets of a batch under the reference.

    Where only low-rank updates are trained, from nothing, the reference is the policy without them: no second model is
    kept. Else it is made once more as step 0 made it, with the same bits, and rests beside the state in the dtype of
    products.
    """
    score = jax.jit(_make_scores(cfg, program))
    if cfg.model.keeps_base:
        remove = jax.jit(_remove_updates)
        return lambda params, batch: score(remove(params), batch)
    start = program.new_params(cfg.seed, load_init_from(program, mesh))
    kept = jax.jit(partial(_cast, describe_reference(program)), donate_argnums=0)(start)
    return lambda params, batch: score(kept, batch)


def _make_scores(cfg: Config, program: Program) -> Any:
    def score(params: Any, batch: Batch) -> jax.Array:
        def microbatch(_, rows):
            model = program.arch.module(params)
            chunk, temperature = cfg.training.loss_chunk_size, cfg.sampling.temperature
            return None, compute_token_log_probs(model, rows, None, chunk_size=chunk, temperature=temperature)[0]

        return jax.lax.scan(microbatch, None, batch)[1]

    return score


def _cast(shapes: Any, params: Any) -> Any:
    return jax.tree.map(lambda shape, leaf: leaf.astype(shape.dtype), shapes, params)


def _remove_updates(params: Any) -> Any:
    """Return the parameters with 0 for the second factor of each low-rank update: W + a b with b = 0 is the base W."""

    def base(path, leaf):
        return jnp.zeros_like(leaf) if parameter_name(path).endswith(".lora.b") else leaf

    return jax.tree.map_with_path(base, params)
