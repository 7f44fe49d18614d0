"""A teacher: a second model, whose distributions the model in training learns (distillation).

    documents     next token    loss    (1 - w) cross entropy + w divergence        task=pretrain, task=sft
                  from files    the same, of the k likeliest tokens and the rest    task.teacher_top_k=k
    own answers   sampled       a token's advantage gets w (log p_teacher - log p)  task=grpo task.teacher_loss=sampled
    own answers   full          loss    that of the rewards + w divergence          task=grpo task.teacher_loss=full

With a divergence in the loss, the teacher's parameters are the item `TEACHER` of each batch (data/batches.py), and its
forward pass is a part of the step. Logits of both models exist for one chunk of positions at a time. A teacher whose
likeliest tokens are on disk is no part of the step: its numbers are fields of the batch (data/teacher_logits.py).

Sources: arXiv:1503.02531 (distillation), arXiv:2306.13649 (GKD: own answers, the generalized Jensen-Shannon
divergence).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import reshard

from tunix.base.errors import UserError
from tunix.config import Config, Model
from tunix.config.pretrained_config import read_logits_info, read_teacher
from tunix.config.task import Distilled, Grpo, Taught
from tunix.config.vision import AnyVision
from tunix.data.batches import TEACHER, Batch
from tunix.data.teacher_logits import IDS, LOG_PROBS, NO_TOKEN, REST, TopK
from tunix.models.context_parallel import select_exchange
from tunix.models.transformer import Transformer
from tunix.sharding.arrays import AnyMesh
from tunix.sharding.mesh import check_divides, num_stages
from tunix.sharding.table import DIMS, LAYERS
from tunix.training.choices import Planned, lay_out_teacher
from tunix.training.logprobs import TeacherOutput, compute_hidden, make_splitter, merge_chunks
from tunix.training.state import Architecture, abstract_params, describe

LEAST_REST = 2.0**-24  # what float32 has between 1 and the next smaller number


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
            vocab_weights = module.vocab_weights()
            hidden, _ = compute_hidden(module, vocab_weights, batch)

        def compute(logits: jax.Array, table: jax.Array, hidden: jax.Array) -> jax.Array:
            teacher_logits = module.logits((table, table), hidden)
            logits = hide_rows(logits, self.num_rows)
            return compute_divergence(logits / self.temperature, teacher_logits / self.temperature, self.beta)

        return TeacherOutput(compute, vocab_weights[1], hidden)

    def abstract_params(self, mesh: AnyMesh) -> dict[str, Any]:
        """Return shapes, dtypes and shardings of its parameters at rest: in the dtype of products."""
        return abstract_params(self.arch, mesh)

    def abstract_shared(self, mesh: AnyMesh) -> dict[str, Any]:
        """Return shapes, dtypes and shardings of what it adds to each batch."""
        return {TEACHER: self.abstract_params(mesh)} if self.in_loss else {}


@dataclass(frozen=True)
class OfflineTeacher:
    """A teacher whose likeliest tokens are on disk."""

    source: str  # `task.teacher`
    top_k: int
    num_rows: int  # of the vocabulary, that both models have
    beta: float
    temperature: float
    model: Teacher | None  # that makes the files; None where they are all that there is
    in_loss = True

    def read(self, batch: Batch) -> TeacherOutput:
        """Return what the loss of a microbatch needs: the fields of its files."""

        def by_token(field: jax.Array) -> jax.Array:
            """[B, T k] -> [B, T, k]"""
            rows, tokens = jax.typeof(field).sharding.spec
            shape = field.shape[0], field.shape[1] // self.top_k, self.top_k
            return jax.lax.reshape(field, shape, out_sharding=jax.P(rows, tokens, None))

        def compute(logits: jax.Array, _: None, found: TopK) -> jax.Array:
            logits = hide_rows(logits, self.num_rows)
            return compute_top_k_divergence(logits / self.temperature, found, self.beta)

        return TeacherOutput(compute, None, TopK(by_token(batch[IDS]), by_token(batch[LOG_PROBS]), batch[REST]))

    def abstract_shared(self, mesh: AnyMesh) -> dict[str, Any]:
        return {}

    def compute_top_k(self, params: Any, rows: Batch, chunk_size: int | str) -> TopK:
        """Return what the files have of rows [B, T]."""
        assert self.model is not None
        module = self.model.module(params)
        vocab_weights = module.vocab_weights()
        hidden, _ = compute_hidden(module, vocab_weights, rows)

        def one_chunk(_: None, states: jax.Array) -> tuple[None, TopK]:
            logits = module.logits((vocab_weights[1], vocab_weights[1]), states)
            spec = jax.typeof(logits).sharding.spec
            log_probs = reshard(jax.nn.log_softmax(logits / self.temperature), jax.P(*spec[:2], None))
            largest, ids = jax.lax.top_k(log_probs, self.top_k)
            rest = 1 - jnp.sum(jnp.exp(largest), -1) if self.top_k < self.num_rows else jnp.zeros_like(states[..., 0])
            return None, TopK(ids, largest, jnp.maximum(rest, 0))

        found = jax.lax.scan(one_chunk, None, make_splitter(hidden, chunk_size)(hidden))[1]
        return TopK(*(merge_chunks(x, hidden.shape[1]) for x in found))


AnyTeacher = Teacher | OfflineTeacher


class KnownRows:
    """A model of which only the first rows of the vocabulary have a probability."""

    def __init__(self, model: Transformer, num_rows: int):
        self.model, self.num_rows = model, num_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def logits(self, vocab_weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, V] float32."""
        return hide_rows(self.model.logits(vocab_weights, x), self.num_rows)


