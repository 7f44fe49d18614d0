"""Keys of config.json about a tower that sees, to and from the section `model.vision`. Imports no jax.

Such a file has three parts: the decoder's keys in `text_config`, the tower's in `vision_config`, others beside them.
"""

import math
from typing import Any, NamedTuple

from tunix.config.vision import NUM_CHANNELS, AnyVision

TEXT, TOWER = "text_config", "vision_config"


class VisionKeys(NamedTuple):
    """How config.json of a kind of tower is written."""

    kind: str  # `model.vision.kind`
    tower_keys: dict[str, str]  # our keys and theirs, in `vision_config` ...
    outer_keys: dict[str, str]  # ... and beside it
    tower_absent: dict[str, Any]  # values of keys that the file leaves out
    outer_absent: dict[str, Any]
    fixed: dict[str, tuple]  # of vision_config: values that our tower computes, the usual one first
    synonyms: dict[str, str] = {}  # noqa: RUF012
    read: frozenset[str] = frozenset()  # further keys of vision_config that `_read_table` reads
    known: frozenset[str] = frozenset()  # keys of both that say nothing about what is computed here
    decoder: str = ""  # model_type in text_config; where empty, that of the whole with _text behind it


SIGLIP_KEYS = {
    "image_size": "image_size", "patch_size": "patch_size", "embed_dim": "hidden_size", "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "norm_eps": "layer_norm_eps",
}  # fmt: skip
# By `model_type`.
VISION_KEYS = {
    "gemma3": VisionKeys(
        "gemma3", SIGLIP_KEYS,
        {"tokens_per_image": "mm_tokens_per_image", "image_token": "image_token_index",
         "begin_token": "boi_token_index", "end_token": "eoi_token_index"},
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
         "image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
         "num_channels": NUM_CHANNELS, "vision_use_head": True},
        {"mm_tokens_per_image": 256, "image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000},
        {"model_type": ("siglip_vision_model",), "hidden_act": ("gelu_pytorch_tanh",),
         "num_channels": (NUM_CHANNELS,), "vision_use_head": (False,)},
        {"image_token_id": "image_token_index", "boi_token_id": "boi_token_index", "eoi_token_id": "eoi_token_index"},
    ),
    "qwen3_vl": VisionKeys(
        "qwen3_vl",
        {"patch_size": "patch_size", "embed_dim": "hidden_size", "mlp_dim": "intermediate_size",
         "num_layers": "depth", "num_heads": "num_heads", "merge_size": "spatial_merge_size",
         "frames": "temporal_patch_size", "deepstack_layers": "deepstack_visual_indexes"},
        {"image_token": "image_token_id", "begin_token": "vision_start_token_id", "end_token": "vision_end_token_id"},
        {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "patch_size": 16,
         "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [8, 16, 24],
         "num_position_embeddings": 2304, "rope_parameters": None},
        {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653},
        {"model_type": ("qwen3_vl_vision", "qwen3_vl"), "hidden_act": ("gelu_pytorch_tanh",),
         "in_channels": (NUM_CHANNELS,)},
        read=frozenset({"num_position_embeddings", "out_hidden_size", "rope_parameters"}),
        known=frozenset({"video_token_id"}),
    ),
    "idefics3": VisionKeys(
        "smolvlm", SIGLIP_KEYS,
        {"merge_size": "scale_factor", "image_token": "image_token_id"},
        {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
         "image_size": 224, "patch_size": 32, "layer_norm_eps": 1e-6},
        {"scale_factor": 2, "image_token_id": 128257},
        {"model_type": ("idefics3_vision", "idefics3"), "hidden_act": ("gelu_pytorch_tanh",),
         "num_channels": (NUM_CHANNELS,)},
        known=frozenset({"max_image_size", "size", "use_base_siglip", "vocab_size"}),
        decoder="llama",
    ),
}  # fmt: skip
VISION_KEYS["smolvlm"] = VISION_KEYS["idefics3"]._replace(
    fixed=VISION_KEYS["idefics3"].fixed | {"model_type": ("smolvlm_vision", "smolvlm")}
)


