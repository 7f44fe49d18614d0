"""Checks of keys of a model that must fit one another. A message names the keys, their values and the way out.

What depends on a mesh is checked when the mesh is known: by `check_stages`, and by `check_divides` (sharding/mesh.py).
"""

import re
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from tunix.base.errors import UserError
from tunix.base.text import as_typed
from tunix.config.layers import EXPERT_PROJECTIONS, PROJECTIONS, ExpertsMlp, Latent, RopeLong, check_shared_layers
from tunix.config.vision import check_vision
from tunix.huggingface.table import FAMILIES
from tunix.models.table import CP_EXCHANGES, EXPERT_EXCHANGES, RING_KERNELS
from tunix.sharding.mesh import list_divisors, nearest, num_stages
from tunix.sharding.table import DIMS, LAYERS, values_per_byte

if TYPE_CHECKING:
    from tunix.config.model import Model


def check_stages(model: "Model", sizes: Mapping[str, int]) -> None:
    """Raise `UserError` where the stages of a mesh of these sizes cannot share the layers of a model.

    All stages run one program, each with its own weights. So each stage must have layers of the same kinds in the same
    order, and only the residual stream goes from stage to stage. `check_divides` refuses the same meshes, by the number
    `Model.num_turns`; the errors here say the reason, so they must come first.
    """
    stages = num_stages(sizes)
    if stages == 1:
        return
    leave_out = f"leave {', '.join(DIMS[LAYERS].weight_axes)} out of model.mesh_shape"
    if model.vision is not None:
        raise UserError(f"model.vision: stages do not take images yet; {leave_out}, or set model.vision=null")
    if model.mtp is not None:
        raise UserError(f"model.mtp: stages have no layer for further tokens yet; {leave_out}, or set model.mtp=null")
    for key in ("shared_kv", "layer_inputs"):
        if getattr(model, key) is not None:
            raise UserError(f"model.{key} gives a layer arrays that do not travel from stage to stage; {leave_out}")
    turns = model.num_turns
    if turns % stages == 0:
        return
    valid = list_divisors(turns, least=2)
    near = f"take {' or '.join(map(str, nearest(valid, stages)))} stages, " if valid else ""
    if 1 < turns == model.num_layers - model.num_first_layers:
        first = model.num_first_layers + turns % stages
        way_out = f"set model.layers_before_stages={first}, " if turns > stages else ""
        raise UserError(
            f"model.num_layers={model.num_layers}: {stages} stages do not divide the {turns} layers that they share; "
            f"{way_out}{near}or {leave_out}"
        )
    count = "num_layers" if model.layers_before_stages is None else "layers_before_stages"
    raise UserError(
        f"model.{count}={getattr(model, count)}: layers of several kinds take turns, and {stages} stages do not have "
        f"the same whole turns; {near}{leave_out}, or change model.{count}"
    )


def check_qk_clip(model: "Model", limit: float | None) -> None:
    """Raise `UserError` where `optimizer.qk_clip` finds no scores, or where the weights that it scales do not count."""
    if limit is None:
        return
    reasons = {
        "qk_norm": (model.qk_norm != "none", "divides queries and keys by their size, whatever their weights are"),
        "attention_cap": (model.attention_cap is not None, "bounds scores already"),
        "linear_attention": (model.linear_attention is not None, "has no scores"),
        "shared_kv": (model.shared_kv is not None, "lets layers share keys, which this does not scale"),
        "global_heads": (model.global_heads is not None, "gives layers heads of two kinds, which this does not scale"),
        "vision": (model.vision is not None, "has a tower, whose scores are not reported"),
        "mtp": (model.mtp is not None, "has a layer whose scores are not reported"),
        "lora.rank": (model.lora.rank > 0, "freezes the weights that this scales"),
    }
    for key, (is_so, reason) in reasons.items():
        if is_so:
            raise UserError(f"optimizer.qk_clip={limit}: model.{key} {reason}; set optimizer.qk_clip=null")


def _read(model: "Model", key: str) -> Any:
    """Return the value of a key of the model, like `mlp.every`."""
    return reduce(getattr, key.split("."), model)


def _check_divisible(model: "Model", key: str, by: str) -> None:
    if (value := _read(model, key)) % (divisor := _read(model, by)):
        raise ValueError(f"model.{key}={value} is not divisible by model.{by}={divisor}")


def _check_values(model: "Model", expected: dict[str, Any], reason: str) -> None:
    """Raise ValueError for the first key of the model with another value; `reason` says why that does not go."""
    for key, usual in expected.items():
        if (value := _read(model, key)) != usual:
            raise ValueError(f"model.{key}={as_typed(value)}{reason}; set it to {as_typed(usual)}")


