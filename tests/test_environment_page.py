"""docs/environment.md names every environment variable that the package reads or sets."""

import ast
import re
from pathlib import Path

from support.harness import ROOT

PAGE = (ROOT / "docs/environment.md").read_text()
MAPPINGS = {"os.environ", "environment", "env"}  # what the package calls the variables
OWN = re.compile(r"\bTUNIX_[A-Z_]*[A-Z]\b")


def read_names(path: Path) -> set[str]:
    """Return the names in `env[...]`, `env.get(...)`, `f(env, ...)`, `... in env`, and those of our own."""
    text = path.read_text()
    names = set(OWN.findall(text))
    for node in ast.walk(ast.parse(text)):
        pairs: list[tuple[ast.AST, ast.AST]] = []
        match node:
            case ast.Subscript(value=mapping, slice=key):
                pairs = [(mapping, key)]
            case ast.Call(func=ast.Attribute(value=mapping), args=[key, *_]):
                pairs = [(mapping, key)]
            case ast.Compare(left=key, comparators=[mapping]):
                pairs = [(mapping, key)]
        if isinstance(node, ast.Call) and len(node.args) > 1:
            pairs.append((node.args[0], node.args[1]))
        names |= {
            key.value
            for mapping, key in pairs
            if ast.unparse(mapping) in MAPPINGS and isinstance(key, ast.Constant) and isinstance(key.value, str)
        }
    return names


def test_every_variable_is_on_the_page():
    names = set().union(*(read_names(path) for path in (ROOT / "tunix").rglob("*.py")))
    assert len(names) > 30
    assert sorted(name for name in names if f"`{name}`" not in PAGE) == []
