"""config.json, as Hugging Face writes it for each family, to and from the keys of our model section. Knows no jax."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from tunix.base.errors import UserError
from tunix.base.files import read_json
from tunix.base.forms import naming_writer
from tunix.config import Model
from tunix.config.layers import ExpertsMlp
from tunix.huggingface import adapter_config
from tunix.huggingface.rope_keys import (
    FULL,
    GLOBAL_HEADS,
    LATENT,
    ORIGINAL,
    PARTIAL,
    read_global_heads,
    read_latent_heads,
    read_rope,
    write_global_heads,
    write_latent_heads,
    write_rope,
)
from tunix.huggingface.table import FAMILIES, Family, find_family
from tunix.huggingface.vision_keys import (
    PROCESSOR_FILES,
    TOWER,
    read_pixel_limits,
    read_processor,
    read_vision,
    write_vision,
)

# config.json has several ways to say which layers are of one kind. We have one number n: every n-th layer is of it.
#
#     sliding_window_pattern: 3                         every third layer attends to everything
#     sliding_window_pattern: "LLG"                     the same
#     layer_types: [sliding, sliding, full, ...]        the same
#     no_rope_layers: [1, 1, 1, 0, ...]                 every fourth layer has no positions
#     mlp_only_layers: [0, 1]                           the first two layers have no experts
#     moe_layers: [1, 3, 5, ...]                        every second layer has experts
#
# A list that is not of every n-th layer is refused. Of these keys, transformers reads those that a family has in `keys`
# or `absent`, and no others.

LAYER_KEYS = {
    "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval",
    "mlp_only_layers", "moe_layers",
}  # fmt: skip
LAYER_TYPES = "layer_types"  # a family that does not read it has layers of one type
FULL_EVERY = "full_attention_interval"  # one of so many layers attends to everything, where layer_types is not given
UNROTATED = "unrotated"  # in the place of sliding_window_pattern: the layers without positions are the global ones


def read_attention_layers(raw: dict[str, Any], num_layers: int, family: Family) -> dict[str, Any]:
    """Return n of every n-th layer that attends to everything, the window of the others, and n of every n-th layer
    that has no positions.

    Raises:
        ValueError: layers that are not every n-th one.
    """
    every = raw.get("sliding_window_pattern")
    unrotated = _read_unrotated(raw, num_layers)
    if every == UNROTATED:
        every = unrotated or 0
    if isinstance(every, str):  # EXAONE's LLLG: three local layers, then a global one
        if every != "L" * (len(every) - 1) + "G":
            raise ValueError(f"sliding_window_pattern={every} is not understood; it must end with its only G")
        every = len(every)
    if every == 0:  # no layer attends to everything
        every = num_layers + 1
    # Without a window, or without a pattern, every layer attends to everything, or one in FULL_EVERY.
    window = raw.get(family.keys.get("sliding_window", "sliding_window"))
    if every is None or window is None:
        every = raw.get(FULL_EVERY, 1)
    types, local = raw.get(LAYER_TYPES), family.local_type  # newer files have the list, and it wins
    if types is not None and not _reads_layer_types(family):
        if len({*types}) > 1:
            raise ValueError(f"layer_types={types} is not understood; layers must be of one type")
    elif types is not None:
        every = types.index(FULL) + 1 if FULL in types else num_layers + 1
        if types != [local if (layer + 1) % every else FULL for layer in range(num_layers)]:
            raise ValueError(f"layer_types={types} is not understood; every n-th layer must be {FULL}")
    if family.unrotated_global and window is not None:
        unrotated = every
    window = window if every > 1 else None  # some files name a window that no layer has
    return {"global_every": every, "sliding_window": window, "unrotated_every": unrotated}


def _reads_layer_types(family: Family) -> bool:
    """Return whether a family has layers of two types."""
    return bool(family.absent.get("sliding_window_pattern")) or FULL_EVERY in family.absent


def _read_unrotated(raw: dict[str, Any], num_layers: int) -> int | None:
    """Return n where every n-th layer has no positions; None where all have."""
    every = raw.get("no_rope_layer_interval")
    rotated = raw.get("no_rope_layers")  # despite its name, 1 for a layer that is rotated
    if rotated:
        every = rotated.index(0) + 1 if 0 in rotated else None
        if rotated != [int(every is None or (layer + 1) % every != 0) for layer in range(num_layers)]:
            raise ValueError(f"no_rope_layers={rotated} is not understood; every n-th layer must be 0")
    return every


def read_expert_layers(raw: dict[str, Any], num_layers: int) -> dict[str, int]:
    """Return how many first layers have one MLP and no experts, and n where every n-th layer has experts.

    Raises:
        ValueError: other layers than these.
    """
    dense, with_experts = raw.get("mlp_only_layers") or [], raw.get("moe_layers")
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers={dense} is not understood; it must be the first layers: 0, 1, ...")
    layers = {"mlp.dense_layers": len(dense)}
    if with_experts is not None:
        layers["mlp.every"] = every = with_experts[0] + 1 if with_experts else num_layers + 1
        if with_experts != list(range(every - 1, num_layers, every)):
            raise ValueError(f"moe_layers={with_experts} is not understood; it must be every n-th layer")
    return layers


def write_attention_layers(model: Model, family: Family) -> dict[str, Any]:
    """Return the keys of config.json that say which layers attend to everything, and which have no positions."""
    keys: dict[str, Any] = {}
    if "no_rope_layer_interval" in family.absent:
        if model.unrotated_every is not None:
            keys["no_rope_layer_interval"] = model.unrotated_every
        keys["no_rope_layers"] = [int(model.is_rotated(layer)) for layer in range(model.num_layers)]
    if _reads_layer_types(family):
        local = family.local_type
        keys[LAYER_TYPES] = [FULL if model.is_global(layer) else local for layer in range(model.num_layers)]
    is_rotated = family.unrotated_global and model.unrotated_every is None  # by EXAONE where there is no window
    if family.absent.get("sliding_window_pattern") and model.sliding_window is None and not is_rotated:
        # transformers makes a mask for local layers where the model has none, too.
        keys["sliding_window"] = model.context_length
    return keys


# Keys of config.json about shared keys and values, and inputs of layers, to and from ours (Gemma 4).
LAYER_PARTS = {
    "num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
}  # fmt: skip


def read_layer_parts(raw: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return `model.shared_kv` and `model.layer_inputs`; `values` are keys of the section `model` read already.

    Raises:
        ValueError: a table of inputs with other rows than the table of embeddings.
    """
    layers, width = raw["num_kv_shared_layers"], raw["hidden_size_per_layer_input"]
    rows = raw["vocab_size_per_layer_input"]
    if width and rows != values["vocab_size"]:
        raise ValueError(f"vocab_size_per_layer_input={rows} is not supported; it must be vocab_size")
    mlp_dim = values["mlp_dim"] * (2 if raw["use_double_wide_mlp"] else 1)
    return {
        "shared_kv": {"layers": layers, "mlp_dim": mlp_dim} if layers else None,
        "layer_inputs": {"dim": width} if width else None,
    }


