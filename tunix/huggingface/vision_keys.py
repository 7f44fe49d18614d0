"""Keys of config.json about a tower that sees, to and from the section `model.vision`. Imports no jax.

Such a file has three parts: the decoder's keys in `text_config`, the tower's in `vision_config`, others beside them.
"""

from typing import Any

from tunix.config.vision import NUM_CHANNELS, Vision

TEXT, TOWER = "text_config", "vision_config"
# Our keys and theirs, in `vision_config` and beside it.
TOWER_KEYS = {
    "image_size": "image_size", "patch_size": "patch_size", "embed_dim": "hidden_size", "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "norm_eps": "layer_norm_eps",
}  # fmt: skip
OUTER_KEYS = {
    "tokens_per_image": "mm_tokens_per_image", "image_token": "image_token_index", "begin_token": "boi_token_index",
    "end_token": "eoi_token_index",
}  # fmt: skip
SYNONYMS = {"image_token_id": "image_token_index", "boi_token_id": "boi_token_index", "eoi_token_id": "eoi_token_index"}
# Values of keys that the file leaves out, and values that our tower computes, the usual one first.
TOWER_ABSENT = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
    "num_channels": NUM_CHANNELS, "vision_use_head": True,
}  # fmt: skip
OUTER_ABSENT = {
    "mm_tokens_per_image": 256, "image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000,
}  # fmt: skip
FIXED = {
    "model_type": ("siglip_vision_model",), "hidden_act": ("gelu_pytorch_tanh",), "num_channels": (NUM_CHANNELS,),
    "vision_use_head": (False,),
}  # fmt: skip


def read_vision(raw: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the keys of `model.vision` that a config.json decides; `known` are keys beside the tower's that say
    nothing about what is computed.

    Raises:
        ValueError: a key that is not understood, or a value that our tower does not compute; the message names it.
    """
    outer = OUTER_ABSENT | {SYNONYMS.get(key, key): value for key, value in raw.items() if key not in (TEXT, TOWER)}
    tower = TOWER_ABSENT | raw[TOWER]
    known = known | {"tie_word_embeddings"}  # which text_config says too
    for part, keys in ((outer, OUTER_KEYS), (tower, TOWER_KEYS)):
        where = f"{TOWER}." if part is tower else ""
        for key, value in part.items():
            if key in FIXED and part is tower:
                if value not in FIXED[key]:
                    raise ValueError(f"{where}{key}={value} is not supported; it must be {FIXED[key][0]}")
            elif key not in keys.values() and key not in known:
                raise ValueError(f"{where}{key}={value} is not understood beside a tower that sees")
    return {ours: tower[theirs] for ours, theirs in TOWER_KEYS.items()} | {
        ours: outer[theirs] for ours, theirs in OUTER_KEYS.items()
    }


def write_vision(vision: Vision, text: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a model with a tower, out of that of its decoder."""
    own = {key: text[key] for key in ("architectures", "model_type", "tie_word_embeddings")}
    tower = {theirs: getattr(vision, ours) for ours, theirs in TOWER_KEYS.items()}
    decoder = {key: value for key, value in text.items() if key != "architectures"}
    return {
        **own,
        **{theirs: getattr(vision, ours) for ours, theirs in OUTER_KEYS.items()},
        TEXT: decoder | {"model_type": f"{text['model_type']}_text"},
        TOWER: {key: usual for key, (usual, *_) in FIXED.items()} | tower,
    }


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def read_normalization(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `model.vision` that preprocessor_config.json decides: means and deviations of pixels."""
    return {key: raw[key] for key in ("image_mean", "image_std") if raw.get(key) is not None}


def write_processor(vision: Vision) -> dict[str, dict[str, Any]]:
    """Return by name the files with which transformers makes an image what this tower takes."""
    size = {"height": vision.image_size, "width": vision.image_size}
    names = {"processor_class": "Gemma3Processor", "image_seq_length": vision.tokens_per_image}
    image = {
        "image_processor_type": "Gemma3ImageProcessor", "do_convert_rgb": True, "do_resize": True, "resample": 2,
        "size": size, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": list(vision.image_mean), "image_std": list(vision.image_std),
    }  # fmt: skip
    return dict(zip(PROCESSOR_FILES, (image | names, names), strict=True))
