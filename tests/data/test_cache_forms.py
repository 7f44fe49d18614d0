"""Versions of tunix share a cache: what is kept there has the version of its form in its name."""

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.harness import SMALL

from tunix.base import buckets, forms
from tunix.base.errors import UserError
from tunix.base.forms import CACHE_FORMS
from tunix.config.compose import compose
from tunix.data.dataset import find_folder, load_corpus, prepare_corpus
from tunix.data.shards import open_prepared

PAIRS = {"prompt": "1 + 1 =", "completion": "2", "chosen": "2", "rejected": "3", "answer": "2"}
# Words of jobs for each kind of documents, and the files that this kind has in a shard, beside tokens and starts.
KINDS = {
    "text": (["data=text", "task=pretrain"], set()),
    "conversation": (["data=arithmetic", "task=sft"], {"answers"}),
    "prompt": (["data=arithmetic", "task=grpo", "sampling.max_new_tokens=8"], {"rows", "row_ends"}),
    "pair": (["data=pairs", "task=dpo"], {"answers", "splits"}),
    "labelled": (["data=labelled", "task=kto"], {"answers", "splits", "labels"}),
}
# The form of version 3 of tokens. Where this changes, raise CACHE_FORMS["tokens"], and change it here too.
INDEX_OF_3 = {
    "format", "fingerprint", "source", "vocab_size", "tokens", "documents", "bytes", "bytes_per_token",
    "unigram_bits_per_byte", "left_out", "left_out_names", "kind", "shards",
}  # fmt: skip
SHARD_OF_3 = {"name", "train", "held_out"}
SPLIT_OF_3 = {"tokens", "documents", "bytes", "digest"}


def config(kind, corpus, tmp_path, *words):
    rows = [PAIRS | {"prompt": f"{n} + 1 =", "label": n % 2 == 0} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [f"data.paths=['{tmp_path}/pairs.jsonl']"]
    paths = {"text": [f"data.paths=['{corpus}']"], "pair": pairs, "labelled": pairs}.get(kind, [])
    return compose(
        [*SMALL, *KINDS[kind][0], *paths, "tokenizer=bytes", f"loading.cache_dir={tmp_path}/cache", *words]
    ).config


@pytest.mark.nightly(but=["text", "pair"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_form_of_tokens_is_that_of_its_version(kind, corpus, tmp_path):
    (found,) = prepare_corpus(config(kind, corpus, tmp_path, "tokenizer.vocab_size=259"))[0].values()
    assert CACHE_FORMS["tokens"] == 3
    assert found.index.keys() == INDEX_OF_3 | {"choices"}  # which came later, and which folders need not have
    for shard in found.index["shards"]:
        assert shard.keys() == SHARD_OF_3
        assert shard["train"].keys() == shard["held_out"].keys() == SPLIT_OF_3
        arrays = (found.folder / shard["name"]).glob("train.*.npy")
        assert {path.name.split(".")[1] for path in arrays} == {"tokens", "starts"} | KINDS[kind][1]


@pytest.mark.parametrize("above", [False, True])
def test_a_cache_that_another_user_keeps_closed_is_one_line(above, tmp_path, monkeypatch):
    """Root may read everything, so the system's answers are made up."""

    def refuse(*_):
        raise PermissionError

    (tmp_path / "tokens" / "v3-a").mkdir(parents=True)
    if above:
        monkeypatch.setattr("pathlib.Path.exists", refuse)
    else:
        monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(
        UserError, match=r"loading.cache_dir=.*another user has made .*v3-a for .*chmod -R go\+rX .* or set"
    ):
        forms.locate_cached(tmp_path, "tokens", "a")


def test_what_is_cached_has_the_version_of_its_form_in_its_name(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNIX_CACHE_DIR", str(tmp_path))
    words = "data=text", f"data.paths=['{corpus}']", "loading.packing=best_fit"
    for sequences in load_corpus(compose([*SMALL, *words]).config).train.values():
        assert len(sequences[0]["tokens"]) == 32
    buckets.local_copy("s3://bucket/run").mkdir(parents=True)
    kinds = {path.name for path in tmp_path.iterdir()}
    assert kinds == {"tokens", "tokenizers", "packing", "buckets"}
    for kind in kinds:
        for path in (tmp_path / kind).iterdir():
            assert re.match(rf"v{CACHE_FORMS[kind]}-\w", path.name), path
    # Their forms. Where one changes, raise its number, and change it here too.
    assert CACHE_FORMS["tokenizers"] == CACHE_FORMS["packing"] == 1
    (tokenizer,) = (tmp_path / "tokenizers").iterdir()
    assert {path.name for path in tokenizer.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    arrays = {(path.name, np.load(path).dtype.name, np.load(path).ndim) for path in tmp_path.glob("packing/*/*/*.npy")}
    assert arrays == {("bounds.npy", "int64", 1), ("pieces.npy", "int64", 2)}


def test_versions_with_other_forms_share_a_cache(corpus, tmp_path, monkeypatch):
    """Each finds its own files, as if it were alone; a checkpoint knows the data by both."""
    words = [*SMALL, "data=text", f"data.paths=['{corpus}']", f"loading.cache_dir={tmp_path}"]

    def list_files() -> dict:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    def load() -> str:
        return load_corpus(compose(words).config).fingerprint

    first, files = load(), list_files()
    with monkeypatch.context() as newer:
        for kind, form in CACHE_FORMS.items():
            newer.setitem(forms.CACHE_FORMS, kind, form + 1)
        assert load() == first
        assert len(list_files()) == 2 * len(files)
    assert load() == first
    assert files.items() <= list_files().items()


def test_a_copied_folder_of_an_older_form_is_read(corpus, tmp_path):
    (found,) = prepare_corpus(config("text", corpus, tmp_path, "tokenizer.vocab_size=259"))[0].values()
    older = {key: value for key, value in found.index.items() if key != "kind"} | {"format": "2", "answers": False}
    (found.folder / "index.json").write_text(json.dumps(older))
    assert open_prepared(found.folder).documents == "text"


@pytest.mark.parametrize(
    ("words", "vocab"),
    [
        (["task.learnt_turns=all"], {}),
        (["task.chat_template_kwargs={thinking: true}"], {}),
        (["data.columns.tools=functions"], {}),
        (["data.columns.images=pictures"], {}),
        (["loading.shard_bytes=1000000"], {}),
        ([], {"digest": "another tokenizer"}),
        ([], {"chat_template": "another template"}),
        ([], {"prefix": "first"}),
        ([], {"images": True}),
    ],
)
def test_what_changes_tokens_has_a_folder_of_its_own(words, vocab):
    def name(words: list[str], **changed: Any) -> str:
        cfg = compose([*SMALL, "data=jsonl", "data.paths=[rows.jsonl]", *words]).config
        usual = {"digest": "tokenizer", "chat_template": "template", "prefix": None, "images": None}
        tokenizer: Any = SimpleNamespace(**usual | changed)
        return find_folder(cfg.data, [], cfg.task, tokenizer, cfg.loading).name

    chat = ["task=sft"]
    assert name([*chat, *words], **vocab) != name(chat)
    if vocab.keys() & {"chat_template", "prefix"} or any("columns" in word for word in words):
        assert name(words, **vocab) == name([])  # of texts alone
    pixels = ["data.max_image_pixels=1000"]
    assert (name([*chat, *pixels], **vocab) == name(chat, **vocab)) == ("images" not in vocab)
