"""Nested dicts, as a config is one."""

from typing import Any


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key: {"a": {"b": 1}} becomes {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves
