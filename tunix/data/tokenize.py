"""Tokenize a corpus once: all cores make shards side by side, then an index over the shards is written.

Each shard appears complete or not at all, so work that was interrupted goes on with the missing shards. A corpus has a
folder in `loading.cache_dir`, named by the hash of the sources' files, of the tokenizer and of the keys that change the
result. Training and `python -m tunix.prepare` both come here and find each other's work.
"""

import filecmp
import hashlib
import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from tunix.base.digests import FILE, is_verified, list_files, note_verified, refuse_damaged, write_digests
from tunix.base.disk import make_once, replacing
from tunix.base.errors import UserError
from tunix.config import Loading, Task, Tokenizer
from tunix.config.document_kinds import DOCUMENTS
from tunix.config.task import Prompted
from tunix.data.documents import Document, read_documents
from tunix.data.shard_workers import make_shards
from tunix.data.shards import HASH_BITS, ShardPlan, hash_document
from tunix.data.stream import FORMAT, Prepared, open_prepared
from tunix.sources import Source, Tokens
from tunix.sources.files import Unit
from tunix.tokenizer.vocabulary import Vocabulary, bytes_by_token, read_vocabulary, train_vocabulary

log = logging.getLogger(__name__)
PLACE_KEYS = {"paths"}  # keys of a source that say where it is: they may change while its documents stay the same


def find_units(source: Source, loading: Loading) -> list[Unit]:
    """Return the units of a source in a fixed random order, that of the hashes of their names."""
    units = source.units(loading.shard_bytes)
    return sorted(units, key=lambda unit: (hash_document(unit.name), unit.start))


def find_vocabulary(
    tokenizer: Tokenizer, task: Task, sources: list[tuple[Source, list[Unit]]], cache_dir: Path
) -> Vocabulary:
    """Read the tokenizer of the config, or train it on the training documents of all sources.

    Raises:
        UserError: there is no tokenizer, or none can be trained, or a trained one would overwrite another file.
    """
    if tokenizer.path is not None and not tokenizer.train:
        return read_vocabulary(tokenizer, task.chat_template)
    if tokenizer.train is False:
        raise UserError("tokenizer.train=false, and tokenizer.path names none; set the path, or tokenizer.train=null")
    if any(isinstance(source, Tokens) for source, _ in sources):
        raise UserError("data.source=tokens needs the tokenizer that made the tokens: set tokenizer.path")
    settings = tokenizer.model_dump_json(exclude={"path", "train"})
    key = _hash(FORMAT, settings, DOCUMENTS[task.documents].in_hashes, *(_hash_source(*source) for source in sources))

    trained = cache_dir / "tokenizers" / key / "tokenizer.json"
    path = None if tokenizer.path is None else Path(tokenizer.path).expanduser()
    if path and path.exists() and not (trained.exists() and filecmp.cmp(path, trained, False)):
        raise UserError(
            f"tokenizer.train=true would write tokenizer.path={path}, which exists and is another tokenizer; remove "
            "that file, or unset tokenizer.train"
        )

    def make(folder: Path) -> None:
        log.info("training a tokenizer of %d tokens", tokenizer.vocab_size)
        train_vocabulary(tokenizer, _sample_texts(sources, task, tokenizer.train_bytes)).save(folder)

    folder = make_once(cache_dir / "tokenizers" / key, make)
    if path and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:  # a second process may write it at the same time
            shutil.copy(folder / "tokenizer.json", new)
    return read_vocabulary(tokenizer.model_copy(update={"path": str(folder)}), task.chat_template)


