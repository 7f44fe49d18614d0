"""Kernels by name. Each function is named as text, `module:function`, so that the config imports no jax."""

from typing import NamedTuple

# Kernels of attention; `models/attention.py` says the arguments and results of one.
KERNELS = {
    "auto": "tunix.models.kernels:fastest",
    "flash": "tunix.models.flash:flash",
    "xla": "tunix.models.attention:plain",
    "cudnn": "tunix.models.attention:cudnn",
}
# Kernels that can attend to one block of keys after another (a ring). To add up the results, they also return the sum
# of each softmax, which JAX's function for cuDNN does not.
RING_KERNELS = ("auto", "flash", "xla")

# Products of rows with the weights of their experts; `models/products.py` says what one takes.
GROUPED = {
    "auto": "tunix.models.kernels:fastest_grouped",
    "grouped": "tunix.models.grouped:grouped",
    "xla": "jax.lax:ragged_dot",
}


class MatmulDtype(NamedTuple):
    """A dtype in which attention and MLP multiply, in place of training.compute_dtype."""

    product: str  # the function; arguments and result of those in `models/products.py`
    numbers: str  # what the numbers are called in messages
    speed: str  # key in the files of conf/command/device; null in a file: that device cannot multiply this dtype


# The values of training.matmul_dtype beside null.
MATMUL_DTYPES = {"fp8": MatmulDtype("tunix.models.fp8:fp8_product", "8-bit floats", "fp8_tflops")}
