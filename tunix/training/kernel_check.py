"""Comparison of the attention kernel with the plain one, on a small batch and on the run's own devices.

A kernel is compiled for each kind of chip. An error in it would not stop a run: the loss would go down all the same,
only less.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.models.attention import attend
from tunix.models.exchanges import choose_exchange
from tunix.models.kernels import choose_kernel
from tunix.models.seen import seen_in_row
from tunix.sharding.layout import Layout
from tunix.sharding.mesh_shape import data_shards, token_shards

LENGTH, DOCUMENT, WINDOW = 512, 200, 160  # tokens of a row, of each of its documents, of the window
# Largest difference that rounding explains, relative to the largest number: eight times the spacing of the dtype's
# numbers. Kernels round scores, weights and sums in different orders.
LIMITS = {"bfloat16": 2**-5, "float16": 2**-8, "float32": 2**-14}


def check_attention(cfg: Config, layout: Layout, mesh: Mesh) -> str | None:
    """Compare outputs and gradients of the kernel with those of the plain one, with documents and a window.

    Returns what was found in words; None where the kernel is the plain one, or the comparison is not wanted. Every
    process must call this: it computes on all devices of the mesh, which is in use.

    Raises:
        UserError: they differ by more than rounding explains.
    """
    name = choose_kernel(cfg.model.attention, cfg.model.head_dim, layout.compute, cfg.model.attention_options).name
    is_plain = name == "xla" or choose_exchange(cfg.model, mesh.shape).name == "ring"
    if not cfg.training.check_attention or is_plain:
        return None
    differences = jax.jit(lambda: _compare(cfg, layout, name, data_shards(mesh.shape), token_shards(mesh.shape)))()
    largest, of_what = max((float(value), label) for label, value in differences.items())
    limit, kind = LIMITS[layout.compute], mesh.devices.flat[0].device_kind
    if largest > limit:
        raise UserError(
            f"model.attention={name}: its {of_what} differ from the plain kernel's by {largest:.2%} on {kind}, more "
            f"than the {limit:.2%} that rounding explains; train with model.attention=xla, or skip this comparison "
            "with training.check_attention=false"
        )
    return f"{name} attention agrees with the plain kernel within {largest:.2%} on {kind}"


def _compare(cfg: Config, layout: Layout, name: str, num_rows: int, num_parts: int) -> dict[str, jax.Array]:
    """Return for outputs and gradients the largest difference, relative to the largest number of the plain kernel.

    There are `num_rows` sequences, each on `num_parts` devices.
    """
    model = cfg.model
    length = -(-LENGTH // num_parts) * num_parts

    def numbers(seed: int, letters: str, heads: int) -> jax.Array:
        row = jax.random.normal(jax.random.key(seed), (1, length, heads, model.head_dim), layout.compute)
        return spread(row, letters)

    def spread(row: jax.Array, letters: str) -> jax.Array:
        """Equal rows, one for each data shard."""
        return jnp.broadcast_to(row, (num_rows, *row.shape[1:]), out_sharding=layout.activation(letters))

    q = numbers(0, "BTNH", model.num_heads) * jnp.asarray(model.head_dim**-0.5, layout.compute)
    k, v = (numbers(seed, "BTKH", model.num_kv_heads) for seed in (1, 2))
    d_out = numbers(3, "BTNH", model.num_heads)
    segments = spread(jnp.arange(length)[None] // DOCUMENT, "BS")

    def results(kernel: str, dtype: str) -> list[jax.Array]:
        def attended(q, k, v):
            seen, exchange = seen_in_row(segments, WINDOW), choose_exchange(model).name
            out = attend(q, k, v, seen, layout, kernel, exchange, **model.attention_options)
            return out[0] if model.attention_sinks else out

        out, pull_back = jax.vjp(attended, *(x.astype(dtype) for x in (q, k, v)))
        return [out, *pull_back(d_out.astype(dtype))]

    labels = ("outputs", "gradients of queries", "gradients of keys", "gradients of values")
    pairs = zip(labels, results(name, layout.compute), results("xla", "float32"), strict=True)
    differences = {label: jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)) for label, x, y in pairs}
    return {label: jnp.where(jnp.isnan(value), jnp.inf, value) for label, value in differences.items()}
