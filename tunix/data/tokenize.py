"""Tokenize a corpus once: all cores make shards side by side, then an index over the shards is written.

Each shard appears complete or not at all, so work that was interrupted goes on with the missing shards. A corpus has a
folder in `loading.cache_dir`, named by the hash of the sources' files, of the tokenizer and of the keys that change the
result. Training and `python -m tunix.prepare` both come here and find each other's work.
"""

import contextlib
import filecmp
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tunix.base.digests import FILE, list_files, note_verified, verify_folder, write_digests
from tunix.base.errors import UserError
from tunix.base.files import expand_home, make_once, replacing
from tunix.base.forms import locate_cached, sign
from tunix.config import Loading, Task, Tokenizer
from tunix.config.task import Prompted
from tunix.data.documents import Document, read_documents
from tunix.data.files import Unit
from tunix.data.image_processors import ImageProcessor
from tunix.data.pieces import TRAINED_HERE, cut_text
from tunix.data.shards import FORMAT, HASH_BITS, Prepared, ShardPlan, hash_document, is_cut, make_shard, open_prepared
from tunix.data.table import DOCUMENTS, Source, Tokens
from tunix.data.tokenizer import Vocab, add_images, bytes_by_token, read_vocab, train_vocab

log = logging.getLogger(__name__)


def make_shards(plans: list[ShardPlan], folder: Path, loading: Loading) -> list[dict]:
    """Make the shards that are missing, on all cores; return the facts of all."""
    missing = [plan for plan in plans if not (folder / plan.name).exists()]
    if 0 < len(missing) < len(plans):
        log.info("%d of %d shards are there already", len(plans) - len(missing), len(plans))
    num_workers = min(len(missing), loading.prepare_processes or os.cpu_count() or 1)
    sizes = {plan.name: sum(unit.size for unit in plan.units) for plan in missing}
    text = TextColumn("tokenizing, {task.description}")
    start_time = time.perf_counter()
    columns = text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    is_watched = sys.stdout.isatty()
    with Progress(*columns, transient=True, disable=not is_watched) as progress:
        bar = progress.add_task("0.0 MB of tokens", total=sum(sizes.values()))

        def report(megabytes: float, num_images: int) -> None:
            text = f"{megabytes:.1f} MB of tokens"
            if num_images:
                text += f", {num_images:,} images, {num_images / (time.perf_counter() - start_time):.0f} a second"
            progress.update(bar, description=text)
            if not is_watched:
                log.info("tokenizing, %s so far", text)

        with _reporting_tokens(folder, report):
            for name in _make_missing(missing, folder, num_workers):
                progress.advance(bar, sizes[name])
    return [json.loads((folder / plan.name / "facts.json").read_text()) for plan in plans]


REPORT_EVERY_S = 4.0  # while a shard is made, so that nobody thinks that the process is stuck


