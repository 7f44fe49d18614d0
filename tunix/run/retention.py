"""Retention of checkpoints: the section `checkpoint` says which ones a run keeps."""

from dataclasses import dataclass
from datetime import datetime

from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint.checkpoint_managers import PreservationContext

from tunix.config import Checkpoint


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint, as Orbax's rules look at it."""

    step: int
    metrics: dict[str, float] | None
    time: datetime


def list_dropped(rule: policies.PreservationPolicy, saved: list[Saved]) -> list[int]:
    """Return the steps of the checkpoints that are not kept; `saved` is in the order of steps."""
    kept = rule.should_preserve(saved, context=PreservationContext())
    return [each.step for each, keep in zip(saved, kept, strict=True) if not keep]


def make_rules(cfg: Checkpoint) -> policies.PreservationPolicy:
    """Return Orbax's rule for the checkpoints that are not deleted."""
    rules: list[policies.PreservationPolicy] = [policies.LatestN(cfg.max_to_keep)]
    if cfg.keep_every_steps:
        rules.append(policies.EveryNSteps(cfg.keep_every_steps))
    if steps := [*([0] if cfg.save_first else []), *cfg.save_at_steps]:
        rules.append(policies.CustomSteps(steps))
    if cfg.keep_best:
        rules.append(
            policies.BestN(get_metric_fn=held_out_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        )
    return policies.AnyPreservationPolicy(rules)


def held_out_loss(metrics: dict[str, float]) -> float:
    """Return the number that is lowest for the best checkpoint."""
    return metrics["held_out_loss"]
