"""Programs that need XLA's GPU compiler, which is a plugin of JAX; no GPU is there."""

import os
from pathlib import Path

from support.devices import xla_flags
from support.harness import ROOT, run_python
from support.installs import cuda_plugin, one_at_a_time

SCRIPTS = ROOT / "tests" / "support"


def run_with_plugin(*words: str, installs_dir: Path, **environment: str) -> str:
    """Return what `python WORDS` prints, with the plugin; one process of this machine after the other."""
    path = [cuda_plugin(installs_dir), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    # Without the flags by which tests compile quickly for CPUs: the GPU's compiler takes them too, and spills registers.
    environment["XLA_FLAGS"] = xla_flags(8, optimized=True)
    with one_at_a_time("gpu_programs"):
        done = run_python(*words, cwd=ROOT, timeout=600, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def compile_for_gpu(script: str, *words: str, installs_dir: Path) -> list[str]:
    """Return the lines that a script of this folder prints."""
    words = (str(SCRIPTS / script), *words)
    return run_with_plugin(*words, installs_dir=installs_dir, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1").splitlines()
