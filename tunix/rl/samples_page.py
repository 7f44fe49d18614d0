"""The page of a run's answers: what is chosen of samples.jsonl and metrics.jsonl, and how it is put into one HTML file.

Everything in samples.jsonl is text that a model has written, so the page takes it as data and never as HTML: one JSON
value, in which `<`, `>` and `&` are written as escapes, so that no text ends the element that holds it. The script of
the page makes text nodes of it, and a policy in the page (CSP) runs no other script and opens no connection.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from tunix.base.errors import UserError
from tunix.config.saved_runs import read_saved
from tunix.data.tokenizer import decode, read_backend
from tunix.rl.samples_index import SamplesIndex, as_number, parse, read_index

TEMPLATE = Path(__file__).with_name("samples_page.html")
MAX_CHARACTERS = 20_000  # of one text
MAX_TOKENS = 4_096  # of one answer
MAX_ANSWERS = 16  # of one group
MAX_POINTS = 400  # of one curve
MAX_CURVES = 32
MAX_TURNS = 200
# Seconds of a step in metrics.jsonl, in the order in which they pass; what they leave of the step is learning.
PHASES = {"drawing": "rollout_s", "scoring": "reward_s", "waiting for data": "data_wait_s"}


@dataclass(frozen=True)
class Run:
    """A run, as far as its page needs it."""

    name: str
    folder: Path
    task: str
    index: SamplesIndex
    backend: Backend | None  # the tokenizer that it has kept


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raises `UserError` where it is no folder of a run, or has no samples.jsonl with an
    answer."""
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is no folder of a run: it has no config.yaml")
    config = read_saved(folder)
    group_size = config["task"].get("group_size")
    index = read_index(folder / "samples.jsonl", group_size if isinstance(group_size, int) else None)
    tokenizer_dir = folder / "tokenizer"
    name = str(config.get("run_name") or folder.resolve().name)
    return Run(
        name,
        folder,
        str(config["task"].get("name")),
        index,
        read_backend(tokenizer_dir) if tokenizer_dir.is_dir() else None,
    )


def check_comparable(run: Run, other: Run) -> None:
    """Raise `UserError` for two runs that have no prompt in common."""
    if run.task != other.task:
        raise UserError(f"{run.folder} learns task={run.task}, {other.folder} task={other.task}; compare equal tasks")
    if not np.isin(run.index.groups["prompt"], other.index.groups["prompt"]).any():
        raise UserError(f"{run.folder} and {other.folder} have no prompt in common; compare runs on the same data")


# Numbers of metrics.jsonl.


def read_metrics(file: Path) -> dict[int, dict[str, float]]:
    """Return the numbers of each step of training; none without the file.

    Steps behind one from which the run went on later are left out, as in `tunix.compare`.
    """
    found: dict[int, dict[str, float]] = {}  # in the order of their steps
    if not file.is_file():
        return found
    with file.open("rb") as lines:
        for line in lines:
            record = parse(line)
            step = None if record is None or "split" in record else record.get("step")
            if isinstance(step, int) and record is not None:
                while found and next(reversed(found)) >= step:
                    found.popitem()
                numbers = {str(key)[:80]: as_number(value) for key, value in record.items() if key != "step"}
                found[step] = {key: value for key, value in numbers.items() if value is not None}
    return found


