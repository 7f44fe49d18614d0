"""A teacher: a second model, whose distributions the model in training learns (distillation).

    documents     next token    loss    (1 - w) cross entropy + w divergence        task=pretrain, task=sft
    own answers   sampled       a token's advantage gets w (log p_teacher - log p)  task=grpo task.teacher_loss=sampled
    own answers   full          loss    that of the rewards + w divergence          task=grpo task.teacher_loss=full

With a divergence in the loss, the teacher's parameters are the item `TEACHER` of each batch (data/batches.py), and its
forward pass is a part of the step. Logits of both models exist for one chunk of positions at a time.

Sources: arXiv:1503.02531 (distillation), arXiv:2306.13649 (GKD: own answers, the generalized Jensen-Shannon
divergence).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, reshard

from tunix.base.errors import UserError
from tunix.config import Config, Model
from tunix.config.pretrained_config import read_teacher
from tunix.config.task import Distilled, Grpo, Taught
from tunix.data.batches import TEACHER, Batch
from tunix.models.context_parallel import select_exchange
from tunix.models.transformer import Transformer
from tunix.sharding.mesh_shape import check_divides, num_stages
from tunix.training.choices import Planned, lay_out_teacher
from tunix.training.logprobs import TeacherOutput, compute_hidden
from tunix.training.state import Architecture, abstract_params, describe

NO_TOKEN = -1e30  # logit of a row of the vocabulary that one of the two models lacks


@dataclass(frozen=True)
class Teacher:
    """A teacher without its parameters."""

    source: str  # `task.teacher`
    model: Model  # as its files have it
    arch: Architecture  # with as many rows of vocabulary as the model in training
    beta: float
    temperature: float
    in_loss: bool  # the loss takes its whole distributions; else it scores tokens, and is no part of the step

    @property
    def num_rows(self) -> int:
        """Rows of the vocabulary that both models have. Rows that one of them lacks belong to no token."""
        return min(self.model.vocab_size, self.arch.model.vocab_size)

    def module(self, params: dict[str, Any]) -> Any:
        """Return the teacher as a `Transformer`, whose logits leave out the rows that it lacks."""
        module = self.arch.module(params)
        return module if self.num_rows == self.arch.model.vocab_size else KnownRows(module, self.num_rows)

    def read(self, batch: Batch) -> TeacherOutput:
        """Return what the loss of a microbatch needs: the forward pass of the teacher, without a gradient."""
        with jax.named_scope("teacher"):
            module = self.module(jax.lax.stop_gradient(batch[TEACHER]))
            tables = module.tables()
            hidden, _ = compute_hidden(module, tables, batch)

        def measure(logits: jax.Array, table: jax.Array, hidden: jax.Array) -> jax.Array:
            others = module.logits((table, table), hidden)
            if self.num_rows < logits.shape[-1]:
                logits = hide_rows(logits, self.num_rows)
            return measure_divergence(logits / self.temperature, others / self.temperature, self.beta)

        return TeacherOutput(measure, tables[1], hidden)

    def abstract_params(self, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
        """Return shapes, dtypes and shardings of its parameters at rest: in the dtype of products."""
        return abstract_params(self.arch, mesh)


class KnownRows:
    """A model of which only the first rows of the vocabulary have a probability."""

    def __init__(self, model: Transformer, num_rows: int):
        self.model, self.num_rows = model, num_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def logits(self, tables: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, V] float32."""
        return hide_rows(self.model.logits(tables, x), self.num_rows)


def hide_rows(logits: jax.Array, num_rows: int) -> jax.Array:
    """Return logits [..., V] of which only the first rows have a probability."""
    ids = reshard(jnp.arange(logits.shape[-1]), jax.P(jax.typeof(logits).sharding.spec[-1]))
    return jnp.where(ids < num_rows, logits, NO_TOKEN)


def measure_divergence(logits: jax.Array, others: jax.Array, beta: float) -> jax.Array:
    """Return the divergence [...] in nats between a model and its teacher, of their logits [..., V].

    beta   divergence
    0      KL(teacher || model)
    1      KL(model || teacher)
    else   beta KL(teacher || m) + (1 - beta) KL(model || m)    with m = beta teacher + (1 - beta) model
    """
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(others)
    if beta == 0:
        return _compute_kl(log_q, log_p)
    if beta == 1:
        return _compute_kl(log_p, log_q)
    log_m = jnp.logaddexp(log_p + jnp.log1p(-beta), log_q + jnp.log(beta))
    return beta * _compute_kl(log_q, log_m) + (1 - beta) * _compute_kl(log_p, log_m)


def _compute_kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def describe_teacher(
    cfg: Config, planned: Planned, mesh: Mesh | AbstractMesh, platform: str | None = None
) -> Teacher | None:
    """Return the teacher of a run on its mesh; None if it has none.

    Raises:
        UserError: there is no such model, or it does not run on this mesh.
    """
    task = cfg.task
    if not isinstance(task, Taught) or task.teacher is None:
        return None
    model, sizes = read_teacher(task.teacher), mesh.shape
    if cfg.training.seq_len > model.context_length:
        raise UserError(
            f"task.teacher={task.teacher} reads at most {model.context_length} tokens, and "
            f"training.seq_len={cfg.training.seq_len}; lower it"
        )
    if task.teacher_in_loss and num_stages(sizes) > 1:
        way_out = "task.teacher_loss=sampled, or a mesh without pp" if isinstance(task, Grpo) else "a mesh without pp"
        raise UserError(
            f"task.teacher={task.teacher}: stages of the axis pp compute the loss of parts of sequences, of which a "
            f"teacher cannot say anything; take {way_out}"
        )
    # Rows of the vocabulary that belong to no token differ between sizes of one family.
    fitted = model.model_copy(update={"vocab_size": cfg.model.vocab_size})
    try:
        check_divides(fitted.dims, sizes)
        select_exchange(fitted, sizes, fitted.cp_exchange)
        layout = lay_out_teacher(cfg, fitted, mesh, platform, planned)
    except UserError as error:
        raise UserError(f"task.teacher={task.teacher}: {error}") from None
    temperature = task.teacher_temperature if isinstance(task, Distilled) else cfg.sampling.temperature
    return Teacher(task.teacher, model, describe(fitted, layout), task.teacher_beta, temperature, task.teacher_in_loss)
