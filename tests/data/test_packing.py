"""Sequences made of documents, and an order that depends on nothing but the seed and the sample number."""

import errno
import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.harness import SMALL

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.data.batches import TrainBatches, read_held_out
from tunix.data.dataset import load_corpus
from tunix.data.packing import Sequences
from tunix.data.shards import OPEN_SHARDS, Arrays, Stream, map_array
from tunix.sharding.table import axis_names
from tunix.training.choices import build_mesh

PACKINGS = ["concat", "best_fit", "pad"]


def stream(lengths, num_shards=1, answers=False) -> Stream:
    """Documents of these lengths in some shards; token k of the whole is k, so that samples can be told apart."""
    shards, first = [], 0
    for part in np.array_split(np.array(lengths, np.int64), num_shards):
        tokens = np.arange(first, first + part.sum(), dtype=np.uint32)
        shards.append(Arrays(tokens, np.cumsum(part) - part, tokens % 3 == 0 if answers else None))
        first += part.sum()
    sizes = [(len(shard.tokens), len(shard.starts)) for shard in shards]
    return Stream(sizes, shards.__getitem__, f"{hash((tuple(lengths), num_shards)):x}")


def sequences(lengths, seq_len, packing, cache_dir, **options) -> Sequences:
    return Sequences(stream(lengths, **options), seq_len, packing, cache_dir / "packing_tests")


lengths_of_documents = st.lists(st.integers(2, 40), min_size=1, max_size=12)


@given(lengths_of_documents, st.integers(2, 24))
@settings(max_examples=60, deadline=None)
def test_concat(cache_dir, lengths, seq_len):
    """Every token once and in order; positions restart with each document; no target crosses into the next one."""
    packed = sequences(lengths, seq_len, "concat", cache_dir)
    document, starts = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths
    assert len(packed) == (sum(lengths) - 1) // seq_len
    for index in range(len(packed)):
        row = packed[index]
        where = np.arange(index * seq_len, (index + 1) * seq_len)
        assert (row["tokens"] == where).all()
        assert (row["targets"] == where + 1).all()
        assert (row["loss_mask"] == (document[where] == document[where + 1])).all()
        same = row["segment_ids"][:, None] == row["segment_ids"]
        assert (same == (document[where][:, None] == document[where])).all()
        assert row["segment_ids"].min() == 1
        begin_offsets = np.array([max(index * seq_len, starts[d]) for d in document[where]])
        assert (row["positions"] == where - begin_offsets).all()


