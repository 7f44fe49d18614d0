"""Record of a checkpoint: what it holds beside the arrays of the state."""

from typing import Any, NamedTuple


class Record(NamedTuple):
    """Values for JSON, each an item of the checkpoint."""

    about: dict[str, Any]  # position in the data, improvement of the held-out loss, config
    tokenizer: dict[str, Any]
    metrics: dict[str, float] | None  # by which the best checkpoint is chosen; None where nothing was measured
