"""Two tables that say how arrays are split over devices: mesh axes with their roles, and dimensions. Imports no jax.

    x  [B, T, D]  an activation    B on every axis that splits the batch, T on cp, D whole
    w  [D, N, H]  a weight         D rests on the axes that keep weights, N on tp, H whole

A dimension has one letter, the same in einsum equations, shapes and comments everywhere in this project. Which axis
splits the batch, which axis keeps weights, and which dimension may stay whole stands in these tables and nowhere else:
everything outside asks them when it needs to know. No other file writes the name of a mesh axis.
"""

from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any


@dataclass(frozen=True)
class Axis:
    """One axis of the device mesh, and its roles."""

    name: str
    splits_batch: bool = False  # each coordinate has its own sequences, so a gradient is a sum over the axis
    keeps_weights: bool = False  # weights rest split over it, and are gathered before a product uses them
    suggested: bool = False  # messages propose meshes with this axis even to a user who did not name it
    needs: str = ""  # letter of a dimension without which the axis has no purpose


# Outermost first: neighbours on the last axis are neighbours in the machine.
MESH = (
    Axis("pp", splits_batch=True),  # around the blocks; inside of them it splits the layers (LAYERS, below)
    Axis("dp", splits_batch=True),
    Axis("fsdp", splits_batch=True, keeps_weights=True, suggested=True),
    Axis("ep", splits_batch=True, keeps_weights=True, needs="X"),
    Axis("cp", keeps_weights=True),
    Axis("tp", suggested=True),
)


class Whole(Enum):
    """May every device keep all of a dimension that the size of its mesh axis does not divide?"""

    NEVER = "the mesh is refused"
    ALWAYS = "every device keeps all of it"
    AS_DIVISOR = "every device keeps all of it and needs one entry; refused unless it divides the size of the axis"


# These stand in the place of an axis's name, so that a new axis with the role is one row of MESH.
DATA = "every axis that splits the batch"
KEEPING = "every axis that keeps weights"

Axes = str | tuple[str, ...] | None  # DATA, KEEPING, or names of axes, which split a dimension together


@dataclass(frozen=True)
class Dim:
    """One dimension of weights and activations."""

    dim_name: str
    name: str  # in words, for messages
    weight: Axes = None  # the axes that split it in a weight at rest; all but KEEPING split it in use too
    activation: Axes = None  # the axes that split it in an activation
    key: str = ""  # the config key that sets it
    may_stay_whole: Whole = Whole.NEVER

    @property
    def weight_axes(self) -> tuple[str, ...]:
        return _expand(self.weight)

    @property
    def activation_axes(self) -> tuple[str, ...]:
        return _expand(self.activation)

    @property
    def is_gathered(self) -> bool:
        """True where a product takes the whole dimension of a weight that rests split."""
        return self.weight == KEEPING


