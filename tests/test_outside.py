"""Bytes from outside are understood, or refused in one line: no other exception, no hang, no file outside of a folder.

`TUNIX_FUZZ=10000 python -m pytest tests/test_outside.py` tries as many inputs of each kind; by default they are few.
"""

import json
import os
import socket
from base64 import b64encode
from contextlib import suppress

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from support.harness import ROOT
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from tunix.base.digests import Damaged, check_files
from tunix.base.errors import UserError
from tunix.data.chat import PLAIN, ChatTemplate
from tunix.data.files import Columns, Csv, Jsonl, Unit
from tunix.data.parquet import Parquet
from tunix.data.tokenizer import bytes_by_token, decode, decode_behind, load_vocab
from tunix.huggingface.adapter_config import read_adapter
from tunix.huggingface.config_json import read_config, read_limits
from tunix.huggingface.table import FAMILIES
from tunix.huggingface.weights import INDEX, TensorFiles, weight_files
from tunix.inference.sampling import read_stop_ids
from tunix.processes import rollcall

NUM_INPUTS = int(os.environ.get("TUNIX_FUZZ", "60"))
fuzz = settings(
    max_examples=NUM_INPUTS,
    deadline=None,
    derandomize="TUNIX_FUZZ" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("../x")
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
CONFIGS = [json.loads(path.read_text()) for path in sorted((ROOT / "tests/models/parity").glob("*/config.json"))]
SEED_TENSORS = save({"a": np.ones((2, 3), np.float32), "model.norm.weight": np.zeros(4, np.float16)})
SEED_TOKENIZER = Backend(BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])).to_str()


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """Bytes with some changed, left out or put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(("change", "cut", "insert")))
        if kind == "change" and data:
            data[index] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[index : index + draw(st.integers(1, 30))]
        else:
            data[index:index] = draw(st.binary(max_size=12))
    return bytes(data)


@st.composite
def changed(draw, objects: list[dict]) -> bytes:
    """A JSON object with keys that are left out, added, or have another value."""
    value = dict(draw(st.sampled_from(objects)))
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from(sorted(value)) | st.text(max_size=6)) if value else "key"
        if draw(st.booleans()):
            value[key] = draw(VALUES)
        else:
            value.pop(key, None)
    return json.dumps(value).encode()


def outside(strategy):
    """Try inputs of a strategy: `UserError` in one line is the only error that may come."""

    def decorate(function):
        @fuzz
        @given(strategy)
        def test(folder, data):
            with suppress(UserError):
                function(folder, data)

        def run(tmp_path):
            test(tmp_path)

        run.__doc__ = function.__doc__
        return run

    return decorate


NESTED = st.just(b"[" * 100_000)
REPORTS = [{"process": 1, "host": "b", "facts": {"the number of processes": 2, "seed": 0}, "time": 0.0}]


@outside(changed(REPORTS) | st.binary(max_size=200) | NESTED)
def test_roll_call(folder, data):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with suppress(BlockingIOError):
            theirs.setblocking(False)
            theirs.sendall(data[:60_000] + b"\n")
        theirs.shutdown(socket.SHUT_WR)
        ours.settimeout(1)
        report = rollcall.read(ours, 1.0)
    if rollcall.is_report(report):
        present = {0: REPORTS[0] | {"process": 0, "ahead_s": 0.0}}
        assert isinstance(rollcall._find_mistake(present, report), str)


@outside(changed(CONFIGS) | damaged(json.dumps(CONFIGS[0]).encode()) | NESTED)
def test_config_json(folder, data):
    (folder / "config.json").write_bytes(data)
    read_config(folder)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_config),
        ("preprocessor_config.json", lambda folder: read_limits(folder, "qwen3_vl")),
        ("processor_config.json", lambda folder: read_limits(folder, "qwen3_vl")),
    ],
)
def test_a_config_json_of_a_terabyte(name, read, tmp_path):
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=rf"{name} has 1,099,511,627,776 bytes, and a model's config has at most"):
        read(tmp_path)


def load(folder):
    return load_vocab(str(folder), eos="a")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (INDEX, weight_files),
        ("tokenizer.json", load),
        ("tokenizer.model", load),
        ("tokenizer_config.json", load),
        ("chat_template.jinja", load),
        ("generation_config.json", read_stop_ids),
        ("adapter_config.json", lambda folder: read_adapter(folder, "llama")),
    ],
)
def test_a_file_of_a_terabyte_is_not_read(name, read, tmp_path):
    if name != "tokenizer.model":
        (tmp_path / "tokenizer.json").write_text(SEED_TOKENIZER)
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=f"{name}.*: it has 1,099,511,627,776 bytes, and such files have at most"):
        read(tmp_path)


@outside(
    changed(
        [
            {"weight_map": {"a": "model.safetensors"}},
            {"weight_map": {"a": "../x"}},
            {"weight_map": {"a": "/etc/passwd"}},
        ]
    )
    | NESTED
)
def test_index(folder, data):
    (folder / "model.safetensors").write_bytes(SEED_TENSORS)
    (folder / INDEX).write_bytes(data)
    assert {path.parent for path in weight_files(folder)} <= {folder}


@outside(damaged(SEED_TENSORS))
def test_safetensors(folder, data):
    (folder / INDEX).unlink(missing_ok=True)
    (folder / "model.safetensors").write_bytes(data)
    with TensorFiles(folder, FAMILIES["llama"]) as files:
        for tensor in files.tensors.values():
            assert tensor.dtype


@outside(damaged(SEED_TOKENIZER.encode()) | changed([json.loads(SEED_TOKENIZER)]) | NESTED)
def test_tokenizer_json(folder, data):
    (folder / "tokenizer.json").write_bytes(data)
    load(folder)


def test_a_tokenizer_whose_library_panics(tmp_path):
    """The prefix of a token is longer than the token; found by `make fuzz`."""
    whole = json.loads(SEED_TOKENIZER)
    whole["model"]["continuing_subword_prefix"] = "##"
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match="cannot be read as a tokenizer.json"):
        load_vocab(str(tmp_path), eos="a")


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}},
    ],
)
def test_a_tokenizer_that_fails_for_some_texts(parts, tmp_path):
    """Its library panics, or raises bare exceptions."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(SEED_TOKENIZER) | parts))
    vocab = load_vocab(str(tmp_path), eos="a")
    with pytest.raises(UserError, match="^the tokenizer cannot read a text, by its tokenizer.json: "):
        list(vocab.encode(["a" * 40 + "!"]))


