"""Imports run downward only."""

import ast
import re
import subprocess
import sys

import pytest
from support.harness import ROOT

# From the ground up. A file imports only from rooms before its own, and from its own. A file that is named here apart
# from its folder is below it: the tables and types that the config is made of, and what imports no jax.
ORDER = (
    "base", "sharding.table", "sharding.mesh", "huggingface.family",
    "huggingface.gemma", "huggingface.table", "models.table", "optimizers",
    "data.pieces", "data.words", "data.files", "data.parquet", "data.sources", "run.sinks", "run.remote_sinks", "run.table",
    "rl.rewards", "rl.tool_parsers", "rl.environments", "rl.tools", "rl.table", "rl.scoring", "rl.environment_pool",
    "config", "processes", "sharding", "models", "huggingface", "data.chat", "data.image_processors", "data.images", "data.tokenizer",
    "config.saved_runs", "config.foreign_names", "config.mistakes", "config.pretrained_config",
    "config.compose", "config.command_line",
    "data", "training", "costs", "checkpoints", "run", "inference", "rl",  # subjects end here
    "plan", "feeds", "trainer",  # the program, and its commands
    "launch", "doctor", "prepare", "verify", "parity", "generate", "evaluate", "export", "compare", "samples", "play", "average", "serve", "train_command", "__init__", "__main__",
)  # fmt: skip
FILES = sorted((ROOT / "tunix").rglob("*.py"))


def find_room(module: str) -> int:
    """Return the place in `ORDER` of `FOLDER.FILE`, or of its folder where the file has none of its own."""
    names = [module, module.split(".")[0]]
    assert any(name in ORDER for name in names), f"give tunix/{module} a place"
    return next(ORDER.index(name) for name in names if name in ORDER)


def imports(path):
    """Modules of tunix that a file imports, without `tunix.`."""
    modules = {".".join(file.relative_to(ROOT / "tunix").with_suffix("").parts) for file in FILES}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tunix":
            module = (node.module or "").removeprefix("tunix").removeprefix(".")
            for alias in node.names:
                name = f"{module}.{alias.name}".removeprefix(".")
                yield name if name in modules or not module else module
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("tunix.") for alias in node.names if alias.name.startswith("tunix."))


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in FILES} - {ROOT / "tunix"}), ids=lambda path: path.name
)
def test_the_map_of_a_folder_names_its_files(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    assert not files - set(re.findall(r"\w+", text))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downward(path):
    here = ".".join(path.relative_to(ROOT / "tunix").with_suffix("").parts).removesuffix(".__init__")
    for there in imports(path):
        above = find_room(there) > find_room(here)
        assert not above, f"{path} imports upward, from tunix.{there}"


def names_in(path) -> set[str]:
    """Return the names that a file defines or imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


# Scripts of an environment with google-tunix, whose module has the same name.
OF_ANOTHER_TUNIX = {"trained_by_google_tunix.py"}


@pytest.mark.parametrize("folder", ["benchmarks", "tools", "tests/support"])
def test_what_others_import_is_there(folder):
    """Benchmarks and tools run seldom: a name that has moved is found here."""
    for path in sorted(path for path in (ROOT / folder).glob("*.py") if path.name not in OF_ANOTHER_TUNIX):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tunix"):
                continue
            index = ROOT.joinpath(*node.module.split("."))
            file = index / "__init__.py" if index.is_dir() else index.with_suffix(".py")
            for alias in node.names:
                is_module = (index / alias.name).is_dir() or (index / f"{alias.name}.py").exists()
                assert is_module or alias.name in names_in(file), f"{path}: {node.module} has no {alias.name}"


JAX_FREE = (
    "sharding.table", "sharding.mesh", "data.sources", "optimizers.table", "run.table", "rl.scoring", "rl.environment_pool", "config", "huggingface.table", "huggingface.config_json", "huggingface.hub", "config.compose", "config.command_line",
    "processes.identity", "processes.rollcall", "processes.supervisor", "processes.exits", "launch.__main__", "train_command", "__main__",
)  # fmt: skip


@pytest.fixture(scope="module")
def imported_before_jax() -> list[str]:
    """Names of JAX_FREE, imported one after the other in a new process, until one brings jax with it."""
    code = "import sys, importlib\nfor name in sys.argv[1:]:\n"
    code += "    importlib.import_module(f'tunix.{name}')\n    'jax' in sys.modules or print(name)"
    done = subprocess.run([sys.executable, "-c", code, *JAX_FREE], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("name", JAX_FREE)
def test_config_knows_no_jax(name, imported_before_jax):
    """A typo is answered in a second: nothing that imports jax is in the way."""
    assert name in imported_before_jax


def test_only_state_splits_modules():
    for path in (ROOT / "tunix").rglob("*.py"):
        if path.parent.name != "models" and path.name != "state.py":
            assert "nnx.split" not in path.read_text(), path.name
