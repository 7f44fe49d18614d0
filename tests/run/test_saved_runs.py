"""Runs that earlier versions saved go on: the same digits, and every saved config is understood.

saved_by_VERSION.tar.gz holds a run of 6 steps (with its checkpoint of step 3 and its metrics), its corpus, resolved
configs of other runs, and the flags of the CPU that the run was made on. The run of commit 0979945 has experts and an
average of its weights.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from safetensors import safe_open
from safetensors.numpy import load_file
from support.harness import cli, extract, metrics

from tunix.base.config_types import read_version
from tunix.base.errors import UserError
from tunix.base.forms import FORMS
from tunix.base.text import flat
from tunix.checkpoints.bucket import name_array
from tunix.config import Export
from tunix.config.command_line import read_settings
from tunix.config.compose import compose, to_yaml
from tunix.config.saved_runs import upgrade
from tunix.data.tokenizer import read_vocab
from tunix.export import export
from tunix.inference.pretrained import load_pretrained
from tunix.run.folder import find_model_files, keep_files

CONFIGS = {
    "0_1_0": ("default", "gpt2", "llama", "qwen_sft", "olmo_lora", "experiment", "tokens", "mixture"),
    "0979945": ("default", "deepseek", "dpo", "gemma4", "gpt_oss", "grpo", "qwen3_next", "saved_run", "sft_lora"),
}
NEW_FORM = ("model.mlp", "model.biases", "logging.tensorboard")  # keys that have another form now

MLP = {"gated_silu": ("gated", "silu"), "gated_gelu": ("gated", "gelu"), "gelu": ("plain", "gelu")}


@pytest.fixture
def unpack(tmp_path):
    def unpack(version: str) -> Path:
        extract(Path(__file__).with_name(f"saved_by_{version}.tar.gz"), tmp_path)
        return tmp_path

    return unpack


def numbers(folder: Path) -> list[tuple]:
    """Step, split, loss and gradient norm of each line of metrics after step 3."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line.get("split") != "goodput"]
    return [
        (line["step"], line.get("split"), line["loss"], line.get("grad_norm")) for line in lines if line["step"] > 3
    ]


@pytest.mark.parametrize("version", CONFIGS)
def test_a_saved_run_goes_on_with_the_same_digits(version, unpack):
    """Another kind of CPU may add up in another order: there, float32 rounding is allowed."""
    saved = unpack(version)
    expected = numbers(saved / "run")
    (saved / "run" / "metrics.jsonl").unlink()
    done = cli("resume=run", cwd=saved, devices=2)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 3" in done.stdout
    assert [line["step"] for line in metrics(saved / "run")] == [4, 5, 6]
    made = json.loads((saved / "run" / "checkpoints" / "6" / "run" / "metadata").read_text())
    assert made["written_by"] == {"tunix": read_version(), "kind": "checkpoint", "form": FORMS["checkpoint"]}
    resumed = numbers(saved / "run")
    if (saved / "cpu_flags").read_text() in Path("/proc/cpuinfo").read_text():
        assert resumed == expected
    else:
        rounded = [tuple(pytest.approx(x, rel=1e-6) if isinstance(x, float) else x for x in line) for line in expected]
        assert resumed == rounded


def understand(text: str, run: Path) -> tuple[dict, dict]:
    """Return the keys of a saved config, and those of the run that goes on from it."""
    run.mkdir()
    (run / "config.yaml").write_text(text)
    new = compose([f"resume={run}"]).config.model_dump(mode="json", by_alias=True)
    return flat(yaml.safe_load(text)), flat(new)


@pytest.mark.parametrize("name", CONFIGS["0_1_0"])
def test_a_config_of_0_1_0_is_understood(name, unpack):
    saved = unpack("0_1_0")
    old, new = understand((saved / "configs" / f"{name}.yaml").read_text(), saved / name)
    assert (new["model.mlp.kind"], new["model.mlp.activation"]) == MLP[old["model.mlp"]]
    assert new["model.biases"] == ("attention|mlp" if old["model.biases"] else None)
    kept = {key: value for key, value in old.items() if key not in (*NEW_FORM, "resume")}
    assert {key: new.get(key, "missing") for key in kept} == kept


