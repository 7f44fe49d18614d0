"""Kernels of one GPU beside plain operations: numbers and times. `benchmarks/gpu.py` prints them.

Each row runs a kernel and its gradients in bfloat16. The plain operations take the same numbers in float32 for the
difference, and in bfloat16 for the time.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix.base.dotted_path import import_object
from tunix.models import fused_experts as fused
from tunix.models.attention_mask import row_mask_rule
from tunix.models.experts import GATES
from tunix.models.kernels import mesh_device, select_expert_matmul, select_kernel
from tunix.models.layers import soft_cap
from tunix.models.matmul import grouped_product
from tunix.models.paged_attention import attend_to_pages
from tunix.models.table import KERNELS
from tunix.models.vision import find_ends

STEPS, WARMUP = 10, 2
# Heads, key/value heads, numbers of a head, tokens, window, options of the kernel.
SHAPES: list[tuple[int, int, int, int, int, dict[str, Any]]] = [
    (32, 8, 64, 4096, 4096, {}),
    (16, 8, 128, 8192, 8192, {}),
    (4, 1, 256, 4096, 4096, {}),
    (4, 1, 256, 4096, 512, {}),
    (16, 8, 128, 8192, 4096, {"cap": 50.0}),
    (16, 8, 128, 4096, 4096, {"future_keys": 255}),  # images of 256 tokens, which see one another
]
TINY_SHAPES: list[tuple[int, int, int, int, int, dict[str, Any]]] = [(4, 2, 16, 64, 24, {"future_keys": 15})]
# Experts, rows of all experts, numbers that go in and come out.
GROUPS, TINY_GROUPS = (32, 8192, 2048, 768), (4, 64, 32, 16)
# Experts, tokens, experts of a token, width of the model and of an expert (Qwen 3 30B-A3B has 4 times these experts:
# the plain products would take 100 GB).
EXPERTS, TINY_EXPERTS = (32, 4096, 4, 2048, 768), (4, 64, 2, 32, 16)
# Rows, heads, key/value heads, numbers of a head, tokens of the longest row: those of Qwen 3 8B.
PAGES, TINY_PAGES, PAGE = (64, 32, 8, 128, 4096), (4, 4, 2, 16, 64), 16


def timed(function: Any, *arguments: Any) -> float:
    """Return the median of the seconds of a call, after two that are not counted."""
    seconds = []
    for _ in range(STEPS + WARMUP):
        start_time = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start_time)
    return statistics.median(seconds[WARMUP:])


def normal(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def compare(shape: str, name: str, fast: Callable[..., Any], plain: Callable[..., Any], arrays: Any) -> dict[str, Any]:
    """Return the row of a kernel; both functions take `arrays`, and give the result and the gradients."""
    fast, plain = jax.jit(fast), jax.jit(plain)
    found = fast(*arrays)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arrays)
    with jax.default_matmul_precision("highest"):
        exact = plain.lower(*wide).compile({"xla_gpu_autotune_level": 0})(*wide)  # nobody asks for its time
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    differences = [float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))) for x, y in pairs]
    del exact
    times = [timed(run, *arrays) for run in (fast, plain)]
    return {
        "shape": shape,
        "kernel": name,
        "difference": float(np.max(differences)),  # a NaN stays
        "kernel_ms": times[0] * 1e3,
        "plain_ms": times[1] * 1e3,
    }


def compare_attention(
    heads: int, kv_heads: int, head_dim: int, length: int, window: int, options: dict[str, Any]
) -> dict[str, Any]:
    """A row of two documents, and of images where tokens see later ones."""
    name = select_kernel("auto", head_dim, "bfloat16", mesh_device()).name
    q, k, v, d_out = normal(0, *((1, length, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)))
    segments = jnp.arange(length, dtype=jnp.int32)[None] // (length * 5 // 8)
    ends = None
    if num_tokens := options.get("future_keys", -1) + 1:
        places = np.arange(length) % (4 * num_tokens)  # a quarter of the tokens are those of images
        index = np.where(places < num_tokens, places, -1)[None]
        ends = find_ends(jnp.asarray(index, jnp.int32), num_tokens)

    rule, cap = row_mask_rule(segments, window, ends), options.get("cap")

    def kernel(q, k, v):
        return import_object(KERNELS[name])(q, k, v, rule, **options)

    def definition(q, k, v):  # the kernel `xla` has more pieces, which take a minute to compile
        groups = q.reshape(1, length, kv_heads, -1, head_dim)
        scores = jnp.einsum("btkgh,bskh->bkgts", groups, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(rule.mask()[:, :, None], soft_cap(scores, cap), -jnp.inf))
        return jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v).reshape(q.shape)

    def both(attend, q, k, v, d_out):
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(d_out)

    more = "".join(f", {key} {value:g}" for key, value in options.items())
    label = f"{heads}/{kv_heads} heads of {head_dim}, T {length}, window {window}{more}"
    arrays = q * head_dim**-0.5, k, v, d_out
    return compare(label, name, partial(both, kernel), partial(both, definition), arrays)


def compare_groups(num_experts: int, num_rows: int, width: int, out: int) -> dict[str, Any]:
    """The product of experts; they have different numbers of rows, and the first one has none."""
    name = select_expert_matmul("auto", "bfloat16", mesh_device()).name
    name = "grouped" if name == "fused" else name
    rows, w, d_out = normal(0, (num_rows, width), (num_experts, width, out), (num_rows, out))
    ends = num_rows * jnp.arange(num_experts) ** 2 // (num_experts - 1) ** 2
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)

    def both(kind, sizes, rows, w, d_out):
        y, pull_back = jax.vjp(lambda rows, w: grouped_product(rows, w, sizes, kind), rows, w)
        return y, *pull_back(d_out)

    # A grouped product takes the arrays of one device, so it runs inside of a `shard_map`.
    run = {kind: jax.shard_map(partial(both, kind), in_specs=jax.P(), out_specs=jax.P()) for kind in {name, "xla"}}
    label = f"{num_experts} experts, {num_rows} rows, {width} to {out}"
    return compare(label, name, run[name], run["xla"], (sizes, rows, w * width**-0.5, d_out))


def compare_experts(
    num_experts: int, num_tokens: int, per_token: int, dim: int, width: int, share: float
) -> dict[str, Any]:
    """A layer of experts in fused kernels, beside the same algorithm in JAX's operations.

    `share` is the room for rows as a share of all: below 1 there are further rounds.
    """
    blocks = fused.blocks_in_use("silu")
    shapes = (num_experts, dim, width), (num_experts, dim, width), (num_experts, width, dim)
    x, d_y, gate, up, down = normal(0, (num_tokens, dim), (num_tokens, dim), *shapes)
    weights = fused.ExpertWeights(gate * dim**-0.5, up * dim**-0.5, down * width**-0.5)
    scores = jax.random.normal(jax.random.key(1), (num_tokens, num_experts))
    probs, group = jax.lax.top_k(jax.nn.softmax(scores), per_token)
    hidden = partial(fused.HIDDEN["results"], GATES["silu"])
    capacity = int(num_tokens * per_token * share)

    def both(blocks, x, probs, weights, group, d_y):
        rows = fused.sort_rows(group, num_experts)
        config = fused.KernelConfig(hidden, capacity, blocks)
        y, pull_back = jax.vjp(lambda *arrays: fused.compute_experts(*arrays, rows, config), x, probs, weights)
        return y, pull_back(d_y)

    kinds = (blocks, None)
    fast, plain = (jax.shard_map(partial(both, kind), in_specs=jax.P(), out_specs=jax.P()) for kind in kinds)
    label = f"{num_experts} experts, {num_tokens} tokens to {per_token}, {dim} and {width}, room for {share:.0%}"
    name = "xla" if blocks is None else "fused"
    return compare(label, name, fast, plain, (x, probs, weights, group.astype(jnp.int32), d_y))


def compare_pages(rows: int, heads: int, kv_heads: int, head_dim: int, longest: int) -> dict[str, Any]:
    """Attention to pages beside attention to the same pages gathered; GB/s are those of the keys and values read."""
    from tunix.config.compose import compose
    from tunix.training.choices import build_layout, build_mesh

    sizes = [f"model.num_heads={heads}", f"model.num_kv_heads={kv_heads}", f"model.head_dim={head_dim}"]
    one = ["model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"]
    cfg = compose(["model=qwen3_0_6b", *sizes, *one]).config
    mesh = build_mesh(cfg, jax.devices()[:1])
    layout, wide = build_layout(cfg, mesh).for_generation(), longest // PAGE
    spec, interpret = layout.activation("BTNH"), jax.devices()[0].platform == "cpu"
    with jax.set_mesh(mesh):
        q, k, v = normal(0, (rows, 1, heads, head_dim), *[(rows * wide, kv_heads, PAGE, head_dim)] * 2)
        table = jax.random.permutation(jax.random.key(1), rows * wide).reshape(rows, wide).astype(jnp.int32)
        times = jnp.linspace(longest // 8, longest - 1, rows).astype(jnp.int32)[:, None]

        def paged(q, k, v):
            out = attend_to_pages(jax.reshard(q, spec), k, v, table, times, layout, {}, interpret=interpret)
            return jax.reshard(out, jax.P())

        def gathered(q, k, v):
            keys, values = (x[table].swapaxes(2, 3).reshape(rows, longest, kv_heads, head_dim) for x in (k, v))
            mask = jnp.arange(longest) <= times[:, :, None, None]
            return jax.nn.dot_product_attention(q, keys, values, mask=mask, scale=1.0)

        label = f"{rows} rows of {longest // 8} to {longest} tokens in pages, {heads}/{kv_heads} heads of {head_dim}"
        row = compare(label, "pages", paged, gathered, (q * head_dim**-0.5, k, v))
    num_bytes = int(np.asarray(times).sum()) * kv_heads * head_dim * 2 * 2
    return row | {"shape": f"{label}: {num_bytes / row['kernel_ms'] / 1e6:,.0f} GB/s"}


def measure_speeds(size: int) -> dict[str, float]:
    """Return the speed of a large product in bfloat16, and of a copy (bytes read and written)."""
    a, b = normal(0, (size, size), (size, size))
    product = timed(jax.jit(jnp.matmul), a, b)
    copied = timed(jax.jit(lambda x: x + 1), jnp.zeros((size * size * 8,), jnp.bfloat16))
    return {"product_tflops": 2 * size**3 / product / 1e12, "copy_gb_per_s": size * size * 32 / copied / 1e9}


def compare_all(tiny: bool) -> dict[str, Any]:
    """Return the speeds of the device and the rows of all kernels; a row that fails says why."""
    start_time = time.perf_counter()
    calls = [partial(compare_pages, *(TINY_PAGES if tiny else PAGES))]
    calls += [partial(compare_experts, *(TINY_EXPERTS if tiny else EXPERTS), share) for share in (1.0, 0.4)]
    calls += [partial(compare_groups, *(TINY_GROUPS if tiny else GROUPS))]
    calls += [partial(compare_attention, *shape) for shape in (TINY_SHAPES if tiny else SHAPES)]
    rows = []
    automatic = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=automatic, devices=jax.devices()[:1])):
        for call in calls:
            try:
                rows.append(call())
            except Exception as error:
                lines = str(error).splitlines() or [""]
                rows.append({"shape": f"{call.func.__name__} {call.args}", "error": f"{lines[0][:90]}"})
            print(f"{time.perf_counter() - start_time:.0f} s: {rows[-1]}", file=sys.stderr, flush=True)
        return measure_speeds(256 if tiny else 8192) | {"rows": rows}
