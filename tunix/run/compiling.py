"""Compiling: programs kept on disk, a thread that compiles beside other work, the compiled steps."""

import fcntl
import hashlib
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from tunix.base.errors import Stopped, UserError
from tunix.base.files import find_existing
from tunix.base.forms import locate_cached
from tunix.config import Config
from tunix.config.batch import BatchSchedule, BatchShape, Spans
from tunix.costs.hlo import read_collectives, summarise
from tunix.data.batches import Batch
from tunix.processes import exits, peers, watchdog
from tunix.processes.watchdog import Watchdog
from tunix.training.state import State
from tunix.training.train_spec import TrainSpec

log = logging.getLogger(__name__)


class StartClock:
    """Seconds of each part of a run's start, until its first step may begin.

    The clock begins when it is made; `end` names the part that ends then.
    """

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, part: str) -> None:
        """Count the time since the last part ended as that of this part."""
        now = time.monotonic()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"ready for the first step after {sum(self.parts.values()):.1f} s: {parts}"


# Settings of JAX that a run needs: with others its step cannot be compiled, or has other digits, with random bits that
# depend on the mesh.
SETTINGS = {
    "JAX_DISABLE_JIT": False,
    "JAX_NUMPY_DTYPE_PROMOTION": "standard",
    "JAX_NUMPY_RANK_PROMOTION": "allow",
    "JAX_ENABLE_X64": False,
    "JAX_DEFAULT_PRNG_IMPL": "threefry2x32",
    "JAX_THREEFRY_PARTITIONABLE": True,
}


def list_unfit_settings() -> list[str]:
    """Return a line for each setting of JAX with which a run would fail, or have other digits."""
    values = {name: getattr(jax.config, name.lower()) for name in SETTINGS}
    return [
        f"{name} is {values[name]}, and a run needs {needed}: its step and its digits depend on it; unset it"
        for name, needed in SETTINGS.items()
        if values[name] != needed
    ]


SHORTEST_COMPILE_S = 0.5  # a program that compiles faster is not worth a file
HIT = "/jax/compilation_cache/cache_hits"
# The id of the thread that has read it, for each program that this process has read. JAX tells of a read by an event
# alone, in the thread that asks for the program; `Compiler` has a thread of its own.
_hits: list[int] = []


def count_reads() -> int:
    """Return how many programs this thread has read in place of compiling them."""
    return _hits.count(threading.get_ident())


def _listen(event: str, **_: object) -> None:
    if event == HIT:
        _hits.append(threading.get_ident())


jax.monitoring.register_event_listener(_listen)


_kept: set[str] = set()  # folders that runs of this process have given JAX


def keep_programs(cfg: Config) -> None:
    """Let JAX keep compiled programs in `loading.cache_dir`, unless the user has given JAX a folder already.

    A program that this machine has compiled before is read from there. JAX finds it by a hash of its text, of the
    devices, of XLA's options and of the versions. Process 0 writes. On CPUs only process 0 finds what it has written:
    JAX's hash of the devices differs from process to process there, so the others compile each time.

    Where `training.compile_cache_gib` is full, the programs that were not used for the longest time go.
    """
    size_gib, given = cfg.training.compile_cache_gib, jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if given is not None and given not in _kept:
        return
    if given is not None:  # of an earlier run of this process
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", None)
    if size_gib:
        # XLA compiles for the instructions of a kind of processor, and another kind may lack some. A cache on a disk
        # that hosts of several kinds share would else give a program that ends with an illegal instruction.
        flags = platform.processor()
        with suppress(OSError):  # not Linux
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), flags)
        processor = f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"
        folder = locate_cached(cfg.loading.cache_dir, "programs", processor)
        if not os.access(find_existing(folder), os.W_OK):  # JAX reads none either, and warns for each program
            log.warning(
                "loading.cache_dir: %s cannot be written, so each start compiles its programs; set loading.cache_dir "
                "to a folder of your own, or training.compile_cache_gib=0", folder,
            )  # fmt: skip
            return
        _remove_torn(folder)
        _kept.add(str(folder))
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", int(size_gib * 2**30))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_COMPILE_S)


