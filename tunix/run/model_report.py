"""Rows of the start report about the model: its parts, and what of it is trained."""

import jax

from tunix.cli.runs import find_run
from tunix.config import Config
from tunix.config.mlp import ExpertsMlp
from tunix.data.prompts import AnyCorpus
from tunix.families import find_family
from tunix.hf.config_json import read_num_rows
from tunix.hf.hub import find
from tunix.models.exchanges import choose_exchange
from tunix.models.expert_exchanges import choose_expert_exchange
from tunix.models.kernels import choose_expert_products, choose_kernel, mesh_device
from tunix.sharding.arrays import bytes_per_device
from tunix.training.program import Program
from tunix.training.state import Architecture, State, count


def describe_model(cfg: Config, program: Program, corpus: AnyCorpus | None) -> dict[str, str]:
    """Return the rows about the model and the data that it learns from."""
    arch = program.arch
    return {
        "model": f"{cfg.model.family}, {arch.num_parameters:,} parameters, {cfg.model.num_layers} layers, "
        + _describe_attention(cfg),
        **_describe_linear_attention(cfg),
        **_describe_experts(cfg, program),
        **_describe_trained(cfg, arch, program.abstract),
        "data": corpus.summary if corpus else "not read in a dry run",
    }


def _describe_experts(cfg: Config, program: Program) -> dict[str, str]:
    """Return a row about experts, if the model has any."""
    mlp, arch = cfg.model.mlp, program.arch
    if not isinstance(mlp, ExpertsMlp):
        return {}
    beside = f", a shared one of width {mlp.shared_dim:,}" if mlp.shared_dim else ""
    beside += f", beside an MLP of width {cfg.model.mlp_dim:,}" if mlp.beside_mlp else ""
    dense = f"; the first {mlp.dense_layers} layers are dense" if mlp.dense_layers else ""
    dense += f"; of {mlp.every} layers in a row, the last has experts" if mlp.every > 1 else ""
    return {
        "experts": f"{mlp.experts_per_token} of {mlp.num_experts} of width {mlp.expert_dim:,} for each token{beside}"
        f"{dense}; {arch.num_active:,} parameters compute a token; "
        f"{_describe_exchange(cfg, program)}; {_describe_products(cfg)}"
    }


def _describe_exchange(cfg: Config, program: Program) -> str:
    """Return in words how tokens reach experts of other devices, why so, and what may be dropped."""
    axes, factor = program.layout.expert_axes, cfg.model.expert_buffer_factor
    sizes, device = jax.sharding.get_abstract_mesh().shape, mesh_device()
    dropped = "no token is dropped"
    if all(sizes[axis] == 1 for axis in axes):
        return dropped
    choice = choose_expert_exchange(cfg.model, sizes, device.platform if device else None)
    if factor is not None:
        dropped = f"a device has room for {factor:g} x the rows of equal loads, and drops what does not fit"
    why = f" ({choice.reason})" if cfg.model.expert_exchange == "auto" else ""
    return f"{dropped}; exchange by {choice.name}{why}"


def _describe_products(cfg: Config) -> str:
    """Return in words what computes the products of experts, and why it was chosen."""
    choice = choose_expert_products(cfg.model.expert_products, cfg.training.dtypes["compute"])
    why = f" ({choice.reason})" if cfg.model.expert_products == "auto" else ""
    return f"products by {choice.name}{why}"


def _describe_linear_attention(cfg: Config) -> dict[str, str]:
    """Return the row about layers of linear attention; nothing where there are none."""
    model, linear = cfg.model, cfg.model.linear_attention
    if linear is None:
        return {}
    count = sum(model.is_linear(layer) for layer in range(model.num_layers))
    return {
        "linear attention": f"{count} of {model.num_layers} layers; {linear.num_value_heads} heads, each with a memory "
        f"of {linear.key_dim} x {linear.value_dim} numbers, whatever the length of a sequence"
    }


def _describe_attention(cfg: Config) -> str:
    """Return the attention kernel in words, and why it was chosen."""
    model, texts = cfg.model, []
    for heads in model.kinds_of_heads:
        choice = choose_kernel(model.attention, heads.dim, cfg.training.dtypes["compute"], model.attention_options)
        where = " in global layers" if heads.letters == "kh" else ""
        texts.append(f"{choice.name} attention{where}" + (f" ({choice.reason})" if model.attention == "auto" else ""))
    text = ", ".join(texts)
    exchange = choose_exchange(cfg.model)
    if exchange.name == "none":
        return text
    why = f" ({exchange.reason})" if cfg.model.cp_exchange == "auto" else ""
    return f"{'xla attention' if exchange.name == 'ring' else text} by {exchange.name}{why}"


def _describe_trained(cfg: Config, arch: Architecture, state: State) -> dict[str, str]:
    """Return rows about the files that the weights come from, and the part of them that is trained."""
    rows, lora = {}, cfg.model.lora
    if cfg.model.init_from:
        rows["weights from"] = cfg.model.init_from + _describe_added_rows(cfg)
    if cfg.model.init_adapter:
        rows["updates from"] = cfg.model.init_adapter
    if lora.rank:
        trained = arch.num_trained
        rows["trained"] = (
            f"{trained:,} parameters ({trained / arch.num_parameters:.2%}): rank {lora.rank} updates of {lora.targets}"
            + (f", and {lora.train_also} fully" if lora.train_also else "")
        )
        base, kept = bytes_per_device(arch.frozen(state["params"])), cfg.training.dtypes["param"]
        if lora.quantize_base:
            kept = f"matrices of attention and MLP {lora.quantize_base}, the rest {kept}"
        num_frozen = count(arch.frozen(arch.weights))
        rows["frozen base"] = f"{num_frozen:,} parameters, {base / 2**20:,.3f} MiB per device: {kept}"
    return rows


def _describe_added_rows(cfg: Config) -> str:
    """Return in words how many rows of vocabulary the model has beyond those of the files it starts from."""
    source = cfg.model.init_from
    if source is None or cfg.resume or find_run(source, "model.init_from"):
        return ""
    in_files = read_num_rows(find(source), find_family(cfg.model.family))
    added = cfg.model.vocab_size - in_files
    return f"; {added:,} rows of vocabulary added to its {in_files:,}, each the mean of those" if added else ""
