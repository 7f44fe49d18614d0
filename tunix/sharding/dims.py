"""Which mesh axis shards which dimension: one table, and the arithmetic of mesh shapes. Knows no jax.

Letters name the dimensions in einsum equations, shapes and comments everywhere in this project:
  A microbatches  B batch (sequences)  T tokens  D embed  F mlp  N query heads  K key/value heads  H head dim
  V vocabulary  P places in the context  S slots of a key/value cache  L layers  r LoRA rank
  C bytes of codes, and E blocks of one scale, along D of a quantized weight
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

MESH_AXES = ("dp", "fsdp", "tp")  # outermost first: neighbours on tp are neighbours in the machine
DATA_AXES = ("dp", "fsdp")  # these split the batch: one coordinate of them is a data shard

# Where each logical axis lives: the weights', and the activations'. A new mesh axis is a new cell.
AXES: dict[str, tuple[str | None, str | tuple[str, ...] | None]] = {
    # logical axis  weight  activation
    "batch": (None, DATA_AXES),
    "seq": (None, None),
    "embed": ("fsdp", None),
    "embed_codes": ("fsdp", None),
    "embed_blocks": ("fsdp", None),
    "heads": ("tp", "tp"),
    "kv_heads": ("tp", "tp"),
    "head_dim": (None, None),
    "mlp": ("tp", "tp"),
    "vocab": ("tp", "tp"),
    "places": (None, None),
    "rank": (None, None),
    "layers": (None, None),
}
LETTERS = {
    "B": "batch", "T": "seq", "D": "embed", "N": "heads", "K": "kv_heads",
    "H": "head_dim", "F": "mlp", "V": "vocab", "P": "places", "L": "layers", "r": "rank",
    "C": "embed_codes", "E": "embed_blocks",
}  # fmt: skip
KEYS = {  # the config key that sets each dimension which a mesh axis may have to divide
    "D": "model.embed_dim", "F": "model.mlp_dim", "N": "model.num_heads",
    "K": "model.num_kv_heads",
}  # fmt: skip


@dataclass(frozen=True)
class Equation:
    """What a weight is for: `x,w->y` as einsum takes it, like `BTD,DNH->BTNH`."""

    text: str

    @property
    def x(self) -> str:
        return self.text.split(",")[0]

    @property
    def y(self) -> str:
        return self.text.split("->")[1]

    @property
    def w(self) -> str:
        return self.text.split("->")[0].split(",")[1]

    @property
    def summed(self) -> str:
        """Dimensions of the weight that the product sums over: its fan-in."""
        return "".join(letter for letter in self.w if letter not in f"{self.y}L")

    @property
    def batch(self) -> str:
        """Dimensions of the activations that the weight lacks: its gradient is a sum over them."""
        return "".join(letter for letter in dict.fromkeys(self.x + self.y) if letter not in self.w)

    @property
    def is_vector(self) -> bool:
        """Whether the weight is summed over nothing: a norm's scale, a bias."""
        return not self.summed

    def stacked(self) -> "Equation":
        """The same for all layers: the weight has a first dimension L."""
        return Equation(self.text.replace(",", ",L"))

    def low_rank(self) -> tuple["Equation", "Equation"]:
        """Two products in place of one, with r between them: `BTD,Dr->BTr` and `BTr,rNH->BTNH`."""
        between = "".join(letter for letter in self.x if letter not in self.summed) + "r"
        outer = "".join(letter for letter in self.w if letter not in self.summed)
        return Equation(f"{self.x},{self.summed}r->{between}"), Equation(f"{between},r{outer}->{self.y}")

    @property
    def is_quantized(self) -> bool:
        """Whether its array is the codes or the scales of a weight: not trained, and used as it rests."""
        return "C" in self.w or "E" in self.w

    def quantized(self) -> tuple["Equation", "Equation"]:
        """The same of the weight's codes and of its scales: letters of their dimensions, no products."""
        return Equation(self.text.replace("D", "C")), Equation(self.text.replace("D", "E"))

    def dequantized(self) -> "Equation":
        """That of the weight which has these codes."""
        return Equation(self.text.replace("C", "D"))


def codes_per_byte(qtype: str) -> int:
    return {"int8": 1, "nf4": 2}[qtype]


def weights_per_scale(embed_dim: int) -> int:
    """32, or what divides the width: with bfloat16 scales, half a bit for each weight."""
    return math.gcd(embed_dim, 32)


def whole_letters(dims: Mapping[str, int], sizes: Mapping[str, int]) -> frozenset[str]:
    """Dimensions that every device keeps whole: fewer key/value heads than devices, an odd vocabulary, ..."""
    axes = {"K": "tp", "V": "tp", "C": "fsdp", "E": "fsdp"}
    return frozenset(letter for letter, axis in axes.items() if letter in dims and dims[letter] % sizes[axis])
