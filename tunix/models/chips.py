"""Rows of tables that are by the kind of chip. They stand apart from the kernels, which import Pallas."""

from collections.abc import Mapping
from typing import TypeVar

import jax

Row = TypeVar("Row")


def find_row_of_chip(table: Mapping[str, Row], device_kind: str) -> Row | None:
    """Return the row of a device by the name that its driver gives it, which contains the name of its chip.

    None if the table has no row of this chip.
    """
    return next((row for chip, row in table.items() if chip in device_kind), None)


def find_row_in_use(table: Mapping[str, Row]) -> Row:
    """Return the row of the devices of the mesh in use. A kernel is chosen only where its table has such a row."""
    row = find_row_of_chip(table, jax.sharding.get_abstract_mesh().abstract_device.device_kind)
    assert row is not None
    return row
