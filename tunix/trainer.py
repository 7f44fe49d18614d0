"""The program: from a checked config to a trained model. Read `run` from top to bottom.

Behind it stand its parts: what it derives before it writes (`Setup`), how far it has come (`Progress`), its steps
(`Loop`) and what happens between two of them: evaluations, checkpoints, reasons to end.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tunix.base.buckets import join
from tunix.base.errors import Finished, RolloutFailed, Stopped, UserError, mask_values
from tunix.base.files import read_json_lines
from tunix.checkpoints.checkpoint import Checkpoints, Improvement
from tunix.checkpoints.root import check_root, find_root, write_root
from tunix.checkpoints.store import WAITING, open_store
from tunix.config import Config, Evaluation, compose
from tunix.config.batch import BatchShape
from tunix.config.compose import list_remarks, to_yaml
from tunix.costs.devices import Cluster, find_kind, read_topology, replace_network
from tunix.costs.step import check_matmul_dtype, find_run_peak_tflops
from tunix.data.batches import Batch, BatchSource, Numbers, Position
from tunix.data.prompts import AnyCorpus
from tunix.data.tokenizer import tokenizer_digest
from tunix.feeds import Evaluator, Feed, load_data, make_feed
from tunix.inference.pretrained import check_init_from, load_init_from
from tunix.plan.derived_time import resolve_exchange
from tunix.plan.ranking import (
    GIB,
    describe_choice,
    describe_no_fit,
    find_open_key,
    fix_batch,
    make_candidate,
    rank,
    replace_mesh,
)
from tunix.processes import peers
from tunix.processes.rollcall import list_versions
from tunix.processes.watchdog import Watchdog, limit_time, listening
from tunix.run.compiling import CompiledSteps, Compiler, StartClock, describe_memory, keep_programs, list_unfit_settings
from tunix.run.early_stopping import EVALUATED, PLANNED, REASONS, Moment, find_ending, list_unreached
from tunix.run.folder import hold_lock, keep_files, open_folder, start_logging, watch_folder, write_record
from tunix.run.goodput import SPLIT, Goodput
from tunix.run.metrics import Metrics, StepLog, read_peak_memory_gib
from tunix.run.start_report import make_start_report
from tunix.run.table import Start
from tunix.run.trace import CommunicationTrace, check_window
from tunix.sharding.mesh import format_mesh_shape, resolve, token_shards
from tunix.training.choices import Planned, build_mesh, check_compiler_options, split_devices
from tunix.training.kernel_check import check_attention, check_expert_matmul
from tunix.training.multiple_choice import read_questions
from tunix.training.optimizer import check_phases
from tunix.training.state import State
from tunix.training.train_spec import Sizes, TrainSpec, assemble, assemble_stages, check_shared_rows, derive_sizes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """The folder and the last numbers of a run."""

    folder: Path | None  # None after a dry run
    train: dict[str, Any]  # the last line of metrics.jsonl from training
    held_out: dict[str, Any]  # and from held-out evaluation


def run(job: compose.Job) -> Result:
    """Train as the config says.

    Raises:
        UserError: the run cannot be done, found before anything is written; or a checkpoint cannot be written.
        Ending: a reason of `run.early_stopping` holds.
    """
    start_time, clock = time.monotonic(), StartClock()
    # Join the other processes first: jax must know all devices before it is asked for one. The roll call compares
    # configs and versions, so a mistake in one of them ends every process here. `auto` becomes a value: only now are
    # the devices known.
    remarks = peers.join(job.config.distributed, list_versions() | compose.list_info(job.config))
    waiting_log = start_logging(remarks, job.config.logging)
    keep_programs(job.config)
    cfg = job.config

    # From here on a process that fails alone ends the others, with its reason. A process that is alone listens to stop
    # signals later: until it has a folder they end it at once, and hours of tokenizing have no step to wait for.
    is_alone = jax.process_count() == 1
    with ExitStack() as signals, Watchdog(cfg.distributed) as watchdog, ExitStack() as stack:
        if not is_alone:
            signals.enter_context(listening())
        with watchdog.phase("planning", math.inf):
            planned, chosen = plan_run(cfg)
        try_out(cfg)
        home_is_shared = None if cfg.dry_run else check_root(job)
        mesh = build_mesh(cfg, planned=planned)
        stack.enter_context(jax.set_mesh(mesh))

        # Find every mistake before anything is written. A dry run ends with the report of all derived numbers. In a
        # new run the compiler begins as soon as it knows the program, and works while data and weights are read.
        compiler = stack.enter_context(Compiler(mesh, watchdog))
        setup = set_up(cfg, planned, mesh, chosen, watchdog, compiler, clock)
        log.info("%s", setup.report)
        for remark in list_remarks(job, os.environ):
            log.warning("%s", remark)
        if setup.corpus is None:
            steps = setup.sizes.total_steps
            if steps is not None and (warning := check_phases(cfg.scheduler, setup.sizes.schedule.spans(steps))):
                log.warning("%s", warning)
            return Result(None, {}, {})
        feed = stack.enter_context(make_feed(cfg, setup.corpus, setup.train_spec, mesh, watchdog))
        check_before_writing(setup, feed)
        if not cfg.resume:  # a checkpoint may be refused, and its program is mostly in the compile cache
            compiler.begin_run(setup.train_specs, setup.sizes.schedule, setup.sizes.total_steps)
        clock.end("checks")

        # Take the folder, and the state to start from: the newest checkpoint of a resumed run that can be read, else
        # the weights of model.init_from, else new ones. Checkpoints are refused before the folder is written to.
        if is_alone:
            signals.enter_context(listening())
        folder, shared = open_folder(job)
        root = find_root(job, folder)
        is_shared = shared if home_is_shared is None else home_is_shared
        with (
            hold_lock(folder, root),
            Checkpoints(open_store(join(root, "checkpoints"), cfg.checkpoint, is_shared)) as checkpoints,
        ):
            progress = restore_or_begin(job, checkpoints, setup, feed)
            for remark in list_unreached(cfg, progress.last, feed.held_out is not None):
                log.warning("%s", remark)
            clock.end("state")
            write_record(job, folder, shared, waiting_log)
            keep_files(cfg, setup.corpus.vocab, folder, shared)
            write_root(job, folder, root)
            log.info("writing to %s%s", folder, "" if root == str(folder) else f", checkpoints to {root}")

            with open_loop(setup, progress, feed, checkpoints, folder, watchdog, start_time) as loop:
                loop.begin(clock)
                loop.end(loop.run(), feed)
        log.info("done: %s", folder)
        return Result(folder, loop.step_log.last, loop.evaluations.latest)


def plan_run(cfg: Config) -> tuple[Planned, str]:
    """Return values of the keys that a config leaves open, the same on every process, and in words what was chosen.

    Nothing is compiled for exchange and policy, which are those that `tunix.plan` would take on this run's devices.
    Devices whose speed and memory are not known leave `auto` to the sizes of the model (`select_exchange`) and to
    their platform (`REMAT_BY_PLATFORM`).

    Raises:
        UserError: nothing fits. The message says how much is missing and what would fit.
    """
    # A key that takes what memory is left (`find_open_key`) has taken what larger chunks of logits would need.
    memory_is_left = find_open_key(cfg) is None
    cfg, chosen = _resolve_planned(cfg)
    reasons, kind = [chosen], find_kind(jax.devices()[0].device_kind)
    if kind is not None and "auto" in (cfg.model.cp_exchange, cfg.training.remat, cfg.training.loss_chunk_size):
        sizes, cluster = _resolve_mesh(cfg), _describe_cluster(cfg)
        if cfg.model.cp_exchange == "auto" and token_shards(sizes) > 1:
            cfg, reason = resolve_exchange(cfg, sizes, cluster)
            reasons.append(reason)
        candidate = make_candidate(cfg, sizes, None, cluster)
        if cfg.training.remat == "auto":
            policy = candidate.choices.remat.policy
            cfg = cfg.with_training(remat=policy)
            reasons.append(
                f"training.remat={policy}: a step needs {candidate.memory / GIB:.1f} GiB of a device (derived), and "
                f"may use {cfg.plan.memory_share:.0%} of {kind.memory_gib:g}"
            )
        chunk_size = candidate.cfg.training.loss_chunk_size
        if memory_is_left and chunk_size != cfg.training.loss_chunk_size:
            cfg = cfg.with_training(loss_chunk_size=chunk_size)
            num_rows = chunk_size * candidate.choices.batch.sequences_per_shard
            reasons.append(
                f"training.loss_chunk_size={chunk_size}: a step with {num_rows:,} rows of logits at a time needs "
                f"{candidate.memory / GIB:.1f} GiB of a device (derived)"
            )
    reasons = [reason for reason in reasons if reason]
    for reason in reasons:
        log.info("%s", reason)
    return Planned.of(cfg), "; ".join(reasons)


def _resolve_planned(cfg: Config) -> tuple[Config, str]:
    """Return the config with mesh, micro batch and remat policy in place of what it leaves open, and what was chosen.

    Process 0 chooses the mesh that `tunix.plan` ranks first, and sends it to the others. The text is empty where
    nothing is open.

    Raises:
        UserError: nothing fits. The message says how much is missing and what would fit.
    """
    chooses_mesh = cfg.plan.choose_mesh and cfg.model.mesh_shape == "auto"
    if not chooses_mesh and find_open_key(cfg) is None:
        return cfg, ""
    cluster = _describe_cluster(cfg)
    if chooses_mesh:
        cfg = fix_batch(cfg, cluster.num_devices)

    def select() -> dict:
        return _select(cfg if chooses_mesh else replace_mesh(cfg, _resolve_mesh(cfg)), cluster)

    # One process chooses for all: a mesh that differs between processes would hang the run.
    answer = peers.decide(select, "choosing a mesh")
    return replace_mesh(cfg, answer["sizes"], answer["choice"]), answer["message"]


def _select(cfg: Config, cluster: Cluster) -> dict:
    ranking = rank(cfg, cluster, log.info)
    if not ranking.fit:
        raise UserError(describe_no_fit(ranking, cluster, "this run's devices"))
    best = ranking.fit[0]
    key, choice, also = find_open_key(cfg), None, ""
    if key:
        choice, also = getattr(best.cfg.training, key), f", {describe_choice(cfg, best.cfg)}"
    kind = find_kind(jax.devices()[0].device_kind)
    suffix = "" if kind else f" on a device of plan.topology={cfg.plan.topology}, since this machine's are not known"
    message = (
        f"chosen by plan: model.mesh_shape={format_mesh_shape(best.sizes)}{also}; predicted ({best.source}): "
        f"{best.memory / GIB:.2f} of {ranking.limit / GIB:.1f} GiB, {best.time.step_s:.3g} s a step{suffix}"
    )
    return {"sizes": best.sizes, "choice": choice, "message": message}


def _resolve_mesh(cfg: Config) -> dict[str, int]:
    """Return the sizes of this run's mesh, also where they are `auto` or -1."""
    num_devices = len(split_devices(cfg, jax.devices())[0])  # that learn
    return resolve(cfg.model.mesh_shape, num_devices, cfg.dims, cfg.distributed.allow_idle_devices)


