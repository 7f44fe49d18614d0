"""Tiny random models of each family say what transformers says of them. `make parity` makes them and its answers."""

import json
import shutil
from functools import partial

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.harness import ROOT

import tunix
from tunix.config.compose import compose
from tunix.config.layers import RopeUnscaled
from tunix.config.pretrained_config import describe_keys_outside_family, trained_model
from tunix.huggingface.config_json import read_config, write_config
from tunix.huggingface.table import FAMILIES
from tunix.huggingface.weights import save_weights
from tunix.inference.pretrained import load_pretrained
from tunix.inference.sampling import Sampling
from tunix.training.loss import next_token_loss

PARITY = ROOT / "tests" / "models" / "parity"
MODELS = sorted(path.parent.name for path in PARITY.glob("*/config.json"))
MESHES = {"one": ((1,), ("tp",)), "2x2": ((2, 2), ("fsdp", "tp"))}
# Families whose parts others have on both meshes: experts in qwen3_moe and gpt_oss, caps in gemma2.
ON_FOUR_DEVICES = {
    "olmoe", "mixtral", "glm4", "glm4_moe", "nemotron", "granite", "exaone4", "ministral3", "apertus", "phi3_long",
    "deepseek_v3_whole_queries", "llama4", "qwen3_5", "qwen3_next", "qwen3_5_moe",
    "gemma4_moe", "gemma4_small",
}  # fmt: skip
ON_ONE_DEVICE = {"phi3_short", "qwen3_5_rest", "gemma4_unified"}
CASES = [
    (name, mesh)
    for name in MODELS
    for mesh in MESHES
    if name not in (ON_FOUR_DEVICES if mesh == "one" else ON_ONE_DEVICE)
]
# Of the cases on one device, those that `make test` runs.
EACH_TIME = {*ON_ONE_DEVICE, "gemma2", "gpt2", "qwen3_moe"}


@pytest.fixture(scope="module", params=CASES, ids=lambda p: "-".join(p))
def case(request):
    """A model on a mesh, and what is expected of it."""
    name, mesh = request.param
    return tunix.load_pretrained(PARITY / name, mesh_shape=MESHES[mesh]), load_file(
        PARITY / name / "expected.safetensors"
    )


@pytest.fixture(scope="module")
def logits_of(case):
    """Logits of (tokens, positions, segment ids) [2, T]: one program for all. Rows are filled up to [4, 25]."""
    model, _ = case
    forward = jax.jit(lambda params, *rows: model.arch.module(params)(*rows))

    def compute(*rows: np.ndarray) -> np.ndarray:
        height, length = rows[0].shape
        filled = [np.pad(leaf, ((0, 4 - height), (0, 25 - length)), constant_values=fill)
                  for leaf, fill in zip(rows, (0, 0, -1), strict=True)]  # fmt: skip
        with jax.set_mesh(model.mesh):
            return np.asarray(forward(model.params, *map(model.rows, filled)))[:height, :length]

    return compute


def test_every_family_has_a_model():
    assert {read_config(PARITY / name)["family"] for name in MODELS} == set(FAMILIES)


@pytest.mark.nightly(but=["-".join(case) for case in CASES if case[1] == "2x2" or case[0] in EACH_TIME])
def test_logits(case, logits_of):
    """Windows shorter and longer than the sequence, shared heads, odd vocabularies, tied and untied heads."""
    _, expected = case
    for length in (24, 20):  # what comes after the tokens changes nothing
        tokens = expected["tokens"][:, :length]
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
        logits = logits_of(tokens, positions, np.zeros_like(tokens))
        np.testing.assert_allclose(logits, expected["logits"][:, :length], atol=1e-4)


def test_a_loaded_model_fills_rows_up_and_takes_each_row_as_one_document():
    """`model(tokens)`, where three rows do not divide into two data shards."""
    model = tunix.load_pretrained(PARITY / "qwen3", mesh_shape=MESHES["2x2"])
    expected = load_file(PARITY / "qwen3" / "expected.safetensors")
    rows = np.concatenate([expected["tokens"], expected["tokens"][:1]])
    logits = np.asarray(model(rows))
    assert logits.shape[:2] == (3, 24)
    np.testing.assert_allclose(logits[:2], expected["logits"], atol=1e-4)


def test_packed_documents(case, logits_of):
    _, expected = case
    logits = logits_of(*(expected[name] for name in ("tokens", "positions", "segments")))
    np.testing.assert_allclose(logits, expected["packed_logits"], atol=1e-4)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=list(MESHES))
