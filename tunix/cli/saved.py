"""Keys that older code had: what is new since, and what has another form. Saved configs are brought to today's form.

The value of a new key here is not its default in conf/. It is the value with which a run that is older than the key
computes what it computed then. So a resumed run goes on with the same digits when a default changes.
"""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from tunix.base.errors import UserError, did_you_mean
from tunix.config.values import CONF

# Keys that are new, with the value that means what runs did before there was such a key.
ADDED: dict[str, Any] = {
    "training.ema_decay": None,
    "training.ema_dtype": "float32",
    "training.ema_memory": "device",
    "training.check_attention": True,
    "task.loss": None,
    "checkpoint.verify": "always",
    "loading.verify": "once",
    "checkpoint.save_at_steps": [],
    "logging.layer_norms_every": None,
    "checkpoint.folder": None,
    "checkpoint.timeout_s": 300.0,
    "logging.level": "info",
    "logging.ranks": [0],
    "training.hard_stop": None,
    "training.remat_memory_gib": None,
    "training.matmul_dtype": None,
    "training.remat_every": 1,
    "training.offload": "none",
    "training.compile_cache_gib": 4.0,
    "model.unrotated_every": None,
    "model.latent": None,
    "model.linear_attention": None,
    "model.global_heads": None,
    "model.shared_kv": None,
    "model.layer_inputs": None,
    "model.value_norm": False,
    "model.layer_scale": False,
    "model.attention_gate": False,
    "model.rotated_dim": None,
    "model.rotated_pairs": "halves",
    "model.query_growth": None,
    "model.local_attention": "window",
    "model.attention_cap": None,
    "model.attention_sinks": False,
    "model.embedding_multiplier": 1.0,
    "model.residual_multiplier": 1.0,
    "model.logits_divisor": 1.0,
    "model.logits_cap": None,
    "model.expert_products": "auto",
    "model.cp_exchange": "auto",
    "model.expert_buffer_factor": None,
    "model.init_adapter": None,
    "training.pipeline_microbatches": "auto",
    "training.pipeline_schedule": "auto",
    "training.pipeline_chunks": 2,
    "plan.network": None,
    "training.overlap": "none",
    "training.sequence_parallel": False,
    "training.skip_steps": [],
    "training.batch_stages": [],
    "training.spike_deviations": None,
    "training.spike_window": 128,
    "training.max_spikes": 5,
    "evaluation.patience": None,
    "evaluation.min_improvement": 0.0,
    "evaluation.sets": {},
    "evaluation.num_prompts": 256,
    "evaluation.num_samples": 1,
}
# Keys that are gone, with their new form for people who type them.
GONE = {"logging.tensorboard": "logging.sinks=[jsonl,tensorboard] names what is written"}
# Sections that the saved config of every version has.
SECTIONS = (
    "model", "data", "loading", "tokenizer", "task", "training", "optimizer", "scheduler", "checkpoint", "evaluation",
    "logging", "profile", "distributed", "launcher", "plan",
)  # fmt: skip


def read_saved(run_dir: Path) -> dict[Any, Any]:
    """Read the saved config of a run's folder, in today's form.

    Raises:
        UserError: the file cannot be read, or is not the whole config of a run.
    """
    values = load_saved(run_dir)
    for name in SECTIONS:
        if not isinstance(values.get(name), dict):
            raise _explain_damage(run_dir, f"it has no section {name}")
    return upgrade(values)


def load_saved(run_dir: Path) -> dict[Any, Any]:
    """Read the saved config of a run's folder as it is written; raises `UserError` where the file cannot be read."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    except OSError as error:
        raise _explain_damage(run_dir, error.strerror) from None
    except (ValueError, YAMLError):
        raise _explain_damage(run_dir, "it is not YAML") from None
    if not isinstance(values, dict):
        raise _explain_damage(run_dir, "it has no sections")
    return values


def _explain_damage(run_dir: Path, damage: str | None) -> UserError:
    file, copy = run_dir / "config.yaml", run_dir / ".hydra" / "config.yaml"
    way_out = f"; cp {copy} {file} restores it" if copy.is_file() else ""
    return UserError(f"{file} is damaged ({damage}){way_out}")


def upgrade(values: dict[Any, Any]) -> dict[Any, Any]:
    """Bring the values of a whole config, or those sections of it that are there, to today's form, in place."""
    for key, value in ADDED.items():
        section, _, name = key.rpartition(".")
        if section in values:
            values[section].setdefault(name, value)
    for change in CHANGES:
        change(values)
    return values