def write_layer_parts(model: Model) -> dict[str, Any]:
    """Return the keys of config.json for shared keys and values and for inputs of each layer."""
    shared, inputs = model.shared_kv, model.layer_inputs
    keys: dict[str, Any] = {
        "hidden_size_per_layer_input": 0 if inputs is None else inputs.dim,
        "num_kv_shared_layers": 0 if shared is None else shared.layers,
        "use_double_wide_mlp": shared is not None and shared.mlp_dim > model.mlp_dim,
    }
    return keys if inputs is None else keys | {"vocab_size_per_layer_input": model.vocab_size}


MTP_DEPTH = "num_nextn_predict_layers"  # layers of multi-token prediction
# Keys of config.json that say nothing about what the decoder computes. Dropout is not among our parts; those rates
# concern training elsewhere.
NOT_THE_DECODER = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "use_cache", "initializer_range", "attention_dropout", "pretraining_tp",
    "cache_implementation", "_name_or_path", "max_window_layers", "n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "task_specific_params", "id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict",
    "residual_dropout", "router_aux_loss_coef", "output_router_logits",
    "chunk_size_feed_forward", "is_encoder_decoder", "problem_type", "tokenizer_class", "unsloth_fixed",
    "auto_map", MTP_DEPTH, "num_mtp_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "ep_size", "seq_aux", "aux_loss_alpha",
    "for_llm_compressor", "num_labels", "_num_labels", "_pad_token_id", "transformers.js_config",
    "use_reentrant_checkpointing", "gradient_checkpointing", "unsloth_version", "_attn_implementation",
    "_attn_implementation_autoset", "attn_implementation", "model_max_length", "max_sequence_length", "hidden_dropout",
    "n_special", "predict_special_tokens", "output_past",  # of GPT-2's first files
    "initial_context_length",  # of GPT-OSS: what its rope_scaling says too
    "full_attn_mod", "interpolate_factor",  # of Phi-4-mini, which nothing reads
    "sliding_window_size",  # of Gemma 2, beside sliding_window
    # How an answer is drawn, where generation_config.json does not say it.
    "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "num_beams",
    "num_return_sequences",
    # Of SmolVLM: names of its own code, which transformers does not read.
    "is_llama_config", "neftune_noise_alpha", "pixel_shuffle_factor", "perceiver_config", "_flash_attn_2_enabled",
}  # fmt: skip
ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", ORIGINAL}
# Keys of config.json whose value is another than that of our key: (from theirs to ours, from ours to theirs).
CONVERSIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # Granite multiplies scores by this number, we multiply them by query_scale ** -0.5.
    "attention_multiplier": (lambda multiplier: multiplier**-2, lambda scale: scale**-0.5),
}
SHARED = "n_shared_experts"  # several shared experts compute what one of their total width does, which is ours
QK_NORM = "use_qk_norm"
TEMPERATURE = "attn_temperature_tuning"  # queries grow in layers without positions, by attn_scale and floor_scale
INTEGERS = {"query_pre_attn_scalar"}  # keys that are integers there and numbers here
# Keys that no single key of ours corresponds to: `_read_values` reads them. A family has those that its `absent` has.
DERIVED = {
    *PARTIAL, *LATENT, *GLOBAL_HEADS, *LAYER_PARTS, FULL_EVERY, SHARED, QK_NORM, TEMPERATURE, "attn_scale",
    "floor_scale", "head_dim", "qk_head_dim",
}  # fmt: skip
MAX_LAYERS = 10_000  # a larger number is that of a damaged file


