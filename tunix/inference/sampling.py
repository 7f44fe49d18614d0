"""Answers to prompts, drawn from a model: a rollout.

    gather      once                the weights, in the dtype of products
    begin       once a wave         prompts -> their keys and values, repeated for the answers to each; the first token
    stretch     8, 8, 16, 32, 64, 64, ... tokens, as one loop on the devices that asks no other data shard
                                    between two of them the host cuts ended answers off, halves the rows when those that
                                    go on fit into half, and doubles the cache when it is full

A program is compiled once for its shapes, which are few (`costs.rollout_sizes`). Noise depends on the seed, the number
of the answer and the number of the token: tokens are the same on every mesh, in every wave, for every order of prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, reshard

from tunix.base.errors import UserError
from tunix.costs.rollout_sizes import (
    SMALLEST_PROMPT,
    STRETCH,
    count_slots,
    fewer_rows,
    fit_as_matrices,
    next_look,
    pad_prompt,
    spread_prompts,
)
from tunix.inference.cache import Cache, cache_slots, decode, grow, prefill, repeat_rows, take_rows
from tunix.inference.drawing import Drawn, Sampling, draw
from tunix.inference.gathered import Gathered, gather
from tunix.sharding.arrays import abstract_results, bytes_per_device, lay_out, rows_to_global
from tunix.sharding.layout import activation_spec
from tunix.sharding.mesh import whole_sequences
from tunix.sharding.mesh_shape import data_shards
from tunix.training.state import Architecture


@dataclass(frozen=True)
class Answer:
    """Tokens that followed one prompt."""

    tokens: list[int]  # with the stop id, if there is one
    log_probabilities: list[float]  # of each token under the model, before temperature and filters
    drawn_log_probabilities: list[float]  # of each token under the distribution that it was drawn from
    stopped: bool  # by a stop id, not by the length

    @property
    def text_tokens(self) -> list[int]:
        """The tokens without the one that stopped the answer, which is no part of its text."""
        return self.tokens[:-1] if self.stopped else self.tokens


class Rows(NamedTuple):
    """Answers at work: arrays [B] int32 and the cache, whose rows live where their prompts do."""

    token: jax.Array  # the newest
    first: jax.Array  # time at which the prompt begins
    number: jax.Array  # of the answer in the whole rollout: it draws by it
    cache: Cache


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
        self.begin = jax.jit(partial(begin, arch), static_argnames=("how", "repeats", "num_slots"))
        self.stretch = jax.jit(partial(stretch, arch), static_argnames="how", donate_argnames="rows")
        self.grow = jax.jit(grow, static_argnums=1)
        self.take = jax.jit(take_rows)
        self.gathering = jax.jit(partial(gather, arch), static_argnames="as_matrices")

    def __call__(
        self, params: Any, prompts: Sequence[list[int]], how: Sampling, seed: int = 0, first_row: int = 0
    ) -> list[Answer]:
        """Return an answer to each prompt (token ids); see `rollout`."""
        return self.rollout(params, prompts, how, seed, first_row)

    def gather(self, params: Any) -> Gathered:
        """Return the parameters for several calls of `rollout`, gathered once."""
        with jax.set_mesh(self.mesh):
            params = lay_out(params, self.mesh)
            return self.gathering(params, as_matrices=self._as_matrices(params))

    def rollout(
        self,
        params: Any,
        prompts: Sequence[list[int]],
        how: Sampling,
        seed: int = 0,
        first_row: int = 0,
        answers_per_prompt: int = 1,
        prompts_at_once: int | None = None,
        at_look: Callable[[], None] | None = None,
    ) -> list[Answer]:
        """Return answers to prompts (token ids): all answers to the first prompt, then all to the second, ...

        `params` are the parameters at rest, or what `gather` made of them. Answer n of the list draws by the number
        `first_row` + n and `seed` alone. `prompts_at_once` limits memory: prompts are sorted by their length and
        answered in waves. `at_look` is called each time that the host looks at the answers, by every process as often;
        what it raises gives them up.

        Raises:
            UserError: an empty prompt, or one that with its answer is longer than the context.
        """
        self._check(prompts, how)
        weights = params if isinstance(params, Gathered) else self.gather(params)
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        size = prompts_at_once or len(prompts)
        answers: dict[int, Answer] = {}
        for wave in (order[start : start + size] for start in range(0, len(order), size)):
            wave.sort()  # waves depend on the lengths; within a wave rows are in order
            wanted = [index * answers_per_prompt + n for index in wave for n in range(answers_per_prompt)]
            asked = [prompts[index] for index in wave]
            with jax.set_mesh(self.mesh):
                numbers = [first_row + n for n in wanted]
                drawn = self._answer(weights, asked, numbers, how, jax.random.key(seed), at_look)
            answers |= dict(zip(wanted, drawn, strict=True))
        return [answers[n] for n in range(len(answers))]

    def compile_stretch(
        self, params: Any, num_prompts: int, answers_per_prompt: int, num_slots: int, how: Sampling
    ) -> jax.stages.Compiled:
        """Compile the loop that draws answers, with a cache of `num_slots` slots, for parameters or their shapes.

        The devices need not exist.
        """
        count, copies = spread_prompts(num_prompts, answers_per_prompt, data_shards(self.mesh.shape))
        prompts, rows = count * copies, count * answers_per_prompt

        def first_token(params, tokens, first, numbers, key):
            weights, repeats = gather(self.arch, params, as_matrices), rows // prompts
            arguments = weights, tokens, first, numbers, key
            return weights, begin(self.arch, *arguments, how=how, repeats=repeats, num_slots=num_slots)[0]

        def of_rows(*shape):
            return jax.ShapeDtypeStruct(shape, "int32", sharding=NamedSharding(self.mesh, activation_spec("B")))

        with jax.set_mesh(self.mesh):
            params = lay_out(params, self.mesh)
            as_matrices = self._as_matrices(params)
            key = jax.eval_shape(lambda: jax.random.key(0))
            inputs = of_rows(prompts, SMALLEST_PROMPT), of_rows(prompts), of_rows(rows), key
            weights, after = abstract_results(self.mesh, first_token, params, *inputs)
            scalars = [jax.ShapeDtypeStruct((), "int32")] * 3
            return self.stretch.lower(weights, after, key, *scalars, how=how).compile()

    def _check(self, prompts: Sequence[list[int]], how: Sampling) -> None:
        longest = max(map(len, prompts))
        if not all(prompts):
            raise UserError("a prompt is empty: it has no token to continue from")
        if longest + how.max_new_tokens > self.context_length:
            raise UserError(
                f"a prompt of {longest} tokens and max_new_tokens={how.max_new_tokens} are more than the model's "
                f"context of {self.context_length}"
            )

    def _answer(
        self,
        weights: Gathered,
        prompts: list[list[int]],
        numbers: list[int],
        how: Sampling,
        key: jax.Array,
        at_look: Callable[[], None] | None,
    ) -> list[Answer]:
        """Return the answers with these numbers, as many to each prompt."""
        model = weights.module(self.arch)
        length, last = pad_prompt(max(map(len, prompts))), how.max_new_tokens
        slots = count_slots(length + next_look(1, last), length + last)
        rows, chunk, places = self._begin(weights, prompts, numbers, how, key, length, slots)
        drafts = [Draft(how.stop) for _ in numbers]
        _extend(drafts, chunk, 1, places)
        number = 1
        while number < last and not all(draft.stopped for draft in drafts):
            if at_look is not None:
                at_look()
            end = next_look(number, last)
            rows, places = self._let_go(rows, places, drafts)
            windows = model.cfg.windows(count_slots(length + end, length + last))
            if windows != cache_slots(rows.cache):
                rows = rows._replace(cache=self.grow(rows.cache, tuple(windows)))
            scalars = (np.int32(value) for value in (length, number, end))
            rows, chunk = self.stretch(weights, rows, key, *scalars, how=how)
            _extend(drafts, chunk, end - number, places)
            number = end
        return [draft.answer() for draft in drafts]

    def _begin(self, weights, prompts, numbers, how, key, length, num_slots) -> tuple[Rows, Drawn, np.ndarray]:
        """Return rows after their first token, that token, and the place in `numbers` of each row, -1 of a filler."""
        answers, shards = len(numbers) // len(prompts), data_shards(self.mesh.shape)
        count, copies = spread_prompts(len(prompts), answers, shards)
        tokens = np.zeros((count, length), np.int32)
        first = np.full(count, length - 1, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, length - len(prompt) :] = prompt
            first[row] = length - len(prompt)
        places = np.full(count * answers, -1)
        places[: len(numbers)] = np.arange(len(numbers))
        draws_by = np.zeros(count * answers, np.int32)
        draws_by[: len(numbers)] = numbers
        inputs = (np.repeat(tokens, copies, axis=0), np.repeat(first, copies), draws_by)
        on_devices = (rows_to_global(each, self.mesh) for each in inputs)
        rows, drawn = self.begin(weights, *on_devices, key, how=how, repeats=answers // copies, num_slots=num_slots)
        return rows, drawn, places

    def _let_go(self, rows: Rows, places: np.ndarray, drafts: list["Draft"]) -> tuple[Rows, np.ndarray]:
        """Return the rows without ended ones, if those that go on fit into half, and their places.

        A row stays on its data shard, so that no cache travels.
        """
        by_shard = places.reshape(data_shards(self.mesh.shape), -1)
        going_on = np.array([[place >= 0 and not drafts[place].stopped for place in shard] for shard in by_shard])
        size = by_shard.shape[1]
        fewer = fewer_rows(size, int(going_on.sum(1).max()))
        if fewer == size:
            return rows, places
        kept = np.argsort(~going_on, axis=1, kind="stable")[:, :fewer]  # those that go on stand first
        places = np.where(np.take_along_axis(going_on, kept, 1), np.take_along_axis(by_shard, kept, 1), -1)
        taken = self.take(rows, rows_to_global(kept.reshape(-1).astype(np.int32), self.mesh))
        return taken, places.reshape(-1)

    def _as_matrices(self, params: Any) -> bool:
        """True where quantized weights, as matrices, leave most of a device's memory free; on a CPU, always."""
        # A process knows the memory of its own devices only; of devices that do not exist, nobody knows it.
        own = [device for device in self.mesh.devices.flat if device in jax.local_devices()]
        memory = (own[0].memory_stats() if own else None) or {}
        matrices = jax.eval_shape(partial(gather, self.arch, as_matrices=True), params)
        return fit_as_matrices(bytes_per_device(matrices), memory.get("bytes_limit"))


