"""Section `model.vision`: a tower that turns images into vectors of the residual stream."""

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from tunix.base.config_types import Count, CountOrZero, Flag, Positive, Section

if TYPE_CHECKING:
    from tunix.config.model import Model

KEY = "model.vision"
TOWER = "tower"  # names of its projections begin with it: tower.attention.q
NUM_CHANNELS = 3  # red, green, blue
Channels = Annotated[tuple[float, float, float], Field(min_length=NUM_CHANNELS, max_length=NUM_CHANNELS)]
PositiveChannels = Annotated[tuple[Positive, Positive, Positive], Field(min_length=3, max_length=3)]


class Vision(Section):
    """A vision tower (SigLIP, arXiv:2303.15343), and a projector of its results into the residual stream (Gemma 3).

    A batch brings images of image_size x image_size pixels in slots of its rows, and says which tokens of a row are
    soft tokens: those whose embeddings are results of the projector (`image_fields` in data/batches.py).
    """

    image_size: Count
    """Rows and columns of pixels of an image: images are resized to a square before they reach the model."""
    patch_size: Count
    """Rows and columns of pixels of a patch, which is one token of the tower; divides image_size."""
    embed_dim: Count
    """Width of the tower (d)."""
    mlp_dim: Count
    """Hidden width of the tower's MLP (m)."""
    num_layers: Count
    """Blocks of the tower."""
    num_heads: Count
    """Heads of the tower (q), each of width embed_dim / num_heads."""
    norm_eps: Positive
    """Added to the variance in the tower's LayerNorms, and to the mean square in the projector's RMSNorm."""
    tokens_per_image: Count
    """Soft tokens of an image in the decoder: the projector takes means over squares of patches."""
    image_mean: Channels
    """Pixels, divided by 255, less these means of red, green and blue, ..."""
    image_std: PositiveChannels
    """... and divided by these are what the tower sees."""
    image_token: CountOrZero
    """Id that a soft token has in the text; its row of the embedding table is not read."""
    begin_token: CountOrZero
    """Id of the token before the soft tokens of an image."""
    end_token: CountOrZero
    """Id of the token behind them."""
    freeze_tower: Flag
    """The tower's weights stay as they are, and model.lora gives them no updates."""
    freeze_projector: Flag
    """The projector's weights stay as they are. With model.lora they do unless model.lora.train_also names them."""

    @property
    def patches_per_side(self) -> int:
        """Patches in a row of an image, and in a column."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Tokens of the tower for one image."""
        return self.patches_per_side**2

    @property
    def tokens_per_side(self) -> int:
        """Soft tokens in a row of an image, and in a column."""
        return math.isqrt(self.tokens_per_image)

    @property
    def head_dim(self) -> int:
        """Width of one head of the tower (w)."""
        return self.embed_dim // self.num_heads

    @property
    def dims(self) -> dict[str, int]:
        """Size of each dimension of the tower's weights that no single key sets, by its letter."""
        return {"i": self.num_patches, "g": self.tokens_per_image, "w": self.head_dim, "z": NUM_CHANNELS}

    @model_validator(mode="after")
    def _check(self) -> "Vision":
        if self.image_size % self.patch_size:
            raise ValueError(
                f"{KEY}.image_size={self.image_size} is not divisible by {KEY}.patch_size={self.patch_size}"
            )
        if self.embed_dim % self.num_heads:
            raise ValueError(f"{KEY}.embed_dim={self.embed_dim} is not divisible by {KEY}.num_heads={self.num_heads}")
        if self.tokens_per_side**2 != self.tokens_per_image or self.patches_per_side % self.tokens_per_side:
            raise ValueError(
                f"{KEY}.tokens_per_image={self.tokens_per_image} must be the square of a divisor of the "
                f"{self.patches_per_side} patches in a row of an image"
            )
        return self


def check_vision(model: "Model", vision: Vision) -> None:
    """Raise ValueError where a tower does not go with the rest of the model; the message names the keys."""
    for name in ("image_token", "begin_token", "end_token"):
        if (value := getattr(vision, name)) >= model.vocab_size:
            raise ValueError(f"{KEY}.{name}={value} is not below model.vocab_size={model.vocab_size}")
    for key in ("latent", "linear_attention", "layer_inputs"):
        if getattr(model, key) is not None:
            raise ValueError(f"model.{key} does not go with {KEY}; set one of them to null")
    if model.local_attention != "window":
        raise ValueError(f"model.local_attention={model.local_attention} does not go with {KEY}; set it to window")
    if model.cp_exchange == "ring":
        raise ValueError(
            f"model.cp_exchange=ring brings keys in blocks of earlier tokens, and tokens of an image ({KEY}) also see "
            "later ones; set it to ulysses"
        )
