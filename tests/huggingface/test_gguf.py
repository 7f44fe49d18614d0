"""GGUF files: the tensors and keys of llama.cpp's converter (`gguf/make.py`), the tokenizer, and what is refused."""

import hashlib
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from models.test_parity import PARITY
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import tunix
from tunix.base.errors import UserError
from tunix.config import Export
from tunix.config.command_line import read_settings
from tunix.config.pretrained_config import trained_model
from tunix.export import _write_gguf, _write_model, export
from tunix.huggingface.gguf_file import ARCHITECTURES, _add_sizes, _add_tokenizer, _choose_kind, check

EXPECTED = json.loads((Path(__file__).parent / "gguf/expected.json").read_text())
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.5}


def give_tokenizer(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write(folder: Path, output: Path, *words: str) -> gguf.GGUFReader:
    export(read_settings(Export, [f"checkpoint={folder}", f"output={output}", "format=gguf", *words]))
    return gguf.GGUFReader(output / "model.gguf")


def keys_of(reader: gguf.GGUFReader) -> dict:
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.mark.parametrize("name", EXPECTED)
def test_tensors_are_those_of_the_converter(name, tmp_path):
    """To the bit: rotated pairs, norms, stacked experts, factors of Llama 3's RoPE; and every key that it writes."""
    folder = give_tokenizer(Path(shutil.copytree(PARITY / name, tmp_path / name)))
    config = json.loads((folder / "config.json").read_text())
    if "query_pre_attn_scalar" in config:  # llama.cpp has one scale of queries
        (folder / "config.json").write_text(json.dumps(config | {"query_pre_attn_scalar": config["head_dim"]}))
    reader, expected = write(folder, tmp_path / "out", "dtype=float32"), EXPECTED[name]
    ours = {
        each.name: [list(each.data.shape), hashlib.sha256(each.data.tobytes()).hexdigest()] for each in reader.tensors
    }
    # A factor of RoPE is computed in float64 here: it may differ in the last bit.
    rope = ours.pop("rope_freqs.weight", None), expected["tensors"].pop("rope_freqs.weight", None)
    assert (rope[0] is None) == (rope[1] is None)
    assert ours == expected["tensors"]
    keys = keys_of(reader)
    for key, value in expected["keys"].items():
        assert keys[key] == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize(
    ("pooling", "number"),
    [({"pooling_mode": "mean"}, 1), ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, 3)],
    ids=["sentence-transformers 5", "before"],
)
def test_rope_factors_of_llama_3_pooling_and_several_templates(pooling, number, tmp_path):
    folder = give_tokenizer(Path(shutil.copytree(PARITY / "llama", tmp_path / "llama")))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    templates = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    reader = write(folder, tmp_path / "out")
    keys = keys_of(reader)
    assert keys["llama.pooling_type"] == number
    assert [keys[f"tokenizer.chat_template{name}"] for name in ("", ".tool_use")] == ["{{ 1 }}", "{{ 2 }}"]
    factors = next(each.data for each in reader.tensors if each.name == "rope_freqs.weight")
    frequencies = 500.0 ** -(np.arange(0, 8, 2) / 8)
    # transformers' own function, for this config: see LLAMA_ROPE in tests/models/parity/make.py.
    smooth = np.clip((16 / (2 * np.pi / frequencies) - 1) / 3, 0, 1)
    np.testing.assert_allclose(factors, 1 / ((1 - smooth) / 4 + smooth), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("1_Pooling/config.json", b"[]", "1_Pooling/config.json is not a JSON object"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8 .byte 0.; save it as UTF-8"),
    ],
)
def test_a_damaged_file_of_the_model_is_named(name, content, message, tmp_path):
    folder = give_tokenizer(Path(shutil.copytree(PARITY / "llama", tmp_path / "llama")))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        write(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("dtype", "kind", "tolerance"), [("bfloat16", "BF16", 0), ("float16", "F16", 0), ("q8_0", "Q8_0", 0.005)]
)
def test_dtypes_and_tokenizer(dtype, kind, tolerance, hf_dir, tmp_path):
    """bfloat16 weights survive bfloat16 (and here float16); q8_0 is within half a step of the largest of 32."""
    reader = write(hf_dir, tmp_path / "out", f"dtype={dtype}")
    tensors = {each.name: each for each in reader.tensors}
    assert tensors["blk.1.ffn_up.weight"].tensor_type.name == kind
    assert tensors["blk.1.ffn_norm.weight"].tensor_type.name == "F32"
    up = gguf.quants.dequantize(tensors["blk.1.ffn_up.weight"].data, tensors["blk.1.ffn_up.weight"].tensor_type)
    expected = np.asarray(tunix.load_pretrained(hf_dir).params["blocks"]["mlp"]["up"]["w"])[1].T
    np.testing.assert_allclose(up, expected, atol=tolerance * np.abs(expected).max() + 1e-6)
    keys, backend = keys_of(reader), Tokenizer.from_file(str(hf_dir / "tokenizer.json"))
    tokens = keys["tokenizer.ggml.tokens"]
    assert [backend.id_to_token(index) or f"[PAD{index}]" for index in range(320)] == tokens
    assert keys["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert keys["tokenizer.ggml.token_type"][-1] == 5
    assert [tokens[keys[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")] == ["<bos>", "<eos>"]
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    merges = json.loads((hf_dir / "tokenizer.json").read_text())["model"]["merges"]
    assert keys["tokenizer.ggml.merges"] == [" ".join(merge) for merge in merges]
    assert "add_generation_prompt" in keys["tokenizer.chat_template"]
    assert (tmp_path / "out/Modelfile").read_text().startswith("FROM ./model.gguf\n")


def test_all_that_ends_an_answer(tmp_path):
    """llama.cpp reads the file alone, Ollama the words beside it; an id that is no token ends nothing, and none begins."""
    folder = give_tokenizer(Path(shutil.copytree(PARITY / "llama", tmp_path / "llama")))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "ab", "eos_token": "b"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1, 7]}')
    keys = keys_of(write(folder, tmp_path / "out", "dtype=float32"))
    assert [keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot")] == [1, 2]
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert (tmp_path / "out/Modelfile").read_text().endswith('PARAMETER stop "b"\nPARAMETER stop "ab"\n')


def test_a_file_that_is_not_what_was_written_is_named(tmp_path, monkeypatch):
    folder = give_tokenizer(Path(shutil.copytree(PARITY / "llama", tmp_path / "llama")))
    written = gguf.GGUFWriter.write_tensor_data
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", lambda self, data: written(self, data * 0))
    with pytest.raises(UserError, match=r"is not what was written: blk.0.attn_k.weight, .* is the disk full"):
        write(folder, tmp_path / "out", "dtype=float32")


def test_float16_and_named_templates(tmp_path):
    """Numbers that float16 lacks would be infinite; further templates belong to the tokenizer."""
    folder = give_tokenizer(Path(shutil.copytree(PARITY / "llama", tmp_path / "llama")))
    (folder / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (folder / name).write_text("{{ messages }}")
    export(read_settings(Export, [f"checkpoint={folder}", f"output={tmp_path / 'out'}"]))
    assert (tmp_path / "out/additional_chat_templates/tool_use.jinja").read_text() == "{{ messages }}"
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    save_file(weights | {name: weights[name] + np.float32(70_000)}, folder / "model.safetensors")
    for words in (["format=gguf"], []):
        command = [f"checkpoint={folder}", f"output={tmp_path / 'half'}", "dtype=float16", *words]
        with pytest.raises(UserError, match=r"dtype=float16: \S+ has numbers above 65504"):
            export(read_settings(Export, command))
        assert not (tmp_path / "half").exists()


def test_a_model_that_its_family_does_not_compute_is_refused(tmp_path):
    """llama.cpp would compute a llama: a run with another activation or cap was written, and gave other answers there."""
    model = tunix.load_pretrained(PARITY / "llama")
    other = replace(model, cfg=model.cfg.model_copy(update={"logits_cap": 5.0}))
    for write_model in (_write_model, partial(_write_gguf, "")):
        with pytest.raises(UserError, match=r"cannot be written as a llama: model.logits_cap=5.0 \(a llama has None\)"):
            write_model(other, tmp_path, "float32", 5)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "gemma3",
            {"layer_types": None, "num_hidden_layers": 6},
            {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.sliding_window": 5},
        ),
        (
            "llama",
            {"rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2}, "rope_parameters": None},
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 16,
             "scaling.yarn_beta_fast": 16, "scaling.yarn_beta_slow": 2},
        ),
    ],
)  # fmt: skip
def test_keys_of_rotations(name, changes, expected, tmp_path):
    """Of local layers beside global ones, and of a stretched context."""
    config = json.loads((PARITY / name / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    writer = gguf.GGUFWriter(None, ARCHITECTURES[name].name)
    _add_sizes(writer, trained_model(tmp_path, ((1,), ("tp",))), gguf)
    keys = {key: each.value for key, each in writer.kv_data[0].items()}
    assert {key: keys.get(f"{name}.{key}", keys.get(f"{name}.rope.{key}")) for key in expected} == expected


@pytest.mark.parametrize(
    ("marks", "prepends"),
    [
        ({"normalizer": normalizers.Prepend("▁")}, True),
        ({"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")}, True),
        ({"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="never")}, False),
        ({"normalizer": normalizers.Replace(" ", "▁")}, False),
    ],
)
def test_a_tokenizer_like_sentencepiece(marks, prepends, tmp_path):
    """llama.cpp merges the pair with the highest score first: that of its earliest merge, of several with one result."""
    words = ["<s>", "<0x0A>", "a", "b", "c", "ab", "bc", "abc", "▁"]
    merges = [("a", "b"), ("ab", "c"), ("b", "c"), ("a", "bc")]
    backend = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges, byte_fallback=True))
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<think>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A ▁", special_tokens=[("<s>", 0), ("▁", 8)])
    for part, value in marks.items():
        setattr(backend, part, value)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "▁", "chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new")
    writer = gguf.GGUFWriter(None, "llama")
    _add_tokenizer(writer, tmp_path, 11, [], gguf)
    keys = {key.removeprefix("tokenizer.ggml."): each.value for key, each in writer.kv_data[0].items()}
    assert (keys["model"], keys["tokens"]) == ("llama", [*words, "<think>", "[PAD10]"])
    assert keys["scores"] == [-4, -4, -4, -4, -4, 0, -2, -1, -4, -4, -4]
    normal, control, user_defined, unused, byte = 1, 3, 4, 5, 6
    assert keys["token_type"] == [control, byte, *[normal] * 7, user_defined, unused]
    assert keys["add_space_prefix"] is prepends
    assert keys["add_bos_token"] is keys["add_eos_token"] is True
    assert keys["tokenizer.chat_template"] == "new"


def test_kinds_of_numbers_beside_q8_0():
    """Rows without whole blocks are float16, vectors and routers float32."""
    shapes = {"ffn_up": (4, 64), "ffn_down": (4, 48), "attn_norm": (64,), "ffn_gate_inp": (4, 64)}
    kinds = [_choose_kind(f"blk.0.{name}.weight", shape, "q8_0", gguf).name for name, shape in shapes.items()]
    assert kinds == ["Q8_0", "F16", "F32", "F32"]


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_tokenizer": pre_tokenizers.Whitespace()}, r"no name for \({'type': 'Whitespace'}\)"),
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, "'add_prefix_space': True"),
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(False, use_regex=False)}, "'use_regex': False"),
        (
            {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(False), BYTES])},
            "'individual_digits': False",
        ),
        ({"normalizer": normalizers.Lowercase()}, r"^the tokenizer changes .* that llama.cpp lacks \(Lowercase\)"),
        ({"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])}, r"lacks \(NFKC\)"),
    ],
)
def test_words_that_llama_cpp_would_cut_otherwise(changes, message, tmp_path):
    folder = give_tokenizer(Path(shutil.copytree(PARITY / "llama", tmp_path / "llama")))
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for part, value in changes.items():
        setattr(backend, part, value)
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match=message):
        write(folder, tmp_path / "out")