DIMS = {
    dim.dim_name: dim
    for dim in (
        #                            weight   activation
        Dim("A", "microbatches"),
        Dim("B", "sequences",        None,    DATA),
        Dim("T", "tokens",           None,    "cp", key="training.seq_len"),
        # Between the branches of a block nothing needs other tokens, or a part of a weight.
        Dim("t", "tokens of the residual stream", None, ("cp", "tp")),
        Dim("D", "width",            KEEPING, None, key="model.embed_dim"),
        Dim("F", "MLP width",        "tp",    "tp", key="model.mlp_dim"),
        Dim("U", "shared expert's width", "tp", "tp", key="model.mlp.shared_dim"),
        Dim("X", "experts",          "ep",    "ep", key="model.mlp.num_experts"),
        Dim("Y", "router's choices", None,    None, key="model.mlp.num_experts"),  # experts, as a router sees them
        Dim("G", "expert width",     "tp",    "tp", key="model.mlp.expert_dim"),
        Dim("N", "query heads",      "tp",    "tp", key="model.num_heads"),
        Dim("K", "key/value heads",  "tp",    "tp", key="model.num_kv_heads", may_stay_whole=Whole.AS_DIVISOR),
        Dim("H", "head width",       None,    None, key="model.head_dim"),
        # Global layers may have heads of their own: small letters for the same two dimensions.
        Dim("k", "key/value heads of global layers", "tp", "tp", key="model.global_heads.num_kv_heads", may_stay_whole=Whole.AS_DIVISOR),  # noqa: E501
        Dim("h", "head width of global layers", None, None, key="model.global_heads.head_dim"),
        Dim("f", "MLP width of layers with shared keys", "tp", "tp", key="model.shared_kv.mlp_dim"),
        Dim("p", "inputs of a layer", KEEPING, None, key="model.layer_inputs.dim", may_stay_whole=Whole.ALWAYS),
        Dim("l", "layers with inputs", None, None),  # side by side in one array
        Dim("Q", "queries' latent",  KEEPING, None, key="model.latent.query_dim", may_stay_whole=Whole.ALWAYS),
        Dim("C", "keys' and values' latent", KEEPING, None, key="model.latent.dim", may_stay_whole=Whole.ALWAYS),
        Dim("R", "rotated width",    None,    None),  # of a key that all heads share
        Dim("O", "keys and values",  None,    None),  # made of a latent, of one head
        Dim("W", "value width",      None,    None, key="model.latent.value_dim"),
        Dim("I", "key heads of linear attention", "tp", "tp", key="model.linear_attention.num_key_heads"),
        Dim("E", "key width of linear attention", None, None, key="model.linear_attention.key_dim"),
        Dim("J", "value heads of linear attention", "tp", "tp", key="model.linear_attention.num_value_heads"),
        Dim("M", "value width of linear attention", None, None, key="model.linear_attention.value_dim"),
        Dim("Z", "tokens of a filter", None, None, key="model.linear_attention.filter_size"),
        Dim("V", "vocabulary",       "tp",    "tp", key="model.vocab_size", may_stay_whole=Whole.ALWAYS),
        Dim("P", "context",          None,    None, key="model.context_length"),
        Dim("S", "keys"),  # that a query may see: the slots of a cache, or all tokens of its sequence
        Dim("L", "layers",           "pp",    None, key="model.num_layers"),
        # Axes of stages keep weights of layers before the stages, where they divide the width.
        Dim("η", "layers before stages", None, None),
        Dim("δ", "width of layers before stages", ("pp", KEEPING), None, may_stay_whole=Whole.ALWAYS),
        # Stages take equal shares of the turns (`Model.num_turns`): a turn of layers of several kinds is not cut.
        Dim("s", "turns of layers",  "pp"),
        Dim("v", "labels"),  # numbers that a document gets (`model.labels`)
        Dim("μ", "vectors of a token and of its state", None, None),  # side by side (`model.mtp`)
        Dim("u", "texts of a row"),  # of task=embed: a query, its document, negatives
        Dim("o", "single numbers"),  # one for a whole layer
        # Inside attention each device has whole sequences, so the axis of the tokens splits heads there.
        Dim("n", "query heads in attention", None, ("tp", "cp"), key="model.num_heads"),
        # Images: `a` and `b` of a weight are `y` and `x` of one patch.
        Dim("j", "image slots of a sequence", None, None, key="training.images_per_row"),
        Dim("y", "rows of pixels",   None,    None, key="model.vision.image_size"),
        Dim("x", "columns of pixels", None,   None, key="model.vision.image_size"),
        Dim("z", "channels",         None,    None),
        Dim("a", "rows of a patch",  None,    None, key="model.vision.patch_size"),
        Dim("b", "columns of a patch", None,  None, key="model.vision.patch_size"),
        Dim("i", "patches of an image", None, None),
        Dim("d", "tower's width",    KEEPING, None, key="model.vision.embed_dim", may_stay_whole=Whole.ALWAYS),
        Dim("m", "tower's MLP width", "tp",   "tp", key="model.vision.mlp_dim", may_stay_whole=Whole.ALWAYS),
        Dim("q", "tower's heads",    "tp",    "tp", key="model.vision.num_heads", may_stay_whole=Whole.ALWAYS),
        Dim("w", "tower's head width", None,  None),
        Dim("g", "soft tokens of an image", None, None),
        Dim("ψ", "patches of a soft token", None, None),
        Dim("λ", "merger's width",   "tp",    "tp", may_stay_whole=Whole.ALWAYS),
        Dim("φ", "images of a patch in time", None, None),
        # Dimensions that a way to keep a weight adds: low-rank factors, quantized codes. All Latin letters are taken: a
        # new dimension takes a Greek one, like δ above.
        Dim("r", "LoRA rank",        None,    None, key="model.lora.rank"),
        Dim("c", "codes along the width",  KEEPING, may_stay_whole=Whole.ALWAYS),  # bytes of codes, in the place of D
        Dim("e", "scales along the width", KEEPING, may_stay_whole=Whole.ALWAYS),  # blocks of one scale, in that of D
    )
}  # fmt: skip
LAYERS = "L"  # blocks are stacked along it
FIRST_LAYERS = "η"  # and along it those before the layers that stages share (`Model.first_runs`)
WIDTH, FIRST_WIDTH = "D", "δ"  # of all layers, and of those before the stages, where more axes keep a weight
STACKED = LAYERS, FIRST_LAYERS
TOKENS, STREAM_TOKENS = "T", "t"  # the same tokens: inside of a branch, and in the residual stream between branches
EXPERTS = "X"  # each has its own weights; a token meets a few of them


