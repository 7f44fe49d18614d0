"""Sums of two numbers as questions with answers: a task that a small model learns in minutes, and rewards can check."""

from collections.abc import Iterator
from typing import Literal

from tunix.base.section import Count
from tunix.sources.files import Unit
from tunix.sources.rows import Rows
from tunix.sources.source import Item


class Arithmetic(Rows):
    """Every sum of two numbers, made up: nothing to download. Columns: question ("07+85="), answer ("92")."""

    source: Literal["arithmetic"]
    """Where documents come from."""
    below: Count
    """Both numbers are below this; they are written with as many digits as the largest has."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """Return one unit: the range of the first number."""
        size = 16 * self.below**2  # 16 bytes a row, roughly: only the progress bar shows it
        return [Unit("arithmetic", "", 0, self.below, size, str(self.below))]

    def read(self, unit: Unit) -> Iterator[Item]:
        width = len(str(self.below - 1))
        for a in range(unit.start, unit.stop):
            for b in range(self.below):
                row = {"question": f"{a:0{width}}+{b:0{width}}=", "answer": str(a + b)}
                yield Item(f"{a}+{b}", row)
