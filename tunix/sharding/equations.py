"""Equations of products: what they say about the shape, the fan-in and the gradient of a weight. Imports no jax."""

import math
from dataclasses import dataclass

from tunix.sharding.table import FIRST_LAYERS, LAYERS, STACKED, STREAM_TOKENS, TOKENS


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
    def copies(self) -> str:
        """Dimensions of the weight along which products stand side by side: layers, and those in x, w and y."""
        in_all = {*STACKED, *set(self.x) & set(self.y)}
        return "".join(dim_name for dim_name in self.w if dim_name in in_all)

    @property
    def summed(self) -> str:
        """Dimensions of the weight that the product sums over: its fan-in."""
        return "".join(dim_name for dim_name in self.w if dim_name not in self.y + self.copies)

    @property
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
