"""The corpus of a run: sequences packed from the tokens of each source, to train on and to evaluate on.

A source is tokenized once (`prepare`). Its shards are made side by side (`shards.make_shards`), then an index over them
is written. Each shard appears complete or not at all, so work that was interrupted goes on with the missing shards. A
tokenized source has a folder in `loading.cache_dir`, named by the hash of its files, of the tokenizer and of the keys
that change the result. Training and `python -m tunix.prepare` both come here and find each other's work.
"""

import filecmp
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import grain
import jax
import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from tokenizers import Tokenizer as Backend

from tunix.base.buckets import is_address
from tunix.base.digests import FILE, hash_texts, list_files, record_verified, verify_folder, write_digests
from tunix.base.errors import UserError
from tunix.base.files import describing_refusal, expand_home, is_plain, make_once, replacing
from tunix.base.forms import locate_cached, sign
from tunix.config import Config, Loading, Task, Tokenizer
from tunix.config.data import Mixture
from tunix.config.task import Classify, Embed, Kto, Paired, Prompted, Uncut
from tunix.config.vision import AnyVision
from tunix.data.chat import THOUGHTS
from tunix.data.documents import DOCUMENTS, Document, read_documents
from tunix.data.files import Files, Source, TextFiles, Unit
from tunix.data.image_processors import ImageProcessor
from tunix.data.image_slots import find_slots
from tunix.data.packing import Sequences
from tunix.data.pieces import TRAINED_HERE, split_text
from tunix.data.shards import (
    FORMAT,
    HASH_BITS,
    SPLITS,
    Prepared,
    ShardPlan,
    can_split,
    hash_document,
    make_shards,
    open_prepared,
)
from tunix.data.sources import Tokens
from tunix.data.tokenizer import (
    Vocab,
    add_images,
    bytes_by_token,
    check_fits,
    find_unknown,
    read_vocab,
    special_tokens,
    train_vocab,
)
from tunix.processes import peers
from tunix.processes.peers import find_blind

log = logging.getLogger(__name__)


# One source: its tokenizer, its folder, its shards and their index.

FINGERPRINT = "2"  # first word of what is hashed; checkpoints hold the result, so it stays where the files change
LOCATION_KEYS = {"paths"}  # keys of a source that say where it is: they may change while its documents stay the same
# Columns that texts alone do not have, with their usual names (`_list_turn_choices`).
TURN_COLUMNS = {"tools": "tools", "learnt_turns": None, "label": "label", "images": "images"}
IMAGE_KEYS = {"max_image_pixels", "image_addresses"}  # of rows; texts alone do not depend on them


def find_units(source: Source, loading: Loading) -> list[Unit]:
    """Return the units of a source in a fixed random order, that of the hashes of their names."""
    return sorted(source.units(loading.shard_bytes), key=lambda unit: (hash_document(unit.name), unit.start))


def find_vocab(
    tokenizer: Tokenizer,
    task: Task,
    sources: list[tuple[Source, list[Unit]]],
    cache_dir: Path,
    processor: ImageProcessor | None,
) -> Vocab:
    """Read the tokenizer of the config, or train it on the training documents of all sources.

    `processor` is that of a model that sees.

    Raises:
        UserError: there is no tokenizer, or none can be trained, or a trained one would overwrite another file.
    """
    if tokenizer.path is not None and not tokenizer.train:
        return add_images(read_vocab(tokenizer, task.chat_template), processor)
    if tokenizer.train is False:
        raise UserError("tokenizer.train=false, and tokenizer.path names none; set the path, or tokenizer.train=null")
    if any(isinstance(source, Tokens) for source, _ in sources):
        raise UserError("data.source=tokens needs the tokenizer that made the tokens: set tokenizer.path")
    settings, more = tokenizer.model_dump_json(exclude={"path", "train"}), () if processor is None else processor.tokens
    choices = [text for source, _ in sources for text in _list_turn_choices(source, task)]
    choices += [task.system] if isinstance(task, Prompted) and task.system else []
    digests = (_hash_source(*source) for source in sources)
    key = hash_texts(settings, DOCUMENTS[task.documents].in_hashes, *digests, *more, *choices)
    root = locate_cached(cache_dir, "tokenizers", key)
    trained = root / "tokenizer.json"
    path = None if tokenizer.path is None else expand_home(tokenizer.path)
    if path and path.exists() and not (trained.exists() and filecmp.cmp(path, trained, False)):
        raise UserError(
            f"tokenizer.train=true would write tokenizer.path={path}, which exists and is another tokenizer; remove "
            "that file, or unset tokenizer.train"
        )

    def make(folder: Path) -> None:
        log.info("training a tokenizer of %d tokens", tokenizer.vocab_size)
        train_vocab(tokenizer, _sample_texts(sources, task, tokenizer.train_bytes, processor), more).save(folder)

    folder = make_once(root, make)
    if path and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:  # a second process may write it at the same time
            shutil.copy(folder / "tokenizer.json", new)
    return add_images(read_vocab(tokenizer.model_copy(update={"path": str(folder)}), task.chat_template), processor)


