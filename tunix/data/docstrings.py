"""Docstrings as questions with their answers: real text on every machine for `task=sft`."""

import ast
import warnings
from collections.abc import Iterator


def questions(source: bytes, module: str) -> Iterator[dict[str, str]]:
    """`name`, `question` and `answer` for each public class and function that says what it does.

    Raises:
        SyntaxError: no Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the text's own making
        tree = ast.parse(source)
    for name, said in _docstrings(tree, module):
        yield {"name": name, "question": f"What does {name} do?", "answer": said.splitlines()[0]}


def module_name(path: str) -> str:
    """`os/path.py` is os.path."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _docstrings(node: ast.AST, path: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            name = f"{path}.{child.name}"
            if said := ast.get_docstring(child):
                yield name, said
            yield from _docstrings(child, name)
