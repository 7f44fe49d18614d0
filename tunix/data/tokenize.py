"""Tokenize a corpus once: shards made by all cores, each whole or not at all, then an index over them.

Training and `python -m tunix.prepare` both come here and find each other's work: a folder is named by the hash of the
sources' files, of the tokenizer and of the keys that matter.
"""

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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tunix.base.disk import make_once
from tunix.base.errors import UserError
from tunix.config import Loading, Task, Tokenizer
from tunix.data.documents import Document, read_documents
from tunix.data.shards import HASH_BITS, ShardPlan, document_hash, make_shard
from tunix.data.stream import FORMAT, Prepared, open_prepared
from tunix.sources import Source, Tokens
from tunix.sources.files import Unit
from tunix.tokenizer.vocabulary import Vocabulary, bytes_by_token, read, train

log = logging.getLogger(__name__)
IN_KEYS = {"text": "pretrain", "conversation": "sft"}  # kinds of documents in the names of caches, as ever
MOVED = {"paths"}  # keys of a source that may change while its documents stay the same


def find_units(cfg: Source, loading: Loading) -> list[Unit]:
    """What there is to read, in the fixed random order that the names' hashes give."""
    return sorted(cfg.units(loading.shard_bytes), key=lambda unit: (document_hash(unit.name), unit.start))


def find_vocabulary(
    cfg: Tokenizer, task: Task, sources: list[tuple[Source, list[Unit]]], cache_dir: Path
) -> Vocabulary:
    """The tokenizer of the config, read or trained on the training documents of all sources."""
    if cfg.path is not None and not cfg.train:
        return read(cfg, task.chat_template)
    if cfg.train is False:
        raise UserError("tokenizer.train=false, and tokenizer.path names none; set the path, or tokenizer.train=null")
    if any(isinstance(source, Tokens) for source, _ in sources):
        raise UserError("data.source=tokens needs the tokenizer that made the tokens: set tokenizer.path")
    key = _hash(
        FORMAT,
        cfg.model_dump_json(exclude={"path", "train"}),
        IN_KEYS[task.documents],
        *(_identity(*source) for source in sources),
    )

    trained = cache_dir / "tokenizers" / key / "tokenizer.json"
    path = None if cfg.path is None else Path(cfg.path).expanduser()
    if path and path.exists() and not (trained.exists() and filecmp.cmp(path, trained, False)):
        raise UserError(
            f"tokenizer.train=true would write tokenizer.path={path}, which exists and is another; remove one of the "
            "two"
        )

    def make(folder: Path) -> None:
        log.info("training a tokenizer of %d tokens", cfg.vocab_size)
        train(cfg, _sample(sources, task, cfg.train_bytes)).save(folder)

    folder = make_once(cache_dir / "tokenizers" / key, make)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "tokenizer.json", path)
    return read(cfg.model_copy(update={"path": str(folder)}), task.chat_template)


def prepare(cfg: Source, units: list[Unit], task: Task, vocabulary: Vocabulary, loading: Loading) -> Prepared:
    """The tokenized corpus of a source: found, or made as far as a run before this one has not.

    Raises:
        UserError: documents that cannot be read, or none; a cache that cannot be written.
    """
    template = str(vocabulary.chat_template) if task.documents == "conversation" else ""
    key = _hash(
        FORMAT, _identity(cfg, units), IN_KEYS[task.documents], template, vocabulary.digest, str(loading.shard_bytes)
    )
    folder = Path(loading.cache_dir).expanduser() / "tokens" / key
    if not (folder / "index.json").exists():
        begun = time.perf_counter()
        tokenizer = make_once(folder / "tokenizer", vocabulary.save)
        limit = int(cfg.held_out_fraction * 2**HASH_BITS)
        plans = [
            ShardPlan(f"{number:05}", tuple(part), cfg, task, tokenizer, limit)
            for number, part in enumerate(_grouped(units, 0 if isinstance(cfg, Tokens) else loading.shard_bytes))
        ]
        facts = _make(plans, folder, loading)
        if limit and not isinstance(cfg, Tokens) and not any(each["held_out"]["documents"] for each in facts):
            limit = min(each["smallest_hash"] for each in facts) + 1  # at least one, however few there are
            plans = [ShardPlan(p.name, p.units, cfg, task, tokenizer, max(limit, p.held_out_below)) for p in plans]
            facts = _make(plans, folder, loading, redo={f["name"] for f in facts if f["smallest_hash"] < limit})
        make_once(
            folder / "index.json", lambda path: path.write_text(json.dumps(_index(cfg, facts, folder, vocabulary)))
        )
        log.info("tokenized %s in %.1f s: %s", cfg.source, time.perf_counter() - begun, folder)
    return open_prepared(folder)


def _make(plans: list[ShardPlan], folder: Path, loading: Loading, redo: set[str] | None = None) -> list[dict]:
    """Facts of all shards; those that are not there yet, or are to be made again, are made by all cores."""
    for name in redo or ():
        shutil.rmtree(folder / name)
    missing = [plan for plan in plans if not (folder / plan.name).exists()]
    if len(missing) < len(plans) and redo is None:
        log.info("%d of %d shards are there already", len(plans) - len(missing), len(plans))
    num_workers = min(len(missing), loading.prepare_processes or os.cpu_count() or 1)
    sizes = {plan.name: sum(unit.size for unit in plan.units) for plan in missing}
    columns = TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("", total=sum(sizes.values()))
        for name in _shards(missing, folder, num_workers):
            progress.advance(bar, sizes[name])
    return [json.loads((folder / plan.name / "facts.json").read_text()) for plan in plans]


