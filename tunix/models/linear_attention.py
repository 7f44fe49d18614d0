"""Linear attention by the gated delta rule, as in Qwen 3.5: its cost for a token does not grow with the context.

    x [B, T, D] --+-- q, k, v --> filter, SiLU --> the delta rule --> norm of each head, times SiLU(gate) --> o
                  +-- beta ------> sigmoid -----------^                                          ^
                  +-- decay -----> -rate softplus(. + shift)                                     |
                  +-- gate ----------------------------------------------------------------------+

The filter is a causal convolution: each channel takes the last Z tokens. Later tokens need of earlier ones the memory
of the delta rule and the last Z - 1 inputs of the filters, whatever the number of tokens is: `Memory`. Tokens of
different documents share neither.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard

from tunix.config import Model
from tunix.models.layers import Bias, Einsum, Initializer, RMSNorm
from tunix.sharding.layout import Layout, stage_shard_map
from tunix.sharding.table import Equation, token_axes

# The gated delta rule: attention with a memory of fixed size (Yang et al. 2024, arXiv:2412.06464).
#
# Each head keeps a matrix S [E, M]. A token with key k, value v and query q lets S fade, corrects what S says of its
# key, and asks S:
#
#     S <- exp(decay) S                         decay <= 0
#     S <- S + k (beta (v - S^T k))^T           what is written is the error of what S said; 0 < beta < 1
#     out = S^T q
#
# `step` does this for one token of each row. `run_chunks` gives the same results for whole rows, by products of
# matrices: it takes C tokens at a time. With G_i the sum of the decays from the beginning of the chunk up to token i,
# and S the memory that the chunk begins with, the errors of the tokens of a chunk are the solution of a triangular
# system:
#
#     error_i + beta_i sum_{j < i} exp(G_i - G_j) (k_i . k_j) error_j  =  beta_i (v_i - exp(G_i) S^T k_i)
#     out_i = exp(G_i) S^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) error_j
#
# Rows hold documents. `runs` are numbers of the documents of a row, which rise: a token takes from tokens of its own
# run alone, and the memory is empty where a run begins.
#
# Arrays are those of one device. There are I key heads of width E; each serves J / I value heads of width M, which
# follow one another. All computations are float32.

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
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    runs: jax.Array,
    memory: jax.Array | None = None,
    chunk: int = CHUNK,
    continues: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the results [B, T, J, M] of rows, and the memory [B, J, E, M] after them.

    q and k are [B, T, I, E], v is [B, T, J, M], decay and beta are [B, T, J], runs are [B, T] int32. The first run of a
    row begins with `memory`; with None it is empty. A chunk has at most `chunk` tokens. With `continues` results and
    memory have E more columns each, which say what a memory before the row would add: see `run_shard`.
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
    local_keys = jnp.einsum("bncie,bndie->bnicd", k, k)[:, :, :, None] * fades
    system = local_keys * jnp.moveaxis(beta, 2, -1)[..., None]
    read_keys = k[..., None, :] * (beta * memory_share)[..., None]
    right_sides = jnp.moveaxis(jnp.concatenate([v * beta[..., None], read_keys], -1), 2, -2)  # [B, n, I, g, C, M + E]
    solutions = jax.lax.linalg.triangular_solve(system, right_sides, left_side=True, lower=True, unit_diagonal=True)
    values, reads = solutions[..., : v.shape[-1]], solutions[..., v.shape[-1] :]
    if continues is not None:
        values = jnp.pad(values, [(0, 0)] * 5 + [(0, key_dim)])
    scores = jnp.einsum("bncie,bndie->bnicd", q, k)[:, :, :, None] * fades

    # The memory after a chunk is what is left of it at the last token, plus the errors of the tokens of the last run,
    # each faded from its token to the end of the chunk (`to_end`; 0 for tokens of earlier runs).
    def one_chunk(memory, chunk):
        q, k, values, reads, scores, memory_share, to_end = chunk
        errors = values - jnp.einsum("bigce,bigem->bigcm", reads, memory)
        from_memory = jnp.einsum("bcie,bigem->bcigm", q, memory) * memory_share[..., None]
        out = from_memory + jnp.einsum("bigcd,bigdm->bcigm", scores, errors)
        remaining = memory * memory_share[:, -1, ..., None, None]
        return remaining + jnp.einsum("bcie,bigcm->bigem", k, errors * to_end[..., None]), out

    if memory is None:
        # Of the type that it has after a chunk.
        start = 0 * jnp.einsum("bie,bigm->bigem", k[:, 0, 0], values[:, 0, :, :, 0])
    else:
        start = _by_key_head(memory, k.shape[3], 1)
    if continues is not None:
        start += jnp.eye(key_dim, start.shape[-1], start.shape[-1] - key_dim) * continues[:, None, None, None, None]
    chunks = (q, k, values, reads, scores, memory_share, fades[..., -1, :])
    after, out = jax.lax.scan(one_chunk, start, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), chunks))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, *out.shape[3:])[:, :length]
    out, after = out.reshape(batch, length, -1, out.shape[-1]), after.reshape(batch, -1, *after.shape[3:])
    return out if continues is not None else checkpoint_name(out, "attention"), after


# Rows whose tokens lie on several devices, in order (the mesh axis cp).
#
# The memory after the tokens of a device is linear in the memory before them, and so are their results:
#
#     after = own + transition before         own [E, M] and transition [E, E] of each value head
#     out   = local + reads before            local [M] and reads [E] of each token
#
# `run_chunks` computes all four at once, before a device knows the memory that it begins with: `own` and `local` follow
# from an empty memory; `transition` and `reads` from a unit matrix in the place of the memory, without values. Both are
# 0 behind the beginning of a document. Two neighbours are like one device:
#
#     own = own_2 + transition_2 own_1        transition = transition_2 transition_1
#
# In each round, a device joins what it has with that of as many devices before it:
#
#     device 6 stands for    6      5 6      3 4 5 6      0 1 2 3 4 5 6
#
# Device 7 begins with what device 6 has then.


def run_shard(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, runs: jax.Array
) -> jax.Array:
    """Return the results [B, T, J, M] of the tokens of this device, inside a `shard_map`.

    Arguments are those of `run_chunks`, but for `runs` [B, S], which are those of all tokens of the rows.
    """
    runs, width = take_runs(runs, k.shape[1], 1), v.shape[-1]
    if jax.lax.axis_size(token_axes()) == 1:
        return run_chunks(q, k, v, decay, beta, runs[:, 1:])[0]
    continues = runs[:, 0] == runs[:, 1]
    out, after = run_chunks(q, k, v, decay, beta, runs[:, 1:], continues=continues)
    before = pass_memory(after[..., :width], after[..., width:])
    out = out[..., :width] + jnp.einsum("btje,bjem->btjm", out[..., width:], before)
    return checkpoint_name(out, "attention")


def pass_memory(own: jax.Array, transition: jax.Array) -> jax.Array:
    """Return the memory [B, J, E, M] before the tokens of this device, of `own` and `transition` [B, J, E, E]."""
    for round_number in range(count_rounds(jax.lax.axis_size(token_axes()))):
        distance = 2**round_number  # also the number of devices that both stand for
        own, transition = own + transition @ _fetch(own, distance), transition @ _fetch(transition, distance)
    return _fetch(own, 1)


def count_rounds(num_devices: int) -> int:
    """Return in how many rounds a device comes to stand for all devices before the last one."""
    return (num_devices - 2).bit_length()


def take_runs(runs: jax.Array, length: int, count: int) -> jax.Array:
    """Return the runs [B, count + T] of the `count` tokens before those of this device, and of its own; -1 before all.

    `runs` are [B, S], those of all tokens.
    """
    runs = jnp.pad(runs, [(0, 0), (count, 0)], constant_values=-1)
    return jax.lax.dynamic_slice_in_dim(runs, jax.lax.axis_index(token_axes()) * length, count + length, axis=1)


def move_on(size: int, x: jax.Array, runs: jax.Array) -> tuple[jax.Array, ...]:
    """Return tokens [B, T, I, E] of this device, moved on by 0 to size - 1 tokens; 0 for those of other runs [B, S].

    It runs inside a `shard_map`: the first tokens of a device take the last ones of the devices before it.
    """
    length, count = x.shape[1], size - 1
    # One device before has them, unless it has fewer tokens.
    earlier = [_fetch(x[:, -count:], distance) for distance in range(-(-count // length), 0, -1)]
    x, runs = jnp.concatenate([*earlier, x], 1)[:, -count - length :], take_runs(runs, length, count)

    def move(back: int) -> jax.Array:
        tokens = slice(count - back, count - back + length)
        return x[:, tokens] * (runs[:, tokens] == runs[:, count:])[..., None, None]

    return tuple(map(move, range(size)))


def _fetch(x: jax.Array, distance: int) -> jax.Array:
    """Return the array that the device so many places before this one has; 0 where there is none."""
    axes = token_axes()
    size = jax.lax.axis_size(axes)
    if distance >= size:
        return jnp.zeros_like(x)
    pairs = [(device, device + distance) for device in range(size - distance)]
    return checkpoint_name(jax.lax.ppermute(x, axes, pairs), "exchange")


def number_runs(segments: jax.Array) -> jax.Array:
    """Return the number of the run of equal segments that each token of [B, T] is in, from 0 on."""
    changes = (segments[:, 1:] != segments[:, :-1]).astype(jnp.int32)
    return jnp.pad(jnp.cumsum(changes, 1), ((0, 0), (1, 0)))


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


DIM_NAMES = ("BTIE", "BTIE", "BTJM", "BTJ", "BTJ")  # of queries, keys, values, decays and betas
WHOLE_ROWS = tuple(names.replace("T", "S") for names in DIM_NAMES)  # of a cache, whose rows no axis splits
SLOWEST, FASTEST = 1e-3, 1e-1  # time steps of the first weights (arXiv:2312.00752)
MAX_RATE = 16.0


class Memory(NamedTuple):
    """Everything that tokens leave for later ones. It has no slots: the first tokens fade, and none is thrown out."""

    inputs: tuple[jax.Array, ...]  # of the filters of queries, keys, values: [B, Z - 1, I, E], ..., [B, Z - 1, J, M]
    state: jax.Array  # of the delta rule, [B, J, E, M] float32


class Recurrence(NamedTuple):
    """Ways from the projections of tokens to results [B, T, J, M] and the memory behind the last token."""

    run_rows: Callable[[jax.Array], jax.Array]  # of whole rows, with their segments [B, S]; of results alone
    # of tokens behind a memory, None for an empty one; so many [B] of them count, and others stand behind these
    extend: Callable[[Memory | None, jax.Array], tuple[jax.Array, Memory]]
    step: Callable[[Memory], tuple[jax.Array, Memory]]  # of one token of each row


class LinearAttention(nnx.Module):
    """Gated delta rule [B, t, D] -> [B, t, D], and its cache: a `Memory`."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer):
        self.layout = layout
        self.q = Einsum("attention.q", "BTD,DIE->BTIE", cfg, layout, initializer)
        self.k = Einsum("attention.k", "BTD,DIE->BTIE", cfg, layout, initializer)
        self.v = Einsum("attention.v", "BTD,DJM->BTJM", cfg, layout, initializer)
        self.gate = Einsum("attention.gate", "BTD,DJM->BTJM", cfg, layout, initializer)
        self.beta = Einsum("attention.beta", "BTD,DJ->BTJ", cfg, layout, initializer)
        self.decay = Einsum("attention.decay", "BTD,DJ->BTJ", cfg, layout, initializer)
        self.o = Einsum("attention.o", "BTJM,JMD->BtD", cfg, layout, initializer)
        filters = (Filter(dim_names, cfg, layout, initializer) for dim_names in DIM_NAMES[:3])
        self.q_filter, self.k_filter, self.v_filter = filters
        self.rate = Decay("BTJ", cfg, layout, initializer)
        self.out_norm = RMSNorm("BTJM", cfg, layout)

    def __call__(self, x, positions, rope, mix, dropout_key):
        """[B, t, D] -> ([B, t, D], the cache of the layer, a `Memory`); `positions` and `rope` are not used."""
        x = self.layout.gather_tokens(x)
        beta = jax.nn.sigmoid(self.beta(x, dropout_key).astype(jnp.float32))
        decay = self.rate(self.decay(x, dropout_key))
        projected = *(project(x, dropout_key) for project in (self.q, self.k, self.v)), decay, beta
        ways: Any = (partial(way, *projected) for way in (self._run_rows, self._extend, self._step))
        out, cache = mix.recur(Recurrence(*ways))
        gate = jax.nn.silu(self.gate(x, dropout_key).astype(jnp.float32))
        out = self.out_norm(out.astype(x.dtype)).astype(jnp.float32) * gate
        return self.o(out.astype(x.dtype), dropout_key), cache

    def _run_rows(self, *arrays: Any) -> jax.Array:
        *inputs, decay, beta, segments = arrays
        # On each device apart: XLA of jaxlib 0.10.2 would split the slices in here, and fail, beside experts on cp, tp.
        rows = self.layout.activation("BS")
        runs = stage_shard_map(number_runs, (rows,), rows, self.layout.stages_around)(reshard(segments, rows))
        filtered = [each(x, runs) for each, x in zip(self._filters, inputs, strict=True)]
        return self._map_devices(run_shard, DIM_NAMES, "BS", results=("BTJM",))(*filtered, decay, beta, runs)

    def _extend(self, *arrays: Any) -> tuple[jax.Array, Memory]:
        *inputs, decay, beta, memory, count = arrays
        length, num_before = decay.shape[1], self.q_filter.size - 1
        one_run = jnp.zeros_like(count)[:, None] + jnp.zeros(num_before + length, jnp.int32)
        # The last Z - 1 inputs of each filter stand before the new ones.
        before = (
            [x[:, :1] * jnp.zeros((1, num_before, 1, 1), x.dtype) for x in inputs] if memory is None else memory.inputs
        )
        windows = [jnp.concatenate([old, new], 1) for old, new in zip(before, inputs, strict=True)]
        filtered = [each(x, one_run)[:, num_before:] for each, x in zip(self._filters, windows, strict=True)]
        # A token that does not count leaves the memory as it is: nothing fades, and nothing is written.
        counts = (jnp.arange(length) < count[:, None])[..., None]
        decay, beta = jnp.where(counts, decay, 0), jnp.where(counts, beta, 0)
        runs = one_run[:, num_before:]
        if memory is None:
            out, state = self._map_devices(run_chunks, WHOLE_ROWS, "BS")(*filtered, decay, beta, runs)
        else:
            extend = self._map_devices(run_chunks, WHOLE_ROWS, "BS", "BJEM")
            out, state = extend(*filtered, decay, beta, runs, memory.state)
        index = count[:, None] + jnp.arange(num_before)
        last = (self._take_tokens(x, index, dim_names) for x, dim_names in zip(windows, DIM_NAMES[:3], strict=True))
        return out, Memory(tuple(last), state)

    def _take_tokens(self, x: jax.Array, index: jax.Array, dim_names: str) -> jax.Array:
        """Return the tokens of rows [B, T, I, E] at the places [B, n]."""
        spec = self.layout.activation(dim_names)

        def take(x, index):
            return jnp.take_along_axis(x, index[:, :, None, None], axis=1)

        return jax.shard_map(take, in_specs=(spec, jax.P(spec[0], None)), out_specs=spec)(x, index)

    def _step(self, *arrays: Any) -> tuple[jax.Array, Memory]:
        *inputs, decay, beta, memory = arrays
        # The last Z - 1 inputs of each filter and the new one: the filter takes all Z, and the oldest is dropped.
        windows = [jnp.concatenate([old, new], 1) for old, new in zip(memory.inputs, inputs, strict=True)]
        filtered = [each.filter_latest(x) for each, x in zip(self._filters, windows, strict=True)]
        out, state = self._map_devices(step, WHOLE_ROWS, "BJEM")(*filtered, decay, beta, memory.state)
        return out, Memory(tuple(x[:, 1:] for x in windows), state)

    @property
    def _filters(self) -> tuple["Filter", ...]:
        return self.q_filter, self.k_filter, self.v_filter

    def _map_devices(
        self, function: Callable, first: tuple[str, ...], *last: str, results: tuple[str, ...] = ("BTJM", "BJEM")
    ) -> Callable:
        """Return a function of this file for arrays split over devices, which it lays out by `first` and `last`."""
        in_specs = tuple(map(self.layout.activation, (*first, *last)))
        out_specs: Any = tuple(map(self.layout.activation, results))
        out_specs = out_specs if len(results) > 1 else out_specs[0]
        mapped = stage_shard_map(function, in_specs, out_specs, self.layout.stages_around)
        return lambda *arrays: mapped(*map(reshard, arrays, in_specs))


