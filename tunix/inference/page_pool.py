"""The pages of a cache, and which row has which: what the host knows of a data shard (sampling.cache=pages).

A page has room for `PAGE` tokens of one row, in every layer that sees all tokens. The table of a row lists its pages.
Answers to one prompt share the pages that the prompt fills; each has its own from there on:

    prompt of 40 tokens    pages 0 and 1 are full, 8 tokens are left      (16 tokens a page)
    answer 0               0 1 2 5 6
    answer 1               0 1 3
    answer 2               0 1 4 7

The number of pages may be less than all rows need when each is as long as it may be. A row gets another page only if
then all rows can still end, one after the other, even the longest ones (Dijkstra's banker's algorithm). Else it waits,
with all that it has, until others have ended. So no row is ever given up or computed again, and no two rows wait for
one another. What is kept back for that is about one row of the longest length.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tunix.costs.rollout import PAGE, count_pages

FILLED = 0.9  # share of pages that rows are expected to have in the mean
PRIOR = 8  # rows of the longest length that are counted among those that have ended
NO_PAGE = np.iinfo(np.int32).max  # behind all pages: nothing is written there


class PagePool:
    """Pages 0, 1, 2, ... of a data shard, and the tables of its rows, which the numbers of their answers name."""

    def __init__(self, max_length: int, num_pages: int | None):
        """A row has at most `max_length` tokens. `num_pages` None sets no bound: `grow` then adds what is needed.

        There are pages for two rows at least: for a prompt whose answers have not all begun, too.
        """
        self.max_pages, self.is_bounded = count_pages(max_length), num_pages is not None
        self.num_pages = 0
        self.free: list[int] = []
        self.users: list[int] = []  # of each page: rows, and a prompt whose answers have not all begun
        self.tables: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}  # most pages of each row
        self.num_shared: dict[int, int] = {}  # first pages of a row that others may use too
        self.num_ended = self.ended = 0  # rows that have ended, and the pages that they alone had
        self.grow(0 if num_pages is None else max(num_pages, 2 * self.max_pages))

    def grow(self, num_pages: int) -> None:
        """Have so many pages, if it has fewer."""
        new = range(self.num_pages, num_pages)
        self.free += reversed(new)
        self.users += [0] * len(new)
        self.num_pages = max(self.num_pages, num_pages)

    def begin(
        self, number: int, num_tokens: int, shared: Sequence[int] | None, max_length: int | None = None
    ) -> tuple[int, ...] | None:
        """Give a row its pages for a prompt of `num_tokens`; return those that all answers to the prompt share.

        None says that the row has to wait. The caller ends its own use of the shared pages with `give_back`.

        Args:
            shared: what `begin` returned for an earlier answer; () for the first of several, None for an only one.
            max_length: most tokens of the row, with its answer; None takes that of the pool.
        """
        whole = num_tokens // PAGE if shared is not None else 0
        count = count_pages(num_tokens + 1) - (whole if shared else 0)
        limit = self.max_pages if max_length is None else count_pages(max_length)
        if len(self.free) < count or not self._expects_to_fit(count, limit):
            return None
        first = list(shared or self._take(whole))
        if not shared:
            for page in first:
                self.users[page] = 1
        self.tables[number] = first + self._take(count_pages(num_tokens + 1) - whole)
        self.num_shared[number], self.limits[number] = whole, limit
        for page in self.tables[number]:
            self.users[page] += 1
        if self._can_all_end():
            return tuple(first)
        self._drop(number)
        if not shared:
            self.give_back(first)
        return None

    def extend(self, wanted: Mapping[int, int]) -> set[int]:
        """Give rows pages for so many tokens each; return the numbers of those that have them now."""
        counts = {number: count_pages(size) - len(self.tables[number]) for number, size in wanted.items()}
        if self._grant(counts):
            return set(wanted)
        return {number for number, count in counts.items() if self._grant({number: count})}

    def release(self, number: int) -> None:
        """Take back what a row has."""
        num_pages = len(self.tables[number]) - self.num_shared[number]
        self.ended, self.num_ended = self.ended + num_pages, self.num_ended + 1
        self._drop(number)

    def give_back(self, pages: Sequence[int]) -> None:
        """End a use of pages; those that nobody uses are free."""
        for page in reversed(pages):
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)

    def _drop(self, number: int) -> None:
        self.give_back(self.tables.pop(number))
        del self.num_shared[number], self.limits[number]

    def _expects_to_fit(self, count: int, limit: int) -> bool:
        """Return whether one more row, with `count` pages now, is expected to find pages as long as it draws.

        A row is expected to end with the mean of the rows that have ended, or with twice its pages of now where that is
        more, but with no more than it may have. Until then it has, in the mean, half of the sum of its pages now and at
        its end. Before many rows have ended, they are expected to be as long as they may be: rows that wait keep pages
        without use, and rows that begin together need the most pages at the same time.
        """
        if not self.is_bounded or not self.tables:
            return True
        mean = (self.ended + PRIOR * self.max_pages) / (self.num_ended + PRIOR)
        sizes = ((len(table) - self.num_shared[number], self.limits[number]) for number, table in self.tables.items())
        expected = sum(size + min(most, max(mean, 2 * size)) for size, most in [(count, limit), *sizes])
        return expected <= 2 * FILLED * self.num_pages

    def _take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def _grant(self, counts: Mapping[int, int]) -> bool:
        """Give rows so many more pages each, if there are so many and all rows can still end; return whether it has."""
        if sum(count for count in counts.values() if count > 0) > len(self.free):
            return False
        before = {number: len(self.tables[number]) for number in counts}
        for number, count in counts.items():
            new = self._take(max(0, count))
            for page in new:
                self.users[page] = 1
            self.tables[number] += new
        if self._can_all_end():
            return True
        for number, size in before.items():
            self.give_back(self.tables[number][size:])
            del self.tables[number][size:]
        return False

    def _can_all_end(self) -> bool:
        """Return whether all rows can have their longest length, one after the other, those that need least first."""
        if not self.is_bounded:
            return True
        free = len(self.free)
        missing = {number: self.limits[number] - len(table) for number, table in self.tables.items()}
        for number in sorted(missing, key=missing.__getitem__):
            if missing[number] > free:
                return False
            free += len(self.tables[number]) - self.num_shared[number]
        return True


def extend_rows(pools: Sequence[PagePool], wanted: Mapping[int, int]) -> list[int]:
    """Give rows of all data shards pages for so many tokens each; return the numbers of those that have them now."""
    granted = set(wanted)
    for pool in pools:
        local = {number: size for number, size in wanted.items() if number in pool.tables}
        granted -= set(local) - pool.extend(local)
    return [number for number in wanted if number in granted]


def make_table(
    pools: Sequence[PagePool],
    rows: Mapping[tuple[int, int], int],
    shape: tuple[int, int, int],
    first: Mapping[int, int],
) -> np.ndarray:
    """Return the pages of rows, given by their places [shard, row], in a table of a shape [shards, rows, pages].

    The `first` pages of a row, by its number, are left out: `NO_PAGE` stands for them.
    """
    table = np.full(shape, NO_PAGE, np.int32)
    for at, number in rows.items():
        begin, pages = first.get(number, 0), pools[at[0]].tables[number][: shape[2]]
        table[at][begin : len(pages)] = pages[begin:]
    return table
