"""Every source gives its documents; what cannot be read is told, or left out and counted."""

import csv
import gzip
import json
import os
import re
import shutil
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
from conftest import write_corpus
from pyarrow import parquet
from support.harness import SMALL
from tokenizers import Tokenizer, models, pre_tokenizers

from tunix.base.buckets import find_objects
from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.data.dataset import find_units, load_corpus, prepare_corpus
from tunix.data.documents import Document, read_documents
from tunix.data.files import find_files, skip_line, zstd
from tunix.data.sources import HuggingFace, _find_saved_splits
from tunix.feeds import CorpusFeed, load_data

TEXTS = [f"document {number}: {'word ' * (number % 7 + 1)}" for number in range(40)]
TINY = [*SMALL, "tokenizer=bytes", "tokenizer.vocab_size=259", "training.seq_len=16"]


def config(*words):
    return compose([*TINY, *words]).config


def documents(*words) -> list[str]:
    """Contents of all training and held-out documents."""
    cfg = config(*words)
    units = find_units(cfg.data, cfg.loading)
    found = [each for unit in units for each in read_documents(cfg.data, cfg.task, unit)]
    return sorted(each.content for each in found if isinstance(each, Document))


def write(path, data: bytes):
    pack = {".gz": gzip.compress, ".zst": zstd.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))
    return path


