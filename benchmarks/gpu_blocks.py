"""Which blocks of our kernels are fastest on this GPU: `python -m benchmarks.gpu_blocks [64] [128] [256] [experts]`.

Words are head sizes of attention, or the fused experts; all of them without words. Every kernel is compiled with each
of the blocks below, several at a time, and timed alone. A line for each kernel has the fastest blocks and the ones that
`tunix/models/kernels.py` has for this chip, with milliseconds and TFLOP/s.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.gpu_kernels import normal, timed
from tunix.models import flash_attention as flash
from tunix.models import fused_experts as fused
from tunix.models.attention_mask import first_keys, last_queries
from tunix.models.experts import GATES
from tunix.models.kernels import EXPERT_BLOCKS, FLASH_BLOCKS, ExpertBlocks, FlashBlock, FlashBlocks, GroupedBlock
from tunix.models.kernels import find_row_in_use as row_in_use

# Sequences, tokens, heads, key/value heads by the numbers of a head.
ATTENTION = {64: (8, 4096, 32, 8), 128: (2, 8192, 16, 8), 256: (8, 4096, 4, 1)}
# Experts, tokens, experts of a token, width of the model and of an expert: Qwen 3 30B-A3B.
EXPERTS = (128, 8192, 8, 2048, 768)
# Queries, keys, warps; then rows, columns, depth, warps; then rows and columns.
FLASH_SIZES = [
    (128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 32, 4), (32, 128, 4),
    (128, 128, 4), (64, 64, 8), (32, 64, 4),
]  # fmt: skip
PRODUCT_SIZES = [
    (128, 256, 64, 8), (128, 256, 32, 8), (256, 128, 64, 8), (64, 256, 64, 8), (128, 128, 64, 8), (128, 128, 64, 4),
    (128, 64, 64, 8), (128, 64, 64, 4), (64, 128, 64, 4), (64, 64, 64, 4),
]  # fmt: skip
COMBINE_SIZES = [(4, 1024), (8, 256), (8, 512), (16, 256), (16, 512), (32, 256)]
STAGES = (2, 3, 4)


class Kernel(NamedTuple):
    """One kernel, and how to run it with a block."""

    name: str
    in_use: FlashBlock | GroupedBlock
    blocks: Iterable[Any]
    run: Callable[..., Any]  # of a block and the arrays
    arrays: tuple[Any, ...]
    flops: float  # of products; 0 where it has none


def attention_kernels(dim: int, sizes: tuple[int, int, int, int], rows: FlashBlocks, interpret: bool) -> list[Kernel]:
    """Return the three kernels of causal attention; each row of tokens is one document."""
    batch, length, heads, kv_heads = sizes
    q, k, v, d_out = normal(0, *((batch, length, count, dim) for count in (heads, kv_heads, kv_heads, heads)))
    segments = jnp.zeros((batch, length), jnp.int32)
    inputs = flash.Inputs(q * dim**-0.5, k, v, first_keys(segments, length), last_queries(segments, length))

    def variant(**blocks: FlashBlock) -> flash.Variant:
        return flash.Variant(rows._replace(**blocks), None, interpret)

    out, log_sums = jax.jit(lambda inputs: flash.forward(inputs, variant()))(inputs)
    backward = flash.BackwardInputs.from_gradients(out, log_sums, d_out, jnp.zeros_like(log_sums))
    blocks = [FlashBlock(*size, stages) for size, stages in product(FLASH_SIZES, STAGES)]
    flops = 2 * batch * heads * length**2 * dim  # of the forward pass: two products, half of the pairs
    runs = {
        "forward": (lambda block, inputs: flash.forward(inputs, variant(forward=block)), (inputs,), flops),
        "d_queries": (
            lambda block, *arrays: flash.queries_gradient(*arrays, variant(d_queries=block)), (inputs, backward),
            1.5 * flops,
        ),
        "d_keys": (
            lambda block, *arrays: flash.keys_gradient(*arrays, variant(d_keys=block)), (inputs, backward), 2 * flops
        ),
    }  # fmt: skip
    return [Kernel(f"{dim} {name}", getattr(rows, name), blocks, *run) for name, run in runs.items()]


def expert_kernels(sizes: tuple[int, int, int, int, int], rows: ExpertBlocks, interpret: bool) -> list[Kernel]:
    """Return the seven kernels of fused experts with all tokens of one device."""
    num_experts, num_tokens, per_token, dim, width = sizes
    shapes = (num_experts, dim, width), (num_experts, dim, width), (num_experts, width, dim)
    x, d_y, gate, up, down = normal(0, (num_tokens, dim), (num_tokens, dim), *shapes)
    weights = fused.ExpertWeights(gate * dim**-0.5, up * dim**-0.5, down * width**-0.5)
    scores = jax.random.normal(jax.random.key(1), (num_tokens, num_experts))
    probs, group = jax.lax.top_k(jax.nn.softmax(scores), per_token)
    hidden_of, num_rows = partial(fused.HIDDEN["results"], GATES["silu"]), num_tokens * per_token

    def config(**blocks: GroupedBlock) -> fused.KernelConfig:
        return fused.KernelConfig(hidden_of, num_rows, rows._replace(**blocks), interpret)

    def sort(probs: jax.Array, group: jax.Array) -> fused.Window:
        return fused._take_window(0, probs, fused.sort_rows(group, num_experts), config())

    window = jax.jit(sort)(probs, group.astype(jnp.int32))
    a, b, hidden = jax.jit(lambda *arrays: fused._up(*arrays, config()))(x, weights, window)
    z = jax.jit(lambda *arrays: fused._down(*arrays, config()))(hidden, down, window)
    d_a, d_b, again, _ = jax.jit(lambda *arrays: fused._d_hidden(*arrays, config()))(d_y, down, a, b, window)
    one = 2 * num_rows * dim * width  # FLOPs of one product
    runs = {
        "up": (fused._up, (x, weights, window), 2 * one),
        "down": (fused._down, (hidden, down, window), one),
        "combine": (fused._combine, (z, window), 0),
        "d_hidden": (fused._d_hidden, (d_y, down, a, b, window), one),
        "d_down": (fused._d_down, (again, d_y, down, window), one),
        "d_inputs": (fused._d_inputs, (x, d_a, d_b, weights, window), 2 * one),
        "d_rows": (fused._d_rows, (d_a, d_b, weights, window), 2 * one),
    }
    products = [GroupedBlock(*size, stages) for size, stages in product(PRODUCT_SIZES, STAGES)]
    sums = [GroupedBlock(*size, 0, 4, 2) for size in COMBINE_SIZES]

    def run_with(name: str, function: Callable[..., Any], block: GroupedBlock, *arrays: Any) -> Any:
        return function(*arrays, config(**{name: block}))

    return [
        Kernel(f"experts {name}", getattr(rows, name), sums if name == "combine" else products,
               partial(run_with, name, function), arrays, flops)
        for name, (function, arrays, flops) in runs.items()
    ]  # fmt: skip


def describe(kernel: Kernel, milliseconds: dict[Any, float]) -> str:
    """Return the line of a kernel: the four fastest blocks, and the one in use."""

    def of(block: Any) -> str:
        if block not in milliseconds:
            return f"{tuple(block)} does not compile"
        speed = f", {kernel.flops / milliseconds[block] / 1e9:.0f} TFLOP/s" if kernel.flops else ""
        return f"{tuple(block)} {milliseconds[block]:.3f} ms{speed}"

    fastest = sorted(milliseconds, key=lambda block: milliseconds[block])[:4]
    return f"{kernel.name}: {'; '.join(map(of, fastest))} | in use {of(kernel.in_use)}"


def measure(kernels: list[Kernel]) -> Iterable[str]:
    """Yield the line of each kernel; a block that does not compile is left out."""
    mesh = jax.sharding.get_mesh()

    def compile_one(job: tuple[Kernel, Any]) -> Any:
        kernel, block = job
        try:
            with jax.set_mesh(mesh):  # a thread begins without one
                return jax.jit(partial(kernel.run, block)).lower(*kernel.arrays).compile()
        except Exception:
            return None

    jobs = [(kernel, block) for kernel in kernels for block in dict.fromkeys([kernel.in_use, *kernel.blocks])]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
        compiled = list(pool.map(compile_one, jobs))  # all of them, before the first is timed
    for kernel in kernels:
        milliseconds = {
            block: timed(program, *kernel.arrays) * 1e3
            for (of, block), program in zip(jobs, compiled, strict=True)
            if of is kernel and program is not None
        }
        yield describe(kernel, milliseconds)


def main(words: list[str]) -> None:
    start_time = time.perf_counter()
    automatic = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=automatic, devices=jax.devices()[:1])):
        for word in words or [*map(str, ATTENTION), "experts"]:
            if word == "experts":
                kernels = expert_kernels(EXPERTS, row_in_use(EXPERT_BLOCKS), interpret=False)
            else:
                dim = int(word)
                kernels = attention_kernels(dim, ATTENTION[dim], row_in_use(FLASH_BLOCKS)[dim], interpret=False)
            for line in measure(kernels):
                print(f"{time.perf_counter() - start_time:4.0f} s  {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
