"""Exchanges by name. A row has the places of its functions, so that the config needs no jax.

An exchange brings together arrays of several devices within a layer. What one device does is a function of
`models/`; what that sends, and how long it takes, are functions of `costs/` and `plan/`, which are above `models/`.
"""

from typing import NamedTuple


class AttentionExchange(NamedTuple):
    """How the tokens of a sequence meet keys of the same sequence that rest on other devices."""

    function: str  # place of what one device does: models/exchanges.py says what it takes and gives
    transfers: str  # place of what a layer sends: it takes and gives what `swap_heads` of costs/transfers.py does
    # Place of the seconds of a layer: it takes and gives what `time_of_ulysses` of plan/exchange_times.py does. Where
    # the heads leave a choice, model.cp_exchange=auto compares exchanges that have one.
    time: str | None = None
    splits_heads: bool = False  # the devices divide the query heads
    # Keys come block by block: kernels are those of `RING_KERNELS`, and the device with the last tokens works longest.
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
    """How tokens reach experts of other devices, and how the results come back."""

    function: str  # place of what one device does: models/expert_exchanges.py says what it takes and gives
    transfers: str  # place of what a step sends: as `gather_tokens` of costs/expert_transfers.py says it
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