def read_vision(raw: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the keys of `model.vision` that a config.json decides; `known` are keys beside the tower's that say
    nothing about what is computed.

    Raises:
        ValueError: a key that is not understood, or a value that our tower does not compute; the message names it.
    """
    mapping = VISION_KEYS[raw["model_type"]]
    outer = mapping.outer_absent | {
        mapping.synonyms.get(key, key): value for key, value in raw.items() if key not in (TEXT, TOWER)
    }
    tower = mapping.tower_absent | raw[TOWER]
    known = known | {"tie_word_embeddings"} | mapping.known  # which text_config says too
    for part, keys in ((outer, mapping.outer_keys), (tower, mapping.tower_keys)):
        where = f"{TOWER}." if part is tower else ""
        for key, value in part.items():
            if key in mapping.fixed and part is tower:
                if value not in mapping.fixed[key]:
                    raise ValueError(f"{where}{key}={value} is not supported; it must be {mapping.fixed[key][0]}")
            elif key not in keys.values() and key not in known and not (part is tower and key in mapping.read):
                raise ValueError(f"{where}{key}={value} is not understood beside a tower that sees")
    return {"kind": mapping.kind} | {ours: tower[theirs] for ours, theirs in mapping.tower_keys.items()} | {
        ours: outer[theirs] for ours, theirs in mapping.outer_keys.items()
    } | (_read_table(tower, raw[TEXT]) if mapping.read else {})  # fmt: skip


def _read_table(tower: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a tower for images of any size that no single key of theirs gives."""
    rows, width = tower["num_position_embeddings"], tower.get("out_hidden_size")
    side = math.isqrt(rows)
    if side**2 != rows:
        raise ValueError(f"{TOWER}.num_position_embeddings={rows} is not supported; it must be a square")
    if width is not None and width != text["hidden_size"]:
        raise ValueError(f"{TOWER}.out_hidden_size={width} must be {TEXT}.hidden_size={text['hidden_size']}")
    rope = tower["rope_parameters"] or {}
    if rope.get("rope_type", "axial") != "axial":
        raise ValueError(f"{TOWER}.rope_parameters: rope_type={rope['rope_type']} is not supported; it must be axial")
    return {"image_size": side * tower["patch_size"], "rope_theta": rope.get("rope_theta", 1e4)}


def write_vision(vision: Any, text: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a model with a tower, out of that of its decoder."""
    mapping = VISION_KEYS[text["model_type"]]
    own = {key: text[key] for key in ("architectures", "model_type", "tie_word_embeddings")}
    tower = {theirs: getattr(vision, ours) for ours, theirs in mapping.tower_keys.items()}
    if mapping.read:
        tower |= {
            "num_position_embeddings": vision.num_positions, "out_hidden_size": text["hidden_size"],
            "deepstack_visual_indexes": list(vision.deepstack_layers),
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
        }  # fmt: skip
    decoder = {key: value for key, value in text.items() if key != "architectures"}
    return {
        **own,
        **{theirs: getattr(vision, ours) for ours, theirs in mapping.outer_keys.items()},
        TEXT: decoder | {"model_type": mapping.decoder or f"{text['model_type']}_text"},
        TOWER: {key: usual for key, (usual, *_) in mapping.fixed.items()} | tower,
    }


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


# What every processor does with the pixels of an image, and by which filter it resizes them, in Pillow's numbers.
STEPS = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
NO_STEPS = {"do_pan_and_scan": False}  # gemma3: crops of a wide image beside the whole of it
RESAMPLING = {"gemma3": 2, "qwen3_vl": 3, "smolvlm": 1}


def read_processor(raw: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `model.vision` that preprocessor_config.json decides: means and deviations of pixels, tiles.

    `vision` are the keys that config.json decides.

    Raises:
        ValueError: steps that are not ours, or tiles of another size than the tower's; the message says which.
    """
    for key, value in (STEPS | NO_STEPS | {"resample": RESAMPLING[vision["kind"]]}).items():
        if raw.get(key) is not None and not math.isclose(raw[key], value, rel_tol=1e-6):
            raise ValueError(f"{key}={raw[key]} is not supported; it must be {value}")
    found = {key: raw[key] for key in ("image_mean", "image_std") if raw.get(key) is not None}
    if vision["kind"] != "smolvlm" or "max_image_size" not in raw:
        return found
    longest, tile, size = raw["size"]["longest_edge"], raw["max_image_size"]["longest_edge"], vision["image_size"]
    if not raw.get("do_image_splitting", True):
        raise ValueError(
            "do_image_splitting=False is not supported: it must be true; size.longest_edge as large as max_image_size "
            "gives one tile"
        )
    if tile != size or longest % tile:
        raise ValueError(
            f"max_image_size={tile} must be the {size} pixels of the tower, and size.longest_edge={longest} a multiple "
            "of them"
        )
    return found | {"tiles_per_side": longest // tile}


# Our limits of an image's pixels, and theirs in `size` of the processor, by the kind of the tower.
PIXEL_KEYS = {"qwen3_vl": {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}}


def read_pixel_limits(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the limits of an image's pixels in preprocessor_config.json, as keys of `model.vision`."""
    size = raw.get("size") or {}
    limits = {ours: raw.get(ours, size.get(theirs)) for ours, theirs in PIXEL_KEYS.get(kind, {}).items()}
    return {key: value for key, value in limits.items() if value is not None}


def write_processor(vision: AnyVision) -> dict[str, dict[str, Any]]:
    """Return by name the files with which transformers makes an image what this tower takes."""
    image = {
        "do_convert_rgb": True, **STEPS, "resample": RESAMPLING[vision.kind],
        "image_mean": list(vision.image_mean), "image_std": list(vision.image_std),
    }  # fmt: skip
    return dict(zip(PROCESSOR_FILES, DESCRIPTIONS[vision.kind](vision, image), strict=False))


def _describe_squares(vision: Any, image: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    size = {"height": vision.image_size, "width": vision.image_size}
    names = {"processor_class": "Gemma3Processor", "image_seq_length": vision.tokens_per_image}
    return image | names | {"image_processor_type": "Gemma3ImageProcessor", "size": size}, names


def _describe_patches(vision: Any, image: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    names = {"processor_class": "Qwen3VLProcessor"}
    patches = {
        "size": {"shortest_edge": vision.min_pixels, "longest_edge": vision.max_pixels},
        "patch_size": vision.patch_size, "temporal_patch_size": vision.frames, "merge_size": vision.merge_size,
    }  # fmt: skip
    both = image | patches | names
    # transformers makes no processor without one for videos.
    videos = both | {"video_processor_type": "Qwen3VLVideoProcessor"}
    return both | {"image_processor_type": "Qwen2VLImageProcessor"}, names, videos


def _describe_tiles(vision: Any, image: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    # SmolVLM 2's own processor makes the same of images, and needs one for videos beside it.
    names = {"processor_class": "Idefics3Processor", "image_seq_len": vision.tokens_per_tile}
    tiles = {
        "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": True, "do_pad": True,
        "size": {"longest_edge": vision.tiles_per_side * vision.image_size},
        "max_image_size": {"longest_edge": vision.image_size}, "processor_class": "Idefics3Processor",
    }  # fmt: skip
    return image | tiles, names


DESCRIPTIONS = {"gemma3": _describe_squares, "qwen3_vl": _describe_patches, "smolvlm": _describe_tiles}