def axis_names() -> tuple[str, ...]:
    """Return the names of all mesh axes, outermost first."""
    return tuple(axis.name for axis in MESH)


def data_axes() -> tuple[str, ...]:
    """Return the axes that split the batch: one coordinate of all of them is a data shard."""
    return tuple(axis.name for axis in MESH if axis.splits_batch)


def keeping_axes() -> tuple[str, ...]:
    """Return the axes that keep weights."""
    return tuple(axis.name for axis in MESH if axis.keeps_weights)


def token_axes() -> tuple[str, ...]:
    """Return the axes that split the tokens of a sequence; devices along them have equal shares of it, in order."""
    return DIMS["T"].activation_axes


def stream_axes() -> tuple[str, ...]:
    """Return the axes that split the tokens of the residual stream, and not those of a sequence inside of a branch."""
    return tuple(axis for axis in DIMS[STREAM_TOKENS].activation_axes if axis not in token_axes())


def needed_dims() -> dict[str, str]:
    """Return the letter of the dimension that each axis needs, by axis; axes that need none are left out."""
    return {axis.name: axis.needs for axis in MESH if axis.needs}


def suggested_axes() -> tuple[str, ...]:
    """Return the axes that messages propose to every user."""
    return tuple(axis.name for axis in MESH if axis.suggested)


def read_dims(section: str, values: object) -> dict[str, int]:
    """Return the size of each dimension that a key of this config section sets, by letter.

    A key that is null, or that the chosen kind of a part lacks (a dense model has no experts), sets none.
    """
    sizes = {}
    for dim in DIMS.values():
        first, *path = dim.key.split(".")
        size: Any = reduce(lambda part, name: getattr(part, name, None), path, values)
        if first == section and size is not None:
            sizes[dim.dim_name] = size
    return sizes


def _expand(axes: Axes) -> tuple[str, ...]:
    """Return the names of axes, with DATA and KEEPING spelt out."""
    if axes is None:
        return ()
    if isinstance(axes, tuple):
        return tuple(name for each in axes for name in _expand(each))
    return {DATA: data_axes(), KEEPING: keeping_axes()}.get(axes, (axes,))