def test_a_tokenizer_that_fails_for_some_tokens(tmp_path):
    """Its library panics where it cuts more off a token than the token has."""
    decoder = {"type": "Strip", "content": "a", "start": 1, "stop": 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(SEED_TOKENIZER) | {"decoder": decoder}))
    backend = load(tmp_path).backend
    for write in (lambda tokens: decode(backend, tokens), lambda tokens: decode_behind(backend, *tokens, tokens)):
        with pytest.raises(UserError, match="^the tokenizer cannot write the text of tokens, by its tokenizer.json: "):
            write([backend.token_to_id("a")])


LONG = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1001}
TWICE = {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "a"}  # it stands before an a, which stays
START = {"id": "a", "ids": [0] * 1000, "tokens": ["a"] * 1000}
TEMPLATE = {
    "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
}


@pytest.mark.parametrize(
    ("part", "growth"),
    [
        ({"normalizer": LONG}, 1001),
        ({"decoder": LONG}, 1001),
        ({"normalizer": {"type": "Sequence", "normalizers": [TWICE] * 40}}, 2**40),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 1000}}, 1001),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": b64encode(bytes(5) + b"a" * 1001).decode()}},
            1001,
        ),
        ({"post_processor": {"type": "TemplateProcessing", **TEMPLATE, "special_tokens": {"a": START}}}, 1001),
    ],
)
def test_a_tokenizer_that_makes_much_of_little_is_refused(part, growth, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(SEED_TOKENIZER) | part))
    with pytest.raises(UserError, match=f"may make {growth:,} characters or tokens of one, .*; at most 1,000 are read"):
        load(tmp_path)


