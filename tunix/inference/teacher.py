"""The teacher of a run, loaded onto its mesh: a run of tunix or a model of Hugging Face's, of any family."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec, reshard
from tokenizers import Tokenizer

from tunix.base.errors import UserError
from tunix.config.pretrained_config import TEACHER
from tunix.inference.pretrained import load_params
from tunix.sharding.layout import Layout
from tunix.training.program import Program
from tunix.training.state import describe

log = logging.getLogger(__name__)

VOCAB = "V"  # letter of the rows of the vocabulary in equations


def load_teacher(program: Program, mesh: Mesh, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the parameters of the program's teacher at rest on the mesh, in the dtype of products; None without one.

    `tokenizer` is that of the run.

    Raises:
        UserError: files that are not complete or damaged, a run without a checkpoint, another tokenizer.
    """
    teacher = program.teacher
    if teacher is None:
        return None
    layout = teacher.arch.layout
    own = describe(teacher.model, layout)  # with the rows of vocabulary that its files have
    try:
        params, own_tokenizer = load_params(teacher.source, teacher.model, own, layout, mesh)
    except UserError as error:
        raise UserError(f"{TEACHER}={teacher.source}: {error}") from None
    if (num_tokens := max(tokenizer.get_vocab().values()) + 1) > teacher.model.vocab_size:
        raise UserError(
            f"{TEACHER}={teacher.source} has {teacher.model.vocab_size:,} rows of vocabulary, and the run's tokenizer "
            f"has {num_tokens:,} tokens; take a teacher with the same tokenizer"
        )
    if own_tokenizer is not None:
        check_tokenizers(teacher.source, own_tokenizer.get_vocab(), tokenizer.get_vocab())
    fit = partial(_fit_rows, own.weights, teacher.arch.weights, layout)
    params = jax.jit(fit, donate_argnums=0)(params)
    log.info("teacher: %s, %s", teacher.source, f"{own.num_parameters:,} parameters")
    return params


def check_tokenizers(source: str, teacher: Mapping[str, int], own: Mapping[str, int]) -> None:
    """Raise `UserError` where two vocabularies, ids by token, are not the same."""
    if teacher == own:
        return
    differing = sorted({*teacher.items()} ^ {*own.items()}, key=lambda item: (item[1], item[0]))
    token, number = differing[0]
    raise UserError(
        f"{TEACHER}={source} has another tokenizer than the run: {len(teacher):,} tokens and {len(own):,}; the first "
        f"that differs is {token!r}, number {number}. A teacher judges the run's own tokens; take one with the same "
        "tokenizer, or train with the teacher's (tokenizer.path)"
    )


def _fit_rows(own: dict[str, Any], fitted: dict[str, Any], layout: Layout, params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters with as many rows of vocabulary as the model in training has.

    Rows behind those of the teacher are zeros, which `Teacher.module` leaves out; rows behind those of the model belong
    to no token. `own` and `fitted` are trees of `Weight`.
    """

    def fit(leaf: jax.Array, weight: Any, new: Any) -> jax.Array:
        if weight.shape == new.shape:
            return leaf
        dim = weight.equation.w.index(VOCAB)
        count, whole = new.shape[dim], reshard(leaf, PartitionSpec())
        whole = jax.lax.slice_in_dim(whole, 0, min(count, whole.shape[dim]), axis=dim)
        added = [(0, count - whole.shape[dim] if each == dim else 0) for each in range(whole.ndim)]
        return reshard(jnp.pad(whole, added), layout.stored(new.equation))

    return jax.tree.map(fit, params, own, fitted)