MAX_BYTES = 1 << 22  # of config.json, and of a processor's: each item of a list takes 50 us, and some have a million


def read_config(
    folder: Path, family: str | None = None, key: str = "model.init_from", preferred: str | None = None
) -> dict[str, Any]:
    """Read the keys of the section `model` that config.json decides; the family's file of values decides the others.

    `family` is a name or a dotted path; None finds the one of tunix's that has the file's model_type, and of several
    takes the `preferred` one: the decoder of a model that sees is a model too. `key` is the key that names the folder,
    for messages.

    Raises:
        UserError: there is no config.json, or it has a key or value that is not understood; the message names it.
    """
    source = f"{folder}/config.json"
    if not (folder / "config.json").is_file():
        if (folder / adapter_config.CONFIG).is_file():
            raise UserError(
                f"{key}={folder} is an adapter alone: give its base, and model.init_adapter={folder} (adapter={folder} "
                f"for generate, serve and export); or {adapter_config.OTHERWISE}"
            )
        raise UserError(
            f"{key}={folder} is not a model's folder: it has no config.json; give a folder or an ID of the Hugging "
            "Face hub, or a run's folder, which has a config.yaml"
        )
    with naming_writer(folder):
        try:
            read = translate_config(_read_small(folder / "config.json"), source, family, preferred)
            if "vision" in read:
                read["vision"] |= _read_processor(folder, read["vision"])
            return read
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise UserError(f"{source}: a key has a value of the wrong type ({error})") from None


