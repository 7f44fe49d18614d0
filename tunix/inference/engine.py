"""The engine: rows of a cache that draw tokens side by side, each at its own pace.

A row is a place for one answer, or for a conversation of several turns. It goes through

    admit           waits until a row of the cache is free; then its prompt is computed, once for all answers to it
    run             draws tokens until the turn ends: by a stop id, or by the length
    extend          behind the turn come the tokens of an observation, and the row draws again
    release         the row of the cache is free for the next prompt

Its compiled programs are `Programs` of `sampling.py`. Token i of a row stands in slot i of its cache, whatever the
other rows do. Noise depends on the seed, the number of the answer and the number of the token. So the tokens of a row
depend on its own prompt and observations alone: not on the number of rows, on when it was admitted, on its neighbours,
or on the mesh.

With pages (`page_pool.py`) a row that gets none now waits with what it has: its answer begins, or goes on, when others
have ended.

The host knows for each row how many tokens it has, and what they are. On the devices is the cache alone. With several
processes each calls the engine with the same arguments, and all decide the same.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from tunix.costs.rollout import (
    CHUNK,
    MIN_PAGED_ROWS,
    MIN_ROWS,
    count_pages,
    count_prefill_prompts,
    count_slots,
    pad_batch,
    pad_few,
    pad_prompt,
    pad_rows,
    select_fewer_rows,
)
from tunix.inference.gathered import Gathered
from tunix.inference.kv_cache import Cache, Pages, list_slots
from tunix.inference.page_pool import PagePool, extend_rows, make_table
from tunix.inference.sampling import NO_TOKEN, Computed, Drawing, Extension, Extent, Key, Placement, Programs, Sampling
from tunix.models.vision import Images
from tunix.sharding.arrays import rows_to_global


@dataclass(frozen=True)
class Answer:
    """Tokens that a row has drawn in one turn."""

    tokens: list[int]  # with the stop id, if there is one
    log_probabilities: list[float]  # of each token under the model, before temperature and filters
    sampled_log_probabilities: list[float]  # of each token at the temperature, before filters
    stopped: bool  # by a stop id, not by the length
    num_guessed: int | None = None  # of the tokens, which were guessed and right; None where nothing was guessed

    @property
    def text_tokens(self) -> list[int]:
        """The tokens without the one that stopped the answer, which is no part of its text."""
        return self.tokens[:-1] if self.stopped else self.tokens


@dataclass
class _Row:
    """A row that is held: its place, its clock, and the tokens of its turn."""

    number: int  # of the answer
    shard: int
    index: int  # on its shard
    length: int  # tokens in the cache
    limit: int  # of `num_sampled`
    final_length: int  # what LongRoPE chooses its divisors by
    text: list[int]  # all tokens, of the prompt, of observations and drawn ones
    shift: int  # of positions behind images (`Vision.shift_positions`)
    num_sampled: int = 0  # in all turns
    observation: list[int] | None = None  # tokens that are to follow the turn
    tokens: list[int] = field(default_factory=list)
    model_log_probs: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    last_token: int = 0  # the token that is drawn and not in the cache yet
    num_guessed: int | None = None  # of `tokens`
    state: str = "working"  # working; ended: its turn is to be reported; resting: it is reported; extending

    def take(self, sampled: Iterable[np.ndarray], stop: frozenset[int]) -> None:
        """Take what the row has drawn, the arrays [n] of a `Sampled`; the last token may end the turn."""
        tokens, model_log_probs, log_probs = (each.tolist() for each in sampled)
        self.tokens += tokens
        self.text += tokens
        self.model_log_probs += model_log_probs
        self.log_probs += log_probs
        self.num_sampled += len(tokens)
        self.last_token = self.tokens[-1]
        if self.last_token in stop or self.num_sampled >= self.limit:
            self.state = "ended"

    def report(self, stop: frozenset[int]) -> Answer:
        """Return the turn, which has ended; the row rests."""
        answer = Answer(self.tokens, self.model_log_probs, self.log_probs, self.last_token in stop, self.num_guessed)
        self.tokens, self.model_log_probs, self.log_probs, self.num_guessed = [], [], [], None
        self.state = "resting"
        return answer


@dataclass
class _Prompt:
    """A prompt that waits for rows, one for each number of an answer."""

    tokens: list[int]
    numbers: deque[int]
    limit: int
    images: Images | None = None  # without a dimension of rows
    one_turn: bool = False
    final_length: int = 0  # of its rows
    entries: Any = None  # (logits, entries) of the batch that it was computed in
    source: int = 0  # its row there, on its shard
    pages: tuple[int, ...] | None = None  # that its answers share; () before the first, None where there is one alone

    @property
    def num_slots(self) -> int:
        """Slots of images that it is computed with: a power of two, or 0 without images."""
        return 0 if self.images is None else pad_batch(len(self.images.pixels))


# With shapes that do not depend on time (`Engine`), texts that a data shard computes at one time.
FIXED_BATCH = 16
FIXED_TOKENS = 2048  # of all of them: one alone is padded to so many


class Engine:
    """Draws the turns of many answers at one time, on rows of a cache. Each answer is known by its number.

        engine.admit(prompt, numbers, max_new_tokens)      # answers to a prompt, which wait until rows are free
        while engine.is_busy:
            for number, answer in engine.run():            # turns that have ended since the last call; maybe none
                engine.release(number)                     # done: another answer takes the row; or, after a tool:
                engine.extend(number, tokens, max_new_tokens)

    A row whose turn has ended keeps its cache and its clock until one of the last two is called: it may wait for a tool
    as long as it likes, while the others draw. `run` draws up to `CHUNK` tokens of each row at work, and returns
    earlier when an eighth of these rows have ended. It returns at once when no row is at work (all wait for their
    tools).

    `extend` takes the tokens of what the row sees next, without those that it has drawn itself: the engine has them.
    The next turn draws at least one token. `max_new_tokens` bounds the tokens of the turn. A row has at most
    `max_length` tokens, seen and drawn; `count_remaining_tokens(number)` says how many more it can have.

    Numbers are those of answers in the whole rollout: the noise of an answer depends on `seed`, its number, and how
    many tokens it has drawn in all its turns. A number is used once.

    With several processes each calls the same methods with the same arguments in the same order.
    """

    def __init__(
        self,
        programs: Programs,
        weights: Gathered,
        sampling: Sampling,
        seed: int,
        max_length: int,
        max_rows: int | None,
        fixed_shapes: bool = False,
        num_pages: int | None = None,
        final_length: int | None = None,
    ):
        """`max_rows` bounds the rows over the whole mesh; None: as many as there are answers.

        `num_pages` bounds the pages of a data shard, where the cache has pages; None: what the rows need.
        `final_length` is the length that LongRoPE chooses its divisors by in all rows; None: for a row of one turn its
        prompt with its longest answer, else `max_length`.

        With `fixed_shapes`, which needs `max_rows`, the shapes of all programs follow from the length of a row's own
        tokens. Programs of other shapes round in another way. So the log-probabilities of a row are the same to the
        last bit whenever others are admitted, extended and released: that depends on how long tools take.
        """
        assert max_rows is not None or not fixed_shapes
        self.programs, self.weights, self.max_length = programs, weights, max_length
        self.final_length = final_length
        self.mesh, self.num_shards = programs.mesh, programs.num_shards
        # What ends an answer is data of the programs, so that they are compiled once for all lengths and stop ids.
        self.sampling, self.stop = replace(sampling, max_new_tokens=0, stop=()), frozenset(sampling.stop)
        self.stop_ids = np.full(pad_batch(max(1, len(self.stop))), NO_TOKEN, np.int32)
        self.stop_ids[: len(self.stop)] = sorted(self.stop)
        with jax.set_mesh(self.mesh):  # the caller's mesh may have the devices in another order
            self.key: Key = jax.random.key(seed)
        self.chunk = CHUNK  # tokens of a row that `run` draws, at most `CHUNK`
        self.max_rows = None if max_rows is None else max(1, max_rows // self.num_shards)  # of a data shard
        self.fixed_rows = -(-(max_rows or 0) // self.num_shards) if fixed_shapes else None  # of a data shard
        self.cache: Cache | None = None
        self.paged = programs.find_paged(sampling)
        self.pools = [PagePool(max_length, num_pages) for _ in range(self.num_shards)] if any(self.paged) else []
        on_gpu = self.mesh.devices.flat[0].platform == "gpu"
        self.min_rows = MIN_PAGED_ROWS if self.pools and on_gpu else MIN_ROWS
        self.num_rows = self.num_slots = 0  # rows of a data shard, and slots of a layer without a window
        self.rows: dict[int, _Row] = {}
        self.waiting: deque[_Prompt] = deque()  # not computed yet
        self.computed: list[list[_Prompt]] = [[] for _ in range(self.num_shards)]  # with answers that wait for rows

    @property
    def is_busy(self) -> bool:
        """True while an answer waits for a row, or a row is held."""
        return bool(self.waiting or self.rows or any(self.computed))

    @property
    def num_working(self) -> int:
        """Rows that `run` would let draw, with those that wait for a row."""
        return sum(row.state in ("working", "extending") for row in self.rows.values()) + self._count_waiting()

    def admit(
        self,
        prompt: Sequence[int],
        numbers: Sequence[int],
        max_new_tokens: int,
        images: Images | None = None,
        one_turn: bool = False,
    ) -> None:
        """Let the answers with these numbers begin behind a prompt, when rows are free: in the order of the calls.

        With `one_turn` nothing is put behind their turns (`extend`), so they need no pages beyond `max_new_tokens`.

        `images` are those of the prompt: units [n, ...] uint8, the index [tokens] of its soft tokens, and the units
        down and across [images, 2].
        """
        assert min(len(prompt), len(numbers), max_new_tokens) > 0
        assert len(prompt) + max_new_tokens <= self.max_length, "a row would have more tokens than max_length"
        assert images is None or len(images.image_index) == len(prompt)
        final_length = self.final_length or (len(prompt) + max_new_tokens if one_turn else self.max_length)
        self.waiting.append(_Prompt(list(prompt), deque(numbers), max_new_tokens, images, one_turn, final_length))

    def extend(self, number: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Put tokens behind the turn of a row, which has been reported, and let it draw the next turn."""
        row = self.rows[number]
        assert row.state == "resting", "its turn has not been reported yet"
        assert min(len(tokens), max_new_tokens) > 0
        assert len(tokens) + max_new_tokens <= self.count_remaining_tokens(number), "more tokens than max_length"
        row.observation, row.limit, row.state = list(tokens), row.num_sampled + max_new_tokens, "extending"

    def count_remaining_tokens(self, number: int) -> int:
        """Return how many more tokens a row can have."""
        return self.max_length - self.rows[number].length - 1  # the newest token is not in the cache yet

    def release(self, number: int) -> None:
        """Give up a row, whatever it does."""
        row = self.rows.pop(number)
        if self.pools:
            self.pools[row.shard].release(number)

    def peek(self, number: int) -> Answer | None:
        """Return what a row has drawn so far in its turn; None of an answer that waits for a row."""
        row = self.rows.get(number)
        if row is None:
            return None
        return Answer(row.tokens, row.model_log_probs, row.log_probs, False, row.num_guessed)

    def run(self) -> list[tuple[int, Answer]]:
        """Draw tokens, and return the turns that have ended, as (number, turn) in the order of their numbers."""
        with jax.set_mesh(self.mesh):
            self._insert_waiting()
            self._extend_rows()
            self._decode()
        ended = [(number, row.report(self.stop)) for number, row in self.rows.items() if row.state == "ended"]
        return sorted(ended, key=lambda turn: turn[0])

    # Rows of the cache.

    def _count_waiting(self) -> int:
        return sum(len(prompt.numbers) for prompt in self._list_prompts())

    def _list_prompts(self) -> list[_Prompt]:
        """Return the prompts with answers that wait for rows."""
        return [*self.waiting, *(prompt for shard in self.computed for prompt in shard)]

    def _to_devices(self, values: np.ndarray) -> jax.Array:
        """Return [shards, rows of each, ...] on the mesh, as [rows, ...]."""
        return rows_to_global(values.reshape(-1, *values.shape[2:]), self.mesh)

    def _select_num_rows(self) -> int:
        """Return how many rows of a data shard are wanted now: for those that are held, and for those that wait."""
        if self.fixed_rows is not None:
            return self.fixed_rows
        wanted = -(-(len(self.rows) + self._count_waiting()) // self.num_shards)
        # Answers to a prompt that is computed draw on the shard of its entries.
        for shard, prompts in enumerate(self.computed):
            held = sum(row.shard == shard for row in self.rows.values())
            wanted = max(wanted, held + sum(len(prompt.numbers) for prompt in prompts))
        limit = wanted if self.max_rows is None else self.max_rows
        if min(wanted, limit) > self.num_rows:
            return min(pad_rows(wanted), limit) if self.max_rows is not None else pad_rows(wanted)
        return select_fewer_rows(self.num_rows, wanted, self.min_rows)

    def _resize(self, num_rows: int, length: int) -> None:
        """Give the cache `num_rows` rows on each data shard, and slots for rows of `length` tokens."""
        length = length if self.fixed_rows is None else self.max_length
        num_slots = max(self.num_slots, count_slots(length, self.max_length))
        self._add_pages(num_rows * count_pages(num_slots) + self._count_spare_pages())
        if (num_rows, num_slots) == (self.num_rows, self.num_slots):
            return
        windows = self._list_windows(num_slots)
        if self.cache is not None and (num_rows != self.num_rows or windows != self._list_windows(self.num_slots)):
            # Rows keep their data shard, so that no cache travels. Where the number of rows stays, so do their places.
            index = np.full((self.num_shards, num_rows), self.num_rows, np.int32)
            free = [deque(range(num_rows)) for _ in range(self.num_shards)]
            for row in self.rows.values():
                row_index = row.index if num_rows >= self.num_rows else free[row.shard].popleft()
                index[row.shard, row_index], row.index = row.index, row_index
            # Pages are no row's, and stay as they are.
            slots: Cache = [() if isinstance(kept, Pages) else kept for kept in self.cache]
            resized = self.programs.resize(slots, self._to_devices(index), windows)
            self.cache = [new or kept for new, kept in zip(resized, self.cache, strict=True)]
        self.num_rows, self.num_slots = num_rows, num_slots

    def _list_windows(self, num_slots: int) -> tuple[int, ...]:
        """Return the slots of a row in each layer; 0 where it has pages."""
        windows = self.programs.arch.model.list_windows(num_slots)
        windows = [*windows, num_slots, 0] if self.sampling.by_mtp else windows  # a state beside the slots
        return tuple(0 if has_pages else window for has_pages, window in zip(self.paged, windows, strict=True))

    def _count_spare_pages(self) -> int:
        """Return the pages of a prompt that is to have more answers, if it may have pages that no row has."""
        if self.fixed_rows is not None:
            return count_pages(self.max_length)
        lengths = [len(each.tokens) for each in self._list_prompts() if each.pages or len(each.numbers) > 1]
        return pad_batch(count_pages(max(lengths))) if lengths else 0

    def _add_pages(self, num_pages: int) -> None:
        """Let each data shard have so many pages, if nothing bounds them."""
        if not self.pools or self.pools[0].is_bounded or num_pages <= self.pools[0].num_pages:
            return
        for pool in self.pools:
            pool.grow(num_pages)
        if self.cache is not None:
            pages = iter(self.programs.add_pages([kept for kept in self.cache if isinstance(kept, Pages)], num_pages))
            self.cache = [next(pages) if isinstance(kept, Pages) else kept for kept in self.cache]

    def _make_table(self, rows: dict[tuple[int, int], int], shape: tuple[int, int]) -> jax.Array | None:
        """Return the pages of rows at places [shard, row] on the devices; None without pages."""
        if not self.pools:
            return None
        return self._to_devices(make_table(self.pools, rows, (*shape, count_pages(self.num_slots)), {}))

    def _count_at_once(self, length: int, num_slots: int = 0) -> int:
        """Return how many prompts or observations of a padded length a data shard computes at one time, at most. Each
        prompt has so many slots of images, whose patches are tokens of the tower."""
        max_prompts = count_prefill_prompts(length)
        vision = self.programs.arch.model.vision
        if num_slots and vision is not None:
            max_prompts = min(max_prompts, count_prefill_prompts(num_slots * vision.unit_patches))
        if self.fixed_rows is None:
            return max_prompts
        return max(1, min(max_prompts, self.fixed_rows, FIXED_BATCH, FIXED_TOKENS // length))

    def _share_batch(self, length: int, other: int) -> bool:
        """Return whether texts of these lengths may be computed together."""
        return self.fixed_rows is None or pad_prompt(length) == pad_prompt(other)

    # Prompts.

    def _insert_waiting(self) -> None:
        """Give free rows to answers that wait; compute the prompts that have not been computed yet."""
        max_length = max(map(len, (prompt.tokens for prompt in self.waiting)), default=0)
        held = max((row.length for row in self.rows.values()), default=0)
        if num_rows := self._select_num_rows():
            self._resize(num_rows, max(max_length, held) + 1)
        while True:
            used = {(row.shard, row.index) for row in self.rows.values()}
            free = [[n for n in range(self.num_rows) if (shard, n) not in used] for shard in range(self.num_shards)]
            for batch in self._list_batches(free):
                self._insert(*batch, free)
            if not self._compute_prompts(free):
                return

    def _list_batches(self, free: list[list[int]]) -> list[tuple[Any, list[list[_Prompt]]]]:
        """Return the batches of computed prompts with answers that find a row, and these prompts of each data shard."""
        batches: dict[int, tuple[Any, list[list[_Prompt]]]] = {}
        for shard, prompts in enumerate(self.computed):
            for prompt in prompts if free[shard] else []:
                empty: list[list[_Prompt]] = [[] for _ in range(self.num_shards)]
                batches.setdefault(id(prompt.entries), (prompt.entries, empty))[1][shard].append(prompt)
        return list(batches.values())

    def _compute_prompts(self, free: list[list[int]]) -> bool:
        """Compute the next prompts, for the rows that are free [shards]; return False if there are none."""
        chosen = self._choose_prompts([len(rows) for rows in free])
        if not any(chosen):
            return False
        max_length = max(len(prompt.tokens) for prompts in chosen for prompt in prompts)
        length, count = pad_prompt(max_length), pad_batch(max(map(len, chosen)))
        num_slots = max(prompt.num_slots for prompts in chosen for prompt in prompts)
        if self.fixed_rows is not None:
            count = self._count_at_once(length, num_slots)
        tokens = np.zeros((self.num_shards, count, length), np.int32)
        counts = np.ones((self.num_shards, count), np.int32)  # a filler is a prompt of one token
        final_lengths = np.ones_like(counts)
        for shard, prompts in enumerate(chosen):
            for row, prompt in enumerate(prompts):
                tokens[shard, row, : len(prompt.tokens)], counts[shard, row] = prompt.tokens, len(prompt.tokens)
                final_lengths[shard, row] = prompt.final_length
        inputs = map(self._to_devices, (tokens, counts, final_lengths))
        dtype, with_mtp = self.sampling.cache_dtype, self.sampling.by_mtp
        images = self._gather_images(chosen, tokens.shape, num_slots)
        computed = self.programs.prefill(self.weights, *inputs, images, cache_dtype=dtype, with_mtp=with_mtp)
        if self.cache is None:
            sizes = self.num_shards * self.num_rows, self._list_windows(self.num_slots)
            num_pages = sum(pool.num_pages for pool in self.pools)
            self.cache = self.programs.make_cache(computed[1], *sizes, self.paged, num_pages)
        for shard, prompts in enumerate(chosen):
            for row, prompt in enumerate(prompts):
                prompt.entries, prompt.source = computed, row
                prompt.pages = () if len(prompt.numbers) > 1 else None
            self.computed[shard] += prompts
        return True

    def _gather_images(self, chosen: list[list[_Prompt]], shape: tuple[int, ...], num_slots: int) -> Images | None:
        """Return the images of prompts on the devices, for tokens of a shape [shards, prompts, C]; None without."""
        given = [prompt.images for prompts in chosen for prompt in prompts if prompt.images is not None]
        if not given:
            return None
        num_images = pad_batch(max(len(images.grids) for images in given))
        pixels = np.zeros((*shape[:2], num_slots, *given[0].pixels.shape[1:]), np.uint8)
        index, grids = np.full(shape, -1, np.int32), np.zeros((*shape[:2], num_images, 2), np.int32)
        for shard, prompts in enumerate(chosen):
            for row, prompt in enumerate(prompts):
                if (images := prompt.images) is not None:
                    pixels[shard, row, : len(images.pixels)] = images.pixels
                    index[shard, row, : len(prompt.tokens)] = images.image_index
                    grids[shard, row, : len(images.grids)] = images.grids
        return Images(*map(self._to_devices, (pixels, index, grids)))

    def _choose_prompts(self, free_rows: list[int]) -> list[list[_Prompt]]:
        """Return the prompts that each data shard computes next, for so many free rows of each; they wait no more."""
        chosen: list[list[_Prompt]] = [[] for _ in range(self.num_shards)]
        max_length = num_slots = 0
        while self.waiting and max(free_rows) > 0:
            # The shard with most free rows takes the next prompt, with all of its answers.
            shard = max(range(self.num_shards), key=lambda shard: free_rows[shard])
            length, slots = len(self.waiting[0].tokens), self.waiting[0].num_slots
            if max_length and (slots != num_slots or not self._share_batch(max_length, length)):
                break
            max_length, num_slots = max(max_length, length), slots
            if len(chosen[shard]) >= self._count_at_once(pad_prompt(max_length), num_slots):
                break
            prompt = self.waiting.popleft()
            # Where other shards have more free rows than the prompts behind this one fill, they take answers to it, and
            # compute it too: 3 prompts with 8 answers each keep 8 shards busy.
            num_free = free_rows[shard]
            num_free_elsewhere = sum(map(max, free_rows, [0] * self.num_shards)) - num_free
            if len(prompt.numbers) > num_free and num_free_elsewhere > sum(len(each.numbers) for each in self.waiting):
                numbers = list(prompt.numbers)
                self.waiting.appendleft(replace(prompt, numbers=deque(numbers[num_free:])))
                prompt = replace(prompt, numbers=deque(numbers[:num_free]))
            free_rows[shard] -= len(prompt.numbers)
            chosen[shard].append(prompt)
        if self.fixed_rows is not None:
            return chosen
        # Each number of prompts is a program: 1, 2, 4, 8, ... Of 11 prompts 8 are computed now, then 2, then 1.
        count = 1 << (max(map(len, chosen)).bit_length() - 1) if any(chosen) else 0
        for prompts in chosen:
            self.waiting.extendleft(reversed(prompts[count:]))
            del prompts[count:]
        return chosen

    def _insert(self, computed: Computed, batch: list[list[_Prompt]], free: list[list[int]]) -> None:
        """Give rows to answers of prompts that were computed together, and draw their first tokens."""
        begun: list[list[tuple[_Row, int]]] = [[] for _ in range(self.num_shards)]  # with the row of the prompt
        written: dict[int, int] = {}  # pages of a row's table, by its number, that stand there already
        for shard, prompts in enumerate(batch):
            for prompt in prompts:
                while prompt.numbers and free[shard]:
                    if self.pools and not self._begin_pages(shard, prompt, written):
                        free[shard].clear()  # those behind it wait too
                        break
                    where = prompt.numbers.popleft(), shard, free[shard].pop(0)
                    sizes = len(prompt.tokens), prompt.limit, prompt.final_length
                    images, vision = prompt.images, self.programs.arch.model.vision
                    shift = 0 if vision is None or images is None else vision.shift_positions(images.grids)
                    row = _Row(*where, *sizes, list(prompt.tokens), shift)
                    begun[shard].append((row, prompt.source))
                if self.pools and prompt.pages and not prompt.numbers:
                    self.pools[shard].give_back(prompt.pages)
            self.computed[shard] = [prompt for prompt in self.computed[shard] if prompt.numbers]
        if not any(begun):  # the rows that were free have been taken by prompts of another batch
            return
        count = pad_batch(max(map(len, begun))) if self.fixed_rows is None else self.num_rows
        source = np.zeros((self.num_shards, count), np.int32)
        rows = np.full((self.num_shards, count), self.num_rows, np.int32)
        number = np.zeros((self.num_shards, count), np.int32)
        for shard, each in enumerate(begun):
            for index, (row, at) in enumerate(each):
                source[shard, index], rows[shard, index], number[shard, index] = at, row.index, row.number
        number_at = {(shard, n): row.number for shard, each in enumerate(begun) for n, (row, _) in enumerate(each)}
        size = self.num_shards, count, count_pages(max(list_slots(computed[1])))
        pages = self._to_devices(make_table(self.pools, number_at, size, written)) if self.pools else None
        answers = Placement(*map(self._to_devices, (source, rows, number)))._replace(pages=pages)
        self.cache, sampled = self.programs.insert(self.cache, computed, answers, self.key, sampling=self.sampling)
        on_host = [np.asarray(each).reshape(self.num_shards, count) for each in sampled]
        for shard, each in enumerate(begun):
            for index, (row, _) in enumerate(each):
                assert row.number not in self.rows, "a number is used once"
                self.rows[row.number] = row
                row.take((values[shard, index : index + 1] for values in on_host), self.stop)

    def _begin_pages(self, shard: int, prompt: _Prompt, written: dict[int, int]) -> bool:
        """Give the next answer to a prompt its pages; return whether it has them."""
        max_length = len(prompt.tokens) + prompt.limit if prompt.one_turn else None
        shared = self.pools[shard].begin(prompt.numbers[0], len(prompt.tokens), prompt.pages, max_length)
        if shared is None:
            return False
        written[prompt.numbers[0]] = len(prompt.pages or ())
        prompt.pages = None if prompt.pages is None else shared
        return True

    # Observations.

    def _extend_rows(self) -> None:
        """Give rows the tokens that are to follow their turns, and draw the token behind them."""
        held = self.rows.items()
        ends = {number: row.length + 1 + len(row.observation) for number, row in held if row.observation is not None}
        if ends:
            self._resize(self.num_rows, max(ends.values()) + 1)
        extending = [self.rows[number] for number in extend_rows(self.pools, ends)]
        extending.sort(key=lambda row: len(row.observation or ()))
        while extending:
            by_shard: list[list[_Row]] = [[] for _ in range(self.num_shards)]
            later, max_length = [], 0
            for row in extending:
                length = 1 + len(row.observation or ())
                new_max = max(max_length, length)
                fits = len(by_shard[row.shard]) < self._count_at_once(pad_prompt(new_max))
                if (fits or not by_shard[row.shard]) and self._share_batch(max_length or length, length):
                    by_shard[row.shard].append(row)
                    max_length = new_max
                else:
                    later.append(row)
            self._extend_batch(by_shard, pad_prompt(max_length))
            extending = later

    def _extend_batch(self, by_shard: list[list[_Row]], length: int) -> None:
        max_rows = pad_few(max(map(len, by_shard)))
        shape = self.num_shards, max_rows if self.fixed_rows is None else self._count_at_once(length)
        tokens = np.zeros((*shape, length), np.int32)
        rows = np.full(shape, self.num_rows, np.int32)
        start, number, num_sampled, shift, final_length = (np.zeros(shape, np.int32) for _ in range(5))
        count = np.ones(shape, np.int32)
        for shard, each in enumerate(by_shard):
            for index, row in enumerate(each):
                text = [row.last_token, *(row.observation or ())]
                at = shard, index
                tokens[at][: len(text)], count[at], rows[at] = text, len(text), row.index
                start[at], number[at], num_sampled[at], shift[at] = row.length, row.number, row.num_sampled, row.shift
                final_length[at] = row.final_length
        inputs = (rows, tokens, start, count, number, num_sampled, shift, final_length)
        number_at = {(shard, n): row.number for shard, each in enumerate(by_shard) for n, row in enumerate(each)}
        more = Extension(*map(self._to_devices, inputs))._replace(table=self._make_table(number_at, shape))
        self.cache, sampled = self.programs.extend(self.weights, self.cache, more, self.key, sampling=self.sampling)
        on_host = [np.asarray(each).reshape(shape) for each in sampled]
        for shard, each in enumerate(by_shard):
            for index, row in enumerate(each):
                row.length += int(count[shard, index])
                row.text += row.observation or ()
                row.observation, row.state = None, "working"
                row.take((values[shard, index : index + 1] for values in on_host), self.stop)

    # Tokens.

    def _decode(self) -> None:
        """Draw tokens of the rows at work."""
        working = [row for row in self.rows.values() if row.state == "working"]
        if not working:
            return
        guess = self.sampling.guess
        steps = min(self.chunk, max(row.limit - row.num_sampled for row in working))
        ends = {row.number: row.length + min(steps + guess, row.limit - row.num_sampled) for row in working}
        self._resize(self.num_rows, max(ends.values()))
        working = [self.rows[number] for number in extend_rows(self.pools, ends)]
        if not working:
            return
        shape = self.num_shards, self.num_rows
        fields = {name: np.zeros(shape, np.int32) for name in Drawing._fields if name != "table"}
        for row in working:
            at = row.shard, row.index
            fields["token"][at], fields["length"][at], fields["number"][at] = row.last_token, row.length, row.number
            fields["num_sampled"][at], fields["limit"][at], fields["working"][at] = row.num_sampled, row.limit, 1
            fields["shift"][at], fields["final_length"][at] = row.shift, row.final_length
        table = self._make_table({(row.shard, row.index): row.number for row in working}, shape)
        rows = Drawing(**{name: self._to_devices(values) for name, values in fields.items()}, table=table)
        # It returns when an eighth of the rows have ended, so that others take them.
        extent = Extent(np.int32(steps), np.int32(len(working) - max(1, len(working) // 8) + 1), self.stop_ids)
        rows = rows._replace(working=rows.working > 0)
        if guess:
            text = np.zeros((*shape, self.num_slots + 1), np.int32)  # with a place for the newest token
            for row in working:
                text[row.shard, row.index, : len(row.text)] = row.text
            inputs = rows, self._to_devices(text), self.key, extent
            self.cache, sampled, passes = self.programs.guess(self.weights, self.cache, *inputs, sampling=self.sampling)
            num_passes = np.asarray(passes).reshape(shape)
        else:
            self.cache, sampled = self.programs.decode(
                self.weights, self.cache, rows, self.key, extent, sampling=self.sampling
            )
        on_host = [np.asarray(each).reshape(*shape, -1) for each in sampled]
        for row in working:
            count = int((on_host[0][row.shard, row.index] != NO_TOKEN).sum())
            row.length += count
            if guess:
                row.num_guessed = (row.num_guessed or 0) + count - int(num_passes[row.shard, row.index])
            row.take((values[row.shard, row.index, :count] for values in on_host), self.stop)
