"""Models in from Hugging Face's files, trained, and out again; what is refused on the way, and by what name."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from sentencepiece import sentencepiece_model_pb2
from support.harness import ROOT, extract, metrics
from support.hf_files import TEMPLATE, WORDS
from tokenizers import Tokenizer, models, pre_tokenizers

import tunix
from tunix.base.errors import UserError
from tunix.config import Evaluate, Export
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.config.pretrained_config import trained_model
from tunix.data.tokenizer import BPE, CONTROL, load_vocab, read_backend, read_vocab
from tunix.evaluate import _list_steps
from tunix.export import _write_model, export
from tunix.huggingface.config_json import read_config, translate_config, write_config
from tunix.huggingface.weights import weight_files
from tunix.inference import pretrained
from tunix.inference.pretrained import agree_on_checkpoint, reject_other_files
from tunix.inference.sampling import Sampling
from tunix.models.layers import named
from tunix.processes import peers

PARITY = ROOT / "tests" / "models" / "parity"


@pytest.fixture
def copy(hf_dir, tmp_path):
    return shutil.copytree(hf_dir, tmp_path / "copy")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_tensors(folder, change):
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def first(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def truncated(folder):
    first(folder).write_bytes(first(folder).read_bytes()[:-100])


def pickled(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04}q\x00.")


def without_norm(folder):
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        tensors.pop("model.norm.weight", None)
        save_file(tensors, path)


def without_head(folder):
    """As transformers saves AutoModel."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        tensors.pop("lm_head.weight", None)
        save_file(tensors, path)


def with_norm_in_each_file(folder):
    """Of files that differ, the last one was taken, whatever the index says."""
    for path in folder.glob("*.safetensors"):
        save_file(load_file(path) | {"model.norm.weight": np.ones(32, np.float32)}, path)


def with_head_of_booleans(folder):
    change_config(folder, tie_word_embeddings=True)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: value.astype(bool) if "lm_head" in name else value for name, value in tensors.items()}, path)


