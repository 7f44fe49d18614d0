"""Sampling: completions of prompts, drawn from a model in compiled programs; a rollout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, reshard

from tunix.base.errors import UserError
from tunix.base.files import read_json
from tunix.config import Generate
from tunix.config import Sampling as SamplingKeys
from tunix.costs.rollout import (
    CHUNK,
    SMALLEST_PROMPT,
    count_slots,
    find_next_look,
    fit_as_matrices,
    pad_prompt,
    select_fewer_rows,
    spread_prompts,
)
from tunix.data.tokenizer import Vocab, special_tokens
from tunix.inference.gathered import Gathered, gather
from tunix.inference.kv_cache import Cache, decode, grow, list_slots, prefill, repeat_rows, take_rows
from tunix.sharding.arrays import abstract_results, bytes_per_device, lay_out, rows_to_global
from tunix.sharding.layout import Layout, activation_spec
from tunix.sharding.mesh import whole_sequences
from tunix.sharding.mesh_shape import data_shards
from tunix.training.state import Architecture

# Tokens that end an answer.

SOURCES = ("generation_config.json", "config.json")  # files of a model that name such tokens, the first that does wins
TURNS = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]


def read_stop_ids(folder: Path) -> list[int]:
    """Return the ids that the files of Hugging Face's model name; none if they name none.

    Raises:
        UserError: a file has something else there than numbers.
    """
    for file in (folder / name for name in SOURCES):
        ids = read_json(file).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(number) is int for number in ids):
                raise UserError(f"{file}: eos_token_id must be a number or a list of numbers, not {str(ids)[:80]}")
            return sorted({*ids})
    return []


def find_stop_ids(vocab: Vocab, stop_strings: tuple[str, ...], folder: Path | None) -> tuple[int, ...]:
    """Return the ids that end an answer in a chat, in order: each of them is a token of the answer, and is trained.

    They are the end of a document, the first special token after an answer in the chat template, those that the files
    of the model in `folder` name, and `stop_strings` (sampling.stop).

    Raises:
        UserError: one of `stop_strings` is not a token of the tokenizer.
    """
    ends = {vocab.eos, *(read_stop_ids(folder) if folder else ())}
    # The template renders a chat of two turns. Its last segment is the answer and what closes it, like `2<|im_end|>`.
    answered = vocab.chat.segments(TURNS)[-1][0]
    special = special_tokens(vocab.backend)
    ids = vocab.backend.encode(answered, add_special_tokens=False).ids
    ends |= set([token for token in ids if token in special][:1])
    for word in stop_strings:
        index = vocab.backend.token_to_id(word)
        if index is None:
            raise UserError(f"sampling.stop={word} is not a token of the tokenizer")
        ends.add(index)
    return tuple(sorted(ends))


# The next token, drawn from logits.
#
# A token i is to be drawn with probability w_i / sum(w). It is drawn by a race: each i gets a random number E_i of the
# exponential distribution, and the smallest E_i / w_i wins. (This is the Gumbel-max trick: -log(E_i) is Gumbel noise.)
#
# The usual way compares one random number with the cumulative sums of w. Another mesh rounds these sums in another
# order: each of them moves a little, and another token may be drawn. In a race, rounding changes the winner only where
# the two smallest numbers are nearly equal, so in practice the same token wins on every mesh.
#
# A race over all V tokens needs V random numbers. Two rounds need V / 128 + 128, and have the same probabilities:
#
#     round 1   between blocks of 128 tokens   w = sum of the block
#     round 2   between tokens of that block   w = w_i            P(block) * P(i | block) = w_i / sum(w)

BLOCK = 128  # tokens of one block


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token. The filters apply in this order, to logits / temperature."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int | None = None  # keep the k likeliest
    top_p: float | None = None  # keep the likeliest that together have this probability (Holtzman et al. 2020)
    min_p: float | None = None  # keep those with this share of the likeliest's probability (arXiv:2407.01082)
    stop: tuple[int, ...] = ()  # ids that end an answer


def select_sampling(keys: SamplingKeys | Generate, stop: tuple[int, ...]) -> Sampling:
    """Return the choice that keys of the config make, with the ids that end an answer."""
    return Sampling(keys.max_new_tokens, keys.temperature, keys.top_k, keys.top_p, keys.min_p, stop)


class Sampled(NamedTuple):
    """A token for each row, [B], or several, [B, M]."""

    tokens: jax.Array  # int32
    model_log_probs: jax.Array  # float32, nats: under the model, before temperature and filters
    log_probs: jax.Array  # float32, nats: of the distribution that the token was drawn from


def sample(
    logits: jax.Array, key: jax.Array, rows: jax.Array, number: jax.Array, sampling: Sampling, layout: Layout
) -> Sampled:
    """Draw token `number` (scalar) of the answers with these global numbers, `rows` [B] int32, of logits [B, V].

    Each data shard draws its own rows. Noise depends on the key, the row and the number of the token alone. Where the
    mesh splits the vocabulary, logits of a row are put together on the devices of its shard.
    """
    split = layout.activation("B")

    @partial(jax.shard_map, in_specs=(split, PartitionSpec(), split, PartitionSpec()), out_specs=split)
    def on_each_shard(logits, key, rows, number):
        if sampling.temperature == 0:
            return select_greedy(logits)
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), number))(rows)
        return select(logits, keys, sampling)

    with jax.named_scope("draw"):
        return on_each_shard(reshard(logits, split), key, rows, number)


def select_greedy(logits: jax.Array) -> Sampled:
    """Take the likeliest token of each row of logits [B, V] float32."""
    tokens = jnp.argmax(logits, -1).astype(jnp.int32)
    return Sampled(tokens, _compute_log_probs(logits, tokens), jnp.zeros_like(logits[:, 0]))


def select(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> Sampled:
    """Draw a token for each row of logits [B, V] float32, with a key of its own, [B]; not at temperature 0."""
    scaled = _filter(logits / sampling.temperature, sampling)
    top = jnp.max(scaled, -1, keepdims=True)
    weights = _split_blocks(jnp.exp(scaled - top))  # the largest is 1: the sums stay in the range of float32
    sums = weights.sum(-1)
    first, second = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    block = _run_race(sums, first)
    inside = jnp.take_along_axis(weights, block[:, None, None], 1)[:, 0]
    tokens = block * BLOCK + _run_race(inside, second)  # never a token that fills up the last block: its weight is 0
    log_probs = _pick(scaled - top, tokens) - jnp.log(sums.sum(-1))
    is_models = sampling.temperature == 1 and (sampling.top_k, sampling.top_p, sampling.min_p) == (None, None, None)
    return Sampled(tokens, log_probs if is_models else _compute_log_probs(logits, tokens), log_probs)


def _split_blocks(weights: jax.Array) -> jax.Array:
    """Return weights [B, V] as blocks [B, V / 128, 128]; weights of 0 fill up the last block."""
    rows, size = weights.shape
    return jnp.pad(weights, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)


def _run_race(weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw for each row one of the weights [B, n], in proportion to them; int32 [B]."""
    bits = jax.vmap(lambda key: jax.random.bits(key, weights.shape[1:], "uint32"))(keys)
    # All 32 bits, and never 0. `jax.random.exponential` has 23 bits, and its 0, one in 8 million, beats every weight.
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return jnp.argmin(-jnp.log1p(-uniform) / weights, -1).astype(jnp.int32)


