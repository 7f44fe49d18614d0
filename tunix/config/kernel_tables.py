"""Kernels by name. Each is a function, given by its place, so that the config needs no jax."""

from typing import NamedTuple

# Kernels of attention; `models/attention.py` says what one takes and gives.
KERNELS = {
    "auto": "tunix.models.kernels:fastest",
    "flash": "tunix.models.flash:flash",
    "xla": "tunix.models.attention:plain",
    "cudnn": "tunix.models.attention:cudnn",
}
RING_KERNELS = ("auto", "flash", "xla")  # those that also compute blocks of a ring

# Products of rows with the weights of their experts; `models/products.py` says what one takes.
GROUPED = {
    "auto": "tunix.models.kernels:fastest_grouped",
    "grouped": "tunix.models.grouped:grouped",
    "xla": "jax.lax:ragged_dot",
}


class MatmulDtype(NamedTuple):
    """Numbers that products of attention and MLP multiply in the place of those of training.compute_dtype."""

    product: str  # place of the product, which takes and gives what those in `models/products.py` do
    numbers: str  # in words
    speed: str  # key of a kind of device (conf/command/device) that is null where it has no such products


# The values of training.matmul_dtype beside null.
MATMUL_DTYPES = {"fp8": MatmulDtype("tunix.models.fp8:fp8_product", "8-bit floats", "fp8_tflops")}
