"""GGUF: weights, tokenizer and chat template in one file, as llama.cpp, Ollama and LM Studio read it.

Tensors have the names and layouts of llama.cpp's converter, which tests compare:

    q_proj, k_proj of Llama     the halves of each rotated pair lie beside one another, in place of half a head apart
    norms of Gemma              1 + w in place of w
    experts of a layer          one tensor [X, out, in] in place of X

Vectors and routers are float32. `ARCHITECTURES` has the families; a model that llama.cpp would compute otherwise is
refused by name. Needs the package gguf.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from tunix.base.errors import UserError
from tunix.base.files import read_json
from tunix.config import Model
from tunix.config.layers import ExpertsMlp
from tunix.huggingface.weights import check_range

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}  # ours, and those of a matrix
FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
BLOCK = 32  # numbers of q8_0 that share a scale; a matrix whose rows have no whole blocks is float16
FILE = "model.gguf"


class Architecture(NamedTuple):
    """How llama.cpp names and computes a family."""

    name: str
    pairs_beside: bool = False  # RoPE rotates numbers that lie beside one another
    norm_offset: float = 0.0  # in the file, and not in ours
    global_every: int | None = None  # one of so many layers is global; None where all are
    # A model of so many layers has the square root of width / heads as the divisor of scores, others that of head_dim.
    wide_layers: int | None = None
    own_values: tuple[str, ...] = ()  # keys of ours for which llama.cpp has a value of its own where a file has none


GEMMA2_VALUES = "attention_cap", "logits_cap", "sliding_window"
ARCHITECTURES = {
    "gemma2": Architecture("gemma2", norm_offset=1.0, global_every=2, wide_layers=46, own_values=GEMMA2_VALUES),
    "gemma3": Architecture("gemma3", norm_offset=1.0, global_every=6, wide_layers=62),
    "llama": Architecture("llama", pairs_beside=True),
    "mistral": Architecture("llama", pairs_beside=True),
    "mixtral": Architecture("llama", pairs_beside=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe"),
}
# How texts are cut before they are encoded: llama.cpp has a name for each way, and the expressions in its code.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PIECES = {"type": "Split", "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False}
CUTS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [BYTES | {"use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTES | {"use_regex": True}],
    "llama-bpe": [PIECES | {"pattern": {"Regex": CONTRACTIONS + r"\p{N}{1,3}" + REST}}, BYTES | {"use_regex": False}],
    "qwen2": [PIECES | {"pattern": {"Regex": CONTRACTIONS + r"\p{N}" + REST}}, BYTES | {"use_regex": False}],
}
# What may happen to a text before: llama.cpp puts marks in place of spaces itself, and does without NFC, as its
# converter does, because nearly all texts are composed.
MARKS: list[dict[str, Any]] = [
    {"type": "Prepend"},
    {"type": "Replace", "pattern": {"String": " "}},
    {"type": "Replace", "pattern": {"Regex": r"\A "}},
    {"type": "Metaspace"},
    {"type": "Split", "pattern": {"String": " "}},
]
COMPOSED: list[dict[str, Any]] = [{"type": "NFC"}]
# How the tokens of a text become its vector: names of sentence-transformers, the earlier ones behind, and of llama.cpp.
POOLINGS = {
    "lasttoken": "LAST", "mean": "MEAN", "cls": "CLS",
    "pooling_mode_lasttoken": "LAST", "pooling_mode_mean_tokens": "MEAN", "pooling_mode_cls_token": "CLS",
}  # fmt: skip

# A tensor of Hugging Face's files: its name, its shape, and a function of (dtype, is_local) that makes it.
Tensor = tuple[str, tuple[int, ...], Callable[[str, bool], np.ndarray | None]]


def check(cfg: Model, dtype: str) -> None:
    """Raise `UserError` where llama.cpp has no such model, or the package is missing."""
    _import()
    architecture = ARCHITECTURES.get(cfg.family)
    if architecture is None:
        raise UserError(f"format=gguf has no model.family={cfg.family}; it has {', '.join(ARCHITECTURES)}")
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is none of {', '.join(DTYPES)}, which format=gguf writes")
    if part := next((key for key in ("labels", "vision") if getattr(cfg, key) is not None), None):
        raise UserError(f"format=gguf holds the text decoder alone, and this model has model.{part}; export it without")
    has_window = cfg.sliding_window is not None and cfg.global_every > 1
    if has_window and architecture.global_every not in (cfg.global_every, None):
        raise UserError(
            f"model.global_every={cfg.global_every}: llama.cpp has one global layer in {architecture.global_every} of "
            f"a {cfg.family}, so format=gguf cannot hold it; export safetensors"
        )
    if has_window and architecture.global_every is None:
        raise UserError(
            f"model.sliding_window={cfg.sliding_window}: llama.cpp computes a {cfg.family} without a window, so "
            "format=gguf cannot hold it; export safetensors"
        )
    written = {"attention_cap": cfg.attention_cap, "logits_cap": cfg.logits_cap}
    written["sliding_window"] = cfg.sliding_window if has_window else None
    if key := next((key for key in architecture.own_values if written[key] is None), None):
        raise UserError(
            f"model.{key}=null: llama.cpp takes one of its own for a {cfg.family} without it, so format=gguf cannot "
            "hold it; export safetensors"
        )
    scale = cfg.embed_dim / cfg.num_heads if cfg.num_layers == architecture.wide_layers else cfg.head_dim
    if cfg.query_scale != scale:
        raise UserError(
            f"model.query_scale={cfg.query_scale:g} is not {scale:g}, which llama.cpp has for a {cfg.family} of "
            f"{cfg.num_layers} layers, so format=gguf cannot hold it; export safetensors"
        )
    if cfg.rope_scaling.name not in ("none", "linear", "llama3", "yarn"):
        raise UserError(f"model.rope_scaling.name={cfg.rope_scaling.name} has no place in format=gguf")
    if cfg.rope_scaling.name == "llama3" and architecture.name != "llama":
        raise UserError(
            f"model.rope_scaling.name=llama3: llama.cpp does not read its factors in a {cfg.family}, so format=gguf "
            "cannot hold it; export safetensors"
        )
    if (magnitude := getattr(cfg.rope_scaling, "attention_factor", None)) is not None:
        raise UserError(
            f"model.rope_scaling.attention_factor={magnitude:g}: llama.cpp computes it from model.rope_scaling.factor, "
            "so format=gguf cannot hold it; export safetensors"
        )
    if not getattr(cfg.rope_scaling, "truncate", True):
        raise UserError(
            "model.rope_scaling.truncate=false: llama.cpp rounds the borders of its rotations, so format=gguf cannot "
            "hold it; export safetensors"
        )
    if isinstance(cfg.mlp, ExpertsMlp) and cfg.family == "qwen3_moe" and not cfg.mlp.normalized:
        raise UserError(
            "model.mlp.normalized=false: llama.cpp divides the weights of the experts of a qwen3_moe by their sum, so "
            "format=gguf cannot hold it; export safetensors"
        )
    if isinstance(cfg.mlp, ExpertsMlp) and cfg.mlp.dense_layers:
        raise UserError(f"model.mlp.dense_layers={cfg.mlp.dense_layers}: llama.cpp has none in a {cfg.family}")


def write_gguf(
    path: Path, tensors: list[Tensor], cfg: Model, tokenizer: Path, stops: list[int], dtype: str, name: str
) -> int:
    """Write a model as one file, read it back, and return its bytes. One tensor is in memory at a time.

    `tensors` are those of Hugging Face's files, `tokenizer` a folder with tokenizer.json, `stops` the tokens that end
    an answer, and `name` that of the model.

    Raises:
        UserError: the tokenizer is missing, or of a kind that llama.cpp lacks.
    """
    gguf = _import()
    writer = gguf.GGUFWriter(None, ARCHITECTURES[cfg.family].name)
    writer.add_type("model")
    writer.add_name(name)
    _add_sizes(writer, cfg, gguf)
    writer.add_file_type(getattr(gguf.LlamaFileType, FILE_TYPES[dtype]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_tokenizer(writer, tokenizer, cfg.vocab_size, stops, gguf)
    _add_pooling(writer, tokenizer, gguf)
    named = list(_rename(tensors, cfg, gguf))
    for theirs, shape, _ in named:
        kind = _choose_kind(theirs, shape, dtype, gguf)
        stored = gguf.quant_shape_to_byte_shape(shape, kind) if kind.name in ("BF16", "Q8_0") else shape
        array_dtype: Any = {"F32": np.dtype("float32"), "F16": np.dtype("float16")}.get(kind.name, np.dtype("uint8"))
        writer.add_tensor_info(theirs, stored, array_dtype, math.prod(stored) * array_dtype.itemsize, raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    digests = {}
    for theirs, shape, make in named:
        kind = _choose_kind(theirs, shape, dtype, gguf)
        data = np.ascontiguousarray(gguf.quants.quantize(np.ascontiguousarray(make()), kind))
        check_range(theirs, data)
        digests[theirs] = hashlib.sha256(data.tobytes()).digest()
        writer.write_tensor_data(data)
    writer.close()
    _read_back(path, digests, gguf)
    return path.stat().st_size


def write_modelfile(folder: Path, stops: list[str]) -> None:
    """Write the file of `ollama create NAME -f Modelfile`, which takes the chat template out of the GGUF file."""
    lines = [f"FROM ./{FILE}", *(f"PARAMETER stop {json.dumps(stop)}" for stop in stops)]
    (folder / "Modelfile").write_text("\n".join(lines) + "\n")


def _import() -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError("format=gguf needs gguf: pip install 'tunix-trainer[gguf]'") from None
    return gguf


def _read_back(path: Path, digests: dict[str, bytes], gguf: Any) -> None:
    """Raise `UserError` unless the file has these tensors, to the bit."""
    read = {each.name: each.data for each in gguf.GGUFReader(path).tensors}
    found = {name: hashlib.sha256(data.tobytes()).digest() for name, data in read.items()}
    if wrong := sorted({name for name, _ in found.items() ^ digests.items()}):
        raise UserError(f"{path} is not what was written: {', '.join(wrong[:4])}; is the disk full?")


def _choose_kind(name: str, shape: tuple[int, ...], dtype: str, gguf: Any) -> Any:
    kinds = gguf.GGMLQuantizationType
    if len(shape) == 1 or "ffn_gate_inp" in name:
        return kinds.F32
    if dtype == "q8_0" and shape[-1] % BLOCK:
        return kinds.F16
    return getattr(kinds, DTYPES[dtype])


Made = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]  # name and shape of a tensor, and what makes it


def _rename(tensors: list[Tensor], cfg: Model, gguf: Any) -> Iterator[Made]:
    """Yield llama.cpp's name, shape and a function for each tensor of its file, which makes it in float32."""
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == ARCHITECTURES[cfg.family].name)
    names = gguf.get_tensor_name_map(arch, cfg.num_layers)
    # Experts have one tensor each: "...experts.3.w1.weight" joins "...experts.w1.weight".
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", tensor[0]), []).append(tensor)
    for name, parts in groups.items():
        canonical = name.replace("model.layers", "layers").replace("block_sparse_moe.experts", "feed_forward.experts")
        theirs = names.get_name(name if "block_sparse_moe.experts" not in name else canonical, (".weight", ".bias"))
        if theirs is None:
            raise UserError(f"format=gguf has no name for {name} of a {cfg.family}")
        is_stacked = name != parts[0][0]
        shape = (len(parts), *parts[0][1]) if is_stacked else parts[0][1]

        def make(name=name, parts=parts, is_stacked=is_stacked) -> np.ndarray:
            arrays = [_relayout(np.asarray(part[2]("float32", True)), name, cfg) for part in parts]
            return np.stack(arrays) if is_stacked else arrays[0]

        yield theirs, shape, make
    if (factors := _find_rope_factors(cfg)) is not None:
        yield "rope_freqs.weight", factors.shape, lambda: factors


