"""Log-probabilities by a second model: of completions and pairs by the model of step 0, of completions by a teacher."""

import hashlib
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, reshard

from tunix.base.digests import hash_texts
from tunix.base.files import make_once
from tunix.base.forms import locate_cached
from tunix.config import Config
from tunix.config.model import list_keys_outside
from tunix.config.task import Compared
from tunix.costs.rollout import describe_reference
from tunix.data.batches import Batch, put_rows
from tunix.data.dataset import Corpus
from tunix.data.packing import Sequences
from tunix.inference.pretrained import load_init_from
from tunix.models.layers import named
from tunix.models.lora import remove_updates
from tunix.processes import peers
from tunix.rl.rollouts import Reference
from tunix.training.dpo import Sides, sum_answers
from tunix.training.logprobs import compute_token_log_probs
from tunix.training.teacher import Teacher
from tunix.training.train_spec import TrainSpec

log = logging.getLogger(__name__)


# The reference: the model of step 0, near which task.kl_coefficient keeps the policy.


def make_reference(cfg: Config, train_spec: TrainSpec, mesh: Mesh) -> Reference:
    """Return the function that gives log-probabilities of the targets of a batch under the reference.

    Where only low-rank updates are trained, from nothing, the reference is the policy without them: no second model is
    kept. Else it is made once more as step 0 made it, with the same bits, and rests beside the state in the dtype of
    products.
    """
    score = jax.jit(_make_token_scorer(cfg, train_spec.arch.module))
    if cfg.model.keeps_base:
        remove = jax.jit(remove_updates)
        return lambda params, batch: score(remove(params), batch)
    start = train_spec.new_params(cfg.seed, load_init_from(train_spec, mesh))
    dtypes = jax.tree.map(lambda shape: shape.dtype, describe_reference(train_spec))
    copied = jax.jit(lambda params: jax.tree.map(jnp.astype, params, dtypes), donate_argnums=0)(start)
    return lambda params, batch: score(copied, batch)


def make_teacher_scorer(cfg: Config, train_spec: TrainSpec, params: dict[str, Any]) -> Callable[[Batch], jax.Array]:
    """Return the function that gives log-probabilities [A, B, T] of the targets of a batch under the teacher."""
    assert isinstance(train_spec.teacher, Teacher)
    compute, num_rows = _make_token_scorer(cfg, train_spec.teacher.module), train_spec.teacher.num_rows

    @jax.jit
    def score(params: Any, batch: Batch) -> jax.Array:
        # A token that the teacher has no row for cannot be compared: it gets the number of the model that drew it.
        return jnp.where(batch["targets"] < num_rows, compute(params, batch), batch["log_probs"])

    return lambda batch: score(params, batch)


def _make_token_scorer(cfg: Config, module: Callable[[dict[str, Any]], Any]) -> Any:
    def score(params: Any, batch: Batch) -> jax.Array:
        def microbatch(_, rows):
            model = module(params)
            chunk, temperature = cfg.training.loss_chunk_size, cfg.sampling.temperature
            return None, compute_token_log_probs(model, rows, None, chunk_size=chunk, temperature=temperature)[0]

        return jax.lax.scan(microbatch, None, batch)[1]

    return score


# Log-probabilities of pairs of answers under the model of step 0: computed once, before step 1, and kept on disk.
#
# They take the place of a second model in memory: one number for each answer. Where only low-rank updates are trained,
# the model of step 0 is the base, whose updates are 0. The files are named by the content of weights and pairs: another
# run on the same pairs, or a resumed one, finds them.
#
#     CACHE_DIR/reference/HASH/00000.npy    [pairs of a shard, 2] float32: chosen, rejected