def _remove_torn(folder: Path) -> None:
    """Remove the programs that a full disk or a kill has cut: JAX gives a whole one a file with its time, and stops to
    keep programs where one lacks it."""
    if not (peers.is_main() and folder.is_dir()):
        return
    with suppress(OSError), (folder / ".lockfile").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of JAX: where another process has it, the next start looks
        for program in folder.glob("*-cache"):
            if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                program.unlink()


def compile_step(train_spec: TrainSpec, spans: Spans) -> Any:
    """Compile the step of a run of these steps; its state is donated. Logs its time, memory and collectives."""
    start_time, reads = time.perf_counter(), count_reads()
    traced = jax.jit(train_spec.step(spans), donate_argnums=0).lower(train_spec.abstract, train_spec.abstract_batch)
    options: Any = train_spec.compiler_options()
    compiled = traced.compile(compiler_options=options)
    memory: Any = compiled.memory_analysis()
    log.info(
        "step %s in %.1f s: %.3f GiB state and batch + %.3f GiB temporary per device",
        "read from the compile cache" if count_reads() > reads else "compiled",
        time.perf_counter() - start_time,
        memory.argument_size_in_bytes / 2**30,
        memory.temp_size_in_bytes / 2**30,
    )
    log.info("collectives of a step: %s", summarise(read_collectives(compiled.as_text() or "")))
    return compiled


def describe_memory(compiled: Any, peak_gib: float | None) -> str:
    """Return in words the predicted memory of the compiled step, beside the largest that a device has used."""
    memory = compiled.memory_analysis()
    predicted = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30
    measured = "not measured here" if peak_gib is None else f"{peak_gib:.3f} GiB, {peak_gib / predicted - 1:+.1%}"
    return f"memory of a device: predicted {predicted:.3f} GiB (compiled step); peak {measured}"


class Compiler:
    """Compiles the programs of a run in a thread, one by one: `with Compiler(mesh, watchdog) as compiler: ...`.

        main thread     program | data ........... | checks | state | step 1
        compiler                | state | step ... |

    XLA compiles without Python's lock, and needs shapes alone: no data and no weights.

    `begin_...` returns at once, and begins with each program only once. The method without `begin_` waits until all
    processes have the program; an error of the thread is raised there.
    """

    def __init__(self, mesh: Mesh, watchdog: Watchdog):
        self.mesh, self.watchdog = mesh, watchdog
        self.thread = ThreadPoolExecutor(1, "compiler")
        self.futures: dict[Hashable, Future] = {}
        self.awaited: set[Future] = set()  # all processes have these programs
        self.has_step = False  # until then there is nothing to save, and a stop signal need not wait for XLA

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Wait for the thread: Python aborts the process if it ends while a thread is inside jaxlib.

        XLA cannot be interrupted, so this may take as long as one program. Programs that have not begun are left out.
        A command of one process that fails, or is stopped, does not wait: it ends without Python's help (`exits`).
        """
        if any(future.running() for future in self.futures.values()):
            ends_at_once = isinstance(error, UserError | Stopped | KeyboardInterrupt) and exits.ends_with_leave.is_set()
            if ends_at_once and jax.process_count() == 1:
                exits.still_works.set()
                self.thread.shutdown(wait=False, cancel_futures=True)
                return
            reason = f": {error}" if str(error or "") else ""
            log.info("the run ends as soon as XLA has compiled the program that it is at%s", reason)
        with self.watchdog.phase("compiling"):
            self.thread.shutdown(cancel_futures=True)

    def begin_state(self, train_spec: TrainSpec) -> Future:
        """Begin with the program that makes the state of step 0 of its config's seed."""
        return self._begin("state", lambda: train_spec.compile_new_state(train_spec.cfg.seed))

    def new_state(self, train_spec: TrainSpec) -> State:
        """Return the state of step 0 of the config's seed, as `train_spec.new_state` makes it."""
        return self._wait(self.begin_state(train_spec))()

    def begin_step(self, train_spec: TrainSpec, spans: Spans) -> Future:
        """Begin with the step of a program, of a run of these steps: the learning rate depends on them."""
        return self._begin((train_spec.batch, tuple(spans)), lambda: compile_step(train_spec, spans))

    def step(self, train_spec: TrainSpec, spans: Spans) -> Any:
        """Return the compiled step of a program."""
        return self._wait(self.begin_step(train_spec, spans))

    def begin_run(self, train_specs: dict[BatchShape, TrainSpec], schedule: BatchSchedule, last: int | None) -> None:
        """Begin with what a new run to the step `last` needs first; None where its length is not known yet.

        `schedule` is that of the steps from the first one on. A wrong guess costs time alone: whoever needs another
        program begins with it and waits.
        """
        train_spec = train_specs[schedule.at(1).shape]
        if train_spec.cfg.model.init_from is None:
            self.begin_state(train_spec)
        if last is not None:
            self.begin_step(train_spec, schedule.spans(last))

    def _begin(self, key: Hashable, work: Callable[[], Any]) -> Future:
        """Call `work()` in the thread, after all that was begun before. It must not talk to other processes: they call
        gathers and collectives in the order of their main threads."""

        def work_on_mesh() -> Any:
            with jax.set_mesh(self.mesh):  # `jax.set_mesh` of the main thread does not reach this thread
                return work()

        if key not in self.futures:
            self.futures[key] = self.thread.submit(work_on_mesh)
        return self.futures[key]

    def _wait(self, future: Future) -> Any:
        with self.watchdog.phase("compiling"):
            if future in self.awaited:
                return future.result()
            if not self.has_step and jax.process_count() == 1:
                while not wait([future], timeout=1.0).done:
                    if watchdog.stopped_by_signal():
                        reason = watchdog.stop_requested()
                        raise Stopped(f"{reason}: given up while the first program was compiled; resume goes on")
            # A process that ran the program at once would wait in its first collective for those that still compile,
            # and on CPUs Gloo gives up after 30 s.
            self.awaited.add(future)
            return peers.together(future.result, "the program is compiled")


