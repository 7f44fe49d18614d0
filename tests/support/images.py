"""Images that tests draw, and what the processors of transformers make of them.

`make parity` writes `tests/data/images.json` again: it runs this file with a Python that has transformers.
"""

import hashlib
import io
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

GOLDENS = Path(__file__).parents[1] / "data" / "images.json"
SIZE = 24  # of the tower
PATCHES = 4, 2, 256, 4096  # of images in their own shape: sides of a patch and a soft token, fewest and most pixels
TILES = SIZE, 9, 3  # of images in tiles: side of a tile, soft tokens of one, tiles in a row
# A model that sees: images of 8 x 8 pixels, 4 soft tokens each; the ids are those of a tokenizer that is trained here.
TOWER = {
    "kind": "gemma3", "image_size": 8, "patch_size": 4, "embed_dim": 16, "mlp_dim": 32, "num_layers": 1, "num_heads": 2,
    "norm_eps": 1e-6,
    "tokens_per_image": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "begin_token": 3, "image_token": 4,
    "end_token": 5, "freeze_tower": False, "freeze_projector": False,
}  # fmt: skip
SEES = [
    f"++model.vision={json.dumps(TOWER).replace(chr(34), '')}",
    "loading.packing=best_fit",
    "training.images_per_row=2",
]


# The same with images of any size: of 64 to 256 pixels, a soft token for each 8 x 8 of them.
ANY_SIZE = {name: value for name, value in TOWER.items() if name != "tokens_per_image"} | {
    "kind": "qwen3_vl", "merge_size": 2, "frames": 2, "rope_theta": 1e4, "deepstack_layers": [0], "min_pixels": 64,
    "max_pixels": 256,
}  # fmt: skip
SEES_ANY_SIZE = [
    f"++model.vision={json.dumps(ANY_SIZE).replace(chr(34), '')}", "model.rope_sections=[2,1,1]", *SEES[1:],
]  # fmt: skip


# The same with images in at most 2 x 2 tiles and one of the whole, each a soft token.
TILED = {name: value for name, value in TOWER.items() if name not in ("tokens_per_image", "begin_token", "end_token")} | {
    "kind": "smolvlm", "merge_size": 2, "tiles_per_side": 2,
}  # fmt: skip
SEES_TILES = [f"++model.vision={json.dumps(TILED).replace(chr(34), '')}", *SEES[1:]]


def squares(pixels, index):
    """Images [n, y, x, 3] of a prompt of Gemma 3."""
    from tunix.models.vision import Images  # not with `make parity`

    return Images(pixels, index, np.ones((len(pixels), 2), np.int32))


def draw(width, height, channels=3, seed=0):
    """Pixels that are smooth in some places and noise in others."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [128 + 90 * np.sin(x / (3 + c) + y / 5) for c in range(channels)]
    noise = rng.integers(-40, 40, (height, width, channels)) * (x > width / 2)[..., None]
    return np.clip(np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)


def save(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rotated(image, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return save(image, exif=exif)


def list_images():
    """Return files of images by name."""
    rgb, wide = Image.fromarray(draw(61, 40)), Image.fromarray(draw(200, 30, seed=1))
    palette = rgb.quantize(16)
    return {
        "rgb": save(rgb),
        "wide": save(wide),
        "small": save(Image.fromarray(draw(5, 7))),
        "as large as the tower": save(Image.fromarray(draw(SIZE, SIZE))),
        "gray": save(rgb.convert("L")),
        "black and white": save(rgb.convert("1")),
        "transparent": save(Image.fromarray(draw(50, 40, 4))),
        "gray and transparent": save(Image.fromarray(draw(50, 40, 4)).convert("LA")),
        "palette": save(palette),
        "palette with a transparent color": save(palette, transparency=3),
        "cmyk": save(Image.fromarray(draw(50, 40, 4)).convert("RGB").convert("CMYK"), "TIFF"),
        "webp": save(rgb, "WEBP", lossless=True),
        **{f"rotated {n}": rotated(rgb, n) for n in range(2, 9)},
    }


def digest(units):
    """Of an image as a tower takes it, [units, ...]."""
    assert units.dtype == np.uint8
    return f"{len(units)} {hashlib.sha256(np.ascontiguousarray(units).tobytes()).hexdigest()}"


def make():
    from PIL import ImageOps
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    patch, merge, fewest, most = PATCHES
    size, raw = {"shortest_edge": fewest, "longest_edge": most}, {"do_rescale": False, "do_normalize": False}
    squares = Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE}, **raw)
    patches = Qwen2VLImageProcessorPil(size=size, patch_size=patch, merge_size=merge, **raw)
    longest, tile = {"longest_edge": TILES[2] * SIZE}, {"longest_edge": SIZE}
    tiles = Idefics3ImageProcessorPil(size=longest, max_image_size=tile, **raw)
    found = {"gemma3": {}, "qwen3_vl": {}, "smolvlm": {}}
    for name, data in list_images().items():
        # As `load_image` and the library `datasets` turn it; the processor does the rest.
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        pixels = np.asarray(squares(image)["pixel_values"])
        found["gemma3"][name] = digest(np.moveaxis(pixels, 1, -1).astype(np.uint8))
        both = np.asarray(patches(image)["pixel_values"]).reshape(-1, 3, 2, patch, patch)
        assert (both[:, :, 0] == both[:, :, 1]).all()
        found["qwen3_vl"][name] = digest(both[:, :, 0].astype(np.uint8))
        (cut,) = np.asarray(tiles(image)["pixel_values"])
        found["smolvlm"][name] = digest(np.moveaxis(cut, 1, -1).astype(np.uint8))
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(make())
