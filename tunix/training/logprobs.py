"""Scores of the targets of a batch under the model, and the form in which a loss returns its sums."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.data.batches import IMAGE_FIELDS, IMAGES, Batch, split_shared
from tunix.models.layers import BlockSums, Routing
from tunix.models.transformer import Transformer
from tunix.models.vision import Images

# Chunks of positions: logits [B, T, V] never exist, only those of one chunk at a time.

# Rows of logits that a device has at one time where the size of a chunk is `auto`. Each chunk reads the table [V, D],
# and reads and writes the sum of its gradient: with 4096 rows that takes an eighth of the time of the chunk's products
# on an H100. More rows save little more, and take more memory.
ROWS = 4096
# Rows of a chunk where a run or a plan knows the memory of its devices, and a step with them fits: half as many passes
# over the table.
MORE_ROWS = 8192


def count_chunk_positions(chunk_size: int | str, num_sequences: int, length: int) -> int:
    """Return of how many positions of each sequence a device has logits at one time.

    `chunk_size` is that number, or `auto`: then a device with `length` tokens of each of `num_sequences` sequences has
    at most `ROWS` rows of logits at one time, and at most half of its rows.
    """
    if chunk_size != "auto":
        return min(int(chunk_size), length)
    # Two at least: with one chunk the logits of all rows would exist. Two sequences of 6,000 tokens make 3 chunks, each
    # of 2,000 positions.
    num_chunks = max(2, math.ceil(num_sequences * length / ROWS))
    return math.ceil(length / num_chunks)


def make_splitter(hidden: jax.Array, chunk_size: int | str) -> Callable[[jax.Array], jax.Array]:
    """Return a function that splits arrays [B, T, ...] into chunks [chunks, B, positions, ...].

    `hidden` is one of these arrays; its sharding says which rows and positions a device has. Of a sequence that lies on
    several devices, each device puts `positions` / devices of its own into every chunk:

        two devices   0 1 2 3 | 4 5 6 7     two chunks    0 1 | 4 5   and   2 3 | 6 7

    Zeros fill each device's last chunk up.
    """
    num_sequences, local_length = jax.typeof(hidden).sharding.shard_shape(hidden.shape)[:2]
    size = count_chunk_positions(chunk_size, num_sequences, local_length)
    num_chunks = math.ceil(local_length / size)

    def split(x: jax.Array) -> jax.Array:
        if num_chunks == 1:
            return x[None]
        # [B, T] -> [B, devices, own tokens] -> [B, devices, chunks, size] -> [chunks, B, devices x size]. The split
        # dimension stays apart, or the outer one of two that are joined: each device reshapes what it has.
        rows, tokens, *others = jax.typeof(x).sharding.spec
        shape = x.shape[0], x.shape[1] // local_length, local_length, *x.shape[2:]
        x = jax.lax.reshape(x, shape, out_sharding=PartitionSpec(rows, tokens, None, *others))
        if missing := num_chunks * size - local_length:
            x = jnp.pad(x, [(0, missing if dim == 2 else 0) for dim in range(x.ndim)])
        shape = *shape[:2], num_chunks, size, *shape[3:]
        x = jax.lax.reshape(x, shape, out_sharding=PartitionSpec(rows, tokens, None, None, *others))
        shape = num_chunks, shape[0], shape[1] * size, *shape[4:]
        return jax.lax.reshape(jnp.moveaxis(x, 2, 0), shape, out_sharding=PartitionSpec(None, rows, tokens, *others))

    return split


def merge_chunks(x: jax.Array, length: int) -> jax.Array:
    """Return chunks [chunks, B, positions, ...] as [B, T, ...] with T = `length`: the inverse of the split."""
    if len(x) == 1:
        return x[0]
    # The steps of the split backwards, without the zeros that filled the last chunk up.
    _, rows, tokens, *others = jax.typeof(x).sharding.spec
    num_chunks, num_rows, _, *more = x.shape
    size = jax.typeof(x).sharding.shard_shape(x.shape)[2]
    parts = x.shape[2] // size
    spec = PartitionSpec(None, rows, tokens, None, *others)
    x = jax.lax.reshape(x, (num_chunks, num_rows, parts, size, *more), out_sharding=spec)
    shape = num_rows, parts, num_chunks * size, *more
    x = jax.lax.reshape(jnp.moveaxis(x, 0, 2), shape, out_sharding=PartitionSpec(rows, tokens, None, *others))
    x = x[:, :, : length // parts]
    return jax.lax.reshape(x, (num_rows, length, *more), out_sharding=PartitionSpec(rows, tokens, *others))


class Mean(NamedTuple):
    """A number that has a divisor of its own, and not the weight of the loss."""

    total: jax.Array
    divisor: jax.Array


class Max(NamedTuple):
    """A number of which the largest of all microbatches is reported; it is not negative. Of an array, that of each
    place is kept, and the largest of all is reported."""

    value: jax.Array


STATES = "teacher_states"  # of a chunk, among the fields that `sum_over_hidden` splits

Sums = dict[str, Any]  # a scalar, a Mean, a Max or a Routing, by the name of the number


ROUTING = "routing"  # name of the routing of experts among the sums
HEAD_SCORES = "attention_score_max"  # name of `BlockSums.head_scores` among the sums, [L, N]


class Loss(NamedTuple):
    """Result of a loss for one microbatch: float32 scalars, each a sum over tokens or sequences.

    The step adds the microbatches up and divides once, because a mean of means is wrong where masks differ.
    """

    objective: jax.Array  # what is minimised: gradients are those of objective / weight
    weight: jax.Array  # what objective and sums are divided by: a count of tokens, of sequences, ...
    sums: Sums  # reported as sum / weight under these names in metrics.jsonl; `loss`, a plain sum, is one of them


# (model, batch with fields [B, T], seed) -> Loss. The seed is an int32 scalar that dropout draws from; None outside of
# training.
LossFn = Callable[[Transformer, Batch, jax.Array | None], Loss]


def add_sums(total: Sums, more: Sums) -> Sums:
    """Return the sums of two microbatches together."""

    def add(a, b):
        return Max(jnp.maximum(a.value, b.value)) if isinstance(a, Max) else jax.tree.map(jnp.add, a, b)

    return jax.tree.map(add, total, more, is_leaf=lambda node: isinstance(node, Max))


def add_up(parts: Any) -> Any:
    """Return the sums of all microbatches together; each array of `parts` has them along its first dimension."""

    def total(node):
        return Max(jnp.max(node.value, 0)) if isinstance(node, Max) else jax.tree.map(lambda x: x.sum(0), node)

    return jax.tree.map(total, parts, is_leaf=lambda node: isinstance(node, Max))


def report_sums(sums: Sums, weight: jax.Array) -> dict[str, jax.Array]:
    """Return the numbers of a step by their names in metrics.jsonl, from the sums of all its microbatches.

    They are scalars; `expert_load` has one number for each expert.
    """
    numbers = {}
    for name, value in sums.items():
        if isinstance(value, Mean):
            numbers[name] = value.total / value.divisor
        elif isinstance(value, Max):
            numbers[name] = jnp.max(value.value)
        elif isinstance(value, Routing):
            numbers |= report_routing(value)
        else:
            numbers[name] = value / weight
    return numbers


def compute_means(counted: str, sums: Sums, weight: jax.Array, num_bytes: int) -> dict[str, float]:
    """Return means over what the weight of a held-out set counts, and under the name `counted` how many there are."""
    means = {
        name: float(value.total / value.divisor) if isinstance(value, Mean) else float(value) / float(weight)
        for name, value in sums.items()
        if name != ROUTING
    }
    return {**means, counted: int(weight)}


def report_routing(routing: Routing) -> dict[str, jax.Array]:
    """Return how even the loads of experts are: 1 is the mean load of an expert in its layer. `load` is [L, X].

    With a bounded buffer, also the share of all choices that did not fit.
    """
    # `expert_load` is a mean over layers, though expert 3 of one layer has nothing to do with that of another. A
    # collapse shows in the largest and the smallest load, each of a single layer.
    loads = routing.load / jnp.mean(routing.load, 1, keepdims=True)
    dropped = {} if routing.dropped is None else {"dropped_share": jnp.sum(routing.dropped) / jnp.sum(routing.load)}
    return {
        "expert_load": jnp.mean(loads, 0),
        "expert_load_max": jnp.max(loads),
        "expert_load_min": jnp.min(loads),
        "router_entropy": jnp.sum(routing.entropy) / jnp.sum(routing.tokens),
        **dropped,
    }


def add_block_sums(blocks: BlockSums, row_weights: jax.Array) -> tuple[jax.Array | int, Sums]:
    """Return what the blocks add to the objective of a loss, and numbers to report.

    A penalty of a sequence is a mean over its tokens. It counts with the weight [B] that the sequence has in the loss,
    so that the mean over all sequences is the same however they are spread over microbatches.
    """
    added = {name: jnp.sum(penalty * row_weights) for name, penalty in blocks.penalties.items()}
    routing = {} if blocks.routing is None else {ROUTING: blocks.routing}
    scores = {} if blocks.head_scores is None else {HEAD_SCORES: Max(blocks.head_scores)}
    return sum(added.values()), added | routing | scores


class Scores(NamedTuple):
    """Scores of the targets of a batch, each [B, T] float32, or [B, C] of a chunk of C positions."""

    nll: jax.Array  # negative log-probability of the target, in nats
    log_z: jax.Array  # Z is the sum of exp(logits)
    entropy: jax.Array | None = None  # of the distribution, without a gradient; None where it is not asked for
    divergence: jax.Array | None = None  # from a teacher, nats; None without one


# (scores, fields of the batch) -> (what is minimised, numbers by name). All are [B, C] float32 of a chunk of C
# positions: one number for each token, to be added up.
TokenLoss = Callable[[Scores, Batch], tuple[jax.Array, dict[str, jax.Array]]]


class TeacherOutput(NamedTuple):
    """Output of a teacher for the loss of a batch. Chunks of it give its logits, which never exist as a whole."""

    compute: Callable[[jax.Array, Any, Any], jax.Array]
    """(logits [B, C, V] of the model in training, table, a chunk of `hidden`) -> divergence [B, C]"""
    table: jax.Array | None  # [V, D], of the teacher's width; None where its numbers are in files
    hidden: Any  # [B, T, D], results of its final norm; or arrays [B, T, ...] of files


def compute_hidden(
    model: Transformer, vocab_weights: Any, batch: Batch, seed: jax.Array | None = None
) -> tuple[jax.Array, BlockSums]:
    """Return the results [B, T, D] of the final norm for a batch, with its images, and the numbers of the blocks."""
    images = None
    if model.cfg.vision is not None and IMAGES in batch:
        images = Images(*(batch[name] for name in IMAGE_FIELDS))
    return model.hidden(vocab_weights, batch["tokens"], batch["positions"], batch["segment_ids"], seed, images)


def sum_over_hidden(
    model: Transformer,
    vocab_weights: Any,
    hidden: jax.Array,
    batch: Batch,
    token_loss: TokenLoss,
    *,
    chunk_size: int | str,
    teacher: TeacherOutput | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the sum of a loss over the tokens of a batch, given states [B, T, D], and its sums by name.

    Logits exist for one chunk of positions at a time, and are computed once. The gradient of a sum is the sum of the
    gradients. So where a backward pass will come, a chunk's gradient is computed with its loss, while its logits exist:

        one pass     chunk 0: logits, loss, gradient    chunk 1: logits, loss, gradient    backward: all is there
        two passes   chunk 0: logits, loss              chunk 1: logits, loss              backward: all logits again

    The gradient of the table [V, D] is added up over the chunks in float32. The sums by name have no gradient.
    """

    def one_chunk(table, hidden, teacher_table, fields):
        chunk = None if teacher is None else teacher._replace(table=teacher_table, hidden=fields[STATES])
        return token_loss(_score_chunk(model, table, hidden, fields["targets"], teacher=chunk), fields)

    # The forward pass of autodiff would leave the logits of all chunks for the backward pass, or compute them again.
    @jax.custom_vjp
    def sum_up(table, hidden, teacher_table, fields):
        def without_gradient(_, chunk):
            hidden, fields = chunk
            return None, one_chunk(table, hidden, teacher_table, fields)

        values = jax.lax.scan(without_gradient, None, (hidden, fields))[1]
        return jax.tree.map(jnp.sum, values)

    def forward(table, hidden, teacher_table, fields):
        def with_gradient(d_table, chunk):
            hidden, fields = chunk
            loss = partial(one_chunk, teacher_table=teacher_table, fields=fields)
            objective, vjp, numbers = jax.vjp(loss, table, hidden, has_aux=True)
            more, d_hidden = vjp(jnp.ones_like(objective))
            return d_table + more.astype(d_table.dtype), ((objective, numbers), d_hidden)

        d_table, (values, d_hidden) = jax.lax.scan(with_gradient, _make_zeros(table), (hidden, fields))
        return jax.tree.map(jnp.sum, values), (d_table.astype(table.dtype), d_hidden)

    def backward(gradients, cotangents):
        d_table, d_hidden = gradients
        factor = cotangents[0]  # of the objective
        # `d_table` is unreduced. To multiply it, a number must be equal on all devices, and of a type that says so.
        local_parts = jax.typeof(d_table).sharding.spec.unreduced
        table_factor = reshard(factor.astype(d_table.dtype), jax.P(reduced=local_parts))
        # Both gradients are for an objective that counts once. The loss behind it may count more, by `factor`.
        return d_table * table_factor, d_hidden * factor.astype(d_hidden.dtype), None, None

    sum_up.defvjp(forward, backward)
    with jax.named_scope("loss"):
        split = make_splitter(hidden, chunk_size)
        fields = {name: split(leaf) for name, leaf in split_shared(batch)[0].items() if leaf.shape == hidden.shape[:2]}
        if teacher is not None:
            fields[STATES] = jax.tree.map(split, teacher.hidden)
        objective, sums = sum_up(vocab_weights[1], split(hidden), None if teacher is None else teacher.table, fields)
    return objective, jax.lax.stop_gradient(sums)


