"""The examples of docs/data.md, each on files made on the spot."""

import gzip
import json
import re
import shlex
from importlib.util import find_spec

import numpy as np
import pytest
from conftest import write_corpus
from support.harness import ROOT

from tunix.config.command_line import command_parser
from tunix.config.compose import add_search_path, compose
from tunix.data.chat import ChatTemplate
from tunix.data.dataset import load_corpus

PAGE = (ROOT / "docs" / "data.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
SHORT = ["training.seq_len=32", "training.loss_chunk_size=32"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    return tmp_path


def write_files(folder):
    """Write what the examples name."""
    write_corpus(folder / "notes", 6)
    text = "some words " * 60
    (folder / "web").mkdir()
    (folder / "web" / "a.jsonl.gz").write_bytes(gzip.compress(f"{json.dumps({'content': text})}\n".encode() * 9))
    (folder / "table.csv").write_text("body\n" + f"{text}\n" * 9)
    if find_spec("pyarrow"):
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist([{"body": text}] * 9), folder / "table.parquet")
    tokens = np.full(2000, 9, np.uint16)
    tokens[99::100] = 2
    tokens.tofile(folder / "train.bin")
    load_corpus(compose([*SHORT, "data=text", f"data.paths=[{folder}/notes]"]).config).tokenizer.save(
        str(folder / "tokenizer.json")
    )
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    (folder / "talk.jsonl").write_text(f"{json.dumps({'messages': talk, 'q': 'hi', 'a': text})}\n" * 9)
    (folder / "mine/data").mkdir(parents=True)
    for name, mixture in re.findall(r"```yaml\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (folder / name).write_text(mixture)
    (folder / "talk.csv").write_text("system_prompt,user_prompt,prediction\n" + f"Be brief,hi,{text}\n" * 9)


@pytest.mark.parametrize("command", COMMANDS)
def test_example(files, command):
    program, *words = shlex.split(command.removeprefix("python -m "))
    assert program == "tunix.prepare"
    args = command_parser("prepare", "").parse_intermixed_args(words)
    light = any(word.startswith("data=") and word != "data=web_and_code" for word in words)
    heavy = [] if light else ["tokenizer=bytes", "dry_run=true"]
    cfg = compose(add_search_path([*args.overrides, *SHORT, *heavy], args.config_dir)).config
    if not cfg.dry_run:
        corpus = load_corpus(cfg)
        assert corpus.num_samples > 0


def test_the_mixtures_of_the_page(files):
    folders = compose(add_search_path(["data=folders"], "mine")).config.data
    assert [part.paths for part in folders.parts.values()] == [("one",), ("two",)]
    data = compose(add_search_path(["data=web_and_code"], "mine")).config.data
    assert list(data.parts) == ["code", "web"]
    assert data.parts["web"].columns.text == "content"
    assert data.stages[0].name == "more code"


def test_the_template_for_texts_of_trl():
    (template,) = re.findall(r"```text\n(\{\{ bos_token.*?)\n```", PAGE)
    turns = [{"role": "user", "content": "a few"}, {"role": "assistant", "content": " words"}]
    chat = ChatTemplate(template, {"bos_token": "<bos>", "eos_token": "<eos>"})
    assert chat.split_answers(turns) == [[("<bos>a few", False), (" words<eos>", True)]]