def prepare(source: Source, units: list[Unit], task: Task, vocab: Vocab, loading: Loading) -> Prepared:
    """Return the tokenized corpus of a source: open it, or first make the shards that are missing.

    Raises:
        UserError: documents cannot be read, or there are none, or the cache cannot be written.
    """
    _report_names(source, units)
    _report_end(task, vocab)
    if isinstance(source, Tokens) and task.documents == "conversation":
        log.warning(
            "%s: files of tokens do not say what an answer is: all is learnt, as with task=pretrain", source.source
        )
    folder = find_folder(source, units, task, vocab, loading)
    if not (folder / FILE).exists():
        start_time = time.perf_counter()
        plans = _plan_shards(source, units, task, vocab, loading, folder)
        info = make_shards(plans, folder, loading)
        has_held_out = isinstance(source, Tokens) or any(fact["held_out"]["documents"] for fact in info)
        if plans and plans[0].held_out_below and not has_held_out:
            # A small corpus may have no document below the limit: hold out the one with the smallest hash, which shards
            # record. Its shard is made anew under another name, because a second process may be reading the first one.
            smallest = min(range(len(info)), key=lambda number: info[number]["smallest_hash"])
            name, below = f"{plans[smallest].name}-held-out", info[smallest]["smallest_hash"] + 1
            plans[smallest] = replace(plans[smallest], name=name, held_out_below=below)
            (info[smallest],) = make_shards([plans[smallest]], folder, loading)
        index = _make_index(source, task, info, folder, vocab)
        # A folder with an index has all of its shards, and one with digests, which are written last, is whole. A second
        # process that is here at the same time has made the same bytes.
        make_once(folder / "index.json", lambda path: path.write_text(json.dumps(index)))
        files = [
            folder / "index.json",
            *list_files(folder / "tokenizer"),
            *(folder / plan.name / FILE for plan in plans),
        ]
        with describing_refusal(f"loading.cache_dir: {folder}", otherwise="set it to a writable folder"):
            write_digests(folder, [path for path in files if path.is_file()], **sign("corpus"))
        record_verified(folder, folder / FILE)
        log.info("tokenized %s in %.1f s: %s", source.source, time.perf_counter() - start_time, folder)
    return open_verified(folder, loading)


def _report_names(source: Source, units: list[Unit]) -> None:
    """Warn where files that are a document each have one name, which holds all of them out or none: `*/README.md`."""
    if not (units and isinstance(source, TextFiles) and source.held_out_fraction):
        return
    ((name, count),) = Counter(unit.name for unit in units).most_common(1)
    if count > 1:
        log.warning(
            "%s: %s files are called %s, and are held out together or not at all; name the folder above them in "
            "data.paths, and with data.extensions=[%s] no other files of it",
            source.source, f"{count:,}", name, name,
        )  # fmt: skip


def _report_end(task: Task, vocab: Vocab) -> None:
    """Warn where the chat template writes nothing behind an answer, as that of GLM 4.5 does, or mere text."""
    if task.documents != "conversation" or vocab.chat_template is None:
        return
    with suppress(UserError):  # a template may refuse the conversation of two words that shows the end
        end = vocab.chat.read_end(task.chat_template_kwargs or {}).strip()
        if not end:
            log.warning(
                "task.chat_template writes nothing behind an answer, so the model learns no end of one, and stops only "
                "where it has learnt that before; take a template that writes the token that ends a turn"
            )
        elif special_tokens(vocab.backend).isdisjoint(vocab.backend.encode(end, add_special_tokens=False).ids):
            log.warning(
                "task.chat_template writes %r behind an answer, which has no special token of the tokenizer: the model "
                "learns to write it as text, and goes on behind it; write {{ eos_token }} there, or take a tokenizer "
                "with a token for it",
                end,
            )


def make_share(source: Source, units: list[Unit], task: Task, vocab: Vocab, loading: Loading, share: slice) -> None:
    """Make the missing ones of some shards of a source; afterwards `prepare` makes the others, and the index. Raises
    `UserError` where documents cannot be read, or the cache cannot be written."""
    folder = find_folder(source, units, task, vocab, loading)
    if not (folder / "index.json").exists():
        make_shards(_plan_shards(source, units, task, vocab, loading, folder)[share], folder, loading)


