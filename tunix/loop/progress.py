"""Progress of a run: the state of its model, where it began or goes on, and its last step."""

import logging
from dataclasses import dataclass

from tunix.cli import compose
from tunix.data.position import Position
from tunix.inference.start import load_init_from
from tunix.loop.setup import Setup
from tunix.rl.feeds import Feed
from tunix.run.checkpoint import Checkpoints
from tunix.run.improvement import Improvement
from tunix.tokenizer.vocabulary import tokenizer_digest
from tunix.training.optim import check_phases
from tunix.training.sizes import Sizes
from tunix.training.state import State

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come. The loop replaces the state after each step, because a step takes its memory."""

    state: State
    start: Position  # in the data, of the steps that follow
    improvement: Improvement  # of the held-out loss, up to the newest evaluation
    is_new: bool  # False: the run goes on from a checkpoint
    sizes: Sizes  # of the steps that follow
    last: int  # step of the run


def restore_or_begin(job: compose.Job, checkpoints: Checkpoints, setup: Setup, feed: Feed) -> Progress:
    """Return the progress of a resumed run at its checkpoint; of another run, or where none was saved, at step 0."""
    program, corpus, cfg = setup.program, setup.corpus, job.config
    assert corpus is not None
    beginning = Position(0, 0, feed.samples.fingerprint(corpus.fingerprint), tokenizer_digest(corpus.tokenizer))
    restored = checkpoints.restore(job.resume_step, program.abstract, cfg, beginning) if cfg.resume else None
    if restored:
        state, start, improvement = restored
        log.info("resumed at step %d, sample %d", start.step, start.next_sample)
        state = program.complete(state)  # adds parts that the checkpoint lacks: a copy of the parameters, for example
    else:
        if cfg.resume:
            log.warning("no checkpoint in %s yet: starting at step 0", checkpoints.store.folder)
        weights = load_init_from(program, setup.mesh)
        state = setup.compiler.new_state(program) if weights is None else program.new_state(cfg.seed, weights)
        start, improvement = beginning, Improvement()
    sizes = setup.sizes_after(start)
    last = find_last_step(setup, sizes, start, improvement)
    return Progress(state, start, improvement, restored is None, sizes, last)


def find_last_step(setup: Setup, sizes: Sizes, start: Position, improvement: Improvement) -> int:
    """Return the last step of a run that goes on from `start`, as `sizes` say; warn where a user may expect another.

    Where all steps before had the batches that the config says, it is the last step of `setup.sizes`.
    """
    cfg, whole_run = setup.cfg, setup.sizes
    if improvement.is_over(cfg.evaluation):
        log.warning(
            "nothing is left to train after step %d: evaluation.patience=%s ended the run; raise it to go on",
            start.step, cfg.evaluation.patience,
        )  # fmt: skip
        return start.step
    last = sizes.total_steps
    assert last is not None
    # A run that changed its batch on the way has taken other samples in its first steps than the config says. What is
    # left of the data or of the tokens then gives another number of steps.
    if start.num_samples != whole_run.course.taken(start.step):
        log.warning(
            "steps so far were not all of %d sequences: sample %d comes after step %d; the last step is %d, not %d",
            sizes.batch.num_sequences, start.next_sample, start.step, last, whole_run.total_steps,
        )  # fmt: skip
    if last == start.step:
        limits = {f"training.{key}": getattr(cfg.training, key) for key in ("max_steps", "max_tokens", "num_epochs")}
        reached = ", ".join(f"{key}={value}" for key, value in limits.items() if value is not None)
        log.warning("nothing is left to train after step %d: %s; raise it to go on", last, reached)
    if warning := check_phases(cfg.scheduler, whole_run.schedule.spans(last)):
        log.warning("%s", warning)
    return last