def _relayout(array: np.ndarray, name: str, cfg: Model) -> np.ndarray:
    """Return a tensor with its numbers as llama.cpp has them."""
    architecture = ARCHITECTURES[cfg.family]
    heads = {"q_proj": cfg.num_heads, "k_proj": cfg.num_kv_heads}.get(name.split(".")[-2])
    if architecture.pairs_beside and heads is not None:
        pairs = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
    return array + np.float32(architecture.norm_offset) if name.endswith("norm.weight") else array


def _find_rope_factors(cfg: Model) -> np.ndarray | None:
    """Return the divisors [H / 2] of the frequencies of Llama 3's RoPE, which llama.cpp reads as a tensor."""
    scaling: Any = cfg.rope_scaling
    if scaling.name != "llama3":
        return None
    assert cfg.rope_theta is not None
    wavelengths = 2 * math.pi * cfg.rope_theta ** (np.arange(0, cfg.head_dim, 2) / cfg.head_dim)
    low, high = (scaling.original_context / factor for factor in (scaling.low_freq_factor, scaling.high_freq_factor))
    smooth = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    mixed = 1 / ((1 - smooth) / scaling.factor + smooth)
    return np.where(wavelengths < high, 1.0, np.where(wavelengths > low, scaling.factor, mixed)).astype(np.float32)


