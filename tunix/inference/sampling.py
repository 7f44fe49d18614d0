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
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tunix.base.errors import UserError
from tunix.costs.rollout_sizes import (
    SMALLEST_PROMPT,
    count_slots,
    fewer_rows,
    fit_as_matrices,
    next_look,
    pad_prompt,
    spread_prompts,
)
from tunix.inference.answers import Answer, Draft, extend_drafts
from tunix.inference.cache import cache_slots, grow, take_rows
from tunix.inference.drawing import Drawn, Sampling
from tunix.inference.gathered import Gathered, gather
from tunix.inference.stretches import Rows, begin, stretch
from tunix.sharding.arrays import abstract_results, bytes_per_device, lay_out, rows_to_global
from tunix.sharding.layout import activation_spec
from tunix.sharding.mesh import whole_sequences
from tunix.sharding.mesh_shape import data_shards
from tunix.training.state import Architecture


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
        extend_drafts(drafts, chunk, 1, places)
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
            extend_drafts(drafts, chunk, end - number, places)
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
