"""The tutorial's cells run one after the other; the site builds with every link right."""

import json
import os
import subprocess
import sys

import pytest
from support.devices import xla_flags
from support.harness import ROOT

SHORTER = {"max_steps=60": "max_steps=12", "every_steps=20": "every_steps=6", "max_steps=70": "max_steps=14"}


@pytest.mark.nightly
def test_the_tutorial(tmp_path):
    """The cells run as they are, for fewer steps."""
    cells = json.loads((ROOT / "docs/tutorial.ipynb").read_text())["cells"]
    program = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    program += "\nprint(trained[0]['loss'], trained[-1]['loss'], len(held_out), longer.train['step'])"
    for words, fewer in SHORTER.items():
        assert words in program
        program = program.replace(words, fewer)
    environment = {"MPLBACKEND": "Agg", "XLA_FLAGS": xla_flags(1, optimized=True)}
    (tmp_path / "docs").mkdir()  # where Jupyter starts, in a clone
    for name in ("tunix", "conf"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "docs",
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    first, last, evaluations, steps = map(float, done.stdout.splitlines()[-1].split())
    assert last < first - 1
    assert (evaluations, steps) == (2, 14)
    assert "def read(self" in done.stdout


@pytest.mark.nightly
def test_the_site_builds(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api/training.html").read_text()
    assert 'id="tunix.training.step"' in api
    assert "api/training.html#tunix.training.step" in (tmp_path / "architecture.html").read_text()
