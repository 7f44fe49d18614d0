"""Logs of a run: the terminal, and a file for each process."""

import logging
import sys
from logging.handlers import MemoryHandler

import jax
from rich.logging import RichHandler

from tunix.config import Logging
from tunix.run.run_folder import log


def start_logging(remarks: list[str], cfg: Logging) -> MemoryHandler:
    """Begin to log to the terminal, with `remarks` first.

    Returns a handler that keeps every message until the run has a folder, and with it a log file. Warnings of other
    libraries go to the log file alone.
    """
    logging.raiseExceptions = False  # a full disk is reported once, by the part of the run that needs it
    waiting = MemoryHandler(10**6, flushLevel=logging.CRITICAL + 1)  # a level that no message has: nothing flushes it
    logging.basicConfig(handlers=[waiting], level=logging.WARNING, force=True)
    logging.getLogger("absl").setLevel(logging.ERROR)
    # Errors of destructors, which Python prints on the terminal: tensorstore has some after a save that failed.
    sys.unraisablehook = lambda ignored: logging.getLogger("python").warning(
        "ignored in %r", ignored.object, exc_info=ignored.exc_value
    )
    ours = logging.getLogger("tunix")
    ours.setLevel(cfg.level.upper())
    ours.handlers.clear()
    if cfg.ranks is None or jax.process_index() in cfg.ranks:
        on_terminal = RichHandler(show_path=False, show_level=False, log_time_format="%X")
        ours.addHandler(on_terminal if sys.stdout.isatty() else logging.StreamHandler(sys.stdout))
    for remark in remarks:
        log.warning("%s", remark)
    return waiting