def prepare(source: Source, units: list[Unit], task: Task, vocabulary: Vocabulary, loading: Loading) -> Prepared:
    """Return the tokenized corpus of a source: open it, or first make the shards that are missing.

    Raises:
        UserError: documents cannot be read, or there are none, or the cache cannot be written.
    """
    folder = find_folder(source, units, task, vocabulary, loading)
    if not (folder / "index.json").exists():
        begun = time.perf_counter()
        plans = _plan_shards(source, units, task, vocabulary, loading, folder)
        limit, tokenizer = int(source.held_out_fraction * 2**HASH_BITS), folder / "tokenizer"
        facts = make_shards(plans, folder, loading)
        if limit and not isinstance(source, Tokens) and not any(fact["held_out"]["documents"] for fact in facts):
            # A small corpus may have no document below the limit: hold out the one with the smallest hash, which shards
            # record. Its shard is made anew under another name, because a second process may be reading the first one.
            place = min(range(len(facts)), key=lambda number: facts[number]["smallest_hash"])
            held_out_below = facts[place]["smallest_hash"] + 1
            plans[place] = replace(plans[place], name=f"{plans[place].name}-held-out", held_out_below=held_out_below)
            (facts[place],) = make_shards([plans[place]], folder, loading)
        index = _make_index(source, task, facts, folder, vocabulary)
        # Written last: a folder with an index has all of its shards. A second process that is here at the same time has
        # made the same bytes.
        make_once(folder / "index.json", lambda path: path.write_text(json.dumps(index)))
        own = [folder / "index.json", *list_files(tokenizer), *(folder / plan.name / FILE for plan in plans)]
        write_digests(folder, [path for path in own if path.is_file()])
        note_verified(folder, folder / FILE)
        log.info("tokenized %s in %.1f s: %s", source.source, time.perf_counter() - begun, folder)
    return open_verified(folder, loading)


def make_share(
    source: Source, units: list[Unit], task: Task, vocabulary: Vocabulary, loading: Loading, share: slice
) -> None:
    """Make the missing ones of some shards of a source; afterwards `prepare` makes the others, and the index.

    Raises:
        UserError: documents cannot be read, or the cache cannot be written.
    """
    folder = find_folder(source, units, task, vocabulary, loading)
    if not (folder / "index.json").exists():
        make_shards(_plan_shards(source, units, task, vocabulary, loading, folder)[share], folder, loading)


def find_folder(source: Source, units: list[Unit], task: Task, vocabulary: Vocabulary, loading: Loading) -> Path:
    """Return the folder of a tokenized corpus: its name is a hash of everything that decides what is in it."""
    # What is not in the hash does not change the tokens: where the files are, how many processes read them.
    template = "" if task.documents == "text" else str(vocabulary.chat_template)
    system = [str(task.system)] if isinstance(task, Prompted) else []
    kind, shard_size = DOCUMENTS[task.documents].in_hashes, str(loading.shard_bytes)
    key = _hash(FORMAT, _hash_source(source, units), kind, template, vocabulary.digest, shard_size, *system)
    return Path(loading.cache_dir).expanduser() / "tokens" / key


def _plan_shards(
    source: Source, units: list[Unit], task: Task, vocabulary: Vocabulary, loading: Loading, folder: Path
) -> list[ShardPlan]:
    """Return the plans of all shards of a source, and write the tokenizer that they name."""
    tokenizer = make_once(folder / "tokenizer", vocabulary.save)
    limit = int(source.held_out_fraction * 2**HASH_BITS)
    shard_bytes = 0 if isinstance(source, Tokens) else loading.shard_bytes  # 0: each file of tokens is a shard
    return [
        ShardPlan(f"{number:05}", tuple(group), source, task, tokenizer, limit)
        for number, group in enumerate(_group_units(units, shard_bytes))
    ]


def open_verified(folder: Path, loading: Loading) -> Prepared:
    """Open a tokenized corpus, after a comparison with its digests if `loading.verify` asks for one.

    Raises:
        UserError: a file is damaged, or the index is of another version.
    """
    mark = folder / FILE
    if loading.verify == "always" or (loading.verify == "once" and not is_verified(folder, mark)):
        refuse_damaged(folder, "data", f"remove the folder {folder}, and prepare it again")
        if loading.verify == "once" and mark.is_file():
            note_verified(folder, mark)
    return open_prepared(folder)


