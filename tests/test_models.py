"""The decoder is Gemma 3's: its sizes, its numbers, and who attends to whom."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import ROOT, batch, program

from tunix.compose import compose
from tunix.mesh import build_layout, build_mesh
from tunix.models.attention import attend
from tunix.state import describe

FIXTURE = ROOT / "tests" / "parity" / "gemma3.npz"

# Names in Hugging Face's files, and how their matrices [out, in] become ours.
NAMES = {
    ("attention", "q", "w"): ("self_attn.q_proj", lambda w, heads: w.T.reshape(w.shape[1], heads, -1)),
    ("attention", "k", "w"): ("self_attn.k_proj", lambda w, heads: w.T.reshape(w.shape[1], heads // 2, -1)),
    ("attention", "v", "w"): ("self_attn.v_proj", lambda w, heads: w.T.reshape(w.shape[1], heads // 2, -1)),
    ("attention", "o", "w"): ("self_attn.o_proj", lambda w, heads: w.T.reshape(heads, -1, w.shape[0])),
    ("attention", "q_norm", "scale"): ("self_attn.q_norm", lambda w, heads: w),
    ("attention", "k_norm", "scale"): ("self_attn.k_norm", lambda w, heads: w),
    ("mlp", "gate", "w"): ("mlp.gate_proj", lambda w, heads: w.T),
    ("mlp", "up", "w"): ("mlp.up_proj", lambda w, heads: w.T),
    ("mlp", "down", "w"): ("mlp.down_proj", lambda w, heads: w.T),
    ("pre_attention", "scale"): ("input_layernorm", lambda w, heads: w),
    ("post_attention", "scale"): ("post_attention_layernorm", lambda w, heads: w),
    ("pre_mlp", "scale"): ("pre_feedforward_layernorm", lambda w, heads: w),
    ("post_mlp", "scale"): ("post_feedforward_layernorm", lambda w, heads: w),
}


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("gemma3_270m", 268_098_176),
        ("gemma3_1b", 999_885_952),
        ("gemma3_4b", 3_880_263_168),
        ("gemma3_12b", 11_766_034_176),
        ("gemma3_27b", 27_009_346_304),
    ],
)
def test_parameters_of_each_size(size, parameters):
    cfg = compose([f"model={size}"]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        assert describe(cfg.model, build_layout(cfg, mesh)).num_parameters == parameters


@pytest.mark.parametrize("mesh", ["[[1],[fsdp]]", "[[2,2],[fsdp,tp]]", "[[1,4],[fsdp,tp]]"])
def test_logits_are_those_of_transformers(mesh):
    """float32, windows shorter than the sequence, scaled global positions, shared key/value heads."""
    stored = np.load(FIXTURE)
    small = program(
        f"model.mesh_shape={mesh}", "distributed.allow_idle_devices=true", "model.vocab_size=96", "model.embed_dim=32",
        "model.mlp_dim=48", "model.num_layers=7", "model.global_every=3", "model.head_dim=16", "model.sliding_window=5",
        "model.query_scale=24", "model.rope_scale=8", "tokenizer.path=none",
    )  # fmt: skip
    params = jax.tree.map(np.zeros_like, jax.tree.map(np.asarray, small.state["params"]))
    params["embedding"]["table"] = stored["model.embed_tokens.weight"]
    params["final_norm"]["scale"] = stored["model.norm.weight"]
    for path, (name, convert) in NAMES.items():
        leaf = params["blocks"]
        for key in path[:-1]:
            leaf = leaf[key]
        leaf[path[-1]] = np.stack([convert(stored[f"model.layers.{n}.{name}.weight"], 4) for n in range(7)])
    shapes = jax.tree.map(np.shape, small.state["params"])
    assert jax.tree.map(np.shape, params) == shapes
    with jax.set_mesh(small.mesh):
        params = jax.tree.map(lambda value, like: jax.device_put(value, like.sharding), params, small.state["params"])
        logits = jax.jit(lambda params, tokens: small.arch.module(params)(tokens))(
            params, jnp.asarray(stored["tokens"])
        )
    np.testing.assert_allclose(np.asarray(logits), stored["logits"], atol=1e-4)


def small_logits(one, tokens, **more):
    with jax.set_mesh(one.mesh):
        return np.asarray(
            jax.jit(lambda params, *args: one.arch.module(params)(*args))(one.state["params"], tokens, *more.values())
        )


def test_packed_documents_do_not_see_one_another():
    """Logits of two documents in one row are those of each in a row of its own, and do not move with the other."""
    one = program("model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true")
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 320, (1, 12)), rng.integers(0, 320, (1, 20))
    packed = np.concatenate([first, second], 1)
    segments = np.array([[1] * 12 + [2] * 20])
    positions = np.array([[*range(12), *range(20)]])
    together = small_logits(one, packed, positions=positions, segments=segments)
    np.testing.assert_allclose(together[:, :12], small_logits(one, first), atol=1e-5)
    np.testing.assert_allclose(together[:, 12:], small_logits(one, second), atol=1e-5)
    apart = small_logits(one, packed)
    assert np.abs(apart[:, 12:] - together[:, 12:]).max() > 1e-3  # without the ids they do


def attend_alone(q, k, v, segments, window):
    cfg = compose(["model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        layout = build_layout(cfg, mesh)
        letters = ("BTNH", "BTKH", "BTKH", "BT")
        laid_out = [
            jax.device_put(x, layout.activation(dims)) for x, dims in zip((q, k, v, segments), letters, strict=True)
        ]
        return np.asarray(jax.jit(lambda *args: attend(*args, layout=layout, kernel="xla"))(*laid_out, window))


def reference_attention(q, k, v, segments, window):
    """The definition, one query at a time."""
    out = np.zeros_like(q)
    batches, length, heads, _ = q.shape
    group = heads // k.shape[2]
    for b in range(batches):
        for n in range(heads):
            for t in range(length):
                seen = [s for s in range(t + 1) if t - s < window and segments[b, s] == segments[b, t]]
                scores = np.array([q[b, t, n] @ k[b, s, n // group] for s in seen])
                weights = np.exp(scores - scores.max())
                out[b, t, n] = (weights / weights.sum()) @ np.stack([v[b, s, n // group] for s in seen])
    return out


@pytest.mark.parametrize(
    ("length", "window"), [(24, 24), (24, 5), (24, 1), (1030, 40)]
)  # the last in blocks of queries
def test_attention_is_causal_local_and_within_the_document(length, window):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, length, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    segments = np.sort(rng.integers(0, 3, (1, length)))
    found = attend_alone(q, k, v, segments, np.int32(window))
    np.testing.assert_allclose(found, reference_attention(q, k, v, segments, window), atol=2e-5)


def test_whole_logits_never_exist():
    """No array of the program is as large as [B, T, V]; with one chunk there is one."""

    def largest(chunk: int) -> int:
        sizes = ("model.vocab_size=4096", "model.embed_dim=16", f"training.loss_chunk_size={chunk}")
        text = program("model.mesh_shape=[[8],[fsdp]]", *sizes).compile(batch(sequences=8)).as_text()
        return max(int(np.prod([int(d) for d in dims.split(",")])) for dims in re.findall(r"f32\[([\d,]+)\]", text))

    whole = 1 * 32 * 4096  # of one device
    assert largest(32) >= whole
    assert largest(8) < whole


def test_chunks_leave_the_loss_unchanged():
    losses = [
        program("model.mesh_shape=[[4,2],[fsdp,tp]]", f"training.loss_chunk_size={n}").run(batch())[1] for n in (8, 64)
    ]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-6)
    assert losses[0]["grad_norm"] == pytest.approx(losses[1]["grad_norm"], rel=1e-5)