def _pick(values: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the value of one token of each row: [B, V], [B] -> [B]."""
    return jnp.take_along_axis(values, tokens[:, None], 1)[:, 0]


def _compute_log_probs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return _pick(logits, tokens) - jax.nn.logsumexp(logits, -1)


def _filter(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Return logits with minus infinity for the tokens that are not to be drawn."""
    if sampling.top_k is not None:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None:
        # A token is kept if those before it have less than top_p, so the one that reaches top_p is kept too: of the
        # shares 0.5 0.3 0.15 0.05 with top_p = 0.7 the first two. One token at least stays.
        ordered = -jnp.sort(-logits, -1)
        probs = jax.nn.softmax(ordered, -1)
        is_likely = jnp.cumsum(probs, -1) - probs < sampling.top_p
        least = jnp.min(jnp.where(is_likely, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.min_p is not None:  # p_i >= min_p * p_max, of logits: l_i >= l_max + log(min_p)
        least = jnp.max(logits, -1, keepdims=True) + jnp.log(sampling.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


# Answers, and the drafts that they are while they grow.


@dataclass(frozen=True)
class Answer:
    """Tokens that followed one prompt."""

    tokens: list[int]  # with the stop id, if there is one
    log_probabilities: list[float]  # of each token under the model, before temperature and filters
    sampled_log_probabilities: list[float]  # of each token under the distribution that it was drawn from
    stopped: bool  # by a stop id, not by the length

    @property
    def text_tokens(self) -> list[int]:
        """The tokens without the one that stopped the answer, which is no part of its text."""
        return self.tokens[:-1] if self.stopped else self.tokens


@dataclass
class Draft:
    """An answer that grows until a stop id comes."""

    stop: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    model_log_probs: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stopped: bool = False

    def extend(self, tokens: np.ndarray, model_log_probs: np.ndarray, log_probs: np.ndarray) -> None:
        """Take the next tokens [M], up to the first stop id; what was drawn after it does not count."""
        ends = np.flatnonzero(np.isin(tokens, self.stop))
        count = int(ends[0]) + 1 if len(ends) else len(tokens)
        self.tokens += tokens[:count].tolist()
        self.model_log_probs += model_log_probs[:count].tolist()
        self.log_probs += log_probs[:count].tolist()
        self.stopped = bool(len(ends))

    def answer(self) -> Answer:
        """Return the answer as it is now."""
        return Answer(self.tokens, self.model_log_probs, self.log_probs, self.stopped)


def extend_drafts(drafts: list[Draft], sampled: Sampled, count: int, answer_indices: np.ndarray) -> None:
    """Give each draft that goes on its `count` new tokens.

    Row n of `sampled` belongs to the draft `answer_indices[n]`, or to none where that is -1: it fills up a shard.
    """
    # Copied to the host once for all rows: a copy of each row would wait for the device each time.
    on_host = [np.asarray(each)[:, :count] for each in sampled]
    for row, index in enumerate(answer_indices):
        if index >= 0 and not drafts[index].stopped:
            drafts[index].extend(*(each[row] for each in on_host))


# Requests for answers, and the waves in which they are given.
#
# Memory bounds the prompts that are answered at one time. Prompts of a wave are padded to the longest of them, so waves
# are made of prompts that are about as long as each other:
#
#     prompts      aaaa   bb   cccccc   d   eee        5 prompts, 2 answers to each, 2 prompts at a time
#     by length    d   bb        eee   aaaa        cccccc
#     waves        `--0--'       `---1----'        `-2--'
#
# Which wave an answer is in changes none of its tokens: its noise depends on its place in the request.


@dataclass(frozen=True)
class Request:
    """Prompts, how many answers to each are wanted, and the noise that these draw by."""

    prompts: Sequence[list[int]]  # token ids
    answers_per_prompt: int = 1
    seed: int = 0
    first_row: int = 0  # answer n of the request draws by the number `first_row` + n, and by the seed

    @property
    def max_prompt_length(self) -> int:
        return max(map(len, self.prompts))

    def split(self, prompts_at_once: int | None) -> list["PromptBatch"]:
        """Return the waves in which the prompts are answered, those with the shortest prompts first; None for one."""
        order = sorted(range(len(self.prompts)), key=lambda index: len(self.prompts[index]))
        size, count = prompts_at_once or len(order), self.answers_per_prompt
        batches = []
        for start in range(0, len(order), size):
            indices = sorted(order[start : start + size])  # within a wave prompts are in the order of the request
            # Prompt 2 with 3 answers to each prompt: places 6, 7 and 8.
            answer_indices = [index * count + n for index in indices for n in range(count)]
            batches.append(PromptBatch([self.prompts[index] for index in indices], answer_indices, self.first_row))
        return batches


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are answered at one time."""

    prompts: list[list[int]]
    answer_indices: list[int]  # of their answers in the request; as many to each prompt, one after the other
    first_row: int  # of the request

    @property
    def length(self) -> int:
        """Tokens that the prompts are padded to."""
        return pad_prompt(max(map(len, self.prompts)))


# The two programs of a rollout: the first token of each answer, and a stretch of further ones.
#
# Time counts the tokens of a row from its first place, padding included. All prompts of a wave end at time `length`, so
# all rows are at the same time, and one number says where the loop is:
#
#     time        0  1  2  3 | 4  5  6          length = 4
#     row 0       .  .  p  p | a  b  c          first = 2
#     row 1       p  p  p  p | d  e  f          first = 0


class Prompts(NamedTuple):
    """Prompts of a wave, int32 arrays, and the answers that are drawn to each: B / P of them."""

    tokens: jax.Array  # [P, T], padded on the left
    first: jax.Array  # [P], the time at which each begins
    numbers: jax.Array  # [B], of the answers in the whole rollout; those to a prompt stand one after the other


class Rows(NamedTuple):
    """Answers at work: arrays [B] int32 and the cache, whose rows live where their prompts do."""

    token: jax.Array  # the newest
    first: jax.Array  # time at which the prompt begins
    number: jax.Array  # of the answer in the whole rollout, which its noise depends on
    cache: Cache


class DecodeChunk(NamedTuple):
    """Tokens that are drawn between two looks of the host, as int32 scalars: one program serves all stretches."""

    length: Any  # tokens that prompts are padded to
    begin: Any  # tokens that the answers have already
    end: Any  # tokens that they have after it


def begin(
    arch: Architecture, weights: Gathered, prompts: Prompts, key: jax.Array, *, sampling: Sampling, num_slots: int
) -> tuple[Rows, Sampled]:
    """Return rows after the first token of their answers, and that token, [B, 1] on every device.

    A prompt is computed once. Its keys and values are then repeated for each of its answers.
    """
    model, (tokens, first, numbers) = weights.module(arch), prompts
    logits, cache = prefill(model, weights, tokens, first, num_slots, tokens.shape[1] + sampling.max_new_tokens)
    logits, first, cache = repeat_rows((logits, first, cache), len(numbers) // len(tokens))
    sampled = sample(logits, key, numbers, jnp.int32(0), sampling, model.layout)
    return Rows(sampled.tokens, first, numbers, cache), _replicate(Sampled(*(each[:, None] for each in sampled)))


def run_decode_chunk(
    arch: Architecture, weights: Gathered, rows: Rows, key: jax.Array, decode_chunk: DecodeChunk, *, sampling: Sampling
) -> tuple[Rows, Sampled]:
    """Return rows after a stretch, and its tokens: [B, STRETCH] on every device, the first `end` - `begin` count."""
    model, (length, number, end) = weights.module(arch), decode_chunk
    of_rows = model.layout.activation("B")

    def step(state):
        now, token, cache, chunk = state  # `now` counts the tokens of an answer: `token` is its number now - 1
        logits, cache = decode(
            model,
            _keep_in_loop(now, weights),
            cache,
            token,
            length + now - 1,
            rows.first,
            length + sampling.max_new_tokens,
        )
        sampled = sample(logits, key, rows.number, now, sampling, model.layout)
        chunk = jax.tree.map(
            lambda tokens, new: jax.lax.dynamic_update_slice_in_dim(tokens, new[:, None], now - number, 1),
            chunk,
            sampled,
        )
        return now + 1, sampled.tokens, cache, chunk

    def empty(dtype):
        return jnp.zeros((len(rows.token), CHUNK), dtype, out_sharding=of_rows)

    # The number of tokens is data and not a shape: so the loop is one program, however long the stretch is.
    chunk = Sampled(empty("int32"), empty("float32"), empty("float32"))
    start = (number, rows.token, rows.cache, chunk)
    _, token, cache, chunk = jax.lax.while_loop(lambda state: state[0] < end, step, start)
    return rows._replace(token=token, cache=cache), _replicate(chunk)


def _keep_in_loop(now: jax.Array, weights: Gathered) -> Gathered:
    """Return the weights; quantized ones are made to depend on `now`, the number of the token.

    XLA moves out of a loop what does not depend on its turn. For quantized weights that would be their conversion to
    matrices, and the matrices of all layers would be in memory at one time.
    """
    if all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(weights)):
        return weights
    return jax.lax.optimization_barrier((weights, now))[0]


def _replicate(tree: Any) -> Any:
    return jax.tree.map(lambda x: reshard(x, PartitionSpec()), tree)


# Answers to prompts, drawn from a model: a rollout.
#
#   gather      once                the weights, in the dtype of products
#   begin       once a wave         prompts -> their keys and values, repeated for the answers to each; the first token
#   stretch     8, 8, 16, 32, 64, 64, ... tokens, as one loop on the devices; data shards do not wait for one another
#                                   between two of them the host cuts ended answers off, halves the rows when those that
#                                   go on fit into half, and doubles the cache when it is full
#
# A program is compiled once for its shapes, which are few (`costs.rollout_sizes`). Noise depends on the seed, the
# number of the answer and the number of the token: tokens are the same on every mesh, in every wave, for every order of
# prompts.


class Sampler:
    """Draws answers with the parameters that it is called with, laid out as `arch` has them at rest.

    With several processes each calls it with the same arguments and gets all answers. One token after the other has
    nothing to split among devices that share a sequence, and stages would wait for one another. So the parameters are
    laid out anew for each rollout: on whole sequences (`whole_sequences`), and with all layers on each device, where
    the axis of the stages splits the rows alone.
    """

    def __init__(self, arch: Architecture, context_length: int, mesh: Mesh):
        self.context_length, self.mesh = context_length, whole_sequences(mesh)
        self.arch = arch = arch.for_generation()
        self.begin = jax.jit(partial(begin, arch), static_argnames=("sampling", "num_slots"))
        self.run_decode_chunk = jax.jit(
            partial(run_decode_chunk, arch), static_argnames="sampling", donate_argnames="rows"
        )
        self.grow = jax.jit(grow, static_argnums=1)
        self.take = jax.jit(take_rows)
        self.gathering = jax.jit(partial(gather, arch), static_argnames="as_matrices")

    def __call__(
        self, params: Any, prompts: Sequence[list[int]], sampling: Sampling, seed: int = 0, first_row: int = 0
    ) -> list[Answer]:
        """Return an answer to each prompt (token ids); see `rollout`."""
        return self.rollout(params, Request(prompts, 1, seed, first_row), sampling)

    def gather(self, params: Any) -> Gathered:
        """Return the parameters for several calls of `rollout`, gathered once."""
        with jax.set_mesh(self.mesh):
            params = lay_out(params, self.mesh)
            return self.gathering(params, as_matrices=self._fit_as_matrices(params))

    def rollout(
        self,
        params: Any,
        request: Request,
        sampling: Sampling,
        prompts_at_once: int | None = None,
        between_chunks: Callable[[], None] | None = None,
    ) -> list[Answer]:
        """Return all answers to the first prompt of a request, then all to the second, ...

        `params` are the parameters at rest, or what `gather` made of them. `prompts_at_once` limits memory: prompts are
        sorted by their length and answered in waves. `between_chunks` is called by the host before each stretch of
        tokens, as often on every process; an error that it raises ends the rollout.

        Raises:
            UserError: an empty prompt, or one that with its answer is longer than the context.
        """
        self._check(request, sampling)
        weights = params if isinstance(params, Gathered) else self.gather(params)
        answers: dict[int, Answer] = {}
        for batch in request.split(prompts_at_once):
            with jax.set_mesh(self.mesh):
                sampled = self._answer(weights, batch, sampling, jax.random.key(request.seed), between_chunks)
            answers |= dict(zip(batch.answer_indices, sampled, strict=True))
        return [answers[index] for index in range(len(answers))]

    def compile_decode_chunk(
        self, params: Any, num_prompts: int, answers_per_prompt: int, num_slots: int, sampling: Sampling
    ) -> jax.stages.Compiled:
        """Compile the loop that draws answers, with a cache of `num_slots` slots, for parameters or their shapes.

        The devices need not exist.
        """
        count, repeats = spread_prompts(num_prompts, answers_per_prompt, data_shards(self.mesh.shape))
        prompts, rows = count * repeats, count * answers_per_prompt

        def first_token(params, prompts, key):
            weights = gather(self.arch, params, as_matrices)
            return weights, begin(self.arch, weights, prompts, key, sampling=sampling, num_slots=num_slots)[0]

        def of_rows(*shape):
            return jax.ShapeDtypeStruct(shape, "int32", sharding=NamedSharding(self.mesh, activation_spec("B")))

        with jax.set_mesh(self.mesh):
            params = lay_out(params, self.mesh)
            as_matrices = self._fit_as_matrices(params)
            key = jax.eval_shape(lambda: jax.random.key(0))
            inputs = Prompts(of_rows(prompts, SMALLEST_PROMPT), of_rows(prompts), of_rows(rows))
            weights, after = abstract_results(self.mesh, first_token, params, inputs, key)
            decode_chunk = DecodeChunk(*[jax.ShapeDtypeStruct((), "int32")] * 3)
            return self.run_decode_chunk.lower(weights, after, key, decode_chunk, sampling=sampling).compile()

    def _check(self, request: Request, sampling: Sampling) -> None:
        if not all(request.prompts):
            raise UserError("a prompt is empty: it has no token to continue from")
        max_length = request.max_prompt_length
        if max_length + sampling.max_new_tokens > self.context_length:
            raise UserError(
                f"a prompt of {max_length} tokens and max_new_tokens={sampling.max_new_tokens} are more than the "
                f"model's context of {self.context_length}"
            )

    def _answer(
        self,
        weights: Gathered,
        batch: PromptBatch,
        sampling: Sampling,
        key: jax.Array,
        between_chunks: Callable[[], None] | None,
    ) -> list[Answer]:
        """Return the answers of a wave, in the order of their places."""
        length, last, model = batch.length, sampling.max_new_tokens, weights.module(self.arch)
        # `numbers` [rows]: the draft that each row on the devices belongs to. It changes when rows are dropped.
        rows, chunk, numbers = self._begin(weights, batch, sampling, key)
        drafts = [Draft(sampling.stop) for _ in batch.answer_indices]
        extend_drafts(drafts, chunk, 1, numbers)
        number = 1  # tokens that all answers have, but for those that have ended
        while number < last and not all(draft.stopped for draft in drafts):
            if between_chunks is not None:
                between_chunks()
            end = find_next_look(number, last)
            rows, numbers = self._drop_ended_rows(rows, numbers, drafts)
            # Each layer's cache is as long as its window allows; only those grow that have become too short.
            windows = model.cfg.list_windows(count_slots(length + end, length + last))
            if windows != list_slots(rows.cache):
                rows = rows._replace(cache=self.grow(rows.cache, tuple(windows)))
            decode_chunk = DecodeChunk(*map(np.int32, (length, number, end)))
            rows, chunk = self.run_decode_chunk(weights, rows, key, decode_chunk, sampling=sampling)
            extend_drafts(drafts, chunk, end - number, numbers)
            number = end
        return [draft.answer() for draft in drafts]

    def _begin(
        self, weights: Gathered, batch: PromptBatch, sampling: Sampling, key: jax.Array
    ) -> tuple[Rows, Sampled, np.ndarray]:
        """Return rows after their first token, that token, and for each row the number of its draft, -1 of a filler.

        Of 3 prompts with 2 answers each, 1 prompt fills up to the data shards (`spread_prompts`):

            prompts    p0     p1     p2     -           computed once each
            rows       0  1   2  3   4  5   -1 -1       answers to them
        """
        length, last = batch.length, sampling.max_new_tokens
        answers = len(batch.answer_indices) // len(batch.prompts)
        count, repeats = spread_prompts(len(batch.prompts), answers, data_shards(self.mesh.shape))
        # A filler is a prompt of one token: it must have one, because a row without tokens would attend to nothing.
        tokens = np.zeros((count, length), np.int32)
        first = np.full(count, length - 1, np.int32)
        for row, prompt in enumerate(batch.prompts):
            tokens[row, length - len(prompt) :] = prompt
            first[row] = length - len(prompt)
        numbers = np.full(count * answers, -1)
        numbers[: len(batch.answer_indices)] = np.arange(len(batch.answer_indices))
        sampled_by = np.zeros(count * answers, np.int32)
        sampled_by[: len(batch.answer_indices)] = batch.first_row + np.array(batch.answer_indices)
        inputs = (np.repeat(tokens, repeats, axis=0), np.repeat(first, repeats), sampled_by)
        prompts = Prompts(*(rows_to_global(each, self.mesh) for each in inputs))
        num_slots = count_slots(length + find_next_look(1, last), length + last)
        rows, sampled = self.begin(weights, prompts, key, sampling=sampling, num_slots=num_slots)
        return rows, sampled, numbers

    def _drop_ended_rows(self, rows: Rows, numbers: np.ndarray, drafts: list["Draft"]) -> tuple[Rows, np.ndarray]:
        """Return the rows without ended ones, if those that go on fit into half, and the numbers of their drafts.

        A row stays on its data shard, so that no cache travels; the shard with most rows that go on decides.

            shard 0     0  1  2  3      1 and 2 go on        1  2
            shard 1     4  5  6  7      6 goes on            6 -1      -1: a row that has ended, and fills up
        """
        # Halves, because each number of rows is a program: 64, 32, 16, 8 rows of a shard are four.
        by_shard = numbers.reshape(data_shards(self.mesh.shape), -1)
        going_on = np.array([[number >= 0 and not drafts[number].stopped for number in shard] for shard in by_shard])
        size = by_shard.shape[1]
        fewer = select_fewer_rows(size, int(going_on.sum(1).max()))
        if fewer == size:
            return rows, numbers
        is_likely = np.argsort(~going_on, axis=1, kind="stable")[:, :fewer]  # those that go on stand first
        numbers = np.where(np.take_along_axis(going_on, is_likely, 1), np.take_along_axis(by_shard, is_likely, 1), -1)
        taken = self.take(rows, rows_to_global(is_likely.reshape(-1).astype(np.int32), self.mesh))
        return taken, numbers.reshape(-1)

    def _fit_as_matrices(self, params: Any) -> bool:
        """Return whether quantized weights, as matrices, leave most of a device's memory free; on a CPU, always."""
        # A process knows the memory of its own devices only; of devices that do not exist, nobody knows it.
        local = [device for device in self.mesh.devices.flat if device in jax.local_devices()]
        memory = (local[0].memory_stats() if local else None) or {}
        matrices = jax.eval_shape(partial(gather, self.arch, as_matrices=True), params)
        return fit_as_matrices(bytes_per_device(matrices), memory.get("bytes_limit"))
