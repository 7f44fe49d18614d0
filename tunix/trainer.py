"""The program: from a checked config to a trained model. Read `run` from top to bottom."""

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tunix.base.errors import UserError
from tunix.cli import compose
from tunix.config import Config
from tunix.costs.devices import peak_tflops
from tunix.costs.hlo import collectives, summary
from tunix.data.batches import TrainBatches
from tunix.data.corpus import Corpus, load_corpus
from tunix.data.position import Position
from tunix.inference.sampling import continue_text
from tunix.plan.choice import decided
from tunix.processes import joining, peers, stopping
from tunix.processes.watchdog import Watchdog
from tunix.run import environment, logs, run_folder
from tunix.run.checkpoint import Checkpoints
from tunix.run.lock import held
from tunix.run.metrics import Metrics, StepLog, peak_memory_gib
from tunix.run.run_folder import keep_files
from tunix.run.start_report import start_report
from tunix.run.trace import CommunicationTrace, check_window
from tunix.tokenizer.vocabulary import tokenizer_digest
from tunix.training.held_out import HeldOut
from tunix.training.optim import check_phases
from tunix.training.program import Program, assemble, build_mesh
from tunix.training.sizes import derive_sizes, last_step
from tunix.training.start import check_init_from, load_init_from
from tunix.training.state import Architecture, State

log = logging.getLogger(__name__)


class NotFinite(RuntimeError):
    """Loss or gradients were not finite more often than the policy allows; exit code 77."""


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path | None  # None after a dry run
    train: dict[str, Any]  # the last line of metrics.jsonl from training
    held_out: dict[str, Any]  # and from held-out evaluation


def run(job: compose.Job) -> Result:
    """Train as the config says.

    Raises:
        UserError: it cannot be done, found before anything is written; or a checkpoint cannot be written.
        NotFinite, distributed.Stopped: see there.
    """
    begun = time.monotonic()
    remarks = joining.start(job.config.distributed, environment.versions() | compose.facts(job.config))
    waiting_log = logs.start_logging(remarks)
    cfg = decided(job.config)
    # Code that the user brings is called once on made-up input, before anything is written.
    for section in (cfg.data, cfg.optimizer, cfg.scheduler):
        section.try_out()
    training = cfg.training
    mesh = build_mesh(cfg)

    with stopping.listening(), Watchdog(cfg.distributed) as watchdog, jax.set_mesh(mesh):
        # What is trained, and on what.
        program = assemble(cfg, mesh)
        arch = program.arch
        with watchdog.phase("preparing the data", math.inf):
            corpus = None if cfg.dry_run else peers.main_first(lambda: load_corpus(cfg), "preparing the data")
        sizes = derive_sizes(cfg, mesh, arch, corpus)
        report = start_report(cfg, program, mesh, sizes, corpus)
        log.info("%s", report)
        if corpus is None:
            return Result(None, {}, {})
        assert sizes.total_steps is not None
        data = TrainBatches(corpus.train, cfg, mesh, sizes.num_microbatches)
        held_out = HeldOut(cfg, corpus, arch, program.loss_fn, mesh) if corpus.num_held_out else None
        if table := data.stages(sizes.total_steps):
            log.info("stages of the mixture\n%s", table)

        check_compiler_options(training.compiler_options)
        check_window(cfg, sizes.total_steps)
        peers.main_first(lambda: check_init_from(cfg, arch), "looking at model.init_from")

        # Where it is written, and from where it goes on.
        folder, shared = run_folder.open_folder(job)
        with (
            held(folder),
            Checkpoints(folder / "checkpoints", cfg.checkpoint, shared) as checkpoints,
            Metrics(folder, cfg.logging) as metrics,
            CommunicationTrace(cfg, mesh, folder / "profile", metrics) as trace,
        ):
            state, start, is_new = first_state(job, checkpoints, program, mesh, corpus, data)
            trace.starts_after(start.step)
            last = end_of_run(cfg, corpus, data, start, sizes.total_steps)
            run_folder.write_record(job, folder, shared, waiting_log)
            keep_files(cfg, corpus.vocabulary, folder)
            log.info("writing to %s", folder)
            step_fn = program.step(last, sizes.tokens_per_step)
            train_step = compile_step(step_fn, state, data.read_global(start.next_sample), training.compiler_options)
            metrics.text("config", compose.to_yaml(cfg), start.step)
            metrics.text("report", report, start.step)
            steps = StepLog(metrics, sizes, last, peak_tflops(mesh.devices.flat[0].device_kind))
            evaluation: dict[str, Any] = {}
            if is_new and cfg.checkpoint.save_first:
                checkpoints.save(state, start, cfg, corpus.tokenizer, None)

            # The loop. The next batch travels, and the numbers of the step before are written, while a step runs.
            batches = data.iterate(start.next_sample, last - start.step)
            batch, wait_s = next_batch(batches)
            for step in range(start.step + 1, last + 1):
                position = start.after(step, data)
                watchdog.step(step)
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    state, scalars = train_step(state, batch)
                steps.started(step, position.next_sample * training.seq_len, scalars, wait_s, position.source_tokens)
                if step in trace.edges:
                    steps.finish()
                    with watchdog.phase("profiling"):
                        trace.at(step, state, train_step)
                    steps.restart_clock()
                with watchdog.phase("reading a batch"):
                    batch, wait_s = next_batch(batches)
                stop = stop_reason(cfg, begun)
                save_now, evaluate_now = stop or checkpoints.due(step, last), evaluation_due(cfg, step, last)
                if save_now or evaluate_now:
                    steps.finish()
                stop_if_not_finite(steps.last, cfg, start, data)
                if evaluate_now and held_out and not stop:
                    evaluation = evaluate(held_out, state, step, metrics, watchdog)
                if save_now:
                    held_out_loss = evaluation.get("loss") if evaluation.get("step") == step else None
                    with watchdog.phase("saving"):
                        checkpoints.save(state, position, cfg, corpus.tokenizer, held_out_loss)
                        if stop:
                            checkpoints.finish()
                            raise stopping.Stopped(f"{stop}: saved after step {step}; go on with resume={folder}")
                if save_now or evaluate_now:
                    steps.restart_clock()

            if held_out and evaluation.get("step") != last:  # the run was stopped before it could be evaluated
                evaluation = evaluate(held_out, state, last, metrics, watchdog)
            with watchdog.phase("closing"):
                checkpoints.finish()
                log.info("%s", memory_report(train_step, peak_memory_gib()))
                if evaluation:
                    log.info("%s", beside_unigram(evaluation["bits_per_byte"], corpus.unigram_bits_per_byte))
                if evaluation and cfg.evaluation.sample_tokens:
                    sample = continued_document(cfg, corpus, arch, state, mesh)
                    log.info("continuation of a held-out document, after >>>:\n%s", sample)
                    metrics.text("sample", sample, last)
        log.info("done: %s", folder)
        return Result(folder, steps.last, evaluation)