def _read_small(path: Path) -> dict[str, Any]:
    """Read one of the files that make a config; raises `UserError` for a large one."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UserError(f"{path} has {size:,} bytes, and a model's config has at most {MAX_BYTES:,}")
    return read_json(path)


def _find_processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file that says how images are made, and what it says; {} where there is none."""
    preprocessor, processor = (folder / name for name in PROCESSOR_FILES[:2])
    # transformers 5 writes the second file alone, with a part for images, and takes it before the first.
    if processor.is_file() and (part := _read_small(processor).get("image_processor")) is not None:
        return processor, part
    return preprocessor, _read_small(preprocessor) if preprocessor.is_file() else {}


def _read_processor(folder: Path, vision: dict[str, Any]) -> dict[str, Any]:
    file, raw = _find_processor(folder)
    try:
        return read_processor(raw, vision)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise UserError(f"{file}: a key has a value of the wrong type, or is missing ({error})") from None


def read_limits(folder: Path, kind: str) -> dict[str, Any]:
    """Read the limits of an image's pixels beside a model with a tower of this kind; {} where no file has them.

    Raises:
        UserError: the file is damaged.
    """
    file, raw = _find_processor(folder)
    try:
        return read_pixel_limits(raw, kind)
    except AttributeError as error:
        raise UserError(f"{file}: a key has a value of the wrong type ({error})") from None


def translate_config(
    raw: dict[str, Any], source: str, family_name: str | None = None, preferred: str | None = None
) -> dict[str, Any]:
    """Return the keys of the section `model` that `raw`, the content of config.json, decides; see `read_config`.

    `source` is the file's path, for messages.
    """
    labels = read_labels(raw)
    whole, raw = raw, _find_decoder(raw)
    kind = whole.get("model_type")
    families = FAMILIES if family_name is None else {family_name: find_family(family_name)}
    # Several families may have one model_type. One that sees is taken before its decoder alone, then the one with the
    # longest `signature` that fits.
    fitting = [name for name, family in families.items() if _fits(family, whole if family.sees else raw)]
    name = max(fitting, key=lambda name: (families[name].sees, len(families[name].signature)), default=None)
    name = preferred if preferred in fitting else name
    if "auto_map" in raw and not (name and families[name].published_code):
        raise UserError(f"{source}: auto_map asks for code of the model's own, which is never run")
    if name is None:
        known = ", ".join(family.model_type for family in families.values())
        keys = "model.family=package.module:name, or family=... where a command has that key"
        own = "" if family_name else f", and a family of your own: {keys}"
        raise UserError(f"{source}: model_type={kind} is not understood; understood are {known}{own}")
    family = families[name]
    raw = _check_keys(raw, family, source)
    try:
        read_quantization(_find_packed(whole))
        vision = {"vision": read_vision(whole, NOT_THE_DECODER | {QUANTIZATION})} if family.sees else {}
        return {"family": name, "labels": labels} | _nest(_read_values(raw, family)) | vision
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None


def _fits(family: Family, raw: dict[str, Any]) -> bool:
    """Return whether a config.json, or the part of it about the decoder, is of a family."""
    is_of_type = raw.get("model_type") in (family.model_type, *family.also)
    has_tower = isinstance(raw.get(TOWER), dict) or not family.sees
    return is_of_type and has_tower and all(raw.get(key) == value for key, value in family.signature.items())


