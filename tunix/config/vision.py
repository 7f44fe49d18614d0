"""Section `model.vision`: a tower that turns images into vectors of the residual stream."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from tunix.base.config_types import Count, CountOrZero, Flag, Positive, Section
from tunix.models.table import CP_EXCHANGES

if TYPE_CHECKING:
    from tunix.config.model import Model

KEY = "model.vision"
TOWER = "tower"  # names of its projections begin with it: tower.attention.q
NUM_CHANNELS = 3  # red, green, blue
Number = Annotated[float, Field(allow_inf_nan=False)]
Channels = Annotated[tuple[Number, Number, Number], Field(min_length=NUM_CHANNELS, max_length=NUM_CHANNELS)]
PositiveChannels = Annotated[tuple[Positive, Positive, Positive], Field(min_length=3, max_length=3)]


class Vision(Section):
    """Keys of all towers; `kind` tells them apart. A tower turns patches of images into vectors of its own width, and
    a projector turns these into soft tokens: the embeddings of some tokens of a row."""

    image_size: Count
    """Rows and columns of pixels of an image to which images are resized (gemma3), of a tile that an image is cut into
    (smolvlm), or for whose patches the table of positions is made (qwen3_vl)."""
    patch_size: Count
    """Rows and columns of pixels of a patch, which is one token of the tower; divides image_size. (In smolvlm pixels
    that are left are not seen.)"""
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
    image_mean: Channels
    """Pixels, divided by 255, less these means of red, green and blue, ..."""
    image_std: PositiveChannels
    """... and divided by these are what the tower sees."""
    image_token: CountOrZero
    """Id that a soft token has in the text; its row of the embedding table is not read."""
    freeze_tower: Flag
    """The tower's weights stay as they are, and model.lora gives them no updates."""
    freeze_projector: Flag
    """The projector's weights stay as they are. With model.lora they do unless model.lora.train_also names them."""

    ids: ClassVar[tuple[str, ...]] = ("image_token",)  # keys of tokens

    @property
    def patches_per_side(self) -> int:
        """Patches in a row of an image of image_size, and in a column."""
        return self.image_size // self.patch_size

    @property
    def head_dim(self) -> int:
        """Width of one head of the tower (w)."""
        return self.embed_dim // self.num_heads

    def shift_positions(self, grids: Iterable[Iterable[int]]) -> int:
        """Return what positions of text behind images of so many units, down and across, have beside their places."""
        return 0

    @property
    def num_positions(self) -> int:
        """Rows of the table of positions."""
        return self.patches_per_side**2

    @property
    def dims(self) -> dict[str, int]:
        """Size of each dimension of the tower's weights that no single key sets, by its letter."""
        return {"i": self.num_positions, "w": self.head_dim, "z": NUM_CHANNELS}

    @property
    def seen_patches(self) -> int:
        """Patches that a patch attends to, at most."""
        return self.num_patches

    @property
    def num_patches(self) -> int:
        """Tokens of the tower for an image, at most."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_sizes(self) -> "Vision":
        if self.image_size % self.patch_size and not isinstance(self, SmolVision):
            raise ValueError(
                f"{KEY}.image_size={self.image_size} is not divisible by {KEY}.patch_size={self.patch_size}"
            )
        if self.embed_dim % self.num_heads:
            raise ValueError(f"{KEY}.embed_dim={self.embed_dim} is not divisible by {KEY}.num_heads={self.num_heads}")
        return self


class EnclosedVision(Vision):
    """Towers whose images have one token at each end."""

    begin_token: CountOrZero
    """Id of the token before the soft tokens of an image."""
    end_token: CountOrZero
    """Id of the token behind them."""

    ids = ("image_token", "begin_token", "end_token")


class Gemma3Vision(EnclosedVision):
    """SigLIP (arXiv:2303.15343) on square images, and Gemma 3's projector: means over squares of patches."""

    kind: Literal["gemma3"]
    """Images are resized to a square; tokens of an image see one another."""
    tokens_per_image: Count
    """Soft tokens of an image in the decoder: the projector takes means over squares of patches."""

    deepstack_layers: ClassVar[tuple[int, ...]] = ()

    @property
    def num_patches(self) -> int:
        return self.num_positions

    @property
    def unit_patches(self) -> int:
        """Tokens of the tower for a unit of an image (data/image_processors.py), here the square."""
        return self.num_patches

    @property
    def tokens_per_side(self) -> int:
        """Soft tokens in a row of an image, and in a column."""
        return math.isqrt(self.tokens_per_image)

    @property
    def dims(self) -> dict[str, int]:
        return super().dims | {"g": self.tokens_per_image}

    @model_validator(mode="after")
    def _check_tokens(self) -> "Gemma3Vision":
        if self.tokens_per_side**2 != self.tokens_per_image or self.patches_per_side % self.tokens_per_side:
            raise ValueError(
                f"{KEY}.tokens_per_image={self.tokens_per_image} must be the square of a divisor of the "
                f"{self.patches_per_side} patches in a row of an image"
            )
        return self


