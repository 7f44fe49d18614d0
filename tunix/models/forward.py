"""Values of a forward pass through the blocks: of each layer, of the rows of tokens, and of all layers together."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tunix.config import Model
from tunix.models.block import Mix
from tunix.models.positions import Rope, layer_rope


class Layer(NamedTuple):
    """Values in which a layer differs from the others of its stack; with a first dimension L, those of all its layers.

    They are data, so that the layers of a stack are one program.
    """

    number: Any  # int32 scalar, in the whole model
    window: Any  # int32 scalar: a query sees its own token and the `window - 1` before it
    rope: Rope | None  # None with learned positions
    inputs: Any = None  # [B, t, p], of `model.layer_inputs`


class Rows(NamedTuple):
    """Arrays [B, ...] that a block takes of sequences. In a pipeline they travel from stage to stage together."""

    x: Any  # [B, t, D], the residual stream; a block changes it and nothing else
    positions: Any  # [B, T] int32
    beside: Any  # what the mix needs of the sequences: a tree of arrays, or None
    # On stages alone:
    penalties: Any = None  # {name: [B]}, those of the layers so far
    numbers: jax.Array | None = None  # [B] int32 in the microbatch: dropout draws by them
    # Keys and values of donors for later layers, by the letters of their heads (shared_kv.py)
    shared: Any = None


class Forward(NamedTuple):
    """Values that all layers share in a forward pass."""

    # (a layer, `Rows.beside`) -> how tokens of these rows act on one another in this layer
    mix_of: Callable[[Layer, Any], Mix]
    length: int  # tokens of the sequences, or those for which a cache has room
    seed: Any = None  # int32 scalar for the dropout of training, or None
    reach: int | jax.Array | None = None  # tokens that the sequences end with, if they grow beyond `length`
    inputs: Any = None  # [l, B, t, p], of all layers, where the model has `layer_inputs`

    def rope(self, cfg: Model, layers: Any) -> Rope | None:
        """Return the rotations of layers with heads of one width, arrays [L, ...]; None with learned positions."""
        reach = self.length if self.reach is None else self.reach
        return layer_rope(cfg, layers, reach) if cfg.positions == "rope" else None
