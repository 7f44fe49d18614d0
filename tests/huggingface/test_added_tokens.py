"""A model that starts from Hugging Face's files with more tokens than these have rows."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import tunix
from tunix.base.errors import UserError
from tunix.config import Export
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.export import export
from tunix.huggingface.quantized_tensors import Enlarged

OLD, NEW = 320, 384  # rows


@pytest.fixture(scope="module")
def more_words(hf_dir, tmp_path_factory) -> Path:
    """The tokenizer of the folder with tokens for which its tables have no rows."""
    folder = tmp_path_factory.mktemp("words")
    shutil.copytree(hf_dir, folder / "words", ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    words = Tokenizer.from_file(str(folder / "words/tokenizer.json"))
    words.add_special_tokens([f"<added {number}>" for number in range(60)])
    words.save(str(folder / "words/tokenizer.json"))
    return folder / "words"


@pytest.mark.nightly
def test_rows_of_added_tokens(hf_dir, more_words, corpus, tmp_path, monkeypatch):
    """They are the mean of the others, in both tables, on a mesh that splits them; exports have them."""
    monkeypatch.chdir(tmp_path)
    tunix.train([
        f"model.init_from={hf_dir}", f"tokenizer.path={more_words}", "model.vocab_size=auto", "model.lora.rank=2",
        "data=text", f"data.paths=[{corpus}]", "training.max_steps=1", "optimizer.learning_rate=1e-30",
        "training.seq_len=32", "training.micro_batch_size=1", "training.mixed_precision=fp32", "hydra.run.dir=run",
        "model.mesh_shape=[[2],[tp]]", "distributed.allow_idle_devices=true", "evaluation.every_steps=null", "evaluation.sample_tokens=0",
        "training.check_attention=false", "checkpoint.verify=never",
    ])  # fmt: skip
    report = Path("run/train.log").read_text()
    assert f"{hf_dir}; 64 rows of vocabulary added to its 320, each the mean of those" in report
    with pytest.raises(UserError, match=r"has 384 rows of vocabulary, 64 more than its base; .*merge_lora=true"):
        export(read_settings(Export, ["checkpoint=run", "output=out"]))
    export(read_settings(Export, ["checkpoint=run", "output=out", "merge_lora=true", "dtype=float32"]))
    assert json.loads(Path("out/config.json").read_text())["vocab_size"] == NEW
    before: dict[str, np.ndarray] = {}
    for file in hf_dir.glob("*.safetensors"):
        before |= load_file(file)
    after = load_file("out/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        table, old = after[name], before[name].astype(np.float32)
        assert table.shape[0] == NEW
        assert np.array_equal(table[:OLD], old)
        np.testing.assert_allclose(table[OLD:], np.tile(old.mean(0), (NEW - OLD, 1)), rtol=1e-5, atol=1e-8)
    tokens = [[1, 7, 300, 319, 5]]
    logits = [np.asarray(tunix.load_pretrained(source)(tokens))[..., :OLD] for source in (hf_dir, "out")]
    np.testing.assert_allclose(*logits, atol=1e-5)


def test_rows_that_are_asked_for(hf_dir, more_words):
    """As many as the tokenizer needs, at least those that are there; never fewer."""
    base = [f"model.init_from={hf_dir}", "training.seq_len=64"]
    assert compose([*base, "model.vocab_size=auto"]).config.model.vocab_size == OLD
    larger = compose([*base, "model.vocab_size=auto", f"tokenizer.path={more_words}"]).config
    assert larger.model.vocab_size == NEW
    assert compose([*base, "model.vocab_size=333"]).config.model.vocab_size == 333
    with pytest.raises(
        UserError, match="model.vocab_size=256, but .*config.json says 320: rows are added, never taken"
    ):
        compose([*base, "model.vocab_size=256"])


def test_slices_of_an_enlarged_table():
    """The same numbers in any pieces."""

    class Table:
        shape, dtype, tensors = (5, 4), "F32", ()
        rows = np.arange(20, dtype=np.float32).reshape(5, 4)

        def read(self, index):
            return self.rows[index]

    table = Enlarged(Table(), 8)
    table.AT_ONCE = 2
    full = table.read((slice(0, 8), slice(None)))
    assert np.array_equal(full, [*Table.rows, *[Table.rows.mean(0)] * 3])
    for first, last in ((0, 3), (4, 6), (5, 5), (6, 8)):
        for columns in (slice(0, 2), slice(1, 4)):
            assert np.array_equal(table.read((slice(first, last), columns)), full[first:last, columns])
