"""Prompts that the model answers itself: conversations cut before their last answer, with the columns of their rows.

    row       {"question": "1+1?", "answer": "It is #### 2", "level": 1}        data.columns.prompt=question
    Prompt    tokens    <bos>user:\\n1+1?\\nassistant:\\n          up to where the answer begins
              text      the same as text
              columns   the row: question, answer, level       for the rewards, with the prompt's turns as `messages`

Training takes prompts in the order of `Samples`, so its place in them is one number. A prompt that is longer than the
limit is left out and counted, never cut.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import grain
import numpy as np
from tokenizers import Tokenizer as Backend

from tunix.base.digests import hash_texts
from tunix.base.errors import UserError
from tunix.base.text import pack, unpack
from tunix.config import Config, Task
from tunix.config.task import Grpo
from tunix.data.batches import Position, Samples, choose_evenly
from tunix.data.dataset import Corpus, compute_fingerprint, prepare_corpus
from tunix.data.documents import Question, drop_padding, read_prompt
from tunix.data.files import Rows, Source
from tunix.data.image_slots import ImageSlots, find_slots, list_image_spans
from tunix.data.shards import SPLITS, Prepared, Stream, locate
from tunix.data.tokenizer import Vocab
from tunix.models.vision import Images
from tunix.processes import peers

log = logging.getLogger(__name__)

NUM_LOOKED_AT = 1000  # prompts of a split whose columns are taken for those of the data


class Prompt(NamedTuple):
    """A prompt, and what the data say about it."""

    tokens: list[int]
    text: str  # by the chat template
    columns: dict[str, Any]  # of its row; if none has such a name also `answer` of the data, `messages` of the prompt
    question: Question | None = None  # its turns, and what the template got; None of a copied folder
    images: Images | None = None  # of a model that sees: images [n, y, x, 3], index [tokens]; None without any

    def encode_with(self, vocab: Vocab, texts: Sequence[str]) -> list[int]:
        """Return the tokens of the prompt whose last message goes on with some texts. Raises `UserError` where the
        prompt comes from a copied folder, which keeps its tokens alone."""
        question = self.find_question()
        *before, last = question.messages
        messages = [*before, {**last, "content": last["content"] + "".join(texts)}]
        vocab.backend.encode_special_tokens = False
        return vocab.backend.encode(vocab.chat.render(messages, True, question.options), add_special_tokens=False).ids

    def find_question(self) -> Question:
        """Return the turns of the prompt, behind which `reset` of an environment may say something. Raises `UserError`
        where the prompt comes from a copied folder, which keeps its tokens alone."""
        if self.question is None:
            raise UserError(
                "what reset says belongs to the prompt, of which data=tokens keeps the tokens alone; give rows"
            )
        return self.question


class PromptPart(grain.sources.RandomAccessDataSource):
    """The prompts of a stream that have at most `max_length` tokens; any of them at the same cost."""

    documents_per_sequence = 1.0

    def __init__(self, stream: Stream, max_length: int, source: Source, task: Task, slots: ImageSlots | None):
        """`source` and `task` are those of the prompts, of which `stream` holds the texts and the rows; `slots` are
        those of a sequence for images."""
        self.stream, self.source, self.task, self.slots = stream, source, task, slots
        self.selected: list[np.ndarray] = []  # of each shard, the numbers of its documents
        self.num_tokens = 0
        for number, (tokens, _) in enumerate(stream.sizes):
            lengths = np.diff(stream.shard(number).starts, append=tokens)
            fits = lengths <= max_length
            if slots is not None:
                pieces = np.stack([stream.shard(number).starts, lengths], axis=1)
                fits &= slots.fits(pieces, list_image_spans(stream, number))
            self.selected.append(np.flatnonzero(fits))
            self.num_tokens += int(lengths[self.selected[-1]].sum())
        self.ends = np.cumsum([len(selected) for selected in self.selected])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def num_too_long(self) -> int:
        return self.stream.num_documents - len(self)

    def __getitem__(self, index: Any) -> Prompt:
        number, shard_index = locate(index, self.ends)
        document = int(self.selected[number][shard_index])
        shard = self.stream.shard(number)
        assert shard.rows is not None
        assert shard.row_ends is not None
        starts = [*shard.starts[document : document + 2], len(shard.tokens)]
        tokens = shard.tokens[int(starts[0]) : int(starts[1])]
        begin = int(shard.row_ends[document - 1]) if document else 0
        row = json.loads(shard.rows[begin : int(shard.row_ends[document])].tobytes())
        question = None  # a copied folder does not say what its columns are
        if isinstance(self.source, Rows):
            question = read_prompt(self.source.columns, drop_padding(self.source, row["columns"]), self.task)
        if question is not None and "messages" in row:  # with the places of images
            question = question._replace(messages=row["messages"])
        columns = row["columns"] if question is None else {"messages": question.messages, **row["columns"]}
        images = None if self.slots is None else self.slots.read(shard, int(starts[0]), len(tokens))
        return Prompt(tokens.tolist(), row["text"], columns, question, images)


@dataclass(frozen=True)
class PromptCorpus:
    """Prompts to train on and to evaluate on, and the tokenizer that made them."""

    prepared: dict[str, Prepared]  # keyed by the name of the source
    train: dict[str, PromptPart]  # keyed by the name of the source
    held_out: dict[str, PromptPart]
    vocab: Vocab
    fingerprint: str  # identifies the training prompts: rows, template, tokenizer, split, longest prompt
    summary: str  # a line for each source

    @property
    def tokenizer(self) -> Backend:
        return self.vocab.backend

    @property
    def held_out_fingerprints(self) -> dict[str, str]:
        """What identifies the prompts that are evaluated on, of each source."""
        return {name: part.stream.fingerprint for name, part in self.held_out.items()}

    @property
    def parts(self) -> list[PromptPart]:
        """Prompts of all sources."""
        return [*self.train.values(), *self.held_out.values()]

    @property
    def has_images(self) -> bool:
        """True where any of the prompts, also of those that are left out, has an image."""
        return any(folder.has_images for folder in self.prepared.values())

    @property
    def num_samples(self) -> int:
        """Prompts to train on."""
        return sum(map(len, self.train.values()))

    @property
    def num_held_out(self) -> int:
        return sum(map(len, self.held_out.values()))

    @cached_property
    def column_names(self) -> list[str]:
        """Names of the columns that rows have, as far as prompts spread over all of them tell."""
        return [*gather_columns([each for split in SPLITS for each in self.spread(split, NUM_LOOKED_AT)])]

    def spread(self, split: str, count: int) -> list[Prompt]:
        """Return at most `count` prompts of a split, "train" or "held_out", spread evenly over all of its prompts."""
        parts = [part for part in {"train": self.train, "held_out": self.held_out}[split].values() if len(part)]
        if not parts:
            return []
        prompts = grain.MapDataset.concatenate([grain.MapDataset.source(part) for part in parts])
        return [prompts[number] for number in choose_evenly(sum(map(len, parts)), count)]


AnyCorpus = Corpus | PromptCorpus
C = TypeVar("C", bound=AnyCorpus)


def load_together(load: Callable[[], C]) -> C:
    """Load a corpus on every process, process 0 first; every process calls this. Raises as `load`, and `UserError`
    where processes have read different documents: each host has its own, or files have changed since process 0 listed
    them."""
    corpus = peers.main_first(load, "preparing the data")
    key = hash_texts(corpus.vocab.digest, *(part.stream.fingerprint for part in corpus.parts))
    peers.reject_others(key, "data", "documents, or different versions of files")
    return corpus


def load_prompts(cfg: Config, max_length: int | None = None) -> PromptCorpus:
    """Read the prompts of `cfg.data` that have at most `max_length` tokens; `cfg.task` must be one that asks for them.

    None is what the config leaves beside an answer.

    Raises:
        UserError: the data cannot be read, are no conversations, or all prompts are longer.
    """
    max_length = cfg.max_prompt_length if max_length is None else max_length
    prepared, vocab = prepare_corpus(cfg)
    for name, folder in prepared.items():
        if folder.has_images and isinstance(cfg.task, Grpo) and cfg.task.environment is not None:
            raise UserError(
                f"task.environment={cfg.task.environment} does not take images, and data: {name} has some; leave out "
                "the environment, or the column with data.columns.images=null"
            )
    train, held_out = (
        {
            name: PromptPart(folder.stream(split), max_length, cfg.sources[name], cfg.task, find_slots(cfg))
            for name, folder in prepared.items()
        }
        for split in SPLITS
    )
    for name, part in train.items():
        too_long = part.num_too_long + held_out[name].num_too_long
        if too_long:
            slots = f", or {part.slots.per_row} images (training.images_per_row)" if part.slots else ""
            log.warning("%s: left out: %d prompts of more than %d tokens%s", name, too_long, max_length, slots)
        if not len(part):
            raise UserError(
                f"data: all {part.num_too_long} prompts of {name} have more than the {max_length} tokens that are left "
                "beside an answer; lower sampling.max_new_tokens or raise training.seq_len (of tunix.evaluate: lower "
                "max_new_tokens)"
            )
    summary = "\n".join(
        f"{name}: {len(part):,} prompts to train on, {part.num_tokens / len(part):,.1f} tokens on average; "
        f"{len(held_out[name]):,} held out"
        for name, part in train.items()
    )
    fingerprint = compute_fingerprint(cfg.data, prepared, f"prompts of {max_length} tokens")
    return PromptCorpus(prepared, train, held_out, vocab, fingerprint, summary)


def gather_columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Return the columns of some prompts as rewards take them: {name: a value for each prompt}; None where a row has
    no such column."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return {name: [prompt.columns.get(name) for prompt in prompts] for name in names}


# Which prompts a rollout asks, where that depends on earlier answers: task.refill and task.curriculum.
#
# Prompts are asked in the order of all samples, whose next number is the place in the data. A rollout may take more of
# them than its steps learn from:
#
#     sample       20  21  22  23  24  25  26  27
#     curriculum        -               -               left out: its newest answers were all right
#     asked        x       x   x   x       .   .
#     signal       1       0   1   0       1   0        22 and 24 are replaced by 26 and 27: task.refill
#                  next_sample 28, of which 4 do not count as samples of the steps (`Position.num_extra`)

RIGHT = 1.0  # an answer is right where the first reward gives it at least this
MAX_LEFT_OUT = 100  # prompts that are left out for each one that is asked; then prompts are asked as they come


class PromptOrder:
    """Prompts in the order of all samples, without those that the curriculum leaves out. The same on every process."""

    def __init__(self, samples: Samples, task: Grpo, start: Position):
        self.samples, self.curriculum = samples, task.curriculum
        self.num_extra = 0  # samples after `start` beyond those that the steps count
        self.num_left_out = 0  # by the curriculum, in all
        # For each prompt that is left out, how often it will still be; by what its row says, whatever its number is.
        self.turns_left: dict[str, int] = unpack(start.curriculum)
        self.before: dict[int, tuple[int, dict[str, int]]] = {}  # what was before the newest rollout, by its first step
        self.ranges: dict[int, range] = {}  # the samples that the two newest took, by their first steps

    def begin(self, first_step: int) -> None:
        """Remember what a checkpoint before a rollout has to keep: the next one may be drawn before it is saved."""
        self.before = {first_step: (self.num_extra, dict(self.turns_left))}

    def end(self, first_step: int, planned: range, number: int) -> None:
        """Note that a rollout took all samples up to `number`, in the place of those that its steps count."""
        self.ranges = dict([*self.ranges.items()][-1:])
        self.ranges[first_step] = range(planned.start + self.num_extra, number)
        self.num_extra = number - planned.stop

    def take(self, number: int, count: int) -> tuple[dict[int, Prompt], int]:
        """Return the next `count` prompts from a sample on, by their numbers, and the number behind them."""
        taken: dict[int, Prompt] = {}
        max_left_out = MAX_LEFT_OUT * count
        while len(taken) < count:
            prompt = self.samples[number]
            if self.turns_left and max_left_out and (turns := self.turns_left.pop(_digest(prompt), 0)):
                if turns > 1:
                    self.turns_left[_digest(prompt)] = turns - 1
                max_left_out -= 1
                self.num_left_out += 1
            else:
                taken[number] = prompt
            number += 1
        return taken, number

    def note(self, prompts: list[Prompt], first_scores: np.ndarray) -> None:
        """Leave prompts out from now on by the scores [P, G] that the first reward gives their answers."""
        easy, hard = self.curriculum.solved, self.curriculum.unsolved
        for prompt, share in zip(prompts, (first_scores >= RIGHT).mean(axis=1), strict=True):
            if (easy is not None and share >= easy) or (hard is not None and share <= hard):
                self.turns_left[_digest(prompt)] = self.curriculum.turns

    def complete(self, position: Position, first_step: int) -> Position:
        """Return a position before the rollout that begins with a step, with what this order adds to it."""
        num_extra, turns_left = self.before.get(first_step, (self.num_extra, self.turns_left))
        return replace(
            position,
            next_sample=position.next_sample + num_extra,
            num_extra=position.num_extra + num_extra,
            curriculum=pack(turns_left),  # there may be one for each prompt
        )


def _digest(prompt: Prompt) -> str:
    """Return a hash of all that a row says: prompts of one text may differ in images or columns."""
    row = json.dumps([prompt.text, prompt.columns], sort_keys=True).encode("utf-8", "replace")
    images = b"" if prompt.images is None else np.ascontiguousarray(prompt.images.pixels).data
    return hashlib.sha256(row + images).hexdigest()[:16]