def _group_units(units: list[Unit], size: int) -> Iterator[list[Unit]]:
    """Yield the units in order, in groups of about `size` bytes; each group becomes a shard."""
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


def _make_index(source: Source, task: Task, facts: list[dict], folder: Path, vocabulary: Vocabulary) -> dict:
    """Sum up the facts of all shards, and return what index.json says of the corpus.

    Raises:
        UserError: nothing to train on, or nothing held out though that was asked for.
    """
    left_out = sum((Counter(fact["left_out"]) for fact in facts), Counter())
    num_train, num_held_out = (sum(fact[split]["documents"] for fact in facts) for split in ("train", "held_out"))
    if num_train == 0:
        reasons = ", ".join(f"{left_out[kind]} {kind}" for kind in ("empty", "not UTF-8", "bad row") if left_out[kind])
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
            f"data.held_out_fraction={source.held_out_fraction} holds out nothing: no file of data.paths has a second "
            "document, or too few tokens; raise it, or set it to 0"
        )
    counts = sum(np.load(folder / fact["name"] / "counts.npy") for fact in facts)  # [V]: how often each token occurs
    end = source.document_end if isinstance(source, Tokens) else None
    if end is not None and (end >= len(counts) or counts[end] == 0):
        raise UserError(
            f"data.document_end={end} does not occur in data.paths; the tokenizer ends a document with "
            f"{vocabulary.eos}, and data.document_end=null takes each file as one document"
        )
    sizes = [fact["train"]["bytes"] for fact in facts]
    size = int(counts @ bytes_by_token(vocabulary.backend)[: len(counts)]) if None in sizes else sum(sizes)
    # The loss of a model that knows only how frequent each token is; a trained model must be better than that.
    shares = counts[counts > 0] / counts.sum()
    entropy_bits = float(-(shares * np.log2(shares)).sum())
    return {
        "format": FORMAT,
        "fingerprint": _hash(FORMAT, vocabulary.digest, *(fact["train"]["digest"] for fact in facts)),
        "source": source.source,
        "vocab_size": vocabulary.num_tokens,
        "tokens": int(counts.sum()),
        "documents": num_train,
        "bytes": size,
        "bytes_per_token": size / counts.sum(),
        "unigram_bits_per_byte": entropy_bits * float(counts.sum()) / max(1, size),
        "left_out": left_out,
        "left_out_names": [name for fact in facts for name in fact["left_out_names"]][:5],
        "kind": "text" if isinstance(source, Tokens) else task.documents,
        "shards": [{"name": fact["name"], "train": fact["train"], "held_out": fact["held_out"]} for fact in facts],
    }


def _sample_texts(sources: list[tuple[Source, list[Unit]]], task: Task, limit: int) -> Iterator[str]:
    """Yield about `limit` bytes of training documents, for a tokenizer to learn from.

    Sources give equal shares. At most an eighth comes from one unit, so that no single large file decides.
    """
    for source, units in sources:
        left = limit // len(sources)
        for unit in units:
            if left <= 0:  # the other files are not even opened
                break
            left_of_unit = max(1, left if len(units) < 8 else limit // 8)
            for document in read_documents(source, task, unit):
                if left <= 0 or left_of_unit <= 0:
                    break
                held_out = hash_document(document.name) < int(source.held_out_fraction * 2**HASH_BITS)
                if isinstance(document, Document) and not held_out:
                    yield document.text
                    left -= len(document.text.encode())
                    left_of_unit -= len(document.text.encode())


def _hash_source(source: Source, units: list[Unit]) -> str:
    """Hash everything that decides a source's documents, without reading them: its keys, and its files' versions."""
    excluded = set() if isinstance(source, Tokens) else PLACE_KEYS  # tokens are read from their own place in training
    return _hash(source.model_dump_json(exclude=excluded), *(unit.digest for unit in units))


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