class Qwen3Vision(EnclosedVision):
    """A tower for images of any size (Qwen 3 VL, arXiv:2511.21631): places by rotation and from a table between whose
    entries it interpolates, squares of patches that are merged, and DeepStack (arXiv:2406.04334)."""

    kind: Literal["qwen3_vl"]
    """Images keep their shape; the patches of a row's images are packed one after the other."""
    merge_size: Count
    """Rows and columns of patches that are one soft token."""
    frames: Count
    """Images that a patch has in time; both are the same image."""
    rope_theta: Positive
    """RoPE base of rows and columns in the tower."""
    deepstack_layers: tuple[CountOrZero, ...]
    """Layers of the tower whose results are added behind the first layers of the decoder: one to each."""
    min_pixels: Count
    """A smaller image is enlarged to so many pixels, ..."""
    max_pixels: Count
    """... and a larger one reduced. A row has room for training.images_per_row images of so many."""

    @property
    def merged(self) -> int:
        """Patches of a soft token (u)."""
        return self.merge_size**2

    unit_patches: ClassVar[int] = 1  # a unit of an image is a patch

    def shift_positions(self, grids: Iterable[Iterable[int]]) -> int:
        sizes = [tuple(map(int, grid)) for grid in grids]
        return sum(max(size) // self.merge_size - math.prod(size) // self.merged for size in sizes)

    @property
    def num_patches(self) -> int:
        return self.tokens_per_image * self.merged

    @property
    def tokens_per_image(self) -> int:
        """Soft tokens of an image, at most."""
        return self.max_pixels // (self.patch_size * self.merge_size) ** 2

    @property
    def dims(self) -> dict[str, int]:
        return super().dims | {"ψ": self.merged, "λ": self.merged * self.embed_dim, "φ": self.frames}

    @model_validator(mode="after")
    def _check_images(self) -> "Qwen3Vision":
        soft = (self.patch_size * self.merge_size) ** 2
        if self.max_pixels < max(4 * self.min_pixels, soft):  # sides are rounded to soft tokens
            raise ValueError(
                f"{KEY}.max_pixels={self.max_pixels} is less than four times {KEY}.min_pixels={self.min_pixels}, or "
                f"than the {soft} pixels of a soft token; raise it"
            )
        if max(self.deepstack_layers, default=0) >= self.num_layers:
            raise ValueError(
                f"{KEY}.deepstack_layers={list(self.deepstack_layers)} names a layer that is not below "
                f"{KEY}.num_layers={self.num_layers}"
            )
        return self


class SmolVision(Vision):
    """SigLIP on the tiles of an image and on the whole of it (SmolVLM, arXiv:2504.05299; Idefics 3, arXiv:2408.12637),
    and a product of squares of patches, which stand side by side in a vector (pixel shuffle)."""

    kind: Literal["smolvlm"]
    """An image is cut into tiles; its last tile shows all of it."""
    merge_size: Count
    """Rows and columns of patches that are one soft token."""
    tiles_per_side: Count
    """An image is resized until its longer side has so many tiles, and cut into these. A row has room for
    training.images_per_row images of tiles_per_side^2 + 1 tiles."""

    deepstack_layers: ClassVar[tuple[int, ...]] = ()

    @property
    def num_tiles(self) -> int:
        """Tiles of an image, at most."""
        return self.tiles_per_side**2 + 1 if self.tiles_per_side > 1 else 1

    @property
    def merged(self) -> int:
        """Patches of a soft token (ψ)."""
        return self.merge_size**2

    @property
    def unit_patches(self) -> int:
        """Tokens of the tower for a tile, which is a unit of an image (data/image_processors.py)."""
        return self.num_positions

    @property
    def seen_patches(self) -> int:
        return self.unit_patches

    @property
    def num_patches(self) -> int:
        return self.num_tiles * self.unit_patches

    @property
    def tokens_per_tile(self) -> int:
        """Soft tokens of a tile."""
        return self.unit_patches // self.merged

    @property
    def tokens_per_image(self) -> int:
        """Soft tokens of an image, at most."""
        return self.num_tiles * self.tokens_per_tile

    @property
    def dims(self) -> dict[str, int]:
        return super().dims | {"g": self.tokens_per_tile, "ψ": self.merged}

    @model_validator(mode="after")
    def _check_tiles(self) -> "SmolVision":
        if self.patches_per_side % self.merge_size:
            raise ValueError(
                f"{KEY}.merge_size={self.merge_size} must divide the {self.patches_per_side} patches in a row of a tile"
            )
        if self.image_size % 2:
            raise ValueError(
                f"{KEY}.image_size={self.image_size} must be even: sides of images are rounded to even ones"
            )
        return self


AnyVision = Annotated[Gemma3Vision | Qwen3Vision | SmolVision, Field(discriminator="kind")]


def check_vision(model: "Model", vision: AnyVision) -> None:
    """Raise ValueError where a tower does not go with the rest of the model; the message names the keys."""
    for name in vision.ids:
        if (value := getattr(vision, name)) >= model.vocab_size:
            raise ValueError(f"{KEY}.{name}={value} is not below model.vocab_size={model.vocab_size}")
    for key in ("latent", "linear_attention", "layer_inputs"):
        if getattr(model, key) is not None:
            raise ValueError(f"model.{key} does not go with {KEY}; set one of them to null")
    for key in ("shared_kv",) if vision.deepstack_layers else ():
        if getattr(model, key) is not None:
            raise ValueError(f"model.{key} does not go with {KEY}.deepstack_layers; set it to null")
    if isinstance(vision, Qwen3Vision) != (model.rope_sections is not None):
        needs = "needs" if model.rope_sections is None else "takes no"
        raise ValueError(
            f"{KEY}.kind={vision.kind} {needs} model.rope_sections; its images have places in rows and columns"
        )
    if len(vision.deepstack_layers) > model.num_layers:
        raise ValueError(
            f"{KEY}.deepstack_layers={list(vision.deepstack_layers)} are more than model.num_layers={model.num_layers}"
        )
    if model.local_attention != "window":
        raise ValueError(f"model.local_attention={model.local_attention} does not go with {KEY}; set it to window")
    exchange = CP_EXCHANGES.get(model.cp_exchange)
    if model.future_keys and exchange is not None and exchange.in_blocks:
        raise ValueError(
            f"model.cp_exchange={model.cp_exchange} brings keys in blocks of earlier tokens, and tokens of an image "
            f"({KEY}) also see later ones; set it to ulysses"
        )
