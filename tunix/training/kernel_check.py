"""Comparison of the kernels with the plain ones, on a small batch and on the run's own devices.

A kernel is compiled for each kind of chip. An error in it would not stop a run: the loss would go down all the same,
only less.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tunix.base.dotted_path import blame_user, is_dotted
from tunix.base.errors import UserError
from tunix.config import Config, Model
from tunix.config.layers import ExpertsMlp, HeadSizes
from tunix.models.attention import Method, compute_attention
from tunix.models.attention_mask import row_mask_rule
from tunix.models.context_parallel import is_in_blocks
from tunix.models.experts import GATES
from tunix.models.fused_experts import HIDDEN, ExpertWeights, KernelConfig, blocks_in_use, compute_experts, sort_rows
from tunix.models.matmul import grouped_product
from tunix.models.table import FUSED
from tunix.sharding.layout import Layout
from tunix.sharding.mesh import data_shards, token_shards

# Tokens of a row, of each of its documents, of the window. Documents and windows end within blocks of the kernels,
# which have 32 to 128 tokens: errors of masks show there.
LENGTH, DOCUMENT, WINDOW = 512, 200, 160
SIZES = (LENGTH // 2 + 3, 0, 1, LENGTH // 4)  # rows of each expert: an odd number, none, one; of LENGTH rows in all
FACTORS = ("the gate", "the other factor", "the last product")  # of an expert
# Largest difference that rounding explains, relative to the largest number: eight times the spacing of the dtype's
# numbers. Kernels round scores, weights and sums in different orders.
LIMITS = {"bfloat16": 2**-5, "float16": 2**-8, "float32": 2**-14}

# What a kernel that is meant to compute something else does not change: tokens behind a prompt are drawn by the plain
# operations (inference/kv_cache.py), and no config.json describes it.
OWN_ATTENTION = "answers of the model, and exports, have the attention of tunix, whatever it computes"


def check_attention(cfg: Config, layout: Layout, mesh: Mesh) -> str | None:
    """Compare outputs and gradients of the kernel with those of the plain one, with documents and a window.

    Returns in words how well they agree, or that a kernel of the user's own is not compared; None where the kernel is
    the plain one, or the comparison is not wanted. Every process must call this: it computes on all devices of the
    mesh, which is in use.

    Raises:
        UserError: they differ by more than rounding explains, or a kernel of the user's own fails.
    """
    if not cfg.training.check_attention:
        kernels = [name for _, name in layout.kernels if is_dotted(name)]
        return f"{kernels[0]} attention is not compared: {OWN_ATTENTION}" if kernels else None
    if is_in_blocks(layout.cp_exchange):
        return None
    findings, model = [], cfg.model
    for heads in model.head_kinds:
        name = layout.kernel_of(heads.dim_names[0])
        if name == "xla":
            continue
        compare = partial(_compare, model, heads, layout, name, data_shards(mesh.shape), token_shards(mesh.shape))
        suffix = " in global layers" if heads.dim_names == "kh" else ""
        source = f"{name} attention{suffix}"
        with _blame_owner("model.attention", name):
            differences = jax.jit(compare)()
        findings.append(_judge(f"model.attention={name}", source, differences, layout.compute, mesh))
    return "; ".join(findings) or None


def check_expert_matmul(cfg: Config, layout: Layout, mesh: Mesh) -> str | None:
    """Compare products of experts and their gradients with those of `jax.lax.ragged_dot`; see `check_attention`."""
    mlp = cfg.model.mlp
    if not cfg.training.check_attention or not isinstance(mlp, ExpertsMlp):
        return None
    name = layout.expert_products
    if name == "xla":
        return None
    if name == FUSED:
        if blocks_in_use(mlp.activation) is None:
            return None  # operations of JAX stand for the kernels
        compare = partial(_compare_fused, mlp, cfg.model.embed_dim, layout.compute, mesh.axis_names)
    else:
        compare = partial(_compare_matmul, name, cfg.model.embed_dim, mlp.expert_dim, layout.compute, mesh.axis_names)
    # Each device computes the same numbers with its own copy: the largest difference of any device counts.
    with _blame_owner("model.expert_products", name):
        differences = jax.jit(jax.shard_map(compare, in_specs=(), out_specs=PartitionSpec()))()
    return _judge(f"model.expert_products={name}", f"{name} products of experts", differences, layout.compute, mesh)


def _blame_owner(key: str, name: str) -> AbstractContextManager[None]:
    """Return the block in which an error is one of the user's code, where the name is a dotted path."""
    return blame_user(key, name) if is_dotted(name) else nullcontext()


