"""A finding: the result of one check."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """Result of one check, on one process or between processes."""

    check: str  # its name
    status: Status  # error: training would fail; warning: training may be slow, or fail later
    says: str  # the measured value, and what to do
