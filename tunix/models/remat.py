"""Rematerialization: the values of a block's forward pass that are kept until its backward pass.

A policy is a set of names, a row of `REMAT` in config/training.py. A value has a name where
`checkpoint_name(value, name)` gives it one, and only values with a name of the policy are kept. The backward pass
computes everything else again from them. Primitives play no part: a product or a kernel with a backward rule of its own
(`jax.custom_vjp`) is kept like any other.

    name         value                                         computed again without it
    product      result of each `product`                      a matrix product
    attention    result of the kernel, and what it needs       the kernel's forward pass
                 to go backward
    norm         result of each norm                           a mean over D
    residual     sum of the residual stream and a branch       the branch's last norm
    exchange     queries, keys, values and results that        a transfer between devices
                 devices have sent one another

No policy keeps a gathered weight: those of all blocks together are the whole model. They have no name of this table, so
the backward pass gathers them again.
"""

from collections.abc import Callable

import jax

from tunix.config.training import REMAT


def keep_policy(name: str) -> Callable[..., bool]:
    """Return the policy of a row of `REMAT`, as `jax.checkpoint` takes it."""
    return jax.checkpoint_policies.save_only_these_names(*REMAT[name])


def computes_again(name: str, value: str) -> bool:
    """Return whether, under a policy, the backward pass computes the values of this name once more."""
    return value not in REMAT[name]