def add_reference(cfg: Config, corpus: Corpus, train_spec: TrainSpec, mesh: Mesh) -> None:
    """Give all pairs of the corpus their log-probabilities under the model of step 0.

    The mesh must be the one in use. With several processes, each calls it. An objective without a reference gets zeros,
    at no cost.
    """
    assert isinstance(cfg.task, Compared)
    parts = (*corpus.train.values(), *corpus.held_out_parts.values())
    if not cfg.task.has_reference:
        for part in parts:
            part.of_pairs = [np.zeros((count, 2), np.float32) for _, count in part.stream.sizes].__getitem__
        return
    start_time = time.perf_counter()
    params = train_spec.new_params(cfg.seed, load_init_from(train_spec, mesh))
    # Without an adapter the updates are 0 at step 0, so runs of other ranks may use the same files.
    has_updates = cfg.model.init_adapter is not None
    same = list_keys_outside("mesh", "start", *([] if has_updates else ["updates"]))  # another kernel rounds otherwise
    model = cfg.model.model_dump_json(exclude=same)
    digest = digest_weights(params, with_updates=has_updates)
    products = [] if cfg.training.matmul_dtype is None else [cfg.training.matmul_dtype]
    info = model, train_spec.layout.compute, str(cfg.training.seq_len), digest, *products
    score = jax.jit(_make_pair_scorer(cfg, train_spec))
    num_computed = 0
    for part in parts:
        slots = [] if part.slots is None else [part.slots.suffix]  # which pairs have room for their images
        folder = locate_cached(cfg.loading.cache_dir, "reference", hash_texts(*info, part.stream.fingerprint, *slots))
        numbers = range(len(part.stream.sizes))
        # Each host may have a cache of its own. All processes compute together, or all of them read.
        if all(peers.gather(folder.is_dir(), "reference")):
            tables = [np.load(folder / f"{number:05}.npy") for number in numbers]
        else:
            tables = _compute(part, score, params, train_spec.batch.num_rows, mesh)
            num_computed += len(part)
            if peers.first_of_host():
                make_once(folder, partial(_write, tables=tables))
        part.of_pairs = tables.__getitem__
    if num_computed:
        seconds = time.perf_counter() - start_time
        log.info("log-probabilities of the pairs under the model of step 0: %d rows, %.1f s", num_computed, seconds)


def _write(folder: Path, tables: list[np.ndarray]) -> None:
    folder.mkdir()
    for number, table in enumerate(tables):
        np.save(folder / f"{number:05}.npy", table)


def _make_pair_scorer(cfg: Config, train_spec: TrainSpec) -> Any:
    def score(params: Any, rows: Batch) -> Sides:
        model = train_spec.arch.module(params)
        log_probs, _ = compute_token_log_probs(model, rows, None, chunk_size=cfg.training.loss_chunk_size)
        sides = sum_answers(log_probs * rows["loss_mask"], rows)
        return Sides(*(reshard(side, PartitionSpec()) for side in sides))

    return score


def _compute(part: Sequences, score: Any, params: Any, num_rows: int, mesh: Mesh) -> list[np.ndarray]:
    """Return for each shard the log-probabilities [documents, 2]; NaN for pairs that no sequence has."""
    tables = [np.full((documents, 2), np.nan, np.float32) for _, documents in part.stream.sizes]
    for start in range(0, len(part), num_rows):
        # The last batch begins again at the first sequence: shapes stay the same, and values too.
        rows = [(start + row) % len(part) for row in range(num_rows)]
        chosen, rejected = (np.asarray(side) for side in score(params, put_rows(part, rows, mesh)))
        for row, index in enumerate(rows):
            shard, pairs = part.pairs_of(index)
            tables[shard][pairs, 0], tables[shard][pairs, 1] = chosen[row, : len(pairs)], rejected[row, : len(pairs)]
    return tables


def digest_weights(params: Any, with_updates: bool = False) -> str:
    """Digest of the weights; each device reads its own part, and it is the same on every mesh.

    Without `with_updates` low-rank updates are left out: they change nothing at step 0, unless an adapter brings them.
    """
    leaves = [leaf for name, leaf in named(params) if with_updates or ".lora." not in name]
    sums = np.asarray(jax.jit(lambda leaves: jnp.stack([_sum_bits(leaf) for leaf in leaves]))(leaves))
    return hashlib.sha256(sums.tobytes()).hexdigest()


def _sum_bits(leaf: jax.Array) -> jax.Array:
    """Return two sums, [2] uint32, over the bits of all numbers mixed with their places. Sums of integers modulo 2^32
    are exact: they are the same in any order, and so on any mesh, as sums of floats are not. The place is mixed in
    because otherwise weights that have changed places would have the same sum."""
    bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
    # The place of a number is its row-major index in the whole array: i, then i J + j, then (i J + j) K + k.
    spec, flat_index = jax.typeof(leaf).sharding.spec, jnp.uint32(0)
    for axis, size in enumerate(leaf.shape):
        shape = [size if dim == axis else 1 for dim in range(leaf.ndim)]
        flat_index = flat_index * jnp.uint32(size) + jnp.arange(size, dtype=jnp.uint32).reshape(shape)
    flat_index = reshard(jnp.broadcast_to(flat_index, leaf.shape), spec)
    # Multipliers and shifts of the hash functions xxHash and MurmurHash3. Two sums, because 32 bits collide too often.
    sums = []
    for multiplier in (0x9E3779B1, 0x85EBCA6B):
        mixed = (bits ^ (flat_index * jnp.uint32(multiplier))) * jnp.uint32(0xC2B2AE35)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x27D4EB2F)
        sums.append(jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32))
    return jnp.stack(sums)
