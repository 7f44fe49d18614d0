"""Names of parameters in a tree."""

from collections.abc import Mapping
from typing import Any

import jax


def named(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their names, like `blocks.attention.q.w`."""
    return [(parameter_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def parameter_name(path: Any) -> str:
    """Return the name of a path in a tree of parameters, like `blocks.attention.q.w`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