def _add_sizes(writer: Any, cfg: Model, gguf: Any) -> None:
    writer.add_vocab_size(cfg.vocab_size)
    writer.add_block_count(cfg.num_layers)
    writer.add_context_length(cfg.context_length)
    writer.add_embedding_length(cfg.embed_dim)
    writer.add_feed_forward_length(cfg.mlp_dim)
    writer.add_head_count(cfg.num_heads)
    writer.add_head_count_kv(cfg.num_kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_dimension_count(cfg.head_dim)
    if cfg.rope_theta is not None:
        writer.add_rope_freq_base(cfg.rope_theta)
    scaling: Any = cfg.rope_scaling
    if scaling.name in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.name))
        writer.add_rope_scaling_factor(scaling.factor)
    if scaling.name == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_context)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
    if cfg.sliding_window is not None and cfg.global_every > 1:
        writer.add_sliding_window(cfg.sliding_window)
        if cfg.local_rope_theta is not None:
            writer.add_rope_freq_base_swa(cfg.local_rope_theta)
    if cfg.attention_cap is not None:
        writer.add_attn_logit_softcapping(cfg.attention_cap)
    if cfg.logits_cap is not None:
        writer.add_final_logit_softcapping(cfg.logits_cap)
    if isinstance(cfg.mlp, ExpertsMlp):
        writer.add_expert_count(cfg.mlp.num_experts)
        writer.add_expert_used_count(cfg.mlp.experts_per_token)
        writer.add_expert_feed_forward_length(cfg.mlp.expert_dim)