def first_state(
    job: compose.Job, checkpoints: Checkpoints, program: Program, mesh: Mesh, corpus: Corpus, data: TrainBatches
) -> tuple[State, Position, bool]:
    """The state to start from: a checkpoint's if the run is resumed and has one, else a new one (True) at step 0."""
    fresh = Position(0, 0, data.fingerprint(corpus.fingerprint), tokenizer_digest(corpus.tokenizer))
    if job.config.resume:
        restored = checkpoints.restore(job.resume_step, program.abstract, job.config, fresh)
        if restored:
            log.info("resumed at step %d, sample %d", restored[1].step, restored[1].next_sample)
            return *restored, False
        log.warning("no checkpoint in %s yet: starting at step 0", checkpoints.folder)
    return program.new_state(job.config.seed, load_init_from(program, mesh)), fresh, True


def end_of_run(cfg: Config, corpus: Corpus, data: TrainBatches, start: Position, total_steps: int) -> int:
    """The last step of a run that goes on from `start`; without a change of batch that is `total_steps`."""
    last = last_step(cfg.training, data.batch_size, corpus.num_sequences, start.step, start.next_sample) or total_steps
    if start.next_sample != start.step * data.batch_size:
        log.warning(
            "steps so far were not all of %d sequences: sample %d comes after step %d; the last step is %d, not %d",
            data.batch_size, start.next_sample, start.step, last, total_steps,
        )  # fmt: skip
    if last == start.step:
        limits = {f"training.{key}": getattr(cfg.training, key) for key in ("max_steps", "max_tokens", "num_epochs")}
        told = ", ".join(f"{key}={value}" for key, value in limits.items() if value is not None)
        log.warning("nothing is left to train after step %d: %s; raise it to go on", last, told)
    if told := check_phases(cfg.scheduler, last, data.batch_size * cfg.training.seq_len):
        log.warning("%s", told)
    return last