def _check_keys(raw: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    """Return the keys of a config.json by their usual names, with the values of those that it leaves out.

    A key that nobody knows may change what a model computes. So it is refused, and never left out in silence.

    Raises:
        UserError: a key that is unknown or missing, or one with a value that our layers do not compute.
    """
    raw = {family.synonyms.get(key, key): value for key, value in raw.items() if key != QUANTIZATION}
    keys = {
        *family.keys.values(), *family.fixed, *family.biases, *NOT_THE_DECODER, *LAYER_KEYS, LAYER_TYPES, *ROPE_KEYS,
        *DERIVED & family.absent.keys(),
    }  # fmt: skip
    for key, value in raw.items():
        if key not in keys:
            raise UserError(
                f"{source}: {key}={value} is not understood for model_type={raw.get('model_type')}; take it out if the "
                "model computes the same without it, or name a family of your own that knows it (docs/extending.md)"
            )
    unread = LAYER_KEYS - family.absent.keys() - {*family.keys.values()}
    raw = family.absent | {key: value for key, value in raw.items() if key not in unread}
    for key, value in raw.items():
        if key in family.fixed and value not in family.fixed[key]:
            usual = " or ".join(map(str, family.fixed[key]))
            raise UserError(f"{source}: {key}={value} is not supported; it must be {usual}")
    if missing := [key for key in family.keys.values() if key not in raw]:
        raise UserError(f"{source}: {', '.join(missing)} is missing")
    return raw


def _read_values(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return values of the section `model` by keys like `mlp.num_experts`.

    `family.keys` has our keys that correspond to one of theirs. Others follow from several keys, like those in
    `DERIVED`. They are read for the families that have them: in `raw` each has a value, from `absent` if not the file.

    Raises:
        ValueError: a value that is not understood; the message names the key.
    """
    values = {ours: _convert(theirs, raw[theirs], 0) for ours, theirs in family.keys.items()}
    if not isinstance(values["num_layers"], int) or not 0 < values["num_layers"] <= MAX_LAYERS:
        raise ValueError(f"{family.keys['num_layers']}={values['num_layers']} is no number of layers")
    values |= read_attention_layers(raw, values["num_layers"], family)
    if "mlp.num_experts" in values:
        values = read_expert_layers(raw, values["num_layers"]) | values
    if SHARED in raw:
        values["mlp.shared_dim"] = raw[SHARED] * values["mlp.expert_dim"] or None
    if QK_NORM in family.absent:
        values["qk_norm"] = family.qk_norm if raw[QK_NORM] else "none"
    if TEMPERATURE in raw:
        # How Llama 4's queries grow in layers without positions.
        growth = {"rate": raw["attn_scale"], "every": int(raw["floor_scale"]), "offset": 1, "layers": "unrotated"}
        values["query_growth"] = growth if raw[TEMPERATURE] else None
    if family.biases:
        values["biases"] = "|".join(names for key, names in family.biases.items() if raw.get(key)) or None
    if family.absent.keys() >= LATENT:
        values |= read_latent_heads(raw, values)
    # Dimensions that follow from others where config.json leaves them open.
    heads, dim = values["num_heads"], values["embed_dim"]
    values["num_kv_heads"] = values.get("num_kv_heads") or heads
    values["head_dim"] = values.get("head_dim") or dim // heads
    values["mlp_dim"] = values["mlp_dim"] or 4 * dim  # GPT-2's n_inner is null
    values.setdefault("query_scale", family.query_scale or values["head_dim"])
    if family.absent.keys() >= GLOBAL_HEADS:
        values["global_heads"] = read_global_heads(raw, values)
    if family.absent.keys() >= LAYER_PARTS:
        values |= read_layer_parts(raw, values)
    if ROPE_KEYS & family.absent.keys():
        values |= read_rope(raw, values, family)
    return values


# Classes with a head of scores, and the labels of its numbers.
CLASSIFIER = "ForSequenceClassification"  # ends the name of such a class


def read_labels(raw: dict[str, Any]) -> list[str] | None:
    """Return the names of the numbers that a config.json gives a document; None for a language model."""
    if not any(str(name).endswith(CLASSIFIER) for name in raw.get("architectures") or ()):
        return None
    names = raw.get("id2label")
    if not names:  # transformers writes no names where there are two numbers without names
        return [f"LABEL_{number}" for number in range(int(raw.get("num_labels", 2)))]
    return [str(name) for _, name in sorted(names.items(), key=lambda item: int(item[0]))]


def are_unnamed(labels: Sequence[str]) -> bool:
    """Return whether nobody has named these labels: transformers then numbers them."""
    return list(labels) == [f"LABEL_{number}" for number in range(len(labels))]


def write_labels(labels: Sequence[str], family: Family) -> dict[str, Any]:
    """Return the keys of config.json of a model with these labels.

    Raises:
        UserError: transformers has no class for scores of this family.
    """
    if family.classifier is None:
        raise UserError(f"transformers has no class {CLASSIFIER} for model_type={family.model_type}")
    numbered = dict(enumerate(labels))
    names = {"id2label": {str(number): name for number, name in numbered.items()}}
    return {"architectures": [family.classifier], **names, "label2id": {name: n for n, name in numbered.items()}}


def _find_decoder(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the decoder, of a config.json that may be of a model for images and text."""
    if not isinstance(raw.get("text_config"), dict):
        return raw
    # The model_type of the decoder is in text_config; a file that lacks it there has, say, gemma3 for gemma3_text. The
    # head belongs to the whole: where that says whether it is tied, transformers does not ask text_config.
    head = {key: raw[key] for key in ("tie_word_embeddings",) if raw.get(key) is not None}
    return {"model_type": f"{raw.get('model_type')}_text", **raw["text_config"], **head}


def read_num_rows(folder: Path, family: Family) -> int:
    """Return the rows of the embedding table in a folder's files: one for each token of its vocabulary."""
    raw = family.absent | _find_decoder(read_json(folder / "config.json"))
    return int(raw[family.keys["vocab_size"]])


# The key `quantization_config`: how the matrices of a folder are packed.

QUANTIZATION = "quantization_config"
UNPACKED = ("fp8", "mxfp4", "bitsandbytes", "gptq", "awq")  # values of quant_method whose codes are read
FORMS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}  # that are read; the first is that of files that name none
BITS = {"gptq": (2, 4, 8), "awq": (4,)}
OTHERWISE = (
    "take the model's files in 16 bits, or write them: load this folder with transformers, then model.dequantize() and "
    "model.save_pretrained(DIR)"
)


class Quantization(NamedTuple):
    """How the codes of a folder make numbers."""

    method: str | None = None  # of `UNPACKED`; None where the folder has numbers
    bits: int = 4  # of a code of gptq and awq
    group_size: int = -1  # inputs of a matrix that share a scale; -1: all of them
    added_zero: int = 0  # to zero points: format `gptq` stores them less 1
    block_sizes: tuple[int, int] = (128, 128)  # rows and columns of fp8 that share a scale


def read_quantization(raw: dict[str, Any]) -> Quantization:
    """Return what a config.json says of the codes of its folder.

    Raises:
        ValueError: codes that are not read; the message names the key.
    """
    keys = raw.get(QUANTIZATION) or {}
    method = keys.get("quant_method")
    if method is None:
        return Quantization()
    if method not in UNPACKED:
        raise ValueError(
            f"{QUANTIZATION} says quant_method={method}, whose codes are not read (those of {', '.join(UNPACKED)} "
            f"are); {OTHERWISE}. model.lora.quantize_base trains on codes of our own"
        )
    if method in ("gptq", "awq"):
        return _read_integers(keys, method)
    rows, columns = keys.get("weight_block_size") or Quantization().block_sizes
    if min(int(rows), int(columns)) < 1:
        raise ValueError(f"{QUANTIZATION} says weight_block_size={[rows, columns]}; both must be above 0")
    return Quantization(method, block_sizes=(int(rows), int(columns)))


def _read_integers(keys: dict[str, Any], method: str) -> Quantization:
    """Return the form of integers with a scale and a zero point for each group, under old names of keys too."""
    bits: Any = keys.get("bits", keys.get("w_bit"))
    group_size = keys.get("group_size", keys.get("q_group_size"))
    form = keys.get("checkpoint_format", keys.get("version", keys.get("format", FORMS[method][0])))
    form = "marlin" if keys.get("is_marlin_format") else str(form).lower()
    read: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "bits": (bits, BITS[method]),
        "checkpoint_format" if method == "gptq" else "version": (form, FORMS[method]),
        "pack_dtype": (keys.get("pack_dtype", "int32"), ("int32",)),
        "zero_point": (keys.get("zero_point", True), (True,)),
    }
    says = f"{QUANTIZATION} of {method} says"
    for key, (value, usual) in read.items():
        if value not in usual:
            raise ValueError(
                f"{says} {key}={value}, which is not read ({' or '.join(map(str, usual))} is); {OTHERWISE}"
            )
    if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise ValueError(f"{says} group_size={group_size}; it must be -1 or above 0")
    return Quantization(method, bits, group_size, added_zero=1 if form == "gptq" else 0)


