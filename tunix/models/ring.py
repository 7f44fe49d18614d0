"""Ring attention: keys and values travel from device to device, and queries stay (arXiv:2310.01889).

Four devices share a sequence. Device 2 sees the blocks of keys in this order, and computes with those it needs:

    step        0        1        2        3
    keys of     2        1        0        3        each device hands its block on to the next one
                part     all      all      skipped: these tokens come later

This file moves the blocks. The products with a block are those of a row of `PRODUCTS`: kernels (ring_flash.py) or XLA's
own operations (ring_plain.py).

The backward pass is written by hand: automatic differentiation would keep the scores of every block. Keys and values go
round once more, and their gradients travel with them, float32, until they are home again.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tunix.base.dotted import import_object
from tunix.models.kernels import choose_kernel
from tunix.models.seen import Seen
from tunix.sharding.dims import token_axes

# Products with a block by kernel, a key of `config.model.KERNELS`: a class with the methods of `ring_plain.Plain`. Its
# place is given, because the kernels import Pallas.
PRODUCTS = {"flash": "tunix.models.ring_flash:Flash", "xla": "tunix.models.ring_plain:Plain"}


def attend_in_ring(
    kernel: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: Seen,
    cap: float | None = None,
    with_sums: bool = False,
) -> Any:
    """Return [B, T, N, H] of this device's queries over the keys of all devices, inside a `shard_map`.

    `seen` is the rule for the whole sequence, in which each segment is one run. `kernel` is a key of `PRODUCTS`, or
    `auto`.
    """
    name = choose_kernel(kernel, q.shape[3], q.dtype.name).name
    products = import_object(PRODUCTS[name])(cap)
    arranged, facts = products.arrange(q, k.shape[2], seen)
    out, log_sums = products.restore(*_attend(products, arranged, k, v, facts))
    return (out, log_sums) if with_sums else out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(products, q, k, v, facts):
    return _forward(products, q, k, v, facts)


def _attend_forward(products, q, k, v, facts):
    # Both have the name by which remat policies keep them: without them the keys would go round once more.
    out, log_sums = (checkpoint_name(x, "attention") for x in _forward(products, q, k, v, facts))
    return (out, log_sums), (q, k, v, facts, out, log_sums)


def _attend_backward(products, residuals, gradients):
    """Take the keys round once more. The gradients of a block go with it, one step behind, and each device adds a part.

    Four devices, the block of device 0:

        step            0      1      2      3
        keys are on     0      1      2      3
        gradients on    0 +=   1 +=   2 +=   3 +=   then home to 0
    """
    q, k, v, facts, out, log_sums = residuals
    backward = products.start_backward(out, log_sums, *gradients)
    add_gradients = partial(products.add_gradients, q, facts, backward)
    block = _hand_on((k, v))
    dq, *gradients = add_gradients(jnp.zeros_like(q, jnp.float32), (k, v), 0)

    def visit(carry, step):
        # Two sends run while the device computes: the next block, and the gradients of the block before this one,
        # which belong to the keys that the next device has now.
        dq, block, gradients = carry
        next_block, received = _hand_on(block), _hand_on(gradients)
        dq, *more = add_gradients(dq, block, step)
        return (dq, next_block, tuple(a + b for a, b in zip(received, more, strict=True))), None

    num_devices = jax.lax.axis_size(token_axes())
    steps = jnp.arange(1, num_devices - 1)
    (dq, block, gradients), _ = jax.lax.scan(visit, (dq, block, tuple(gradients)), steps)
    received = _hand_on(gradients)
    dq, *more = add_gradients(dq, block, num_devices - 1)
    dk, dv = _hand_on(tuple(a + b for a, b in zip(received, more, strict=True)))  # home
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(products, q, k, v, facts) -> tuple[jax.Array, jax.Array]:
    """Return the results of `products.finish` after all blocks."""
    sums = products.start(q, v)
    add = partial(products.add, q, facts)
    # The first and the last block stand outside of the loop: the first is the device's own, and behind the last one
    # nothing is left to hand on. With four devices:
    #
    #     compute with    own | block 1    block 2 | block 3
    #     hand on         own | block 1    block 2 |
    #                         |<---- visit ------->|
    block = _hand_on((k, v))  # on its way while the device computes with its own
    sums = add(sums, (k, v), 0)

    def visit(carry, step):
        sums, block = carry
        next_block = _hand_on(block)
        return (add(sums, block, step), next_block), None

    num_devices = jax.lax.axis_size(token_axes())
    (sums, block), _ = jax.lax.scan(visit, (sums, block), jnp.arange(1, num_devices - 1))
    sums = add(sums, block, num_devices - 1)
    return products.finish(q, sums)


def _hand_on(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Send arrays to the next device of the ring, and return those of the one before."""
    axes = token_axes()
    num_devices = jax.lax.axis_size(axes)
    pairs = [(device, (device + 1) % num_devices) for device in range(num_devices)]
    return tuple(jax.lax.ppermute(x, axes, pairs) for x in arrays)
