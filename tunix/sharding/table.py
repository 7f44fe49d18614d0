"""Two tables that say how arrays are split over devices: mesh axes with their roles, and dimensions. Then equations,
which are written in the letters of the dimensions. Imports no jax.

    x  [B, T, D]  an activation    B on every axis that splits the batch, T on cp, D whole
    w  [D, N, H]  a weight         D rests on the axes that keep weights, N on tp, H whole

A dimension has one letter, the same in einsum equations, shapes and comments everywhere in this project. Which axis
splits the batch, which axis keeps weights, and which dimension may stay whole stands in these tables and nowhere else:
everything outside asks them when it needs to know. No other file writes the name of a mesh axis.
"""

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, reduce
from typing import Any


@dataclass(frozen=True)
class Axis:
    """One axis of the device mesh, and its roles."""

    name: str
    splits_batch: bool = False  # each coordinate has its own sequences, so a gradient is a sum over the axis
    keeps_weights: bool = False  # weights rest split over it, and are gathered before a product uses them
    suggested: bool = False  # messages propose meshes with this axis even to a user who did not name it
    needs: str = ""  # letter of a dimension without which the axis has no purpose
    elsewhere: tuple[str, ...] = ()  # names that other programs give to it


# Outermost first: neighbours on the last axis are neighbours in the machine.
MESH = (
    # Around the blocks; inside of them it splits the layers (LAYERS, below).
    Axis("pp", splits_batch=True, elsewhere=("stage", "pipe")),
    Axis("dp", splits_batch=True, elsewhere=("data", "replica", "ddp")),
    Axis("fsdp", splits_batch=True, keeps_weights=True, suggested=True, elsewhere=("shard",)),
    Axis("ep", splits_batch=True, keeps_weights=True, needs="X", elsewhere=("expert",)),
    Axis("cp", keeps_weights=True, elsewhere=("sequence", "seq", "context", "sp")),
    Axis("tp", suggested=True, elsewhere=("model", "tensor", "mp")),
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
    if axes == DATA:
        return data_axes()
    return keeping_axes() if axes == KEEPING else (axes,)


# Equations of products: what they say about the shape, the fan-in and the gradient of a weight.


@dataclass(frozen=True)
class Equation:
    """The product that a weight is for: `x,w->y` as einsum takes it, like `BTD,DNH->BTNH`.

    Each letter tells by the terms in which it stands what becomes of it:

        BTD,DNH->BTNH      B T    in x and y, not in w     the gradient of w is a sum over them (`batch`)
                           D      in x and w, not in y     the product sums over it (`summed`): the fan-in of w
                           N H    in w and y               the fan-out
        BTXD,XDG->BTXG     X      in all three             as many products side by side (`copies`)

    The last product of a branch, `BTF,FD->BtD`, gives its result to the residual stream, where fewer tokens of it may
    lie on a device: einsum takes it with `einsum_text`.
    """

    text: str

    @property
    def einsum_text(self) -> str:
        return self.text.replace(STREAM_TOKENS, TOKENS)

    @property
    def leaves_branch(self) -> bool:
        """True where the product takes the tokens of a branch and gives those of the residual stream."""
        return TOKENS in self.x and STREAM_TOKENS in self.y

    @cached_property
    def x(self) -> str:
        return self.text.split(",")[0]

    @cached_property
    def y(self) -> str:
        return self.text.split("->")[1]

    @cached_property
    def w(self) -> str:
        return self.text.split("->")[0].split(",")[1]

    @cached_property
    def copies(self) -> str:
        """Dimensions of the weight along which products stand side by side: layers, and those in x, w and y."""
        in_all = {*STACKED, *set(self.x) & set(self.y)}
        return "".join(dim_name for dim_name in self.w if dim_name in in_all)

    @cached_property
    def summed(self) -> str:
        """Dimensions of the weight that the product sums over: its fan-in."""
        return "".join(dim_name for dim_name in self.w if dim_name not in self.y + self.copies)

    @cached_property
    def batch(self) -> str:
        """Dimensions of the activations that the weight lacks: its gradient is a sum over them."""
        return "".join(dim_name for dim_name in dict.fromkeys(self.x + self.y) if dim_name not in self.w)

    @property
    def is_vector(self) -> bool:
        """True where the product sums over nothing: a norm's scale, a bias."""
        return not self.summed

    @property
    def is_choice(self) -> bool:
        """True for a bias of the router's scores, which moves its choice and has no gradient."""
        return self.is_vector and "Y" in self.w and "Y" in self.x  # another bias adds to the router's logits

    def transposed(self) -> "Equation":
        """Return the product that gives the gradient of x out of the gradient of y: `y,w->x`."""
        return Equation(f"{self.y},{self.w}->{self.x}")

    def summed_last(self) -> "Equation":
        """Return the same product of a weight whose summed dimensions stand last: `BTD,NHD->BTNH`."""
        remaining = "".join(dim_name for dim_name in self.w if dim_name not in self.summed)
        return Equation(f"{self.x},{remaining}{self.summed}->{self.y}")

    def in_order(self) -> "Equation":
        """Return the same product with other letters: einsum then sums over dimensions in the order of the weight.

        einsum takes the dimensions of a sum in alphabetical order. With H before N, XLA copies a weight [D, N, H] to
        [D, H, N] before each product.
        """
        return Equation(self.text.translate(str.maketrans(self.summed, "".join(sorted(self.summed)))))

    @property
    def is_stacked(self) -> bool:
        """True where the weight holds all layers of a stack."""
        return self.w.startswith(STACKED)

    def stacked(self, dim_name: str = LAYERS) -> "Equation":
        """Return the equation of all layers of a stack: the weight has a first dimension, that of the layers."""
        return Equation(self.text.replace(",", f",{dim_name}"))

    @property
    def is_before_stages(self) -> bool:
        """True where the weight holds layers that every stage has."""
        return self.w.startswith(FIRST_LAYERS)

    @property
    def in_files(self) -> str:
        """Letters of the weight in which the layers of every stack have one letter."""
        return LAYERS + self.w[1:] if self.is_stacked else self.w

    def one_layer(self) -> "Equation":
        """Return the equation of one layer, without the dimension of the layers."""
        return Equation(f"{self.x},{self.w[1:]}->{self.y}") if self.is_stacked else self

    def low_rank(self) -> tuple["Equation", "Equation"]:
        """Return the two products of a low-rank update, with r between them: `BTD,Dr->BTr` and `BTr,rNH->BTNH`."""
        # x,A->between and between,B->y: A has the fan-in of w and r, B has r and the fan-out. Both have all copies.
        between = "".join(dim_name for dim_name in self.x if dim_name not in self.summed) + "r"
        if self.leaves_branch:  # with the narrow result of the first product
            between = between.replace(TOKENS, STREAM_TOKENS)
        outer = "".join(dim_name for dim_name in self.w if dim_name not in self.summed + self.copies)
        first, second = f"{self.copies}{self.summed}r", f"{self.copies}r{outer}"
        return Equation(f"{self.x},{first}->{between}"), Equation(f"{between},{second}->{self.y}")

    def magnitudes(self) -> "Equation":
        """Return the product of each output with a number of its own: `BTNH,NH->BTNH`."""
        outer = "".join(dim_name for dim_name in self.w if dim_name not in self.summed)
        return Equation(f"{self.y},{outer}->{self.y}")

    @property
    def is_quantized(self) -> bool:
        """True for the codes and for the scales of a weight: they are not trained, and used as they rest."""
        return "c" in self.w or self.is_scales

    @property
    def is_scales(self) -> bool:
        """True for the scales of a quantized weight."""
        return "e" in self.w

    def quantized(self) -> tuple["Equation", "Equation"]:
        """Return the letters of the weight's codes and of its scales; no product takes these arrays."""
        return Equation(self.text.replace("D", "c")), Equation(self.text.replace("D", "e"))

    def dequantized(self) -> "Equation":
        """Return the equation of the weight that has these codes."""
        return Equation(self.text.replace("c", "D"))


def values_per_byte(qtype: str) -> int:
    """Return how many codes of a quantized weight one byte holds."""
    return {"int8": 1, "nf4": 2}[qtype]


def weights_per_scale(embed_dim: int) -> int:
    """Return how many weights share a scale: 32, or what divides the width.

    With bfloat16 scales, 32 weights pay half a bit each.
    """
    return math.gcd(embed_dim, 32)