def test_gradients(mesh, tmp_path):
    """Of the summed loss, under the files' names; Qwen 3: norms of queries and keys, shared heads, a tied head."""
    model, expected = (
        tunix.load_pretrained(PARITY / "qwen3", mesh_shape=mesh),
        load_file(PARITY / "qwen3/expected.safetensors"),
    )
    tokens = expected["tokens"]
    batch = {
        "tokens": tokens, "targets": np.roll(tokens, -1, 1), "positions": np.tile(np.arange(24, dtype=np.int32), (2, 1)),
        "segment_ids": np.zeros_like(tokens), "loss_mask": np.ones(tokens.shape, np.float32),
    }  # fmt: skip
    batch["loss_mask"][:, -1] = 0
    loss = partial(next_token_loss, chunk_size=24, z_loss=0.0)
    with jax.set_mesh(model.mesh):
        rows = {name: model.rows(leaf) for name, leaf in batch.items()}
        grad = jax.jit(jax.grad(lambda params: loss(model.arch.module(params), rows).objective))(model.params)
    save_weights(tmp_path, grad, model.cfg, model.arch.weights, "float32", shard_gb=5)
    for name, gradient in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_allclose(gradient, expected[f"gradient.{name}"], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_config_go_out_as_they_came(name, tmp_path):
    mesh = (2, 2, 2), ("fsdp", "cp", "tp")
    model = load_pretrained(PARITY / name, mesh_shape=mesh, strategy="full_shard")
    save_weights(tmp_path, model.params, model.cfg, model.arch.weights, "bfloat16", shard_gb=5)
    before, after = load_file(PARITY / name / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype
        assert np.array_equal(value.view(np.uint16), after[tensor].view(np.uint16)), tensor
    (tmp_path / "config.json").write_text(json.dumps(write_config(model.cfg)))
    assert read_config(tmp_path) == read_config(PARITY / name)


def test_experts_in_tensors_of_their_own(tmp_path):
    """Qwen 3.5 as transformers writes a new model: one tensor for each expert, where published files have one for all."""
    folder = PARITY / "qwen3_5_moe"
    model, apart = tunix.load_pretrained(folder, mesh_shape=MESHES["2x2"]), {}
    for name, value in load_file(folder / "model.safetensors").items():
        layer, is_expert, part = name.partition("mlp.experts.")
        if not is_expert:
            apart[name] = value
            continue
        matrices = (
            {"down": value} if part == "down_proj" else dict(zip(("gate", "up"), np.split(value, 2, 1), strict=True))
        )
        apart |= {
            f"{layer}mlp.experts.{n}.{x}_proj.weight": w for x, all_ in matrices.items() for n, w in enumerate(all_)
        }
    source = shutil.copytree(folder, tmp_path / "apart")
    save_file({name: value.copy() for name, value in apart.items()}, source / "model.safetensors")
    read = tunix.load_pretrained(source, mesh_shape=MESHES["2x2"])
    jax.tree.map(np.testing.assert_array_equal, read.params, model.params)
    save_weights(tmp_path, read.params, read.cfg, read.arch.weights, "bfloat16", 5, source)
    assert {name: value.tobytes() for name, value in load_file(tmp_path / "model.safetensors").items()} == {
        name: value.tobytes() for name, value in apart.items()
    }


@pytest.mark.nightly(but=["gemma3-2x2"])
def test_greedy_generation(case):
    """Token for token, after prompts of unequal length answered together."""
    model, expected = case
    whole = [expected[f"greedy_{number}"].tolist() for number in range(3)]
    answers = model.sample([words[:-16] for words in whole], Sampling(max_new_tokens=16, temperature=0.0))
    assert [answer.tokens for answer in answers] == [words[-16:] for words in whole]


def test_a_model_without_local_layers_can_be_written():
    model = compose(["model=adder", "model.vocab_size=320", "tokenizer=bytes"]).config.model
    assert describe_keys_outside_family(model) == ""
    assert write_config(model)["sliding_window"] == model.context_length  # transformers needs one


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["model=tiny_moe", "model.mlp=gated_silu"], "model.mlp={kind:gated,activation:silu} has no num_experts"),
        (["model=moonlight_16b_a3b", "model.latent=null"], "model.latent=None has no query_dim"),
    ],
)
def test_a_model_without_a_section_of_its_family_cannot_be_written(words, reason):
    assert describe_keys_outside_family(compose([*words, "tokenizer=bytes"]).config.model) == reason


@pytest.mark.parametrize("name", ["apertus", "gpt_oss"])
def test_rotations_that_are_not_stretched_go_out_so(name):
    """transformers has a scaling of its own for these families where config.json says nothing."""
    model = trained_model(PARITY / name, "auto").model_copy(update={"rope_scaling": RopeUnscaled(name="none")})
    assert write_config(model)["rope_scaling"] == {"rope_type": "default"}
    assert describe_keys_outside_family(model) == ""
