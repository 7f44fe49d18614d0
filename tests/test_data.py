"""Documents, tokens, packing, and an order that depends on nothing but the seed and the sample number."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import write_corpus
from harness import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix.compose import compose
from tunix.config import UserError
from tunix.data.batches import Packed, TrainBatches, held_out_batches
from tunix.data.corpus import Stream, load_corpus
from tunix.data.documents import read_documents
from tunix.data.tokenizer import bytes_per_word


def text_config(folder, *overrides):
    return compose([*SMALL, "data=text", f"data.paths=['{folder}']", *overrides]).config


def stream(lengths, seed=0) -> Stream:
    """Documents of these lengths; token k of the whole is k, so that samples can be told apart."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return Stream(np.arange(sum(lengths), dtype=np.uint32), starts.astype(np.int64))


def test_documents_are_split_by_file_and_the_split_is_stable(corpus):
    documents = read_documents(text_config(corpus, "data.held_out_fraction=0.25").data)
    names = [{d.name for d in part} for part in (documents.train, documents.held_out)]
    assert [len(n) for n in names] == [45, 15]
    assert not names[0] & names[1]
    again = read_documents(text_config(corpus, "data.held_out_fraction=0.25").data)
    assert again.digest == documents.digest


def test_a_changed_document_changes_the_fingerprint(tmp_path):
    folder = write_corpus(tmp_path / "c", 8)
    before = load_corpus(text_config(folder)).fingerprint
    assert load_corpus(text_config(folder)).fingerprint == before
    (folder / "003.txt").write_text("something else\n")
    assert load_corpus(text_config(folder)).fingerprint != before


def test_a_trained_tokenizer_is_cached_and_gives_the_text_back(corpus, cache_dir):
    one, two = load_corpus(text_config(corpus)), load_corpus(text_config(corpus))
    assert one.fingerprint == two.fingerprint
    assert list((cache_dir / "tokenizers").glob("*.json"))
    text = "def f(x):\n\treturn 'Ünïcödé 漢字 🙂' # \x00\r\n"
    assert one.tokenizer.decode(one.tokenizer.encode(text, add_special_tokens=False).ids) == text
    ids = one.tokenizer.encode(text, add_special_tokens=False).ids
    assert bytes_per_word(one.tokenizer)[ids].sum() == len(text.encode())
    assert bytes_per_word(one.tokenizer)[one.bos] == 0


def test_unigram_entropy_is_the_streams_own(corpus):
    loaded = load_corpus(text_config(corpus))
    counts = np.bincount(loaded.train.tokens)
    shares = counts[counts > 0] / counts.sum()
    size = sum(len(d.text.encode()) for d in read_documents(text_config(corpus).data).train)
    assert loaded.unigram_bits_per_byte == pytest.approx(-(shares * np.log2(shares)).sum() * counts.sum() / size)


@given(st.lists(st.integers(2, 40), min_size=1, max_size=12), st.integers(2, 24))
@settings(max_examples=60, deadline=None)
def test_packing(lengths, seq_len):
    """Every token once and in order; positions restart with each document; no target crosses into the next one."""
    source = stream(lengths)
    packed = Packed(source, seq_len)
    document = np.repeat(np.arange(len(lengths)), lengths)
    assert len(packed) == (sum(lengths) - 1) // seq_len
    for index in range(len(packed)):
        row = packed[index]
        where = np.arange(index * seq_len, (index + 1) * seq_len)
        assert (row["tokens"] == where).all()
        assert (row["targets"] == where + 1).all()
        assert (row["loss_mask"] == (document[where] == document[where + 1])).all()
        same = row["segment_ids"][:, None] == row["segment_ids"]
        assert (same == (document[where][:, None] == document[where])).all()
        assert row["segment_ids"].min() >= 1
        begins = np.array([max(index * seq_len, source.starts[d]) for d in document[where]])
        assert (row["positions"] == where - begins).all()


