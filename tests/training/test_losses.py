"""A loss is one row of a table; a batch's fields stand in one table."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from support.harness import ONE_LAYER, RUN, SGD, batch, metrics, program

import tunix
from tunix.config.compose import compose
from tunix.data.batches import FIELDS, Field, empty_example
from tunix.models.block import Block
from tunix.models.layers import BlockSums
from tunix.sharding.arrays import to_global
from tunix.training import dpo, embeddings, kto, scores
from tunix.training.logprobs import count_chunk_positions
from tunix.training.loss import LOSSES, Loss, LossKind, compute_token_log_probs, find_loss_kind, next_token_loss

ONE = "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"


def unlikely_sequences(model, batch, seed):
    """A dummy: the mean over sequences of each one's probability to be wrong somewhere, weighted by a field of its own."""
    log_probs = jnp.sum(compute_token_log_probs(model, batch, seed, chunk_size=16)[0] * batch["loss_mask"], axis=1)
    share = batch.get("share", jnp.ones_like(log_probs))  # [B]
    loss = jnp.sum((1 - jnp.exp(log_probs)) * share)
    return Loss(loss, jnp.sum(share), {"loss": loss, "log_prob": jnp.sum(log_probs * share)})


def means(sums, weight, num_bytes):
    return {name: float(value / weight) for name, value in sums.items()}


@pytest.fixture
def dummy(monkeypatch):
    fields = {**FIELDS, "share": Field("AB", "float32")}
    monkeypatch.setitem(LOSSES, "next_token", LossKind(lambda cfg: unlikely_sequences, means, fields))


@pytest.mark.nightly
def test_a_loss_in_the_table_reaches_a_runs_metrics(dummy, tmp_path, corpus, monkeypatch):
    """The step and the held-out set divide and report what the loss says."""
    monkeypatch.setitem(LOSSES, "next_token", LOSSES["next_token"]._replace(fields=FIELDS))
    monkeypatch.chdir(tmp_path)
    words = [
        *RUN,
        *ONE_LAYER,
        "data=text",
        f"data.paths=['{corpus}']",
        "model.mesh_shape=[[4,2],[fsdp,tp]]",
        "training.max_steps=3",
    ]
    folder = tunix.train(words).folder
    for line in metrics(folder):
        assert 0 < line["loss"] <= 1
        assert line["log_prob"] < 0
        assert "z_loss" not in line
    (held_out,) = metrics(folder, "held_out")
    assert set(held_out) == {"step", "split", "loss", "log_prob"}


def test_a_loss_adds_a_field_to_the_batch(dummy):
    """A number for each sequence, split over the data shards as the sequences are."""
    cut = program("model.mesh_shape=[[4,2],[fsdp,tp]]", "training.gradient_accumulation_steps=2", *SGD, *ONE_LAYER)
    given = batch(sequences=8, microbatches=2)
    with jax.set_mesh(cut.mesh):
        share = cut.built.abstract_batch["share"]
    assert share.shape == (2, 4)
    even = cut.run(given | {"share": np.ones((2, 4), np.float32)}, steps=1)[0]
    del cut.state
    uneven = cut.run(given | {"share": np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)}, steps=1)[0]
    assert even["log_prob"] != uneven["log_prob"]


def test_log_probabilities_of_tokens_are_those_of_the_logits():
    one = program(*ONE, *ONE_LAYER)
    with jax.set_mesh(one.mesh):
        rows = {name: leaf[0] for name, leaf in to_global(batch(sequences=4), one.mesh).items()}

        @jax.jit
        def compute(params):
            model = one.arch.module(params)
            logits = model(rows["tokens"], rows["positions"], rows["segment_ids"])
            loss = find_loss_kind(one.cfg).make(one.cfg)(model, rows, None)
            return compute_token_log_probs(model, rows, None, chunk_size=8)[0], jax.nn.log_softmax(logits), loss

        found, shares, loss = compute(one.state["params"])
        expected = np.take_along_axis(np.asarray(shares), np.asarray(rows["targets"])[..., None], -1)[..., 0]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(loss.sums["loss"], -jnp.sum(found * rows["loss_mask"]), rtol=1e-5)
        assert loss.weight == rows["loss_mask"].sum()