BAD = {
    "no model": (lambda folder: (folder / "config.json").unlink(), "is not a model's folder: it has no config.json; give a folder or an ID of the Hugging Face hub, or a run's"),
    "an adapter": (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "copy is an adapter alone: give its base, and model.init_adapter="),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
    "unknown family": (lambda folder: change_config(folder, model_type="mamba"), "model_type=mamba is not understood; understood are apertus, deepseek_v3, exaone4"),
    "unknown family that sees": (lambda folder: change_config(folder, model_type="qwen3_vl_moe", text_config={"model_type": "qwen3_vl_moe_text"}), "model_type=qwen3_vl_moe is not understood"),
    "unknown key": (lambda folder: change_config(folder, num_experts=8), "num_experts=8 is not understood for model_type=llama; take it out if"),
    "unsupported value": (lambda folder: change_config(folder, mlp_bias=True), "mlp_bias=True is not supported; it must be False"),
    "remote code": (lambda folder: change_config(folder, auto_map={"AutoModel": "m.M"}), "auto_map asks for code of the model's own, which is never run"),
    "unknown rope": (lambda folder: change_config(folder, rope_scaling={"rope_type": "dynamic"}), "rope_type=dynamic is not understood"),
    "unknown key of rope": (lambda folder: change_config(folder, rope_scaling={"rope_type": "yarn", "factor": 2.0, "mscale": 2}), "rope_type=yarn: mscale=2 is not understood"),
    "a list for a rope": (lambda folder: change_config(folder, rope_scaling=["linear"]), "rope_scaling=['linear'] is not a JSON object"),
    "incomplete rope": (lambda folder: change_config(folder, rope_scaling={"rope_type": "linear"}), "rope_type=linear needs factor"),
    "a size left out": (lambda folder: change_config(folder, hidden_size=...), "hidden_size is missing"),
    "odd layers": (lambda folder: change_config(folder, layer_types=["full_attention", "sliding_attention", "full_attention"]), "layer_types="),
    "a tensor twice": (with_norm_in_each_file, "has model.norm.weight twice, again in model-0000"),
    "missing tensor": (without_norm, "lacks model.norm.weight"),
    "no head": (without_head, "lacks lm_head.weight; AutoModel is saved without this head, which vectors (task=embed) do not need: set tie_word"),
    "extra tensor": (lambda folder: change_tensors(folder, lambda t: t.update(extra=np.ones(1, np.float32))), "has extra, which a llama"),
    "wrong shape": (lambda folder: change_config(folder, intermediate_size=80), "mlp.down_proj.weight is [32, 64], its config.json says [32, 80]"),
    "another head": (lambda folder: change_config(folder, tie_word_embeddings=True), "lm_head.weight is not equal to model.embed_tokens.weight, and tie_word_embeddings=true makes them one; set tie_word_embeddings=false"),
    "a head of booleans": (with_head_of_booleans, "lm_head.weight holds BOOL, which is none of F64, F32"),
    "truncated": (truncated, "is truncated or not a safetensors file"),
    "quantized": (lambda folder: change_tensors(folder, lambda t: t.update({name: value.astype(np.int8) for name, value in t.items()})), " holds I8, not F64, F32, F16, BF16; dequantize it first"),
    "a list for a map": (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": []}'), "model.safetensors.index.json has no weight_map of tensors and files"),
    "a file missing": (lambda folder: first(folder).unlink(), "lacks model-00001-of-"),
    "pickles": (pickled, "has its weights as pickles (pytorch_model.bin), which can run code and are not read"),
    "no weights": (lambda folder: [path.unlink() for path in folder.glob("*.safetensors*")], "has no model.safetensors"),
    "a list for a tokenizer's config": (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json is not a JSON object"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has neither a tokenizer.json nor a tokenizer.model; name another"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name, copy, corpus, tmp_path, monkeypatch):
    """By `model.init_from`, with one line, before anything is written."""
    spoil, message = BAD[name]
    spoil(copy)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        tunix.train([f"model.init_from={copy}", *TRAINING, f"data.paths=[{corpus}]"])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "outputs").exists()


# Keys of published config.json files that change nothing, by the parity model of the family.
HARMLESS = {
    "gpt_oss": {"initial_context_length": 4096},
    "qwen2": {"use_mrope": False, "max_window_layers": 24, "torch_dtype": "bfloat16"},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "auto_map": {}},
    "gpt2": {
        "n_special": 0, "predict_special_tokens": True, "output_past": True, "_num_labels": 1,
        "gradient_checkpointing": False, "task_specific_params": {}, "do_sample": True, "max_length": 50,
    },
    "llama": {
        "rope_interleaved": False, "unsloth_version": "2026.4.2", "unsloth_fixed": True, "model_max_length": 64,
        "max_sequence_length": 64, "transformers.js_config": {}, "quantization_config": None, "pretraining_tp": 1,
        "_attn_implementation": "eager", "attn_implementation": "sdpa", "_name_or_path": "me/mine",
    },
    "apertus": {"hidden_dropout": 0.0},
    "qwen3_moe": {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
    "qwen3_next": {"use_sliding_window": False},
    "llama4": {"_attn_implementation_autoset": True},
    "gemma2": {"sliding_window_size": 4096},
    # Keys of layers that transformers does not read for these families.
    "granite": {"no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2, "mlp_only_layers": [0], "moe_layers": [1]},
    "glm4": {"sliding_window": 5, "sliding_window_pattern": 2, "_sliding_window_pattern": 2},
    "mistral": {"layer_types": ["full_attention"] * 9},
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_keys_of_published_files_that_change_nothing(name, tmp_path):
    shutil.copy(PARITY / name / "config.json", tmp_path)
    change_config(tmp_path, **HARMLESS[name])
    assert read_config(tmp_path) == read_config(PARITY / name)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "rope_interleaved", True), ("phi3", "lm_head_bias", True), ("phi3", "mlp_bias", True),
        ("qwen2", "use_mrope", True), ("qwen3_moe", "qkv_bias", True), ("qwen3_moe", "use_qk_norm", False),
        ("qwen3_moe", "shared_expert_intermediate_size", 64), ("qwen3_next", "use_sliding_window", True),
    ],
)  # fmt: skip
def test_keys_of_published_files_that_would_change_something(name, key, value, tmp_path):
    shutil.copy(PARITY / name / "config.json", tmp_path)
    change_config(tmp_path, **{key: value})
    with pytest.raises(UserError, match=f"{key}={value} is not supported"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "usual", "other"),
    [
        ("llama", "layer_types", ["full_attention"] * 2, ["full_attention", "sliding_attention"]),
        ("qwen3_moe", "mlp_only_layers", [0], [1]),
    ],
)
def test_layers_in_an_order_that_is_not_ours_are_refused(name, key, usual, other, tmp_path):
    shutil.copy(PARITY / name / "config.json", tmp_path)
    change_config(tmp_path, **{key: usual})
    assert read_config(tmp_path) == read_config(PARITY / name)
    change_config(tmp_path, **{key: other})
    with pytest.raises(UserError, match=f"{key}=.* is not understood; "):
        read_config(tmp_path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ORIGINAL = {"original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "changes", "original"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}, "rope_scaling": YARN}, 32),
        ("llama", {"rope_parameters": None, "rope_scaling": YARN, **ORIGINAL}, 16),
        ("phi3_long", ORIGINAL, 16),
        ("phi3_long", {"original_max_position_embeddings": ...}, 4096),
        ("olmo3", {"rope_parameters": ..., "rope_scaling": YARN, **ORIGINAL}, 32),
        ("olmo3", {"rope_parameters": {"full_attention": {}}, "rope_scaling": YARN}, 32),
    ],
)
def test_keys_of_rope_win_over_others_as_in_transformers(name, changes, original, tmp_path):
    shutil.copy(PARITY / name / "config.json", tmp_path)
    change_config(tmp_path, **changes)
    read = read_config(tmp_path)
    assert read["rope_scaling"]["original_context"] == original
    assert read["rope_theta"] != 3e4  # of both, rope_scaling is taken, and nothing of the other
    assert read["local_rope_theta"] == (read["rope_theta"] if name == "olmo3" else None)  # not stretched, where it is


