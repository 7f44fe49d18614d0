"""Slots that threads hold, of which the most urgent thread that waits gets the next."""

import heapq
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class PrioritySlots:
    """So many slots, each held by one thread: of the threads that wait, the one with the lowest rank is next.

    slots = PrioritySlots(1)
    with slots.hold(rank=3):
        ...                          # one thread at a time is here
        with slots.lend(rank=3):
            ...                      # here another one may be there; this one waits for something else
    """

    def __init__(self, count: int):
        self.free, self.changed = count, threading.Condition()
        self.waiting: list[tuple[int, int]] = []  # a heap of (rank, number of the call)
        self.calls = itertools.count()

    @contextmanager
    def hold(self, rank: int) -> Iterator[None]:
        """Wait for a slot, and hold it for a block."""
        self._take(rank)
        try:
            yield
        finally:
            self._give_back()

    @contextmanager
    def lend(self, rank: int) -> Iterator[None]:
        """Give the slot of this thread to others for a block, and wait for one after it."""
        self._give_back()
        try:
            yield
        finally:
            self._take(rank)

    def _take(self, rank: int) -> None:
        with self.changed:
            own = rank, next(self.calls)
            heapq.heappush(self.waiting, own)
            self.changed.wait_for(lambda: self.free and self.waiting[0] == own)
            heapq.heappop(self.waiting)
            self.free -= 1
            self.changed.notify_all()

    def _give_back(self) -> None:
        with self.changed:
            self.free += 1
            self.changed.notify_all()
