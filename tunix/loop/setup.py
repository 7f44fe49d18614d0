"""Setup of a run: the program, the data and the numbers that follow from them, before anything is written."""

import logging
import math
from dataclasses import dataclass

from jax.sharding import Mesh

from tunix.config import Config
from tunix.config.batch_stages import BatchShape
from tunix.costs.matmul_dtypes import check_matmul_dtype
from tunix.data.position import BEGINNING, Position
from tunix.data.prompts import AnyCorpus
from tunix.inference.start import check_init_from
from tunix.processes import peers
from tunix.processes.watchdog import Watchdog
from tunix.rl.feeds import Feed, load_data, make_feed
from tunix.run.compiler import Compiler
from tunix.run.start_clock import StartClock
from tunix.run.start_report import make_start_report
from tunix.run.trace import check_window
from tunix.training.kernel_check import check_attention, check_expert_products
from tunix.training.overlap import check_compiler_options
from tunix.training.program import Program, assemble, assemble_stages
from tunix.training.sizes import Sizes, derive_sizes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """Everything that a run derives from its config, the devices and the data."""

    cfg: Config
    mesh: Mesh
    program: Program  # of the batch behind all stages
    programs: dict[BatchShape, Program]  # one for each shape of the batch
    corpus: AnyCorpus | None  # None in a dry run, which reads no data
    sizes: Sizes  # of a run from step 0 on
    compiler: Compiler  # has begun with what the run needs first
    report: str  # the derived numbers for the reader of the log

    def sizes_after(self, start: Position) -> Sizes:
        """Return the sizes of a run that goes on from `start`."""
        num_samples = self.corpus.num_samples if self.corpus else None
        return derive_sizes(self.cfg, self.mesh, self.program.arch, num_samples, start)

    def make_feed(self, watchdog: Watchdog) -> Feed:
        """Return what the loop takes its batches from; entering it starts its processes."""
        assert self.corpus is not None, "a dry run takes no batches"
        return make_feed(self.cfg, self.corpus, self.program, self.mesh, watchdog)


def try_out(cfg: Config) -> None:
    """Call the code that the user brings once on made-up input. Raises `UserError` where it does not work."""
    for section in (cfg.data, cfg.optimizer, cfg.scheduler):
        section.try_out()
    peers.on_main(cfg.logging.try_out, "trying the sinks")


def set_up(cfg: Config, mesh: Mesh, chosen: str, watchdog: Watchdog, compiler: Compiler, clock: StartClock) -> Setup:
    """Return the setup of a run; `chosen` is what `resolve_auto` says. The order is important:

    1. the program, on shapes only: no array is made, so a dry run is quick;
    2. the data, which may take hours the first time: process 0 prepares them, the others read them;
    3. the report of every derived number.
    """
    program = assemble(cfg, mesh)
    programs = assemble_stages(program, cfg.training.batch_schedule(mesh.shape))
    for each in programs.values():
        each.try_out_loss()
    check_compiler_options(cfg.training.compiler_options)
    device = mesh.devices.flat[0]
    check_matmul_dtype(cfg, device.platform, device.device_kind)
    sizes = derive_sizes(cfg, mesh, program.arch, None)
    if sizes.total_steps is not None:  # None: the config counts epochs, and only the data tell how many steps they are
        check_window(cfg, sizes.total_steps)
    # Compile while the data are read, but only where nothing else can be refused: an error would wait for the compiler
    # to end. A run that resumes, or starts from other weights, has files to check first.
    if not (cfg.dry_run or cfg.resume or cfg.model.init_from):
        # Where the config counts epochs, the data may end the run before its other limits.
        compiler.begin_run(programs, sizes.schedule, None if cfg.training.num_epochs else sizes.total_steps)
    clock.end("program")

    with watchdog.phase("preparing the data", math.inf):
        corpus = None if cfg.dry_run else peers.main_first(lambda: load_data(cfg), "preparing the data")
    clock.end("data")

    sizes = derive_sizes(cfg, mesh, program.arch, corpus.num_samples if corpus else None, BEGINNING)
    report = make_start_report(cfg, program, mesh, sizes, corpus, chosen)
    return Setup(cfg, mesh, program, programs, corpus, sizes, compiler, report)


def check_before_writing(setup: Setup, feed: Feed) -> None:
    """Raise `UserError` for mistakes that only the length of the data, a download or the devices can show."""
    cfg, num_steps = setup.cfg, setup.sizes.total_steps
    assert num_steps is not None, "a corpus or the config ends every run"
    left_out = setup.sizes.course.left_out(num_steps)
    if table := feed.samples.stages(num_steps, left_out):
        log.info("stages of the mixture\n%s", table)
    check_window(cfg, num_steps)
    peers.main_first(lambda: check_init_from(cfg, setup.program.arch), "looking at model.init_from")
    for check in (check_attention, check_expert_products):
        if agreement := check(cfg, setup.program.layout, setup.mesh):
            log.info("%s", agreement)
