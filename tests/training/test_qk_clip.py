"""QK-clip: the scores of a head behind a step are those before it, times the limit over its largest; on every mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.collective_order import list_races
from support.harness import RUN, SMALL, batch, experts, metrics, program

import tunix
from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.models.block import Mix
from tunix.training.logprobs import Max
from tunix.training.qk_clip import make_clip

STILL = ("optimizer=muon", "optimizer.learning_rate=1e-12", "optimizer.weight_decay=0", "scheduler=constant")
LEARNING = ("optimizer=muon", "optimizer.learning_rate=3e-4", "scheduler=constant")
ONE = ("model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true")
WIDE = ("model.qk_norm=none", "model.query_scale=0.2")  # scores of a model that is not trained are small
LATENT = (
    "model=deepseek_v3", "model.query_scale=0.2", "model.num_kv_heads=4", "model.head_dim=12", "model.rotated_dim=4",
    "model.latent={query_dim: 16, dim: 8, value_dim: 8}", "model.sliding_window=null", "model.global_every=1",
)  # fmt: skip
KINDS = {
    "shared_keys": (*WIDE, "model.biases='attention.[qkv]'"),
    "own_keys": (*WIDE, "model.num_kv_heads=4", "model.biases='attention.[qk]'"),
    "sinks": (*WIDE, "model.attention_sinks=true"),
    "latent": (*LATENT, "model.num_layers=1", experts()),
    "latent_whole": (*LATENT, "model.latent.query_dim=null", "model.num_layers=1", experts()),
    "latent_experts": (*LATENT, experts(dense_layers=1)),
}


def scores_of(small, rows, params) -> tuple[np.ndarray, np.ndarray]:
    """The largest score of each head, and the largest log of a query's sum of exp(score), [L, N], by their definition."""
    largest, log_sums = [], []

    def keep(q, k, visible):
        k = np.repeat(k, q.shape[2] // k.shape[2], 2)
        scores = np.where(visible[:, None], np.einsum("btnh,bsnh->bnts", q, k, dtype=np.float64), -np.inf)
        largest.append(scores.max((0, 2, 3)))
        log_sums.append(np.log(np.exp(scores).sum(3)).max((0, 2)))

    model = small.arch.module(params)
    original = model.mix_of_row

    def mix_of_row(layer, mask_inputs):
        mix, segments = original(layer, mask_inputs), mask_inputs.segment_ids
        distance = jnp.arange(segments.shape[1])[:, None] - jnp.arange(segments.shape[1])
        visible = (segments[:, :, None] == segments[:, None]) & (distance >= 0) & (distance < layer.window)

        def compute_attention(q, entries, heads):
            jax.debug.callback(keep, q, heads.expand(*entries)[0], visible, ordered=True)
            return mix.compute_attention(q, entries, heads)

        return Mix(compute_attention, mix.recur)

    model.mix_of_row = mix_of_row
    fields = [jnp.asarray(rows[name][0]) for name in ("tokens", "positions", "segment_ids")]
    with jax.set_mesh(small.mesh):
        jax.block_until_ready(model.hidden(model.vocab_weights(), *fields)[0])
        jax.effects_barrier()
    return np.stack(largest), np.stack(log_sums)


# What a head keeps of each number of its weights, where its largest score is four times the limit; H is 4 or 12.
KEPT = {
    "shared_keys": {"q.w": [0.25], "q.bias.b": [0.25], "k.w": [1]},
    "own_keys": {"q.w": [0.5], "q.bias.b": [0.5], "k.w": [0.5], "k.bias.b": [0.5], "v.w": [1]},
    "latent_whole": {"q_whole.w": [*[0.5] * 8, *[0.25] * 4]},
    "latent": {"q.w": [*[0.5] * 8, *[0.25] * 4], "kv_up.w": [*[0.5] * 8, *[1] * 8], "k.w": [1]},
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_a_head_with_large_scores_keeps(kind):
    """Its scores shrink to the limit: by queries alone where other heads have its keys, too."""
    cfg = compose([*SMALL, *STILL, *KINDS[kind], "optimizer.qk_clip=8"]).config
    model, tree = cfg.model, {}
    ((stack, layers),) = model.stacks.items()
    for name, kept in KEPT[kind].items():
        width = model.head_dim if len(kept) == 1 else len(kept)
        heads = 1 if kind == "latent" and name == "k.w" else model.num_kv_heads if name[0] in "kv" else model.num_heads
        shape = [len(layers), *([3] if name.endswith("w") else []), heads, width]
        tree[stack, "attention", *name.split(".")] = jnp.ones(shape, jnp.bfloat16)
    params = nnx.traversals.unflatten_mapping(tree)
    scores = np.full((model.num_layers, model.num_heads), 4.0)
    scores[-1, 1] = 32
    clip = make_clip(cfg)
    clipped = nnx.traversals.flatten_mapping(clip(params, {"attention_score_max": Max(jnp.asarray(scores))}))
    for name, kept in KEPT[kind].items():
        found = clipped[stack, "attention", *name.split(".")]
        expected = np.ones(found.shape)
        if found.shape[-2] > 1:
            expected[-1, ..., 1, :] = kept
        np.testing.assert_allclose(found.astype(jnp.float32), expected, err_msg=name)
        assert found.dtype == jnp.bfloat16


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_scores_behind_a_step(kind):
    """The learning rate is nearly 0, so the clip alone changes them. A layer is looked at with the others as they were,
    because its inputs follow from those before it."""
    rows, still = batch(4), program(*ONE, *STILL, *KINDS[kind])
    old = jax.tree.map(jnp.copy, still.state["params"])
    before, log_sums = scores_of(still, rows, old)
    limit = float(np.median(log_sums))
    small = program(*ONE, *STILL, *KINDS[kind], f"optimizer.qk_clip={limit}")
    (numbers,) = small.run(rows, steps=1)
    assert numbers["attention_score_max"] == pytest.approx(log_sums.max(), rel=1e-5)
    factors = np.where(log_sums > limit, limit / log_sums, 1)
    assert (factors < 0.99).any()
    assert (factors == 1).any()
    for layer in range(len(before)):
        stack = small.cfg.model.stack_of(layer)
        number = small.cfg.model.stacks[stack].index(layer)
        take = partial(lambda number, a, b: a.at[number].set(b[number]), number)
        params = old | {stack: jax.tree.map(take, old[stack], small.state["params"][stack])}
        after, _ = scores_of(small, rows, params)
        np.testing.assert_allclose(after[layer], factors[layer] * before[layer], rtol=1e-5)


@pytest.mark.nightly  # the case below is of a mesh too
@pytest.mark.parametrize("mesh", ["[[2,2,2],[dp,fsdp,tp]]", "[[2,2],[cp,tp]]"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_clips_as_one_device(kind, mesh):
    """With several microbatches, of which each has the largest score of some heads."""
    rows, words = batch(16, 2), (*LEARNING, *KINDS[kind], "optimizer.qk_clip=12")
    one = program(*ONE, *words, "training.micro_batch_size=8").run(rows, steps=3)
    more = ("distributed.allow_idle_devices=true", f"training.micro_batch_size={8 if 'cp' in mesh else 2}")
    many = program(f"model.mesh_shape={mesh}", *words, *more).run(rows, steps=3)
    for name in ("loss", "attention_score_max"):
        np.testing.assert_allclose([m[name] for m in many], [m[name] for m in one], rtol=2e-5)
    assert one[2]["attention_score_max"] < one[0]["attention_score_max"]


LAYERS = {"shared_keys": ("model.num_layers=4", "model.global_every=2"), "latent_experts": ("model.num_layers=5",)}
WAYS = {
    "kept": (),
    "interleaved": ("training.pipeline_schedule=interleaved",),
    "recomputed": ("training.pipeline_recompute=true",),
}


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYERS)
def test_stages_clip_as_one_device(kind, way):
    """Scores travel with the parts of a batch; those of rows that nobody uses do not count."""
    rows, words = batch(16, 2), (*LEARNING, *KINDS[kind], *LAYERS[kind], "optimizer.qk_clip=12")
    one = program(*ONE, *words, "training.micro_batch_size=8").run(rows, steps=2)
    more = ("training.micro_batch_size=2", "training.pipeline_microbatches=2", *WAYS[way])
    stages = program("model.mesh_shape=[[2,2,2],[pp,fsdp,tp]]", *words, *more)
    many = stages.run(rows, steps=2)
    assert not list_races(stages.compiled.as_text())
    for name in ("loss", "attention_score_max"):
        np.testing.assert_allclose([m[name] for m in many], [m[name] for m in one], rtol=2e-5)
    assert one[1]["attention_score_max"] < one[0]["attention_score_max"]


@pytest.mark.nightly
def test_a_run_goes_on_as_if_it_had_not_stopped(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*RUN, *LEARNING, *WIDE, "optimizer.qk_clip=12", "data=text", f"data.paths=[{corpus}]", "hydra.run.dir=run",
             "model.mesh_shape=[[2,2],[fsdp,tp]]", "distributed.allow_idle_devices=true"]  # fmt: skip
    tunix.train(words)
    lines = metrics(tmp_path / "run")
    tunix.train(["resume=run/checkpoints/3"])
    names = ("step", "loss", "attention_score_max")
    again = [[line[name] for name in names] for line in metrics(tmp_path / "run")]
    assert again == [[line[name] for name in names] for line in [*lines, *lines[3:]]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.qk_norm=per_head", "model.qk_norm divides queries and keys by their size"),
        ("model.qk_norm=none model.attention_cap=50", "model.attention_cap bounds scores already"),
        ("model=qwen3_next_80b_a3b model.qk_norm=none", "model.linear_attention has no scores"),
        ("model.qk_norm=none model.lora.rank=2", "model.lora.rank freezes the weights that this scales"),
    ],
)
def test_what_has_no_scores_is_refused(words, message):
    with pytest.raises(UserError, match=f"optimizer.qk_clip=100.0: {message}") as error:
        compose(
            [
                "optimizer=muon",
                "optimizer.qk_clip=100",
                "tokenizer.vocab_size=300",
                "training.seq_len=32",
                *words.split(),
            ]
        )
    assert "\n" not in str(error.value)
    assert "set optimizer.qk_clip=null" in str(error.value)


def test_the_mesh_need_not_be_known():
    cfg = compose(["optimizer=muon", "optimizer.qk_clip=100", "model.qk_norm=none"]).config
    assert (cfg.model.mesh_shape, cfg.optimizer.score_limit) == ("auto", 100)


def test_a_loss_without_scores_is_refused_before_data_are_read(monkeypatch, tmp_path):
    (tmp_path / "bare.py").write_text(LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    small = program(*ONE, *LEARNING, *WIDE, "optimizer.qk_clip=12", "task.loss=bare:loss")
    with jax.set_mesh(small.mesh), pytest.raises(UserError, match="optimizer.qk_clip needs the scores of attention"):
        small.built.try_out_loss()


LOSS = """
import jax.numpy as jnp
from tunix.training.loss import Loss, compute_token_log_probs

def loss(model, batch, seed):
    log_probs, _ = compute_token_log_probs(model, batch, seed, chunk_size=32)
    total = jnp.sum(-log_probs * batch["loss_mask"])
    return Loss(total, weight=jnp.sum(batch["loss_mask"]), sums={"loss": total})
"""
