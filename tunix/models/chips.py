"""Rows of tables that are by the kind of chip. Apart from the kernels, which import Pallas."""

from collections.abc import Mapping
from typing import TypeVar

Row = TypeVar("Row")


def row_of_chip(table: Mapping[str, Row], device_kind: str) -> Row | None:
    """Return the row of a device by the name that its driver gives it, which contains the name of its chip.

    None if the table has no row of this chip.
    """
    return next((row for chip, row in table.items() if chip in device_kind), None)