def test_a_token_with_an_id_that_no_table_has(tmp_path):
    whole = json.loads(SEED_TOKENIZER)
    whole["model"]["vocab"]["b"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    vocab = load(tmp_path)
    for count in (lambda: vocab.num_tokens, lambda: bytes_by_token(vocab.backend)):
        with pytest.raises(UserError, match="the tokenizer gives the token 'b' the id 2147483648; ids are below"):
            count()


SETTINGS = [
    {"bos_token": "a", "eos_token": {"content": "b"}, "chat_template": [{"name": "default", "template": PLAIN}]}
]


@outside(changed(SETTINGS) | damaged(json.dumps(SETTINGS[0]).encode()) | NESTED)
def test_tokenizer_config(folder, data):
    (folder / "tokenizer.json").write_text(SEED_TOKENIZER)
    (folder / "tokenizer_config.json").write_bytes(data)
    load_vocab(str(folder)).chat.render([{"role": "user", "content": "a"}])


PIECES = ("{{", "}}", "{%", "%}", "messages", "for", "endfor", "if", "else", "endif", "message", "in", " ", "1", "/", "0", "[", "]", "(", ")",
          ".", "__class__", "'a'", "|", "tojson", "loop", "set", "x", "=", "raise_exception", "range", "9" * 9, "-", "*", "break", "join", ",", "~")  # fmt: skip


@outside(
    st.lists(st.sampled_from(PIECES), max_size=30).map(" ".join)
    | damaged(PLAIN.encode()).map(lambda text: text.decode(errors="replace"))
)
def test_chat_template(folder, data):
    template = ChatTemplate(data, {"bos_token": "<s>", "eos_token": "</s>"})
    template.split_answers([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


def test_a_template_that_never_ends(monkeypatch):
    monkeypatch.setattr("tunix.data.chat.TIME_LIMIT_S", 0.5)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(UserError, match="task.chat_template refuses a conversation: not done after 0.5 s"):
        ChatTemplate(loops, {}).render([{"role": "user", "content": "a"}])


@outside(
    st.lists(
        changed([{"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}]) | st.binary(max_size=40), max_size=6
    ).map(b"\n".join)
    | NESTED
)
def test_jsonl(folder, data):
    path = folder / "rows.jsonl"
    path.write_bytes(data)
    source = Jsonl.model_construct(source="jsonl", paths=(str(path),), extensions=(".jsonl",), max_document_bytes=None)
    for item in source.read(Unit("rows", str(path), 0, len(data), len(data), "")):
        assert item.problem or isinstance(item.content, dict)


SEED_CSV = b'text,answer\n"a, ""b""",c\n\xc3\xa9,"d\ne"\n'


@outside(damaged(SEED_CSV) | st.binary(max_size=60))
def test_csv(folder, data):
    path = folder / "rows.csv"
    path.write_bytes(data)
    columns = Columns.model_construct(**dict.fromkeys(Columns.model_fields) | {"text": "text"})
    source = Csv.model_construct(
        source="csv", paths=(str(path),), extensions=(".csv",), delimiter=",", columns=columns, max_document_bytes=None
    )
    for item in source.read(Unit("rows", str(path), 0, len(data), len(data), "")):
        assert item.problem or isinstance(item.content, dict)


@pytest.fixture(scope="module")
def parquet() -> bytes:
    """A small file with two row groups."""
    written = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "bb", None], "n": [1, 2, 3]}), written, row_group_size=2)
    return written.getvalue().to_pybytes()


def test_parquet(parquet, tmp_path):
    @outside(damaged(parquet))
    def read(folder, data):
        path = folder / "rows.parquet"
        path.write_bytes(data)
        columns = Columns.model_construct(**dict.fromkeys(Columns.model_fields) | {"text": "text"})
        source = Parquet.model_construct(
            source="parquet", paths=(str(path),), extensions=(".parquet",), columns=columns, max_document_bytes=2**20
        )
        for unit in source.units(1000):
            for item in source.read_all_columns(unit):
                assert item.problem or isinstance(item.content, dict)

    read(tmp_path)


DIGESTS = [{"step": 3, "files": {"state": {"size": 3, "crc32": [891568578]}}}]


@outside(changed(DIGESTS) | damaged(json.dumps(DIGESTS[0]).encode()) | NESTED)
def test_digests(folder, data):
    (folder / "state").write_bytes(b"abc")
    (folder / "digests.json").write_bytes(data)
    with suppress(Damaged):
        check_files([folder / "digests.json"])