def _add_tokenizer(writer: Any, folder: Path, num_rows: int, stops: list[int], gguf: Any) -> None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError("format=gguf holds a tokenizer, and the model has no tokenizer.json; put it into its folder")
    backend = Tokenizer.from_file(str(path))
    info = json.loads(backend.to_str())  # with the values that the file leaves out
    if info["model"]["type"] != "BPE":
        raise UserError(f"a tokenizer of type {info['model']['type']} has no place in format=gguf, only BPE")
    has_bytes = bool(info["model"].get("byte_fallback"))
    texts = {index: token for token, index in backend.get_vocab(with_added_tokens=True).items()}
    added, types, tokens = backend.get_added_tokens_decoder(), [], []
    for index in range(num_rows):
        token = texts.get(index, f"[PAD{index}]")
        kind = gguf.TokenType.NORMAL if index in texts else gguf.TokenType.UNUSED
        if index in added:
            kind = gguf.TokenType.CONTROL if added[index].special else gguf.TokenType.USER_DEFINED
        elif has_bytes and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            kind = gguf.TokenType.BYTE
        tokens.append(token)
        types.append(kind)
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in info["model"]["merges"]]
    cuts = _list_steps(info, "pre_tokenizer")
    changes = [*_list_steps(info, "normalizer"), *(cuts if has_bytes else [])]
    known = MARKS if has_bytes else COMPOSED
    if foreign := [step["type"] for step in changes if not any(_is_like(step, each) for each in known)]:
        raise UserError(
            f"the tokenizer changes or cuts texts in a way that llama.cpp lacks ({', '.join(foreign)}); format=gguf "
            "cannot hold it"
        )
    if has_bytes:  # as SentencePiece: the pair whose token has the highest score is merged first
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault("".join(merge), rank)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(ranks.get(token, len(merges))) for token in tokens])
        prepends = "prepend" in json.dumps([info.get("normalizer"), info.get("pre_tokenizer")]).lower()
        writer.add_add_space_prefix(prepends and '"never"' not in json.dumps(info.get("pre_tokenizer")))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_name_cuts(cuts))
        writer.add_token_list(tokens)
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_types(types)
    _add_special_tokens(writer, folder, backend, stops)


