"""Answers to prompts, drawn from a model: a rollout.

    gather      once                the weights, in the dtype of products
    begin       once a wave         prompts -> their keys and values, repeated for the answers to each; the first token
    stretch     8, 8, 16, 32, 64, 64, ... tokens, as one loop on the devices; data shards do not wait for one another
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
    choose_fewer_rows,
    count_slots,
    find_next_look,
    fit_as_matrices,
    spread_prompts,
)
from tunix.inference.answers import Answer, Draft, extend_drafts
from tunix.inference.cache import grow, list_slots, take_rows
from tunix.inference.drawing import Drawn, Sampling
from tunix.inference.gathered import Gathered, gather
from tunix.inference.requests import Request, Wave
from tunix.inference.stretches import Prompts, Rows, Stretch, begin, draw_stretch
from tunix.sharding.arrays import abstract_results, bytes_per_device, lay_out, rows_to_global
from tunix.sharding.mesh import whole_sequences
from tunix.sharding.mesh_shape import data_shards
from tunix.sharding.placement import activation_spec
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
        self.begin = jax.jit(partial(begin, arch), static_argnames=("how", "num_slots"))
        self.draw_stretch = jax.jit(partial(draw_stretch, arch), static_argnames="how", donate_argnames="rows")
        self.grow = jax.jit(grow, static_argnums=1)
        self.take = jax.jit(take_rows)
        self.gathering = jax.jit(partial(gather, arch), static_argnames="as_matrices")

    def __call__(
        self, params: Any, prompts: Sequence[list[int]], how: Sampling, seed: int = 0, first_row: int = 0
    ) -> list[Answer]:
        """Return an answer to each prompt (token ids); see `rollout`."""
        return self.rollout(params, Request(prompts, 1, seed, first_row), how)

    def gather(self, params: Any) -> Gathered:
        """Return the parameters for several calls of `rollout`, gathered once."""
        with jax.set_mesh(self.mesh):
            params = lay_out(params, self.mesh)
            return self.gathering(params, as_matrices=self._fit_as_matrices(params))

    def rollout(
        self,
        params: Any,
        request: Request,
        how: Sampling,
        prompts_at_once: int | None = None,
        between_stretches: Callable[[], None] | None = None,
    ) -> list[Answer]:
        """Return all answers to the first prompt of a request, then all to the second, ...

        `params` are the parameters at rest, or what `gather` made of them. `prompts_at_once` limits memory: prompts are
        sorted by their length and answered in waves. `between_stretches` is called by the host before each stretch of
        tokens, as often on every process; an error that it raises ends the rollout.

        Raises:
            UserError: an empty prompt, or one that with its answer is longer than the context.
        """
        self._check(request, how)
        weights = params if isinstance(params, Gathered) else self.gather(params)
        answers: dict[int, Answer] = {}
        for wave in request.split(prompts_at_once):
            with jax.set_mesh(self.mesh):
                drawn = self._answer(weights, wave, how, jax.random.key(request.seed), between_stretches)
            answers |= dict(zip(wave.places, drawn, strict=True))
        return [answers[place] for place in range(len(answers))]

    def compile_stretch(
        self, params: Any, num_prompts: int, answers_per_prompt: int, num_slots: int, how: Sampling
    ) -> jax.stages.Compiled:
        """Compile the loop that draws answers, with a cache of `num_slots` slots, for parameters or their shapes.

        The devices need not exist.
        """
        count, copies = spread_prompts(num_prompts, answers_per_prompt, data_shards(self.mesh.shape))
        prompts, rows = count * copies, count * answers_per_prompt

        def first_token(params, prompts, key):
            weights = gather(self.arch, params, as_matrices)
            return weights, begin(self.arch, weights, prompts, key, how=how, num_slots=num_slots)[0]

        def of_rows(*shape):
            return jax.ShapeDtypeStruct(shape, "int32", sharding=NamedSharding(self.mesh, activation_spec("B")))

        with jax.set_mesh(self.mesh):
            params = lay_out(params, self.mesh)
            as_matrices = self._fit_as_matrices(params)
            key = jax.eval_shape(lambda: jax.random.key(0))
            asked = Prompts(of_rows(prompts, SMALLEST_PROMPT), of_rows(prompts), of_rows(rows))
            weights, after = abstract_results(self.mesh, first_token, params, asked, key)
            stretch = Stretch(*[jax.ShapeDtypeStruct((), "int32")] * 3)
            return self.draw_stretch.lower(weights, after, key, stretch, how=how).compile()

    def _check(self, request: Request, how: Sampling) -> None:
        if not all(request.prompts):
            raise UserError("a prompt is empty: it has no token to continue from")
        longest = request.longest_prompt
        if longest + how.max_new_tokens > self.context_length:
            raise UserError(
                f"a prompt of {longest} tokens and max_new_tokens={how.max_new_tokens} are more than the model's "
                f"context of {self.context_length}"
            )

    def _answer(
        self,
        weights: Gathered,
        wave: Wave,
        how: Sampling,
        key: jax.Array,
        between_stretches: Callable[[], None] | None,
    ) -> list[Answer]:
        """Return the answers of a wave, in the order of their places."""
        length, last, model = wave.length, how.max_new_tokens, weights.module(self.arch)
        # `numbers` [rows]: the draft that each row on the devices belongs to. It changes when rows are dropped.
        rows, chunk, numbers = self._begin(weights, wave, how, key)
        drafts = [Draft(how.stop) for _ in wave.places]
        extend_drafts(drafts, chunk, 1, numbers)
        number = 1  # tokens that all answers have, but for those that have ended
        while number < last and not all(draft.stopped for draft in drafts):
            if between_stretches is not None:
                between_stretches()
            end = find_next_look(number, last)
            rows, numbers = self._drop_ended_rows(rows, numbers, drafts)
            # Each layer's cache is as long as its window allows; only those grow that have become too short.
            windows = model.cfg.list_windows(count_slots(length + end, length + last))
            if windows != list_slots(rows.cache):
                rows = rows._replace(cache=self.grow(rows.cache, tuple(windows)))
            stretch = Stretch(*map(np.int32, (length, number, end)))
            rows, chunk = self.draw_stretch(weights, rows, key, stretch, how=how)
            extend_drafts(drafts, chunk, end - number, numbers)
            number = end
        return [draft.answer() for draft in drafts]

    def _begin(self, weights: Gathered, wave: Wave, how: Sampling, key: jax.Array) -> tuple[Rows, Drawn, np.ndarray]:
        """Return rows after their first token, that token, and for each row the number of its draft, -1 of a filler.

        Of 3 prompts with 2 answers each, 1 prompt fills up to the data shards (`spread_prompts`):

            prompts    p0     p1     p2     -           computed once each
            rows       0  1   2  3   4  5   -1 -1       answers to them
        """
        length, last = wave.length, how.max_new_tokens
        answers = len(wave.places) // len(wave.prompts)
        count, copies = spread_prompts(len(wave.prompts), answers, data_shards(self.mesh.shape))
        # A filler is a prompt of one token: it must have one, because a row without tokens would attend to nothing.
        tokens = np.zeros((count, length), np.int32)
        first = np.full(count, length - 1, np.int32)
        for row, prompt in enumerate(wave.prompts):
            tokens[row, length - len(prompt) :] = prompt
            first[row] = length - len(prompt)
        numbers = np.full(count * answers, -1)
        numbers[: len(wave.places)] = np.arange(len(wave.places))
        draws_by = np.zeros(count * answers, np.int32)
        draws_by[: len(wave.places)] = wave.first_row + np.array(wave.places)
        inputs = (np.repeat(tokens, copies, axis=0), np.repeat(first, copies), draws_by)
        prompts = Prompts(*(rows_to_global(each, self.mesh) for each in inputs))
        num_slots = count_slots(length + find_next_look(1, last), length + last)
        rows, drawn = self.begin(weights, prompts, key, how=how, num_slots=num_slots)
        return rows, drawn, numbers

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
        fewer = choose_fewer_rows(size, int(going_on.sum(1).max()))
        if fewer == size:
            return rows, numbers
        kept = np.argsort(~going_on, axis=1, kind="stable")[:, :fewer]  # those that go on stand first
        numbers = np.where(np.take_along_axis(going_on, kept, 1), np.take_along_axis(by_shard, kept, 1), -1)
        taken = self.take(rows, rows_to_global(kept.reshape(-1).astype(np.int32), self.mesh))
        return taken, numbers.reshape(-1)

    def _fit_as_matrices(self, params: Any) -> bool:
        """Return whether quantized weights, as matrices, leave most of a device's memory free; on a CPU, always."""
        # A process knows the memory of its own devices only; of devices that do not exist, nobody knows it.
        own = [device for device in self.mesh.devices.flat if device in jax.local_devices()]
        memory = (own[0].memory_stats() if own else None) or {}
        matrices = jax.eval_shape(partial(gather, self.arch, as_matrices=True), params)
        return fit_as_matrices(bytes_per_device(matrices), memory.get("bytes_limit"))
