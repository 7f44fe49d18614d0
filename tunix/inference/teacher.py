"""The teacher of a run, loaded onto its mesh: a run of tunix or a model of Hugging Face's, of any family; and what it
says of the run's data, written to disk once."""

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, reshard
from tokenizers import Tokenizer

from tunix.base.digests import hash_texts, list_files, sample_files
from tunix.base.errors import UserError
from tunix.base.files import expand_home
from tunix.base.forms import locate_cached
from tunix.config import Config
from tunix.config.pretrained_config import TEACHER, LogitsInfo, read_logits_info
from tunix.config.saved_runs import find_run
from tunix.data.batches import choose_evenly, put_rows
from tunix.data.dataset import Corpus
from tunix.data.packing import Sequences
from tunix.data.teacher_logits import (
    LogitFiles,
    TopK,
    check_disk_space,
    count_position_bytes,
    logits_dtype,
    write_info,
)
from tunix.data.tokenizer import count_ids, tokenizer_digest
from tunix.huggingface.hub import INFO_FILES, WEIGHTS, find, list_copied_files
from tunix.inference.pretrained import find_checkpoint, load_params
from tunix.processes import peers
from tunix.sharding.layout import Layout
from tunix.training.state import describe
from tunix.training.teacher import OfflineTeacher
from tunix.training.train_spec import TrainSpec

log = logging.getLogger(__name__)

VOCAB = "V"  # letter of the rows of the vocabulary in equations
NUM_BLOCKS = 64  # of a file of weights that its digest reads
PIECE_BYTES = 1 << 26  # most bytes of a piece on disk, if its rows are longer than one
REPORT_EVERY_S = 30.0


