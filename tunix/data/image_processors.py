"""Image processors, by the kind of the tower: what stands for an image in a text, and the pixels that the tower takes.

An image becomes *units*, arrays of pixels of one shape: the square of gemma3, the patches of qwen3_vl, the tiles of
smolvlm. Its *grid* says how many there are, down and across. In the text of a conversation an image is the
`mark` of its processor, by the chat template. The tokenizer gets in its place what that of transformers writes. The
units of a row's images lie one after the other, and each of them gives the same number of soft tokens: soft token k of
a row takes result k of the tower.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from tunix.config.vision import AnyVision

# What Pillow may be asked to read: others of its formats start programs, or nobody has images in them.
Image.init()  # now, because threads would do it side by side
FORMATS = tuple(
    name for name in ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF") if name in Image.OPEN
)
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)  # key of EXIF, and its values that swap rows and columns


class Grid(NamedTuple):
    """Units of an image, down and across."""

    rows: int
    columns: int


class Pixels(NamedTuple):
    """An image as a tower takes it."""

    units: np.ndarray  # [units, ...] uint8
    grid: Grid


@dataclass(frozen=True)
class ImageProcessor:
    """How a model sees images; its fields are the keys of `model.vision` that decide it."""

    kind: ClassVar[str]
    mark: ClassVar[str]  # what a chat template writes for an image
    begin: ClassVar[str]
    soft: ClassVar[str]
    end: ClassVar[str]
    resampling: ClassVar[Image.Resampling]
    num_before: ClassVar[int] = 1  # tokens of an image before its first soft token
    dim_names: ClassVar[str]  # letters of the dimensions of units, [units, ...]

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that stand for images, and never for text."""
        return tuple(dict.fromkeys((self.begin, self.soft, self.end)))

    @property
    def unit_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def max_units(self) -> int:
        """Units of the largest image."""
        raise NotImplementedError

    @property
    def max_tokens(self) -> int:
        """Soft tokens of the largest image."""
        raise NotImplementedError

    @property
    def min_tokens(self) -> int:
        """Soft tokens of the smallest image."""
        return self.max_tokens

    def check(self, width: int, height: int) -> None:
        """Raise ValueError where the tower takes no image of a size in pixels; the message says what it is."""
        self.fit(width, height)

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Return the size in pixels, width and height, that an image gets; one of that size keeps it."""
        raise NotImplementedError

    def divide(self, width: int, height: int) -> Grid:
        """Return the units of an image of a size in pixels."""
        (width, height), side = self.fit(width, height), self.unit_shape[1]
        return Grid(height // side, width // side)

    def count(self, grid: Grid) -> int:
        """Return the soft tokens of an image."""
        return self.num_units(grid) * self.max_tokens // self.max_units

    def num_units(self, grid: Grid) -> int:
        return grid.rows * grid.columns

    def write(self, grid: Grid) -> str:
        """Return what stands for an image in a text that is tokenized."""
        return f"{self.begin}{self.soft * self.count(grid)}{self.end}"

    def split(self, image: np.ndarray) -> np.ndarray:
        """Return the units [units, ...] of an image [height, width, 3] in its size."""
        return image[None]

    def join(self, units: np.ndarray, grid: Grid) -> np.ndarray:
        """Return the image [height, width, 3] of units: the opposite of `split`."""
        return units[0]

    def resize(self, image: Image.Image) -> Image.Image:
        return image.resize(self.fit(*image.size), self.resampling)

    def decode(self, data: bytes) -> Pixels:
        """Return an image in a file's bytes as the tower takes it.

        Its pixels are those of transformers' processor by Pillow, before it scales them: upright by the EXIF tag,
        transparent parts white, resized by Pillow's filter.
        """
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            upright = convert(image)
        return Pixels(self.split(np.asarray(self.resize(upright))), self.divide(*upright.size))

    def find_grid(self, data: bytes) -> Grid:
        """Return the units of an image in a file's bytes, of which the head alone is read."""
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            is_sideways = image.getexif().get(ORIENTATION) in SIDEWAYS
        return self.divide(height, width) if is_sideways else self.divide(width, height)

    def take(self, pixel_values: np.ndarray, grids: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return units [units, ...] and grids [images, 2] of what transformers' processor makes of images.

        Its arrays are float32: each number is divided by 255, less the mean, divided by the deviation. `grids` is its
        `image_grid_thw` [images, 3], of a tower that takes images of any size. Tiles are images of their own here.
        Raises `ValueError` where these are no such arrays; the message says what is expected.
        """
        channels_first = self.unit_shape[2], *self.unit_shape[:2]
        if pixel_values.ndim < 4 or pixel_values.shape[-3:] != channels_first:
            raise ValueError(f"pixel_values [images, {', '.join(map(str, channels_first))}]")
        units = np.moveaxis(pixel_values.reshape(-1, *channels_first), 1, -1)
        units = units[np.any(units, axis=(1, 2, 3))]  # rows with fewer tiles are filled up with zeros
        return units, np.ones((len(units), 2), np.int32)

    def expand(self, texts: Sequence[str], images: Sequence[bytes]) -> list[str]:
        """Return texts with all tokens of each image; `images` are those of all texts, in order. Raises `ValueError`
        where there are more marks than images, or fewer; the message says how many of both."""
        if (count := sum(text.count(self.mark) for text in texts)) != len(images):
            raise ValueError(f"{count} times {self.mark} for {len(images)} images")
        written = (self.write(self.find_grid(data)) for data in images)
        split = (text.split(self.mark) for text in texts)
        return [first + "".join(next(written) + piece for piece in rest) for first, *rest in split]

    def find(self, tokens: np.ndarray, soft_id: int, images: Sequence[bytes]) -> np.ndarray:
        """Return the spans [images, 2] of images among the tokens [T]: the first soft token of each, and the place
        behind its last. Raises `ValueError` where the tokens have another number of soft tokens."""
        positions = np.flatnonzero(np.asarray(tokens) == soft_id)
        ends = np.cumsum([self.count(self.find_grid(data)) for data in images], dtype=np.int64)
        if len(positions) != (ends[-1] if len(ends) else 0):
            raise ValueError(f"{len(positions)} times {self.soft} for {len(images)} images")
        starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        return np.stack([positions[starts], positions[ends - 1] + 1], axis=1)

    def describe_max_size(self) -> str:
        """Return in words the size of the largest image."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return what decides the tokens and the pixels of images."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class SquareProcessor(ImageProcessor):
    """An image is one square (Gemma 3). Pan and scan is off."""

    kind = "gemma3"
    mark = begin = "<start_of_image>"
    soft = "<image_soft_token>"
    end = "<end_of_image>"
    resampling = Image.Resampling.BILINEAR
    dim_names = "jyxz"

    image_size: int
    tokens_per_image: int

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return self.image_size, self.image_size, 3

    @property
    def max_units(self) -> int:
        return 1

    @property
    def max_tokens(self) -> int:
        return self.tokens_per_image

    def fit(self, width: int, height: int) -> tuple[int, int]:
        return self.image_size, self.image_size

    def find_grid(self, data: bytes) -> Grid:
        return Grid(1, 1)

    def describe_max_size(self) -> str:
        return f"{self.image_size} x {self.image_size} pixels"

    def write(self, grid: Grid) -> str:
        return f"\n\n{super().write(grid)}\n\n"


MAX_RATIO = 200  # of the sides of an image in any size, as in transformers


@dataclass(frozen=True)
class PatchProcessor(ImageProcessor):
    """An image keeps its shape, and its units are patches (Qwen 3 VL): squares of merge_size x merge_size patches come
    one after the other, as their results are merged."""

    kind = "qwen3_vl"
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    begin, soft, end = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
    resampling = Image.Resampling.BICUBIC
    dim_names = "izab"

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @property
    def square(self) -> int:
        """Rows and columns of pixels of a soft token."""
        return self.patch_size * self.merge_size

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return 3, self.patch_size, self.patch_size

    @property
    def max_units(self) -> int:
        return self.max_tokens * self.merge_size**2

    @property
    def max_tokens(self) -> int:
        return self.max_pixels // self.square**2

    @property
    def min_tokens(self) -> int:
        return max(1, self.min_pixels // self.square**2)

    def check(self, width: int, height: int) -> None:
        # Not in `fit`: an image that is kept in its new size may be a little narrower than it was.
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ValueError(
                f"of {width} x {height} pixels, whose longer side is more than {MAX_RATIO} times the other"
            )
        super().check(width, height)

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Return multiples of `square` near a size, whose product is between min_pixels and max_pixels."""
        square = self.square
        size = [round(side / square) * square for side in (width, height)]
        if math.prod(size) > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            size = [max(square, math.floor(side / shrink / square) * square) for side in (width, height)]
        elif math.prod(size) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            size = [math.ceil(side * grow / square) * square for side in (width, height)]
        if math.prod(size) > self.max_pixels:  # of a narrow one, which is at least one soft token wide
            raise ValueError(
                f"of {width} x {height} pixels, so narrow that it would have more than model.vision.max_pixels="
                f"{self.max_pixels}"
            )
        return size[0], size[1]

    def describe_max_size(self) -> str:
        return f"at most {self.max_pixels:,} pixels"

    def split(self, image: np.ndarray) -> np.ndarray:
        """Return the patches [units, 3, a, b] of an image [height, width, 3] uint8, square after square."""
        (height, width, channels), merge, patch = image.shape, self.merge_size, self.patch_size
        split = image.reshape(height // self.square, merge, patch, width // self.square, merge, patch, channels)
        return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, *self.unit_shape)

    def take(self, pixel_values: np.ndarray, grids: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        # Each patch has its channels, and of each channel two equal frames: an image is a film that stands still.
        if pixel_values.ndim != 2 or pixel_values.shape[1] % math.prod(self.unit_shape):
            raise ValueError(f"pixel_values [patches, frames x {' x '.join(map(str, self.unit_shape))}]")
        if grids is None or grids.ndim != 2 or grids.shape[1] != 3:
            raise ValueError("image_grid_thw [images, 3] beside pixel_values")
        units = pixel_values.reshape(len(pixel_values), 3, -1, self.patch_size, self.patch_size)
        if np.any(grids[:, 0] != 1) or np.any(units != units[:, :, :1]):
            raise ValueError("images alone, and no films")
        if np.sum(np.prod(grids, axis=1)) != len(units):
            raise ValueError(f"as many patches as image_grid_thw says, not {len(units)}")
        return units[:, :, 0], np.asarray(grids[:, 1:], np.int32)

    def join(self, units: np.ndarray, grid: Grid) -> np.ndarray:
        """Return the image [height, width, 3] of patches [units, 3, a, b], as `split` gives them."""
        merge, patch = self.merge_size, self.patch_size
        split = units.reshape(grid.rows // merge, grid.columns // merge, merge, merge, -1, patch, patch)
        return split.transpose(0, 2, 5, 1, 3, 6, 4).reshape(grid.rows * patch, grid.columns * patch, -1)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True)
class TileProcessor(ImageProcessor):
    """An image is cut into tiles, which are its units; the last one shows all of it (SmolVLM, Idefics 3)."""

    kind = "smolvlm"
    mark = soft = "<image>"
    begin = end = "<fake_token_around_image>"
    resampling = Image.Resampling.LANCZOS
    num_before = 2  # `begin` and the name of the first tile, where the tokenizer has a token for it
    dim_names = "jyxz"

    image_size: int
    tokens_per_tile: int
    tiles_per_side: int

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return self.image_size, self.image_size, 3

    @property
    def max_units(self) -> int:
        return self.num_units(Grid(self.tiles_per_side, self.tiles_per_side))

    @property
    def max_tokens(self) -> int:
        return self.max_units * self.tokens_per_tile

    @property
    def min_tokens(self) -> int:
        return self.count(Grid(1, self.tiles_per_side))

    def num_units(self, grid: Grid) -> int:
        tiles = grid.rows * grid.columns
        return tiles + (tiles > 1)

    def describe_max_size(self) -> str:
        return f"at most {self.max_units} tiles of {self.image_size} x {self.image_size} pixels"

    def stretch(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of an image whose longer side is that of `tiles_per_side` tiles; the other one is even."""
        longest, ratio = self.tiles_per_side * self.image_size, width / height
        if width >= height:
            return longest, _round_up(int(longest / ratio), 2) or 1
        return _round_up(int(longest * ratio), 2) or 1, longest

    def fit(self, width: int, height: int) -> tuple[int, int]:
        width, height = self.stretch(width, height)
        ratio, size = width / height, self.image_size
        if width >= height:
            return width, _round_up(int(width / ratio), size)
        return _round_up(int(height * ratio), size), height

    def resize(self, image: Image.Image) -> Image.Image:
        # In two steps, as the processor does it.
        stretched = image.resize(self.stretch(*image.size), self.resampling)
        return stretched.resize(self.fit(*image.size), self.resampling)

    def split(self, image: np.ndarray) -> np.ndarray:
        """Return the tiles [units, y, x, 3] of an image [height, width, 3] uint8; of several, then the whole image."""
        (height, width, channels), size = image.shape, self.image_size
        tiles = image.reshape(height // size, size, width // size, size, channels).swapaxes(1, 2)
        tiles = tiles.reshape(-1, *self.unit_shape)
        if len(tiles) == 1:
            return tiles
        whole = Image.fromarray(image).resize((size, size), self.resampling)
        return np.concatenate([tiles, np.asarray(whole)[None]])

    def join(self, units: np.ndarray, grid: Grid) -> np.ndarray:
        """Return the image [height, width, 3] of tiles [units, y, x, 3], as `split` gives them."""
        size = self.image_size
        tiles = units[: grid.rows * grid.columns].reshape(*grid, *self.unit_shape)
        return tiles.swapaxes(1, 2).reshape(grid.rows * size, grid.columns * size, -1)

    def write(self, grid: Grid) -> str:
        def write_tile(name: str) -> str:
            return f"{self.begin}<{name}>{self.soft * self.tokens_per_tile}"

        rows = [
            "".join(write_tile(f"row_{row}_col_{column}") for column in range(1, grid.columns + 1)) + "\n"
            for row in range(1, grid.rows + 1)
        ]
        tiles = "".join(rows) + "\n" if grid.rows * grid.columns > 1 else ""
        return f"{tiles}{write_tile('global-img')}{self.end}"


FORMS: dict[str, Any] = {processor.kind: processor for processor in (SquareProcessor, PatchProcessor, TileProcessor)}


def find_processor(vision: AnyVision) -> ImageProcessor:
    """Return the processor of a tower's images."""
    form = FORMS[vision.kind]
    return form(**{each.name: getattr(vision, each.name) for each in fields(form)})


def convert(image: Image.Image) -> Image.Image:
    """Return an image upright and in RGB."""
    image = ImageOps.exif_transpose(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