def test_a_factor_of_longrope_replaces_the_ratio_of_the_contexts(tmp_path):
    shutil.copy(PARITY / "phi3_long" / "config.json", tmp_path)
    usual = read_config(tmp_path)
    written = write_config(trained_model(tmp_path, ((1,), ("tp",))))
    assert written["rope_scaling"]["factor"] == 64 / 2  # of the model's context to the original one
    parameters = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    for factor, magnitude in ((32.0, None), (4.0, 3**0.5)):
        change_config(tmp_path, rope_parameters=parameters | {"factor": factor})
        read = read_config(tmp_path)
        assert read["rope_scaling"].pop("attention_factor") == pytest.approx(magnitude)
        assert read["rope_scaling"].items() <= usual["rope_scaling"].items()


def test_a_family_that_rotates_a_share_of_each_head_has_no_other_share(tmp_path):
    """No published file has both; what transformers computes for them is not what our rotations do."""
    shutil.copy(PARITY / "nemotron" / "config.json", tmp_path)
    change_config(tmp_path, rope_parameters={"rope_type": "proportional", "partial_rotary_factor": 0.5})
    with pytest.raises(UserError, match="rope_type=proportional is not understood in a family of which a share"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "ours", "value"),
    [
        ("mistral", "sliding_window", "sliding_window", 4096), ("mistral", "num_key_value_heads", "num_kv_heads", 8),
        ("olmo3", "rope_parameters", "rope_theta", 5e5), ("qwen3", "num_key_value_heads", "num_kv_heads", 32),
        ("llama4", "head_dim", "head_dim", 128), ("qwen3_moe", "head_dim", "head_dim", 8),
    ],
)  # fmt: skip
def test_a_key_that_is_left_out_has_the_value_of_transformers(name, key, ours, value, tmp_path):
    shutil.copy(PARITY / name / "config.json", tmp_path)
    change_config(tmp_path, **dict.fromkeys((key, "rope_theta"), ...))
    assert read_config(tmp_path)[ours] == value