def check_model_keys(model: "Model") -> None:
    """Raise ValueError where keys of the model contradict one another; the message says which, and the way out."""
    _check_divisible(model, "num_heads", "num_kv_heads")
    if model.positions == "rope":
        _check_rotations(model)
    if model.qk_norm == "after_rotation" and model.positions != "rope":
        raise ValueError(f"model.qk_norm=after_rotation needs rotations, not model.positions={model.positions}")
    if model.query_growth is not None and model.query_growth.layers == "unrotated" and not model.unrotated_every:
        raise ValueError(
            "model.query_growth.layers=unrotated needs layers without positions; set model.unrotated_every, or "
            "model.query_growth=null"
        )
    if model.norm.startswith("layer") and model.qk_norm != "none":
        raise ValueError(f"model.qk_norm={model.qk_norm} needs an RMSNorm, not model.norm={model.norm}; set it to none")
    local = model.global_every > 1 and model.linear_attention is None
    for key, needed, reason in (
        ("sliding_window", local, f"model.global_every={model.global_every}"),
        ("rope_theta", model.positions == "rope", f"model.positions={model.positions}"),
    ):
        if needed and getattr(model, key) is None:
            raise ValueError(f"model.{key} must be given with {reason}")
    if model.latent is not None:
        _check_latent(model, model.latent)
    if model.linear_attention is not None:
        _check_linear(model)
    if model.global_heads is not None:
        _check_global_heads(model)
    check_shared_layers(model)
    for key in ("vision", "shared_kv", "layer_inputs"):
        if getattr(model, key) is not None:
            _check_values(model, {"layers_before_stages": None}, f": no stages go with model.{key}")
    first, dense = model.layers_before_stages, model.mlp.dense_layers if isinstance(model.mlp, ExpertsMlp) else 0
    if first is not None and not dense <= first < model.num_layers:
        raise ValueError(
            f"model.layers_before_stages={first} must be at least the {dense} dense layers before experts, and below "
            f"model.num_layers={model.num_layers}; set it to null"
        )
    if model.mtp is not None:
        _check_mtp(model)
    if model.vision is not None:
        check_vision(model, model.vision)
    if isinstance(model.mlp, ExpertsMlp):
        _check_experts(model, model.mlp)
    else:
        usual = {"expert_products": "auto", "expert_exchange": "auto", "expert_buffer_factor": None}
        _check_values(model, usual, f": model.mlp.kind={model.mlp.kind} has no experts")
    exchange = CP_EXCHANGES.get(model.cp_exchange)
    if exchange is not None and exchange.in_blocks and model.attention not in RING_KERNELS:
        raise ValueError(
            f"model.attention={model.attention}: the kernels of model.cp_exchange={model.cp_exchange} are "
            f"{', '.join(RING_KERNELS)}; set model.attention=auto, or model.cp_exchange=ulysses, which runs every "
            "kernel"
        )
    quantized = model.lora.quantize_base
    if quantized and not model.lora.rank:
        raise ValueError(f"model.lora.quantize_base={quantized} freezes what model.lora.rank=0 trains; give a rank")
    if quantized and model.embed_dim % values_per_byte(quantized):
        raise ValueError(f"model.embed_dim={model.embed_dim} must be even: model.lora.quantize_base={quantized}")
    if model.init_adapter is not None and model.lora.init != "zero":
        raise ValueError(f"model.lora.init={model.lora.init}: the updates start from model.init_adapter; leave one out")


def _check_linear(model: "Model") -> None:
    _check_divisible(model, "linear_attention.num_value_heads", "linear_attention.num_key_heads")
    if model.num_layers < model.global_every:
        raise ValueError(
            f"model.global_every={model.global_every} leaves no layer of model.num_layers={model.num_layers} that "
            "attends to all earlier tokens; lower it"
        )
    if model.sliding_window is not None:
        raise ValueError(
            f"model.sliding_window={model.sliding_window}: there are no local layers with model.linear_attention; "
            "set it to null"
        )
    # The layers are stacks that take turns (`Model.stack_of`), and a stack has no name for a second kind of MLP.
    _check_equal_experts(model, "linear_attention")


def _check_mtp(model: "Model") -> None:
    having = [name for name, family in FAMILIES.items() if family.mtp_names]
    if model.family not in having:
        raise ValueError(
            f"model.mtp: files of model.family={model.family} have no such layer, only those of "
            f"{', '.join(having)}; set it to null"
        )
    _check_values(model, {"lora.rank": 0}, " trains updates alone, and a layer of model.mtp has none")
    _check_values(model, {"labels": None}, ": a model that gives scores has no layer of model.mtp")