def test_logits_computed_once_have_the_gradient_of_whole_logits():
    """The definition, with logits of all tokens at one time, beside chunks whose gradient comes with their loss.

    Chunks are halves, or have an uneven end.
    """
    cut = program("model.mesh_shape=[[2,2],[fsdp,tp]]", "distributed.allow_idle_devices=true", *ONE_LAYER)
    with jax.set_mesh(cut.mesh):
        rows = {name: leaf[0] for name, leaf in to_global(batch(sequences=4), cut.mesh).items()}

        def in_chunks(chunk_size, params):
            loss = next_token_loss(cut.arch.module(params), rows, None, chunk_size=chunk_size, z_loss=0.1)
            return 3 * loss.objective, loss.sums

        def by_definition(params):
            model = cut.arch.module(params)
            logits = model(rows["tokens"], rows["positions"], rows["segment_ids"])
            log_z = jax.nn.logsumexp(logits, -1)
            nll = log_z - jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == rows["targets"][..., None], logits, 0), -1)
            return 3 * jnp.sum((nll + 0.1 * log_z**2) * rows["loss_mask"]), jnp.sum(nll * rows["loss_mask"])

        kinds = {"halves": partial(in_chunks, "auto"), "an uneven end": partial(in_chunks, 5), "whole": by_definition}
        compute = jax.jit(lambda params: {k: jax.value_and_grad(f, has_aux=True)(params) for k, f in kinds.items()})
        found = compute(cut.state["params"])
    (loss, nll), expected = found.pop("whole")
    for name, ((objective, sums), gradients) in found.items():
        numbers = (objective, sums["loss"], 3 * (nll + sums["z_loss"]))
        np.testing.assert_allclose(numbers, (loss, nll, loss), rtol=1e-6, err_msg=name)
        for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max(), err_msg=name)