class CompiledSteps:
    """The compiled step of each shape of the batch, made when a run comes to the first step that needs it."""

    def __init__(
        self, train_specs: dict[BatchShape, TrainSpec], schedule: BatchSchedule, spans: Spans, compiler: Compiler
    ):
        """`schedule` is that of the steps from the run's start on, `spans` are those of the whole run."""
        self.train_specs, self.schedule, self.spans, self.compiler = train_specs, schedule, spans, compiler
        # The first steps of all periods but the one in which the run starts.
        self.changes = {period.first_step for period in schedule.periods[1:]}

    def at(self, step: int) -> Any:
        """Return the compiled step that takes the batch of `step`."""
        return self.compiler.step(self.train_specs[self.schedule.at(step).shape], self.spans)

    def is_ready(self, step: int, batch: Batch) -> bool:
        """Return whether the step that takes the batch of `step` needs no compiler."""
        return self._shape_of(step, batch) in self.train_specs

    def for_batch(self, step: int, batch: Batch) -> Any:
        """Return the compiled step that takes the batch of `step`, which may have fewer microbatches than others."""
        shape = self._shape_of(step, batch)
        if shape not in self.train_specs:
            usual = self.train_specs[self.schedule.at(step).shape]
            self.train_specs[shape] = usual.with_microbatches(shape.num_microbatches)
            self.compiler.watchdog.start_over()
        return self.compiler.step(self.train_specs[shape], self.spans)

    def _shape_of(self, step: int, batch: Batch) -> BatchShape:
        return self.schedule.at(step).shape._replace(num_microbatches=len(batch["tokens"]))

    def change_to(self, step: int) -> None:
        """Wait for the compiled step of a period that begins with `step`; steps take another time from now on."""
        self.at(step)
        shape = self.schedule.at(step).shape
        log.info(
            "from step %d on: %s sequences of %s tokens a step, %s tokens",
            step, f"{shape.num_sequences:,}", f"{shape.seq_len:,}", f"{shape.num_tokens:,}",
        )  # fmt: skip
        self.compiler.watchdog.start_over()
