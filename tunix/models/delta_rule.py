"""The gated delta rule: attention with a memory of fixed size (Yang et al. 2024, arXiv:2412.06464).

Each head keeps a matrix S [E, M]. A token with key k, value v and query q lets S fade, corrects what S says of its key,
and asks S:

    S <- exp(decay) S                         decay <= 0
    S <- S + k (beta (v - S^T k))^T           what is written is the error of what S said; 0 < beta < 1
    out = S^T q

`step` does this for one token of each row. `run_chunks` gives the same results for whole rows, by products of matrices:
it takes C tokens at a time. With G_i the sum of the decays from the beginning of the chunk up to token i, and S the
memory that the chunk begins with, the errors of the tokens of a chunk are the solution of a triangular system:

    error_i + beta_i sum_{j < i} exp(G_i - G_j) (k_i . k_j) error_j  =  beta_i (v_i - exp(G_i) S^T k_i)
    out_i = exp(G_i) S^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) error_j

Rows hold documents. `runs` are numbers of the documents of a row, which rise: a token takes from tokens of its own run
alone, and the memory is empty where a run begins.

Arrays are those of one device. There are I key heads of width E; each serves J / I value heads of width M, which follow
one another. All computations are float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

CHUNK = 64  # tokens that one product takes
EPS = 1e-6  # added to the squared length of queries and keys

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def step(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the results [B, 1, J, M] of one token of each row, and the memory [B, J, E, M] after it.

    q and k are [B, 1, I, E], v is [B, 1, J, M], decay and beta are [B, 1, J].
    """
    q, k, v, decay, beta = (x[:, 0] for x in _prepare(q, k, v, decay, beta))
    state = _by_key_head(memory, k.shape[1], 1) * jnp.exp(decay)[..., None, None]
    error = beta[..., None] * (v - jnp.einsum("bie,bigem->bigm", k, state))
    state = state + jnp.einsum("bie,bigm->bigem", k, error)
    out = jnp.einsum("bie,bigem->bigm", q, state)
    return out.reshape(out.shape[0], 1, -1, out.shape[-1]), state.reshape(memory.shape)


def run_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, runs: jax.Array, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """Return the results [B, T, J, M] of rows whose memory begins empty, and the memory [B, J, E, M] after them.

    q and k are [B, T, I, E], v is [B, T, J, M], decay and beta are [B, T, J], runs are [B, T] int32. A chunk has at
    most `chunk` tokens.
    """
    batch, length, _, key_dim = k.shape
    size = min(chunk, length)
    split = partial(_split, size=size)
    q, k, v, decay, beta = map(split, _prepare(q, k, v, decay, beta))  # [B, n, C, I, (g), ...]
    runs = split(runs, mode="edge")  # [B, n, C]; tokens that fill the last chunk change nothing
    # A chunk begins with the memory of the last token before it: only tokens of the same run may read it.
    memory_run = jnp.concatenate([runs[:, :1, 0], runs[:, :-1, -1]], 1)  # [B, n]
    reads_memory = (runs == memory_run[..., None])[..., None, None]

    total = jnp.cumsum(decay, 2)  # G, [B, n, C, I, g]
    sees = (runs[..., :, None] == runs[..., None, :]) & jnp.tri(size, dtype=bool)
    sums = jnp.moveaxis(total, 2, -1)  # [B, n, I, g, C]
    # -inf before the exponential, not 0 behind it: exp(G_i - G_j) of a later j may overflow, and inf * 0 is no number.
    fades = jnp.exp(jnp.where(sees[:, :, None, None], sums[..., :, None] - sums[..., None, :], -jnp.inf))
    memory_share = jnp.where(reads_memory, jnp.exp(total), 0)  # of the memory, what is left at a token, [B, n, C, I, g]

    # The triangular system has two right sides, since its solution is linear in S: error = values - reads S. So it is
    # solved for all chunks at once, before any chunk knows the memory that it begins with:
    #
    #     all chunks at once      system -> values, reads         large products, in parallel
    #     one after the other     S0 -> errors, S1 -> errors, S2 ...    the scan below, with small products alone
    own_keys = jnp.einsum("bncie,bndie->bnicd", k, k)[:, :, :, None] * fades
    system = own_keys * jnp.moveaxis(beta, 2, -1)[..., None]
    read_keys = k[..., None, :] * (beta * memory_share)[..., None]
    right_sides = jnp.moveaxis(jnp.concatenate([v * beta[..., None], read_keys], -1), 2, -2)  # [B, n, I, g, C, M + E]
    solutions = jax.lax.linalg.triangular_solve(system, right_sides, left_side=True, lower=True, unit_diagonal=True)
    values, reads = solutions[..., : v.shape[-1]], solutions[..., v.shape[-1] :]
    scores = jnp.einsum("bncie,bndie->bnicd", q, k)[:, :, :, None] * fades

    # The memory after a chunk is what is left of it at the last token, plus the errors of the tokens of the last run,
    # each faded from its token to the end of the chunk (`to_end`; 0 for tokens of earlier runs).
    def one_chunk(memory, chunk):
        q, k, values, reads, scores, memory_share, to_end = chunk
        errors = values - jnp.einsum("bigce,bigem->bigcm", reads, memory)
        from_memory = jnp.einsum("bcie,bigem->bcigm", q, memory) * memory_share[..., None]
        out = from_memory + jnp.einsum("bigcd,bigdm->bcigm", scores, errors)
        rest = memory * memory_share[:, -1, ..., None, None]
        return rest + jnp.einsum("bcie,bigcm->bigem", k, errors * to_end[..., None]), out

    empty = 0 * jnp.einsum("bie,bigm->bigem", k[:, 0, 0], v[:, 0, 0])  # of the type that it has after a chunk
    chunks = (q, k, values, reads, scores, memory_share, fades[..., -1, :])
    memory, out = jax.lax.scan(one_chunk, empty, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), chunks))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, *v.shape[3:])[:, :length]
    out = out.reshape(batch, length, -1, v.shape[-1])
    return checkpoint_name(out, "attention"), memory.reshape(batch, -1, key_dim, v.shape[-1])


def number_runs(segments: jax.Array) -> jax.Array:
    """Return the number of the run of equal segments that each token of [B, T] is in, from 0 on."""
    changes = (segments[:, 1:] != segments[:, :-1]).astype(jnp.int32)
    return jnp.concatenate([jnp.zeros_like(segments[:, :1]), jnp.cumsum(changes, 1)], 1)


def _prepare(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array) -> Inputs:
    """Return queries and keys [B, T, I, E] of length E ** -0.5 and 1, and the others [B, T, I, J / I, ...]."""
    q, k, v, decay, beta = (x.astype(jnp.float32) for x in (q, k, v, decay, beta))
    num_keys = k.shape[2]
    q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS) for x in (q, k))
    v, decay, beta = (_by_key_head(x, num_keys, 2) for x in (v, decay, beta))
    return q * q.shape[-1] ** -0.5, k, v, decay, beta


def _by_key_head(x: jax.Array, num_keys: int, dim: int) -> jax.Array:
    """Return an array [.., J, ..] as [.., I, J / I, ..]: value heads by the key head that serves them."""
    return x.reshape(*x.shape[:dim], num_keys, -1, *x.shape[dim + 1 :])


def _split(x: jax.Array, size: int, mode: str = "constant") -> jax.Array:
    """[B, T, ...] -> [B, chunks, C, ...]; the last chunk is filled up."""
    missing = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], mode=mode)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])
