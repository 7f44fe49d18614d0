"""Pages keep their word: links lead somewhere, and what they name exists."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from support.harness import ROOT

from tunix.config.compose import compose, to_yaml

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/results.md"]


def anchors(page: Path) -> set[str]:
    """Names under which links reach the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if not target.startswith("http"):
            path = page.parent / target if target else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), (target, anchor)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_exist(page):
    code = re.findall(r"`([^`\n]+)`", page.read_text())
    folders = "tunix/**/*.py", "benchmarks/*.py", "tests/support/*.py", "conf/**/*.yaml"
    files = [file for names in folders for file in ROOT.glob(names)]
    sources = "\n".join(path.read_text() for path in files)
    for word in code:
        if re.fullmatch(r"(tunix|conf|docs|tests|benchmarks)/[a-z_/.0-9]+", word):
            assert (ROOT / word).exists(), word
        if re.fullmatch(r"[A-Z_]{5,}", word):
            assert word in sources, word


def commands(page: Path) -> list[list[str]]:
    """Words of each command of the page: of whole lines, and of code in a sentence or a table."""
    text = page.read_text().replace("\\\n", " ")
    lines = [*text.splitlines(), *re.findall(r"`([^`\n]+)`", text)]
    starts = re.compile(r"(python|srun|torchrun|accelerate|mpirun) ")
    return [shlex.split(line, comments=True) for line in lines if starts.match(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_read(page):
    """Modules exist, and Hydra's grammar accepts the overrides as the shell hands them over."""
    for words in commands(page):
        if words[:2] == ["python", "-m"] and words[2].startswith("tunix."):
            assert find_spec(words[2].removesuffix(".NAME")), words
        overrides = [word for word in words if re.match(r"[+~]*[\w./@]+=", word)]
        OverridesParser.create().parse_overrides(overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_published_sizes_get_rows_for_their_tokens(page):
    """A run of a published size with the tokenizer of a corpus is refused where nothing says how many rows it has."""
    published = {path.stem for path in ROOT.glob("conf/model/*.yaml")} - {
        "tiny",
        "tiny_moe",
        "tiny_vision",
        "adder",
        "pretrained",
    }
    says = ("model.vocab_size=", "model.init_from=", "tokenizer.path=", "dry_run=true")
    ours = [words for words in commands(page) if "run_training.py" in words and "jax.distributed.launch" not in words]
    for words in ours:
        if published & {word.removeprefix("model=") for word in words}:
            assert any(word.startswith(says) for word in words), words


README_RUNS = [words[2:] for words in commands(ROOT / "README.md") if words[:2] == ["python", "run_training.py"]]


@pytest.mark.parametrize("words", README_RUNS, ids=" ".join)
def test_runs_of_the_readme_compose(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [word for word in words if "=" in word]
    if "resume=latest" in overrides:
        folder = tmp_path / "outputs" / "tunix" / "latest"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(to_yaml(compose([]).config))
    compose(overrides)
