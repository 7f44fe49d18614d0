"""Runs that version 0.1.0 saved go on: the same digits, and every saved config is understood.

saved_by_0_1_0.tar.gz holds a run of 6 steps (with its checkpoint of step 3 and its metrics), its corpus, resolved configs
of other runs, and the flags of the CPU that the run was made on.
"""

import json
import tarfile
from pathlib import Path

import pytest
import yaml
from support.harness import cli, metrics

from tunix.base.nested import flat
from tunix.cli.compose import compose

CONFIGS = ("default", "gpt2", "llama", "qwen_sft", "olmo_lora", "experiment", "tokens", "mixture")
NEW_FORM = ("model.mlp", "model.biases", "logging.tensorboard")  # keys that have another form now

MLP = {"gated_silu": ("gated", "silu"), "gated_gelu": ("gated", "gelu"), "gelu": ("plain", "gelu")}


@pytest.fixture
def saved(tmp_path) -> Path:
    with tarfile.open(Path(__file__).with_name("saved_by_0_1_0.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def numbers(folder: Path) -> list[tuple]:
    """Step, split, loss and gradient norm of each line of metrics after step 3."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], line.get("split"), line["loss"], line.get("grad_norm")) for line in lines if line["step"] > 3
    ]


def test_a_saved_run_goes_on_with_the_same_digits(saved):
    """Another kind of CPU may add up in another order: there, float32 rounding is allowed."""
    expected = numbers(saved / "run")
    (saved / "run" / "metrics.jsonl").unlink()
    done = cli("resume=run", cwd=saved, devices=2)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 3" in done.stdout
    assert [line["step"] for line in metrics(saved / "run")] == [4, 5, 6]
    resumed = numbers(saved / "run")
    if (saved / "cpu_flags").read_text() in Path("/proc/cpuinfo").read_text():
        assert resumed == expected
    else:
        rounded = [tuple(pytest.approx(x, rel=1e-6) if isinstance(x, float) else x for x in line) for line in expected]
        assert resumed == rounded


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_config_is_understood(name, saved):
    run = saved / name
    run.mkdir()
    text = (saved / "configs" / f"{name}.yaml").read_text()
    (run / "config.yaml").write_text(text)
    old = flat(yaml.safe_load(text))
    new = flat(compose([f"resume={run}"]).config.model_dump(mode="json", by_alias=True))
    assert (new["model.mlp.kind"], new["model.mlp.activation"]) == MLP[old["model.mlp"]]
    assert new["model.biases"] == ("attention|mlp" if old["model.biases"] else None)
    kept = {key: value for key, value in old.items() if key not in (*NEW_FORM, "resume")}
    assert {key: new.get(key, "missing") for key in kept} == kept