def average(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


def make_curves(run: Run) -> dict[str, Any]:
    """Return the numbers of a run by their name, at most MAX_POINTS each: beyond that, means of neighbouring steps."""
    numbers = read_metrics(run.folder / "metrics.jsonl")
    if not any("reward" in row for row in numbers.values()):
        for step, reward in mean_rewards(run.index):
            numbers.setdefault(step, {})["reward"] = reward
    steps = sorted(numbers)
    width = max(1, math.ceil(len(steps) / MAX_POINTS))
    bins = [steps[start : start + width] for start in range(0, len(steps), width)]
    timed = [step for step in steps if "step_time_s" in numbers[step] and "rollout_s" in numbers[step]]
    seconds = {step: split_seconds(numbers, step) for step in timed}
    for step in timed:
        numbers[step]["learning_s"] = seconds[step]["learning"]
    rows = [average([numbers[step] for step in part]) for part in bins]
    passed = [average([seconds[step] for step in part if step in seconds]) for part in bins]
    names = list(dict.fromkeys(name for row in rows for name in row))
    first = [name for name in names if name == "reward" or name.startswith("reward_")]
    names = [*first, *(name for name in names if name not in first)][:MAX_CURVES]
    return {
        "steps": [part[-1] for part in bins],
        "width": width,
        "numbers": {name: [round_number(row.get(name)) for row in rows] for name in names},
        "phases": {
            title: [round_number(row.get(title, 0.0)) for row in passed]
            for title in ((*PHASES, "learning") if timed else ())
        },
    }


def split_seconds(numbers: dict[int, dict[str, float]], step: int) -> dict[str, float]:
    """Return the seconds of a step by what they went to: those of `PHASES`, and learning."""
    row, seconds = numbers[step], {title: numbers[step].get(key, 0.0) for title, key in PHASES.items()}
    if "staleness" in row:
        # Answers are drawn beside the steps. A step's time has the wait for the answers of the next one; that of the
        # first step also the wait for its own.
        wait_s = numbers.get(step + 1, {}).get("data_wait_s", 0.0)
        wait_s += 0.0 if step - 1 in numbers else row.get("data_wait_s", 0.0)
        seconds = dict.fromkeys(PHASES, 0.0) | {"waiting for data": min(wait_s, row["step_time_s"])}
    # What overlaps with learning leaves nothing for it.
    return seconds | {"learning": max(0.0, row["step_time_s"] - sum(seconds.values()))}


def mean_rewards(index: SamplesIndex) -> Iterator[tuple[int, float]]:
    """Yield each step of the file with the mean reward of its answers."""
    steps, firsts = np.unique(index.groups["step"], return_index=True)
    totals, answers = (np.add.reduceat(index.groups[name], firsts) for name in ("total", "answers"))
    yield from zip(steps.tolist(), (totals / answers).tolist(), strict=True)


def round_number(value: Any) -> float | None:
    """Return a number with 4 digits; None for what is none."""
    number = as_number(value)
    return None if number is None else float(f"{number:.4g}")


# Groups: chosen, read and cut.


def spread(index: SamplesIndex) -> np.ndarray:
    """Return for each group the difference of its highest and its lowest reward, [groups]."""
    return index.groups["highest"] - index.groups["lowest"]


def choose_steps(steps: np.ndarray, num_steps: int) -> np.ndarray:
    """Return at most `num_steps` of the steps [n], evenly, with the first and the last."""
    if len(steps) <= num_steps:
        return steps
    if num_steps == 1:
        return steps[-1:]
    return steps[np.unique(np.linspace(0, len(steps) - 1, num_steps).round().astype(int))]


def choose_groups(index: SamplesIndex, step: int, num_groups: int, common: np.ndarray) -> list[int]:
    """Return rows of the index: the groups of a step that the model learns most from come first.

    These are the groups with the widest spread of rewards. Where there is another run, the groups whose prompts it has
    (`common` [groups]) come before the others.
    """
    rows = np.flatnonzero(index.groups["step"] == step)
    order = np.lexsort((index.groups["sample"][rows], -spread(index)[rows], ~common[rows]))
    return [int(row) for row in rows[order][:num_groups]]


def find_same_prompt(index: SamplesIndex, prompt: int, step: int) -> list[int]:
    """Return rows of the groups with a prompt in other steps: the first, the last, and the nearest to `step`."""
    rows = np.flatnonzero((index.groups["prompt"] == prompt) & (index.groups["step"] != step))
    if not len(rows):
        return []
    rows = rows[np.unique(index.groups["step"][rows], return_index=True)[1]]  # one of each step
    nearest = rows[np.argmin(np.abs(index.groups["step"][rows] - step))]
    return sorted({int(rows[0]), int(nearest), int(rows[-1])})


def find_in_other(index: SamplesIndex, prompt: int, step: int) -> list[int]:
    """Return the row of the group with a prompt in another run, in the step that is nearest to `step`."""
    rows = np.flatnonzero(index.groups["prompt"] == prompt)
    return [int(rows[np.argmin(np.abs(index.groups["step"][rows] - step))])] if len(rows) else []


@dataclass
class LeftOutCounts:
    """Counts of what the page leaves out."""

    texts: int = 0
    tokens: int = 0
    answers: int = 0
    turns: int = 0
    groups: int = 0  # chosen ones, for which the page has no room
    full: bool = False

    def truncate(self, value: Any) -> str:
        """Return a value as a text of at most MAX_CHARACTERS: of a longer one, its beginning and its end."""
        try:
            text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
        except RecursionError:  # lists in lists in lists
            text = "…"
        if len(text) <= MAX_CHARACTERS:
            return text
        self.texts += 1
        half = MAX_CHARACTERS // 2
        return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


class TokenTexts:
    """Texts of tokens, as the page shows them; each token of a run is in the page once."""

    def __init__(self, backend: Backend | None):
        self.backend, self.texts = backend, dict[int, str]()
        self.byte_level = backend is not None and isinstance(backend.decoder, decoders.ByteLevel)
        self.added = set[int]() if backend is None else set(backend.get_added_tokens_decoder())  # may be thousands

    def add(self, token: int) -> int:
        """Take a token; return the bytes that it adds to the page."""
        if self.backend is None or token in self.texts:
            return 0
        word = self.backend.id_to_token(token) if 0 <= token < 2**32 else None
        self.texts[token] = self._decode(token, word) if word else f"[{token}]"
        return len(json.dumps(self.texts[token])) + 12

    def _decode(self, token: int, word: str) -> str:
        assert self.backend is not None
        if token in self.added:
            return word
        if self.byte_level:
            text = decode(self.backend, [token], False)
            return text if "\ufffd" not in text else word  # a part of a character
        return word.replace("▁", " ").replace("<0x0A>", "\n")


@dataclass
class Payload:
    """Groups that the page holds, until it is full."""

    runs: list[Run]
    max_bytes: int
    left: LeftOutCounts = field(default_factory=LeftOutCounts)
    groups: list[str] = field(default_factory=list)  # as JSON
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)  # of groups, by run and row
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.texts = [TokenTexts(run.backend) for run in self.runs]

    def add(self, run: int, row: int, listed: bool) -> int | None:
        """Take a group; return its number in the page, None if the page is full or the group cannot be read."""
        if (run, row) in self.numbers:
            return self.numbers[run, row]
        if self.left.full:
            self.left.groups += listed
            return None
        records = self.runs[run].index.read(row)
        if not records:
            return None
        group = self._describe(run, row, records)
        text = json.dumps(group, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        added = sum(self.texts[run].add(token) for answer in group["answers"] for token in answer["tokens"])
        if self.groups and self.num_bytes + len(text.encode(errors="replace")) + added > self.max_bytes:
            self.left.full = True
            self.left.groups += listed
            return None
        self.num_bytes += len(text.encode(errors="replace")) + added
        self.numbers[run, row] = len(self.groups)
        self.groups.append(text)
        return self.numbers[run, row]

    def _describe(self, run: int, row: int, records: list[dict[str, Any]]) -> dict[str, Any]:
        info = self.runs[run].index.groups[row]
        chosen = choose_answers([as_number(record.get("reward")) or 0.0 for record in records])
        self.left.answers += len(records) - len(chosen)
        return {
            "run": run,
            "step": int(info["step"]),
            "sample": int(info["sample"]),
            "prompt": self.left.truncate(records[0].get("prompt")),
            "num": len(records),
            "mean": round_number(info["total"] / info["answers"]),
            "spread": round_number(info["highest"] - info["lowest"]),
            "answers": [self._describe_answer(records[number]) for number in chosen],
        }

    def _describe_answer(self, record: dict[str, Any]) -> dict[str, Any]:
        tokens, logs, learnt = (as_list(record.get(key)) for key in ("tokens", "log_probabilities", "learnt"))
        self.left.tokens += max(0, len(tokens) - MAX_TOKENS)
        turns = [turn for turn in as_list(record.get("turns")) if isinstance(turn, dict)]
        self.left.turns += max(0, len(turns) - MAX_TURNS)
        parts = {key[7:87]: round_number(value) for key, value in record.items() if key.startswith("reward_")}
        return {
            "reward": round_number(record.get("reward")),
            "advantage": round_number(record.get("advantage")),
            "stopped": record.get("stopped") is True,
            "problem": self.left.truncate(record.get("problem")),
            "parts": dict(list(parts.items())[:MAX_CURVES]),
            "text": "" if turns else self.left.truncate(record.get("answer")),
            "turns": [self._describe_turn(turn) for turn in turns[:MAX_TURNS]],
            "num_tokens": len(tokens),
            "tokens": [token if type(token) is int else -1 for token in tokens[:MAX_TOKENS]],
            "logs": [round_log(value) for value in logs[: min(len(tokens), MAX_TOKENS)]],
            "learnt": "".join("01"[bool(value)] for value in learnt[:MAX_TOKENS]),
        }

    def _describe_turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        found = {"role": str(turn.get("role"))[:40], "text": self.left.truncate(turn.get("content"))}
        if turn.get("tool_calls"):
            found["calls"] = self.left.truncate(turn["tool_calls"])
        return found | {key: round_number(turn[key]) for key in ("reward", "seconds") if key in turn}


def choose_answers(rewards: list[float]) -> list[int]:
    """Return at most MAX_ANSWERS numbers of answers: of more, those at even ranks of their rewards."""
    if len(rewards) <= MAX_ANSWERS:
        return list(range(len(rewards)))
    ranks = np.argsort(rewards, kind="stable")
    return sorted(int(number) for number in ranks[np.linspace(0, len(rewards) - 1, MAX_ANSWERS).round().astype(int)])


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def round_log(value: Any) -> float | None:
    """Return a log-probability with 3 decimals; None for what is no number."""
    number = as_number(-1000.0 if value == -math.inf else value)
    return None if number is None else round(number, 3)


@dataclass(frozen=True)
class Choice:
    """Part of the runs that is on the page."""

    steps: tuple[int, ...] | None  # None: `num_steps` of them
    num_steps: int
    num_groups: int
    max_bytes: int


def make_page(runs: list[Run], choice: Choice) -> tuple[str, list[str]]:
    """Return the HTML of a run, or of a run and another one, and what it leaves out."""
    index, payload = runs[0].index, Payload(runs, choice.max_bytes)
    common = np.ones(len(index.groups), bool)
    if len(runs) > 1:
        common = np.isin(index.groups["prompt"], runs[1].index.groups["prompt"])
    steps = select_steps(runs[0], choice, common)
    ranked = {int(step): choose_groups(index, int(step), choice.num_groups, common) for step in steps}
    listed, same = [], {}
    # The first group of every step, then the second of every step: a full page has some groups of each step.
    for rank in range(choice.num_groups):
        for step, rows in ranked.items():
            if rank >= len(rows) or (number := payload.add(0, rows[rank], listed=True)) is None:
                continue
            listed.append(number)
            prompt = int(index.groups["prompt"][rows[rank]])
            others = [(0, row) for row in find_same_prompt(index, prompt, step)]
            if len(runs) > 1:
                others += [(1, row) for row in find_in_other(runs[1].index, prompt, step)]
            found = [payload.add(run, row, listed=False) for run, row in others]
            same[number] = [number for number in found if number is not None]
    left_out = describe_left_out(runs, payload, steps, len(listed))
    head = {
        "runs": [
            {"name": run.name, "folder": str(run.folder), "texts": texts.texts, "curves": make_curves(run)}
            for run, texts in zip(runs, payload.texts, strict=True)
        ],
        "listed": listed,
        "same": same,
        "left_out": left_out,
    }
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return fill_template(f'{text[:-1]},"groups":[{",".join(payload.groups)}]}}'), left_out


def select_steps(run: Run, choice: Choice, common: np.ndarray) -> np.ndarray:
    """Return the steps of the page, chosen from those with a group of `common` [groups]. Raises `UserError` where the
    run has not written a step that is asked for."""
    steps = run.index.steps
    if choice.steps is None:
        return choose_steps(np.unique(run.index.groups["step"][common]), choice.num_steps)
    if missing := sorted(set(choice.steps) - set(steps.tolist())):
        near = int(steps[np.argmin(np.abs(steps - missing[0]))])
        raise UserError(f"steps=[{missing[0]}]: {run.index.file} has no such step; the nearest is {near}")
    return np.unique(np.array(choice.steps))


def describe_left_out(runs: list[Run], payload: Payload, steps: np.ndarray, num_listed: int) -> list[str]:
    """Return sentences about what the page does not show; `steps` [n] are those that it shows."""
    index, left = runs[0].index, payload.left
    all_steps, num_groups = len(index.steps), len(index.groups)
    lines = []
    if len(steps) < all_steps:
        lines.append(f"{all_steps - len(steps):,} of {all_steps:,} steps are left out: steps, num_steps")
    if num_listed < num_groups:
        lines.append(f"{num_groups - num_listed:,} of {num_groups:,} groups are left out: num_groups")
    if left.full:
        lines.append(f"the page is full, so {left.groups:,} chosen groups are left out: max_mb")
    for count, what in (
        (left.answers, f"answers are left out, where a group has more than {MAX_ANSWERS}"),
        (left.tokens, f"tokens are left out, behind the first {MAX_TOKENS:,} of an answer"),
        (left.texts, f"texts are cut to {MAX_CHARACTERS:,} characters"),
        (left.turns, f"turns are left out, behind the first {MAX_TURNS} of an answer"),
    ):
        if count:
            lines.append(f"{count:,} {what}")
    for run in runs:
        if run.index.num_broken:
            lines.append(f"{run.index.num_broken:,} lines of {run.index.file} are broken and left out")
        if run.index.torn:
            lines.append(f"the last line of {run.index.file} has no end and is left out")
        if run.backend is None:
            lines.append(f"{run.folder} has kept no tokenizer, so its tokens are numbers")
    return lines


def escape(text: str) -> str:
    """Return JSON that no parser of HTML takes for anything but text, and that can be written as UTF-8."""
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def fill_template(data: str) -> str:
    """Return the page with its data, and a policy that names its script by digest."""
    page = TEMPLATE.read_text(encoding="utf-8")
    script = page[page.index("<script>") + 8 : page.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.replace("SCRIPT_DIGEST", digest, 1).replace("PAGE_DATA", escape(data), 1)
