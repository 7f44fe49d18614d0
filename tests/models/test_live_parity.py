"""transformers and PEFT themselves read what is exported, and say today what the fixtures say they said."""

import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from models.test_parity import MODELS, PARITY
from safetensors.numpy import load_file, save_file
from support import installs

import tunix
from tunix.config import Export
from tunix.config.command_line import read_settings
from tunix.export import _write_adapter, export
from tunix.models.layers import named
from tunix.training.state import describe

pytestmark = pytest.mark.slow
LOGITS = """
import sys, warnings, logging
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # of transformers, about PEFT
import torch, transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging as theirs
class Loud(logging.Handler):
    def emit(self, record):
        text = record.getMessage()  # what has a faster program for GPUs is no warning about the files
        if "CUDA-fused xIELU" not in text and "is falling back to its reference" not in text:
            sys.exit(f"{record.name} warned: {record.getMessage()}")
for logger in (theirs.get_logger(), logging.getLogger("peft")): logger.addHandler(Loud(level=logging.WARNING))
theirs.disable_progress_bar()
base, tokens, out, *adapters = sys.argv[1:]
for folder in base.split(":"):
    config = transformers.AutoConfig.from_pretrained(folder)
    is_text = type(config) in transformers.AutoModelForCausalLM._model_mapping
    kind = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
    model, found = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(found.values()), found
    for adapter in adapters:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, adapter)
    save_file({"logits": model(load_file(f"{folder}/{tokens}")["tokens"].long()).logits}, f"{folder}/{out}")
"""


@pytest.fixture(scope="module")
def python(installs_dir) -> Path:
    return installs.torch(installs_dir) / "python"


def their_logits(python: Path, folders: list[Path], *adapters: Path) -> list[np.ndarray]:
    """Of `tokens` in each folder, by a process that ends at the first warning."""
    words = [":".join(map(str, folders)), "tokens", "logits", *map(str, adapters)]
    done = subprocess.run([python, "-c", LOGITS, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [load_file(folder / "logits")["logits"] for folder in folders]


@pytest.mark.nightly
def test_transformers_loads_what_is_exported_without_a_warning(python, tmp_path):
    expected = [load_file(PARITY / name / "expected.safetensors") for name in MODELS]
    for name, said in zip(MODELS, expected, strict=True):
        output = str(tmp_path / name)
        export(read_settings(Export, [f"checkpoint={PARITY / name}", f"output={output}"]))
        save_file({"tokens": said["tokens"]}, tmp_path / name / "tokens")
    logits = their_logits(python, [tmp_path / name for name in MODELS])
    for name, said, ours in zip(MODELS, expected, logits, strict=True):
        np.testing.assert_allclose(ours, said["logits"], atol=1e-4, err_msg=name)


@pytest.mark.nightly
def test_peft_loads_an_adapter(python, tmp_path):
    base = tunix.load_pretrained(PARITY / "llama")
    cfg = base.cfg.model_copy(update={"lora": base.cfg.lora.model_copy(update={"rank": 2, "alpha": 6.0})})
    given, rng = dict(named(base.params)), np.random.default_rng(0)
    with jax.set_mesh(base.mesh):
        arch = describe(cfg, base.layout)
        leaves = [
            given[name] if name in given else jax.numpy.asarray(rng.normal(size=weight.shape).astype(np.float32))
            for name, weight in named(arch.weights)
        ]
        params = jax.tree.unflatten(jax.tree.structure(arch.weights), leaves)
    model = replace(base, cfg=cfg, arch=arch, params=params)
    export(read_settings(Export, [f"checkpoint={PARITY / 'llama'}", f"output={tmp_path / 'base'}"]))
    tokens = load_file(PARITY / "llama" / "expected.safetensors")["tokens"]
    save_file({"tokens": tokens}, tmp_path / "base" / "tokens")
    (tmp_path / "adapter").mkdir()
    _write_adapter(model, tmp_path / "adapter", "float32", 5)
    (logits,) = their_logits(python, [tmp_path / "base"], tmp_path / "adapter")
    np.testing.assert_allclose(logits, model(tokens), atol=1e-4)
    assert np.abs(logits - np.asarray(base(tokens))).max() > 0.1


@pytest.mark.nightly
def test_the_models_are_made_as_the_script_makes_them(python, tmp_path):
    subprocess.run([python, str(PARITY / "make.py"), str(tmp_path)], check=True, capture_output=True)
    for path in PARITY.glob("*/expected.safetensors"):
        for name, value in load_file(tmp_path / path.relative_to(PARITY)).items():
            np.testing.assert_allclose(value, load_file(path)[name], atol=1e-4, err_msg=f"{path} {name}")