def begin(
    arch: Architecture,
    weights: Gathered,
    tokens: jax.Array,
    first: jax.Array,
    numbers: jax.Array,
    key: jax.Array,
    *,
    how: Sampling,
    repeats: int,
    num_slots: int,
) -> tuple[Rows, Drawn]:
    """Return rows after the first token of their answers, and that token, [B, 1] on every device.

    `tokens` are prompts [B / repeats, T] that begin at `first`; each is the prompt of `repeats` rows that follow one
    another. Answers have the `numbers` [B].
    """
    model = weights.module(arch)
    logits, cache = prefill(model, weights, tokens, first, num_slots, tokens.shape[1] + how.max_new_tokens)
    logits, first, cache = repeat_rows((logits, first, cache), repeats)
    drawn = draw(logits, key, numbers, jnp.int32(0), how, model.layout)
    return Rows(drawn.tokens, first, numbers, cache), _on_every_device(Drawn(*(each[:, None] for each in drawn)))


def stretch(
    arch: Architecture,
    weights: Gathered,
    rows: Rows,
    key: jax.Array,
    length: jax.Array,
    number: jax.Array,
    end: jax.Array,
    *,
    how: Sampling,
) -> tuple[Rows, Drawn]:
    """Return rows that had `number` tokens of their answers when they have `end`, and the new ones.

    The new ones are [B, STRETCH] on every device, of which the first `end` - `number` count. Prompts are padded to
    `length`. The number of tokens is data: one program serves all stretches.
    """
    model = weights.module(arch)
    of_rows = model.layout.activation("B")

    def step(state):
        now, token, cache, chunk = state
        tied = _tied_to(now, weights)
        logits, cache = decode(model, tied, cache, token, length + now - 1, rows.first, length + how.max_new_tokens)
        drawn = draw(logits, key, rows.number, now, how, model.layout)
        chunk = jax.tree.map(
            lambda all_of_them, new: jax.lax.dynamic_update_slice_in_dim(all_of_them, new[:, None], now - number, 1),
            chunk,
            drawn,
        )
        return now + 1, drawn.tokens, cache, chunk

    def empty(dtype):
        return jnp.zeros((len(rows.token), STRETCH), dtype, out_sharding=of_rows)

    chunk = Drawn(empty("int32"), empty("float32"), empty("float32"))
    start = (number, rows.token, rows.cache, chunk)
    _, token, cache, chunk = jax.lax.while_loop(lambda state: state[0] < end, step, start)
    return rows._replace(token=token, cache=cache), _on_every_device(chunk)


def _tied_to(now: jax.Array, weights: Gathered) -> Gathered:
    """Return the weights; those that are codes depend on the number of the token.

    XLA moves out of a loop what does not depend on it. Of codes, that would be all matrices at one time.
    """
    if all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(weights)):
        return weights
    return jax.lax.optimization_barrier((weights, now))[0]


def _on_every_device(tree: Any) -> Any:
    return jax.tree.map(lambda x: reshard(x, PartitionSpec()), tree)


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


def _extend(drafts: list[Draft], drawn: Drawn, count: int, places: np.ndarray) -> None:
    """Give each draft that goes on its `count` new tokens; row n of `drawn` is that of the draft `places[n]`."""
    on_host = [np.asarray(each)[:, :count] for each in drawn]
    for row, place in enumerate(places):
        if place >= 0 and not drafts[place].stopped:
            drafts[place].extend(*(each[row] for each in on_host))
