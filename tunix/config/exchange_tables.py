"""Exchanges by name: how devices that share a sequence, or experts, bring their arrays together within a layer.

What one device does is a function of `models/`. What it sends, and how long that takes, are functions of `costs/` and
`plan/`. This file is below all of them and may not import them, so a row names its functions as text,
`module:function`; `import_object` imports one when it is used.
"""

from typing import NamedTuple


class AttentionExchange(NamedTuple):
    """How queries on one device meet the keys of the same sequence on other devices (the mesh axis cp)."""

    function: str  # what one device does; models/exchanges.py says its arguments and results
    transfers: str  # what a layer sends; arguments and result of `swap_heads` (costs/transfers.py)
    # Seconds of a layer; arguments and result of `time_of_ulysses` (plan/exchange_times.py). model.cp_exchange=auto
    # compares the exchanges that have this function, where the number of heads allows more than one.
    time: str | None = None
    splits_heads: bool = False  # each device computes some of the query heads, so cp * tp must divide their number
    # Keys come one block at a time. Only the kernels of `RING_KERNELS` can add up such blocks. The device with the last
    # tokens of a sequence works longest, since its queries see all blocks.
    in_blocks: bool = False


# The values of model.cp_exchange beside auto.
CP_EXCHANGES = {
    "ulysses": AttentionExchange(
        function="tunix.models.exchanges:swap_tokens_for_heads",
        transfers="tunix.costs.transfers:swap_heads",
        time="tunix.plan.exchange_times:time_of_ulysses",
        splits_heads=True,
    ),
    "ring": AttentionExchange(
        function="tunix.models.ring:attend_in_ring",
        transfers="tunix.costs.transfers:hand_on_keys",
        time="tunix.plan.exchange_times:time_of_ring",
        in_blocks=True,
    ),
}


class ExpertExchange(NamedTuple):
    """How tokens reach experts on other devices, and how the results come back (the mesh axis ep)."""

    function: str  # what one device does; models/expert_exchanges.py says its arguments and results
    transfers: str  # what a step sends; arguments and result of `gather_tokens` (costs/expert_transfers.py)
    has_buffer: bool = False  # rows arrive in a buffer, which model.expert_buffer_factor bounds


# The values of model.expert_exchange beside auto.
EXPERT_EXCHANGES = {
    "gather": ExpertExchange(
        function="tunix.models.expert_exchanges:exchange_by_gather",
        transfers="tunix.costs.expert_transfers:gather_tokens",
    ),
    "rows": ExpertExchange(
        function="tunix.models.expert_exchanges:exchange_rows",
        transfers="tunix.costs.expert_transfers:send_rows",
        has_buffer=True,
    ),
}