def test_dft_makes_the_sum_of_probabilities_larger():
    """Its gradient is that of minus the probabilities of the targets; `loss` stays the cross entropy."""
    one = program(*ONE, *ONE_LAYER)
    with jax.set_mesh(one.mesh):
        rows = {name: leaf[0] for name, leaf in to_global(batch(sequences=4), one.mesh).items()}

        def dft(params):
            loss = LOSSES["dft"].make(one.cfg)(one.arch.module(params), rows, None)
            return loss.objective, loss.sums["loss"]

        def by_hand(params):
            log_probs = compute_token_log_probs(one.arch.module(params), rows, None, chunk_size=8)[0]
            sums = (jnp.sum(x * rows["loss_mask"]) for x in (jnp.exp(log_probs), log_probs))
            return tuple(-x for x in sums)

        compute = jax.jit(lambda params: [jax.grad(f, has_aux=True)(params) for f in (dft, by_hand)])
        (found, loss), (expected, cross_entropy) = compute(one.state["params"])
    np.testing.assert_allclose(loss, cross_entropy, rtol=1e-6)
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_the_gradient_of_the_table_is_added_up_in_float32():
    """Products are bfloat16. The loop over chunks carries the sum [V, D]."""
    small = program(*ONE, "training.mixed_precision=bf16", "training.loss_chunk_size=8")
    rows = {name: leaf[0] for name, leaf in batch(sequences=2).items()}
    loss = find_loss_kind(small.cfg).make(small.cfg)
    with jax.set_mesh(small.mesh):
        traced = jax.make_jaxpr(jax.grad(lambda params: loss(small.arch.module(params), rows, None).objective))(
            small.state["params"]
        )

    def carried(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan":
                inside = equation.params["jaxpr"].jaxpr.outvars  # what is stacked has a dimension more outside
                pairs = zip(equation.outvars, inside, strict=True)
                yield from (result.aval for result, each in pairs if result.aval.shape == each.aval.shape)
            for inner in jaxprs_in_params(equation.params):
                yield from carried(inner)

    (total,) = [aval for aval in carried(traced.jaxpr) if aval.shape == (320, 32)]
    assert total.dtype == jnp.float32


def test_chunks_are_counted_in_rows_of_a_device():
    assert count_chunk_positions("auto", num_sequences=4, length=4096) == 1024
    assert count_chunk_positions("auto", num_sequences=1, length=2048) == 1024  # never the whole of it
    assert count_chunk_positions("auto", num_sequences=3, length=1000) == 500
    assert count_chunk_positions(256, num_sequences=64, length=128) == 128


def test_examples_have_the_fields_of_the_table():
    example = empty_example(7)
    assert {name: (value.shape, value.dtype.name) for name, value in example.items()} == {
        name: ((7,), field.dtype) for name, field in FIELDS.items()
    }


def test_penalties_of_the_blocks_are_minimised_and_reported(monkeypatch):
    """As the loss of a router is: each of the three layers adds 0.5 to the mean loss of a token."""
    inner = Block.steps

    def steps(self, *args):
        x, kept, sums = yield from inner(self, *args)
        return x, kept, sums._replace(penalties={"router": jnp.full(len(x), 0.5)})

    monkeypatch.setattr(Block, "steps", steps)
    data = batch()
    small = program("model.mesh_shape=[[2,2],[fsdp,tp]]", "distributed.allow_idle_devices=true", *SGD)
    (line,) = small.run(data, steps=1)
    assert line["router"] == pytest.approx(3 * 0.5)


@pytest.mark.parametrize(
    ("words", "function", "inner"),
    [
        (("task=dpo", "data=pairs"), dpo.preference_loss, "compute_token_log_probs"),
        (("task=kto", "data=labelled"), kto.labelled_loss, "compute_token_log_probs"),
        (("task=reward", "data=pairs"), scores.reward_loss, "score_documents"),
        (("task=classify", "data=jsonl", "task.labels=[a,b]"), scores.classification_loss, "score_documents"),
        (("task=embed", "data=jsonl"), embeddings.embedding_loss, "embed_texts"),
    ],
)
def test_a_penalty_weighs_as_the_loss_of_its_row(words, function, inner, monkeypatch):
    """Rows of four documents, of two and of none: whatever a loss counts, the penalty of each row is a mean of 0.5."""
    task = compose([*words, "data.paths=[none]"]).config.task
    segments = jnp.array([[1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 2, 2, 0, 0, 0, 0], [0] * 8])
    is_last = jnp.array([[0.0, 1.0] * 4, [0.0, 1.0] * 2 + [0.0] * 4, [0.0] * 8])
    fields = {"labels": is_last * (segments % 2), "label_values": is_last, "reference_log_probs": is_last}
    rows = {"segment_ids": segments, "loss_mask": is_last, "kl": jnp.zeros(3), "vector_gradients": jnp.zeros((3, 2, 4))}
    rows |= fields | {"query_loss": jnp.zeros(3), "accuracy": jnp.zeros(3)}
    found = {"compute_token_log_probs": -is_last, "embed_texts": jnp.zeros((3, 2, 4))}
    of_model = (jnp.zeros((3, 8, 2)), is_last) if inner == "score_documents" else (found[inner],)
    blocks = BlockSums({"router": jnp.full(3, 0.5)}, None)
    monkeypatch.setattr(f"{function.__module__}.{inner}", lambda *_, **__: (*of_model, blocks))
    chunk = {"chunk_size": "auto"} if inner == "compute_token_log_probs" else {}
    result = function(None, rows, task=task, **chunk)
    assert float(result.sums["router"] / result.weight) == 0.5
