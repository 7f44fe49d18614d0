"""A soft cap, of the scores of attention and of logits (Gemma 2, arXiv:2408.00118)."""

import jax
import jax.numpy as jnp


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Return cap * tanh(x / cap), which is near x for small x and never beyond the cap; x where there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