def _describe_cluster(cfg: Config) -> Cluster:
    """Describe this run's devices as a cluster. If their kind is not known, the kind of plan.topology replaces it."""
    kind = find_kind(jax.devices()[0].device_kind) or read_topology(cfg.plan.topology).kind
    if cfg.plan.network:
        kind = replace_network(kind, cfg.plan.network)
    num_devices = len(split_devices(cfg, jax.devices())[0])
    if not isinstance(cfg.model.mesh_shape, str) and -1 not in cfg.model.mesh_shape[0]:
        num_devices = math.prod(cfg.model.mesh_shape[0])  # other devices stay idle, if that is allowed
    per_node = max(1, num_devices // len(set(peers.hosts())))
    return Cluster(kind, num_devices // per_node, per_node)


@dataclass(frozen=True)
class Setup:
    """Everything that a run derives from its config, the devices and the data."""

    cfg: Config
    mesh: Mesh
    train_spec: TrainSpec  # of the batch behind all stages
    train_specs: dict[BatchShape, TrainSpec]  # one for each shape of the batch
    corpus: AnyCorpus | None  # None in a dry run, which reads no data
    sizes: Sizes  # of a run from step 0 on
    compiler: Compiler  # has begun with what the run needs first
    report: str  # the derived numbers for the reader of the log


def try_out(cfg: Config) -> None:
    """Call the code that the user brings once on made-up input, and read small files.

    Raises:
        UserError: a fault. It is raised on every process, also where one host alone has another file or environment.
    """

    def work() -> None:
        if unfit := list_unfit_settings():
            raise UserError(unfit[0])
        for name, path in cfg.evaluation.choices.items():
            read_questions(name, path)
        for section in (cfg.data, cfg.optimizer, cfg.scheduler):
            section.try_out()
        if peers.is_main():
            cfg.logging.try_out(mask_values(cfg.model_dump(mode="json")))

    peers.together(work, "trying the code that the user brings")


def set_up(
    cfg: Config, planned: Planned, mesh: Mesh, chosen: str, watchdog: Watchdog, compiler: Compiler, clock: StartClock
) -> Setup:
    """Return the setup of a run; `planned` and `chosen` are what `plan_run` says. The order is important:

    1. the program, on shapes only: no array is made, so a dry run is quick;
    2. the data, which may take hours the first time: process 0 prepares them, the others read them;
    3. the report of every derived number.
    """
    train_spec = assemble(cfg, mesh, planned=planned)
    check_shared_rows(cfg, train_spec.batch)
    train_specs = assemble_stages(train_spec, planned.batch.batch_schedule(mesh.shape))
    for each in train_specs.values():
        each.try_out_loss()
    check_compiler_options(cfg.training.compiler_options)
    device = mesh.devices.flat[0]
    check_matmul_dtype(cfg, device.platform, device.device_kind)
    sizes = derive_sizes(train_spec, None)
    if sizes.total_steps is not None:  # None: the config counts epochs, and only the data tell how many steps they are
        check_window(cfg, sizes.total_steps)
    # Compile while the data are read, but only where nothing else can be refused: an error would wait for the compiler
    # to end. A run that resumes, starts from other weights or has a teacher has files to check first.
    if not (cfg.dry_run or cfg.resume or cfg.model.init_from or train_spec.teacher):
        # Where the config counts epochs, the data may end the run before its other limits.
        compiler.begin_run(train_specs, sizes.schedule, None if cfg.training.num_epochs else sizes.total_steps)
    clock.end("program")

    with watchdog.phase("preparing the data", math.inf):
        corpus = None if cfg.dry_run else load_data(cfg)
    clock.end("data")

    sizes = derive_sizes(train_spec, corpus.num_samples if corpus else None)
    report = make_start_report(cfg, train_spec, mesh, sizes, corpus, chosen)
    return Setup(cfg, mesh, train_spec, train_specs, corpus, sizes, compiler, report)


def check_before_writing(setup: Setup, feed: Feed) -> None:
    """Raise `UserError` for mistakes that only the length of the data, a download or the devices can show."""
    cfg, num_steps = setup.cfg, setup.sizes.total_steps
    assert num_steps is not None, "a corpus or the config ends every run"
    check_window(cfg, num_steps)
    if not cfg.resume:  # a resumed run knows its samples, and whether it needs first weights, by its checkpoint
        log_stages(feed, num_steps, setup.sizes)
        check_first_weights(setup)
    for check in (check_attention, check_expert_matmul):
        if agreement := check(cfg, setup.train_spec.layout, setup.mesh):
            log.info("%s", agreement)


def check_first_weights(setup: Setup) -> None:
    """Raise `UserError` where the files of `model.init_from` are not what they should be, before they are read."""
    peers.main_first(lambda: check_init_from(setup.cfg, setup.train_spec.arch), "looking at model.init_from")


def log_stages(feed: Feed, last: int, sizes: Sizes) -> None:
    """Log the stages of a mixture; raises `UserError` where a part would be repeated too often."""
    if table := feed.samples.stages(last, sizes.data_schedule):
        log.info("stages of the mixture\n%s", table)


@dataclass
class Progress:
    """How far a run has come. The loop replaces the state after each step, because a step takes its memory."""

    state: State
    start: Position  # in the data, of the steps that follow
    improvement: Improvement  # of the held-out loss, up to the newest evaluation
    is_new: bool  # False: the run goes on from a checkpoint
    sizes: Sizes  # of the steps that follow
    last: int  # step of the run
    failure: RolloutFailed | None = None  # ends the run when it can be saved


def restore_or_begin(job: compose.Job, checkpoints: Checkpoints, setup: Setup, feed: Feed) -> Progress:
    """Return the progress of a resumed run at its checkpoint; of another run, or where none was saved, at step 0."""
    train_spec, corpus, cfg = setup.train_spec, setup.corpus, job.config
    assert corpus is not None
    fingerprint, tokenizer = feed.samples.fingerprint(corpus.fingerprint), tokenizer_digest(corpus.tokenizer)
    beginning = Position(0, 0, fingerprint, tokenizer, held_out=corpus.held_out_fingerprints)
    restored = checkpoints.restore(job.resume_step, train_spec.abstract, cfg, beginning) if cfg.resume else None
    if restored:
        state, start, improvement = restored
        log.info("resumed at step %d, sample %d", start.step, start.next_sample)
        # Adds parts that the checkpoint lacks: a copy of the parameters, for example.
        state = train_spec.complete(state)
    else:
        if cfg.resume:
            log.warning("no checkpoint in %s yet: starting at step 0", checkpoints.store.folder)
            _warn_of_lost_steps(job)
            check_first_weights(setup)
        weights = load_init_from(train_spec, setup.mesh)
        state = setup.compiler.new_state(train_spec) if weights is None else train_spec.new_state(cfg.seed, weights)
        start, improvement = beginning, Improvement()
    sizes = derive_sizes(train_spec, corpus.num_samples, start)
    last = find_last_step(setup, sizes, start, improvement)
    if cfg.resume:
        log_stages(feed, last, sizes)
    return Progress(state, start, improvement, restored is None, sizes, last)


def _warn_of_lost_steps(job: compose.Job) -> None:
    """Log that a run begins again though it has trained already: its checkpoints were perhaps deleted or moved."""
    file, every = job.run_dir / "metrics.jsonl", job.config.checkpoint.save_every_steps
    numbers = [line.get("step", 0) for line in read_json_lines(file)] if file.is_file() else []
    if every and max(numbers, default=0) >= every:
        log.warning(
            "%s has steps up to %d, and checkpoints are saved every %d: if they were moved, stop this run and put them "
            "back; it trains these steps again, and writes their lines a second time",
            file, max(numbers), every,
        )  # fmt: skip


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
    if start.num_samples != whole_run.data_schedule.taken(start.step):
        ends = "" if last == whole_run.total_steps else f"; the last step is {last}, not {whole_run.total_steps}"
        log.warning(
            "steps so far were not all of %d sequences: sample %d comes after step %d%s",
            sizes.batch.num_sequences, start.next_sample, start.step, ends,
        )  # fmt: skip
    if last == start.step:
        reached = ", ".join(cfg.training.limits)
        log.warning("nothing is left to train after step %d: %s; raise it to go on", last, reached)
    if warning := check_phases(cfg.scheduler, whole_run.schedule.spans(last)):
        log.warning("%s", warning)
    return last


@dataclass
class Evaluations:
    """Measures the model on every set, and notes how its held-out loss goes.

    The cost of a model is the held-out number that is lowest for the best one: the loss, or the reward with its sign
    turned.
    """

    feed: Feed
    progress: Progress
    evaluation: Evaluation
    metrics: Metrics
    watchdog: Watchdog
    goodput: Goodput
    latest: dict[str, Any] = field(default_factory=dict)  # the last held-out line

    def run(self, step: int) -> None:
        """Write and log a line of metrics.jsonl for each set, of the model after `step`."""
        for name, evaluator in self.feed.sets.items():
            self._evaluate(evaluator, step, name, f"sets/{name}", name)
        if self.feed.held_out:
            self.latest = self._evaluate(self.feed.held_out, step, "held_out", "held_out", "held out")
            cost = self.feed.held_out.cost(self.latest)
            self.progress.improvement = self.progress.improvement.after(cost, self.evaluation)

    def make_up(self, last: int) -> None:
        """Measure the model after the last step, where a stop prevented that."""
        if self.feed.held_out and self.latest.get("step") != last:
            self.run(last)

    def cost(self, step: int) -> float | None:
        """Return the number after `step` that is lowest for the best model; None where it was not measured then."""
        return self.feed.held_out.cost(self.latest) if self.feed.held_out and self.latest.get("step") == step else None

    def _evaluate(self, evaluator: Evaluator, step: int, split: str, group: str, label: str) -> dict[str, Any]:
        with self.watchdog.phase("evaluation"), self.goodput.count("evaluation"):
            numbers = evaluator.evaluate(self.progress.state["params"])
        record: dict[str, Any] = {"step": step, "split": split, **numbers}
        self.metrics.write(record, group)
        log.info("step %d  %s: %s", step, label, evaluator.describe(record))
        return record


@dataclass(frozen=True)
class Loop:
    """The parts that work together in each step of a run."""

    setup: Setup
    folder: Path  # of the run
    check_folder: Callable[[], None]  # raises `UserError` if it is gone
    start_time: float  # when the program began, by time.monotonic()
    progress: Progress
    source: BatchSource
    compiled: CompiledSteps
    metrics: Metrics
    step_log: StepLog
    trace: CommunicationTrace
    evaluations: Evaluations
    checkpoints: Checkpoints
    watchdog: Watchdog
    goodput: Goodput

    def begin(self, clock: StartClock) -> None:
        """Wait for the program of the first step, and save the state of step 0 where the config says so.

        A resumed run makes up for the evaluation that a stop left out after its last step, and may be over by it.
        """
        progress = self.progress
        self.goodput.end_start()
        with self.goodput.count("compile"):
            self.compiled.at(min(progress.start.step + 1, progress.last))
        clock.end("step")
        log.info("%s", clock)
        if progress.is_new and self.setup.cfg.checkpoint.save_first:
            self.save(progress.start, None)
        if progress.improvement.is_due:
            progress.improvement = replace(progress.improvement, is_due=False)
            self.evaluations.run(progress.start.step)
            self.checkpoints.store.add_loss(progress.start.step, self.evaluations.cost(progress.start.step))
            if progress.improvement.is_over(self.setup.cfg.evaluation):
                progress.last = find_last_step(self.setup, progress.sizes, progress.start, progress.improvement)
        self.write_goodput(progress.start.step)
        self.step_log.restart_clock()  # the first step has not begun yet

    def run(self) -> int:
        """Train to the last step. Return the step after which the run has ended: a reason may end it before.

        While a step runs on the devices, the numbers of the step before are written and the next batch travels there:

            this loop    start step 2 | write line 1 | batch 3 | start step 3 | write line 2 | batch 4
            devices      | step 2 ........................... | step 3 ............................

        Raises:
            Ending: a reason of `run.early_stopping` to end the run, other than that it is finished.
        """
        progress, first, last = self.progress, self.progress.start.step + 1, self.progress.last
        if first > last:
            return last
        self.setup.compiler.has_step = True
        batch, numbers = self._next_batch()
        limit_time(self.setup.cfg.training.time_limit_s, self.start_time)  # here, so that each start makes a step
        for step in range(first, last + 1):
            if step in self.compiled.changes:  # the batch has another shape from now on
                with self.step_log.pause():
                    self.compiled.change_to(step)
            if not self.compiled.is_ready(step, batch):
                with self.step_log.pause(), self.goodput.count("compile"):
                    self.compiled.for_batch(step, batch)
            train_step = self.compiled.for_batch(step, batch)
            self.watchdog.step(step)
            # The call returns as soon as the devices have the step in their queue. The old state is donated: its memory
            # becomes that of the new one, so nothing may keep a reference to it.
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                progress.state, scalars = train_step(progress.state, batch)
            self.step_log.record_start(step, scalars, numbers)
            self._trace(step, train_step)
            if step < last and step != self.setup.cfg.training.hard_stop:  # no rollout that nobody would learn from
                # A source gives up when it is asked to stop, or fails: the run ends below, after this step.
                try:
                    batch, numbers = self._next_batch()
                except RolloutFailed as error:
                    progress.failure = error
                except Stopped:
                    pass
            if self._is_over(step):
                return step
        return last

    def end(self, last: int, feed: Feed) -> None:
        """Make up for an evaluation that a stop prevented, wait for the last checkpoint, and sum the run up."""
        with suppress(Stopped):
            self.evaluations.make_up(last)
        with self.watchdog.phase("closing"):
            self.check_folder()  # what is saved into a folder that is gone fails with many words
            with self.goodput.count("checkpoint"):
                self.checkpoints.store.finish()
            self.check_folder()
            self.checkpoints.store.add_loss(last, self.evaluations.cost(last))
            self.write_goodput(last)
            log.info("%s", describe_memory(self.compiled.at(last), read_peak_memory_gib()))
            if self.evaluations.latest:
                feed.sum_up(self.progress.state, self.evaluations.latest, self.metrics)
            if best := self.checkpoints.store.describe_best():
                log.info("%s", best)

    def save(self, position: Position, cost: float | None) -> None:
        """Start a checkpoint; `cost` is the held-out number of the model, by which the best checkpoint is chosen."""
        corpus, progress = self.setup.corpus, self.progress
        assert corpus is not None
        self.check_folder()
        saved = progress.state, position, progress.improvement, self.setup.cfg, corpus.vocab.as_json, cost
        with self.goodput.count("checkpoint"):
            self.checkpoints.save(*saved)

    def write_goodput(self, step: int) -> None:
        """Write where the time of the run went, up to now; not where nothing is left to train."""
        if self.progress.start.step < self.progress.last:
            self.metrics.write(self.goodput.record(step), SPLIT)

    def _next_batch(self) -> tuple[Batch, Numbers]:
        # A source that draws answers with the new weights has to wait for the step that makes them. The line of that
        # step is written first, so the time of drawing counts for the step that uses the answers.
        if self.source.waits_for_state:
            self.step_log.finish()
        with self.watchdog.phase(self.source.phase):
            return self.source.next(self.progress.state)

    def _trace(self, step: int, train_step: Any) -> None:
        """Begin or end the trace of the profiler, if that is due after `step`."""
        if step in self.trace.edges:
            self.step_log.finish()
            with self.watchdog.phase("profiling"):
                self.trace.at(step, self.progress.state, train_step)
            self.step_log.restart_clock()

    def _make_moment(self, step: int) -> Moment:
        """Return the run after a step, as reasons to end it see it."""
        cfg, progress, line = self.setup.cfg, self.progress, self.step_log.last
        return Moment(cfg, self.folder, step, line, progress.improvement, self.source, progress.failure)

    def _is_over(self, step: int) -> bool:
        """Ask the reasons to end, evaluate and save, as far as each is due after `step`; True if the run is finished.

        An evaluation comes before the save, because the best checkpoint is chosen by its held-out loss.
        """
        cfg, progress = self.setup.cfg, self.progress
        save_now = is_due(cfg.checkpoint.save_every_steps, step, progress.last) or step in cfg.checkpoint.save_at_steps
        evaluate_now = is_due(cfg.evaluation.every_steps, step, progress.last)
        if save_now or evaluate_now:
            self.step_log.finish()  # their time is not that of a step
        begin = time.perf_counter()
        ending = find_ending(self._make_moment(step), REASONS)
        if ending and not ending.saves:  # the state is not worth a checkpoint: its loss is not finite, for example
            raise ending
        if not ending:
            reasons = [*PLANNED, *(EVALUATED if evaluate_now else [])]
            try:
                if evaluate_now:
                    self.evaluations.run(step)
            except (Stopped, RolloutFailed) as error:
                # Held-out answers may take minutes: they are given up, as those of a rollout.
                progress.improvement, reasons = replace(progress.improvement, is_due=True), [*REASONS, *PLANNED]
                if isinstance(error, RolloutFailed):
                    progress.failure = error
            ending = find_ending(self._make_moment(step), reasons)
        elif evaluate_now:
            progress.improvement = replace(progress.improvement, is_due=True)
        if save_now or ending:
            self.step_log.finish()
            with self.watchdog.phase("saving"):
                # A cluster may kill the run before the answers that are under way are drawn: they are added at the end.
                position = self.source.after(step, waits=ending is None)
                self.save(position, self.evaluations.cost(step))
                if ending:  # the message of the ending says that everything is saved, so wait until that is true
                    with self.goodput.count("checkpoint"):
                        self.checkpoints.store.finish()
                        if (whole := self.source.after(step)) != position:
                            self.checkpoints.store.add(step, WAITING, whole.waiting)
        if save_now or evaluate_now or ending:
            self.write_goodput(step)
        if isinstance(ending, Finished):
            log.info("%s", ending)
            return True
        if ending:
            raise ending
        if save_now or evaluate_now:
            self.step_log.leave_out(begin)
        return False


@contextmanager
def open_loop(
    setup: Setup,
    progress: Progress,
    feed: Feed,
    checkpoints: Checkpoints,
    folder: Path,
    watchdog: Watchdog,
    start_time: float,
) -> Iterator[Loop]:
    """Open the sinks, the trace and the source of batches of a run, and give the loop over its steps.

    Nothing is compiled yet. `start_time` is when the program began, by time.monotonic().
    """
    cfg, mesh, start, last, schedule = setup.cfg, setup.mesh, progress.start, progress.last, progress.sizes.schedule
    traced = setup.train_specs[schedule.at(cfg.profile.after_step + 1).shape]
    beginning = Start(folder, mask_values(cfg.model_dump(mode="json")), start.step, last)
    with (
        Metrics(cfg.logging.sinks, beginning) as metrics,
        CommunicationTrace(traced, mesh, folder / "profile", metrics) as trace,
        closing(feed.batches(start, last, metrics, folder)) as source,
    ):
        watchdog.tell = metrics.abandon
        trace.warn_if_past(start.step)
        metrics.text("config", to_yaml(cfg), start.step)
        metrics.text("report", setup.report, start.step)
        seq_len, device_kind = progress.sizes.batch.seq_len, mesh.devices.flat[0].device_kind
        peak = find_run_peak_tflops(cfg, setup.train_spec.arch, seq_len, device_kind)
        compiled = CompiledSteps(setup.train_specs, schedule, setup.sizes.schedule.spans(last), setup.compiler)
        every = cfg.logging.layer_norms_every
        goodput = Goodput(time.monotonic() - start_time)
        if peers.is_main():
            goodput.go_on(folder / "metrics.jsonl", start.step)
        step_log = StepLog(metrics, progress.sizes, peak, source.samples, every, watchdog.pace, goodput)
        evaluations = Evaluations(feed, progress, cfg.evaluation, metrics, watchdog, goodput)
        around = setup, folder, watch_folder(folder), start_time, progress, source
        yield Loop(*around, compiled, metrics, step_log, trace, evaluations, checkpoints, watchdog, goodput)


def is_due(every: int | None, step: int, last: int) -> bool:
    """Return True after every so many steps (None: never), and after the last."""
    return step == last or (every is not None and step % every == 0)
