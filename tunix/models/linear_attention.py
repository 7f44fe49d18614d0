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
from jax.sharding import reshard

from tunix.config import Model
from tunix.models.delta_rule import number_runs, run_chunks, step
from tunix.models.draws import Draws
from tunix.models.layers import Bias, Einsum
from tunix.models.norms import RMSNorm
from tunix.sharding.equations import Equation
from tunix.sharding.layout import Layout
from tunix.sharding.stages import stage_shard_map

# Queries, keys, values, decays and betas of whole sequences: S are all their tokens, which no axis splits.
LETTERS = ("BSIE", "BSIE", "BSJM", "BSJ", "BSJ")
SLOWEST, FASTEST = 1e-3, 1e-1  # time steps of the first weights (arXiv:2312.00752)
LARGEST_RATE = 16.0


class Memory(NamedTuple):
    """Everything that tokens leave for later ones. It has no slots: the first tokens fade, and none is thrown out."""

    inputs: tuple[jax.Array, ...]  # of the filters of queries, keys, values: [B, Z - 1, I, E], ..., [B, Z - 1, J, M]
    state: jax.Array  # of the delta rule, [B, J, E, M] float32


class Recurrence(NamedTuple):
    """Ways from the projections of tokens to results [B, T, J, M] and the memory behind the last token."""

    run_rows: Callable[[jax.Array], tuple[jax.Array, Memory]]  # of whole rows, with their segments [B, T]
    step: Callable[[Memory], tuple[jax.Array, Memory]]  # of one token of each row


class LinearAttention(nnx.Module):
    """Gated delta rule [B, t, D] -> [B, t, D], and its cache: a `Memory`."""

    def __init__(self, cfg: Model, layout: Layout, draws: Draws):
        self.layout = layout
        self.q = Einsum("attention.q", "BTD,DIE->BTIE", cfg, layout, draws)
        self.k = Einsum("attention.k", "BTD,DIE->BTIE", cfg, layout, draws)
        self.v = Einsum("attention.v", "BTD,DJM->BTJM", cfg, layout, draws)
        self.gate = Einsum("attention.gate", "BTD,DJM->BTJM", cfg, layout, draws)
        self.beta = Einsum("attention.beta", "BTD,DJ->BTJ", cfg, layout, draws)
        self.decay = Einsum("attention.decay", "BTD,DJ->BTJ", cfg, layout, draws)
        self.o = Einsum("attention.o", "BTJM,JMD->BtD", cfg, layout, draws)
        self.q_filter, self.k_filter, self.v_filter = (Filter(letters, cfg, layout, draws) for letters in LETTERS[:3])
        self.rate = Decay("BTJ", cfg, layout, draws)
        self.out_norm = RMSNorm("BTJM", cfg, layout)

    def __call__(self, x, positions, rope, mix, noise):
        x = self.layout.enter_branch(x)
        beta = jax.nn.sigmoid(self.beta(x, noise).astype(jnp.float32))
        projected = self.q(x, noise), self.k(x, noise), self.v(x, noise), self.rate(self.decay(x, noise)), beta
        arrays = [reshard(x, self.layout.activation(letters)) for x, letters in zip(projected, LETTERS, strict=True)]
        out, cache = mix.recur(Recurrence(partial(self._run_rows, *arrays), partial(self._step, *arrays)))
        out = reshard(out, self.layout.activation("BTJM"))
        gate = jax.nn.silu(self.gate(x, noise).astype(jnp.float32))
        out = self.out_norm(out.astype(x.dtype)).astype(jnp.float32) * gate
        return self.o(out.astype(x.dtype), noise), cache

    def _run_rows(self, *arrays: Any) -> tuple[jax.Array, Memory]:
        *inputs, decay, beta, segments = arrays
        runs = reshard(number_runs(segments), self.layout.activation("BS"))
        filtered = [each(x, runs) for each, x in zip(self._filters, inputs, strict=True)]
        out, state = self._map_devices(run_chunks, "BS")(*filtered, decay, beta, runs)
        last = (each.last_inputs(x, runs) for each, x in zip(self._filters, inputs, strict=True))
        return out, Memory(tuple(last), state)

    def _step(self, *arrays: Any) -> tuple[jax.Array, Memory]:
        *inputs, decay, beta, memory = arrays
        # The last Z - 1 inputs of each filter and the new one: the filter takes all Z, and the oldest is dropped.
        windows = [jnp.concatenate([old, new], 1) for old, new in zip(memory.inputs, inputs, strict=True)]
        filtered = [each.filter_newest(x) for each, x in zip(self._filters, windows, strict=True)]
        out, state = self._map_devices(step, "BJEM")(*filtered, decay, beta, memory.state)
        return out, Memory(tuple(x[:, 1:] for x in windows), state)

    @property
    def _filters(self) -> tuple["Filter", ...]:
        return self.q_filter, self.k_filter, self.v_filter

    def _map_devices(self, function: Callable, last: str) -> Callable:
        """Return a function of delta_rule.py for arrays split over devices; its last one has the letters `last`."""
        in_specs = tuple(self.layout.activation(letters) for letters in (*LETTERS, last))
        out_specs = self.layout.activation("BSJM"), self.layout.activation("BJEM")
        return stage_shard_map(function, in_specs, out_specs, self.layout.stages_around)


