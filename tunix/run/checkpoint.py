"""Checkpoints of a run: what they hold, and which of them a resumed run goes on from."""

import json
import logging
from dataclasses import asdict, replace
from typing import Any

from tokenizers import Tokenizer

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.data.position import Position
from tunix.run.compatible import check_same
from tunix.run.improvement import Improvement
from tunix.run.record import Record
from tunix.run.stores import Store, move_newer
from tunix.training.state import State

log = logging.getLogger(__name__)


class Checkpoints:
    """Checkpoints of one run in a store; leaving the block waits for what is being written."""

    def __init__(self, store: Store):
        self.store = store

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Finish what was begun, also when the run ends by an error; then that error is the one to show."""
        try:
            self.store.wait()
        except Exception as error:
            if kind is None:
                raise
            log.error("%s", error)
        finally:
            self.store.close()

    def save(
        self,
        state: State,
        position: Position,
        improvement: Improvement,
        config: Config,
        tokenizer: Tokenizer,
        held_out_loss: float | None,
    ) -> None:
        """Start saving; returns when the arrays are copied. A failure of the save before is raised here."""
        about = {
            "position": asdict(position),
            "improvement": asdict(improvement),
            "config": config.model_dump(mode="json", by_alias=True),
        }
        metrics = None if held_out_loss is None else {"held_out_loss": held_out_loss}
        self.store.save(position.step, state, Record(about, json.loads(tokenizer.to_str()), metrics))

    def finish(self) -> None:
        """Wait until all that was begun is on disk."""
        self.store.finish()

    def restore(
        self, step: int | None, abstract: State, config: Config, now: Position
    ) -> tuple[State, Position, Improvement] | None:
        """Return state and position at `step`, or at the newest step that can be read; None if nothing was saved yet.

        Newer checkpoints are put aside, so that the run can write its own. A copy of the parameters, or a window of
        spikes, that the checkpoint does not have is left out of the state.

        Args:
            now: names the tokenizer and the data that the run has loaded.

        Raises:
            UserError: no such step, no readable checkpoint, or one of another model, tokenizer or corpus.
        """
        steps, folder = self.store.steps(), self.store.folder
        listed = ", ".join(map(str, steps)) or "none"
        if step is not None and step not in steps:
            raise UserError(f"resume: {folder} has no checkpoint of step {step}; it has {listed}")
        # From the newest backwards, until one can be read. A run that names a step gets that step or an error.
        for candidate in steps[::-1] if step is None else [step]:
            try:
                self.store.check(candidate)
                about = self.store.about(candidate)
                position = Position(**about["position"])
                check_same(config, about["config"], position, now)
                state = self.store.restore(candidate, _without_absent_parts(abstract, about["parts"]))
            except UserError:
                raise  # of another model, tokenizer or corpus: an older checkpoint would be refused too
            except Exception as error:
                reason = str(error).splitlines()[0][:400]
                if step is not None:
                    raise UserError(
                        f"resume: the checkpoint of step {step} in {folder} is damaged: {reason}"
                    ) from error
                log.error("CHECKPOINT OF STEP %d IS DAMAGED, taking the one before: %s", candidate, reason)
                continue
            # Only now: a checkpoint that cannot be read is moved too, but not before an older one could be read.
            move_newer(self.store, [newer for newer in steps if newer > candidate])
            for name in sorted(set(about["parts"]["copies"]) - set(abstract.get("copies", {}))):
                log.warning("the checkpoint's copy of the parameters %s is not wanted any more: it is dropped", name)
            # Checkpoints of version 0.1.0 do not say how the held-out loss went.
            return state, replace(position, data=now.data), Improvement(**about.get("improvement", {}))
        if steps:
            raise UserError(f"resume: all checkpoints in {folder} are damaged ({listed})")
        return None


def _without_absent_parts(abstract: State, present: dict[str, Any]) -> State:
    """Return the state to read from a checkpoint that has these parts (`items.find_parts`)."""
    wanted = dict(abstract)
    copies = {name: tree for name, tree in wanted.pop("copies", {}).items() if name in present["copies"]}
    spikes = wanted.pop("spikes", None)
    if copies:
        wanted["copies"] = copies
    if spikes and spikes["loss"].size == present["spike_window"]:
        wanted["spikes"] = spikes
    return wanted