def load_teacher(train_spec: TrainSpec, mesh: Mesh, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the parameters of a training's teacher at rest on the mesh, in the dtype of products; None without one.

    `tokenizer` is that of the run.

    Raises:
        UserError: files that are not complete or damaged, a run without a checkpoint, another tokenizer.
    """
    teacher = train_spec.teacher
    if isinstance(teacher, OfflineTeacher):
        teacher = teacher.model
    if teacher is None:
        return None
    layout = teacher.arch.layout
    file_arch = describe(teacher.model, layout)  # with the rows of vocabulary that its files have
    try:
        params, file_tokenizer = load_params(teacher.source, teacher.model, file_arch, layout, mesh)
    except UserError as error:
        raise UserError(f"{TEACHER}={teacher.source}: {error}") from None
    if (num_tokens := count_ids(tokenizer)) > teacher.model.vocab_size:
        raise UserError(
            f"{TEACHER}={teacher.source} has {teacher.model.vocab_size:,} rows of vocabulary, and the run's tokenizer "
            f"has {num_tokens:,} tokens; take a teacher with the same tokenizer"
        )
    if file_tokenizer is None:
        log.warning("%s=%s has no tokenizer: its tokens are taken to be those of the run", TEACHER, teacher.source)
    else:
        check_tokenizers(teacher.source, file_tokenizer.get_vocab(), tokenizer.get_vocab())
    params = jax.tree.map(partial(_fit_rows, layout), params, file_arch.weights, teacher.arch.weights)
    log.info("teacher: %s, %s", teacher.source, f"{file_arch.num_parameters:,} parameters")
    return params


def check_tokenizers(source: str, teacher: Mapping[str, int], trained: Mapping[str, int]) -> None:
    """Raise `UserError` where two vocabularies, ids by token, are not the same."""
    if teacher == trained:
        return
    differing = sorted({*teacher.items()} ^ {*trained.items()}, key=lambda item: (item[1], item[0]))
    token, number = differing[0]
    raise UserError(
        f"{TEACHER}={source} has another tokenizer than the run: {len(teacher):,} tokens and {len(trained):,}; the "
        f"first that differs is {token!r}, number {number}. A teacher judges the run's own tokens; take one with the "
        "same tokenizer, or train with the teacher's (tokenizer.path)"
    )


def _fit_rows(layout: Layout, array: jax.Array, own: Any, fitted: Any) -> jax.Array:
    """Return an array of a teacher with as many rows of vocabulary as the model in training has. Rows behind those of
    the teacher are zeros, which `Teacher.module` leaves out; rows behind those of the model belong to no token. `own`
    and `fitted` are the `Weight` of the teacher's files and of the model in training."""
    if own.shape == fitted.shape:
        return array
    dim = own.equation.w.index(VOCAB)
    count = fitted.shape[dim]

    def fit(array: jax.Array) -> jax.Array:
        whole = reshard(array, PartitionSpec())
        whole = jax.lax.slice_in_dim(whole, 0, min(count, whole.shape[dim]), axis=dim)
        added = [(0, count - whole.shape[dim] if each == dim else 0) for each in range(whole.ndim)]
        return reshard(jnp.pad(whole, added), layout.stored(fitted.equation))

    return jax.jit(fit)(array)


# The likeliest tokens of a teacher that does not stay in memory (task.teacher_top_k): it computes them before the state
# of the run is made.


def give_logits(cfg: Config, corpus: Corpus, train_spec: TrainSpec, mesh: Mesh) -> Path | None:
    """Give the sequences of a corpus what the run's teacher says of them; return the folder that has it.

    Where the folder lacks a part, the teacher is loaded and computes it. The mesh must be the one in use. With several
    processes, each calls it. None, where the teacher is not on disk.

    Raises:
        UserError: the folder that task.teacher names is of other data; no room; see also `load_teacher`.
    """
    teacher = train_spec.teacher
    if not isinstance(teacher, OfflineTeacher):
        return None
    info, found = _describe_logits(cfg, corpus, teacher, train_spec.layout.compute), read_logits_info(teacher.source)
    if found is None:
        folder = locate_cached(cfg.loading.cache_dir, "teacher", hash_texts(info.model_dump_json()))
    else:
        folder = Path(teacher.source)
        _check_info(found, info, folder)
        info = found
    parts = _list_sequences(corpus, cfg.evaluation.num_sequences)
    files = [LogitFiles(folder, info, part, rows, name) for name, part, rows in parts]
    # Each host may have a cache of its own. All processes compute what one of them lacks.
    answers = peers.gather([each.missing for each in files], "logits of the teacher")
    missing = [sorted({*itertools.chain(*numbers)}) for numbers in zip(*answers, strict=True)]
    if any(missing):
        if teacher.model is None:
            name = next(each.name for each, numbers in zip(files, missing, strict=True) if numbers)
            raise UserError(
                f"{TEACHER}={folder} lacks logits of {name}: it was made of other documents, with another "
                f"evaluation.num_sequences than {cfg.evaluation.num_sequences}, or not to its end; make it with this "
                "data, or give the model that made it, which goes on"
            )
        peers.main_first(lambda: write_info(folder, info), "making the folder of the teacher's logits")
        _compute_missing(corpus, train_spec, mesh, folder, list(zip(files, missing, strict=True)))
    log.info("teacher: the run reads %s", folder)
    for each in files:
        peers.main_first(partial(each.verify, cfg.loading), "checking the teacher's logits")
        each.sequences.of_teacher = each.read
    return folder


def _list_sequences(corpus: Corpus, num_sequences: int) -> Iterator[tuple[str, Sequences, Sequence[int]]]:
    """Yield each list of sequences that the run reads, with its name and the numbers of those that are read."""
    for name, part in corpus.train.items():
        yield name, part, range(len(part))
    parts, first = corpus.held_out_parts, 0
    chosen = choose_evenly(sum(map(len, parts.values())), num_sequences)
    for name, part in parts.items():
        yield f"{name}, held out", part, [row - first for row in chosen if first <= row < first + len(part)]
        first += len(part)
    for name, part in corpus.sets.items():
        yield f"evaluation.sets.{name}", part, choose_evenly(len(part), num_sequences)


def _describe_logits(cfg: Config, corpus: Corpus, teacher: OfflineTeacher, compute: str) -> LogitsInfo:
    """Return what the files of this run are made of."""
    dtype = logits_dtype(compute)
    per_row = cfg.training.seq_len * count_position_bytes(teacher.top_k, teacher.num_rows, dtype)
    slots = next(iter(corpus.train.values())).slots
    return LogitsInfo(
        top_k=teacher.top_k,
        temperature=teacher.temperature,
        dtype=dtype,
        num_rows=teacher.num_rows,
        rows_per_piece=max(1, PIECE_BYTES // per_row),
        teacher=peers.decide(lambda: digest_teacher(teacher), "reading the teacher"),
        tokenizer=tokenizer_digest(corpus.tokenizer),
        seq_len=cfg.training.seq_len,
        packing=cfg.loading.packing,
        images="" if slots is None else slots.suffix,
    )


def _check_info(found: LogitsInfo, wanted: LogitsInfo, folder: Path) -> None:
    """Raise `UserError` for a folder of logits that were made otherwise than this run reads them."""
    keys = {
        "tokenizer": "tokenizer",
        "seq_len": "training.seq_len",
        "packing": "loading.packing",
        "temperature": "task.teacher_temperature",
        "images": "training.images_per_row",
    }
    for name, key in keys.items():
        values = getattr(found, name), getattr(wanted, name)
        if values[0] != values[1]:
            raise UserError(
                f"{TEACHER}={folder} was made with {key}={values[0]}, and this run has {values[1]}; set it so, or make "
                "the logits anew with the model that made these"
            )


def digest_teacher(teacher: OfflineTeacher) -> str:
    """Return a digest of the files of the model that makes the logits; empty where there is none."""
    if teacher.model is None:
        return ""
    if run := find_run(teacher.source, TEACHER):
        folder = find_checkpoint(run[0] / "checkpoints", run[1], TEACHER)
        paths = list_files(folder / "state")
    else:
        folder = find(teacher.source, INFO_FILES, key=TEACHER)
        paths = list(list_copied_files(folder, INFO_FILES + WEIGHTS))
    if not expand_home(teacher.source).is_dir():  # a checkpoint in a bucket, a snapshot of the hub: known by its name
        return hash_texts(f"{teacher.source} {folder.name}")
    return sample_files(folder, paths, NUM_BLOCKS)


def _compute_missing(
    corpus: Corpus, train_spec: TrainSpec, mesh: Mesh, folder: Path, missing: list[tuple[LogitFiles, list[int]]]
) -> None:
    """Compute the pieces that are missing of some parts, and write them on the first process of each host."""
    teacher, start_time = train_spec.teacher, time.perf_counter()
    assert isinstance(teacher, OfflineTeacher)
    num_rows = sum(len(files.rows_of(number)) for files, numbers in missing for number in numbers)
    num_bytes = sum(files.estimate_bytes(numbers) for files, numbers in missing)
    log.info(
        "teacher: %s computes its %d likeliest tokens for each learnt position of %s rows: about %s bytes in %s",
        teacher.source, teacher.top_k, f"{num_rows:,}", f"{num_bytes:,}", folder,
    )  # fmt: skip
    peers.together(lambda: check_disk_space(folder, num_bytes), "looking at the disk")
    params = load_teacher(train_spec, mesh, corpus.tokenizer)

    @jax.jit
    def compute(params: Any, rows: Any) -> list[jax.Array]:
        found = teacher.compute_top_k(params, rows, train_spec.cfg.training.loss_chunk_size)
        return [reshard(array, PartitionSpec()) for array in found]

    written, reported = 0, start_time
    for files, numbers in missing:
        for number in numbers:
            rows = _compute_rows(files, files.rows_of(number), compute, params, train_spec.batch.num_rows, mesh)
            if peers.first_of_host():
                files.write(number, rows)
            written += len(rows)
            if (now := time.perf_counter()) - reported > REPORT_EVERY_S:
                reported = now
                log.info("teacher: %s of %s rows, %.0f s so far", f"{written:,}", f"{num_rows:,}", now - start_time)
    size = sum(path.stat().st_size for path in list_files(folder))
    seconds = time.perf_counter() - start_time
    log.info("teacher: %s rows in %.1f s; %s has %s bytes", f"{num_rows:,}", seconds, folder, f"{size:,}")


def _compute_rows(
    files: LogitFiles, rows: list[int], compute: Any, params: Any, num_rows: int, mesh: Mesh
) -> list[TopK]:
    """Return what the teacher says of the learnt positions of some rows."""
    batches = []  # on the devices, which compute them while the next ones are read
    for start in range(0, len(rows), num_rows):
        # The last batch begins again at the first row: shapes stay the same.
        examples = [files.sequences[rows[(start + row) % len(rows)]] for row in range(num_rows)]
        computed = compute(params, put_rows(examples, range(num_rows), mesh))
        batches.append(([example["loss_mask"] > 0 for example in examples[: len(rows) - start]], computed))
    found: list[TopK] = []
    for masks, computed in batches:
        arrays = [np.asarray(array) for array in computed]
        found += [TopK(*(array[row][learnt] for array in arrays)) for row, learnt in enumerate(masks)]
    return found