def find_folder(source: Source, units: list[Unit], task: Task, vocab: Vocab, loading: Loading) -> Path:
    """Return the folder of a tokenized corpus: its name is a hash of everything that decides what is in it.

    Raises:
        UserError: files of tokens, which have no pairs, labels or prompts, and a task that needs them.
    """
    if isinstance(source, Tokens) and task.documents not in ("text", "conversation"):
        with source.naming_keys():
            raise UserError(
                f"data: task={task.name} needs rows with columns, and files of tokens have none; give rows, like "
                "data=jsonl, or a folder that tunix.prepare has made of rows with this task"
            )
    # What is not in the hash does not change the tokens: where the files are, how many processes read them.
    template = "" if task.documents == "text" else str(vocab.chat_template)
    system = [str(task.system)] if isinstance(task, Prompted) else []
    kind, shard_size = DOCUMENTS[task.documents].in_hashes, str(loading.shard_bytes)
    key = hash_texts(
        _hash_source(source, units),
        kind,
        template,
        vocab.digest,
        shard_size,
        *system,
        *_list_turn_choices(source, task),
        *(["continued"] if task.documents not in ("text", "prompt") and vocab.prefix else []),
        *(["thoughts"] if any(name in template for name in THOUGHTS) else []),  # each name is read as the others
        *([source.model_dump_json(include=IMAGE_KEYS)] if vocab.images else []),
    )
    return locate_cached(loading.cache_dir, "tokens", key)


def _list_turn_choices(source: Source, task: Task) -> list[str]:
    """Return what decides the text of conversations beside the template. Usual values are left out: folders that were
    made before there was such a choice keep their names."""
    if task.documents == "text":
        return []
    columns, choices = getattr(source, "columns", None), task.list_turn_choices()
    for key, usual in TURN_COLUMNS.items() if columns is not None else ():
        if (value := getattr(columns, key)) != usual:
            choices[f"columns.{key}" if key in choices else key] = value  # an environment has tools, too
    return [json.dumps(choices, sort_keys=True)] if choices else []


def _list_task_choices(task: Task) -> dict[str, Any]:
    """Return the keys of a task that decide the tokens and labels of documents, as JSON has them."""
    if task.documents == "text":
        return {}
    system = {"system": task.system} if isinstance(task, Prompted) and task.system else {}
    return json.loads(json.dumps(task.list_turn_choices() | system))


def _plan_shards(
    source: Source, units: list[Unit], task: Task, vocab: Vocab, loading: Loading, folder: Path
) -> list[ShardPlan]:
    """Return the plans of all shards of a source, and write the tokenizer that they name."""
    tokenizer = make_once(folder / "tokenizer", vocab.save)
    limit = int(source.held_out_fraction * 2**HASH_BITS)
    shard_bytes = 0 if isinstance(source, Tokens) else loading.shard_bytes  # 0: each file of tokens is a shard
    groups: list[list[Unit]] = []  # in order, of about `shard_bytes` each
    collected = shard_bytes
    for unit in units:
        if collected >= shard_bytes:
            groups.append([])
            collected = 0
        groups[-1].append(unit)
        collected += unit.size
    return [
        ShardPlan(f"{number:05}", tuple(group), source, task, tokenizer, limit, vocab.images)
        for number, group in enumerate(groups)
    ]


def open_verified(folder: Path, loading: Loading) -> Prepared:
    """Open a tokenized corpus, after a comparison with its digests if `loading.verify` asks for one. Raises `UserError`
    where a file is damaged, or the index is of another version."""
    verify_folder(folder, loading.verify, "data", f"remove the folder {folder}, and prepare it again")
    return open_prepared(folder)


def _make_index(source: Source, task: Task, info: list[dict], folder: Path, vocab: Vocab) -> dict:
    """Sum up the facts of all shards, and return what index.json says of the corpus. Raises `UserError` where there is
    nothing to train on, or nothing held out though that was asked for."""
    left_out = sum((Counter(fact["left_out"]) for fact in info), Counter())
    num_train, num_held_out = (sum(fact[split]["documents"] for fact in info) for split in ("train", "held_out"))
    if num_train == 0:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        if num_held_out == 0:
            sought = "conversation with an answer" if task.name == "sft" else "document with text"
            raise UserError(f"data.source={source.source}: no {sought} in it ({reasons or 'nothing in its files'})")
        raise UserError(
            f"all {num_held_out} documents are held out; add documents of other names, or lower "
            f"data.held_out_fraction={source.held_out_fraction} (0 holds out none)"
        )
    if isinstance(source, Tokens) and source.held_out_fraction > 0 and num_held_out == 0:
        raise UserError(
            f"data.held_out_fraction={source.held_out_fraction}: the data are too small to hold any document out; "
            "raise the fraction, add data, or set it to 0"
        )
    counts = sum(np.load(folder / fact["name"] / "counts.npy") for fact in info)  # [V]: how often each token occurs
    end = source.document_end if isinstance(source, Tokens) else None
    if end is not None and (end >= len(counts) or counts[end] == 0):
        raise UserError(
            f"data.document_end={end} does not occur in data.paths; the tokenizer ends a document with "
            f"{vocab.eos}, and data.document_end=null takes each file as one document"
        )
    sizes = [fact["train"]["bytes"] for fact in info]
    size = int(counts @ bytes_by_token(vocab.backend)) if None in sizes else sum(sizes)
    if size == 0:
        raise UserError(
            f"data: all {counts.sum():,} tokens are like padding and stand for no text; give other files, or the "
            "tokenizer that made them"
        )
    unknown = None if isinstance(source, Tokens) else find_unknown(vocab.backend)
    # The loss of a model that knows only how frequent each token is; a trained model must be better than that.
    probs = counts[counts > 0] / counts.sum()
    entropy_bits = float(-(probs * np.log2(probs)).sum())
    return {
        "format": FORMAT,
        "fingerprint": hash_texts(FINGERPRINT, vocab.digest, *(fact["train"]["digest"] for fact in info)),
        "source": source.source,
        "vocab_size": vocab.num_tokens,
        "tokens": int(counts.sum()),
        "documents": num_train,
        "bytes": size,
        "bytes_per_token": size / counts.sum(),
        "unigram_bits_per_byte": entropy_bits * float(counts.sum()) / max(1, size),
        "left_out": left_out,
        "left_out_names": [name for fact in info for name in fact["left_out_names"]][:5],
        "kind": "text" if isinstance(source, Tokens) else task.documents,
        **({} if unknown is None else {"unknown": [unknown, int(counts[vocab.backend.token_to_id(unknown)])]}),
        **({} if isinstance(source, Tokens) else {"choices": _list_task_choices(task)}),
        **({"images": vocab.images.describe()} if vocab.images and not isinstance(source, Tokens) else {}),
        "shards": [{"name": fact["name"], "train": fact["train"], "held_out": fact["held_out"]} for fact in info],
    }