@pytest.mark.parametrize(("window", "unrotated"), [(5, 1), (None, None)])
def test_an_exaone_without_local_layers_has_positions_where_it_has_no_window(window, unrotated, tmp_path):
    config = json.loads((PARITY / "exaone4" / "config.json").read_text())
    all_global = {"sliding_window": window, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    (tmp_path / "config.json").write_text(json.dumps(config | all_global))
    found = read_config(tmp_path)
    assert (found["global_every"], found["sliding_window"], found["unrotated_every"]) == (1, None, unrotated)
    written = write_config(trained_model(tmp_path, ((1,), ("tp",))))
    assert (written["sliding_window"] is None) == (window is None)
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_config(tmp_path) == found


@pytest.mark.parametrize(("outer", "inner", "tied"), [(True, False, True), (False, True, False), (None, True, True)])
def test_the_head_of_a_model_that_sees_is_tied_as_the_whole_says(outer, inner, tied):
    text = json.loads((PARITY / "mistral" / "config.json").read_text()) | {"tie_word_embeddings": inner}
    whole = {"model_type": "mistral3", "text_config": text, "vision_config": {}, "tie_word_embeddings": outer}
    assert translate_config(whole, "config.json")["tied_head"] == tied


def in_mistral3(name):
    return f"language_model.{name}"


def in_auto_model(name):
    return name.removeprefix("model.")


@pytest.mark.parametrize(("name", "rename"), [("mistral", in_mistral3), ("qwen3", in_auto_model)])
def test_names_of_other_classes_are_read(name, rename, tmp_path):
    shutil.copytree(PARITY / name, tmp_path / "copy")
    before = load_file(PARITY / name / "model.safetensors")
    renamed = {rename(tensor): value for tensor, value in before.items() if rename(tensor)}
    if rename is in_mistral3:
        renamed |= {f"{part}.w": np.zeros(3, np.float32) for part in ("vision_tower", "multi_modal_projector")}
    else:  # as old versions of transformers saved it
        renamed["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(renamed, tmp_path / "copy" / "model.safetensors")
    read, usual = (tunix.load_pretrained(folder) for folder in (tmp_path / "copy", PARITY / name))
    jax.tree.map(np.testing.assert_array_equal, read.params, usual.params)


def test_norms_of_latents_have_an_epsilon_of_their_own(tmp_path):
    shutil.copytree(PARITY / "deepseek_v3", tmp_path / "copy")
    change_config(tmp_path / "copy", rms_norm_eps=1e-5)
    model = tunix.load_pretrained(tmp_path / "copy")
    modules = {path[-1]: part for path, part in nnx.iter_modules(model.arch.module(model.params)) if path}
    epsilons = {name: modules[name].eps for name in ("q_norm", "kv_norm", "pre_attention", "final_norm")}
    assert epsilons == {"q_norm": 1e-6, "kv_norm": 1e-6, "pre_attention": 1e-5, "final_norm": 1e-5}


def test_one_file_is_read_where_an_index_lies_beside_it(copy):
    assert len(weight_files(copy)) > 1
    shutil.copy(first(copy), copy / "model.safetensors")
    assert weight_files(copy) == [copy / "model.safetensors"]


TRAINING = [
    "data=text", "training.seq_len=32", "training.loss_chunk_size=32", "training.micro_batch_size=1", "training.max_steps=3",
    "training.mixed_precision=fp32", "evaluation.num_sequences=8", "evaluation.sample_tokens=0", "logging.every_steps=1",
    "hydra.run.dir=run", "model.mesh_shape=[[2,2],[fsdp,tp]]", "distributed.allow_idle_devices=true",
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_are_named(dtype, tmp_path, caplog):
    tunix.load_pretrained(PARITY / "qwen3", dtype=dtype)
    assert not caplog.messages
    shutil.copytree(PARITY / "qwen3", tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][1, 2] = np.nan
    tensors["model.norm.weight"][3] = -np.inf
    save_file(tensors, tmp_path / "copy" / "model.safetensors")
    tunix.load_pretrained(tmp_path / "copy", dtype=dtype)
    (message,) = caplog.messages
    assert message.endswith("not finite (NaN or infinity): model.layers.*.mlp.up_proj.weight, model.norm.weight")


def test_keys_that_contradict_the_files(hf_dir):
    with pytest.raises(UserError, match=r"model.context_length=131072, but .*config.json says 64; leave it out"):
        compose(["model=llama3_1b", f"model.init_from={hf_dir}", "training.seq_len=64"])
    with pytest.raises(UserError, match="model.num_layers=5, but"):
        compose([f"model.init_from={hf_dir}", "model.num_layers=5"])


def test_the_folders_tokenizer_is_used_unless_one_is_given(hf_dir, copy):
    tokenizer = compose(
        [f"model.init_from={hf_dir}", "training.seq_len=64", "training.loss_chunk_size=64"]
    ).config.tokenizer
    assert tokenizer.path == str(hf_dir)
    vocab = read_vocab(tokenizer)
    assert (vocab.bos_token, vocab.eos_token, vocab.chat_template) == ("<bos>", "<eos>", TEMPLATE)
    other = [f"tokenizer.path={copy}/tokenizer.json", "training.seq_len=64", "training.loss_chunk_size=64"]
    assert compose([f"model.init_from={hf_dir}", *other]).config.tokenizer.path == str(copy / "tokenizer.json")


def tensors_of(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.nightly
def test_in_trained_with_lora_and_out_again(hf_dir, corpus, tmp_path, monkeypatch):
    """The base stays bit-identical, updates learn, merged equals unmerged, and the files are whole."""
    monkeypatch.chdir(tmp_path)
    words = [f"model.init_from={hf_dir}", *TRAINING, f"data.paths=[{corpus}]"]
    result = tunix.train([*words, "training.max_steps=12", "model.lora.rank=4", "model.lora.dropout=0.1",
                          "model.lora.targets='attention|mlp.up'", "optimizer.learning_rate=3e-2"])  # fmt: skip
    losses = [line["loss"] for line in metrics(result.folder)]
    assert losses[-1] < losses[0] - 0.1
    before, after = tunix.load_pretrained(hf_dir), tunix.load_pretrained(result.folder)
    trained = dict(named(after.params))
    for name, weight in named(before.params):
        assert np.array_equal(np.asarray(weight), np.asarray(trained[name])), name
    assert sorted({name.split(".")[2] for name in trained if ".lora." in name}) == ["k", "o", "q", "up", "v"]
    tokens = np.random.default_rng(0).integers(0, WORDS, (2, 16))
    np.testing.assert_allclose(after.merged()(tokens), after(tokens), atol=1e-5)
    assert np.abs(np.asarray(after(tokens) - before(tokens))).max() > 1e-3

    words = [f"checkpoint={result.folder}", "dtype=float32"]
    export(read_settings(Export, [*words, "output=merged", "merge_lora=true"]))
    export(read_settings(Export, [*words, "output=adapter"]))
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "digests.json",
    }  # fmt: skip
    np.testing.assert_allclose(tunix.load_pretrained("merged")(tokens), after(tokens), atol=1e-5)
    info = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert info["target_modules"] == ["k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    a, b = (adapter[f"{prefix}.lora_{x}.weight"].astype(np.float32) for x in "AB")
    update = (b @ a) * info["lora_alpha"] / info["r"]
    total = dict(named(after.merged().params))["blocks.attention.q.w"][1] - trained["blocks.attention.q.w"][1]
    np.testing.assert_allclose(np.asarray(total).reshape(32, -1).T, update, atol=1e-5)


def test_out_as_it_came_in(hf_dir, tmp_path):
    """Several files in, several files out: every bit the same."""
    export(read_settings(Export, [f"checkpoint={hf_dir}", f"output={tmp_path / 'out'}", "shard_gb=3e-5"]))
    before, after = tensors_of(hf_dir), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = Counter[str]()
    for name, file in index["weight_map"].items():
        sizes[file] += before[name].nbytes
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == sizes.keys()
    assert len(sizes) > 1
    assert max(sizes.values()) <= 3e4
    assert index["metadata"]["total_size"] == sizes.total()
    assert all(np.array_equal(before[name].view(np.uint16), after[name].view(np.uint16)) for name in before)
    with pytest.raises(UserError, match="exists already"):
        export(read_settings(Export, [f"checkpoint={hf_dir}", f"output={tmp_path / 'out'}", "shard_gb=1"]))


@pytest.fixture(scope="module")
def loaded(hf_dir):
    return tunix.load_pretrained(hf_dir)


NO_TOKENS = {
    "a text": ("few", "tokens are whole numbers, not <U3; the method encode makes them of a text"),
    "a row": ([1, 2], r"rows of one length, not an array of the shape \[2\]"),
    "rows of unequal lengths": ([[1, 2], [3]], "unequal lengths; fill up the shorter ones behind their ends"),
    "an empty row": ([[]], r"not an array of the shape \[1, 0\]"),
    "a token of another model": ([[1, 320]], "320 is no token of the model: its tokens are 0 to 319"),
    "a number below 0": ([[1, -100]], "-100 is no token of the model"),
    "a wide number": (np.array([[1, 2**32 + 1]]), "4294967297 is no token of the model"),
}


@pytest.mark.parametrize("name", NO_TOKENS)
def test_what_is_no_array_of_tokens_is_refused(name, loaded):
    given, message = NO_TOKENS[name]
    with pytest.raises(UserError, match=message):
        loaded(given)


def test_rows_and_prompts_of_what_is_no_token_are_refused(loaded):
    for row, message in (([], "1 to 64 token ids"), ([1] * 65, "1 to 64 token ids"), ([320], "320 is no token")):
        with pytest.raises(UserError, match=message):
            loaded.embed([[1], row], "mean")
    with pytest.raises(UserError, match="pooling=cls is not understood; give last or mean"):
        loaded.embed([[1]], "cls")
    with pytest.raises(UserError, match="320 is no token"):
        loaded.sample([[1], [320]], Sampling(1))
    for keys, message in (
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not within 1 and inf"),
        ({"temperature": -1.0}, "temperature=-1.0 is not within 0 and inf"),
        ({"top_k": 0}, "top_k=0 is not within 1 and inf"),
        ({"min_p": 1.5}, "min_p=1.5 is not within 0 and 1"),
        ({"guess": -1}, "guess=-1 is not within 0 and inf"),
        ({"cache": "paged"}, "cache=paged is none of auto, pages, slots"),
        ({"cache_dtype": "int4"}, "cache_dtype=int4 is none of None, int8"),
        ({"guess": 1, "guess_by": "mtp"}, "guess_by=mtp, and the model has no layer for it"),
    ):
        with pytest.raises(UserError, match=f"^sampling: {message}"):
            loaded.sample([[1]], Sampling(**{"max_new_tokens": 1} | keys))
    with pytest.raises(UserError, match=r"has no tokenizer.json, so a text has no tokens"):
        replace(loaded, tokenizer=None).encode("a")
    with pytest.raises(UserError, match="dtype=int8 is not understood; give float32 or bfloat16"):
        tunix.load_pretrained("folder", dtype="int8")


def test_a_row_has_no_more_tokens_than_there_are_learnt_positions():
    model = tunix.load_pretrained(PARITY / "gpt2")
    with pytest.raises(UserError, match="no position behind token 64 of a row"):
        model(np.ones((1, 65), np.int32))


def write_out(model, folder):
    """The files about tokens that an export of a model writes."""
    folder.mkdir()
    _write_model(model, folder, "float32", 5)
    names = ("generation_config", "tokenizer_config", "special_tokens_map", "config")
    return [json.loads((folder / f"{name}.json").read_text()) for name in names if (folder / f"{name}.json").is_file()]


def test_what_ends_an_answer_goes_out(loaded, copy, tmp_path):
    """The end of an answer in the template and the end of a document of the run, beside what the base names."""
    shutil.copytree(copy, tmp_path / "run")
    change = json.loads((copy / "tokenizer_config.json").read_text())
    ending = {"eos_token": "<bos>", "chat_template": "{% for m in messages %}{{ m['content'] }}<pad>{% endfor %}"}
    (tmp_path / "run" / "tokenizer_config.json").write_text(json.dumps(change | ending))
    model = replace(loaded, files=copy, tokenizer_files=tmp_path / "run")
    generation, tokenizer, config = write_out(model, tmp_path / "out")  # the base has no generation_config.json
    assert generation == {"bos_token_id": 1, "eos_token_id": [0, 1, 2]}
    assert (tokenizer["bos_token"], tokenizer["eos_token"], config["eos_token_id"]) == ("<bos>", "<bos>", 2)
    (copy / "generation_config.json").write_text('{"eos_token_id": [9, 2], "top_k": 20}')
    (copy / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    (copy / "chat_template.jinja").write_text("of the base")
    generation, _, special, _ = write_out(model, tmp_path / "further")
    assert not (tmp_path / "further" / "chat_template.jinja").exists()  # it would win over the run's own template
    assert generation == {"eos_token_id": [0, 1, 2, 9], "top_k": 20}
    assert special == {"eos_token": "<bos>"}
    plain = replace(loaded, files=copy, tokenizer_files=copy)
    assert write_out(plain, tmp_path / "plain")[0] == {"eos_token_id": [9, 2], "top_k": 20}
    assert (tmp_path / "plain" / "chat_template.jinja").read_text() == "of the base"
    (copy / "special_tokens_map.json").write_text('{"eos_token": "<pad>"}')  # not all read it
    begun = replace(loaded, files=copy, tokenizer_files=shutil.copytree(copy, tmp_path / "begun"))
    _, tokenizer, special, _ = write_out(begun, tmp_path / "older")
    assert tokenizer["eos_token"] == special["eos_token"] == "<pad>"


def test_numbers_that_float16_does_not_have_are_not_written(loaded, tmp_path):
    model = replace(loaded, params=jax.tree.map(lambda leaf: leaf + 1e5, loaded.params))
    with pytest.raises(UserError, match="dtype=float16: .* has numbers above 65504.* take dtype=bfloat16"):
        _write_model(model, tmp_path, "float16", 5)


def test_a_tokenizer_of_sentencepiece_alone(loaded, copy, tmp_path):
    """A prompt begins with <bos> where tokenizer_config.json says so; the file goes out with the model."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.trainer_spec.model_type = BPE
    for piece, kind in (("<unk>", 2), ("<bos>", CONTROL), ("<eos>", CONTROL), ("\u2581", 1), ("w", 1)):
        proto.pieces.add(piece=piece, score=0, type=kind)
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.model").write_bytes(proto.SerializeToString())
    keys = {"bos_token": "<bos>", "eos_token": "<eos>"}
    for more, first in (({"add_bos_token": True}, [1]), ({}, [])):
        (copy / "tokenizer_config.json").write_text(json.dumps(keys | more))
        begun = tmp_path / f"run-{len(more)}"
        load_vocab(str(copy)).save(begun)
        for folder in (copy, begun):  # a run has the converted tokenizer
            model = replace(loaded, files=copy, tokenizer_files=folder, tokenizer=read_backend(folder))
            assert model.encode("w") == [*first, 3, 4]
            assert model.encode_rendered("w") == [3, 4]
    write_out(model, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == proto.SerializeToString()
    # Tokens that others have added: in a file of their own, or, by newer versions, in tokenizer_config.json.
    (copy / "special_tokens_map.json").write_text('{"pad_token": {"content": "<end>"}}')
    (copy / "added_tokens.json").write_text('{"<end>": 6, "<tool>": 5}')
    vocab = load_vocab(str(copy))
    assert [ids.tolist() for ids in vocab.encode(["w<end><tool>"])] == [[3, 4, 6, 5]]
    assert {index for index, token in vocab.backend.get_added_tokens_decoder().items() if token.special} == {1, 2, 6}
    added = {"1": {"content": "<bos>", "special": True}, "5": {"content": "<new>", "normalized": False}}
    (copy / "tokenizer_config.json").write_text(json.dumps(keys | {"added_tokens_decoder": added}))
    assert [ids.tolist() for ids in load_vocab(str(copy)).encode(["w<new>"])] == [[3, 4, 5]]
    for wrong, message in (
        ({"7": {"content": "<new>"}}, "has the id 7, and gets 5 behind"),
        ({"5": 1}, "not unders"),
    ):
        (copy / "tokenizer_config.json").write_text(json.dumps(keys | {"added_tokens_decoder": wrong}))
        with pytest.raises(UserError, match=message):
            load_vocab(str(copy))


def test_the_ids_of_a_base_do_not_go_out_with_another_tokenizer(loaded, copy, tmp_path):
    (copy / "generation_config.json").write_text('{"eos_token_id": [9, 2], "pad_token_id": 7, "top_k": 20}')
    words = Tokenizer(models.WordLevel({"<end>": 0, "<begin>": 1, **{f"w{n}": n for n in range(2, 300)}}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<end>", "<begin>"])
    (tmp_path / "run").mkdir()
    words.save(str(tmp_path / "run" / "tokenizer.json"))
    (tmp_path / "run" / "tokenizer_config.json").write_text('{"bos_token": "<begin>", "eos_token": "<end>"}')
    model = replace(loaded, files=copy, tokenizer=words, tokenizer_files=tmp_path / "run")
    generation, _, config = write_out(model, tmp_path / "out")
    # The tokenizer has no padding. transformers fills up a key that is not there with the family's id.
    ids = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": None}
    assert generation == {**ids, "top_k": 20}
    assert config.items() >= ids.items()
    assert model.find_stop_ids() == (0,)
    assert model.encode("w5 w6") == [1, 5, 6]  # with the first token, as in training


@pytest.mark.nightly
def test_full_training_of_a_pretrained_model_goes_on_after_a_resume(hf_dir, corpus, tmp_path, monkeypatch):
    """Also where the folder that it came from is gone."""
    monkeypatch.chdir(tmp_path)
    source = shutil.copytree(hf_dir, tmp_path / "source")
    words = [f"model.init_from={source}", *TRAINING, f"data.paths=[{corpus}]"]
    whole = tunix.train([*words, "hydra.run.dir=whole"])
    tunix.train([*words, "hydra.run.dir=parts", "training.max_steps=2", "scheduler.warmup_steps=0"])
    shutil.move(source / "tokenizer.json", tmp_path / "tokenizer.json")
    shutil.rmtree(source)
    resumed = tunix.train(["resume=parts", "training.max_steps=3", f"tokenizer.path={tmp_path}/tokenizer.json"])
    assert resumed.train["step"] == whole.train["step"] == 3
    assert metrics(whole.folder)[0]["loss"] == metrics(resumed.folder)[0]["loss"]


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["[[1],[fsdp]]", "[[4,2],[fsdp,tp]]"])
def test_a_process_holds_its_slices_and_at_most_half_a_tensor_more(mesh, tmp_path):
    """Anonymous memory of a process while it loads 89 MB from several files, above what it has at the end.

    Memory of 64 KiB and more goes back to the system when it is freed. By default, glibc keeps up to 35 MB of it, which
    differs from run to run. Smaller allocations leave up to 12 MB in the process, so the bound of `kept` is wider.
    """
    code = f"""
import ctypes, gc, threading, time, numpy as np, jax
from safetensors.numpy import save_file
import sys; sys.path.insert(0, {str(ROOT / "tests")!r})
from support.harness import program
from tunix.huggingface.weights import save_weights
from tunix.huggingface.weights import load_weights
from pathlib import Path
small = program("model=llama3_1b", "model.vocab_size=2048", "model.embed_dim=512", "model.mlp_dim=2048", "model.num_layers=6",
    "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=64", "model.tied_head=true", "model.global_every=1",
    "model.sliding_window=null", "model.mesh_shape={mesh}", "distributed.allow_idle_devices=true")
folder = Path({str(tmp_path)!r})
from tunix.training.choices import build_layout
with jax.set_mesh(small.mesh):
    save_weights(folder, small.state["params"], small.cfg.model, small.arch.weights, "float32", shard_gb=0.02)
    (folder / "config.json").write_text('{{"vocab_size": 2048}}')
    small.state = None
    def held():
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024
    def load():
        return jax.block_until_ready(
            load_weights(folder, small.cfg.model, small.arch.weights, build_layout(small.cfg, small.mesh), small.mesh)
        )
    load()  # compiles: the compiler's memory is not that of the weights
    gc.collect(); ctypes.CDLL("libc.so.6").malloc_trim(0)
    begin, peak, going = held(), 0, True
    def watch():
        global peak
        while going:
            peak = max(peak, held()); time.sleep(0.0005)
    thread = threading.Thread(target=watch, daemon=True); thread.start()
    params = load()
    going = False; thread.join()
    end = held()
share = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
print(share, largest, end - begin, peak - end)
"""
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT,
                          env={**os.environ, **env})  # fmt: skip
    assert done.returncode == 0, done.stderr
    share, largest, kept, more = map(int, done.stdout.split()[-4:])
    assert more < largest / 2, more
    assert kept < share + largest, (share, kept)


def test_processes_take_the_same_checkpoints_of_a_run_that_still_trains(tmp_path, monkeypatch):
    """A process that looks after the checkpoint of step 4 was saved takes those that process 0 has found."""
    (tmp_path / "config.yaml").write_text("{}\n")
    for step in (2, 4):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    monkeypatch.setattr(peers, "is_main", lambda: False)
    monkeypatch.setattr(peers, "agree", lambda _, name: {"the checkpoint": 2, "the checkpoints": [2]}[name])
    assert agree_on_checkpoint(tmp_path / "checkpoints", None).name == "2"
    words = [f"checkpoint={tmp_path}", "step=all"]
    assert _list_steps(read_settings(Evaluate, words)) == {2: str(tmp_path / "checkpoints/2")}


def test_a_host_that_does_not_see_a_checkpoint_is_named(tmp_path, monkeypatch):
    """Without a shared disk, evaluate said of the folder of process 0 that it "has none"."""
    monkeypatch.setattr(peers, "decide", lambda *_: 4)
    monkeypatch.setattr("socket.gethostname", lambda: "host-b")
    with pytest.raises(UserError, match="checkpoints/4 is not seen by host-b, but by process 0"):
        agree_on_checkpoint(tmp_path / "checkpoints", None)


def test_files_of_a_model_are_those_of_process_0(copy, monkeypatch):
    """Each host may have its own copy, and one of them may be older: weights of two models were mixed in silence."""
    first = {}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(peers, "hosts", lambda: ["a", "b"])
    monkeypatch.setattr(peers, "gather", lambda key, name: [first.setdefault(name, key), key])
    reject_other_files(copy, "checkpoint=DIR")
    reject_other_files(copy, "checkpoint=DIR")
    change_tensors(copy, lambda tensors: tensors.update({name: -each for name, each in tensors.items()}))
    with pytest.raises(UserError, match=r"checkpoint=DIR: process 0 \(a\) and process 1 \(b\) see different files; "):
        reject_other_files(copy, "checkpoint=DIR")


def test_a_checkpoint_of_a_run_is_that_of_process_0(tmp_path, monkeypatch):
    """Two hosts had runs of their own at one path: half of each model was measured, or trained on, in silence."""
    extract(ROOT / "tests" / "run" / "saved_by_0979945.tar.gz", tmp_path)
    read: list[tuple] = []
    monkeypatch.setattr(pretrained, "reject_other_files", lambda *given: read.append(given))
    run = tmp_path / "run"
    model = tunix.load_pretrained(run)
    cfg = SimpleNamespace(model=model.cfg.model_copy(update={"init_from": str(run)}))
    pretrained.load_init_from(SimpleNamespace(cfg=cfg, arch=model.arch), model.mesh)
    checkpoint = run / "checkpoints" / "3"
    assert read == [(checkpoint, f"checkpoint={run}"), (checkpoint, f"model.init_from={run}")]
    monkeypatch.undo()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    keys: list[str] = []
    monkeypatch.setattr(peers, "reject_others", lambda key, *_: keys.append(key))
    for _ in range(2):
        reject_other_files(checkpoint, "checkpoint=run")
        (checkpoint / "state" / "manifest.ocdbt").write_text("of another run")
    assert keys[0] != keys[1]