def batches(source, cfg, rows=None):
    """Batches as one of several processes reads them: `rows` of each microbatch."""
    mesh = SimpleNamespace(shape={"dp": 1, "fsdp": 4, "tp": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunix.data.batches.local_rows", lambda mesh, n: list(range(n)) if rows is None else rows(n))
        return TrainBatches(source, cfg, mesh, cfg.training.accumulation(4))


@given(
    lengths=st.lists(st.integers(5, 60), min_size=8, max_size=20), processes=st.sampled_from([1, 2, 4]),
    accumulation=st.sampled_from([1, 2, 3]), seed=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_no_sample_is_lost_or_repeated(lengths, processes, accumulation, seed):
    """Over processes, accumulation, epochs and ragged sizes: together the processes read each sample once an epoch."""
    cfg = compose([*SMALL, "training.seq_len=4", f"seed={seed}", f"training.gradient_accumulation_steps={accumulation}"]).config
    source = stream(lengths)
    count = len(Packed(source, 4))
    whole = batches(source, cfg)
    if count < whole.batch_size:
        return
    parts = [batches(source, cfg, lambda n, p=p: list(range(p * n // processes, (p + 1) * n // processes))) for p in range(processes)]
    first_tokens = []
    for start in range(0, 2 * count, whole.batch_size):
        together = np.concatenate([part.read(start)["tokens"] for part in parts], axis=1)
        assert (together == whole.read(start)["tokens"]).all()
        first_tokens += together[:, :, 0].reshape(-1).tolist()
    epochs = first_tokens[:count], first_tokens[count : 2 * count]
    assert all(sorted(epoch) == list(range(0, 4 * count, 4)) for epoch in epochs)
    assert count < 6 or epochs[0] != epochs[1]  # shuffled anew


def test_order_does_not_depend_on_accumulation_or_mesh():
    source = stream([50] * 20)
    orders = []
    for words in (["training.micro_batch_size=1", "training.gradient_accumulation_steps=4"], ["training.micro_batch_size=4"]):
        data = batches(source, compose([*SMALL, "training.seq_len=8", *words]).config)
        orders.append(np.concatenate([data.read(start)["tokens"][:, :, 0].reshape(-1) for start in range(0, 64, 16)]))
    assert (orders[0] == orders[1]).all()


def test_iteration_starts_anywhere():
    cfg = compose([*SMALL, "training.seq_len=8", "model.mesh_shape=[[8],[fsdp]]"]).config
    from tunix.mesh import build_mesh

    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        data = TrainBatches(stream([50] * 20), cfg, mesh, 1)
        far = 10**8 * data.batch_size
        for found, start in zip(data.iterate(far, 3), range(far, far + 3 * data.batch_size, data.batch_size), strict=True):
            assert (np.asarray(found["tokens"]) == data.read(start)["tokens"]).all()
        assert list(data.iterate(far, 0)) == []


@pytest.mark.parametrize("batch_size", [1, 3, 8, 64])
def test_the_held_out_set_is_the_same_for_every_batch_size(batch_size):
    source = stream([50] * 20)
    found = held_out_batches(source, 8, 10, batch_size, list(range(batch_size)))
    real = found["loss_mask"].sum(-1) > 0
    assert real.sum() == 10
    first = found["tokens"][..., 0][real]
    assert first.tolist() == [index * len(Packed(source, 8)) // 10 * 8 for index in range(10)]


@pytest.mark.parametrize(
    ("files", "words", "message"),
    [
        ({}, [], "no file that ends in .txt, .md, .py (data.extensions)"),
        ({"a.txt": b"", "b.txt": b""}, [], "no document with text in it (2 empty, 0 not UTF-8)"),
        ({"a.txt": b"\xff\xfe"}, [], "no document with text in it (0 empty, 1 not UTF-8)"),
        ({"a.txt": b"\xff\xfe", "b.txt": b"b"}, ["data.decode_errors=error"], "a.txt is not UTF-8 (byte 0); data.decode_errors=skip"),
        ({"a.txt": b"alone"}, [], "all 1 documents are held out"),
        ({"a.json": b"{}"}, [], "no file that ends in"),
    ],
)
def test_corpora_that_cannot_be_used(files, words, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load_corpus(text_config(tmp_path, *words))
    assert message in str(error.value)


def test_files_that_are_not_utf8_are_counted_or_replaced(tmp_path, caplog):
    write_corpus(tmp_path, 4)
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    assert read_documents(text_config(tmp_path).data).skipped == ["bad.txt"]
    replaced = read_documents(text_config(tmp_path, "data.decode_errors=replace", "data.held_out_fraction=0").data)
    assert "caf\ufffd" in [d.text for d in replaced.train]


def test_missing_paths_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        read_documents(text_config(tmp_path / "nowhere").data)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "target")
    with pytest.raises(UserError, match="no file that ends in"):  # a dangling link is no file
        read_documents(text_config(tmp_path).data)


def test_a_corpus_smaller_than_one_batch(tmp_path):
    folder = write_corpus(tmp_path / "c", 4, words=10)
    cfg = text_config(folder, "training.global_batch_size=512", "model.mesh_shape=[[1],[fsdp]]")
    with pytest.raises(UserError, match="one step needs 512; add data or make the batch or seq_len smaller"):
        batches(load_corpus(cfg).train, cfg)


def test_a_cache_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="data.cache_dir: cannot write"):
        load_corpus(text_config(corpus, f"data.cache_dir={tmp_path}/file/cache"))


def test_tokenizers_from_files(corpus, tmp_path):
    loaded = load_corpus(text_config(corpus))
    path = tmp_path / "tokenizer.json"
    loaded.tokenizer.save(str(path))
    again = load_corpus(text_config(corpus, f"tokenizer.path={path}"))
    assert again.fingerprint == loaded.fingerprint
    with pytest.raises(UserError, match="the tokenizer has 300 words, more than model.vocab_size=256"):
        load_corpus(text_config(corpus, f"tokenizer.path={path}", "model.vocab_size=256"))
    with pytest.raises(UserError, match="tokenizer.bos_token=<s> is not a token of"):
        load_corpus(text_config(corpus, f"tokenizer.path={path}", "tokenizer.bos_token='<s>'"))
    path.write_text(json.dumps({"no": "tokenizer"}))
    with pytest.raises(UserError, match=r"cannot be read as a tokenizer.json"):
        load_corpus(text_config(corpus, f"tokenizer.path={path}"))