def _sample_texts(
    sources: list[tuple[Source, list[Unit]]], task: Task, limit: int, processor: ImageProcessor | None
) -> Iterator[str]:
    """Yield about `limit` bytes of training documents, for a tokenizer to learn from. Sources give equal shares. At
    most an eighth comes from one unit, so that no single large file decides."""
    for source, units in sources:
        left = limit // len(sources)
        for unit in units:
            if left <= 0:  # the other files are not even opened
                break
            left_of_unit = max(1, left if len(units) < 8 else limit // 8)
            for document in read_documents(source, task, unit, processor, with_images=False):
                if left <= 0 or left_of_unit <= 0:
                    break
                held_out = hash_document(document.name) < int(source.held_out_fraction * 2**HASH_BITS)
                if isinstance(document, Document) and not held_out and can_split(source, document, TRAINED_HERE):
                    yield from split_text(document.text, TRAINED_HERE)
                    size = len(document.text.encode())
                    left, left_of_unit = left - size, left_of_unit - size


def _hash_source(source: Source, units: list[Unit]) -> str:
    """Hash everything that decides a source's documents, without reading them: its keys, and its files' versions."""
    places = dict.fromkeys(LOCATION_KEYS, True)
    if isinstance(source, Tokens):  # training reads them in their own place, which a relative path alone does not name
        paths = tuple(path if is_address(path) else str(expand_home(path).absolute()) for path in source.paths)
        source, places = source.model_copy(update={"paths": paths}), {}
    excluded: dict[str, Any] = {**places, **dict.fromkeys(IMAGE_KEYS, True), "columns": {*TURN_COLUMNS}}
    return hash_texts(source.model_dump_json(exclude=excluded), *(unit.digest for unit in units))


# All sources of a config.


class Inputs(NamedTuple):
    """Sources of a corpus by name, and the tokenizer that they share.

    A source is tokenized here (`prepare`), or it is a folder that `tunix.prepare` made, maybe elsewhere.
    """

    copied: dict[str, Path]  # folders that `tunix.prepare` made
    units: dict[str, list[Unit]]  # of the other sources
    vocab: Vocab


def find_set(source: Source, cfg: Config) -> tuple[Source, list[Unit]]:
    """Return a source of evaluation.sets with nothing held out, since all documents are for evaluation; its units."""
    everything = source.model_copy(update={"held_out_fraction": 0.0})
    return everything, find_units(everything, cfg.loading)


def find_inputs(cfg: Config) -> Inputs:
    """List what there is to tokenize; read the tokenizer, or train it.

    A copied folder has a tokenizer of its own, which is then the tokenizer of all sources.
    """
    copied = {}
    for name, source in cfg.sources.items():
        if isinstance(source, Tokens) and len(source.paths) == 1:
            folder = expand_home(source.local_paths[0])
            if (folder / "index.json").is_file():
                copied[name] = folder
    units = {name: find_units(source, cfg.loading) for name, source in cfg.sources.items() if name not in copied}
    cache_dir = expand_home(cfg.loading.cache_dir)
    tokenizer = cfg.tokenizer
    if copied and tokenizer.path is None:
        first = next(iter(copied.values()))
        tokenizer = tokenizer.model_copy(update={"path": str(first / "tokenizer"), "train": False})
    pairs: list[tuple[Source, list[Unit]]] = [(cfg.sources[name], units[name]) for name in units]
    slots = find_slots(cfg)
    vocab = find_vocab(tokenizer, cfg.task, pairs, cache_dir, slots.processor if slots else None)
    check_fits(vocab, cfg.model.vocab_size)
    _check_image_tokens(vocab, cfg.model.vision)
    return Inputs(copied, units, vocab)


def _check_image_tokens(vocab: Vocab, vision: AnyVision | None) -> None:
    """Raise `UserError` where the tokens of images have other ids in the tokenizer than in the model."""
    if vision is None or vocab.images is None:
        return
    processor = vocab.images
    for key, token in zip(vision.ids, (processor.soft, processor.begin, processor.end), strict=False):
        if (index := vocab.backend.token_to_id(token)) != getattr(vision, key):
            raise UserError(
                f"model.vision.{key}={getattr(vision, key)}, and in the tokenizer {token} is {index}; set "
                f"model.vision.{key}={index}, or choose the tokenizer of the model"
            )


def prepare_corpus(cfg: Config) -> tuple[dict[str, Prepared], Vocab]:
    """Tokenize each source; return the results keyed by the sources' names, and the tokenizer that they share."""
    copied, units, vocab = find_inputs(cfg)
    _warn_learnt_sets(cfg, units)
    prepared = {}
    for name, source in cfg.sources.items():
        if name in copied:
            prepared[name] = _open_copied(copied[name], vocab, cfg)
        else:
            prepared[name] = prepare(source, units[name], cfg.task, vocab, cfg.loading)
        warn_left_out(name, prepared[name])
    return prepared, vocab


def _warn_learnt_sets(cfg: Config, units: dict[str, list[Unit]]) -> None:
    """Warn where a set of evaluation.sets reads files that the run trains on."""

    def find_paths(source: Source, units: list[Unit]) -> set[Path]:
        return {Path(unit.path).resolve() for unit in units} if isinstance(source, Files) else set()

    learnt = set().union(*(find_paths(cfg.sources[name], each) for name, each in units.items()))
    for name, source in cfg.evaluation.sets.items():
        files = find_paths(*find_set(source, cfg))
        if shared := sorted(files & learnt):
            log.warning(
                "evaluation.sets.%s: the run trains on %d of its %d files too (%s); give the set files of its own",
                name, len(shared), len(files), shared[0],
            )  # fmt: skip


def _name_keys(images: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in images.items())


def _open_copied(folder: Path, vocab: Vocab, cfg: Config) -> Prepared:
    """Open a folder that `tunix.prepare` made. Raises `UserError` where its tokenizer or its task is not that of the
    run, or other keys have decided its tokens."""
    own = read_vocab(cfg.tokenizer.model_copy(update={"path": str(folder / "tokenizer")}))
    if own.backend.to_str() != vocab.backend.to_str():
        raise UserError(
            f"data.paths: {folder} was made with another tokenizer ({own.num_tokens} tokens) than tokenizer.path="
            f"{cfg.tokenizer.path} ({vocab.num_tokens} tokens); leave tokenizer.path=null to take its own"
        )
    prepared = open_verified(folder, cfg.loading)
    _check_index(prepared)
    images = prepared.index.get("images")
    own_images = None if vocab.images is None else vocab.images.describe()
    if images is not None and images != own_images:
        raise UserError(
            f"data.paths: {folder} was made for a model with other images (model.vision: {_name_keys(images)}) than "
            f"this one ({'none' if own_images is None else _name_keys(own_images)}); prepare it with this model"
        )
    if prepared.documents != cfg.task.documents:
        raise UserError(f"data.paths: {folder} was not made for task={cfg.task.name}; prepare it with that task")
    if prepared.documents != "text" and own.chat_template != vocab.chat_template:
        raise UserError(
            f"data.paths: {folder} was made with another chat template than task.chat_template="
            f"{cfg.task.chat_template or 'null'}; set it as it was then, or leave it out and set tokenizer.path="
            f"{folder}/tokenizer, which has that template"
        )
    _check_choices(prepared, cfg.task)
    return prepared


def _check_choices(prepared: Prepared, task: Task) -> None:
    """Raise `UserError` where keys of the task that decide tokens and labels were others when a folder was made."""
    own, found = _list_task_choices(task), prepared.index.get("choices")
    if not isinstance(found, dict) or found == own:  # folders of earlier versions have none
        return
    key = next(key for key in {**found, **own} if found.get(key) != own.get(key))
    name = "environment" if key in ("tools", "episode") else key
    raise UserError(
        f"data.paths: {prepared.folder} was made with another task.{name}: it has {json.dumps(found.get(key)):.200}, "
        f"and this run {json.dumps(own.get(key)):.200}; set it as it was, or prepare the folder again"
    )


_Number = Annotated[int, Field(ge=0, lt=2**53)]


class _Facts(BaseModel):
    """What index.json says of a split of a shard."""

    tokens: _Number
    documents: _Number
    images: _Number = 0
    digest: str
    flat: dict[str, Any] | None = None


class _Shard(BaseModel):
    name: str
    train: _Facts
    held_out: _Facts


class _Index(BaseModel):
    """What is read of index.json, which anybody may have made."""

    fingerprint: str
    tokens: _Number
    bytes: Annotated[int, Field(gt=0, lt=2**53)]
    bytes_per_token: FiniteFloat
    unigram_bits_per_byte: FiniteFloat
    left_out: dict[str, _Number]
    left_out_names: list[str]
    unknown: tuple[str, _Number] | None = None
    kind: str | None = None  # earlier versions have `answers`, `pairs` and `prompts` in its place
    images: dict[str, Any] | None = None
    shards: list[_Shard]


def _check_index(prepared: Prepared) -> None:
    """Raise `UserError` where the index of a folder that anybody may have made names files outside of it: tokens of a
    private file would be learnt; or where it lacks what is read of it."""
    source = f"data.paths: {prepared.folder}/index.json"
    try:
        index = _Index.model_validate_json(json.dumps(prepared.index), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{source} is damaged ({place}: {first['msg']}); prepare the folder again") from None
    named = [shard.name for shard in index.shards if not is_plain(shard.name)]
    flat = [part.flat for shard in index.shards for part in (shard.train, shard.held_out) if part.flat is not None]
    if outside := [*named, *(str(each.get("path")) for each in flat)]:
        raise UserError(f"{source} names {outside[0][:200]!r}, which is not in its folder: give that file itself")


def compute_fingerprint(data: Source | Mixture, prepared: dict[str, Prepared], packing: str) -> str:
    """Hash everything that decides which samples a run trains on; a checkpoint keeps it, and resuming compares it."""
    # A run of one source does not hash its name, which has no effect on the samples. `max_epochs` only refuses runs.
    mixing, parts = "", [folder.fingerprint for folder in prepared.values()]
    if isinstance(data, Mixture):
        mixing = f"{data.source} {data.model_dump_json(exclude={'source', 'parts', 'max_epochs'})}"
        parts = [text for name, folder in prepared.items() for text in (name, folder.fingerprint)]
    return hash_texts(packing, mixing, *parts)


MAX_UNKNOWN = 0.01  # of all tokens, before a run says so


def warn_left_out(name: str, prepared: Prepared) -> None:
    """Log how many items gave no document, with the names of the first ones, and how many words the tokenizer does not
    know. Empty documents are not named."""
    unknown, count = prepared.index.get("unknown", (None, 0))
    if count > MAX_UNKNOWN * prepared.index["tokens"]:
        log.warning(
            "%s: %.1f %% of the tokens are %s, which stands for all that the tokenizer does not know; give another one",
            name, 100 * count / prepared.index["tokens"], unknown,
        )  # fmt: skip
    if left_out := {reason: count for reason, count in prepared.index["left_out"].items() if count}:
        names = prepared.index["left_out_names"]
        more = ["..."] if sum(left_out.values()) - left_out.get("empty", 0) > len(names) else []
        counted = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()))
        log.warning("%s: left out: %s%s", name, counted, f" ({', '.join(names + more)})" if names else "")


