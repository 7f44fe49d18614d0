"""A rollout: answers to prompts, drawn from a model with weights that are gathered once."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from tunix.base.errors import UserError
from tunix.config import Sampling as SamplingKeys
from tunix.costs.rollout import (
    PAGE,
    USABLE,
    CacheSpec,
    count_page_bytes,
    count_pages,
    derive_rollout_costs,
    fit_as_matrices,
    pad_prompt,
    pad_rows,
    read_device_bytes,
)
from tunix.data.prompts import Prompt
from tunix.inference.engine import Answer, Engine
from tunix.inference.gathered import Gathered, gather
from tunix.inference.sampling import Programs, Sampling
from tunix.models.vision import Images
from tunix.processes import peers
from tunix.sharding.arrays import bytes_per_device, lay_out
from tunix.sharding.mesh import whole_sequences
from tunix.training.state import Architecture

# Numbers and words that a `Sampling` may have. With other numbers no token could be drawn, or the least likely one.
BOUNDS = {
    "max_new_tokens": (1, math.inf),
    "temperature": (0, math.inf),
    "top_k": (1, math.inf),
    "top_p": (1e-9, 1),
    "min_p": (0, 1),
    "guess": (0, math.inf),
}
CHOICES = {"cache": ("auto", "pages", "slots"), "cache_dtype": (None, "int8"), "guess_by": ("prompt_lookup", "mtp")}


@dataclass(frozen=True)
class Request:
    """Prompts, how many answers to each are wanted, and the noise that these draw by."""

    prompts: Sequence[list[int]]  # token ids
    answers_per_prompt: int = 1
    seed: int = 0
    first_row: int = 0  # answer n of the request draws by the number `first_row` + n, and by the seed
    images: Sequence[Images | None] | None = None  # of each prompt (`Engine.admit`); None: no prompt has any

    @property
    def max_prompt_length(self) -> int:
        return max(map(len, self.prompts))

    def find_max_length(self, sampling: Sampling) -> int:
        """Return the tokens of a row at most, with its prompt padded: requests of about one length share programs."""
        return pad_prompt(self.max_prompt_length) + sampling.max_new_tokens


@dataclass(frozen=True)
class RolloutRequest:
    """Prompts, and how answers to them are drawn."""

    prompts: Sequence[Prompt]
    sampling: SamplingKeys
    group_size: int  # answers to each prompt
    seed: int  # of the noise that tokens are drawn by, and of environments
    # Called from time to time while answers are drawn, on every process as often; an error that it raises ends all.
    between_chunks: Callable[[], None] | None = None
    rank: int = 0  # of the rollouts that are under way at one time, the lowest goes first
    first_prompt: int = 0  # number of the first one among the prompts whose noise this is


def derive_seed(*parts: object) -> int:
    """Return a seed below 2^31 that depends on all parts.

    A hash, because a sum would give two rollouts the same noise: seed 1 at prompt 8, and seed 2 at prompt 7.
    """
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1  # 31 bits: a seed is an int32, which is not negative


class RowSizes(NamedTuple):
    """How many rows draw at one time over the whole mesh, and the tokens that each has at most."""

    num_rows: int
    max_prompt_length: int
    max_length: int  # of a prompt, observations and drawn tokens together


@dataclass(frozen=True)
class CacheBound:
    """Bound of the cache of a command that draws: what it may take of a device."""

    num_pages: int | None  # of a data shard; None: nothing bounds them, or there are slots
    text: str  # in a few words


def gather_device_bytes() -> int | None:
    """Return the memory of the smallest device of all processes; None where one does not know it, as on CPUs."""
    device_bytes = peers.gather(read_device_bytes(), "memory of a device")
    return None if None in device_bytes else min(device_bytes)


class Sampler:
    """Draws answers with the parameters that it is called with, laid out as `arch` has them at rest.

    With several processes each calls it with the same arguments and gets all answers. One token after the other has
    nothing to split among devices that share a sequence, and stages would wait for one another. So the parameters are
    laid out anew for each rollout: on whole sequences (`whole_sequences`), and with all layers on each device, where
    the axis of the stages splits the rows alone.
    """

    def __init__(
        self,
        arch: Architecture,
        context_length: int,
        mesh: Mesh,
        num_pages: int | None = None,
        final_length: int | None = None,
    ):
        """`num_pages` bounds the pages of a data shard, and LongRoPE turns by `final_length` (`Engine`)."""
        self.num_pages, self.final_length = num_pages, final_length
        self.context_length, self.mesh = context_length, whole_sequences(mesh)
        self.arch = arch = arch.for_generation()
        self.programs = Programs(arch, self.mesh)
        self.gathering = jax.jit(partial(gather, arch), static_argnames="as_matrices")

    def __call__(
        self, params: Any, prompts: Sequence[list[int]], sampling: Sampling, seed: int = 0, first_row: int = 0
    ) -> list[Answer]:
        """Return an answer to each prompt (token ids); see `rollout`."""
        return self.rollout(params, Request(prompts, 1, seed, first_row), sampling)

    def gather(self, params: Any) -> Gathered:
        """Return the parameters for several calls of `rollout` or `engine`, gathered once."""
        with jax.set_mesh(self.mesh):
            params = lay_out(params, self.mesh)
            return self.gathering(params, as_matrices=self._fit_as_matrices(params))

    def engine(
        self,
        params: Any,
        sampling: Sampling,
        seed: int,
        max_length: int,
        rows_at_once: int | None = None,
        fixed_shapes: bool = False,
        num_pages: int | None = None,
    ) -> Engine:
        """Return an engine for rows of at most `max_length` tokens, prompts, observations and drawn ones together.

        `params` are the parameters at rest, or what `gather` made of them. `rows_at_once` limits memory: it is the
        number of rows that are held at one time over the whole mesh; None sets no limit. `num_pages` bounds the pages
        of a data shard; None takes that of the sampler. `fixed_shapes` is for rows that wait for tools (see `Engine`).
        Raises `UserError` where `max_length` is longer than the context.
        """
        if max_length > self.context_length:
            raise UserError(f"rows of {max_length} tokens are longer than the model's context of {self.context_length}")
        weights = params if isinstance(params, Gathered) else self.gather(params)
        sizes = max_length, rows_at_once, fixed_shapes, num_pages or self.num_pages, self.final_length
        return Engine(self.programs, weights, sampling, seed, *sizes)

    def rollout(
        self,
        params: Any,
        request: Request,
        sampling: Sampling,
        rows_at_once: int | None = None,
        between_chunks: Callable[[], None] | None = None,
        num_pages: int | None = None,
    ) -> list[Answer]:
        """Return all answers to the first prompt of a request, then all to the second, ...

        `params` are the parameters at rest, or what `gather` made of them. `rows_at_once` limits memory: so many
        answers are drawn at one time, over the whole mesh, and each that ends makes room for another. `num_pages` is
        that of `engine`. `between_chunks` is called by the host before each stretch of tokens, as often on every
        process; an error that it raises ends the rollout.

        Raises:
            UserError: a prompt is empty, or longer than the context with its answer; or no token could be drawn.
        """
        self._check(request, sampling)
        if not request.prompts:
            return []
        weights = params if isinstance(params, Gathered) else self.gather(params)
        sizes = request.find_max_length(sampling), rows_at_once, False, num_pages or self.num_pages, self.final_length
        engine = Engine(self.programs, weights, sampling, request.seed, *sizes)
        # Prompts of about the same length are computed together, and are padded to the longest of them.
        for index in sorted(range(len(request.prompts)), key=lambda index: len(request.prompts[index])):
            first = request.first_row + index * request.answers_per_prompt
            numbers = range(first, first + request.answers_per_prompt)
            images = None if request.images is None else request.images[index]
            engine.admit(request.prompts[index], numbers, sampling.max_new_tokens, images, one_turn=True)
        answers: dict[int, Answer] = {}
        while engine.is_busy:
            if between_chunks is not None:
                between_chunks()
            for number, answer in engine.run():
                answers[number] = answer
                engine.release(number)
        return [answers[number] for number in sorted(answers)]

    def bound_cache(
        self, params: Any, sampling: Sampling, sizes: RowSizes, cache_gib: float | None, length_key: str
    ) -> CacheBound:
        """Return what the cache may take for rows of these sizes.

        Pages take `cache_gib` of each device. Without it, they take what is free beside the weights at rest, `params`,
        and what else a rollout needs, on devices that know their memory. All processes call it together.

        Raises:
            UserError: `cache_gib` bounds slots, or has no room for two rows; `length_key` sets their length.
        """
        rows, max_prompt_length, max_length = sizes
        if not any(self.programs.find_paged(sampling)):
            if cache_gib is not None:
                raise UserError(
                    f"cache_gib={cache_gib:g} bounds pages, and the cache has slots; set cache=pages or cache_gib=null"
                )
            return CacheBound(None, f"slots for {rows:,} rows of at most {max_length:,} tokens")
        cache = CacheSpec(sampling.cache_dtype, sampling.by_mtp, True, 0)
        of_page, most = count_page_bytes(self.arch, self.mesh, cache), count_pages(max_length)
        wanted = (pad_rows(math.ceil(rows / self.programs.num_shards)) + 1) * most
        least_gib, device_bytes = 2 * most * of_page / 2**30, gather_device_bytes()
        if cache_gib is not None:
            fitting, why = int(cache_gib * 2**30 // of_page), f"cache_gib={cache_gib:g}"
            if fitting < 2 * most:
                raise UserError(
                    f"cache_gib={cache_gib:g} has no room for two rows of {max_length:,} tokens, which take "
                    f"{least_gib:.3g} GiB of a device; raise it, or lower {length_key}"
                )
        elif device_bytes is None:
            fitting, why = wanted, ""
        else:
            lengths = max_prompt_length, max(0, max_length - pad_prompt(max_prompt_length))
            used = derive_rollout_costs(self.arch, self.mesh, rows, rows, 1, *lengths, cache, device_bytes).memory
            free = USABLE * device_bytes - bytes_per_device(params) - used
            fitting, why = int(free // of_page), f"{USABLE:.0%} of a device's memory without weights and products"
        if fitting >= wanted:
            return CacheBound(None, f"pages for all tokens of {rows:,} rows of at most {max_length:,}")
        if fitting < 2 * most:
            why = f"memory is derived to be too small for two rows of {max_length:,} tokens; {length_key} bounds them"
            return CacheBound(None, f"pages as rows need them: {why}")
        size = f"{fitting * PAGE:,} tokens, {fitting * of_page / 2**30:.3g} GiB of a device ({why})"
        return CacheBound(fitting, f"pages for {size}; answers wait where they are few")

    def _check(self, request: Request, sampling: Sampling) -> None:
        if not all(request.prompts):
            raise UserError("a prompt is empty: it has no token to continue from")
        for name, (least, most) in BOUNDS.items():  # a user of Python may have any value
            if (value := getattr(sampling, name)) is not None and not least <= value <= most:
                raise UserError(f"sampling: {name}={value} is not within {least:g} and {most:g}")
        for name, choices in CHOICES.items():
            if (value := getattr(sampling, name)) not in choices:
                raise UserError(f"sampling: {name}={value} is none of {', '.join(map(str, choices))}")
        if sampling.by_mtp and self.arch.model.mtp is None:
            raise UserError("sampling: guess_by=mtp, and the model has no layer for it; load it with mtp=True")
        max_length = max(map(len, request.prompts), default=0)
        if max_length + sampling.max_new_tokens > self.context_length:
            raise UserError(
                f"a prompt of {max_length} tokens and max_new_tokens={sampling.max_new_tokens} are more than the "
                f"model's context of {self.context_length}"
            )

    def _fit_as_matrices(self, params: Any) -> bool:
        """Return whether quantized weights, as matrices, leave most of a device's memory free; on a CPU, always."""
        # A process knows the memory of its own devices only; of devices that do not exist, nobody knows it.
        local = [device for device in self.mesh.devices.flat if device in jax.local_devices()]
        memory = (local[0].memory_stats() if local else None) or {}
        matrices = jax.eval_shape(partial(gather, self.arch, as_matrices=True), params)
        return fit_as_matrices(bytes_per_device(matrices), memory.get("bytes_limit"))
