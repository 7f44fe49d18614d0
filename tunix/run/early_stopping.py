"""Reasons to end a run before its last step: a table that the loop asks once a step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix.base.errors import Diverged, Ending, Finished, FolderFull, RolloutFailed, Stopped
from tunix.checkpoints.checkpoint import Improvement
from tunix.config import Config
from tunix.config.compose import format_resume
from tunix.config.task import Grpo
from tunix.data.batches import BatchSource
from tunix.processes import watchdog


@dataclass(frozen=True)
class Moment:
    """The run after a step, as far as a reason to end it may ask."""

    cfg: Config
    folder: Path  # of the run
    step: int
    # The newest line of metrics.jsonl from training. It is mostly of the step before `step`, which may still be
    # running: a reason that looks at numbers may come one step late.
    record: dict[str, Any]
    improvement: Improvement  # of the held-out loss, up to the newest evaluation
    source: BatchSource
    failure: RolloutFailed | None = None  # of the next rollout, or of held-out answers


def _add_way_on(failure: object, now: Moment) -> str:
    return f"{failure}. Saved after step {now.step}; go on with {format_resume(now.folder)}"


def check_failure(now: Moment) -> Ending | None:
    """End the run when answers cannot be drawn or scored; where held-out answers fail, at the end of a rollout."""
    if now.failure is None or not now.source.can_stop(now.step):
        return None
    return RolloutFailed(_add_way_on(now.failure, now))


def list_unreached(cfg: Config, last: int, has_held_out: bool) -> list[str]:
    """Return a remark for each key of an end, or of a save, that a run to the step `last` never comes to."""
    hard_stop, patience = cfg.training.hard_stop, cfg.evaluation.patience
    steps = [
        ("training.hard_stop", hard_stop or 0),
        *(("checkpoint.save_at_steps", at) for at in cfg.checkpoint.save_at_steps),
    ]
    remarks = [f"{key}={step} does nothing: the last step of the run is {last}" for key, step in steps if step > last]
    if patience is not None and not (has_held_out and cfg.evaluation.every_steps):
        reason = "nothing is held out" if cfg.evaluation.every_steps else "evaluation.every_steps=null"
        remarks.append(f"evaluation.patience={patience} never ends this run: {reason}")
    return remarks


def check_hard_stop(now: Moment) -> Ending | None:
    """Stop after the step `training.hard_stop`; a resumed run is past it."""
    if now.step != now.cfg.training.hard_stop:
        return None
    return Stopped(f"training.hard_stop={now.step}: saved; go on with {format_resume(now.folder)}")


def check_stop_request(now: Moment) -> Ending | None:
    """Stop after the same step on every process, if one was asked to stop and the source can go on after this step."""
    reason = watchdog.stop_requested()
    if reason is None or not now.source.can_stop(now.step):
        return None
    if failure := watchdog.failure_of_stop():
        return FolderFull(_add_way_on(failure, now))
    return Stopped(f"{reason}: saved after step {now.step}; go on with {format_resume(now.folder)}")


def check_skipped_steps(now: Moment) -> Ending | None:
    """Give up after too many skipped steps in a row, and name the samples of the last."""
    skipped, allowed = now.record.get("skipped", 0), now.cfg.training.max_skipped_steps
    if skipped <= allowed:
        return None
    step = now.record["step"]
    samples = now.source.samples(step)
    return Diverged(
        f"loss or gradients were not finite in {skipped} steps in a row (training.max_skipped_steps={allowed}); "
        f"step {step} had samples {samples.start} to {samples.stop - 1}. The parameters are those of step "
        f"{step - skipped}"
    )


def check_spikes(now: Moment) -> Ending | None:
    """Give up after too many spikes in a row, and say how to go on without their data."""
    row, allowed = now.record.get("spikes", 0), now.cfg.training.max_spikes
    if row <= allowed:
        return None
    step = now.record["step"]
    steps = f"[{','.join([*now.cfg.training.skip_steps, f'{step - row + 1}:{step}'])}]"
    return Diverged(
        f"{row} spikes in a row (training.max_spikes={allowed}), to step {step}: their updates were skipped. "
        f"{format_resume(now.folder)} training.skip_steps={steps} goes on without their data"
    )


def check_patience(now: Moment) -> Ending | None:
    """End the run when the held-out loss has not become lower, or the reward higher, for `evaluation.patience`
    evaluations.

    Within a rollout it goes on: the answers that are under way are not saved.
    """
    cfg, best = now.cfg.evaluation, now.improvement.best
    if not now.improvement.is_over(cfg) or not now.source.can_stop(now.step):
        return None
    if best is None:
        found = f"the held-out {'reward' if isinstance(now.cfg.task, Grpo) else 'loss'} was no number"
    elif isinstance(now.cfg.task, Grpo):  # the best model has the lowest cost, the reward with its sign turned
        found = f"the held-out reward did not rise above {-best:.4f}"
    else:
        found = f"the held-out loss did not fall below {best:.4f}"
    return Finished(
        f"evaluation.patience={cfg.patience}: {found} in {now.improvement.without} evaluations; the run ends after "
        f"step {now.step}"
    )


# All processes ask all reasons, in this order, and every process must get the same answer: a process that ended alone
# would leave the others waiting in the next step. After every step the loop asks `REASONS`. If none of them holds, it
# evaluates, where that is due; then it asks `PLANNED`, and after an evaluation `EVALUATED` too.
Reason = Callable[[Moment], Ending | None]
REASONS: list[Reason] = [check_failure, check_stop_request, check_skipped_steps, check_spikes]
PLANNED: list[Reason] = [check_hard_stop]
EVALUATED: list[Reason] = [check_patience]


def find_ending(now: Moment, reasons: list[Reason]) -> Ending | None:
    """Return the reason to end the run after this step, None to go on. A failure wins over a stop that saves."""
    # Every reason is asked, also after one that holds: `check_stop_request` counts its calls on every process.
    endings = [ending for reason in reasons if (ending := reason(now)) is not None]
    return min(endings, key=lambda ending: ending.saves, default=None)