def _add_pooling(writer: Any, folder: Path, gguf: Any) -> None:
    """Say how the tokens of a text become its vector, where the folder says it to sentence-transformers."""
    path = folder / "1_Pooling/config.json"
    info = read_json(path) if path.is_file() else {}
    modes = [str(info.get("pooling_mode")), *(name for name, value in info.items() if value is True)]
    if kind := next((POOLINGS[mode] for mode in modes if mode in POOLINGS), None):
        writer.add_pooling_type(getattr(gguf.PoolingType, kind))


def _list_steps(info: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the steps of a part of tokenizer.json."""
    step = info.get(kind)
    inner = {"pre_tokenizer": "pretokenizers", "normalizer": "normalizers"}[kind]
    return [] if step is None else step[inner] if step["type"] == "Sequence" else [step]


def _is_like(step: dict[str, Any], known: dict[str, Any]) -> bool:
    return known.items() <= step.items()


def _name_cuts(steps: list[dict[str, Any]]) -> str:
    """Return llama.cpp's name for how a byte-level tokenizer cuts texts."""
    for name, known in CUTS.items():
        if len(steps) == len(known) and all(map(_is_like, steps, known)):
            return name
    cuts = ", ".join(str(step)[:200] for step in steps) or "none"
    raise UserError(
        f"the tokenizer cuts texts in a way that llama.cpp has no name for ({cuts}); format=gguf cannot hold it"
    )


def _add_special_tokens(writer: Any, folder: Path, backend: Tokenizer, stops: list[int]) -> None:
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    begins_with_bos = False
    for key, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        token = config.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and (index := backend.token_to_id(text)) is not None:
            add(index)
            ids = backend.encode("a").ids
            if key == "bos_token":
                begins_with_bos = ids[:1] == [index]
            elif key == "eos_token":
                stops = [stop for stop in stops if stop != index]
                if ids[-1:] == [index]:  # of a model of task=embed
                    writer.add_add_eos_token(True)
    # Without the key llama.cpp puts a token of its own choice before a text, for some ways to cut texts.
    writer.add_add_bos_token(begins_with_bos)
    # llama.cpp ends an answer at these two as at <eos>; of others it knows only the names that published models have.
    for add, index in zip((writer.add_eot_token_id, writer.add_eom_token_id), stops, strict=False):
        add(index)
    template = folder / "chat_template.jinja"
    try:
        chat = template.read_text(encoding="utf-8") if template.is_file() else config.get("chat_template")
    except UnicodeDecodeError as error:
        raise UserError(f"{template.name} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    if isinstance(chat, list):  # of several, each with its name
        chat = [each for each in chat if isinstance(each, dict) and {type(text) for text in each.values()} == {str}]
    if chat and isinstance(chat, str | list):
        writer.add_chat_template(chat)
