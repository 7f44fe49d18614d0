"""Objects that a user brings, named by a dotted path: `package.module:name`. Imports neither jax nor pydantic."""

import hashlib
import importlib
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tunix.base.errors import UserError, did_you_mean, name_error

_modules: dict[str, ModuleType] = {}  # that `import_object` has imported, by name


def hash_modules() -> dict[str, str]:
    """Return a hash of the file of each module of the user's that this process has imported, by `code of MODULE`."""
    files = {name: Path(module.__file__ or "") for name, module in _modules.items() if hasattr(module, "__file__")}
    return {
        f"code of {name}": hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for name, file in files.items()
        if file.suffix == ".py" and file.is_file() and not name.startswith("tunix.")  # those have a hash of their own
    }


def import_object(path: str, kind: type | None = None) -> Any:
    """Return the object that `package.module:name` names; the current folder is searched for modules too.

    It is of this kind, or a function or class where no kind is given.

    Raises:
        UserError: no such module, an error while the module is imported, or no such name in the module.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not name.isidentifier():
        raise UserError(f"expected package.module:name{suggest_colon(path)}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = _modules[module_name] = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module is the user's: it may raise anything, or end the program
        as_module = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
        is_file = module_name.endswith(".py") and all(map(str.isidentifier, as_module.split(".")))
        hint = f"; did you mean {as_module}:{name}?" if is_file else ""
        raise UserError(
            f"module {module_name} cannot be imported ({name_error(error):.300}); modules are looked for in the "
            f"current folder and on PYTHONPATH{hint}"
        ) from None
    fitting = {
        name: value
        for name, value in vars(module).items()
        if (callable(value) if kind is None else isinstance(value, kind))
    }
    if name not in fitting:
        label = "function or class" if kind is None else kind.__name__
        hint = did_you_mean(name, [name for name in fitting if not name.startswith("_")])
        raise UserError(f"module {module_name} has no {label} {name}{hint}")
    return getattr(module, name)


def suggest_colon(path: str) -> str:
    """Return a hint for `package.module.name`, which has a point in the place of the colon."""
    module, point, name = path.rpartition(".")
    return f"; did you mean {module}:{name}?" if point and ":" not in path and name.isidentifier() else ""


def is_dotted(name: str) -> bool:
    """Return whether a name is a dotted path, and not the name of an entry."""
    return ":" in name


class LateCall(TimeoutError):
    """A block takes longer than its `time_limit`."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `LateCall` in the block when it takes longer. Only the main thread of a process has this limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: object) -> None:
        raise LateCall(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def blame_user(key: str, path: str) -> Iterator[None]:
    """Run the block, which calls the object of `path`: an error in it is an error of the user's code.

    Raises:
        UserError: whatever the block raises, with the key, the path, and the line of the user's file.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        file = getattr(sys.modules[path.partition(":")[0]], "__file__", None)  # a module in C has none
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        location = f" ({file}, line {lines[-1]})" if lines else ""
        raise UserError(f"{key}={path} fails: {name_error(error):.300}{location}") from error


def describe_value(value: Any) -> str:
    """Return a value that a user's code has returned, with its type, for a message."""
    return "None" if value is None else f"{value!r:.40} ({type(value).__name__})"


def select_named(
    caller: str, parameters: Iterable[inspect.Parameter], given: Mapping[str, Any], columns: Iterable[str]
) -> dict[str, Any]:
    """Return those values of `given` that `parameters` of a user's function name, or all where it has **columns.

    Raises:
        ValueError: `given` lacks a parameter without a default; the message names `caller` and the data's `columns`.
    """
    parameters = list(parameters)
    for each in parameters:
        required = each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if required and each.name not in given:
            present = ", ".join(columns) or "none"
            raise ValueError(f"{caller} takes the column {each.name}, which the data lack; their columns are {present}")
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(given)
    return {each.name: given[each.name] for each in parameters if each.name in given}
