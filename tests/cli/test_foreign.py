"""Names that people bring from other programs are answered with ours, in words that run."""

import io
import re
import sys
from contextlib import redirect_stdout

import pytest
from rich.table import Table

from tunix.base.errors import UserError
from tunix.base.tables import print_table
from tunix.cli.compose import compose
from tunix.cli.foreign import FLAGS, KEYS, MISSING, VALUES, find_key
from tunix.cli.keys import list_keys
from tunix.config import Config
from tunix.train_command import train_command

WORDS = sorted({*KEYS.values(), *(words for values in VALUES.values() for words in values.values())})
# Words that name something of the reader's own: only their keys are checked.
OWN_NAMES = ("FOLDER", "NAME", "RUN_DIR", "FILE", "HOST", "MODULE", "my_", "latest")
LEGAL = {*(name for name, _ in list_keys()), *Config.model_fields, "mesh_shape", "hydra.run.dir"}
GRPO = ["training.seq_len=1024", "training.loss_chunk_size=256"]


def check_words(words: str) -> None:
    """Each key exists, and the words compose, those of a task with task=grpo."""
    assert {*re.findall(r"(?:^| )\+?([a-z0-9_.]+)=", words)} <= LEGAL
    if not any(name in words for name in OWN_NAMES):
        task = ["task=grpo"] if words.startswith("task.") else []
        compose([*task, *(GRPO if re.search("^(task|sampling)", words) else []), *words.split()])


@pytest.mark.parametrize("words", WORDS)
def test_our_words_compose(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    check_words(words)


def test_no_name_of_ours_is_taken_for_another():
    """A key that exists is never answered with another one."""
    legal = {name for name, _ in list_keys()}
    assert not legal & {*KEYS, *MISSING}
    assert not {name for name in VALUES if name not in legal}


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("optimizer.lr=1e-3", "unknown key optimizer.lr; here it is optimizer.learning_rate="),
        ("optimizer.betas=[.9,.95]", "here it is optimizer.b1=0.9 optimizer.b2=0.95"),
        ("optimizer.beta1=.9", "here it is optimizer.b1=0.9"),
        ("training.eval_every_n_steps=10", "here it is evaluation.every_steps=100"),
        ("training.steps=10", "here it is training.max_steps=1000"),
        ("training.dtype=bfloat16", "here it is training.compute_dtype=bfloat16"),
        ("output_dir=x", "here it is hydra.run.dir=FOLDER"),
        ("num_train_epochs=3", "here it is training.num_epochs=1"),
        ("checkpoint_dir=x", "here it is hydra.run.dir=FOLDER"),
        ("model.lora_rank=8", "here it is model.lora.rank=16"),
        ("training.gradient_checkpointing=true", "here it is training.remat=full"),
        ("+optimizer.schedule_type=linear", "here it is scheduler=warmup_cosine"),
        ("training.cpu_offload=true", "here it is training.offload=optimizer"),
        ("grpo.beta=0.08", "here it is task=grpo task.kl_coefficient=0.08"),
        ("training.sharding_strategy=FULL_SHARD", "here it is training.sharding_strategy=full_shard"),
        ("training.sharding_strategy=HYBRID_SHARD", "here it is mesh_shape=hsdp"),
        ("training.mixed_precision=bfloat16", "here it is training.mixed_precision=bf16"),
        ("training.remat=selective", "here it is training.remat=dots"),
        ("scheduler=cosine", "here it is scheduler=warmup_cosine"),
        ("optimizer=adam", "here it is optimizer=adamw"),
        ("+training.sync_gradients_every=2", "+training.sync_gradients_every: the config has this key already; write it without +"),
        ("training.wobble=1", "unknown key training.wobble; docs/config.md lists all keys"),
    ],
)  # fmt: skip
def test_answers(word, answer):
    with pytest.raises(UserError) as error:
        compose([word])
    assert answer in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--dry-run"], "--dry-run: there is no such flag; here it is dry_run=true"),
        (["--lr", "1e-3"], "--lr: there is no such flag; here it is optimizer.learning_rate=3e-4"),
        (["--seq=3"], "--seq: there is no such flag; keys are written without dashes: seq=3"),
        (["--output_dir=x"], "--output_dir: there is no such flag; here it is hydra.run.dir=FOLDER"),
        (["--config-file", "x"], "--config-file: there is no such flag; here it is --config-path FOLDER --config-name NAME"),
        (["--info", "config-groups"], "--info config-groups: choose from all, config, defaults"),
        (["--multirun", "hydra/sweeper=optuna", "seed=1,2"], "hydra/sweeper=optuna: "),
    ],
)  # fmt: skip
def test_flags_of_other_programs(words, answer, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_training.py", *words])
    assert train_command() == 2
    err = capsys.readouterr().err
    assert answer in err
    assert len(err.splitlines()) == 1


def test_flags_have_an_answer():
    assert all(words for words in FLAGS.values())
    assert find_key("nothing_like_it") == ""


def test_output_that_is_no_terminal_is_not_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("a long heading of a column", "another")
    table.add_row("x" * 200, "y" * 50)
    out = io.StringIO()
    with redirect_stdout(out):
        print_table(table)
    assert "x" * 200 in out.getvalue()
    assert "y" * 50 in out.getvalue()
    assert "…" not in out.getvalue()