class Filter(nnx.Module):
    """Causal convolution of each channel of [B, T, I, E] or [B, T, J, M] with Z numbers of its own, then SiLU."""

    def __init__(self, dim_names: str, cfg: Model, layout: Layout, initializer: Initializer):
        channels = dim_names[2:]
        self.equation, self.layout = Equation(f"{dim_names}oZ,{channels}oZ->{dim_names}oZ"), layout
        self.token_equation = Equation(f"{dim_names},{channels}->{dim_names}")
        self.size = cfg.dims["Z"]
        shape = [cfg.dims[dim_name] for dim_name in self.equation.w]
        self.w = nnx.Param(initializer.normal(shape, layout.param, self.size**-0.5), equation=self.equation)

    def __call__(self, x: jax.Array, runs: jax.Array) -> jax.Array:
        """Filter rows: tokens of other runs [B, S], and those before the row, count as 0.

        It is a sum over how far back a token lies, of x moved on by so many tokens, times the weight of this distance:

            back 0    a b c d        weight Z - 1
                 1    - a b c               Z - 2        -: 0
                 2    - - a b               Z - 3
        """
        spec, weights = self.layout.activation(self.token_equation.y), self._weights()
        in_specs, out_specs = (spec, self.layout.activation("BS")), (spec,) * self.size
        moved = stage_shard_map(partial(move_on, self.size), in_specs, out_specs, self.layout.stages_around)(x, runs)
        total: Any = 0
        for back, earlier in enumerate(moved):
            total += self._times(earlier, weights[self.size - 1 - back])
        return jax.nn.silu(total).astype(x.dtype)

    def filter_latest(self, x: jax.Array) -> jax.Array:
        """Filter the last of Z tokens: [B, Z, I, E] -> [B, 1, I, E]."""
        total: Any = 0
        for index, weight in enumerate(self._weights()):
            total += self._times(x[:, index : index + 1], weight)
        return jax.nn.silu(total).astype(x.dtype)

    def _weights(self) -> list[jax.Array]:
        w = self.layout.gather(self.w[...], self.equation)
        return [w[..., 0, index] for index in range(self.size)]

    def _times(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        spec = self.layout.activation(self.token_equation.y)
        return jnp.einsum(self.token_equation.text, x, weight, out_sharding=spec)


class Decay(nnx.Module):
    """Logarithm of the share of the memory that stays: -exp(log_rate) * softplus(x + shift), of [B, T, J], float32."""

    def __init__(self, dim_names: str, cfg: Model, layout: Layout, initializer: Initializer):
        self.equation, self.layout = Equation(f"{dim_names},{dim_names[2:]}->{dim_names}"), layout
        self.shift = Bias(dim_names, cfg, layout)
        shape = [cfg.dims[dim_name] for dim_name in dim_names[2:]]
        rates = initializer.uniform(shape, 0.01, MAX_RATE)
        self.log_rate = nnx.Param(jnp.log(rates).astype(layout.param), equation=self.equation)
        steps = jnp.exp(initializer.uniform(shape, jnp.log(SLOWEST), jnp.log(FASTEST)))
        self.shift.b.set_value((steps + jnp.log(-jnp.expm1(-steps))).astype(layout.param))  # softplus of it is a step

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, J] -> [B, T, J] float32."""
        rate = self.layout.gather(jnp.exp(self.log_rate[...].astype(jnp.float32)), self.equation)
        steps = jax.nn.softplus(self.shift(x.astype(jnp.float32)))
        return -jnp.einsum(self.equation.text, steps, rate, out_sharding=self.layout.activation(self.equation.y))
