"""Sources of documents: a class for each choice of the group `data`, with its keys and how it is read; and their table,
`SOURCES`. Imports no jax: the config is made of these classes."""

import ast
import glob
import hashlib
import inspect
import io
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache, lru_cache, partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field

from tunix.base.buckets import is_address, mirror
from tunix.base.config_types import Count, CountOrZero, DottedPath, Flag, Seed, Share
from tunix.base.dotted_path import blame_user, import_object
from tunix.base.errors import UserError, did_you_mean, first_line
from tunix.base.files import expand_home, read_json
from tunix.data.files import (
    NO_TIME,
    Csv,
    Item,
    Jsonl,
    Paths,
    Rows,
    Source,
    TextFiles,
    Texts,
    Unit,
    find_files,
    make_file_unit,
    open_unpacked,
)
from tunix.data.parquet import Parquet

if TYPE_CHECKING:  # a config is checked without it
    from PIL.ImageDraw import ImageDraw


def list_standard_library() -> list[Unit]:
    """List the files of the running interpreter's standard library, without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - {"site-packages", "dist-packages"}  # of ten files there, nine are in packages
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    return [make_file_unit(path, path.relative_to(root).as_posix()) for path in sorted(paths)]


class PythonStdlib(Texts):
    """The source of the running interpreter's standard library: real text on every machine."""

    source: Literal["python_stdlib"]
    """Where documents come from."""

    def units(self, unit_bytes: int) -> list[Unit]:
        return list_standard_library()


# Real conversations on every machine, for `task=sft`.
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
            module = unit.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for row in read_questions(text, module):
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