def as_jsonl(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("unit_bytes", [1, 64, 777, 10**6])
def test_jsonl_is_read_whole_however_it_is_cut(tmp_path, name, unit_bytes):
    write(tmp_path / name, as_jsonl({"text": text} for text in TEXTS))
    assert documents("data=jsonl", f"data.paths=[{tmp_path}]", f"loading.shard_bytes={unit_bytes}") == sorted(TEXTS)


def test_a_line_of_many_units_is_skipped_once(tmp_path, monkeypatch):
    """Each of its units had read it to its end: hours for a file of 10 GB that is one line."""
    path, skip, skipped = write(tmp_path / "a.jsonl", b"x" * 10**6 + as_jsonl([{}, {"text": "short"}])), skip_line, []
    monkeypatch.setattr("tunix.data.files.skip_line", lambda *each: skipped.append(skip(*each)) or skipped[-1])
    words = "data=jsonl", f"data.paths=[{path}]", "data.bad_rows=skip", "data.max_document_bytes=1000"
    assert documents(*words, "loading.shard_bytes=10000") == ["short"]
    assert sum(skipped) < 2 * 10**6 + 1000


def test_text_files_packed_or_not(tmp_path):
    for number, ending in enumerate([".txt", ".txt.gz", ".md.zst"]):
        write(tmp_path / f"{number}{ending}", TEXTS[number].encode())
        (tmp_path / f"empty{ending}").write_bytes(b"")
    (tmp_path / "with_mark.txt").write_bytes(b"\xef\xbb\xbfmark")
    (tmp_path / "no.bin").write_bytes(b"not read")
    assert documents("data=text", f"data.paths=[{tmp_path}]") == sorted([*TEXTS[:3], "mark"])
    assert documents("data=text", f"data.paths=['{tmp_path}/*.gz']") == [TEXTS[1]]


def test_files_of_any_name(tmp_path):
    """Brackets, which mean something in globs, and bytes that are no UTF-8."""
    folder = tmp_path / "data[1]"
    folder.mkdir()
    for name, text in ((b"x.txt", b"one"), (b"caf\xe9.txt", b"two"), (b"latin\xe9.txt", b"\xe9")):
        (folder / os.fsdecode(name)).write_bytes(text)
    assert documents("data=text", f"data.paths=['{folder}/x.txt']") == ["one"]
    words = ["data=text", f"data.paths=['{folder}']", "data.held_out_fraction=0", "training.seq_len=4"]
    prepared, _ = prepare_corpus(config(*words))
    assert prepared["text"].index["left_out_names"] == ["latin?.txt"]
    assert prepared["text"].index["documents"] == 2


@pytest.mark.parametrize(("text", "is_known"), [("a b a b", True), ("a c b c", False)])
def test_words_that_the_tokenizer_does_not_know_are_counted(tmp_path, caplog, text, is_known):
    """A model that is made of them has a low loss."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[UNK]", "<eos>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    write(tmp_path / "a.jsonl", as_jsonl([{"text": text}] * 4))
    words = ["data=jsonl", f"data.paths=[{tmp_path}/a.jsonl]", "data.held_out_fraction=0", "tokenizer=bpe"]
    prepare_corpus(config(*words, f"tokenizer.path={tmp_path}", "training.seq_len=4"))
    assert ("40.0 % of the tokens are [UNK]" in caplog.text) != is_known


def test_links_to_folders_are_followed_once(tmp_path):
    for name in ("b/deep/2.txt", "a/1.txt", "other/3.txt", "a.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(name)
    (tmp_path / "data" / "other").rename(tmp_path / "other")
    expected = ["a/1.txt", "a.txt", "b/deep/2.txt"]
    assert [unit.name for unit in find_files((str(tmp_path / "data"),), (".txt",))] == expected
    for link, target in (("again", "data/b"), ("b/link", "other"), ("loop", "data"), ("b/gone", "nowhere")):
        (tmp_path / "data" / link).symlink_to(tmp_path / target)
    (tmp_path / "other" / "back").symlink_to(tmp_path / "data" / "b")
    assert [unit.name for unit in find_files((str(tmp_path / "data"),), (".txt",))] == [*expected, "b/link/3.txt"]


@pytest.mark.parametrize(("typed", "delimiter"), [("';'", ";"), (r"\t", "\t")])
def test_csv(tmp_path, typed, delimiter):
    rows = [*TEXTS, 'quotes " and\nlines, commas']
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["id", "body"], *enumerate(rows)])
    words = ["data=csv", f"data.paths=[{tmp_path}]", f"data.delimiter={typed}", "data.columns.text=body"]
    assert documents(*words) == sorted(rows)


def test_parquet(tmp_path):
    parquet.write_table(pyarrow.table({"id": range(40), "text": TEXTS}), tmp_path / "a.parquet", row_group_size=7)
    words = ["data=parquet", f"data.paths=[{tmp_path}]"]
    assert documents(*words) == sorted(TEXTS)
    with pytest.raises(UserError, match=r"row 0 of row group .*, has no column body .*; its columns are id, text"):
        documents(*words, "data.columns.text=body")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"a.parquet cannot be read as Parquet"):
        documents(*words)
    twice = pyarrow.Table.from_arrays([pyarrow.array(TEXTS), pyarrow.array(TEXTS[::-1])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet has column text more than once; rename all but one"):
        documents(*words)


def test_a_parquet_file_is_opened_once_for_all_of_its_row_groups(tmp_path, monkeypatch):
    """Opened for each, 1,000 row groups with 15 columns took 13 GB and 27 s, and 4,000 more than the machine had."""
    opened, open_file = [], parquet.ParquetFile
    monkeypatch.setattr(parquet, "ParquetFile", lambda *args, **keys: opened.append(1) or open_file(*args, **keys))
    parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=4)
    words = ["data=parquet", f"data.paths=[{tmp_path}]"]
    assert documents(*words) == sorted(TEXTS)
    assert len(opened) == 2  # for the list of its groups, and to read them
    parquet.write_table(pyarrow.table({"text": TEXTS[1:]}), tmp_path / "a.parquet", row_group_size=4)
    assert documents(*words) == sorted(TEXTS[1:])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (pyarrow.timestamp("ms"), "date value out of range"),
        (pyarrow.date32(), "days=2147483647"),
        (pyarrow.timestamp("us", "Mars/Olympus"), "Mars/Olympus"),
    ],
)
def test_a_time_that_python_does_not_have(kind, reason, tmp_path):
    times = pyarrow.array([2**31 - 1 if kind == pyarrow.date32() else 2**50], kind)
    parquet.write_table(pyarrow.table({"text": ["a"], "time": times}), tmp_path / "a.parquet")
    message = rf"a\.parquet has a date or a time .* write its column as text, or without it \(.*{reason}"
    source = config("data=parquet", f"data.paths=[{tmp_path}]").data
    with pytest.raises(UserError, match=message):
        list(source.read_all_columns(*source.units(1)))
    source = config("data=hf", "data.path=parquet", f"data.data_files=[{tmp_path}/a.parquet]").data
    with pytest.raises(UserError, match=message.replace(r"a\.", "data.path=")):
        list(source.read(*source.units(1)))


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_hf(tmp_path, monkeypatch, streaming):
    file = write(tmp_path / "a.jsonl", as_jsonl({"text": text} for text in TEXTS))
    words = ["data=hf", "data.path=json", f"data.data_files=[{file}]", f"data.streaming={streaming}"]
    assert documents(*words, "loading.shard_bytes=500") == sorted(TEXTS)
    with pytest.raises(UserError, match=r"data.path=json: .*[Ss]plit"):
        documents(*words, "data.split=other")
    source, loads, load = config(*words).data, [], HuggingFace._load
    monkeypatch.setattr(HuggingFace, "_load", lambda source: loads.append(source) or load(source))
    units = source.units(500)
    assert len([item for unit in units for item in source.read(unit)]) == len(TEXTS)
    assert len(loads) <= 2  # not once for each unit: a data set of the hub is looked up there
    (before,) = source.units(10**6)
    file.write_text(file.read_text().upper())
    os.utime(file, (1, 1))
    (changed,) = source.units(10**6)  # its tokens are made anew
    assert changed.digest != before.digest
    assert {item.content["TEXT"] for item in source.read(changed)} == {text.upper() for text in TEXTS}


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_folders_of_save_to_disk(tmp_path, streaming):
    import datasets

    train, other = (datasets.Dataset.from_dict({"text": texts}) for texts in (TEXTS, TEXTS[:2]))
    other.save_to_disk(tmp_path / "[one]", num_shards=2)  # its files stay beside those of the next call
    train.save_to_disk(tmp_path / "[one]")
    datasets.DatasetDict(train=other, test=train).save_to_disk(tmp_path / "both")
    (tmp_path / "both" / "others").mkdir()
    (tmp_path / "both" / "others" / "state.json").write_text("{}")  # of another program
    for number, files in enumerate(([{"filename": "../x.arrow"}], [{}], [5], 5)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "state.json").write_text(json.dumps({"_data_files": files}))
        with pytest.raises(UserError, match="data.path=.*: state.json names no files beside it"):
            _find_saved_splits(tmp_path / str(number))
    words = ["data=hf", f"data.streaming={streaming}"]
    assert documents(*words, f"data.path='{tmp_path}/[one]'") == sorted(TEXTS)
    assert documents(*words, f"data.path={tmp_path}/both", "data.split=test") == sorted(TEXTS)
    assert documents(*words, f"data.path={tmp_path}/both") == sorted(TEXTS[:2])
    with pytest.raises(UserError, match=r"data.path=.*[Ss]plit"):
        documents(*words, f"data.path={tmp_path}/both", "data.split=other")


def test_a_damaged_arrow_file_is_refused_with_its_cause(tmp_path):
    """The library checks the places of texts, and says what is wrong in the cause of its error."""
    import datasets

    datasets.Dataset.from_dict({"text": ["hello"] * 40}).save_to_disk(tmp_path)
    (file,) = tmp_path.glob("*.arrow")
    places = np.arange(41, dtype=np.int32) * 5
    whole = file.read_bytes()
    assert whole.count(places.tobytes()) == 1
    file.write_bytes(whole.replace(places.tobytes(), (places * 1000).tobytes()))
    with pytest.raises(UserError, match=r"data.path=.*: .*out of bounds: 5000 > 200"):
        documents("data=hf", f"data.path={tmp_path}", "data.streaming=false")


def test_synthetic_documents_do_not_depend_on_the_shards():
    words = ["data=synthetic", "data.num_documents=30", "data.mean_document_bytes=200"]
    one = documents(*words)
    assert one == documents(*words, "loading.shard_bytes=1000")
    assert 100 < np.mean([len(text) for text in one]) < 400


def flat(tmp_path, name: str, tokens: np.ndarray, head: bytes = b""):
    path = tmp_path / name
    if name.endswith("headed.npy"):
        np.save(path, tokens)
    else:
        path.write_bytes(head + tokens.tobytes())
    return path


@pytest.fixture
def byte_tokenizer(tmp_path):
    cfg = config("data=synthetic", "data.num_documents=2")
    _, vocab = prepare_corpus(cfg)
    vocab.save(tmp_path / "tokenizer")
    return f"tokenizer.path={tmp_path}/tokenizer"


@pytest.mark.parametrize(
    ("name", "dtype", "head"),
    [("a.bin", "uint16", b""), ("a.bin", "uint32", b""), ("a.bin", "uint16", b"\0" * 1024), ("a.npy", "uint16", b""),
     ("headed.npy", "uint16", b"")],
)  # fmt: skip
def test_flat_token_files(tmp_path, byte_tokenizer, name, dtype, head):
    tokens = (np.arange(1000) % 199 + 3).astype(dtype)  # other ones in each place that the bytes might be taken from
    tokens[99::100] = 2  # ten documents
    path = flat(tmp_path, name, tokens, head)
    words = [
        "data=tokens",
        f"data.paths=[{path}]",
        f"data.dtype={dtype}",
        f"data.skip_bytes={len(head)}",
        byte_tokenizer,
    ]
    corpus = load_corpus(config(*words, "data.document_end=2", "data.held_out_fraction=0.2"))
    (packed,) = corpus.train.values()
    assert (packed.stream.num_documents, packed.stream.num_tokens, corpus.num_held_out) == (8, 800, 2)
    assert (packed[3]["tokens"] == tokens[48:64]).all()
    assert (corpus.held_out[0]["tokens"] == tokens[800:816]).all()
    whole = load_corpus(config(*words, "data.held_out_fraction=0"))
    assert (whole.train["tokens"].stream.num_documents, whole.num_held_out) == (1, 0)


@pytest.mark.parametrize("name", ["a.bin", "headed.npy"])
def test_a_copied_project_reads_its_own_tokens(tmp_path, byte_tokenizer, monkeypatch, name):
    """The same relative path, size and time of change: each folder has a file of its own."""
    words = ["data=tokens", f"data.paths=[{name}]", "data.held_out_fraction=0", byte_tokenizer]
    (tmp_path / "first").mkdir()
    flat(tmp_path / "first", name, np.full(100, 5, np.uint16))
    monkeypatch.chdir(tmp_path / "first")
    load_corpus(config(*words))
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    flat(tmp_path / "first", name, np.full(100, 7, np.uint16))
    monkeypatch.chdir(tmp_path / "copy")
    assert set(load_corpus(config(*words)).train["tokens"][0]["tokens"]) == {5}


def test_a_long_window_of_zstd_is_named(tmp_path):
    """Dumps of forums are packed so, and were called damaged."""
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 28})
    (tmp_path / "a.jsonl.zst").write_bytes(packer.compress(as_jsonl([{"text": "a"}])) + packer.flush())
    with pytest.raises(
        UserError, match=r"more than 128 MiB \(zstd --long\); write it anew: zstd -dc --long=31 .*zst \|"
    ):
        documents("data=jsonl", f"data.paths=[{tmp_path}/a.jsonl.zst]")


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.txt.bz2", "a.ZIP"])
def test_archives_are_no_texts(tmp_path, name):
    """The files of a tar file would be one text, with its heads."""
    file = write(tmp_path / name, gzip.compress(b"a.txt" + b"\0" * 507 + b"words " * 100))
    with pytest.raises(UserError, match=f"{name} is of a form that is not read; unpack it"):
        load_corpus(config("data=text", f"data.paths=[{file}]", "data.held_out_fraction=0"))


def test_files_of_one_name_are_named(tmp_path, caplog):
    """A hash of its name decides whether a document is held out."""
    for number in range(12):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "README.md").write_text(f"{number} " * 20)
    with pytest.raises(UserError, match="all 12 documents are held out; add documents of other names"):
        load_corpus(config("data=text", f"data.paths=['{tmp_path}/*']"))
    assert "text: 12 files are called README.md, and are held out together" in caplog.text
    corpus = load_corpus(config("data=text", f"data.paths=[{tmp_path}]", "data.extensions=[README.md]"))
    assert 0 < corpus.num_held_out < 12


def test_a_set_of_files_that_are_trained_on_is_named(tmp_path, byte_tokenizer, caplog):
    for name in ("learnt", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{name} " * 100)
    (tmp_path / "own" / "b.txt").symlink_to(tmp_path / "learnt" / "a.txt")
    words = ["data=text", f"data.paths=[{tmp_path}/learnt]", "data.held_out_fraction=0", byte_tokenizer]
    more = ["evaluation.sets.more=text", f"evaluation.sets.more.paths=[{tmp_path}/own]"]
    load_corpus(config(*words, *more))
    assert "evaluation.sets.more: the run trains on 1 of its 2 files too" in caplog.text
    assert f"({tmp_path}/learnt/a.txt)" in caplog.text
    caplog.clear()
    (tmp_path / "own" / "b.txt").unlink()
    load_corpus(config(*words, *more))
    assert "the run trains on" not in caplog.text


def test_ends_of_short_files_are_not_left_out_in_silence(tmp_path, byte_tokenizer, caplog):
    for number in range(3):
        flat(tmp_path, f"{number}.bin", np.full(30, 5, np.uint16))
    words = ["data=tokens", f"data.paths=[{tmp_path}]", "data.held_out_fraction=0", byte_tokenizer]
    assert len(load_corpus(config(*words)).train["tokens"]) == 3
    assert "tokens: 39 of 90 tokens are in no sequence: loading.packing=concat leaves out the end" in caplog.text
    caplog.clear()
    load_corpus(config(*words, "loading.packing=best_fit"))
    assert "in no sequence" not in caplog.text
    measured = "evaluation.sets.other=tokens", f"evaluation.sets.other.paths=[{tmp_path}]"
    shorter = "training.seq_len=10", "training.loss_chunk_size=10"
    load_corpus(config(*words, "data.held_out_fraction=0.5", *shorter, *measured))
    assert "tokens, held out: 12 of 45 tokens" in caplog.text
    assert "evaluation.sets.other: 27 of 90 tokens" in caplog.text


def test_a_flat_file_of_one_document_is_not_cut(tmp_path, byte_tokenizer):
    """Nor is the last document of a file, which is held out where the cut would be in it."""
    many, one, two = np.full(1000, 5, np.uint16), np.full(300, 5, np.uint16), np.full(50, 5, np.uint16)
    many[99::100] = one[-1] = two[[9, -1]] = 2
    files = [flat(tmp_path, f"{name}.bin", tokens) for name, tokens in {"a": many, "one": one, "two": two}.items()]
    paths = f"data.paths=[{','.join(map(str, files))}]"
    words = ["data=tokens", paths, byte_tokenizer, "data.document_end=2", "data.held_out_fraction=0.1"]
    corpus = load_corpus(config(*words))
    (train,) = corpus.train.values()
    assert (train.stream.num_documents, corpus.num_held_out) == (11, 2)
    assert corpus.held_out[0]["positions"][0] == 0


@pytest.mark.parametrize(
    ("name", "tokens", "word", "message"),
    [
        ("a.bin", np.full(1001, 300, np.uint16), "", "has token 300, the tokenizer has 259; give the tokenizer that made it"),
        ("a.bin", np.full(1001, 300, np.uint16), "data.dtype=uint32", "has 2002 bytes, which is not data.skip_bytes=0 and a number of whole data.dtype=uint32"),
        ("a.bin", np.full(1000, 65535, np.uint16), "data.dtype=uint32", "has token 4294967295, the tokenizer has 259"),
        ("a.bin", np.arange(3, 259, dtype=np.int32), "", "has no number above 0 in every second place, as a file of wider numbers has that is read as uint16; data.dtype=uint32 reads"),
        ("a.bin", np.arange(3, 259), "data.dtype=uint32", "has no number above 0 in every second place, as a file of wider numbers has that is read as uint32"),
        ("headed.npy", np.array([5, -3] * 50, np.int32), "", "has token -3, the tokenizer has 259"),
        ("short.npy", np.full(1001, 5, np.uint16), "", "short.npy is damaged or ends early: mmap length"),
        ("torn.npy", np.full(1001, 5, np.uint16), "", "torn.npy is damaged or ends early: its head cannot be read"),
        ("a.bin", np.full(1001, 5, np.uint16), "data.document_end=2 data.held_out_fraction=0", "data.document_end=2 does not occur in data.paths; the tokenizer ends a document with 2"),
        ("a.bin", np.array([5] * 999 + [2], np.uint16), "data.document_end=2", "the data are too small to hold any document out; raise the fraction"),
        ("a.bin", np.zeros(1000, np.uint16), "data.held_out_fraction=0", "all 1,000 tokens are like padding and stand for no text"),
        ("a.bin", np.full(1001, 5, np.uint16), "data.document_end=999999 data.held_out_fraction=0", "data.document_end=999999 does not occur in data.paths"),
    ],
)  # fmt: skip
def test_flat_token_files_that_cannot_be_right(tmp_path, byte_tokenizer, name, tokens, word, message):
    damage = {"short.npy": lambda whole: whole[:-10], "torn.npy": lambda whole: whole.replace(b"}", b"(")}.get(name)
    path = flat(tmp_path, "headed.npy" if damage else name, tokens)
    if damage:
        path = path.rename(tmp_path / name)
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as error:
        load_corpus(config("data=tokens", f"data.paths=[{path}]", byte_tokenizer, *word.split()))
    assert message in str(error.value)


@pytest.mark.parametrize("task", ["dpo", "kto", "classify", "embed", "grpo", "sft"])
def test_flat_token_files_have_no_columns(tmp_path, byte_tokenizer, caplog, task):
    """Pairs, labels and groups were looked for in step 1, and not found: an IndexError, or another pytree."""
    words = ["sampling.max_new_tokens=4"] if task == "grpo" else ["task.labels=[a,b]"] if task == "classify" else []
    paths = f"data.paths=[{flat(tmp_path, 'a.bin', np.full(100, 5, np.uint16))}]"
    cfg = config(f"task={task}", *words, "data=tokens", paths, byte_tokenizer, "data.held_out_fraction=0")
    if task == "sft":
        assert load_data(cfg).train["tokens"][0]["loss_mask"].all()
        assert "files of tokens do not say what an answer is: all is learnt" in caplog.text
        return
    with pytest.raises(UserError, match=f"data: task={task} needs rows with columns, and files of tokens have none"):
        load_data(cfg)


def test_the_entropy_of_single_tokens_is_that_of_the_training_data(tmp_path):
    """Of all sources together, a byte of each counts as much."""
    parts = []
    for name, text in {"a": "abcdefgh" * 20, "b": "a" * 30}.items():
        (tmp_path / name).mkdir()
        for number in range(12):
            (tmp_path / name / f"{number}.txt").write_text(text + "xyz"[: number % 4] * 30)
        keys = "source: text, held_out_fraction: 0.3, decode_errors: skip, extensions: [.txt]"
        parts.append(f"{name}: {{{keys}, paths: ['{tmp_path}/{name}']}}")
    corpus = load_corpus(config("data=mixture", f"data.parts={{{', '.join(parts)}}}", "data.weights={a: 0.5, b: 0.5}"))
    bits = num_bytes = 0.0
    for prepared in corpus.prepared.values():
        tokens = np.concatenate([np.load(file) for file in prepared.folder.glob("*/train.tokens.npy")])
        counts = np.unique(tokens, return_counts=True)[1]
        bits -= (counts * np.log2(counts / len(tokens))).sum()
        num_bytes += prepared.index["bytes"]
    assert corpus.unigram_bits_per_byte == pytest.approx(bits / num_bytes)


def test_the_end_of_a_run_on_one_token(caplog):
    """A file of equal tokens, to measure speed: the entropy of its tokens is 0, and no number can be compared with it."""
    feed = SimpleNamespace(corpus=SimpleNamespace(unigram_bits_per_byte=0.0), cfg=config("evaluation.sample_tokens=0"))
    with caplog.at_level("INFO"):
        CorpusFeed.sum_up(feed, {}, {"bits_per_byte": 2.0}, None)
    assert "held out: 2.000 bits per byte; unigram entropy of the corpus: 0.000; inf % above" in caplog.text


def test_tokens_need_their_tokenizer(tmp_path):
    with pytest.raises(UserError, match="data.source=tokens needs the tokenizer that made the tokens"):
        load_corpus(config("data=tokens", f"data.paths=[{flat(tmp_path, 'a.bin', np.ones(99, np.uint16))}]"))
    with pytest.raises(UserError, match=r"data.paths: .*/a.bin brings no tokenizer; set tokenizer.path"):
        config("data=tokens", f"data.paths=[{tmp_path}/a.bin]", "model.vocab_size=auto")


BAD_ROWS = [
    (b'{"text": "a"}\n{"text": \n', r"a.jsonl, line 2, is not JSON"),
    (b'{"text": "a"}\n\n["text"]\n', r"a.jsonl, line 3, is not a JSON object"),
    (b'{"text": "a"}\n{"body": "b", "id": 1}\n', r"line 2, has no column text \(data.columns.text\); its columns are body, id"),
    (b'{"text": "a"}\n{"text": 5}\n', r"line 2, holds int in column text, not text"),
    (b'{"text": "a"}\n{"text": "caf\xe9"}\n', r"line 2, is not JSON"),
    (b'{"text": "a"}\n{"text": "\\ud800"}\n', r"line 2, is not UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), BAD_ROWS)
def test_bad_rows_are_refused_with_file_and_line_or_counted(tmp_path, data, message, caplog):
    write(tmp_path / "a.jsonl", data + as_jsonl({"text": text} for text in TEXTS))
    words = ["data=jsonl", f"data.paths=[{tmp_path}]"]
    with pytest.raises(UserError, match=message + ".*; data.bad_rows=skip leaves such rows out and counts them"):
        load_corpus(config(*words))
    prepared, _ = prepare_corpus(config(*words, "data.bad_rows=skip"))
    assert prepared["jsonl"].index["left_out"] == {"bad row": 1}
    assert "jsonl: left out: 1 bad row (a.jsonl@" in caplog.text


@pytest.mark.parametrize(("delimiter", "word"), [(";", "';'"), ("\t", r"'\t'")])
def test_a_table_with_another_delimiter(tmp_path, delimiter, word):
    rows = (f"{n}{delimiter}{text}\n" for n, text in enumerate(TEXTS))
    (tmp_path / "a.csv").write_text(f"id{delimiter}text\n" + "".join(rows))
    words = ["data=csv", f"data.paths=[{tmp_path}]"]
    said = f'its columns are id{delimiter}text ("data.delimiter={word}" splits them); data.bad_rows'
    with pytest.raises(UserError, match=re.escape(said)):
        documents(*words)
    assert documents(*words, f"data.delimiter={word}") == sorted(TEXTS)


@pytest.mark.parametrize("data", ['[\n{"text": "a"}\n]\n', '[{"text": "a"}]\n'])
def test_a_file_that_is_one_list_of_rows(tmp_path, data):
    (tmp_path / "a.json").write_text(data)
    with pytest.raises(
        UserError, match=r"a.json, line 1, begins a list; each row has to be an object on a line of its own"
    ):
        load_corpus(config("data=jsonl", f"data.paths=[{tmp_path}/a.json]"))


def test_bad_rows_of_csv(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"id,text\n1,fine\n2\n3,caf\xe9\n4,also\n")
    words = ["data=csv", f"data.paths=[{tmp_path}]"]
    with pytest.raises(UserError, match=r"a.csv, line 3, does not have the 2 columns of the header line"):
        documents(*words)
    assert documents(*words, "data.bad_rows=skip") == ["also", "fine"]
    with pytest.raises(UserError, match=r"line 2, has no column body .* its columns are id, text"):
        documents(*words, "data.columns.text=body")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'id,text\n1,a\n2,"b\n3,c\n4,d\n', r"a.csv, line 3, is not CSV \(unexpected end of data\); close the quotes"),
        (b'id,text\n1,"a\nb"\n2,"c\n3,"d"\n', r"a.csv, line 4, is not CSV \(',' expected after '\"'\); close the quotes"),
        (b'id,"text\n1,a\n', r"a.csv, line 1, is not CSV"),
        (b"text,id,text\na,1,b\n", "a.csv has column text more than once; rename all but one"),
    ],
)  # fmt: skip
def test_csv_that_cannot_be_told_apart_is_refused_whole(tmp_path, data, message):
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(UserError, match=message):
        documents("data=csv", f"data.paths=[{tmp_path}]", "data.bad_rows=skip")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_source_that_ends_early_is_named(tmp_path, name):
    path = write(tmp_path / name, as_jsonl({"text": text * 500} for text in TEXTS))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(UserError, match=rf"{name} is damaged or ends early"):
        documents("data=jsonl", f"data.paths=[{path}]")


def test_empty_documents_are_counted_and_long_ones_are_whole(tmp_path):
    write(tmp_path / "a.jsonl", as_jsonl([{"text": ""}, {"text": None}, {"text": "x" * 3_000_000}, {"text": "short"}]))
    words = ["data=jsonl", f"data.paths=[{tmp_path}]", "data.held_out_fraction=0", "loading.packing=best_fit"]
    corpus = load_corpus(config(*words))
    prepared, _ = prepare_corpus(config(*words))
    assert prepared["jsonl"].index["left_out"] == {"empty": 2}
    assert corpus.train["jsonl"].stream.num_tokens == 3_000_000 + 5 + 4  # a word a byte, bos and eos


def test_a_packed_folder_of_mixed_encodings(tmp_path, caplog):
    write_corpus(tmp_path, 4)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "utf16.txt").write_bytes("text".encode("utf-16"))
    words = ["data=text", f"data.paths=[{tmp_path}]"]
    load_corpus(config(*words))
    assert "text: left out: 2 not UTF-8 (" in caplog.text
    assert "caf\ufffd" in documents(*words, "data.decode_errors=replace")


@pytest.mark.parametrize(
    ("files", "words", "message"),
    [
        ({}, [], "no file that ends in .txt, .md, .py (data.extensions)"),
        ({"a.txt": b"", "b.txt": b""}, [], "no document with text in it (2 empty)"),
        ({"a.txt": b"\xff\xfe"}, [], "no document with text in it (1 not UTF-8)"),
        (
            {"a.txt": b"\xff\xfe", "b.txt": b"b"},
            ["data.decode_errors=error"],
            "a.txt is not UTF-8 (byte 0); data.decode_errors=skip",
        ),
        ({"a.txt": b"alone"}, [], "all 1 documents are held out"),
        ({"a.txt": b"alone"}, ["data.held_out_fraction=0"], "too few for one sequence of training.seq_len=16"),
        ({"a.json": b"{}"}, [], "no file that ends in"),
    ],
)
def test_corpora_that_cannot_be_used(files, words, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load_corpus(config("data=text", f"data.paths=[{tmp_path}]", *words))
    assert message in str(error.value)


def test_missing_paths_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        documents("data=text", f"data.paths=[{tmp_path}/nowhere]")
    with pytest.raises(UserError, match="data.paths.0=: expected text that is not empty"):
        documents("data=text", "data.paths=['']")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "target")
    with pytest.raises(UserError, match="no file that ends in"):  # a dangling link is no file
        documents("data=text", f"data.paths=[{tmp_path}]")


class Unmeasured(BaseHTTPRequestHandler):
    """A web server that does not say how long a file is."""

    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(as_jsonl({"text": text} for text in TEXTS))

    def log_message(self, *_):
        pass


def test_lines_of_a_web_server_that_does_not_say_how_many():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Unmeasured)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert documents("data=jsonl", f"data.paths=['http://127.0.0.1:{server.server_port}/a.jsonl']") == sorted(TEXTS)
    finally:
        server.shutdown()


class Refusing(BaseHTTPRequestHandler):
    """Answers with the status that an address names."""

    def do_GET(self):
        self.send_error(int(self.path[1:4]))

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_what_a_web_server_refuses_is_said():
    """fsspec takes every refusal for a file that is missing."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for status, said in (
            (401, "access is denied"),
            (403, "access is denied"),
            (404, "there is no such"),
            (500, "500"),
        ):
            with pytest.raises(UserError, match=rf"^data.paths={address}/{status}.jsonl: {said}"):
                find_files((f"{address}/{status}.jsonl",), (".jsonl",))
        server.shutdown()
    for find in (partial(find_files, (address,), (".jsonl",)), partial(find_objects, address, "checkpoint")):
        with pytest.raises(UserError, match=r": the server cannot be reached"):
            find()


def test_a_corpus_of_which_nothing_is_learnt(tmp_path):
    """The run would change no weight."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 9}]
    row = json.dumps({"messages": turns, "learn": [False, False]})
    (tmp_path / "a.jsonl").write_text(f"{row}\n" * 8)
    words = "task=sft", "data=jsonl", f"data.paths=[{tmp_path}]", "data.columns.learnt_turns=learn", "tokenizer=bytes"
    with pytest.raises(UserError, match="has no token that is learnt"):
        load_corpus(config(*words, "model.vocab_size=auto", "data.held_out_fraction=0", "loading.packing=pad"))
