"""Environments of tunix: an interpreter of Python, a calculator, a search in a folder; a game; and servers of OpenEnv.
Imports no jax.

The first three have one tool each, and give no reward of their own: `task.rewards` scores the last turn of an episode.
"""

import ast
import json
import math
import operator
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tunix.base.files import expand_home

# A program that a model has written, in a sandbox against mistakes, not against attackers (docs/security.md):
#
# - a session of its own, which is killed as a group, with everything in it, at the deadline
# - limits of memory, processor time, size of files and open files
# - an empty working folder, an empty environment, an interpreter that reads no user's site-packages (-s, -P; with -I
#   it would not read PYTHONHASHSEED, and an episode that is played again would print a set in another order)
# - where the kernel allows it, namespaces: no network, no processes but its own, which end with it

FOLDER = "tunix_python_"  # of a program, in /tmp; the number of the process that has made it follows
NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--")


@cache
def _list_namespaces() -> tuple[str, ...]:
    """Return the words that give a program namespaces of its own; none where the kernel does not allow it."""
    if shutil.which(NAMESPACES[0]) is None:
        return ()
    try:
        done = subprocess.run([*NAMESPACES, "true"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return NAMESPACES if done.returncode == 0 else ()


class Python:
    """An interpreter, which forgets everything between two calls."""

    def __init__(
        self, timeout_s: float = 5.0, memory_mib: int = 512, file_mib: int = 16, output_characters: int = 4000
    ):
        """Set the limits of a program: seconds, memory, the size of a file, and how much of its output is returned."""
        self.timeout_s, self.memory, self.file_size = timeout_s, memory_mib * 2**20, file_mib * 2**20
        self.output_characters = output_characters

    def reset(self, seed: int) -> None:
        self.seed = seed

    def python(self, code: str) -> str:
        """Run a Python program, and return what it prints. It has the standard library, and no network.

        Args:
            code: The program. Variables of earlier programs are gone.
        """
        with tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}_", ignore_cleanup_errors=True) as folder:
            script, output = Path(folder, "program.py"), Path(folder, "output")
            (workplace := Path(folder, "work")).mkdir()
            script.write_text(code, errors="replace")
            # Read by this descriptor: under the name of the file a program may leave a pipe, which nobody ever writes.
            with output.open("w+b") as file:
                process = subprocess.Popen(
                    [*_list_namespaces(), sys.executable, "-sP", str(script)],
                    cwd=workplace,
                    env={"PYTHONHASHSEED": str(self.seed % 2**32), "PATH": os.defpath, "LANG": "C.UTF-8"},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                    preexec_fn=self._limit,
                )
                note = self._wait(process)
                file.seek(0)
                text = file.read(8 * self.output_characters).decode(errors="replace")
                text = text.replace(str(script), "program.py").replace(folder, "")
            _remove(workplace)
        if len(text) > self.output_characters:
            text = text[: self.output_characters] + "\n... the rest is left out"
        return "\n".join(filter(None, [text.rstrip("\n"), note])) or "the program has printed nothing"

    def _wait(self, process: "subprocess.Popen[bytes]") -> str:
        """Wait for the program, end what it has started, and return what is to be said about its end."""
        try:
            code = process.wait(self.timeout_s)
            note = "" if code in (0, 1) else f"the program ended with exit code {code}"  # 1 after a traceback
            if code < 0:
                note = f"the program was killed by {signal.Signals(-code).name}"
        except subprocess.TimeoutExpired:
            note = f"the program was stopped after {self.timeout_s:g} s"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return note

    def _limit(self) -> None:
        seconds = math.ceil(self.timeout_s) + 1
        for limit, value in (
            (resource.RLIMIT_AS, self.memory),
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_FSIZE, self.file_size),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            with suppress(ValueError, OSError):  # a limit of the machine may be lower
                resource.setrlimit(limit, (value, value))


def _remove(folder: Path) -> None:
    # Python's own way fails for folders in folders, 1,000 deep.
    subprocess.run(["rm", "-rf", "--", str(folder)], capture_output=True, check=False)


def remove_folders(process_id: int) -> None:
    """Remove the folders of programs of a process that was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}{process_id}_*"):
        _remove(folder)


# A value that the environment alone knows.


class LookUp:
    """A game for a model from scratch (`data=look_up`): "?c" asks for the value of the key c, and "!7" answers.

    The prompt names the key. The reward is 1 for its value.
    """

    def reset(self, key: str, value: str) -> None:
        self.key, self.value = key, value

    def step(self, text: str) -> tuple[str | None, float, bool]:
        if text.startswith("?"):
            return f"={self.value if text[1:] == self.key else '-'}", 0.0, False
        return None, float(text == f"!{self.value}"), True


# A server of OpenEnv (https://github.com/meta-pytorch/OpenEnv), by the library's own client.


class OpenEnv:
    """An environment that a server of OpenEnv holds: a turn is an action of one text, and it rewards turns."""

    replays = False  # a server need not give the same answers again

    def __init__(self, url: str, action: str, observation: str | None = None):
        """`url` is the address of the server; a turn is sent as {action: text}.

        Args:
            observation: field of an observation that the model reads, as JSON where it is no text; None: all of them.
        """
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ImportError:
            raise ValueError("task.environment=openenv needs OpenEnv: pip install openenv") from None
        self.action, self.observation = action, observation
        self.client = GenericEnvClient(base_url=url).sync()

    def reset(self, seed: int) -> str | None:
        self.client.connect()
        return self._read(self.client.reset(seed=seed).observation)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        result = self.client.step({self.action: text})
        return self._read(result.observation), float(result.reward or 0), bool(result.done)

    def close(self) -> None:
        self.client.close()

    def _read(self, fields: dict[str, Any]) -> str | None:
        if self.observation is not None and self.observation not in fields:
            raise ValueError(f"the server's observation has no field {self.observation}; it has {', '.join(fields)}")
        said = fields if self.observation is None else fields[self.observation]
        return said if said is None or isinstance(said, str) else json.dumps(said, ensure_ascii=False)


# A calculator.

MAX_DIGITS = 400  # that `round` is asked for: more than a number has. For a billion, Python computes 10**(10**9)


def _round(value: float, *digits: int) -> float:
    if any(abs(each) > MAX_DIGITS for each in digits):
        raise ValueError(f"round takes at most {MAX_DIGITS} digits")
    return round(value, *digits)


OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "log10": math.log10, "sin": math.sin, "cos": math.cos,
    "tan": math.tan, "floor": math.floor, "ceil": math.ceil, "round": _round, "abs": abs, "min": min, "max": max,
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e}
MAX_INTEGER = 10**100  # of a whole number: 9**9**9 would compute for days
MAX_EXPRESSION = 1000  # characters of an expression


class Calculator:
    """A calculator of one expression at a time."""

    def reset(self) -> None:
        pass

    def calculate(self, expression: str) -> str:
        """Compute an expression, and return its value.

        Args:
            expression: Numbers with + - * / // % ** and brackets, pi, e, and functions like sqrt(2) or max(1, 2).
        """
        if len(expression) > MAX_EXPRESSION:
            raise ValueError(f"an expression has at most {MAX_EXPRESSION} characters")
        value = _compute(ast.parse(expression.strip(), mode="eval").body)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)  # 6 / 2 is 3
        return str(value)


def _compute(node: ast.expr) -> float:
    """Return the value of a node of an expression. Raises `ValueError` for what is neither a number, an operator nor a
    function of the table."""
    match node:
        case ast.Constant(value) if type(value) in (int, float):
            return _check_size(value)  # type: ignore[arg-type]
        case ast.Name(name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_compute(operand))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            first, second = _compute(left), _compute(right)
            if isinstance(op, ast.Pow) and first and abs(second) * abs(math.log10(abs(first))) > 100:
                raise ValueError("a power is too large")
            return _check_size(OPERATORS[type(op)](first, second))
        case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(_compute, arguments))
    raise ValueError(f"{ast.unparse(node)[:50]} is no number, operator or function that this calculator has")


def _check_size(value: float) -> float:
    if isinstance(value, complex):
        raise ValueError("the value is no real number")
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError("a number is too large")
    return value


# A search in the text files of a folder.

TEXT_FILES = (".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".html")
BM25_K, BM25_B = 1.5, 0.75  # how soon a word counts enough, and how much a long passage is reduced (Robertson 2009)


class Passage(NamedTuple):
    name: str  # of its file, in the folder
    text: str
    words: Counter[str]


class Index(NamedTuple):
    passages: list[Passage]
    num_with: Counter[str]  # passages with a word
    mean_words: float  # of a passage


class SearchFolder:
    """A search in text files."""

    def __init__(self, folder: str, results: int = 3, passage_characters: int = 800):
        """`folder` is searched for passages of about `passage_characters`, of which the best `results` are returned."""
        self.index, self.results = _read_folder(folder, passage_characters), results

    def reset(self) -> None:
        pass

    def search(self, query: str) -> str:
        """Search the documents, and return the passages that fit a query best.

        Args:
            query: A few words that the passage should have.
        """
        index, words = self.index, set(_split_words(query))
        total = len(index.passages)
        weights = {
            word: math.log(1 + (total - index.num_with[word] + 0.5) / (index.num_with[word] + 0.5)) for word in words
        }
        scored = []
        for number, passage in enumerate(index.passages):
            length = 1 - BM25_B + BM25_B * passage.words.total() / index.mean_words
            counts = ((weights[word], passage.words[word]) for word in sorted(words) if word in passage.words)
            if score := sum(weight * count * (BM25_K + 1) / (count + BM25_K * length) for weight, count in counts):
                scored.append((-score, number))
        best = [index.passages[number] for _, number in sorted(scored)[: self.results]]
        return "\n\n".join(f"{passage.name}:\n{passage.text}" for passage in best) or "nothing is found"


@cache  # each episode has an object, and all have the same folder
def _read_folder(folder: str, passage_characters: int) -> Index:
    """Return the passages of a folder's text files. Raises `ValueError` where there is none."""
    root, passages = expand_home(folder), []
    for path in sorted(path for path in root.rglob("*") if path.suffix in TEXT_FILES and path.is_file()):
        for passage in _split_passages(path.read_bytes().decode(errors="replace"), passage_characters):
            passages.append(Passage(str(path.relative_to(root)), passage, Counter(_split_words(passage))))
    if not passages:
        raise ValueError(f"the folder {folder} has no text files ({', '.join(TEXT_FILES)})")
    num_with = Counter(word for passage in passages for word in passage.words)
    return Index(passages, num_with, max(1.0, sum(passage.words.total() for passage in passages) / len(passages)))


def _split_passages(text: str, size: int) -> list[str]:
    """Cut a text between paragraphs into passages of at most `size` characters; a longer paragraph is cut itself."""
    pieces = [
        part[n : n + size] for part in re.split(r"\n\s*\n", text) if part.strip() for n in range(0, len(part), size)
    ]
    passages: list[str] = []
    for piece in pieces:
        if passages and len(passages[-1]) + len(piece) + 2 <= size:
            passages[-1] += f"\n\n{piece}"
        else:
            passages.append(piece)
    return passages


def _split_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
