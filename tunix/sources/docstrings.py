"""Docstrings of Python's library as questions with answers: real conversations on every machine, for `task=sft`."""

import ast
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Literal

from tunix.sources.files import Unit, open_unpacked
from tunix.sources.rows import Rows
from tunix.sources.source import Item
from tunix.sources.text_files import list_standard_library


class PythonDocstrings(Rows):
    """Questions about the running interpreter's standard library: what a function or class does, answered by the
    first line of its docstring. Columns: name, question, answer."""

    source: Literal["python_docstrings"]
    """Where documents come from."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """List the library's files without its own tests."""
        tests = {"test", "tests", "idle_test"}
        return [unit for unit in list_standard_library() if not tests & {*unit.name.split("/")}]

    def read(self, unit: Unit) -> Iterator[Item]:
        with open_unpacked(unit.path) as file:
            text = file.read()
        try:
            for row in read_questions(text, _module_name(unit.name)):
                yield Item(row["name"], row, "", partial("{}, {},".format, unit.path, row["name"]))
        except SyntaxError:
            yield Item(unit.name, None, "is not Python", lambda: unit.path)


def read_questions(source: bytes, module: str) -> Iterator[dict[str, str]]:
    """Yield `name`, `question` and `answer` for each public class and function that has a docstring.

    The answer is the docstring's first line:
    {"name": "bisect.insort", "question": "What does bisect.insort do?", "answer": "Insert item x in list a, ..."}

    Raises:
        SyntaxError: the source is not Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the code that is parsed, like an invalid escape sequence
        tree = ast.parse(source)
    for name, docstring in _find_docstrings(tree, module):
        yield {"name": name, "question": f"What does {name} do?", "answer": docstring.splitlines()[0]}


def _module_name(path: str) -> str:
    """Return the module of a file: `os/path.py` is `os.path`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _find_docstrings(node: ast.AST, path: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            name = f"{path}.{child.name}"
            if docstring := ast.get_docstring(child):
                yield name, docstring
            yield from _find_docstrings(child, name)