def check_compiler_options(options: dict[str, Any]) -> None:
    """Raise `UserError` for an option that XLA does not know, before anything is written."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"training.compiler_options: {str(error).splitlines()[0]}") from None


def compile_step(step_fn, state: State, batch: dict[str, jax.Array], options: dict[str, Any]) -> Any:
    """The step as a program for these devices; its state is donated. Logs what it holds and what it moves."""
    begun = time.perf_counter()
    compiled = jax.jit(step_fn, donate_argnums=0).lower(state, batch).compile(compiler_options=options)
    memory: Any = compiled.memory_analysis()
    log.info(
        "step compiled in %.1f s: %.3f GiB state and batch + %.3f GiB temporary per device",
        time.perf_counter() - begun,
        memory.argument_size_in_bytes / 2**30,
        memory.temp_size_in_bytes / 2**30,
    )
    log.info("collectives of a step: %s", summary(collectives(compiled.as_text() or "")))
    return compiled


def memory_report(compiled: Any, peak_gib: float | None) -> str:
    """What the compiled step was to hold, beside the most that a device has held."""
    memory = compiled.memory_analysis()
    predicted = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30
    measured = "not measured here" if peak_gib is None else f"{peak_gib:.3f} GiB, {peak_gib / predicted - 1:+.1%}"
    return f"memory of a device: predicted {predicted:.3f} GiB (compiled step); peak {measured}"


def next_batch(batches) -> tuple[dict[str, jax.Array] | None, float]:
    """The next batch on the devices (None after the last), and the seconds waited for it."""
    asked = time.perf_counter()
    return next(batches, None), time.perf_counter() - asked


def stop_reason(cfg: Config, begun: float) -> str | None:
    """Why to save and stop after this step, the same on every process; None to go on."""
    limit = cfg.training.time_limit_s
    if limit is not None and time.monotonic() - begun > limit:
        stopping.request_stop(f"training.time_limit_s={limit:g}")
    return stopping.stop_requested()


def evaluation_due(cfg: Config, step: int, last: int) -> bool:
    every = cfg.evaluation.every_steps
    return step == last or (every is not None and step % every == 0)


def evaluate(held_out: HeldOut, state: State, step: int, metrics: Metrics, watchdog: Watchdog) -> dict[str, Any]:
    """The held-out line of metrics.jsonl after `step`, written and logged."""
    with watchdog.phase("evaluation"):
        record = {"step": step, "split": "held_out", **held_out.evaluate(state["params"])}
    metrics.write(record, "held_out")
    log.info("step %d  held out: loss %.4f, %.4f bits per byte", step, record["loss"], record["bits_per_byte"])
    return record


def stop_if_not_finite(record: dict[str, Any], cfg: Config, start: Position, data: TrainBatches) -> None:
    """Raise `NotFinite` after too many skipped steps in a row, naming the samples of the last."""
    skipped = record.get("skipped", 0)
    if skipped > cfg.training.max_skipped_steps:
        ids = data.sample_ids(start.after(record["step"] - 1, data).next_sample)
        raise NotFinite(
            f"loss or gradients were not finite in {skipped} steps in a row "
            f"(training.max_skipped_steps={cfg.training.max_skipped_steps}); step {record['step']} had samples "
            f"{ids.start} to {ids.stop - 1}. The parameters are those of step {record['step'] - skipped}"
        )


def beside_unigram(bits: float, unigram: float) -> str:
    """The held-out loss beside what word frequencies alone would give; both in bits per byte."""
    side = "below" if bits <= unigram else "above"
    share = 100 * abs(1 - bits / unigram)
    return f"held out: {bits:.3f} bits per byte; unigram entropy of the corpus: {unigram:.3f}; {share:.1f} % {side}"


def continued_document(cfg: Config, corpus: Corpus, arch: Architecture, state: State, mesh: Mesh) -> str:
    """The beginning of a held-out document, and how the model goes on with it."""
    prompt = corpus.example[:-1][: min(128, cfg.training.seq_len)]
    words = continue_text(
        arch, state["params"], mesh, prompt, cfg.evaluation.sample_tokens, cfg.evaluation.sample_temperature, cfg.seed
    )
    return f"{corpus.tokenizer.decode(prompt)}>>>{corpus.tokenizer.decode(words)}"