@contextlib.contextmanager
def _reporting_tokens(folder: Path, report: Callable[[float, int], None]) -> Iterator[None]:
    """Call `report` every few seconds with the megabytes of tokens and the images that all processes have written in
    a folder."""
    done = threading.Event()

    def count_bytes(array: str) -> int:
        size = 0
        for path in folder.rglob(f"*.{array}.npy"):  # also in the folders of shards that are not done
            with contextlib.suppress(OSError):  # of a shard that has just got its name
                size += path.stat().st_size
        return size

    def watch() -> None:
        while not done.wait(REPORT_EVERY_S):
            with contextlib.suppress(OSError):  # a folder that goes away while it is listed
                report(count_bytes("tokens") / 1e6, count_bytes("image_ends") // 8)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _make_missing(plans: list[ShardPlan], folder: Path, num_workers: int) -> Iterator[str]:
    """Make shards in worker processes and yield the name of each when it is done.

    With one worker, this process makes them all, and the tokenizer uses a thread for each core.
    """
    if num_workers <= 1:
        yield from (_make_one(plan, folder) for plan in plans)
        return
    # "spawn" starts a new interpreter. "fork" would copy this process, whose other threads (JAX, a tokenizer) may hold
    # locks; the copy has no such thread, so its locks would never open.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (os.getpid(),)) as pool:
        futures = [pool.submit(_make_one, plan, folder) for plan in plans]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise UserError(
                "a process that tokenizes was killed, perhaps because memory ran out; run fewer at a time: "
                f"loading.prepare_processes={max(1, num_workers // 2)}. Finished shards are kept"
            ) from None
        except BaseException:
            # Without this, leaving the block waits for every shard that has not begun yet.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _make_one(plan: ShardPlan, folder: Path) -> str:
    make_once(folder / plan.name, lambda path: make_shard(plan, path))
    return plan.name


def _start_worker(parent: int) -> None:
    """Prepare a worker process: it uses one core, and it ends when its parent has ended."""
    # The tokenizer's threads (Rayon) are one for each core; so many in each worker would only wait for one another.
    os.environ["RAYON_NUM_THREADS"] = "1"

    # A parent that is killed cannot end its workers. A process whose parent has ended gets another parent.
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


FINGERPRINT = "2"  # first word of what is hashed; checkpoints hold the result, so it stays where the files change
LOCATION_KEYS = {"paths"}  # keys of a source that say where it is: they may change while its documents stay the same
# Columns that texts alone do not have (`_list_turn_choices`).
TURN_COLUMNS = {"tools": True, "learnt_turns": True, "label": True, "images": True}
IMAGE_KEYS = {"max_image_pixels", "image_addresses"}  # of rows; texts alone do not depend on them


def find_units(source: Source, loading: Loading) -> list[Unit]:
    """Return the units of a source in a fixed random order, that of the hashes of their names."""
    units = source.units(loading.shard_bytes)
    return sorted(units, key=lambda unit: (hash_document(unit.name), unit.start))


def find_vocab(
    tokenizer: Tokenizer,
    task: Task,
    sources: list[tuple[Source, list[Unit]]],
    cache_dir: Path,
    processor: ImageProcessor | None = None,
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
    key = _hash(settings, DOCUMENTS[task.documents].in_hashes, *(_hash_source(*source) for source in sources), *more)
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
    folder = find_folder(source, units, task, vocab, loading)
    if not (folder / "index.json").exists():
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
        # Written last: a folder with an index has all of its shards. A second process that is here at the same time has
        # made the same bytes.
        make_once(folder / "index.json", lambda path: path.write_text(json.dumps(index)))
        files = [
            folder / "index.json",
            *list_files(folder / "tokenizer"),
            *(folder / plan.name / FILE for plan in plans),
        ]
        write_digests(folder, [path for path in files if path.is_file()], **sign("corpus"))
        note_verified(folder, folder / FILE)
        log.info("tokenized %s in %.1f s: %s", source.source, time.perf_counter() - start_time, folder)
    return open_verified(folder, loading)


def make_share(source: Source, units: list[Unit], task: Task, vocab: Vocab, loading: Loading, share: slice) -> None:
    """Make the missing ones of some shards of a source; afterwards `prepare` makes the others, and the index.

    Raises:
        UserError: documents cannot be read, or the cache cannot be written.
    """
    folder = find_folder(source, units, task, vocab, loading)
    if not (folder / "index.json").exists():
        make_shards(_plan_shards(source, units, task, vocab, loading, folder)[share], folder, loading)


def find_folder(source: Source, units: list[Unit], task: Task, vocab: Vocab, loading: Loading) -> Path:
    """Return the folder of a tokenized corpus: its name is a hash of everything that decides what is in it."""
    # What is not in the hash does not change the tokens: where the files are, how many processes read them.
    template = "" if task.documents == "text" else str(vocab.chat_template)
    system = [str(task.system)] if isinstance(task, Prompted) else []
    kind, shard_size = DOCUMENTS[task.documents].in_hashes, str(loading.shard_bytes)
    key = _hash(
        _hash_source(source, units),
        kind,
        template,
        vocab.digest,
        shard_size,
        *system,
        *_list_turn_choices(source, task),
        *([source.model_dump_json(include=IMAGE_KEYS)] if vocab.images else []),
    )
    return locate_cached(loading.cache_dir, "tokens", key)


def _list_turn_choices(source: Source, task: Task) -> list[str]:
    """Return what decides the text of conversations beside the template; none where all is as it was before there was
    such a choice, so that folders keep their names."""
    if task.documents == "text":
        return []
    columns = getattr(source, "columns", None)
    choices = task.list_turn_choices() | {
        key: value
        for key in TURN_COLUMNS
        if columns is not None and (value := getattr(columns, key)) not in (None, key)
    }
    return [json.dumps(choices, sort_keys=True)] if choices else []


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
    """Open a tokenized corpus, after a comparison with its digests if `loading.verify` asks for one.

    Raises:
        UserError: a file is damaged, or the index is of another version.
    """
    verify_folder(folder, loading.verify, "data", f"remove the folder {folder}, and prepare it again")
    return open_prepared(folder)


def _make_index(source: Source, task: Task, info: list[dict], folder: Path, vocab: Vocab) -> dict:
    """Sum up the facts of all shards, and return what index.json says of the corpus.

    Raises:
        UserError: nothing to train on, or nothing held out though that was asked for.
    """
    left_out = sum((Counter(fact["left_out"]) for fact in info), Counter())
    num_train, num_held_out = (sum(fact[split]["documents"] for fact in info) for split in ("train", "held_out"))
    if num_train == 0:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        if num_held_out == 0:
            raise UserError(
                f"data.source={source.source}: no document with text in it ({reasons or 'nothing in its files'})"
            )
        raise UserError(
            f"all {num_held_out} documents are held out; add documents, or lower "
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
    size = int(counts @ bytes_by_token(vocab.backend)[: len(counts)]) if None in sizes else sum(sizes)
    # The loss of a model that knows only how frequent each token is; a trained model must be better than that.
    probs = counts[counts > 0] / counts.sum()
    entropy_bits = float(-(probs * np.log2(probs)).sum())
    return {
        "format": FORMAT,
        "fingerprint": _hash(FINGERPRINT, vocab.digest, *(fact["train"]["digest"] for fact in info)),
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
        **({"images": vocab.images.describe()} if vocab.images and not isinstance(source, Tokens) else {}),
        "shards": [{"name": fact["name"], "train": fact["train"], "held_out": fact["held_out"]} for fact in info],
    }


def _sample_texts(
    sources: list[tuple[Source, list[Unit]]], task: Task, limit: int, processor: ImageProcessor | None
) -> Iterator[str]:
    """Yield about `limit` bytes of training documents, for a tokenizer to learn from.

    Sources give equal shares. At most an eighth comes from one unit, so that no single large file decides.
    """
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
                if isinstance(document, Document) and not held_out and is_cut(source, document, TRAINED_HERE):
                    yield from cut_text(document.text, TRAINED_HERE)
                    size = len(document.text.encode())
                    left, left_of_unit = left - size, left_of_unit - size


def _hash_source(source: Source, units: list[Unit]) -> str:
    """Hash everything that decides a source's documents, without reading them: its keys, and its files' versions."""
    # Tokens are read from their own place in training.
    places = {} if isinstance(source, Tokens) else dict.fromkeys(LOCATION_KEYS, True)
    excluded: dict[str, Any] = {**places, **dict.fromkeys(IMAGE_KEYS, True), "columns": TURN_COLUMNS}
    return _hash(source.model_dump_json(exclude=excluded), *(unit.digest for unit in units))


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
