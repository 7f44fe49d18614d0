"""Imports run downward only."""

import ast

import pytest
from harness import ROOT

# A module may import from its own row and from rows above it.
ROWS = [
    {"layout"}, {"config"}, {"compose"}, {"distributed"}, {"mesh"}, {"models", "flops"}, {"data", "losses", "optim"}, {"state"},
    {"step", "report", "sampling"}, {"checkpoint", "metrics", "evaluation", "profiling", "run_folder"}, {"train"},
]  # fmt: skip
RANK = {name: row for row, names in enumerate(ROWS) for name in names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "tunix":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tunix."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("path", sorted((ROOT / "tunix").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downward(path):
    here = path.relative_to(ROOT / "tunix").parts[0].removesuffix(".py")
    if here == "__init__":
        return
    assert here in RANK, f"give tunix/{here} a row"
    assert all(RANK[there] <= RANK[here] for there in imports(path)), f"{path.name} imports upward"


@pytest.mark.parametrize("name", ["layout", "config", "compose"])
def test_config_knows_no_jax(name):
    """A typo is answered in a second: nothing that imports jax is in the way."""
    import subprocess
    import sys

    code = f"import sys, tunix.{name}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_only_state_splits_modules_and_models_name_no_mesh_axis():
    for path in (ROOT / "tunix").rglob("*.py"):
        text = path.read_text()
        if path.parent.name == "models":
            assert not any(f'"{axis}"' in text for axis in ("dp", "fsdp", "tp")), f"{path.name} names a mesh axis"
        elif path.name != "state.py":
            assert "nnx.split" not in text, path.name