def test_what_has_no_place_in_a_file(tmp_path, hf_dir, monkeypatch):
    cases = {
        "gemma2": "model.query_scale=1 is not 16, which llama.cpp has for a gemma2 of 2 layers",
        "gpt2": "format=gguf has no model.family=gpt2; it has gemma2, gemma3, llama",
        "gemma3": "model.global_every=3: llama.cpp has one global layer in 6 of a gemma3, so format=gguf cannot hold it",
        "phi3_long": "format=gguf has no model.family=phi3",
        "qwen3_moe": "model.mlp.dense_layers=1: llama.cpp has none in a qwen3_moe",
        "llama_linear": "format=gguf holds a tokenizer, and the model has no tokenizer.json",
    }
    for name, message in cases.items():
        with pytest.raises(UserError) as error:
            write(PARITY / name, tmp_path / "out")
        assert message in str(error.value)
        assert not (tmp_path / "out").exists()
    further: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}, "model.mlp.normalized=false"),
        (
            "llama",
            {"rope_scaling": YARN, "rope_parameters": None},
            "model.rope_scaling.attention_factor=1.5: llama.cpp",
        ),
        (
            "llama",
            {"rope_scaling": YARN | {"attention_factor": None, "truncate": False}, "rope_parameters": None},
            "model.rope_scaling.truncate=false: llama.cpp rounds",
        ),
        # It reads the tensor of factors in models of its name llama alone, and refuses a file with a tensor that it leaves.
        ("qwen2", {"rope_scaling": LLAMA3, "rope_parameters": None}, "name=llama3: llama.cpp does not read"),
        # Of keys that a file of Gemma 2 lacks, llama.cpp has values of its own: 50, 30 and 4,096.
        ("gemma2", {"attn_logit_softcapping": None}, "model.attention_cap=null: llama.cpp takes one of its own"),
        ("gemma2", {"final_logit_softcapping": None}, "model.logits_cap=null: llama.cpp"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "model.sliding_window=null: llama.cpp"),
        # The scale of the model with 27B is that of 46 layers alone.
        ("gemma2", {"query_pre_attn_scalar": 8}, "model.query_scale=8 is not 16"),
        ("gemma2", {"query_pre_attn_scalar": 16, "num_hidden_layers": 46, "layer_types": None}, "is not 8, which"),
    )
    for name, keys, message in further:
        config = json.loads((PARITY / name / "config.json").read_text()) | keys
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=message):
            check(trained_model(tmp_path, ((1,), ("tp",))), "float32")
    with pytest.raises(
        UserError, match="format=gguf holds whole models; add the updates to the matrices: merge_lora=true"
    ):
        write(PARITY / "llama", tmp_path / "out", f"adapter={Path(__file__).parent / 'adapters/llama'}")
    with pytest.raises(UserError, match="dtype=q8_0 is for format=gguf; add it, or take bfloat16"):
        read_settings(Export, ["checkpoint=x", "output=y", "dtype=q8_0"])
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UserError, match=r"format=gguf needs gguf: pip install 'tunix-trainer\[gguf\]'"):
        export(read_settings(Export, [f"checkpoint={hf_dir}", f"output={tmp_path / 'out'}", "format=gguf"]))