def _shards(plans: list[ShardPlan], folder: Path, num_workers: int) -> Iterator[str]:
    """Names of shards as they are done; one is made here, with the tokenizer's own threads."""
    if num_workers <= 1:
        for plan in plans:
            yield _one_shard(plan, folder)
        return
    context = multiprocessing.get_context("spawn")  # jax has threads, which a fork would break
    with ProcessPoolExecutor(num_workers, context, _start_worker, (os.getpid(),)) as pool:
        futures = [pool.submit(_one_shard, plan, folder) for plan in plans]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise UserError(
                "a process that tokenizes was killed, perhaps for want of memory; fewer at a time: "
                f"loading.prepare_processes={max(1, num_workers // 2)}. Finished shards are kept"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _one_shard(plan: ShardPlan, folder: Path) -> str:
    make_once(folder / plan.name, lambda path: make_shard(plan, path))
    return plan.name


def _start_worker(parent: int) -> None:
    """One core, and no life after the parent's."""
    os.environ["RAYON_NUM_THREADS"] = "1"

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _grouped(units: list[Unit], size: int) -> Iterator[list[Unit]]:
    """Units in order, in groups of about `size` bytes."""
    group: list[Unit] = []
    collected = 0
    for unit in units:
        group.append(unit)
        collected += unit.size
        if collected >= size:
            yield group
            group, collected = [], 0
    if group:
        yield group


def _index(cfg: Source, facts: list[dict], folder: Path, vocabulary: Vocabulary) -> dict:
    """What is known of the whole corpus."""
    left_out = sum((Counter(each["left_out"]) for each in facts), Counter())
    num_train, num_held_out = (sum(each[split]["documents"] for each in facts) for split in ("train", "held_out"))
    if num_train == 0:
        said = ", ".join(f"{left_out[reason]} {reason}" for reason in ("empty", "not UTF-8", "bad row"))
        if num_held_out == 0:
            raise UserError(f"data.source={cfg.source}: no document with text in it ({said})")
        raise UserError(
            f"all {num_held_out} documents are held out; add documents, or lower "
            f"data.held_out_fraction={cfg.held_out_fraction} (0 holds out none)"
        )
    if isinstance(cfg, Tokens) and cfg.held_out_fraction > 0 and num_held_out == 0:
        raise UserError(
            f"data.held_out_fraction={cfg.held_out_fraction} holds out nothing: no file of data.paths has a second "
            "document, or too few tokens; raise it, or set it to 0"
        )
    counts = sum(np.load(folder / each["name"] / "counts.npy") for each in facts)
    end = cfg.document_end if isinstance(cfg, Tokens) else None
    if end is not None and (end >= len(counts) or counts[end] == 0):
        raise UserError(
            f"data.document_end={end} is no token in data.paths; the tokenizer ends a document with {vocabulary.eos}, "
            "and null takes each file for one document"
        )
    sizes = [each["train"]["bytes"] for each in facts]
    size = int(counts @ bytes_by_token(vocabulary.backend)[: len(counts)]) if None in sizes else sum(sizes)
    shares = counts[counts > 0] / counts.sum()
    entropy_bits = float(-(shares * np.log2(shares)).sum())
    return {
        "format": FORMAT,
        "fingerprint": _hash(FORMAT, vocabulary.digest, *(each["train"]["digest"] for each in facts)),
        "source": cfg.source,
        "vocab_size": vocabulary.num_tokens,
        "tokens": int(counts.sum()),
        "documents": num_train,
        "bytes": size,
        "bytes_per_token": size / counts.sum(),
        "unigram_bits_per_byte": entropy_bits * float(counts.sum()) / max(1, size),
        "left_out": left_out,
        "left_out_names": [name for each in facts for name in each["left_out_names"]][:5],
        "answers": (folder / facts[0]["name"] / "train.answers.npy").exists(),
        "shards": [{"name": each["name"], "train": each["train"], "held_out": each["held_out"]} for each in facts],
    }


def _sample(sources: list[tuple[Source, list[Unit]]], task: Task, limit: int) -> Iterator[str]:
    """About `limit` bytes of training documents, an eighth of them at most from one unit."""
    for cfg, units in sources:
        left = limit // len(sources)
        for unit in units:
            of_unit = max(1, left if len(units) < 8 else limit // 8)
            for document in read_documents(cfg, task, unit):
                if left <= 0 or of_unit <= 0:
                    break
                held_out = document_hash(document.name) < int(cfg.held_out_fraction * 2**HASH_BITS)
                if isinstance(document, Document) and not held_out:
                    content = document.content
                    text = content if isinstance(content, str) else "\n".join(turn["content"] for turn in content)
                    yield text
                    left, of_unit = left - len(text.encode()), of_unit - len(text.encode())


def _identity(cfg: Source, units: list[Unit]) -> str:
    """What decides a source's documents, without reading them."""
    return _hash(
        cfg.model_dump_json(exclude=set() if isinstance(cfg, Tokens) else MOVED), *(unit.digest for unit in units)
    )


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