def _find_docstrings(node: ast.AST, path: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            name = f"{path}.{child.name}"
            if docstring := ast.get_docstring(child):
                yield name, docstring
            yield from _find_docstrings(child, name)


class Synthetic(Source):
    """Made-up words with the frequencies of a natural language (Zipf), for benchmarks: nothing to download."""

    source: Literal["synthetic"]
    """Where documents come from."""
    num_documents: Count
    """Number of documents."""
    mean_document_bytes: Count
    """Mean length of a document; lengths are exponentially distributed."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """List ranges of document numbers."""
        step = max(1, unit_bytes // self.mean_document_bytes)
        bounds, mean = [*range(0, self.num_documents, step), self.num_documents], self.mean_document_bytes
        return [Unit("synthetic", "", start, end, (end - start) * mean, str(mean)) for start, end in pairwise(bounds)]

    def read(self, unit: Unit) -> Iterator[Item]:
        """Make documents of made-up words, each from its number. Words are as frequent as in real text (Zipf's law)."""
        import numpy as np  # here, because a config is checked without it

        words = _make_vocab()
        # Mean bytes of a word with its space. The most frequent 1,000 words make up most of a text.
        mean_word = np.mean([len(word) + 1 for word in words[:1000]])
        for number in range(unit.start, unit.stop):
            rng = np.random.default_rng(number)  # so any process can make any document
            count = 1 + int(rng.exponential(self.mean_document_bytes / mean_word))
            # Rank r is drawn with a probability of about r ** -1.2. Ranks have no upper end, so they wrap around.
            yield Item(f"synthetic@{number}", " ".join(words[rank % len(words)] for rank in rng.zipf(1.2, count)))


@cache
def _make_vocab() -> list[str]:
    import numpy as np

    rng, letters = np.random.default_rng(0), np.array(list("etaoinshrdlu"))
    return ["".join(rng.choice(letters, 1 + number % 9)) for number in range(10_000)]


# A small model learns this task in minutes, and rewards can check its answers.
class Arithmetic(Rows):
    """Every sum of two numbers, made up: nothing to download. Columns: question ("07+85="), answer ("92"); where some
    answers are wrong, also label (true: the answer is right), right and wrong, two answers to each question."""

    source: Literal["arithmetic"]
    """Where documents come from."""
    below: Count
    """Both numbers are below this; they are written with as many digits as the largest has."""
    wrong_share: Share
    """Share of the sums whose answer has one digit wrong: undesirable answers of task=kto. Which ones, is fixed."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """Return one unit: the range of the first number."""
        size = 16 * self.below**2  # 16 bytes a row, roughly: only the progress bar shows it
        return [Unit("arithmetic", "", 0, self.below, size, str(self.below))]

    def read(self, unit: Unit) -> Iterator[Item]:
        width = len(str(self.below - 1))
        for a in range(unit.start, unit.stop):
            for b in range(self.below):
                row: dict[str, Any] = {"question": f"{a:0{width}}+{b:0{width}}=", "answer": str(a + b)}
                if self.wrong_share:
                    digest = hashlib.sha256(f"wrong {a}+{b}".encode()).digest()
                    row["label"] = int.from_bytes(digest[:4], "big") >= self.wrong_share * 2**32
                    row["right"], row["wrong"] = str(a + b), _change_digit(str(a + b), *digest[4:6])
                    row["answer"] = row["right" if row["label"] else "wrong"]
                yield Item(f"{a}+{b}", row)


def _change_digit(number: str, position: int, change: int) -> str:
    """Return a number with another digit at a position; both numbers may be of any size. If wrong sums
    were always too large, they would teach to answer less, and not to add."""
    index = position % len(number)
    digits = [digit for digit in "0123456789" if digit != number[index] and (digit != "0" or index or len(number) == 1)]
    return number[:index] + digits[change % len(digits)] + number[index + 1 :]


class LookUp(Rows):
    """Conversations with the environment `look_up`, made up: nothing to download. Columns: messages, key, value.

    Of ten conversations, four look the right key up and say what they read. The others look up another key, or none, or
    say something else.
    """

    source: Literal["look_up"]
    """Where documents come from."""
    num_rows: Count
    """Conversations."""

    def units(self, unit_bytes: int) -> list[Unit]:
        return [Unit("look_up", "", 0, self.num_rows, 200 * self.num_rows, str(self.num_rows))]

    def read(self, unit: Unit) -> Iterator[Item]:
        for number in range(unit.start, unit.stop):
            key, value, other_key, other_value, way = self._draw(number)
            turns = [("user", f"{key}>")]
            if way < 9:
                requested = key if way < 6 else other_key
                turns += [("assistant", f"?{requested}"), ("tool", f"={value if requested == key else '-'}")]
            turns.append(("assistant", f"!{value if way < 4 else other_value}"))
            messages = [{"role": role, "content": content} for role, content in turns]
            yield Item(f"look_up@{number}", {"messages": messages, "key": key, "value": value})

    def _draw(self, number: int) -> tuple[str, str, str, str, int]:
        """Return a key with its value, another key and value, and a number below 10 that chooses the way."""
        digest = hashlib.sha256(f"look_up {number}".encode()).digest()
        first, second = ("abcdefghij"[digest[place] % 10] for place in (0, 2))
        return first, str(digest[1] % 10), second, str(digest[3] % 10), digest[4] % 10


class Custom(Rows):
    """Documents that your own Python function yields: texts, or rows as {column: value}."""

    source: Literal["custom"]
    """Where documents come from."""
    function: DottedPath
    """`package.module:name` of a generator; it must yield the same documents in the same order each time."""
    arguments: dict[str, Any] | None
    """Keyword arguments of the function, {name: value}; null gives none."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """Return one unit: the number of documents is not known before the function runs."""
        # A change of the named module's file, or of the function's, makes a new corpus: they differ where the module
        # imports the function, or wraps it by a decorator. A change of a module that the function imports, or of a file
        # that it reads, is not noticed.
        function = inspect.unwrap(import_object(self.function))
        modules = sys.modules[self.function.partition(":")[0]], inspect.getmodule(function)
        files = dict.fromkeys(filter(None, (getattr(module, "__file__", None) for module in modules)))
        version = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest() if files else ""
        return [Unit(self.function, "", 0, 1, unit_bytes, version)]

    def read(self, unit: Unit) -> Iterator[Item]:
        for number, content in enumerate(self._documents()):
            problem = "" if isinstance(content, str | dict) else f"is {type(content).__name__}, not a text or a row"
            source = partial("{}, document {},".format, self.function, number)
            yield Item(f"{self.function}@{number}", None if problem else content, problem, source)

    def try_out(self) -> None:
        """Raise `UserError` where the function does not yield a document."""
        for first in self._documents():
            if isinstance(first, str | dict):
                return
            with blame_user("data.function", self.function):
                raise TypeError(f"the first document is {first!r:.80}, not a text (str) or a row (dict)")
        with self.naming_keys():
            raise UserError(f"data.function={self.function} yields no document; look at data.arguments and its files")

    def _documents(self) -> Iterator[Any]:
        # `with` is inside of the generator, because most of the function's code runs while its documents are read.
        with blame_user("data.function", self.function):
            yield from import_object(self.function)(**(self.arguments or {}))


class Tokens(Source):
    """Tokens that exist already: a folder of `python -m tunix.prepare`, or flat files of nanoGPT and OLMo."""

    held_out_fraction: Share
    """Share of the tokens of each flat file, at its end, kept for evaluation; the cut moves to where a document
    begins, and a file of one document is not cut."""

    source: Literal["tokens"]
    """Where documents come from."""
    paths: Paths
    """One prepared folder; or flat files (.bin, .npy with a head or without), folders or globs of them. A folder in a
    bucket (s3://, gs://) is copied to this machine."""
    dtype: Literal["uint16", "uint32"]
    """Type of the numbers in files without a head."""
    skip_bytes: CountOrZero
    """Bytes before the first token of files without a head (modded-nanogpt: 1024)."""
    document_end: CountOrZero | None
    """Token that ends each document; null takes each file for one document. Prepared folders know theirs."""

    # There is no method `read`: a file has numbers, which `scan_tokens` (data/shards.py) maps where they are.
    def units(self, unit_bytes: int) -> list[Unit]:
        prepared = [path for path in self.local_paths if (expand_home(path) / "index.json").is_file()]
        if prepared:  # one alone, in the group `data`, has no units (`dataset.find_inputs`)
            with self.naming_keys():
                raise UserError(
                    f"data.paths: {prepared[0]} is a folder of tunix.prepare, which stands alone in data.paths; "
                    "data=mixture reads several, and evaluation.sets take files"
                )
        return find_files(self.local_paths, (".bin", ".npy"))

    @property
    def local_paths(self) -> tuple[str, ...]:
        """The paths, with a copy on this machine for each folder in a bucket: tokens are mapped into memory."""
        return tuple(str(mirror(path, ("*",), "data.paths")) if is_address(path) else path for path in self.paths)


class HuggingFace(Rows):
    """A data set of the `datasets` library (the extra `hf`), from the hub or from files that it can read."""

    has_padded_objects = True

    source: Literal["hf"]
    """Where documents come from."""
    path: str
    """Name on the hub, a folder (also one that `save_to_disk` wrote), or a format (json, csv, parquet, text) with
    data_files."""
    name: str | None
    """Configuration of the data set; null for its default."""
    split: str
    """Split, also part of one: train[:10%]."""
    revision: str | None
    """Commit, tag or branch on the hub; null for the newest."""
    data_files: tuple[str, ...] | None
    """Files of the data set; null for all."""
    streaming: Flag
    """Read while it is tokenized, without a copy on disk."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """List ranges of rows, or the shards of a data set that is streamed."""
        data, digest = self._load()
        version = f"{digest} {self.revision} {data.info.version}"
        if self.streaming:  # the size of a shard is not known: each counts as one unit
            return [Unit(self.path, self.path, part, part + 1, unit_bytes, version) for part in range(data.num_shards)]
        size = data.data.nbytes
        count = max(1, min(len(data), -(-size // unit_bytes)))
        bounds = [part * len(data) // count for part in range(count + 1)]
        return [Unit(self.path, self.path, start, stop, size // count, version) for start, stop in pairwise(bounds)]

    def read(self, unit: Unit) -> Iterator[Item]:
        data = _load_again(self, unit.version)
        if self.streaming:  # a unit is a shard of the data set, whose rows are counted from 0
            rows, first, prefix = data.shard(data.num_shards, unit.start), 0, f"{self.path}@{unit.start}."
        else:
            rows, first, prefix = data.select(range(unit.start, unit.stop)), unit.start, f"{self.path}@"
        try:
            for number, row in enumerate(rows, first):
                yield Item(f"{prefix}{number}", row, "", partial("data set {}, row {},".format, self.path, number))
        except (OverflowError, LookupError) as error:
            raise UserError(f"data.path={self.path} {NO_TIME} ({first_line(error)})") from None
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"data.path={self.path} ends early: {first_line(error)}") from None

    def _load(self) -> tuple[Any, str]:
        """Return the data set, and the library's hash of its files, as far as the library knows their versions."""
        try:
            import datasets
        except ImportError:
            raise UserError("data.source=hf needs the datasets library: pip install 'tunix-trainer[hf]'") from None
        datasets.disable_progress_bars()
        saved = _find_saved_splits(Path(self.path))
        path, files = ("arrow", saved) if saved else (self.path, self.data_files and list(self.data_files))
        try:
            options = {"data_files": files, "revision": self.revision}
            if self.streaming:  # such data have no hash of their own
                builder = datasets.load_dataset_builder(path, self.name, **options)
                data, digest = builder.as_streaming_dataset(self.split), f"{builder.config_id} {builder.hash}"
            else:
                data = datasets.load_dataset(path, self.name, split=self.split, **options)
                digest = data._fingerprint  # private; of the files, and of what was done to them
            return _keep_images(data, datasets), digest
        except Exception as error:  # the library passes on any error of the libraries below it
            reason = ": ".join(first_line(each) for each in (error, error.__cause__) if each)  # that of some is apart
            raise UserError(f"data.path={self.path}: {reason}") from None


@lru_cache(1)
def _load_again(source: HuggingFace, version: str) -> Any:
    """Return a data set, the same one for all of its units: for each the library would ask the hub again."""
    return source._load()[0]


def _find_saved_splits(folder: Path) -> dict[str, list[str]]:
    """Return the files of each split, if `save_to_disk` of the library wrote the folder; else nothing. The folder may
    have files of an earlier call beside them, with more shards or fewer."""
    saved: dict[str, list[str]] = {}
    for state in (*folder.glob("*/state.json"), folder / "state.json"):
        about = read_json(state) if state.is_file() else {}
        if files := about.get("_data_files"):
            split = about.get("_split") or "train" if state.parent == folder else state.parent.name
            try:
                saved[split] = [glob.escape(str(state.with_name(each["filename"]))) for each in files]
            except (LookupError, TypeError, ValueError) as error:
                raise UserError(f"data.path={folder}: {state.name} names no files beside it ({error})") from None
    return saved


def _keep_images(data: Any, datasets: Any) -> Any:
    """Return a data set that gives the files of its images, where the library would decode them."""
    file = datasets.Image(decode=False)
    for name, feature in (data.features or {}).items():
        if isinstance(feature, datasets.Image):
            data = data.cast_column(name, file)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            data = data.cast_column(name, type(feature)(file))
    return data


PROBLEM_BYTES = 400  # of one problem, roughly: it decides only how the work is cut


class ReasoningGym(Rows):
    """Problems that the library reasoning-gym makes (the extra `reasoning`); its reward is `reasoning_gym`."""

    source: Literal["reasoning_gym"]
    """Where documents come from."""
    tasks: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    """Kinds of problems by their names in the library, each with arguments: {chain_sum: {max_terms: 3}}."""
    num_problems: Count
    """Problems of each kind."""
    problem_seed: Seed
    """Seed of the problems: problem n of a kind follows from it and from n."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """List ranges of the problems of each kind."""
        step = max(1, unit_bytes // PROBLEM_BYTES)
        bounds = list(pairwise([*range(0, self.num_problems, step), self.num_problems]))
        self.try_out()
        library = version("reasoning-gym")
        return [
            Unit(task, "", start, stop, (stop - start) * PROBLEM_BYTES, library)
            for task in self.tasks
            for start, stop in bounds
        ]

    def read(self, unit: Unit) -> Iterator[Item]:
        """Yield rows with `question`, `answer`, `task`, and what makes the problem again: `config` and `index`."""
        config = self._config(unit.name)
        problems = make_problems(unit.name, config)
        for index in range(unit.start, unit.stop):
            problem = problems[index]
            row = {"question": problem["question"], "answer": problem["answer"], "task": unit.name}
            yield Item(f"{unit.name}@{index}", row | {"config": config, "index": index})

    def try_out(self) -> None:
        """Raise `UserError` where the library does not know a kind of problems, or an argument of one."""
        for task in self.tasks:
            make_problems(task, self._config(task))

    def _config(self, task: str) -> dict[str, Any]:
        return self.tasks[task] | {"size": self.num_problems, "seed": self.problem_seed}


def make_problems(task: str, config: dict[str, Any]) -> Any:
    """Return the library's data set of one kind of problems: problem n is the same in every process. Raises `UserError`
    where the library is not installed, or does not know the kind or an argument."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError("data.source=reasoning_gym needs the library: pip install 'tunix-trainer[reasoning]'") from None
    if task not in DATASETS:
        raise UserError(f"data.tasks: reasoning-gym has no {task}{did_you_mean(task, list(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(task, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"data.tasks.{task}: {error or 'reasoning-gym refuses the arguments'}") from None


COLORS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 90, 200), "yellow": (240, 200, 20)}
SHAPES = ("circle", "square", "triangle")
CELLS = 2  # in a row of the image, each with room for one shape
IMAGE_BYTES = 500  # of one image, roughly: it decides only how the work is cut


class Shapes(Rows):
    """Images of one to four equal shapes in one color, each with a question. Columns: images, question ("how many?",
    "what color?", "what shape?"), answer ("3", "red", "circle")."""

    source: Literal["shapes"]
    """Where documents come from."""
    num_rows: Count
    """Images."""
    image_size: Annotated[Count, Field(ge=16)]
    """Rows and columns of pixels."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """Return one unit: all images."""
        version = f"{self.num_rows} {self.image_size}"
        return [Unit("shapes", "", 0, self.num_rows, self.num_rows * IMAGE_BYTES, version)]

    def read(self, unit: Unit) -> Iterator[Item]:
        for number in range(unit.start, unit.stop):
            yield Item(f"shapes@{number}", draw_row(number, self.image_size))


def draw_row(number: int, size: int) -> dict[str, Any]:
    """Return the row of a number: the same on every machine."""
    import numpy as np
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(number)
    color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
    background = int(rng.integers(160, 256))
    image = Image.new("RGB", (size, size), (background,) * 3)
    cells = rng.permutation(CELLS * CELLS)[: rng.integers(1, CELLS * CELLS + 1)]
    for cell in cells.tolist():
        side = size // CELLS
        radius = int(rng.integers(side // 4, side * 3 // 8 + 1))
        # The middle of a shape, such that the shape stays within its cell.
        x, y = (int(rng.integers(radius, side - radius)) for _ in range(2))
        _draw_shape(ImageDraw.Draw(image), shape, cell % CELLS * side + x, cell // CELLS * side + y, radius, color)
    file = io.BytesIO()
    image.save(file, "PNG")
    answers = {"how many?": str(len(cells)), "what color?": str(color), "what shape?": str(shape)}
    question = list(answers)[number % len(answers)]
    return {"images": [{"bytes": file.getvalue()}], "question": question, "answer": answers[question]}


def _draw_shape(draw: "ImageDraw", shape: str, x: int, y: int, radius: int, color: str) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, COLORS[color])
    elif shape == "square":
        draw.rectangle(box, COLORS[color])
    else:
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], COLORS[color])


# The choices of the group `data`. To add one, write its class and add it here.

SOURCES = (
    PythonStdlib, TextFiles, Jsonl, Csv, Parquet, PythonDocstrings, HuggingFace, ReasoningGym, Tokens, Synthetic,
    Arithmetic, LookUp, Shapes, Custom,
)  # fmt: skip

# A type checker needs a type that it can read. At run time pydantic chooses the class by the value of the key `source`.
if TYPE_CHECKING:
    AnySource = Source
else:
    AnySource = Annotated[Union[SOURCES], Field(discriminator="source")]  # noqa: UP007
