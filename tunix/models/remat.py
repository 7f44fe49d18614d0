"""Rematerialization: the values of a block's forward pass that are kept until its backward pass.

A policy is a set of names. A value has a name where `checkpoint_name(value, name)` gives it one, and only values with a
name of the policy are kept. The backward pass computes everything else again from them. Primitives play no part: a
product or a kernel with a backward rule of its own (`jax.custom_vjp`) is kept like any other.

    name         value                                         computed again without it
    product      result of each `product`                      a matrix product
    attention    result of the kernel, and what it needs       the kernel's forward pass
                 to go backward
    norm         result of each norm                           a mean over D
    residual     sum of the residual stream and a branch       the branch's last norm

No policy keeps a gathered weight: those of all blocks together are the whole model. They have no name of this table, so
the backward pass gathers them again.
"""

import jax

NAMES = ("product", "attention", "norm", "residual")
_only = jax.checkpoint_policies.save_only_these_names
REMAT = {
    "none": _only(*NAMES),  # what is left to compute again goes over an array once: activations, RoPE, biases, casts
    "dots": _only("product", "attention"),
    "attention": _only("attention"),
    "full": _only(),
}