def _check_global_heads(model: "Model") -> None:
    for key in ("latent", "linear_attention"):
        if _read(model, key) is not None:
            raise ValueError(f"model.global_heads does not go with model.{key}; set one of them to null")
    if not 1 < model.global_every <= model.num_layers:
        raise ValueError(
            f"model.global_every={model.global_every} leaves no local or no global layer of model.num_layers="
            f"{model.num_layers}, and model.global_heads needs both; change it, or set model.global_heads=null"
        )
    _check_divisible(model, "num_heads", "global_heads.num_kv_heads")
    _check_equal_experts(model, "global_heads")


def _check_equal_experts(model: "Model", part: str) -> None:
    """Raise `ValueError` where only some layers have experts, or experts have biases; `part` is a key of the model."""
    if isinstance(model.mlp, ExpertsMlp):
        reason = f" does not go with model.{part}, whose layers all have the same experts, without biases in the choice"
        _check_values(model, {"mlp.dense_layers": 0, "mlp.every": 1, "mlp.bias_rate": None}, reason)


def _check_latent(model: "Model", latent: Latent) -> None:
    # Each head has keys of its own, made of the latent; a norm, a sink or a gate has no place in the absorbed products
    # that decode from latents (DeepSeek-V2, section 2.1).
    plain = {"qk_norm": "none", "attention_sinks": False, "attention_gate": False}
    _check_values(model, {"num_kv_heads": model.num_heads, **plain}, " does not go with model.latent")
    if model.rotated_dim is None or model.rotated_dim >= model.head_dim:
        raise ValueError(
            f"model.rotated_dim={model.rotated_dim} must be a number below model.head_dim={model.head_dim} with "
            "model.latent"
        )
    if model.attention == "cudnn" and latent.value_dim != model.head_dim:
        raise ValueError(
            "model.attention=cudnn: cuDNN takes values as wide as keys, and "
            f"model.latent.value_dim={latent.value_dim} is not model.head_dim={model.head_dim}; set "
            "model.attention=auto"
        )
    if latent.value_dim > model.head_dim:
        raise ValueError(
            f"model.latent.value_dim={latent.value_dim} is more than model.head_dim={model.head_dim}; lower it"
        )


def _check_rotations(model: "Model") -> None:
    key = "head_dim" if model.rotated_dim is None else "rotated_dim"
    if model.num_rotated % 2:
        raise ValueError(f"model.{key}={model.num_rotated} must be even: RoPE rotates pairs")
    if model.rope_sections is not None and sum(model.rope_sections) != model.num_rotated // 2:
        raise ValueError(
            f"model.rope_sections={list(model.rope_sections)} must be {model.num_rotated // 2} pairs together, half of "
            f"model.{key}={model.num_rotated}"
        )
    wide = model.global_heads
    if wide is not None and model.rotated_dim is None and wide.head_dim % 2:
        raise ValueError(f"model.global_heads.head_dim={wide.head_dim} must be even: RoPE rotates pairs")
    for heads in model.head_kinds:
        if model.rotated_dim is not None and model.rotated_dim > heads.dim:
            raise ValueError(f"model.rotated_dim={model.rotated_dim} is more than model.head_dim={heads.dim}")
    if isinstance(model.rope_scaling, RopeLong):
        for name in ("short_factors", "long_factors"):
            if (count := len(getattr(model.rope_scaling, name))) != model.num_rotated // 2:
                raise ValueError(
                    f"model.rope_scaling.{name} has {count} divisors; model.{key}={model.num_rotated} needs "
                    f"{model.num_rotated // 2}"
                )


def _check_experts(model: "Model", mlp: ExpertsMlp) -> None:
    if "blocks" not in model.stacks:
        key = "dense_layers" if mlp.dense_layers >= model.num_layers else "every"
        raise ValueError(
            f"model.mlp.{key}={getattr(mlp, key)} leaves none of model.num_layers={model.num_layers} layers to the "
            "experts; lower it, or take model.mlp=gated_silu"
        )
    updated = [name for name in EXPERT_PROJECTIONS if re.search(model.lora.targets, name)]
    for key in ("dropout", "use_dora"):
        if model.lora.rank and updated and (value := getattr(model.lora, key)):
            raise ValueError(
                f"model.lora.{key}={value}: updates of experts have none, as in PEFT, and model.lora.targets="
                f"{model.lora.targets} matches {updated[0]}; leave it out, or set model.lora.targets=attention"
            )
    if model.biases is not None and any(re.search(model.biases, name) for name in PROJECTIONS if "mlp." in name):
        raise ValueError(f"model.biases={model.biases} matches projections of the MLP: experts have no biases")
    exchange = EXPERT_EXCHANGES.get(model.expert_exchange)
    if model.expert_buffer_factor is not None and exchange is not None and not exchange.has_buffer:
        raise ValueError(
            f"model.expert_buffer_factor={model.expert_buffer_factor:g} bounds a buffer that "
            f"model.expert_exchange={model.expert_exchange} lacks; set model.expert_exchange=rows, or "
            "model.expert_buffer_factor=null"
        )