@pytest.mark.parametrize("name", CONFIGS["0979945"])
def test_a_config_of_0979945_is_understood(name, unpack):
    saved = unpack("0979945")
    old, new = understand((saved / "configs" / f"{name}.yaml").read_text(), saved / name)
    # A reward has got a name since then: null, as whoever saved this meant it.
    rewards = [each | {"name": None} for each in old.get("task.rewards", [])]
    kept = {key: value for key, value in old.items() if key != "resume"} | (
        {"task.rewards": rewards} if rewards else {}
    )
    assert {key: new.get(key, "missing") for key in kept} == kept


def test_a_run_by_gpipe_goes_on_by_1f1b():
    assert upgrade({"training": {"pipeline_schedule": "gpipe"}})["training"]["pipeline_schedule"] == "1f1b"


def test_the_whole_state_in_one_file(unpack):
    """Arrays as a resume reads them, and what a checkpoint says beside them."""
    run = unpack("0979945") / "run"
    words = [f"checkpoint={run}", "format=state"]
    line = export(read_settings(Export, [*words, f"output={run}/one.safetensors"]))
    assert "the state after step 3, " in line
    assert (run / "one.safetensors").stat().st_mode == (run / "config.yaml").stat().st_mode  # others may read it
    arrays = load_file(run / "one.safetensors")
    model = load_pretrained(run)
    for path, leaf in jax.tree_util.tree_leaves_with_path({"params": model.params}):
        np.testing.assert_array_equal(arrays[name_array(path)], leaf)
    moments = {name for name in arrays if name.startswith("opt_state/")}
    assert {name.split("/")[0] for name in arrays} == {"params", "opt_state", "copies", "skipped", "step"}
    assert len(moments) > 2 * len(jax.tree.leaves(model.params))
    with safe_open(run / "one.safetensors", "np") as file:
        about = {name: json.loads(text) for name, text in file.metadata().items()}
    assert about["run"]["position"]["step"] == 3
    assert about["tokenizer"]["model"]
    for output in (f"{run}/one.safetensors", "s3://bucket/one"):
        with pytest.raises(UserError, match=f"output={output}: format=state writes a new file on this machine"):
            export(read_settings(Export, [*words, f"output={output}"]))


def test_a_run_goes_on_without_the_folder_that_it_began_from(hf_dir, tmp_path, monkeypatch):
    """It has copies of the tokenizer and of what ends an answer; whatever was typed, the folder was missed. Without a
    shared disk each host has them, not that of process 0 alone."""
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(hf_dir, base)
    words = [f"model.init_from={base}", "training.seq_len=32", "training.loss_chunk_size=32"]
    cfg = compose(words).config
    assert (cfg.tokenizer.path, find_model_files(cfg)) == (str(base), base)
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(cfg))
    with monkeypatch.context() as patch:
        patch.setattr("tunix.processes.peers.is_main", lambda: False)
        keep_files(cfg, read_vocab(cfg.tokenizer), run, shared=True)
        assert not (run / "tokenizer").exists()
        keep_files(cfg, read_vocab(cfg.tokenizer), run, shared=False)
    assert compose([f"resume={run}"]).config.tokenizer.path == str(base)
    shutil.rmtree(base)
    cfg = compose([f"resume={run}"]).config
    assert (cfg.tokenizer.path, find_model_files(cfg)) == (str(run / "tokenizer"), run / "pretrained")
    assert compose([f"resume={run}", "tokenizer.path=/mine.json"]).config.tokenizer.path == "/mine.json"
    shutil.rmtree(run / "pretrained")
    with pytest.raises(UserError, match=r"^model.init_from=.*/base is neither a folder nor the ID of a model"):
        find_model_files(cfg)