def hide_rows(logits: jax.Array, num_rows: int) -> jax.Array:
    """Return logits [..., V] of which only the first rows have a probability."""
    if num_rows >= logits.shape[-1]:
        return logits
    ids = reshard(jnp.arange(logits.shape[-1]), jax.P(jax.typeof(logits).sharding.spec[-1]))
    return jnp.where(ids < num_rows, logits, NO_TOKEN)


def compute_divergence(logits: jax.Array, teacher_logits: jax.Array, beta: float) -> jax.Array:
    """Return the divergence [...] in nats between a model and its teacher, of their logits [..., V].

    beta   divergence
    0      KL(teacher || model)
    1      KL(model || teacher)
    else   beta KL(teacher || m) + (1 - beta) KL(model || m)    with m = beta teacher + (1 - beta) model
    """
    return jnp.sum(_compare(jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher_logits), beta), -1)


def compute_top_k_divergence(logits: jax.Array, teacher: TopK, beta: float) -> jax.Array:
    """Return the divergence [...] in nats between a model, of its logits [..., V], and a teacher of files.

    All tokens that are not among the likeliest count as one, for both models: a divergence of k + 1 outcomes. With
    k = V it is that of all tokens, and else less. So the model learns how likely the others are together.
    """
    log_p, log_q = jax.nn.log_softmax(logits), _spread(teacher, logits)
    is_top_k = log_q > NO_TOKEN / 2
    top_k_divergence = jnp.sum(jnp.where(is_top_k, _compare(log_p, log_q, beta), 0), -1)
    log_p_rest = jax.nn.logsumexp(jnp.where(is_top_k, NO_TOKEN, log_p), -1)
    # The rest of a sure teacher is rounded to 0, of which KL(model || teacher) would have no bound.
    log_q_rest = jnp.log(jnp.maximum(teacher.rest, LEAST_REST))
    log_q_rest = jnp.where(log_p_rest > NO_TOKEN / 2, log_q_rest, NO_TOKEN)  # with k = V there are no others
    return top_k_divergence + _compare(log_p_rest, log_q_rest, beta)


def _spread(teacher: TopK, logits: jax.Array) -> jax.Array:
    """Return the log-probabilities of the likeliest tokens at their places among all, [..., V], laid out as logits."""
    spec = jax.typeof(logits).sharding.spec
    splits = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],) if spec[-1] else ()

    def on_device(ids: jax.Array, log_probs: jax.Array) -> jax.Array:
        size = jax.typeof(logits).sharding.shard_shape(logits.shape)[-1]
        local_ids = ids - size * jax.lax.axis_index(splits) if splits else ids
        local_ids = jnp.where(local_ids < 0, size, local_ids)  # a negative place would count from the end
        rows, positions = jnp.ogrid[: ids.shape[0], : ids.shape[1]]
        nothing = jnp.full((*ids.shape[:2], size), NO_TOKEN, log_probs.dtype)
        return nothing.at[rows[..., None], positions[..., None], local_ids].max(log_probs, mode="drop")

    by_rows = jax.P(*spec[:-1], None)
    return jax.shard_map(on_device, in_specs=(by_rows, by_rows), out_specs=jax.P(*spec))(*teacher[:2])


