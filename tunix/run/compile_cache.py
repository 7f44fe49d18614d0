"""Compiled programs on disk: a program that this machine has compiled before is read from there, not compiled again.

JAX does the work. A program is found by a hash of its text, of the devices, of XLA's options and of the versions.
Process 0 writes, every process reads.
"""

import hashlib
import platform
import threading
from pathlib import Path

import jax

from tunix.config import Config

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


def keep_programs(cfg: Config) -> None:
    """Let JAX keep compiled programs in `loading.cache_dir`, unless the user has given JAX a folder already.

    Where `training.compile_cache_gib` is full, the programs that were not used for the longest time go.
    """
    size_gib = cfg.training.compile_cache_gib
    if size_gib and jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        folder = Path(cfg.loading.cache_dir).expanduser() / "programs" / _name_processor()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", int(size_gib * 2**30))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_COMPILE_S)


def _name_processor() -> str:
    """Return a name for this kind of processor: XLA compiles for its instructions, and another kind may lack some.

    A cache on a disk that hosts of several kinds share would else give a program that ends with an illegal instruction.
    """
    flags = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), flags)
    except OSError:  # not Linux
        pass
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"