def sum_further_tokens(
    model: Transformer, vocab_weights: Any, hidden: jax.Array, batch: Batch, chunk_size: int | str
) -> tuple[jax.Array, jax.Array, BlockSums]:
    """Return the cross entropy of the tokens after the next ones, summed in nats, their number, and the numbers of the
    layer of `model.mtp`. States [B, T, D] are those behind the final norm.

    A token counts if the loss counts it as the next token of the token before, in the same document:

        document    a a a a b b        position 1 predicts the target of position 2, which is token 3
        targets     1 2 3 - 5 -        counted: positions 0 and 1; position 2 of `a` has no token after the next
    """

    def shift(x: jax.Array) -> jax.Array:
        """Return the values of the next positions, [B, T]; they are small, so devices of one row get all of them."""
        whole = reshard(x, model.layout.activation("BS"))
        return reshard(jnp.pad(whole[:, 1:], ((0, 0), (0, 1))), jax.typeof(x).sharding.spec)

    segments = batch["segment_ids"]
    mask = shift(batch["loss_mask"]) * (shift(segments) == segments)
    states, blocks = model.hidden_further(vocab_weights, hidden, batch["targets"], batch["positions"], segments)
    fields = {"targets": shift(batch["targets"]), "loss_mask": mask}

    def token_loss(scores: Scores, fields: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        return scores.nll * fields["loss_mask"], {}

    further, _ = sum_over_hidden(model, vocab_weights, states, fields, token_loss, chunk_size=chunk_size)
    return further, jnp.sum(mask), blocks


def score_targets(
    model: Transformer,
    vocab_weights: Any,
    hidden: jax.Array,
    batch: Batch,
    chunk_size: int | str,
    temperature: float = 1.0,
    with_entropy: bool = False,
    teacher: TeacherOutput | None = None,
) -> Scores:
    """Score the targets [B, T] of a batch in nats under softmax(logits / temperature); `hidden` is [B, T, D].

    The caller decides what the gradient of a score is, and does so after this function has returned. So the logits of a
    chunk are computed again in the backward pass. Where the loss of a token depends on the scores of this token alone,
    `sum_over_hidden` computes them once.

    The gradient of the table [V, D] is added up over the chunks in float32. A teacher has none.
    """

    def one_chunk(table, hidden, fields):
        teacher_table, targets, states = fields
        part = None if teacher is None else teacher._replace(table=teacher_table, hidden=states)
        return _score_chunk(model, table, hidden, targets, temperature, with_entropy, part)

    @jax.custom_vjp
    def score(table, hidden, teacher_table, fields):
        def without_gradient(_, chunk):
            hidden, fields = chunk
            return None, one_chunk(table, hidden, (teacher_table, *fields))

        return jax.lax.scan(without_gradient, None, (hidden, fields))[1]

    def backward(inputs, cotangents):
        table, hidden, teacher_table, fields = inputs

        def of_chunk(d_table, chunk):
            hidden, fields, cotangents = chunk
            _, vjp = jax.vjp(partial(one_chunk, fields=(teacher_table, *fields)), table, hidden)
            more, d_hidden = vjp(cotangents)
            return d_table + more.astype(d_table.dtype), d_hidden

        chunks = hidden, fields, cotangents
        d_table, d_hidden = jax.lax.scan(of_chunk, _make_zeros(table), chunks, reverse=True)
        return d_table.astype(table.dtype), d_hidden, None, None

    score.defvjp(lambda *inputs: (score(*inputs), inputs), backward)
    with jax.named_scope("loss"):
        split = make_splitter(hidden, chunk_size)
        teacher_table = None if teacher is None else teacher.table
        fields = split(batch["targets"]), None if teacher is None else jax.tree.map(split, teacher.hidden)
        scores = score(vocab_weights[1], split(hidden), teacher_table, fields)
        return jax.tree.map(lambda x: merge_chunks(x, hidden.shape[1]), scores)


def _score_chunk(
    model: Transformer,
    table: jax.Array,
    hidden: jax.Array,
    targets: jax.Array,
    temperature: float = 1.0,
    with_entropy: bool = False,
    teacher: TeacherOutput | None = None,
) -> Scores:
    """Return the scores [B, C] of targets [B, C]; hidden is [B, C, D], the table is [V, D]. A teacher has the hidden
    states of the chunk. Its divergence has a temperature of its own."""
    logits = model.logits((table, table), hidden)
    divergence = None if teacher is None else teacher.compute(logits, teacher.table, teacher.hidden)
    if temperature != 1:
        logits = logits / temperature
    log_z = jax.nn.logsumexp(logits, -1)
    ids = reshard(jnp.arange(logits.shape[-1]), model.layout.activation("V"))
    # A comparison in place of a lookup: it fuses, and needs no communication where the vocabulary is split.
    target_logits = jnp.sum(jnp.where(ids == targets[..., None], logits, 0), -1)
    entropy = None
    if with_entropy:
        fixed, log_total = jax.lax.stop_gradient((logits, log_z))
        entropy = log_total - jnp.sum(jnp.exp(fixed - log_total[..., None]) * fixed, -1)
    return Scores(log_z - target_logits, log_z, entropy, divergence)


def _make_zeros(table: jax.Array) -> jax.Array:
    """Return zeros [V, D] float32 to add gradients of the table to, of which each device has a part of its own."""
    spec = jax.typeof(table).sharding.spec
    return reshard(jnp.zeros(table.shape), jax.P(*spec.partitions, unreduced=spec.reduced))


def compute_token_log_probs(
    model: Transformer, batch: Batch, seed: jax.Array | None, *, chunk_size: int | str, temperature: float = 1.0
) -> tuple[jax.Array, BlockSums]:
    """Log-probability in nats, [B, T] float32, of each target of a batch under the model, and its blocks' numbers.

    A loss gives the blocks' numbers (a router's loss is one) to `add_block_sums`.
    """
    vocab_weights = model.vocab_weights()
    hidden, blocks = compute_hidden(model, vocab_weights, batch, seed)
    return -score_targets(model, vocab_weights, hidden, batch, chunk_size, temperature).nll, blocks
