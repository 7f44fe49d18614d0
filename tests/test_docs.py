"""Pages keep their word: links lead somewhere, and what they name exists."""

import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from support.harness import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_exist(page):
    code = re.findall(r"`([^`\n]+)`", page.read_text())
    sources = "\n".join(path.read_text() for path in ROOT.glob("tunix/**/*.py"))
    for word in code:
        if re.fullmatch(r"(tunix|conf|docs|tests|benchmarks)/[a-z_/.0-9]+", word):
            assert (ROOT / word).exists(), word
        if re.fullmatch(r"[A-Z_]{5,}", word):
            assert word in sources, word


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_overrides_are_read(page):
    """Hydra's grammar accepts every command of the page as the shell hands it over."""
    for line in page.read_text().replace("\\\n", " ").splitlines():
        if re.match(r"(python|srun|torchrun|accelerate|mpirun) ", line):
            words = [word for word in shlex.split(line, comments=True) if re.match(r"[+~]*[\w./@]+=", word)]
            OverridesParser.create().parse_overrides(words)


def test_the_map_names_every_module():
    readme = (ROOT / "README.md").read_text()
    for path in Path(ROOT / "tunix").iterdir():
        if path.name not in ("__init__.py", "__main__.py", "__pycache__"):
            name = f"tunix/{path.name}{'/' if path.is_dir() else ''}"
            assert f"`{name}`" in readme, name
