"""Checkpoints of a run: what they hold, which keys a resumed run may change, and from which of them it goes on."""

import copy
import logging
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from tunix.base.errors import UserError, first_line, mask_values
from tunix.base.forms import sign
from tunix.base.text import as_typed, flat
from tunix.checkpoints.store import Record, Store
from tunix.config import Config, Evaluation, Grpo
from tunix.config.compose import format_resume
from tunix.config.model import list_keys_outside
from tunix.config.saved_runs import upgrade
from tunix.config.training import read_steps
from tunix.data.batches import Position
from tunix.processes import peers
from tunix.sharding.mesh import list_divisors
from tunix.training.state import State

log = logging.getLogger(__name__)


# Keys, or sections, that must have the same value in a run and in the checkpoint that it goes on from: they decide the
# shapes of the state, or which samples come next. The mesh, the number of processes, the strategy, the batch and the
# schedule may change. `MAY_DIFFER` are keys of these sections that change no shape: how a result is computed. The keys
# of initial weights and of low-rank updates must agree, though they are no part of the architecture.
SAME = ("model", "optimizer.name", "optimizer.moments", "training.seq_len", "training.param_dtype", "seed")
SAME_OF_IMAGES = ("training.images_per_row",)  # where the model sees: which images a sequence has room for
MAY_DIFFER = {f"model.{key}" for key in list_keys_outside("mesh", "computation", "losses")}


def check_same(config: Config, saved: dict[str, Any], position: Position, now: Position) -> None:
    """Check that a run may go on from a checkpoint.

    Args:
        config: of the run.
        saved: the config in the checkpoint, perhaps in the form of older code.
        position: in the checkpoint.
        now: names the tokenizer and the data that the run has loaded.

    Raises:
        UserError: the checkpoint belongs to another model, tokenizer or corpus.
    """
    old = flat(upgrade(copy.deepcopy(saved)))
    new = flat(mask_values(config.model_dump(mode="json", by_alias=True)))
    for values in (old, new):
        values["training.param_dtype"] = values["training.param_dtype"] or "float32"
    same = SAME if config.model.vision is None else SAME + SAME_OF_IMAGES
    # The kind or the name of a part comes first: its other keys differ for that reason.
    for key in sorted(old.keys() | new.keys(), key=lambda key: (not key.endswith((".kind", ".name")), key)):
        must_agree = any(key == name or key.startswith(f"{name}.") for name in same) and key not in MAY_DIFFER
        if must_agree and old.get(key) != new.get(key):
            raise UserError(
                f"resume: {key}={as_typed(new.get(key))}, but the checkpoint was made with {as_typed(old.get(key))}; "
                "leave it as it was or start a new run"
            )
    for text in config.training.skip_steps:
        steps = read_steps(text)
        if steps[0] <= position.step and text not in old["training.skip_steps"]:
            later = f", or training.skip_steps=[{position.step + 1}:{steps[-1]}]" if steps[-1] > position.step else ""
            raise UserError(
                f"resume: training.skip_steps={text} begins before step {position.step + 1}, with which the run goes "
                f"on: the checkpoint has learnt from these data; take one from before step {steps[0]} "
                f"(resume=RUN_DIR/checkpoints/STEP){later}"
            )
    if now.tokenizer != position.tokenizer:
        hint = "its tokens mean another text; set tokenizer.path to the old one"
        keys = [key for key in new if key.startswith("tokenizer.") and key != "tokenizer.path"]
        if changed := next((key for key in keys if new[key] != old.get(key)), None):
            hint = f"{changed} was {as_typed(old.get(changed))}; leave it as it was"
        elif config.tokenizer.path is None:
            hint = "the corpus it is trained on has changed; loading.allow_changed_data=true goes on with the old one"
        raise UserError(
            f"resume: the tokenizer ({now.tokenizer}) is not the checkpoint's ({position.tokenizer}); {hint}"
        )
    if now.data != position.data:
        change = f"resume: the training data ({now.data}) are not the checkpoint's ({position.data}); "
        if not config.loading.allow_changed_data:
            by_step = [each for each in getattr(config.data, "stages", ()) if each.from_step is not None]
            hint = ""
            if by_step:
                hint = (
                    f". If the batch is another one, it has moved stage {by_step[0].name} of data.stages, whose first "
                    f"sample follows from from_step={by_step[0].from_step} and the batch: keep "
                    "training.global_batch_size, or give from_tokens with loading.allow_changed_data=true"
                )
            raise UserError(
                f"{change}sample {position.next_sample} of one is not sample {position.next_sample} of the other. "
                f"loading.allow_changed_data=true goes on with it all the same{hint}"
            )
        log.warning("%sgoing on at sample %d of the new ones", change, position.next_sample)
    for name, fingerprint in now.held_out.items():
        if position.held_out.get(name, fingerprint) != fingerprint:  # a set may be new, and old checkpoints have none
            change = f"resume: the held-out documents of {name} are not the checkpoint's; "
            if not config.loading.allow_changed_data:
                raise UserError(
                    f"{change}held-out numbers before and after step {position.step} would be of other texts. "
                    "loading.allow_changed_data=true goes on with the new ones all the same"
                )
            log.warning("%sheld-out numbers after step %d are of the new ones", change, position.step)