def _name_sinks(values: dict[Any, Any]) -> None:
    """A flag for TensorBoard, beside metrics.jsonl, was all that could be chosen."""
    logging = values.get("logging", {})
    if "tensorboard" in logging and "sinks" not in logging:
        logging["sinks"] = ["jsonl", "tensorboard"] if logging.pop("tensorboard") else ["jsonl"]


MLP_WORDS = {
    "gated_silu": {"kind": "gated", "activation": "silu"},
    "gated_gelu": {"kind": "gated", "activation": "gelu"},
    "gelu": {"kind": "plain", "activation": "gelu"},
}


def _split_mlp(values: dict[Any, Any]) -> None:
    """One word named the kind of the MLP and its activation."""
    model = values.get("model", {})
    word = model.get("mlp")
    if not isinstance(word, str):
        return
    if word not in MLP_WORDS:
        words = ", ".join(MLP_WORDS)
        hint = did_you_mean(word, list(MLP_WORDS))
        raise UserError(f"model.mlp={word}: expected {words}, or a mapping like {{kind:gated,activation:silu}}{hint}")
    model["mlp"] = MLP_WORDS[word]


def _add_sampling(values: dict[Any, Any]) -> None:
    """The keys that say how answers are drawn are new: older runs had no post-training."""
    default: Any = OmegaConf.to_container(OmegaConf.load(CONF / "sampling" / "default.yaml"))
    if "task" in values:
        values.setdefault("sampling", default)
    if "evaluation" in values:
        values["evaluation"].setdefault("sampling", default | {"temperature": 0.0})


def _name_biases(values: dict[Any, Any]) -> None:
    """A flag gave a bias to all projections, or to none."""
    model = values.get("model", {})
    if isinstance(model.get("biases"), bool):
        model["biases"] = "attention|mlp" if model["biases"] else None


def _add_pairs(values: dict[Any, Any]) -> None:
    """The columns of pairs of answers are new."""
    data = values.get("data", {})
    for source in (data, *(data.get("parts") or {}).values()):
        for name in ("chosen", "rejected") if "columns" in source else ():
            source["columns"].setdefault(name, None)


def _add_sinks(values: dict[Any, Any]) -> None:
    """The keys of sinks outside of the run's folder are new."""
    default: Any = OmegaConf.to_container(OmegaConf.load(CONF / "logging" / "default.yaml"))
    for name in ("close_timeout_s", "wandb", "mlflow", "webhook") if "logging" in values else ():
        values["logging"].setdefault(name, default[name])


def _add_moments(values: dict[Any, Any]) -> None:
    """The key that says how moments rest is new; not all optimizers have it."""
    optimizer = values.get("optimizer", {})
    if optimizer.get("name") in ("adamw", "lion", "muon", "sgd"):
        optimizer.setdefault("moments", "param")


def _round_borders(values: dict[Any, Any]) -> None:
    """YaRN's key for borders that are not rounded is new."""
    scaling = values.get("model", {}).get("rope_scaling") or {}
    if scaling.get("name") == "yarn":
        scaling.setdefault("truncate", True)


def _add_parts_of_experts(values: dict[Any, Any]) -> None:
    """The keys for biases of experts and for the gate of a shared one are new: none had any."""
    mlp = values.get("model", {}).get("mlp") or {}
    if isinstance(mlp, dict) and mlp.get("kind") == "experts":
        mlp.setdefault("biases", False)
        mlp.setdefault("shared_gate", False)
        mlp.setdefault("beside_mlp", False)


def _gather_tokens_of_experts(values: dict[Any, Any]) -> None:
    """The key for the exchange of experts is new: all tokens were gathered."""
    if "model" in values:
        mlp = values["model"].get("mlp") or {}
        has_experts = isinstance(mlp, dict) and mlp.get("kind") == "experts"
        values["model"].setdefault("expert_exchange", "gather" if has_experts else "auto")


# In this order: `_split_mlp` makes a mapping of a word, and the changes behind it read that mapping.
CHANGES = (
    _add_moments,
    _round_borders,
    _name_sinks,
    _add_sinks,
    _split_mlp,
    _add_parts_of_experts,
    _gather_tokens_of_experts,
    _name_biases,
    _add_sampling,
    _add_pairs,
)