def _judge(setting: str, source: str, differences: dict[str, jax.Array], dtype: str, mesh: Mesh) -> str:
    """Return in words how large the differences are, by what they are of. Raises `UserError` where they are larger than
    rounding explains."""
    max_difference, of_what = max((float(value), label) for label, value in differences.items())
    limit, kind, key = LIMITS[dtype], mesh.devices.flat[0].device_kind, setting.split("=")[0]
    if max_difference > limit:
        hint = f" ({OWN_ATTENTION})" if key == "model.attention" and is_dotted(setting) else ""
        raise UserError(
            f"{setting}: its {of_what} differ from the plain kernel's by {max_difference:.2%} on {kind}, more "
            f"than the {limit:.2%} that rounding explains; train with {key}=xla, or skip this comparison "
            f"with training.check_attention=false{hint}"
        )
    return f"{source} agrees with the plain kernel within {max_difference:.2%} on {kind}"


def _compare(
    model: Model, sizes: HeadSizes, layout: Layout, name: str, num_rows: int, num_parts: int
) -> dict[str, jax.Array]:
    """Return for outputs and gradients the largest difference, relative to the largest number of the plain kernel.
    There are `num_rows` sequences, each on `num_parts` devices. `sizes` are those of the heads."""
    kv_dim_name = sizes.dim_names[0]
    length = -(-LENGTH // num_parts) * num_parts

    def numbers(seed: int, dim_names: str, heads: int) -> jax.Array:
        # One row, the same on every data shard: then the numbers do not depend on the mesh.
        row = jax.random.normal(jax.random.key(seed), (1, length, heads, sizes.dim), layout.compute)
        return spread(row, dim_names)

    def spread(row: jax.Array, dim_names: str) -> jax.Array:
        """Return equal rows, one for each data shard."""
        return jnp.broadcast_to(row, (num_rows, *row.shape[1:]), out_sharding=layout.activation(dim_names))

    q = numbers(0, "BTNH", model.num_heads) * jnp.asarray(sizes.dim**-0.5, layout.compute)
    k, v = (numbers(seed, f"BT{kv_dim_name}H", sizes.num_kv_heads) for seed in (1, 2))
    d_out = numbers(3, "BTNH", model.num_heads)
    segments = spread(jnp.arange(length)[None] // DOCUMENT, "BS")

    def results(kernel: str, dtype: str) -> list[jax.Array]:
        def attended(q, k, v):
            method = Method(kernel, layout.cp_exchange, model.kernel_options)
            out = compute_attention(q, k, v, row_mask_rule(segments, WINDOW), layout, method, kv_dim_name)
            return out[0] if model.attention_sinks else out  # with sinks a kernel also returns its sums

        out, pull_back = jax.vjp(attended, *(x.astype(dtype) for x in (q, k, v)))
        return [out, *pull_back(d_out.astype(dtype))]

    labels = ("outputs", "gradients of queries", "gradients of keys", "gradients of values")
    return _compute_differences(labels, results, name, layout.compute)


def _compare_matmul(
    name: str, num_inputs: int, num_outputs: int, dtype: str, axes: tuple[str, ...]
) -> dict[str, jax.Array]:
    """Return what `_compare` does for products [R, out] of rows [R, in] with the weights of their experts [4, in, out].
    One expert has no rows, and the last rows have no expert. Runs on each device of the mesh axes."""
    sizes = jnp.array(SIZES, jnp.int32)
    has_expert = (jnp.arange(LENGTH) < sum(SIZES))[:, None]

    def numbers(seed: int, *shape: int) -> jax.Array:
        return jax.lax.pcast(jax.random.normal(jax.random.key(seed), shape, dtype), axes, to="varying")

    rows, gradient = numbers(4, LENGTH, num_inputs), numbers(5, LENGTH, num_outputs)
    w = numbers(6, len(SIZES), num_inputs, num_outputs) * jnp.asarray(num_inputs**-0.5, dtype)

    def results(kernel: str, dtype: str) -> list[jax.Array]:
        def product(rows, w):
            return jnp.where(has_expert, grouped_product(rows, w, sizes, kernel), 0)

        out, pull_back = jax.vjp(product, rows.astype(dtype), w.astype(dtype))
        d_rows, d_weights = pull_back(gradient.astype(dtype))
        return [out, jnp.where(has_expert, d_rows, 0), d_weights]

    labels = ("outputs", "gradients of rows", "gradients of weights")
    return jax.lax.pmax(_compute_differences(labels, results, name, dtype), axes)


def _compare_fused(mlp: ExpertsMlp, num_inputs: int, dtype: str, axes: tuple[str, ...]) -> dict[str, jax.Array]:
    """Return what `_compare` does for experts of this kind, each token with two of 4 experts, by fused kernels. One
    expert has no rows, and some choices are of other devices. Half of the rows are computed in a second round."""
    num_tokens, num_experts = LENGTH // 2, len(SIZES)
    choices = jnp.repeat(
        jnp.arange(num_experts + 1), jnp.array([*SIZES, LENGTH - sum(SIZES)]), total_repeat_length=LENGTH
    )
    group = jax.random.permutation(jax.random.key(3), choices).reshape(num_tokens, 2).astype(jnp.int32)

    def numbers(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
        values = jax.random.normal(jax.random.key(seed), shape, dtype) * jnp.asarray(scale, dtype)
        return jax.lax.pcast(values, axes, to="varying")

    x, gradient = (numbers(seed, num_tokens, num_inputs) for seed in (4, 5))
    probs = numbers(9, num_tokens, 2)
    inputs, outputs = (num_experts, num_inputs, mlp.expert_dim), (num_experts, mlp.expert_dim, num_inputs)
    gate, up = (numbers(seed, *inputs, scale=num_inputs**-0.5) for seed in (6, 7))
    biases = [numbers(seed, num_experts, mlp.expert_dim).astype("float32") for seed in ((10, 11) if mlp.biases else ())]
    weights = ExpertWeights(gate, up, numbers(8, *outputs, scale=mlp.expert_dim**-0.5), *biases)
    hidden, blocks = partial(HIDDEN[mlp.weighted], GATES[mlp.activation]), blocks_in_use(mlp.activation)

    def results(kernel: str, dtype: str) -> list[jax.Array]:
        kernel_config = KernelConfig(hidden, LENGTH // 2, blocks if kernel == FUSED else None)
        rows = sort_rows(jax.lax.pcast(group, axes, to="varying"), num_experts)
        cast = jax.tree.map(lambda array: array.astype(dtype), (x, weights._replace(gate_bias=None, up_bias=None)))
        cast_weights = cast[1]._replace(gate_bias=weights.gate_bias, up_bias=weights.up_bias)
        compute = partial(compute_experts, rows=rows, config=kernel_config)
        out, pull_back = jax.vjp(compute, cast[0], probs.astype("float32"), cast_weights)
        d_x, d_probs, d_weights = pull_back(gradient.astype(dtype))
        return [out, d_x, d_probs, *d_weights[:3]]

    labels = ("outputs", *(f"gradients of {label}" for label in ("tokens", "weights of the router", *FACTORS)))
    return jax.lax.pmax(_compute_differences(labels, results, FUSED, dtype), axes)


def _compute_differences(
    labels: Sequence[str], results: Callable[[str, str], list[jax.Array]], name: str, dtype: str
) -> dict[str, jax.Array]:
    """Return the largest difference of each result, relative to the largest number; infinity for what is no number."""

    def compute_difference(x: jax.Array, y: jax.Array) -> jax.Array:
        # A comparison with NaN is false, so a NaN would pass as a small difference.
        value = jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))
        return jnp.where(jnp.isnan(value), jnp.inf, value)

    # The plain kernel computes in float32, so the difference is the error of the kernel and of its dtype alone.
    pairs = zip(labels, results(name, dtype), results("xla", "float32"), strict=True)
    return {label: compute_difference(x, y) for label, x, y in pairs}
