"""Exchanges of attention: how a query meets the keys of its sequence that rest on other devices.

Outside attention each device has a share of the tokens of a sequence, with all heads of its part of the model. Inside
it a query needs the keys of all earlier tokens. An exchange is a function that runs inside a `shard_map`, on one
device's arrays: (kernel, q [B, T, N, H], k and v [B, T, K, H], mask_rule) -> [B, T, N, H], where T are the tokens of
this device, and `mask_rule` is that of the whole sequence. `kernel` is a key of `KERNELS` or a path. An exchange
takes the options of kernels (`models/attention.py`), and returns what the kernel returns. `CP_EXCHANGES` of
`models/table.py` has their names; the ring is in `models/ring.py`.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tunix.base.errors import UserError
from tunix.config import Model
from tunix.models.attention_mask import MaskRule
from tunix.models.kernels import Choice
from tunix.models.table import CP_EXCHANGES, RING_KERNELS, find_kernel
from tunix.sharding.mesh import count_devices, token_shards
from tunix.sharding.table import DIMS, token_axes


def select_exchange(model: Model, sizes: Mapping[str, int], name: str) -> Choice:
    """Return the exchange with this name on a mesh of these sizes.

    `auto` goes by the sizes of the model here. Where they leave a choice and the speed of the devices is known, a plan
    has put the faster exchange in its place before (`plan/derived_time.py`).

    Raises:
        UserError: `auto` takes a ring, which cannot run the kernel of `model.attention` or the model.
    """
    if token_shards(sizes) == 1:
        return Choice("none", "each device has whole sequences")
    if name != "auto":
        return Choice(name, f"model.cp_exchange={name}")
    axes = DIMS["n"].activation_axes
    num_devices, together = count_devices(sizes, axes), " x ".join(axes)
    if model.future_keys and model.num_heads % num_devices:
        raise UserError(
            f"model.mesh_shape: {together}={num_devices} does not divide model.num_heads={model.num_heads}, and keys "
            "cannot go round in a ring, because tokens of an image also see later ones; take fewer devices for cp"
        )
    if model.num_heads % num_devices == 0:
        # Keys that come before a query are computed, later ones are skipped. So in a ring all devices wait for the one
        # with the last tokens, which computes almost twice the mean. Heads all have the same work.
        return Choice("ulysses", f"{together}={num_devices} divides the {model.num_heads} query heads")
    if model.attention not in RING_KERNELS:
        raise UserError(
            f"model.attention={model.attention}: {together}={num_devices} does not divide "
            f"model.num_heads={model.num_heads}, so keys and values go round in a ring, whose kernels are "
            f"{', '.join(RING_KERNELS)}; set model.attention=auto"
        )
    return Choice("ring", f"{together}={num_devices} does not divide the {model.num_heads} query heads")


def is_in_blocks(name: str) -> bool:
    """Return whether keys come block by block with the exchange of this name (`AttentionExchange.in_blocks`)."""
    return name != "none" and CP_EXCHANGES[name].in_blocks


def count_repeats(num_kv_heads: int, num_devices: int) -> int:
    """Return how often each key/value head is repeated so that the devices divide the heads."""
    return num_devices // math.gcd(num_devices, num_kv_heads)


MAX_QUERIES = 512  # of a device, whose scores with a block of keys exist at one time in a ring of XLA's operations


def chunk_size(local_tokens: int) -> int:
    """Return how many queries of a device are computed, or skip a block of keys, together in such a ring."""
    return max(n for n in range(1, MAX_QUERIES + 1) if local_tokens % n == 0)


def swap_tokens_for_heads(
    kernel: str, q: jax.Array, k: jax.Array, v: jax.Array, mask_rule: MaskRule, **options: Any
) -> Any:
    """Give each device all tokens of some heads, run the kernel there, and give the tokens back (arXiv:2309.14509):
    q [B, T, N, H], k and v [B, T, K, H] of T own tokens -> [B, T, N, H].

    Four heads of a sequence on two devices; a cell is the part of a head that a device has:

                 tokens 0-3    tokens 4-7               tokens 0-7
        head 0   device 0      device 1                 device 0
        head 1   device 0      device 1    all-to-all   device 0
        head 2   device 0      device 1   ---------->   device 1
        head 3   device 0      device 1   <----------   device 1

    The kernel sees whole sequences, so every kernel works, with documents and windows. The devices must divide the
    query heads. Key/value heads that they do not divide are repeated until they do: each device then gets those that
    its query heads need, and no byte more.
    """
    axes = token_axes()
    repeats = count_repeats(k.shape[2], jax.lax.axis_size(axes))

    def gather_tokens(x: jax.Array) -> jax.Array:
        swapped = jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
        return checkpoint_name(swapped, "exchange")

    # Device d gets a run of query heads. Repeated, the key/value heads that these share are run d too:
    #
    #     devices               0   1   2   3
    #     query heads           01  23  45  67
    #     key/value heads 0 1   0   0   1   1
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    out = find_kernel(kernel)(*map(gather_tokens, (q, k, v)), mask_rule, **options)
    back = partial(jax.lax.all_to_all, axis_name=axes, split_axis=1, concat_axis=2, tiled=True)
    return checkpoint_name(jax.tree.map(back, out), "exchange")
