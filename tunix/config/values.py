"""Values of keys: the folder that holds them, and a config's values by dotted key."""

from pathlib import Path
from typing import Any

PACKAGED = Path(__file__).parents[1] / "conf"  # in an installed wheel
CONF = PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[2] / "conf"


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key: {"a": {"b": 1}} becomes {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves
