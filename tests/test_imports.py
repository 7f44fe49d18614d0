"""Imports run downward only."""

import ast
import subprocess
import sys

import pytest
from support.harness import ROOT

# From the ground up. Code in one of these imports only from those before it and from itself.
ORDER = (
    "base", "families", "sharding", "sources", "optimizers", "sinks", "rewards", "config", "processes", "models", "hf", "tokenizer", "cli", "data", "training", "costs", "run",
    "inference", "rl", "loop",  # subjects end here; what follows are commands, and the program
    "plan", "launch", "doctor", "trainer", "prepare", "verify", "generate", "evaluate", "export", "compare", "average", "train_command", "__init__", "__main__",
)  # fmt: skip


def imports(path):
    """Places in `ORDER` that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "tunix":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tunix."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("tunix."))


@pytest.mark.parametrize("path", sorted((ROOT / "tunix").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downward(path):
    here = path.relative_to(ROOT / "tunix").with_suffix("").parts[0]
    assert here in ORDER, f"give tunix/{here} a place"
    for there in imports(path):
        assert there == here or ORDER.index(there) < ORDER.index(here), f"{path} imports upward, from tunix.{there}"


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
            place = ROOT.joinpath(*node.module.split("."))
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            for alias in node.names:
                is_module = (place / alias.name).is_dir() or (place / f"{alias.name}.py").exists()
                assert is_module or alias.name in names_in(file), f"{path}: {node.module} has no {alias.name}"


def test_no_two_files_share_a_name():
    names = [path.stem for path in (ROOT / "tunix").rglob("*.py") if not path.stem.startswith("__")]
    same = {name for name in names if names.count(name) > 1}
    assert not same, same


JAX_FREE = (
    "sharding.dims", "sharding.mesh_shape", "sources", "optimizers", "sinks", "rewards.worker", "rl.scoring", "config", "families", "hf.config_json", "hf.hub", "cli.compose", "cli.command",
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