def check_cycle(config: Config, step: int) -> None:
    """Check that a run may go on from `step` with rollouts: it must end one, because no checkpoint lies within another.

    Raises:
        UserError: a rollout serves another number of steps than before.
    """
    if not isinstance(config.task, Grpo) or step % (cycle := config.task.num_steps_of_rollout) == 0:
        return
    divisors = list_divisors(step)
    lower, higher = max(each for each in divisors if each < cycle), [each for each in divisors if each > cycle][:1]
    raise UserError(
        f"resume: task.steps_per_rollout={config.task.steps_per_rollout} x task.passes_per_rollout="
        f"{config.task.passes_per_rollout}: a rollout serves {cycle} steps, and the checkpoint's step {step} is within "
        f"one of them; their product must divide it, nearest: {' or '.join(map(str, [lower, *higher]))}"
    )


@dataclass(frozen=True)
class Improvement:
    """The lowest held-out loss so far, and the evaluations in a row that did not lower it: a part of each checkpoint.

    The names of the fields are in saved checkpoints.
    """

    best: float | None = None
    without: int = 0  # evaluations since `best`
    is_due: bool = False  # a stop has left out an evaluation after the step of the checkpoint

    def after(self, cost: float, evaluation: Evaluation) -> "Improvement":
        """Return the improvement after one more evaluation, whose held-out number is `cost`."""
        # A loss that is no number is never the best; an earlier version may have saved one.
        best = math.inf if self.best is None or math.isnan(self.best) else self.best
        if cost < best - evaluation.min_improvement:
            return Improvement(cost, 0)
        return Improvement(self.best, self.without + 1)

    def is_over(self, evaluation: Evaluation) -> bool:
        """Return True where `evaluation.patience` says that the run should end."""
        return evaluation.patience is not None and self.without >= evaluation.patience


class Checkpoints:
    """Checkpoints of one run in a store; leaving the block waits for what is being written."""

    def __init__(self, store: Store):
        self.store = store

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        """Finish what was begun, also when the run ends by an error; then that error is the one to show.

        Ctrl-C gets a note that says from which step the run can go on.
        """
        try:
            self.store.wait()
        except Exception as failure:
            if kind is None:
                raise
            log.error("%s", failure)
        if isinstance(error, KeyboardInterrupt) and peers.is_main() and (steps := self.store.storage.list_steps()):
            # And not `latest`, which may be a run of another project.
            error.add_note(f"{format_resume(self.store.home)} goes on after step {steps[-1]}")

    def save(
        self,
        state: State,
        position: Position,
        improvement: Improvement,
        config: Config,
        tokenizer: str,
        held_out_loss: float | None,
    ) -> None:
        """Start saving; returns when the arrays are copied. A failure of the save before is raised here.

        `tokenizer` is JSON (`Vocab.as_json`).
        """
        info = {
            "position": asdict(position),
            "improvement": asdict(improvement),
            "config": mask_values(config.model_dump(mode="json", by_alias=True)),
            **sign("checkpoint"),
        }
        metrics = None if held_out_loss is None else {"held_out_loss": held_out_loss}
        self.store.save(position.step, state, Record(info, tokenizer, metrics))

    def restore(
        self, step: int | None, abstract: State, config: Config, now: Position
    ) -> tuple[State, Position, Improvement] | None:
        """Return state and position at `step`, or at the newest step that can be read; None if nothing was saved yet.

        Newer checkpoints are put aside, so that the run can write its own. A copy of the parameters, or a window of
        spikes, that the checkpoint does not have is left out of the state.

        Args:
            now: names the tokenizer and the data that the run has loaded.

        Raises:
            UserError: no such step, no readable checkpoint, or one of another model, optimizer, tokenizer or corpus.
        """
        steps, folder = self.store.steps(), self.store.folder
        entries = ", ".join(map(str, steps)) or "none"
        if step is not None and step not in steps:
            raise UserError(f"resume: {folder} has no checkpoint of step {step}; it has {entries}")
        # From the newest backwards, until one can be read. A run that names a step gets that step or an error.
        for candidate in steps[::-1] if step is None else [step]:
            try:
                self.store.check(candidate)
                info = self.store.info(candidate)
                position = Position(**info["position"])
                check_same(config, info["config"], position, now)
                check_cycle(config, position.step)
                # Without a copy of the parameters, or a window of spikes, that the checkpoint does not have.
                requested, present = dict(abstract), info["parts"]
                copies = {name: tree for name, tree in requested.pop("copies", {}).items() if name in present["copies"]}
                spikes = requested.pop("spikes", None)
                if copies:
                    requested["copies"] = copies
                if spikes and spikes["loss"].size == present["spike_window"]:
                    requested["spikes"] = spikes
                self.store.check_state(candidate, requested)
                state = self.store.restore(candidate, requested)
            except UserError:
                raise  # of another model, optimizer, tokenizer or corpus: an older checkpoint would be refused too
            except Exception as error:
                reason = first_line(error)[:400]
                if step is not None:
                    raise UserError(
                        f"resume: the checkpoint of step {step} in {folder} is damaged: {reason}"
                    ) from error
                log.error("CHECKPOINT OF STEP %d IS DAMAGED, taking the one before: %s", candidate, reason)
                continue
            # Only now: a checkpoint that cannot be read is moved too, but not before an older one could be read.
            self.store.put_aside([newer for newer in steps if newer > candidate])
            for name in sorted(set(present["copies"]) - set(abstract.get("copies", {}))):
                log.warning("the checkpoint's copy of the parameters %s is not wanted any more: it is dropped", name)
            # Checkpoints of version 0.1.0 do not say how the held-out loss went.
            position = replace(position, data=now.data, held_out=now.held_out)
            return state, position, Improvement(**info.get("improvement", {}))
        if steps:
            raise UserError(f"resume: all checkpoints in {folder} are damaged ({entries})")
        return None
