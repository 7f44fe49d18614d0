"""Reasons to end a run before its last step: a table that the loop asks once a step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix.base.errors import Ending, NotFinite, Stopped
from tunix.config import Config
from tunix.data.batches import BatchSource
from tunix.processes import stopping


@dataclass(frozen=True)
class Moment:
    """The run after a step, as far as a reason to end it may ask."""

    cfg: Config
    folder: Path  # of the run
    step: int
    record: dict[str, Any]  # the newest line of metrics.jsonl from training; a running step has none yet
    evaluation: dict[str, Any]  # the newest held-out line
    elapsed_s: float  # since the program began
    source: BatchSource


def time_limit(now: Moment) -> Ending | None:
    """Ask all processes to stop once `training.time_limit_s` is over; `asked_to_stop` then ends them together."""
    limit = now.cfg.training.time_limit_s
    if limit is not None and now.elapsed_s > limit:
        stopping.request_stop(f"training.time_limit_s={limit:g}")
    return None


def hard_stop(now: Moment) -> Ending | None:
    """Stop after the step `training.hard_stop`; a resumed run is past it."""
    if now.step != now.cfg.training.hard_stop:
        return None
    return Stopped(f"training.hard_stop={now.step}: saved; go on with resume={now.folder}")


def asked_to_stop(now: Moment) -> Ending | None:
    """Stop after the same step on every process, when one of them was asked to, and the source can go on from there."""
    why = stopping.stop_requested()
    if why is None or not now.source.can_stop(now.step):
        return None
    return Stopped(f"{why}: saved after step {now.step}; go on with resume={now.folder}")


def not_finite(now: Moment) -> Ending | None:
    """Give up after too many skipped steps in a row, and name the samples of the last."""
    skipped, allowed = now.record.get("skipped", 0), now.cfg.training.max_skipped_steps
    if skipped <= allowed:
        return None
    step = now.record["step"]
    first, end = now.source.after(step - 1).next_sample, now.source.after(step).next_sample
    return NotFinite(
        f"loss or gradients were not finite in {skipped} steps in a row (training.max_skipped_steps={allowed}); "
        f"step {step} had samples {first} to {end - 1}. The parameters are those of step {step - skipped}"
    )


# Every process asks every reason after every step, in this order, and must get the same answer as the others.
REASONS: list[Callable[[Moment], Ending | None]] = [time_limit, hard_stop, asked_to_stop, not_finite]


def find_ending(now: Moment) -> Ending | None:
    """Return the reason to end the run after this step, None to go on. A failure wins over a stop that saves."""
    endings = [ending for reason in REASONS if (ending := reason(now)) is not None]
    return min(endings, key=lambda ending: ending.saves, default=None)
