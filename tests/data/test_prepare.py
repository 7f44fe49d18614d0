"""A corpus is tokenized once, by all cores, to the same bytes, and goes on where a kill has left it."""

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import write_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness import ROOT, SMALL, errors, run_python

from tunix.base.digests import VERIFIED
from tunix.base.errors import UserError
from tunix.base.files import make_once
from tunix.base.progress import repeating
from tunix.config.compose import compose
from tunix.data import dataset, shards
from tunix.data.batches import TrainBatches
from tunix.data.dataset import load_corpus, prepare_corpus
from tunix.data.prompts import load_together
from tunix.data.shards import hash_document
from tunix.data.tokenizer import bytes_by_token
from tunix.export import _make_folder
from tunix.processes import peers
from tunix.training.choices import build_mesh


def text_config(folder, *overrides):
    return compose([*SMALL, "data=text", f"data.paths=['{folder}']", *overrides]).config


def prepared(cfg):
    (found,) = prepare_corpus(cfg)[0].values()
    return found


def contents(folder) -> dict[str, bytes]:
    """Bytes of every file of a corpus, but for the mark that names the place where it was made."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != VERIFIED]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def prepare(*words: str, cwd, fork: bool = True) -> subprocess.CompletedProcess:
    return run_python("-m", "tunix.prepare", *words, cwd=cwd, fork=fork)


def test_a_changed_document_changes_the_fingerprint(tmp_path):
    folder = write_corpus(tmp_path / "c", 8)
    before = load_corpus(text_config(folder)).fingerprint
    assert load_corpus(text_config(folder)).fingerprint == before
    (folder / "003.txt").write_text("something else\n")
    assert load_corpus(text_config(folder)).fingerprint != before


def test_processes_with_different_documents_are_refused(tmp_path, monkeypatch):
    """A file comes between the looks of two processes: they would have other tokens, and another tokenizer."""
    folder, first = write_corpus(tmp_path / "c", 8), dict[str, str]()
    monkeypatch.setattr(peers, "gather", lambda text, name, *_: [first.setdefault(name, text), text])
    monkeypatch.setattr(peers, "hosts", lambda: ["node-0", socket.gethostname()])
    monkeypatch.setattr(peers, "first_of_host", lambda: True)

    def load():
        return load_together(lambda: load_corpus(text_config(folder, "tokenizer=bytes")))

    assert load().num_samples == load().num_samples > 0
    (folder / "new.txt").write_text("a file that comes later\n")
    with pytest.raises(UserError, match=r"process 0 \(node-0\) and process 1 .* see different documents, or"):
        load()


def test_a_copy_elsewhere_has_the_same_fingerprint(tmp_path):
    """Files are recognised without being read; what they become is recognised by content."""
    found = [prepared(text_config(write_corpus(tmp_path / name, 8))) for name in ("a", "b")]
    assert found[0].folder != found[1].folder
    assert found[0].fingerprint == found[1].fingerprint


@given(st.lists(st.text("abc/.0123", min_size=1), min_size=30, unique=True), st.floats(0.05, 0.9))
@settings(deadline=None)
def test_a_document_stays_on_its_side_whatever_else_there_is(names, fraction):
    held_out = {name for name in names if hash_document(name) < int(fraction * 2**64)}
    assert all((name in held_out) == (hash_document(name) < int(fraction * 2**64)) for name in names[: len(names) // 2])


def test_documents_are_held_out_by_file(corpus):
    index = prepared(text_config(corpus, "data.held_out_fraction=0.25")).index
    train, held_out = (sum(shard[split]["documents"] for shard in index["shards"]) for split in ("train", "held_out"))
    assert train + held_out == 60
    assert 5 <= held_out <= 25


@pytest.mark.parametrize("shard_bytes", [1, 10**6])
def test_at_least_one_document_is_held_out(tmp_path, shard_bytes):
    folder = write_corpus(tmp_path / "c", 6)
    loaded = load_corpus(text_config(folder, "data.held_out_fraction=0.0001", f"loading.shard_bytes={shard_bytes}"))
    assert loaded.num_held_out == 1
    assert loaded.train["text"].stream.num_documents == 5


def test_of_two_processes_at_once_none_takes_a_shard_away(tmp_path, monkeypatch):
    """The second makes the whole corpus while the first is about to hold its one document out."""
    cfg = text_config(write_corpus(tmp_path / "c", 6), "data.held_out_fraction=0.0001", f"loading.cache_dir={tmp_path}")
    make_shards = dataset.make_shards

    def interrupted(plans, folder, loading):
        info = make_shards(plans, folder, loading)
        monkeypatch.setattr(dataset, "make_shards", make_shards)
        prepared(cfg)
        monkeypatch.setattr(shards, "make_shard", lambda *_: pytest.fail("all shards are there"))
        return info

    monkeypatch.setattr(dataset, "make_shards", interrupted)
    assert load_corpus(cfg).num_held_out == 1


def test_progress_is_told_while_shards_are_made(tmp_path):
    """Of shards that are not done either; a folder that goes away does not end the report."""
    (tmp_path / ".00000-x").mkdir()
    (tmp_path / ".00000-x" / "train.tokens.npy").write_bytes(bytes(3_000_000))
    assert shards._count_array_bytes(tmp_path, "tokens") == 3_000_000
    assert shards._count_array_bytes(tmp_path / "gone", "tokens") == 0
    is_told = threading.Event()
    with repeating(is_told.set, lambda _: 0.01):
        assert is_told.wait(60)


def test_no_line_says_that_there_are_no_tokens_so_far(tmp_path, monkeypatch, caplog):
    """The first tokens of a document of gigabytes come at its end."""
    monkeypatch.setattr(shards, "repeating", lambda report, wait: nullcontext(report()))
    caplog.set_level("INFO")
    cfg = compose(SMALL).config
    shards.make_shards([], tmp_path, cfg.loading)
    assert not caplog.messages
    np.save(tmp_path / "train.tokens.npy", np.zeros(100_000, np.uint16))
    shards.make_shards([], tmp_path, cfg.loading)
    assert caplog.messages == ["tokenizing, 0.2 MB of tokens so far"]


def test_unigram_entropy_is_the_streams_own(corpus):
    loaded = load_corpus(text_config(corpus))
    stream = loaded.train["text"].stream
    counts = np.bincount(stream.shard(0).tokens)
    shares = counts[counts > 0] / counts.sum()
    size = (counts * bytes_by_token(loaded.tokenizer)).sum()
    assert loaded.unigram_bits_per_byte == pytest.approx(-(shares * np.log2(shares)).sum() * counts.sum() / size)


def test_a_cache_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="loading.cache_dir: cannot write"):
        load_corpus(text_config(corpus, f"loading.cache_dir={tmp_path}/file/cache"))


@pytest.mark.slow
def test_two_runs_give_the_same_bytes_with_any_number_of_processes(corpus, tmp_path):
    words = [*SMALL, "data=text", f"data.paths=['{corpus}']", "loading.shard_bytes=9000"]
    found = []
    for processes in (1, 2):
        done = prepare(
            *words, f"loading.cache_dir={tmp_path}/{processes}", f"loading.prepare_processes={processes}", cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        found.append(contents(tmp_path / str(processes)))
        assert len(list((tmp_path / str(processes)).glob("tokens/*/0000*"))) >= 4
    assert found[0] == found[1]
    assert "fingerprint" in done.stdout


@pytest.mark.slow
def test_after_a_kill_finished_shards_are_not_made_again(tmp_path):
    """Killed at a moment when some shards are done; also the workers end. The result is that of an undisturbed run."""
    data = ["data=synthetic", "data.num_documents=1200", "data.mean_document_bytes=3000", "tokenizer=bytes"]
    words = [*SMALL, *data, "tokenizer.vocab_size=259", "loading.shard_bytes=200_000", "loading.prepare_processes=2"]
    command = [sys.executable, "-m", "tunix.prepare", *words, f"loading.cache_dir={tmp_path}/killed"]
    running = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 100
    while (
        len(done := sorted((tmp_path / "killed").glob("tokens/*/000*/facts.json"))) < 3 and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    children = psutil.Process(running.pid).children()
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert 3 <= len(done) < 18
    (folder,) = (tmp_path / "killed" / "tokens").iterdir()
    assert not (folder / "index.json").exists()
    times = {path: path.stat().st_mtime_ns for path in done}
    again = prepare(*words, f"loading.cache_dir={tmp_path}/killed", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in done} == times
    assert f"of {len(list(folder.glob('000*')))} shards are there already" in again.stdout
    whole = prepare(*words, f"loading.cache_dir={tmp_path}/whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    theirs = contents(tmp_path / "whole")
    assert contents(tmp_path / "killed") == theirs
    assert children
    assert not psutil.wait_procs(children, timeout=60)[1]  # those that are still there


def test_what_a_killed_process_left_of_a_shard_is_removed(tmp_path):
    """And what a living one is making stays."""
    make = "from tunix.base.files import make_once; import os, pathlib, sys, time\n"
    make += "def wait(path): path.mkdir(); print(path, flush=True); time.sleep(60)\n"
    make += f"make_once(pathlib.Path('{tmp_path}/00002'), wait)"
    processes = [subprocess.Popen([sys.executable, "-c", make], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = [Path(process.stdout.readline().strip()).parent for process in processes]
    processes[0].kill()
    processes[0].wait()
    try:
        for folder in folders:
            os.utime(folder, (0, 0))
        make_once(tmp_path / "00002", Path.mkdir)
        assert [folder.exists() for folder in folders] == [False, True]
    finally:
        processes[1].terminate()
        processes[1].wait()
    assert [path.name for path in tmp_path.iterdir()] == ["00002"]


def test_an_export_removes_what_a_killed_one_has_left(tmp_path):
    left = tmp_path / f".model-{platform.node()}-abcd"
    left.mkdir()
    os.utime(left, (0, 0))
    with ExitStack() as stack:
        assert Path(_make_folder(tmp_path / "model", stack)).is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_prepared_folder_is_a_source(corpus, tmp_path):
    made = text_config(corpus)
    folder = prepared(made).folder
    words = [*SMALL, "data=tokens", f"data.paths=['{folder}']"]
    again = load_corpus(compose(words).config)
    assert again.fingerprint == load_corpus(made).fingerprint
    assert again.tokenizer.to_str() == load_corpus(made).tokenizer.to_str()
    other = prepare_corpus(
        compose([*SMALL, "tokenizer.vocab_size=259", "data=synthetic", "data.num_documents=3"]).config
    )[1]
    other.save(tmp_path / "other")
    with pytest.raises(UserError, match=r"was made with another tokenizer \(300 tokens\) than tokenizer.path=.* \(259"):
        load_corpus(compose([*words, f"tokenizer.path={tmp_path}/other"]).config)
    with pytest.raises(UserError, match="was not made for task=sft"):
        load_corpus(compose([*words, "task=sft"]).config)
    several = f"data.paths=['{folder}','{tmp_path}/other']"
    with pytest.raises(UserError, match=f"data.paths: {folder} is a folder of tunix.prepare, which stands alone"):
        load_corpus(compose([*words, several, f"tokenizer.path={tmp_path}/other"]).config)


@pytest.mark.parametrize(
    ("made_with", "run_with", "message"),
    [
        (["task=classify", "task.labels=[a,b]"], ["task.labels=[b,a]"], r'another task.labels: it has \["a", "b"\]'),
        (["task=sft"], ["task.learnt_turns=last"], 'another task.learnt_turns: it has null, and this run "last"'),
        (["task=sft"], ["task.chat_template='{{ messages }}'"], r"another chat template than task.chat_template={{ me"),
    ],
)
def test_a_folder_that_other_keys_have_made_is_refused(tmp_path, made_with, run_with, message):
    """Documents were learnt with the labels, the turns and the template of the folder, whatever the run asked for."""
    turns = [{"role": role, "content": "1+1?"} for role in ("user", "assistant")]
    rows = ({"messages": turns, "label": label, "id": n} for n, label in enumerate("ab" * 20))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["data=jsonl", f"data.paths=['{tmp_path}/rows.jsonl']", "data.held_out_fraction=0", "tokenizer=bytes"]
    made = compose([*SMALL, *made_with, *files]).config
    copied = [*SMALL, *made_with, "data=tokens", f"data.paths=['{prepared(made).folder}']"]
    assert prepared(compose(copied).config).fingerprint == prepared(made).fingerprint
    with pytest.raises(UserError, match=message):
        prepare_corpus(compose([*copied, *run_with]).config)
    if "task.chat_template=" in run_with[0]:  # the way out that the message names, where model.init_from has another
        own = f"tokenizer.path={prepared(made).folder}/tokenizer"
        assert prepared(compose([*copied, own]).config).fingerprint == prepared(made).fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"flat": {"path": "/home/me/.ssh/id_rsa", "dtype": "uint8", "offset": 0, "count": 9}}}, "id_rsa', which"),
        ({"name": "../other"}, "names '../other', which is not in its folder"),
        ({"train": {"tokens": "5"}}, "is damaged .shards.0.train.tokens: Input should be a valid integer"),
        ({"train": {"digest": 5}}, "is damaged .shards.0.train.digest: "),
        ({"held_out": None}, "is damaged .shards.0.held_out: "),
        ({"train": {"tokens": 10**7}}, r"train.tokens.npy of .*/00000 has .* numbers, and index.json says 10,000,000; remove"),
        ({"train": {"documents": 9}}, r"train.starts.npy of .*/00000 has .* numbers, and index.json says 9; remove"),
    ],
)  # fmt: skip
def test_a_folder_that_a_stranger_has_prepared(corpus, tmp_path, change, message):
    """Its index names no file of this machine as tokens to learn."""
    folder = shutil.copytree(prepared(text_config(corpus)).folder, tmp_path / "copied")
    index = json.loads((folder / "index.json").read_text())
    shard = index["shards"][0]
    shard |= {key: shard[key] | value if isinstance(value, dict) else value for key, value in change.items()}
    (folder / "index.json").write_text(json.dumps(index))
    cfg = compose([*SMALL, "data=tokens", f"data.paths=['{folder}']", "loading.verify=never"]).config
    with pytest.raises(UserError, match=message):
        load_corpus(cfg)


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokens", None), ("bytes", 0), ("left_out", 5), ("bytes_per_token", float("nan")), ("fingerprint", "\ud800"), ("unknown", [1, "a"])],
)  # fmt: skip
def test_an_index_of_a_stranger_lacks_what_is_read_of_it(corpus, tmp_path, key, value):
    folder = shutil.copytree(prepared(text_config(corpus)).folder, tmp_path / "copied")
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {key: value}))
    with pytest.raises(UserError, match="copied/index.json is damaged .*; prepare the folder again"):
        prepare_corpus(compose([*SMALL, "data=tokens", f"data.paths=['{folder}']", "loading.verify=never"]).config)


def test_a_folder_of_an_earlier_version_names_no_kind(corpus, tmp_path):
    folder = shutil.copytree(prepared(text_config(corpus)).folder, tmp_path / "copied")
    index = json.loads((folder / "index.json").read_text())
    del index["kind"]
    (folder / "index.json").write_text(json.dumps(index | {"format": "2", "answers": False}))
    cfg = compose([*SMALL, "data=tokens", f"data.paths=['{folder}']", "loading.verify=never"]).config
    assert len(load_corpus(cfg).train["tokens"])


@pytest.mark.parametrize(
    ("written", "message"),
    [("{", "index.json cannot be read"), ("[]", "is not a JSON object"), ("{}", "is of format None, not 3; remove the folder")],
)  # fmt: skip
def test_an_index_that_is_damaged_is_named(corpus, tmp_path, written, message):
    cfg = text_config(corpus, f"loading.cache_dir={tmp_path}")
    (prepared(cfg).folder / "index.json").write_text(written)
    with pytest.raises(UserError, match=message):
        prepare_corpus(cfg)


def test_a_corpus_that_a_kill_has_left_without_digests_gets_them(corpus, tmp_path):
    """A kill behind the index, which stood for a whole corpus, left one whose damage nobody would have found."""
    cfg = text_config(corpus, f"loading.cache_dir={tmp_path}", "loading.verify=always")
    folder = prepared(cfg).folder
    whole = contents(folder)
    (folder / "digests.json").unlink()
    assert contents(prepared(cfg).folder) == whole
    (folder / "00000/train.tokens.npy").write_bytes(whole["00000/train.tokens.npy"][:-1] + b"~")
    with pytest.raises(UserError, match=r"00000/train.tokens.npy has other bytes than were written"):
        prepare_corpus(cfg)


def test_a_shard_deleted_or_cut_off_under_a_running_job(corpus, tmp_path):
    """What is open stays readable; what is not is named."""
    cfg = text_config(
        corpus, f"loading.cache_dir={tmp_path}", "loading.shard_bytes=9000", "model.mesh_shape=[[8],[fsdp]]"
    )
    found = prepared(cfg)
    data = TrainBatches(load_corpus(cfg).train, cfg, cfg.training, build_mesh(cfg))
    tokens = found.folder / found.index["shards"][1]["name"] / "train.tokens.npy"
    data_bytes = tokens.read_bytes()
    tokens.write_bytes(data_bytes[:-10])
    with pytest.raises(UserError, match=r"cannot read the tokens in .*train.tokens.npy: .*; the folder was changed"):
        list(data.iterate(range(0, 60 * data.batch_size, data.batch_size)))
    tokens.unlink()
    with pytest.raises(UserError, match=r"cannot read the tokens in .*train.tokens.npy: No such file or directory"):
        list(data.iterate(range(0, 60 * data.batch_size, data.batch_size)))


def test_mistakes_end_with_code_2_and_one_line(tmp_path):
    done = prepare("data=text", "data.paths=[nowhere]", cwd=tmp_path, fork=False)
    assert (done.returncode, errors(done)) == (2, [f"error: data.paths: nowhere does not exist in {tmp_path}"])


def test_an_index_says_what_there_is(corpus):
    index = json.loads((prepared(text_config(corpus)).folder / "index.json").read_text())
    assert index["tokens"] == sum(shard["train"]["tokens"] for shard in index["shards"])
    assert index["bytes_per_token"] == index["bytes"] / index["tokens"]
    assert {"fingerprint", "documents", "left_out", "vocab_size"} <= index.keys()