def make_shares(cfg: Config) -> None:
    """Make the missing shards of a corpus and of evaluation.sets, each process its share; every process calls this.

        process 0    shard 0    shard 2    shard 4        then the index over all shards
        process 1    shard 1    shard 3

    A shard does not depend on the process that makes it. So the corpus is the same as one that a single process makes.

    Raises:
        UserError: a process does not see the cache of process 0 or sees other documents, or a share cannot be made.
    """
    start_time = time.perf_counter()
    cache_dir = expand_home(cfg.loading.cache_dir)
    peers.on_main(lambda: cache_dir.mkdir(parents=True, exist_ok=True), "making the cache")
    if blind := find_blind(cache_dir):
        hosts = ", ".join(sorted({peers.hosts()[rank] for rank in blind}))
        raise UserError(
            f"loading.cache_dir={cache_dir} of {peers.hosts()[0]} is not seen by {hosts}; name a folder that all hosts "
            "share, or prepare on one host and copy the folder that it prints (data=tokens)"
        )
    inputs = peers.main_first(lambda: find_inputs(cfg), "finding the tokenizer")  # process 0 may have to train it
    sources = {name: (source, inputs.units[name]) for name, source in cfg.sources.items() if name in inputs.units}
    sources |= {f"evaluation.sets.{name}": find_set(source, cfg) for name, source in cfg.evaluation.sets.items()}
    workers = cfg.loading.prepare_processes or max(1, (os.cpu_count() or 1) // peers.num_on_host())
    loading = cfg.loading.model_copy(update={"prepare_processes": workers})
    share = slice(jax.process_index(), None, jax.process_count())
    for name, (source, units) in sources.items():
        key = find_folder(source, units, cfg.task, inputs.vocab, loading).name
        peers.reject_others(key, "data", f"documents of {name}, or different versions of files")
        work = partial(make_share, source, units, cfg.task, inputs.vocab, loading, share)
        peers.together(work, f"tokenizing {name}")
    log.info("%d processes have tokenized in %.1f s", jax.process_count(), time.perf_counter() - start_time)


@dataclass(frozen=True)
class Corpus:
    """Sequences to train on and to evaluate on, and the tokenizer that made them. Dicts are keyed by source."""

    prepared: dict[str, Prepared]
    train: dict[str, Sequences]
    held_out_parts: dict[str, Sequences]
    held_out: grain.MapDataset  # sequences of all sources
    num_held_out: int  # documents
    vocab: Vocab
    fingerprint: str  # identifies the training data: documents, tokenizer, split, packing
    unigram_bits_per_byte: float  # loss on the training data of a model that knows only how frequent each token is
    summary: str  # a line for each source
    example: list[int]  # tokens of a held-out document; empty if nothing is held out
    sets: dict[str, Sequences]  # of each of evaluation.sets

    @property
    def tokenizer(self) -> Backend:
        return self.vocab.backend

    @property
    def held_out_fingerprints(self) -> dict[str, str]:
        """What identifies the documents that are evaluated on, of each source and of each evaluation.sets.NAME."""
        sets = {f"evaluation.sets.{name}": part for name, part in self.sets.items()}
        return {name: part.stream.fingerprint for name, part in {**self.held_out_parts, **sets}.items()}

    @property
    def parts(self) -> list[Sequences]:
        """Sequences of all sources and sets."""
        return [*self.train.values(), *self.held_out_parts.values(), *self.sets.values()]

    @property
    def num_samples(self) -> int:
        """Sequences to train on."""
        return sum(map(len, self.train.values()))


def load_corpus(cfg: Config) -> Corpus:
    """Read, split, tokenize and pack the documents of `cfg.data`; work that is in the cache is not done again.

    Raises:
        UserError: the data cannot be read, or there are too few, or too many, sequences to shuffle.
    """
    (prepared, vocab), seq_len = prepare_corpus(cfg), cfg.training.seq_len
    train, held_out = ({name: _pack(folder, split, cfg) for name, folder in prepared.items()} for split in SPLITS)
    if isinstance(cfg.task, Paired | Uncut):
        _report_long({**train, **{f"{name}, held out": part for name, part in held_out.items()}}, cfg, cfg.task)
    if isinstance(cfg.task, Kto | Classify):
        _check_labels(train, cfg.task)
    for name, part in held_out.items():
        _report_ends(f"{name}, held out", part, MAX_AT_ENDS_HELD_OUT)
    for name, sequences in train.items():
        _report_ends(name, sequences, MAX_AT_ENDS)
        stream = sequences.stream
        if prepared[name].documents == "conversation" and stream.num_tokens > stream.num_documents * seq_len:
            # Answers are then learnt without their questions.
            log.warning(
                "%s: a conversation has %.0f tokens on average, more than training.seq_len=%d: most are cut, and what "
                "stands behind a cut is learnt without what stands before it; raise training.seq_len",
                name, stream.num_tokens / stream.num_documents, seq_len,
            )  # fmt: skip
        if not len(sequences):
            raise UserError(
                f"data: {name} has {stream.num_tokens:,} tokens to train on, too few for one sequence of "
                f"training.seq_len={seq_len}; give more data, or lower training.seq_len"
            )
        if not sequences.has_learnt:
            raise UserError(
                f"data: {name} has no token that is learnt: its answers are empty, or "
                "task.learnt_turns and data.columns.learnt_turns choose none of its turns"
            )
        if len(sequences) >= 2**32:  # Grain's shuffle counts in 32 bits
            raise UserError(
                f"data: {name} has {stream.num_tokens:,} tokens, which make {len(sequences):,} sequences of "
                f"training.seq_len={seq_len}; up to 4,294,967,295 can be shuffled"
            )
    indices = [folder.index for folder in prepared.values()]
    bits = sum(index["unigram_bits_per_byte"] * index["bytes"] for index in indices)
    return Corpus(
        prepared=prepared,
        train=train,
        held_out_parts=held_out,
        held_out=grain.MapDataset.concatenate([grain.MapDataset.source(part) for part in held_out.values()]),
        num_held_out=sum(part.stream.num_documents for part in held_out.values()),
        vocab=vocab,
        fingerprint=compute_fingerprint(cfg.data, prepared, cfg.loading.packing),
        unigram_bits_per_byte=bits / sum(index["bytes"] for index in indices),
        summary="\n".join(_summarise(name, prepared[name], train[name], held_out[name], vocab) for name in prepared),
        example=_pick_example(held_out),
        sets={name: _load_set(name, source, vocab, cfg) for name, source in cfg.evaluation.sets.items()},
    )


MAX_AT_ENDS = 0.02  # share of the tokens that may be in no sequence without a warning
MAX_AT_ENDS_HELD_OUT = 0.2  # of documents that are measured alone: they make few sequences


def _pack(prepared: Prepared, split: str, cfg: Config) -> Sequences:
    """Return the sequences of a split, "train" or "held_out"."""
    cache_dir = expand_home(cfg.loading.cache_dir)
    return Sequences(prepared.stream(split), cfg.training.seq_len, cfg.loading.packing, cache_dir, find_slots(cfg))


def _load_set(name: str, source: Source, vocab: Vocab, cfg: Config) -> Sequences:
    """Tokenize all documents of one of evaluation.sets with the run's tokenizer, and pack them. Raises `UserError`
    where the documents make no sequence."""
    prepared = prepare(*find_set(source, cfg), cfg.task, vocab, cfg.loading)
    warn_left_out(f"evaluation.sets.{name}", prepared)
    sequences = _pack(prepared, "train", cfg)
    _report_ends(f"evaluation.sets.{name}", sequences, MAX_AT_ENDS_HELD_OUT)
    if not len(sequences):
        raise UserError(
            f"evaluation.sets.{name} has {sequences.stream.num_tokens:,} tokens, too few for one sequence of "
            f"training.seq_len={cfg.training.seq_len}; give more documents, or leave the set out"
        )
    return sequences


def _report_ends(name: str, sequences: Sequences, max_share: float) -> None:
    """Warn where no sequence of `concat` has the ends of shards, and these are many tokens: short files of tokens."""
    total, num_shards = sequences.stream.num_tokens, len(sequences.stream.sizes)
    left_out = total - sequences.num_tokens - num_shards  # of each shard, the last token is only a target
    if sequences.packing == "concat" and len(sequences) and left_out > max_share * total:
        log.warning(
            "%s: %s of %s tokens are in no sequence: loading.packing=concat leaves out the end of each shard, of which "
            "there are %s; loading.packing=best_fit takes them",
            name, f"{left_out:,}", f"{total:,}", f"{num_shards:,}",
        )  # fmt: skip


def _report_long(parts: dict[str, Sequences], cfg: Config, task: Paired | Uncut) -> None:
    """Log how many pairs or documents are longer than a sequence and therefore left out, or refuse them. Raises
    `UserError` where task.long_pairs or task.long_documents is `error`."""
    key = "long_documents" if isinstance(task, Uncut) else "long_pairs"
    if isinstance(task, Embed):
        kind, counted = "groups", ", a query with its documents"
    else:
        kind, counted = ("documents", "") if isinstance(task, Uncut) else ("pairs", ", both answers with their prompts")
    for name, part in parts.items():
        if part.num_left_out:
            slots = f", or have more than training.images_per_row={cfg.training.images_per_row} images"
            problem = (
                f"{name}: {part.num_left_out:,} of {part.stream.num_documents:,} {kind} are longer than "
                f"training.seq_len={cfg.training.seq_len} tokens{slots if part.slots else ''}{counted}"
            )
            if getattr(task, key) == "error":
                raise UserError(f"data: {problem}; raise it, or set task.{key}=skip to leave them out")
            log.warning("%s: left out", problem)


def _check_labels(train: dict[str, Sequences], task: Kto | Classify) -> None:
    """Raise `UserError` if the answers, or the documents, to train on all have the same label."""
    shards = (part.stream.shard(n) for part in train.values() for n in range(len(part.stream.sizes)))
    arrays = (shard.labels if isinstance(task, Kto) else shard.label_values for shard in shards)
    found = {float(label) for labels in arrays if labels is not None for label in np.unique(labels)}
    if len(found) != 1:
        return
    (value,) = found
    if isinstance(task, Kto):
        kind, label = "answers", str(bool(value)).lower()
        advice = "; task=kto needs both labels; task=sft learns from good answers alone"
    else:
        kind, label = "documents", f"{value:g}" if task.labels is None else task.labels[int(value)]
        advice = ", which leaves nothing to learn; give documents with other labels too"
    raise UserError(f"data: all {kind} to train on have the label {label} (data.columns.label){advice}")


def _summarise(name: str, prepared: Prepared, train: Sequences, held_out: Sequences, vocab: Vocab) -> str:
    images = sum(shard["train"].get("images", 0) for shard in prepared.index["shards"])
    with_images = f" with {images:,} images" if images else ""
    return (
        f"{name}: {train.stream.num_documents:,} documents{with_images}, {train.stream.num_tokens:,} tokens to train "
        f"on; {held_out.stream.num_documents:,} documents, {held_out.stream.num_tokens:,} tokens held out; "
        f"{vocab.num_tokens:,} tokens, {prepared.index['bytes_per_token']:.2f} bytes per token; unigram entropy "
        f"{prepared.index['unigram_bits_per_byte']:.3f} bits per byte; {train.packing}: {len(train):,} sequences, "
        f"{train.utilisation:.1%} of their tokens are not padding"
    )


def _pick_example(held_out: dict[str, Sequences]) -> list[int]:
    """Return up to 4096 tokens of the longest among the first 32 held-out documents of each source."""
    sample: list[int] = []
    for stream in (sequences.stream for sequences in held_out.values()):
        # The first shard with documents is enough.
        for number in [number for number, (_, documents) in enumerate(stream.sizes) if documents][:1]:
            shard = stream.shard(number)
            for start, end in pairwise([*shard.starts[:33].tolist(), len(shard.tokens)][:33]):
                if end - start > len(sample):
                    sample = shard.tokens[start : min(end, start + 4096)].tolist()
    return sample
