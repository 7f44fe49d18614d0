"""What the doctor finds."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at, on one process or between them."""

    check: str
    status: Status  # an error means that training would fail; a warning, that it may be slow or fail later
    says: str
