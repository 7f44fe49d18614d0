"""Imports run downward only."""

import ast

import pytest
from harness import ROOT

# A module may import from its own row and from rows above it.
ROWS = [
    {"layout", "figure"}, {"config"}, {"schema", "exits"}, {"mistakes"}, {"models.hf", "models.hf_config", "models.hub", "data.tokenizer", "data.sentencepiece", "data.chat"}, {"compose", "cluster"}, {"supervisor", "rollcall", "command"}, {"distributed"}, {"mesh", "watchdog"}, {"models", "flops"}, {"data", "losses", "optim"}, {"state"},
    {"step", "report", "sampling", "program", "costs"}, {"checkpoint", "metrics", "evaluation", "profiling", "plan", "pretrained", "run_folder", "run_lock"}, {"train", "export", "generate", "prepare", "launch", "verify", "doctor"}, {"evaluate"},
]  # fmt: skip
RANK = {name: row for row, names in enumerate(ROWS) for name in names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "tunix":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tunix."):
            inner = node.module.removeprefix("tunix.")
            yield from (row_of(f"{inner}.{alias.name}") for alias in node.names)


def row_of(name):
    """The name that a module's row goes by: its own, or its package's."""
    own = ".".join(name.split(".")[:2])
    return own if own in RANK else name.split(".")[0]


@pytest.mark.parametrize("path", sorted((ROOT / "tunix").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downward(path):
    here = row_of(".".join(path.relative_to(ROOT / "tunix").with_suffix("").parts))
    if here == "__init__":
        return
    assert here in RANK, f"give tunix/{here} a row"
    assert all(RANK[there] <= RANK[here] for there in imports(path)), f"{path.name} imports upward"


@pytest.mark.parametrize(
    "name", ["layout", "exits", "config", "compose", "cluster", "supervisor", "rollcall", "launch.__main__"]
)
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