@given(lengths_of_documents, st.integers(2, 24), st.sampled_from(["best_fit", "pad"]), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_documents_stay_whole(cache_dir, lengths, seq_len, packing, num_shards):
    """Each token of a document is predicted once, in one piece unless the document is longer than a sequence."""
    packed = sequences(lengths, seq_len, packing, cache_dir, num_shards=num_shards)
    document = np.repeat(np.arange(len(lengths)), lengths)
    predicted, pieces = [], []
    for row in map(packed.__getitem__, range(len(packed))):
        real = row["segment_ids"] > 0
        assert (row["loss_mask"] == real).all()
        assert not row["tokens"][~real].any()
        assert (np.diff(row["segment_ids"][real]) >= 0).all()
        for segment in range(1, row["segment_ids"].max() + 1):
            here = row["segment_ids"] == segment
            assert (row["targets"][here] == row["tokens"][here] + 1).all()
            assert (row["positions"][here] == np.arange(here.sum())).all()
            assert len(set(document[row["tokens"][here]])) == 1
            assert document[row["targets"][here][-1]] == document[row["tokens"][here][0]]
            pieces.append(int(here.sum()))
            predicted += row["targets"][here].tolist()
        assert packing == "best_fit" or row["segment_ids"].max() == 1
    first_tokens = set((np.cumsum(lengths) - lengths).tolist())
    assert sorted(predicted) == [token for token in range(sum(lengths)) if token not in first_tokens]
    assert len(pieces) == sum(-(-(length - 1) // seq_len) for length in lengths)
    assert packed.num_tokens == len(predicted)
    if packing == "best_fit":  # first-fit and best-fit decreasing need at most 11/9 of the fewest, and one
        assert len(packed) <= 11 / 9 * -(-len(predicted) // seq_len) + num_shards + len(lengths) / 2


def test_best_fit_fills_up_what_it_can(cache_dir):
    packed = sequences([7, 5, 4, 3, 3, 2], 6, "best_fit", cache_dir)  # 6, 4, 3, 2, 2, 1 predictions
    assert [int(packed[i]["segment_ids"].max()) for i in range(len(packed))] == [1, 2, 3]
    assert packed.utilisation == 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_only_answers_are_learnt(cache_dir, packing):
    """Token k is part of an answer where 3 divides k: the mask is 1 where such a token is the target."""
    packed = sequences([9, 30, 5], 8, packing, cache_dir, answers=True)
    for row in map(packed.__getitem__, range(len(packed))):
        learnt = row["loss_mask"] > 0
        assert (row["targets"][learnt] % 3 == 0).all()
        inside = row["segment_ids"] > 0
        assert packing == "concat" or (learnt == (inside & (row["targets"] % 3 == 0))).all()


def test_a_document_with_a_label_may_fill_a_sequence(cache_dir):
    """Of 4, 5 and 6 tokens, without the one that marks the end, only the last is longer than a sequence of 5."""
    lengths = np.array([5, 6, 7])
    ends = np.zeros(18, bool)
    ends[np.cumsum(lengths) - 1] = True
    labels = np.arange(1, 4, dtype=np.float32)
    shard = Arrays(np.arange(18, dtype=np.uint32), np.cumsum(lengths) - lengths, ends, label_values=labels)
    packed = Sequences(Stream([(18, 3)], [shard].__getitem__, "with labels"), 5, "pad", cache_dir / "packing_tests")
    assert (len(packed), packed.num_left_out, packed.num_tokens) == (2, 1, 9)
    assert [row["label_values"].tolist() for row in packed] == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 2]]


@pytest.mark.nightly
@pytest.mark.slow
def test_best_fit_on_the_default_corpus():
    """No document of at most T + 1 tokens is cut, and 97 % of what the model reads is no padding."""
    corpus = load_corpus(compose(["loading.packing=best_fit", "training.seq_len=1024"]).config)
    (packed,) = corpus.train.values()
    assert packed.utilisation >= 0.97
    rows = [packed[index]["segment_ids"] for index in range(0, len(packed), 50)]
    assert np.mean([(row > 0).mean() for row in rows]) >= 0.97
    assert "best_fit" in corpus.summary


def batches(packed, cfg, rows=None) -> TrainBatches:
    """Batches as one of several processes reads them: `rows` of each microbatch."""
    mesh = SimpleNamespace(shape=dict.fromkeys(axis_names(), 1) | {"fsdp": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunix.data.batches.local_rows", lambda mesh, n: list(range(n)) if rows is None else rows(n))
        return TrainBatches({"it": packed}, cfg, cfg.training, mesh)


@given(
    lengths=st.lists(st.integers(5, 60), min_size=8, max_size=20), processes=st.sampled_from([1, 2, 4]),
    accumulation=st.sampled_from([1, 2, 3]), seed=st.integers(0, 3), packing=st.sampled_from(PACKINGS),
    workers=st.sampled_from([1, 3]), num_shards=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_no_sample_is_lost_or_repeated(cache_dir, lengths, processes, accumulation, seed, packing, workers, num_shards):
    """Over processes, workers, accumulation, epochs and ragged sizes: together the processes read each sample once an
    epoch, in an order that is the same for all of these."""
    words = [f"training.gradient_accumulation_steps={accumulation}", f"loading.read_threads={workers}", f"seed={seed}"]
    cfg = compose([*SMALL, "training.seq_len=4", *words]).config
    packed = sequences(lengths, 4, packing, cache_dir, num_shards=num_shards)
    count = len(packed)
    assume(count >= 4 * accumulation)  # the sequences of one step, of 4 data shards
    whole = batches(packed, cfg)
    parts = [
        batches(packed, cfg, lambda n, p=p: list(range(p * n // processes, (p + 1) * n // processes)))
        for p in range(processes)
    ]
    steps = -(-2 * count // whole.batch_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunix.data.batches.to_global", lambda batch, mesh: batch)
        read = [list(part.iterate(range(0, steps * part.batch_size, part.batch_size))) for part in parts]
    first_tokens = []
    for step in range(steps):
        together = np.concatenate([part[step]["tokens"] for part in read], axis=1)
        assert (together == whole.read(step * whole.batch_size)["tokens"]).all()
        first_tokens += together[:, :, 0].reshape(-1).tolist()
    epochs = first_tokens[:count], first_tokens[count : 2 * count]
    expected = sorted(int(packed[index]["tokens"][0]) for index in range(count))
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert count < 6 or epochs[0] != epochs[1]  # shuffled anew


def test_order_does_not_depend_on_accumulation_or_mesh(cache_dir):
    packed = sequences([50] * 20, 8, "concat", cache_dir)
    orders = []
    for words in (
        ["training.micro_batch_size=1", "training.gradient_accumulation_steps=4"],
        ["training.micro_batch_size=4"],
    ):
        data = batches(packed, compose([*SMALL, "training.seq_len=8", *words]).config)
        orders.append(np.concatenate([data.read(start)["tokens"][:, :, 0].reshape(-1) for start in range(0, 64, 16)]))
    assert (orders[0] == orders[1]).all()


def test_iteration_starts_anywhere(cache_dir):
    cfg = compose([*SMALL, "training.seq_len=8", "model.mesh_shape=[[8],[fsdp]]"]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        data = TrainBatches({"it": sequences([50] * 20, 8, "concat", cache_dir)}, cfg, cfg.training, mesh)
        far = 10**8 * data.batch_size
        starts = range(far, far + 3 * data.batch_size, data.batch_size)
        for found, start in zip(data.iterate(starts), starts, strict=True):
            assert (np.asarray(found["tokens"]) == data.read(start)["tokens"]).all()
        assert list(data.iterate([])) == []


@pytest.mark.parametrize("batch_size", [1, 3, 8, 64])
def test_the_held_out_set_is_the_same_for_every_batch_size(cache_dir, batch_size):
    packed = sequences([50] * 20, 8, "concat", cache_dir)
    found = read_held_out(packed, 10, batch_size, list(range(batch_size)))
    real = found["loss_mask"].sum(-1) > 0
    assert real.sum() == 10
    first = found["tokens"][..., 0][real]
    assert first.tolist() == [index * len(packed) // 10 * 8 for index in range(10)]


def test_what_fills_up_a_held_out_batch_is_no_token_of_an_image():
    found = read_held_out([{"tokens": np.array([7]), "image_index": np.array([0])}], 1, 2, [0, 1])
    assert {name: leaf.tolist() for name, leaf in found.items()} == {
        "tokens": [[[7], [0]]],
        "image_index": [[[0], [-1]]],
    }


def test_a_corpus_smaller_than_one_batch(cache_dir):
    cfg = compose([*SMALL, "training.global_batch_size=512", "model.mesh_shape=[[4],[fsdp]]"]).config
    with pytest.raises(UserError, match="one step needs 512; add data or make the batch or seq_len smaller"):
        batches(sequences([50] * 20, 32, "concat", cache_dir), cfg)


def test_few_files_are_open_at_one_time(cache_dir, tmp_path, monkeypatch):
    """Two splits of 80 shards had 640 files open, and the limit of most systems, 1,024, ended runs on large corpora."""
    files = [tmp_path / "tokens.npy", tmp_path / "starts.npy"]
    for path, numbers in zip(files, ([*range(20)], [0, 9]), strict=True):
        np.save(path, numbers)

    def open_shard(split, number):
        return Arrays(*map(map_array, files))

    num_before = len(os.listdir("/dev/fd"))
    for split in ("train", "held_out"):
        part = Stream([(20, 2)] * 80, partial(open_shard, split), "80 shards")
        packed = Sequences(part, 8, "best_fit", cache_dir / "packing_tests")
        assert [packed[index]["tokens"][0] for index in range(4)] == [0, 9, 17, 0]
        assert len([packed[index] for index in range(len(packed))]) == 240
    assert len(os.listdir("/dev/fd")) - num_before <= 4 * OPEN_SHARDS
    monkeypatch.setattr(
        np, "load", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files"))
    )
    with pytest.raises(UserError, match="Too many open files; raise the limit of open files"):
        map_array(files[0])


def test_threads_open_shards_at_the_same_time(tmp_path):
    """Runs of more than 64 shards ended after some steps by "SystemError: AST constructor recursion depth mismatch".

    The error needs a Python before 3.11.8 or 3.12.2, and a thread that is stopped while it parses: jax runs Python code
    whenever garbage is collected.
    """
    np.save(tmp_path / "tokens.npy", np.arange(9))
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20, 10**6)
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            arrays = [*pool.map(map_array, [tmp_path / "tokens.npy"] * 2000)]
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert {len(array) for array in arrays} == {9}
