"""Command lines that are legal and probably not what the user wants: refused, or answered with a remark.

Imports no jax.
"""

from tunix.base.errors import UserError
from tunix.cli.compose import Job
from tunix.config import Config
from tunix.config.values import CONF

OWN_SIZES = {"tiny", "pretrained"}  # choices of `model` whose vocabulary is that of the run's tokenizer
DIMENSIONS = ("embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
TINY_SETTINGS = ("optimizer.learning_rate", "training.max_steps", "training.seq_len")


def refuse_foreign_vocabulary(job: Job) -> None:
    """Raise `UserError` for a model of a published size whose tokenizer would be a small one, trained here.

    Most rows of its embedding would never be trained. A dry run reports them instead (`count_idle_rows`).
    """
    cfg, typed = job.config, _typed(job)
    name = typed.get("model", "tiny")
    published = {path.stem for path in (CONF / "model").glob("*.yaml")} - OWN_SIZES
    if cfg.resume or cfg.dry_run or cfg.model.init_from or name not in published or "model.vocab_size" in typed:
        return
    if idle := count_idle_rows(cfg, None):
        raise UserError(
            f"model={name} has {cfg.model.vocab_size:,} rows of vocabulary, and the tokenizer trained here would have "
            f"{cfg.tokenizer.vocab_size:,} tokens: {idle:,} rows would never be trained. Give its own tokenizer "
            "(tokenizer.path=FILE_OR_ID), start from its weights and tokenizer (model.init_from=FOLDER_OR_ID), or give "
            "the model as many rows as the tokenizer has tokens (model.vocab_size=auto)"
        )


def count_idle_rows(cfg: Config, num_tokens: int | None) -> int:
    """Return how many rows of the embedding belong to no token; 0 if they are a tenth of all rows or less.

    A few such rows are normal: models round their vocabulary up to a multiple of 128, for example.

    Args:
        num_tokens: tokens of the tokenizer; None where it is not read yet. Then the answer is known only for a
            tokenizer that the run trains itself.
    """
    if num_tokens is None and (cfg.tokenizer.path is not None or cfg.data.source == "tokens"):
        return 0
    assert isinstance(cfg.model.vocab_size, int)
    idle = cfg.model.vocab_size - (cfg.tokenizer.vocab_size if num_tokens is None else num_tokens)
    return idle if idle > cfg.model.vocab_size // 10 else 0


def remark_on_tiny(job: Job) -> str:
    """Return a remark for a model that is `tiny` with other dimensions, and trains with the settings of tiny."""
    typed = _typed(job)
    changed = [f"model.{name}" for name in DIMENSIONS if f"model.{name}" in typed]
    kept = [key for key in TINY_SETTINGS if key not in typed]
    chosen = any(word.startswith(("training=", "optimizer=", "+experiment", "experiment")) for word in job.overrides)
    if job.config.resume or typed.get("model", "tiny") != "tiny" or not changed or not kept or chosen:
        return ""
    return (
        f"{', '.join(changed)} {'are' if len(changed) > 1 else 'is'} given, the rest is that of model=tiny: also "
        f"{', '.join(kept)}, which are chosen for 1 million parameters; training=default is for larger models"
    )


def _typed(job: Job) -> dict[str, str]:
    """Return the words of the command line by their keys."""
    return {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in job.overrides}