def find_quantization(folder: Path) -> Quantization:
    """Return how the matrices of a folder are packed.

    Raises:
        ValueError: codes that are not read; the message names the key.
    """
    path = folder / "config.json"
    return read_quantization(_find_packed(read_json(path)) if path.is_file() else {})


def _find_packed(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json, or the part of it about the decoder, whichever says how matrices are packed."""
    return raw if raw.get(QUANTIZATION) else _find_decoder(raw)


def _convert(theirs: str, value: Any, direction: int) -> Any:
    """Return the value of a key of config.json as our key has it (direction 0), or the other way round (1)."""
    return CONVERSIONS[theirs][direction](value) if theirs in CONVERSIONS and value is not None else value


def _nest(values: dict[str, Any]) -> dict[str, Any]:
    """Return values of keys like `mlp.num_experts` as sections: {"mlp": {"num_experts": 8}}."""
    sections: dict[str, Any] = {}
    for key, value in values.items():
        section, dot, name = key.rpartition(".")
        (sections.setdefault(section, {}) if dot else sections)[name] = value
    return sections


def write_config(model: Model) -> dict[str, Any]:
    """Return config.json of a model, in the keys that all versions of transformers read."""
    decoder = _write_decoder(model)
    if model.vision is None or not find_family(model.family).sees:
        return decoder
    return write_vision(model.vision, decoder)


def _write_decoder(model: Model) -> dict[str, Any]:
    """Return config.json of the decoder. Raises `UserError` where the model lacks a section that its family has."""
    family = find_family(model.family)
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for ours, theirs in family.keys.items():
        section, _, name = ours.rpartition(".")
        if section and not hasattr(getattr(model, section), name):
            raise UserError(f"model.{section}={getattr(model, section)} has no {name}")
        value = _convert(theirs, attrgetter(ours)(model), 1)
        # transformers checks that numbers of `INTEGERS` have no point.
        config[theirs] = int(value) if theirs in INTEGERS and float(value).is_integer() else value
    config |= {key: names in (model.biases or "").split("|") for key, names in family.biases.items()}
    config |= {theirs: usual for theirs, (usual, *_) in family.fixed.items()}
    if model.mtp is not None:
        config[MTP_DEPTH] = 1
    if model.labels is not None:
        config |= write_labels(model.labels, family)
    if isinstance(model.mlp, ExpertsMlp):
        if "mlp_only_layers" in family.absent:
            config["mlp_only_layers"] = list(range(model.mlp.dense_layers))
        if SHARED in family.absent:
            config[SHARED] = (model.mlp.shared_dim or 0) // model.mlp.expert_dim
    if QK_NORM in family.absent:
        config[QK_NORM] = model.qk_norm != "none"
    if TEMPERATURE in family.absent:
        growth = model.query_growth
        config[TEMPERATURE] = growth is not None
        if growth:
            config |= {"attn_scale": growth.rate, "floor_scale": growth.every}
    if family.absent.keys() >= LATENT:
        config |= write_latent_heads(model)
    if family.absent.keys() >= GLOBAL_HEADS:
        config |= write_global_heads(model)
    if family.absent.keys() >= LAYER_PARTS:
        config |= write_layer_parts(model)
    if model.positions == "learned":
        return config
    config |= write_rope(model, family)
    return config | write_attention_layers(model, family)
