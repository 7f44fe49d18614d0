"""Rematerialization: the values of a block's forward pass that are kept until its backward pass, and where.

A policy is a set of names, a row of `REMAT` in config/training.py. A value has a name where
`checkpoint_name(value, name)` gives it one, and only values with a name of the policy are kept. The backward pass
computes everything else again from them. Primitives play no part: a product or a kernel with a backward rule of its own
(`jax.custom_vjp`) is kept like any other.

    name         value                                         computed again without it
    product      result of each `product`; in attention and    a matrix product
                 MLP `product.attention.q` and so on
    attention    result of the kernel, and what it needs       the kernel's forward pass
                 to go backward; result of linear attention
    norm         result of each norm                           a mean over D
    residual     sum of the residual stream and a branch       the branch's last norm
    exchange     queries, keys, values and results that        a transfer between devices
                 devices have sent one another

No policy keeps a gathered weight: those of all blocks together are the whole model. They have no name in this table, so
the backward pass gathers them again.

The input of a block is always kept. Its name, `input`, is for policies whose values wait in the host's memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from tunix.config import PROJECTIONS
from tunix.config.training import REMAT

# (x, weights of a layer, its values, what all layers take) -> (x, results)
BlockFn = Callable[..., tuple[jax.Array, Any]]
Policy = Callable[..., bool]


class Remat(NamedTuple):
    """Values that the blocks of a model keep from their forward to their backward pass; the keys `training.remat*`."""

    policy: str  # key of REMAT
    every: int = 1  # of so many blocks, the first one follows the policy; the others keep what "none" keeps
    on_host: bool = False  # kept values wait in the host's memory
    unrolled: bool = False  # each layer is a piece of program of its own (`training.unroll_layers`)

    def recompute_fraction(self, value: str) -> float:
        """Return the share of the blocks whose backward pass computes the values of this name once more."""
        return 0.0 if _is_saved(value, self.policy) else 1 / self.every


KEEP_ALL = Remat("none")


def scan_blocks(
    blocks: Sequence[BlockFn], x: jax.Array, layers: Any, shared: Any, remat: Remat
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Return x after every layer, and the results of each block's layers with a first dimension L.

    The blocks take turns. `layers` are the weights and values of the layers of each block, trees of arrays [L, ...];
    all layers take `shared`. With `remat.every` the scan takes so many turns at a time:

        every=3     layer  0    1    2    |  3    4    5    |  ...       one block: an iteration is a group of 3 layers
                    again  yes  no   no   |  yes  no   no   |
    """
    # Two programs of each block: one follows the policy, the other keeps everything.
    by_policy = [checkpoint_block(block, remat) for block in blocks]
    keeping = [checkpoint_block(block, remat._replace(policy="none")) for block in blocks]

    def turn(x, layers, number):
        """Run one layer of each block; `number` is that of the first one within its group."""
        each = [(keeping if (number + index) % remat.every else by_policy)[index] for index in range(len(blocks))]
        weights, values = zip(*layers, strict=True)
        return merge_blocks(each)(x, weights, values, shared)

    if remat.every == 1:
        return jax.lax.scan(lambda x, layers: turn(x, layers, 0), x, layers, unroll=remat.unrolled)

    def group(x, layers):
        results = []
        for index in range(remat.every):
            turn_layers = jax.tree.map(partial(jax.lax.index_in_dim, index=index, keepdims=False), layers)
            x, result = turn(x, turn_layers, index * len(blocks))
            results.append(result)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *results)

    def split(leaf):
        # Of weights that are gathered for the whole step, jax 0.10.2 does not find the layout by itself.
        spec = jax.typeof(leaf).sharding.spec
        shape, of_layer = (-1, remat.every, *leaf.shape[1:]), spec.partitions[1:]
        return leaf.reshape(shape, out_sharding=PartitionSpec(None, None, *of_layer, reduced=spec.reduced))

    grouped = jax.tree.map(split, layers)
    x, results = jax.lax.scan(group, x, grouped, unroll=remat.unrolled)
    return x, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)


def merge_blocks(blocks: Sequence[BlockFn]) -> BlockFn:
    """Return blocks one after the other as one, whose weights, values and results are those of each."""

    def block(x, weights, values, shared):
        results = []
        for each, layer in zip(blocks, zip(weights, values, strict=True), strict=True):
            x, result = each(x, *layer, shared)
            results.append(result)
        return x, tuple(results)

    return block


def checkpoint_block(block: BlockFn, remat: Remat, behind_barrier: Any = True) -> BlockFn:
    """Return the block as one whose backward pass computes again what the policy does not keep.

    `behind_barrier` says of each weight whether the second forward pass of unrolled layers takes it behind a barrier.
    """

    def named(x, *remaining):
        return block(checkpoint_name(x, "input") if remat.on_host else x, *remaining)

    barriers = remat.unrolled if behind_barrier is True else (True, behind_barrier, True, True)
    # In a scan XLA cannot merge the second forward pass with the first one, so the barriers that prevent this merge
    # would only stand in the way of other optimizations. In unrolled layers it would, and keep all values.
    return jax.checkpoint(named, policy=make_policy(remat), prevent_cse=barriers)


def make_policy(remat: Remat) -> Policy:
    """Return the policy of a row of `REMAT`, as `jax.checkpoint` takes it."""
    product_names = [f"product.{name}" for name in PROJECTIONS]
    names = [*REMAT[remat.policy], *(name for name in product_names if _is_saved(name, remat.policy))]
    if not remat.on_host:
        return jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input", *names],
        offload_src="device",
        offload_dst="pinned_host",
    )


def product_name(parameter: str) -> str:
    """Return the name of the product that takes a parameter: `product.mlp.up` of `blocks.mlp.up.w`."""
    stack = "vision.tower.blocks."
    name = ".".join(parameter.split(".")[1:3])
    if parameter.startswith(stack):
        name = ".".join(["tower", *parameter.removeprefix(stack).split(".")[:2]])
    return f"product.{name}" if name in PROJECTIONS else "product"


def _is_saved(value: str, policy: str) -> bool:
    return any(value == name or value.startswith(f"{name}.") for name in REMAT[policy])
