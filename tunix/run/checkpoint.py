"""Orbax writes checkpoints: sharded, in the background, whole or not at all. Here: what they hold, and for whom."""

import json
import logging
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies
from tokenizers import Tokenizer

from tunix.base.errors import UserError
from tunix.config import Checkpoint, Config
from tunix.config.values import flat
from tunix.data.position import Position
from tunix.processes import peers
from tunix.sharding.arrays import from_main, to_main
from tunix.training.state import State

log = logging.getLogger(__name__)

# A checkpoint means something only to a run that has these in common with it. The mesh, the number of processes, the
# strategy, the batch and the schedule may change.
SAME_CONFIG = ("model", "optimizer.name", "training.seq_len", "training.param_dtype", "seed")
MAY_DIFFER = ("model.mesh_shape", "model.attention")


class Checkpoints:
    """Checkpoints of one run. On a shared disk each process writes its shards; otherwise process 0 keeps all."""

    def __init__(self, folder: Path, cfg: Checkpoint, shared: bool = True):
        self.folder, self.cfg, self.shared = folder.absolute(), cfg, shared
        self.keeps = shared or peers.is_main()
        if self.keeps:
            self.manager = self._manager()

    def _manager(self) -> ocp.CheckpointManager:
        cfg = self.cfg
        keep: list[policies.PreservationPolicy] = [policies.LatestN(cfg.max_to_keep)]
        if cfg.keep_every_steps:
            keep.append(policies.EveryNSteps(cfg.keep_every_steps))
        if cfg.save_first:
            keep.append(policies.CustomSteps([0]))
        if cfg.keep_best:
            keep.append(
                policies.BestN(get_metric_fn=_held_out_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
            )
        who: dict[str, Any] = {}
        if not self.shared:
            self.folder.mkdir(exist_ok=True)
            only_me = ocp.options.MultiprocessingOptions(active_processes={0}, barrier_sync_key_prefix="process_0")
            who = {"multiprocessing_options": only_me, "create": False}
        return ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(keep),
                best_fn=_held_out_loss,
                best_mode="min",
                enable_async_checkpointing=cfg.async_,
                cleanup_tmp_directories=True,
                **who,
            ),
        )

    def due(self, step: int, last_step: int) -> bool:
        every = self.cfg.save_every_steps
        return step == last_step or (every is not None and step % every == 0)

    def save(
        self, state: State, position: Position, config: Config, tokenizer: Tokenizer, held_out_loss: float | None
    ) -> None:
        """Start saving; returns when the arrays are copied. A failure of the save before is raised here."""
        about = {"position": asdict(position), "config": config.model_dump(mode="json", by_alias=True)}
        kept = state if self.shared else to_main(state)
        if kept is None:
            return
        try:
            self.manager.save(
                position.step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(kept),
                    run=ocp.args.JsonSave(about),
                    tokenizer=ocp.args.JsonSave(json.loads(tokenizer.to_str())),
                ),
                metrics=None if held_out_loss is None else {"held_out_loss": held_out_loss},
                force=True,
            )
        except Exception as error:
            raise self._write_error(error) from error

    def finish(self) -> None:
        """Wait until all that was started is on disk."""
        if self.shared:
            self._wait()
        else:
            peers.together(self._wait, "process 0 keeps the checkpoint", peers.NO_LIMIT_S)

    def _wait(self) -> None:
        if not self.keeps:
            return
        try:
            self.manager.wait_until_finished()
            self.manager.check_for_errors()
        except Exception as error:
            raise self._write_error(error) from error

    def restore(
        self, step: int | None, abstract: State, config: Config, now: Position
    ) -> tuple[State, Position] | None:
        """State and position at `step`, or at the newest step that can be read; None if nothing was saved yet.

        `now` names the tokenizer and the data that the run has loaded.

        Newer checkpoints are put aside, so that the run can write its own.

        Raises:
            UserError: no such step, no readable checkpoint, or one of another model, tokenizer or corpus.
        """
        if self.shared:
            return self._restore(step, abstract, config, now)
        on_host = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), abstract)
        found = peers.together(
            lambda: self._restore(step, on_host, config, now) if self.keeps else None,
            "process 0 reads the checkpoint",
            peers.NO_LIMIT_S,
        )
        position = peers.agree(json.dumps(asdict(found[1])) if found else "", "position")
        if not position:
            return None
        return from_main(found[0] if found else None, abstract), Position(**json.loads(position))

    def _restore(
        self, step: int | None, abstract: State, config: Config, now: Position
    ) -> tuple[State, Position] | None:
        steps = sorted(self.manager.all_steps(), reverse=True)
        if step is not None and step not in steps:
            raise UserError(
                f"resume: {self.folder} has no checkpoint of step {step}; "
                f"it has {', '.join(map(str, sorted(steps))) or 'none'}"
            )
        for candidate in steps if step is None else [step]:
            try:
                about = self.manager.restore(candidate, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
                position = Position(**about["position"])
                _check_same(config, about["config"], position, now)
                state = self.manager.restore(
                    candidate, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
                ).state
            except UserError:
                raise
            except Exception as error:
                reason = str(error).splitlines()[0][:200]
                if step is not None:
                    raise UserError(
                        f"resume: the checkpoint of step {step} in {self.folder} is damaged: {reason}"
                    ) from error
                log.error("CHECKPOINT OF STEP %d IS DAMAGED, taking the one before: %s", candidate, reason)
                continue
            self._put_aside([newer for newer in steps if newer > candidate])
            return state, replace(position, data=now.data)
        if steps:
            raise UserError(
                f"resume: all checkpoints in {self.folder} are damaged ({', '.join(map(str, sorted(steps)))})"
            )
        return None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """What was started is finished, also when the run ends by an error; that error is the one to show."""
        try:
            self._wait()
        except Exception as error:
            if kind is None:
                raise
            log.error("%s", error)
        finally:
            if self.keeps:
                self.manager.close()

    def _put_aside(self, steps: list[int]) -> None:
        if not steps:
            return
        aside = self.folder.with_name(f"checkpoints_put_aside_{time.strftime('%Y-%m-%d_%H-%M-%S')}")
        log.warning("newer checkpoints (%s) are put aside in %s", ", ".join(map(str, sorted(steps))), aside)
        if self.shared:
            peers.barrier("before checkpoints are put aside")
        if peers.is_main():
            aside.mkdir()
            for step in steps:
                (self.folder / str(step)).rename(aside / str(step))
        if self.shared:
            peers.barrier("checkpoints are put aside")
        self.manager.reload()

    def _write_error(self, error: Exception) -> Exception:
        """A disk that is full or cannot be written is the user's to mend; anything else is a bug."""
        text = str(error)
        if not (
            isinstance(error, OSError)
            or "No space left" in text
            or "RESOURCE_EXHAUSTED" in text
            or "PERMISSION_DENIED" in text
        ):
            return error
        whole = ", ".join(map(str, sorted(self.manager.all_steps()))) or "none"
        free = shutil.disk_usage(self.folder).free / 2**30
        return UserError(
            f"a checkpoint could not be written to {self.folder} ({free:.2f} GiB free): {text.splitlines()[0][:200]}; "
            f"whole checkpoints: {whole}. Make room and go on with resume={self.folder.parent}"
        )


def _held_out_loss(metrics: dict[str, float]) -> float:
    return metrics["held_out_loss"]


def _check_same(config: Config, saved: dict[str, Any], position: Position, now: Position) -> None:
    """Raise UserError where the checkpoint belongs to another model, tokenizer or corpus."""
    current = config.model_dump(mode="json", by_alias=True)
    current["training"]["param_dtype"] = config.training.dtypes["param"]
    saved["training"]["param_dtype"] = saved["training"]["param_dtype"] or "float32"
    old, new = flat(saved), flat(current)
    for key in sorted(old.keys() | new.keys()):
        same = key not in MAY_DIFFER and any(key == same or key.startswith(f"{same}.") for same in SAME_CONFIG)
        if same and old.get(key) != new.get(key):
            raise UserError(
                f"resume: {key}={new.get(key)}, but the checkpoint was made with {old.get(key)}; "
                "leave it as it was or start a new run"
            )
    if now.tokenizer != position.tokenizer:
        way_out = "its tokens mean another text; set tokenizer.path to the old one"
        if config.tokenizer.path is None:
            way_out = (
                "the corpus it is trained on has changed; loading.allow_changed_data=true goes on with the old one"
            )
        raise UserError(
            f"resume: the tokenizer ({now.tokenizer}) is not the checkpoint's ({position.tokenizer}); {way_out}"
        )
    if now.data != position.data:
        change = f"resume: the training data ({now.data}) are not the checkpoint's ({position.data}); "
        if not config.loading.allow_changed_data:
            raise UserError(
                f"{change}sample {position.next_sample} of one is not sample {position.next_sample} of the other. "
                "loading.allow_changed_data=true goes on with it all the same"
            )
        log.warning("%sgoing on at sample %d of the new ones", change, position.next_sample)
