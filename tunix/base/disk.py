"""Files: read with one line about what is wrong."""

import json
from pathlib import Path
from typing import Any

from tunix.base.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises `UserError` where there is none."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a model's folder: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value