def _compare(log_p: jax.Array, log_q: jax.Array, beta: float) -> jax.Array:
    """Return the terms of `compute_divergence`, one for each outcome."""

    def kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
        return jnp.exp(log_p) * (log_p - log_q)

    if beta == 0:
        return kl(log_q, log_p)
    if beta == 1:
        return kl(log_p, log_q)
    log_m = jnp.logaddexp(log_p + jnp.log1p(-beta), log_q + jnp.log(beta))
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


def describe_teacher(cfg: Config, planned: Planned, mesh: AnyMesh, platform: str | None) -> AnyTeacher | None:
    """Return the teacher of a run on its mesh; None if it has none.

    Raises:
        UserError: there is no such model, or it does not run on this mesh.
    """
    task = cfg.task
    if not isinstance(task, Taught) or task.teacher is None:
        return None
    sizes = mesh.shape
    if task.teacher_in_loss and task.offline_top_k is None and num_stages(sizes) > 1:
        other = "task.teacher_loss=sampled" if isinstance(task, Grpo) else "task.teacher_top_k=64"
        way_out = f"{other}, or a mesh without pp"
        raise UserError(
            f"task.teacher={task.teacher}: stages of the axis pp compute the loss of parts of sequences, without a "
            f"teacher; take {way_out}"
        )
    top_k = task.offline_top_k
    temperature = task.teacher_temperature if isinstance(task, Distilled) else cfg.sampling.temperature
    if top_k is not None and (info := read_logits_info(task.teacher)) is not None:
        return _make_offline(cfg, task.teacher, top_k, info.num_rows, temperature)
    try:
        model = read_teacher(task.teacher)
    except UserError as error:
        if top_k is None or not cfg.resume:
            raise
        raise UserError(
            f"{error}; a run that has the teacher's files goes on without it: task.teacher=FOLDER, which its log names"
        ) from None
    if cfg.training.seq_len > model.context_length:
        raise UserError(
            f"task.teacher={task.teacher} reads at most {model.context_length} tokens, and "
            f"training.seq_len={cfg.training.seq_len}; lower it"
        )
    if cfg.training.images_per_row:
        check_images(f"task.teacher={task.teacher}", cfg.model.vision, model.vision)
    # Rows of the vocabulary that belong to no token differ between sizes of one family.
    fitted = model.model_copy(update={"vocab_size": cfg.model.vocab_size})
    try:
        # Each stage has all of its layers, whatever their number is.
        check_divides(fitted.dims, {**sizes, **dict.fromkeys(DIMS[LAYERS].weight_axes, 1)})
        select_exchange(fitted, sizes, fitted.cp_exchange)
        layout = lay_out_teacher(cfg, fitted, mesh, platform, planned)
    except UserError as error:
        raise UserError(f"task.teacher={task.teacher}: {error}") from None
    arch, in_loss = describe(fitted, layout), task.teacher_in_loss and top_k is None
    teacher = Teacher(task.teacher, model, arch, task.teacher_beta, temperature, in_loss)
    return teacher if top_k is None else _make_offline(cfg, task.teacher, top_k, teacher.num_rows, temperature, teacher)


SHAPES = "kind", "patch_size", "merge_size", "frames", "tokens_per_image"  # of what a tower reads and gives


def check_images(source: str, vision: AnyVision | None, teacher: AnyVision | None) -> None:
    """Raise `UserError` where a teacher does not see the images of a model with the tower `vision`, or sees others."""
    if vision is None:
        return
    way_out = "take a teacher with the same tower; where the data have no images, set training.images_per_row=0"
    if teacher is None:
        raise UserError(f"{source} sees no images, and rows of this model have some; {way_out}")
    names = SHAPES if vision.kind == "qwen3_vl" else (*SHAPES, "image_size")  # there images keep their size
    ours, theirs = vision.model_dump(), teacher.model_dump()
    if differing := [name for name in names if ours.get(name) != theirs.get(name)]:
        name = differing[0]
        raise UserError(
            f"{source} takes other images: its model.vision.{name} is {theirs.get(name)}, and this model's is "
            f"{ours.get(name)}; {way_out}"
        )


def _make_offline(
    cfg: Config, source: str, top_k: int, num_rows: int, temperature: float, model: Teacher | None = None
) -> OfflineTeacher:
    assert isinstance(cfg.task, Distilled)
    if top_k > (most := min(num_rows, cfg.model.vocab_size)):
        raise UserError(f"task.teacher_top_k={top_k}: the vocabulary has {most} rows; lower it, or set it to null")
    return OfflineTeacher(source, top_k, num_rows, cfg.task.teacher_beta, temperature, model)
