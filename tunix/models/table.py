"""Kernels of attention, products of experts, dtypes of products and exchanges, by name.

An exchange is how devices that share a sequence, or experts, bring their arrays together within a layer. What one
device does is a function of `models/`. What it sends, and how long that takes, are functions of `costs/` and `plan/`.
This file is below all of them and may not import them, and the config imports no jax: so a row names its functions as
text, `module:function`, and `import_object` imports one when it is used.
"""

from typing import Any, NamedTuple

from tunix.base.dotted_path import import_object

# Kernels of attention, beside auto; `models/attention.py` says the arguments and results of one.
KERNELS = {
    "flash": "tunix.models.flash_attention:flash",
    "xla": "tunix.models.attention:plain",
    "cudnn": "tunix.models.attention:cudnn",
}
# Kernels that can attend to one block of keys after another (a ring). To add up the results, they also return the sum
# of each softmax, which JAX's function for cuDNN does not.
RING_KERNELS = ("auto", "flash", "xla")


def find_kernel(name: str) -> Any:
    """Return the kernel of attention with this key of `KERNELS` or dotted path."""
    return import_object(KERNELS.get(name, name))


# What `model.expert_products` may be beside products by name: kernels that compute experts as a whole
# (models/fused_experts.py).
FUSED = "fused"
# Products of rows with the weights of their experts; `models/matmul.py` says what one takes.
GROUPED = {
    "grouped": "tunix.models.grouped_matmul:grouped",
    "xla": "jax.lax:ragged_dot",
}


class MatmulDtype(NamedTuple):
    """A dtype in which attention and MLP multiply, in place of training.compute_dtype."""

    product: str  # the function; arguments and result of those in `models/matmul.py`
    numbers: str  # what the numbers are called in messages
    speed: str  # field of `DeviceKind`; null in a file of conf/command/device: that device cannot multiply this dtype
    on_stages: bool = True  # whether its function may be vmapped over the stages of pp


# The values of training.matmul_dtype beside null.
MATMUL_DTYPES = {
    "fp8": MatmulDtype("tunix.models.matmul:fp8_product", "8-bit floats", "fp8_tflops"),
    "mxfp8": MatmulDtype(
        "tunix.models.block_scaled:mxfp8_product", "8-bit floats in blocks", "mxfp8_tflops", on_stages=False
    ),
}


class AttentionExchange(NamedTuple):
    """How queries on one device meet the keys of the same sequence on other devices (the mesh axis cp)."""

    function: str  # what one device does; models/context_parallel.py says its arguments and results
    transfers: str  # what a layer sends; arguments and result of `swap_heads` (costs/communication.py)
    # Seconds of a layer; arguments and result of `time_of_ulysses` (plan/derived_time.py). model.cp_exchange=auto
    # compares the exchanges that have this function, where the number of heads allows more than one.
    time: str | None = None
    splits_heads: bool = False  # each device computes some of the query heads, so cp * tp must divide their number
    # Keys come one block at a time. Only the kernels of `RING_KERNELS` can add up such blocks. The device with the last
    # tokens of a sequence works longest, since its queries see all blocks.
    in_blocks: bool = False


# The values of model.cp_exchange beside auto.
CP_EXCHANGES = {
    "ulysses": AttentionExchange(
        function="tunix.models.context_parallel:swap_tokens_for_heads",
        transfers="tunix.costs.communication:swap_heads",
        time="tunix.plan.derived_time:time_of_ulysses",
        splits_heads=True,
    ),
    "ring": AttentionExchange(
        function="tunix.models.ring:ring_attention",
        transfers="tunix.costs.communication:hand_on_keys",
        time="tunix.plan.derived_time:time_of_ring",
        in_blocks=True,
    ),
}


class ExpertExchange(NamedTuple):
    """How tokens reach experts on other devices, and how the results come back (the mesh axis ep)."""

    function: str  # what one device does; models/expert_parallel.py says its arguments and results
    transfers: str  # what a step sends; arguments and result of `gather_tokens` (costs/communication.py)
    has_buffer: bool = False  # rows arrive in a buffer, which model.expert_buffer_factor bounds


# The values of model.expert_exchange beside auto.
EXPERT_EXCHANGES = {
    "gather": ExpertExchange(
        function="tunix.models.expert_parallel:exchange_by_gather",
        transfers="tunix.costs.communication:gather_tokens",
    ),
    "rows": ExpertExchange(
        function="tunix.models.expert_parallel:exchange_rows",
        transfers="tunix.costs.communication:send_rows",
        has_buffer=True,
    ),
}
