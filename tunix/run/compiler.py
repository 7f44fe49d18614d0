"""A thread that compiles programs while the main thread reads data and weights.

    main thread     program | data ........... | checks | state | step 1
    compiler                | state | step ... |

XLA compiles without Python's lock, and needs shapes alone: no data and no weights.
"""

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from tunix.config.batch_stages import BatchSchedule, BatchShape, Spans
from tunix.processes.watchdog import Watchdog
from tunix.run.compile_step import compile_step
from tunix.training.program import Program
from tunix.training.state import State

log = logging.getLogger(__name__)


class Compiler:
    """Compiles the programs of a run, one after the other: `with Compiler(mesh, watchdog) as compiler: ...`.

    `begin_...` returns at once, and begins with each program only once. The method without `begin_` waits for the
    program; an error of the thread is raised there.
    """

    def __init__(self, mesh: Mesh, watchdog: Watchdog):
        self.mesh, self.watchdog = mesh, watchdog
        self.thread = ThreadPoolExecutor(1, "compiler")
        self.begun: dict[Hashable, Future] = {}

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Wait for the thread: Python aborts the process if it ends while a thread is inside jaxlib.

        XLA cannot be interrupted, so this may take as long as one program. Programs that have not begun are left out.
        """
        if any(future.running() for future in self.begun.values()):
            reason = f": {error}" if error else ""
            log.info("the run ends as soon as XLA has compiled the program that it is at%s", reason)
        with self.watchdog.phase("compiling"):
            self.thread.shutdown(cancel_futures=True)

    def begin_state(self, program: Program) -> Future:
        """Begin with the program that makes the state of step 0 of its config's seed."""
        return self._begin("state", lambda: program.compile_new_state(program.cfg.seed))

    def new_state(self, program: Program) -> State:
        """Return the state of step 0 of the config's seed, as `program.new_state` makes it."""
        return self._wait(self.begin_state(program))()

    def begin_step(self, program: Program, spans: Spans) -> Future:
        """Begin with the step of a program, of a run of these steps: the learning rate depends on them."""
        shape = program.cfg.training.batch_shape(self.mesh.shape)
        return self._begin((shape, tuple(spans)), lambda: compile_step(program, spans, self.mesh))

    def step(self, program: Program, spans: Spans) -> Any:
        """Return the compiled step of a program."""
        return self._wait(self.begin_step(program, spans))

    def begin_run(self, programs: dict[BatchShape, Program], schedule: BatchSchedule, last: int | None) -> None:
        """Begin with what a new run to the step `last` needs first; None where its length is not known yet.

        `schedule` is that of the steps from the first one on. A wrong guess costs time alone: whoever needs another
        program begins with it and waits.
        """
        program = programs[schedule.at(1).shape]
        if program.cfg.model.init_from is None:
            self.begin_state(program)
        if last is not None:
            self.begin_step(program, schedule.spans(last))

    def _begin(self, key: Hashable, work: Callable[[], Any]) -> Future:
        """Call `work()` in the thread, after all that was begun before.

        It must not talk to other processes: they call gathers and collectives in the order of their main threads.
        """

        def work_on_mesh() -> Any:
            with jax.set_mesh(self.mesh):  # `jax.set_mesh` of the main thread does not reach this thread
                return work()

        if key not in self.begun:
            self.begun[key] = self.thread.submit(work_on_mesh)
        return self.begun[key]

    def _wait(self, future: Future) -> Any:
        with self.watchdog.phase("compiling"):
            return future.result()
