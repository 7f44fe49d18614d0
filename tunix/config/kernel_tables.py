"""Kernels by name. Each is a function, given by its place, so that the config needs no jax."""

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