class Filter(nnx.Module):
    """Causal convolution of each channel of [B, T, I, E] or [B, T, J, M] with Z numbers of its own, then SiLU."""

    def __init__(self, letters: str, cfg: Model, layout: Layout, draws: Draws):
        channels = letters[2:]
        self.equation, self.layout = Equation(f"{letters}oZ,{channels}oZ->{letters}oZ"), layout
        self.token_equation = Equation(f"{letters},{channels}->{letters}")
        self.size = cfg.dims["Z"]
        shape = [cfg.dims[letter] for letter in self.equation.w]
        self.w = nnx.Param(draws.normal(shape, layout.param, self.size**-0.5), equation=self.equation)

    def __call__(self, x: jax.Array, runs: jax.Array) -> jax.Array:
        """Filter rows: tokens of other runs [B, T], and those before the row, count as 0.

        It is a sum over how far back a token lies, of x moved on by so many tokens, times the weight of this distance:

            back 0    a b c d        weight Z - 1
                 1    - a b c               Z - 2        -: 0
                 2    - - a b               Z - 3
        """
        length = x.shape[1]
        weights = self._weights()
        total: Any = 0
        for back in range(min(self.size, length)):
            earlier = x[:, : length - back] * (runs[:, back:] == runs[:, : length - back])[..., None, None]
            pads = [(0, 0), (back, 0), (0, 0), (0, 0)]
            total += self._times(jnp.pad(earlier, pads), weights[self.size - 1 - back])
        return jax.nn.silu(total).astype(x.dtype)

    def filter_newest(self, x: jax.Array) -> jax.Array:
        """Filter the last of Z tokens: [B, Z, I, E] -> [B, 1, I, E]."""
        total: Any = 0
        for place, weight in enumerate(self._weights()):
            total += self._times(x[:, place : place + 1], weight)
        return jax.nn.silu(total).astype(x.dtype)

    def last_inputs(self, x: jax.Array, runs: jax.Array) -> jax.Array:
        """Return the last Z - 1 tokens of rows [B, T, I, E], with 0 in the place of those of earlier runs."""
        last_run = x * (runs == runs[:, -1:])[..., None, None]
        missing = max(0, self.size - 1 - x.shape[1])  # in rows of fewer tokens: 0 stands before them
        return jnp.pad(last_run, [(0, 0), (missing, 0), (0, 0), (0, 0)])[:, missing + x.shape[1] - self.size + 1 :]

    def _weights(self) -> list[jax.Array]:
        w = self.layout.gather(self.w[...], self.equation)
        return [w[..., 0, place] for place in range(self.size)]

    def _times(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        spec = self.layout.activation(self.token_equation.y)
        return jnp.einsum(self.token_equation.text, x, weight, out_sharding=spec)


class Decay(nnx.Module):
    """Logarithm of the share of the memory that stays: -exp(log_rate) * softplus(x + shift), of [B, T, J], float32."""

    def __init__(self, letters: str, cfg: Model, layout: Layout, draws: Draws):
        self.equation, self.layout = Equation(f"{letters},{letters[2:]}->{letters}"), layout
        self.shift = Bias(letters, cfg, layout)
        shape = [cfg.dims[letter] for letter in letters[2:]]
        rates = draws.uniform(shape, 0.01, LARGEST_RATE)
        self.log_rate = nnx.Param(jnp.log(rates).astype(layout.param), equation=self.equation)
        log_steps = draws.uniform(shape, jnp.log(SLOWEST), jnp.log(FASTEST))
        steps = jnp.exp(log_steps)
        self.shift.b.set_value((steps + jnp.log(-jnp.expm1(-steps))).astype(layout.param))  # softplus of it is a step

    def __call__(self, x: jax.Array) -> jax.Array:
        rate = self.layout.gather(jnp.exp(self.log_rate[...].astype(jnp.float32)), self.equation)
        steps = jax.nn.softplus(self.shift(x.astype(jnp.float32)))
        return -jnp.einsum(self.equation.text, steps, rate, out_sharding=self.layout.activation(self.equation.y))
