"""A mixture of experts: a router sends each token to a few gated MLPs, whose results are added up with its weights.

    x [B, t, D] --- experts.py ---> k experts of each token, and their weights, [B, t, k]
        |
        |   an exchange (expert_parallel.py) brings a row of each token to each of its experts' devices; there:
        |   rows, sorted by expert            | expert 0 | expert 1 | ... | of no expert of this device
        |   grouped products                  each expert's weights meet its rows
        |   rows in their old order
        |   the exchange adds up the results of a token's experts, with the weights, and brings them back
        v
    y [B, t, D]

No token is dropped, unless `model.expert_buffer_factor` says so: a device has room for every choice, however uneven the
loads are.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard

from tunix.base.dotted_path import import_object
from tunix.config import Model
from tunix.config.layers import ExpertsMlp
from tunix.models.expert_parallel import LocalExperts, Tokens
from tunix.models.fused_experts import (
    HIDDEN,
    ExpertWeights,
    KernelConfig,
    blocks_in_use,
    compute_experts,
    count_capacity,
    sort_rows,
)
from tunix.models.layers import ACTIVATIONS, MLP, Bias, BlockSums, Initializer, Matrix, RMSNorm, Routing, identity
from tunix.models.lora import ExpertFactors
from tunix.models.matmul import grouped_product
from tunix.models.table import EXPERT_EXCHANGES, FUSED
from tunix.sharding.arrays import vary_alike
from tunix.sharding.layout import Layout, stage_shard_map
from tunix.sharding.table import Equation

SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}


def penalty_names(cfg: Model) -> tuple[str, ...]:
    """Return the names of the penalties that a layer's router gives."""
    weights = {}
    if isinstance(cfg.mlp, ExpertsMlp):
        weights = {"balance_loss": cfg.mlp.balance_loss, "router_z_loss": cfg.mlp.z_loss}
    return tuple(name for name, weight in weights.items() if weight)


class Routes(NamedTuple):
    """Experts of each token, and the weights of their results."""

    experts: jax.Array  # [B, t, k] int32
    weights: jax.Array  # [B, t, k] float32


class Router(Matrix):
    """Scores of experts for a token, and the choice of the best: [B, t, D] -> `Routes`, and sums for the loss."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer):
        # Each device has the scores of all experts, of its own tokens.
        super().__init__("BtD,DY->BtY", cfg, layout, initializer)
        assert isinstance(cfg.mlp, ExpertsMlp)
        self.mlp = cfg.mlp
        self.logits_bias = Bias("BtY", cfg, layout) if self.mlp.biases else identity
        # Beside an MLP (Gemma 4) the router takes the residual stream, so it has a norm and scales of its own.
        is_parallel = self.mlp.beside_mlp
        self.norm = RMSNorm("BtD", cfg, layout) if is_parallel else identity
        self.input_scale = cfg.embed_dim**-0.5 if is_parallel else 1.0
        ones = jnp.ones(self.mlp.num_experts, layout.param)
        self.expert_scales = nnx.Param(ones, equation=Equation("Bt,Y->BtY")) if is_parallel else None
        if self.mlp.bias_rate is not None:
            zeros = jnp.zeros(self.mlp.num_experts)  # float32: a step adds less than 16 bits resolve
            self.bias = nnx.Param(zeros, equation=Equation("BtY,Y->BtY"))

    def __call__(self, x: jax.Array, is_text: jax.Array | None = None) -> tuple[Routes, BlockSums]:
        """[B, t, D] -> the experts of each token and their weights, both [B, t, k], and sums for the loss.

        `is_text` [B, T] bool is False of padding: its tokens are all alike, and would be most of the load of a few
        experts. The sums leave it out.
        """
        x = self.norm(x)
        x = x if self.input_scale == 1 else x * jnp.asarray(self.input_scale, x.dtype)
        logits = self.multiply(x).astype(jnp.float32)
        logits = self.logits_bias(logits)
        scores = SCORES[self.mlp.scores](logits)
        experts = self._select(jax.lax.stop_gradient(scores))
        # A comparison in place of a lookup: it fuses, and its gradient is a sum in a fixed order.
        is_chosen = experts[..., None] == jnp.arange(self.mlp.num_experts)  # [B, t, k, X]
        weights = jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0), -1)
        if self.mlp.normalized:
            weights = weights / jnp.sum(weights, -1, keepdims=True)
        if self.expert_scales is not None:
            scales = self.layout.gather(self.expert_scales[...], self.expert_scales.equation)
            spec = self.layout.activation("Bt")
            weights = weights * jnp.einsum("BtkY,Y->Btk", is_chosen.astype(scales.dtype), scales, out_sharding=spec)
        choices = jnp.sum(is_chosen.astype(jnp.float32), 2)  # [B, t, X]: 1 where the token takes the expert
        counts = jnp.ones_like(scores[..., 0])
        if is_text is not None:
            counts = counts * reshard(is_text, self.layout.activation("Bt"))
        return Routes(experts, weights * self.mlp.scale), self._sums(logits, scores, choices, counts)

    def _select(self, scores: jax.Array) -> jax.Array:
        """Return the experts [B, t, k] int32 with the best scores [B, t, X], within the best groups.

        Each device chooses for its own tokens. Outside of a `shard_map`, XLA gathers the scores of all devices for a
        `top_k`.
        """
        if self.mlp.bias_rate is not None:  # the bias evens out loads: it counts for the choice, not for the weights
            scores = scores + jax.lax.stop_gradient(self.bias[...].astype(jnp.float32))
        spec = self.layout.activation("BtY")
        stand_in = lambda scores: scores[..., : self.mlp.experts_per_token].astype(jnp.int32)  # noqa: E731
        return stage_shard_map(self._select_on_device, spec, spec, self.layout.stages_around, stand_in)(scores)

    def _select_on_device(self, scores: jax.Array) -> jax.Array:
        """Return the best experts; with groups, those of the groups whose two best experts have the largest sums."""
        if self.mlp.num_groups > 1:
            grouped = scores.reshape(*scores.shape[:2], self.mlp.num_groups, -1)
            best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
            groups = jax.lax.top_k(best_two, self.mlp.groups_per_token)[1]
            is_best = jnp.any(groups[..., None] == jnp.arange(self.mlp.num_groups), 2)
            scores = jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(scores, self.mlp.experts_per_token)[1]

    def _sums(self, logits: jax.Array, scores: jax.Array, choices: jax.Array, counts: jax.Array) -> BlockSums:
        """Return the penalties of each sequence, and counts; the arguments are [B, t, X] float32, and `counts` [B, t],
        1 of a token that counts and 0 of padding.

        The balance loss of a sequence is the sum over experts of (share of choices) x (mean share of scores) x X. It is
        1 where all loads are equal. It is a sum over sequences, so microbatches and meshes do not change it.
        """
        mlp, penalties = self.mlp, {}
        probs = scores / jnp.sum(scores, -1, keepdims=True)
        choices = choices * counts[..., None]

        def mean(x: jax.Array) -> jax.Array:
            """[B, t, n] -> [B, n]: means over the tokens of each sequence that count."""
            return jnp.sum(x * counts[..., None], 1) / jnp.maximum(jnp.sum(counts, 1), 1)[:, None]

        if mlp.balance_loss:
            loads = mean(choices) * (mlp.num_experts / mlp.experts_per_token)
            penalties["balance_loss"] = mlp.balance_loss * jnp.sum(loads * mean(probs), -1)
        if mlp.z_loss:
            squares = jax.nn.logsumexp(logits, -1) ** 2
            penalties["router_z_loss"] = mlp.z_loss * mean(squares[..., None])[:, 0]
        probs = jax.lax.stop_gradient(probs)
        entropy = -jnp.sum(jax.scipy.special.xlogy(probs, probs) * counts[..., None])
        return BlockSums(penalties, Routing(jnp.sum(choices, (0, 1)), jnp.sum(counts), entropy))


CLAMP, GAIN = 7.0, 1.702  # of the gate of GPT-OSS


def _clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return gate * jax.nn.sigmoid(GAIN * gate) * (up + 1)


# (rows times the gate's matrix, rows times the other one) -> what the third matrix multiplies; all are [rows, G].
GATES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    **{name: partial(lambda f, gate, up: f(gate) * up, activation) for name, activation in ACTIVATIONS.items()},
    "clamped_silu": _clamped,
}


class ExpertBias(nnx.Module):
    """A vector of each expert [X, G] or [X, D], added to the rows that its product gives; zero at first."""

    def __init__(self, dim_names: str, cfg: Model, layout: Layout):
        self.equation, self.layout = Equation(f"BTX{dim_names[1]},{dim_names}->BTX{dim_names[1]}"), layout
        shape = [cfg.dims[dim_name] for dim_name in dim_names]
        self.b = nnx.Param(jnp.zeros(shape, layout.param), equation=self.equation)

    def gathered(self) -> jax.Array:
        """Return the vectors [X, G] or [X, D], float32."""
        return self.layout.gather(self.b[...], self.equation)


class ExpertMatrix(Matrix):
    """A matrix of each expert, [X, D, G] or [X, G, D], with low-rank updates where `model.lora.targets` names it."""

    def __init__(self, name: str, equation: str, cfg: Model, layout: Layout, initializer: Initializer):
        super().__init__(equation, cfg, layout, initializer, cfg.lora.quantize_base)
        has_update = cfg.lora.rank and re.search(cfg.lora.targets, name)
        self.lora = ExpertFactors(self.equation, cfg, layout, initializer) if has_update else None


class Weights(NamedTuple):
    """Weights that the products of experts take, gathered: those of gate, up and down in this order."""

    matrices: list[jax.Array]
    biases: list[jax.Array]  # none, or one for each matrix
    factors: list[list[tuple[jax.Array, jax.Array]]]  # pairs of low-rank updates, of which each matrix may have none


class Experts(nnx.Module):
    """The experts of a layer behind their router, and a shared one beside them: [B, t, D] -> [B, t, D]."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer):
        assert isinstance(cfg.mlp, ExpertsMlp)
        self.layout, self.gated = layout, GATES[cfg.mlp.activation]
        self.weighs_inputs = cfg.mlp.weighted == "inputs"
        self.activation = cfg.mlp.activation
        self.hidden = partial(HIDDEN[cfg.mlp.weighted], self.gated)
        self.product, self.capacity = partial(grouped_product, kind=layout.expert_products), cfg.expert_buffer_factor
        self.router = Router(cfg, layout, initializer)
        self.expert_gate = ExpertMatrix("mlp.expert_gate", "BTXD,XDG->BTXG", cfg, layout, initializer)
        self.expert_up = ExpertMatrix("mlp.expert_up", "BTXD,XDG->BTXG", cfg, layout, initializer)
        self.expert_down = ExpertMatrix("mlp.expert_down", "BTXG,XGD->BTXD", cfg, layout, initializer)
        self.gate_bias, self.up_bias, self.down_bias = (
            ExpertBias(dim_names, cfg, layout) if cfg.mlp.biases else None for dim_names in ("XG", "XG", "XD")
        )
        self.shared = None if cfg.mlp.shared_dim is None else MLP(cfg, layout, initializer, "gated", width="U")
        self.shared_gate = Matrix("BtD,Do->Bto", cfg, layout, initializer) if cfg.mlp.shared_gate else None

    def __call__(self, x, dropout_key, routed=None, after=None, is_text=None) -> tuple[jax.Array, BlockSums]:
        """Return [B, t, D], and the sums of the router, which takes `routed` [B, t, D], or x where that is None.

        With `after` [B, t, D] given, fused kernels begin when it is computed; tokens travel before. The sums leave
        tokens out where `is_text` [B, T] is False.
        """
        with jax.named_scope("router"):
            routes, sums = self.router(x if routed is None else routed, is_text)
        with jax.named_scope("experts"):
            y, dropped = self._compute(x, routes, () if after is None else (after,))
        if self.capacity is not None:  # a bounded buffer: some choices may have found no room
            assert sums.routing is not None
            sums = sums._replace(routing=sums.routing._replace(dropped=dropped))
        if self.shared is not None:
            with jax.named_scope("shared_expert"):
                shared, _ = self.shared(x, dropout_key)
                if self.shared_gate is not None:  # a share of the result, for each token
                    share = jax.nn.sigmoid(self.shared_gate.multiply(x).astype(jnp.float32))
                    shared = (shared * share).astype(shared.dtype)
                y = y + shared
        return y, sums

    def _compute(self, x: jax.Array, routes: Routes, after: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """Return the sum over each token's experts of weight x result, [B, t, D], and the choices that were dropped."""
        layout, token_spec = self.layout, self.layout.activation("Bt")
        matrices = [self.expert_gate, self.expert_up, self.expert_down]
        biases = [part for part in (self.gate_bias, self.up_bias, self.down_bias) if part is not None]
        weights = Weights(
            [layout.as_local_input(part.gathered()) for part in matrices],
            [layout.as_local_input(part.gathered()) for part in biases],
            [[] if part.lora is None else part.lora.as_local_inputs() for part in matrices],
        )
        specs = jax.tree.map(lambda weight: jax.typeof(weight).sharding.spec, weights)
        width_axes = layout.product_axes(self.expert_down.equation)  # these devices have parts of the same experts
        assert layout.stream_axes in ((), width_axes), "the axes that split the stream split the width of experts"

        # Each device along `width_axes` has a part of the width of its experts, and so a part of the sum that their
        # last product is: all must compute the same tokens, and their results are added up.
        def compute_on_device(x, experts, probs, weights, after):
            if layout.stream_axes:  # and these devices have different tokens: each gathers those of all
                gather = partial(jax.lax.all_gather, axis_name=width_axes, axis=1, tiled=True)
                tokens, experts, probs = gather(x), gather(experts), gather(probs)
            else:
                # Here and not where a product meets it: so its gradient is summed over devices before it is repeated.
                tokens = jax.lax.pcast(x, width_axes, to="varying")
            shape = tokens.shape
            tokens = Tokens(*(each.reshape(-1, each.shape[-1]) for each in (tokens, experts, probs)))
            compute = partial(self._compute_rows, weights)
            fused = partial(self._compute_fused, weights) if layout.expert_products == FUSED else None
            num_local = len(weights.matrices[0])
            local = LocalExperts(
                num_local, layout.expert_axes, self.weighs_inputs, self.capacity, compute, fused, after
            )
            y, dropped = import_object(EXPERT_EXCHANGES[layout.expert_exchange].function)(tokens, local)
            dropped = _sum_over_devices(dropped, width_axes)
            if layout.stream_axes:
                y = y.reshape(shape).astype(x.dtype)
                return jax.lax.psum_scatter(y, width_axes, scatter_dimension=1, tiled=True), dropped
            return jax.lax.psum(y, width_axes).astype(x.dtype).reshape(shape), dropped

        def stand_in(x, *_):
            return x, jnp.zeros(())

        in_specs = token_spec, token_spec, token_spec, specs, (token_spec,) * len(after)
        out_specs = token_spec, jax.P()
        mapped = stage_shard_map(compute_on_device, in_specs, out_specs, layout.stages_around, stand_in)
        y, dropped = mapped(x, *routes, weights, after)
        return checkpoint_name(y, "product"), jax.lax.stop_gradient(dropped)

    def _compute_fused(
        self, weights: Weights, x: jax.Array, group: jax.Array, probs: jax.Array, mean_rows: int
    ) -> jax.Array:
        """Return the sums [n, D] of what this device's experts give for tokens [n, D], by fused kernels.

        `group` [n, k] are the numbers of the experts; the number behind the last expert is of no expert. `probs` [n, k]
        are the weights of the router. With equal loads there would be `mean_rows` rows.
        """
        (gate, up, down), biases = weights.matrices, weights.biases
        num_experts, (num_tokens, per_token) = len(gate), group.shape
        kernel_capacity = count_capacity(mean_rows, num_tokens * min(per_token, num_experts))
        kernel_config = KernelConfig(self.hidden, kernel_capacity, blocks_in_use(self.activation))
        y = compute_experts(
            x, probs, ExpertWeights(gate, up, down, *biases[:2]), sort_rows(group, num_experts), kernel_config
        )
        if not biases:
            return y
        # The bias of the last product, times the router's weights, is a product of its own: [n, X] times [X, D].
        is_chosen = group[..., None] == jnp.arange(num_experts)
        probs_of_experts = jnp.sum(jnp.where(is_chosen, probs[..., None], 0), 1).astype(x.dtype)
        width_axes = self.layout.product_axes(self.expert_down.equation)
        is_first = jax.lax.axis_index(width_axes) == 0 if width_axes else True
        probs_of_experts, bias = vary_alike(probs_of_experts, biases[2].astype(x.dtype))
        return y + probs_of_experts @ jnp.where(is_first, bias, 0)

    def _compute_rows(self, weights: Weights, rows: jax.Array, group: jax.Array, probs: jax.Array | None) -> jax.Array:
        """Return what this device's experts give for rows [R, D]: results [R, D], times their shares [R] if given.

        `group` [R] are the numbers of the experts; the number behind the last expert is of no expert, and gives 0.
        """
        num_experts = len(weights.matrices[0])
        # One sort brings the rows of each expert together: a grouped product then reads an expert's weights once for
        # all of its rows.
        order = jnp.argsort(group)
        sizes = jnp.bincount(group, length=num_experts + 1)[:num_experts].astype(jnp.int32)
        # Rows of no expert come last. Products leave their results undefined, which may be no numbers at all.
        has_expert = (jnp.arange(len(group)) < jnp.sum(sizes))[:, None]
        rows = jnp.where(has_expert, rows.at[order].get(unique_indices=True), 0)
        add_biases = self._bias_adders(weights.biases, group[order], probs if probs is None else probs[order])

        def multiply(rows: jax.Array, which: int) -> jax.Array:
            y = self.product(rows, weights.matrices[which], sizes)
            for a, b in weights.factors[which]:
                y = y + self.product(self.product(rows, a, sizes), b, sizes)
            return y

        gates, ups = (multiply(rows, which) for which in (0, 1))
        hidden = self.gated(add_biases[0](gates), add_biases[1](ups))
        if probs is not None:
            # The last product is linear, and its operand is narrower than its result: this is one pass with the gate.
            probs = jnp.where(has_expert, probs[order][:, None], 0)
            hidden = (hidden * probs).astype(hidden.dtype)
        results = jnp.where(has_expert, add_biases[2](multiply(hidden, 2)), 0)
        return jnp.zeros_like(results).at[order].set(results, unique_indices=True)  # in the old order of rows

    def _bias_adders(
        self, biases: list[jax.Array], group: jax.Array, probs: jax.Array | None
    ) -> list[Callable[[jax.Array], jax.Array]]:
        """Return for each of the three products a function that adds its bias to rows of these groups [rows].

        The last bias is multiplied by the shares [rows] of the results, if given. Of the last product each device along
        the axes that split the experts' width has a part of the sum: the first one adds the bias.
        """
        if not biases:
            return [identity] * 3
        *inner, outer = (bias.at[group].get(mode="fill", fill_value=0) for bias in biases)
        width_axes = self.layout.product_axes(self.expert_down.equation)
        if probs is not None:
            outer = outer * probs[:, None]
        is_first = jax.lax.axis_index(width_axes) == 0 if width_axes else True
        biases = [*inner, jnp.where(is_first, outer, 0)]
        return [partial(lambda bias, rows: rows + bias.astype(rows.dtype), bias) for bias in biases]


def _sum_over_devices(count: jax.Array, copied_over: tuple[str, ...]) -> jax.Array:
    """Return the sum of a count over all devices whose counts differ; devices along `copied_over` have equal ones."""
    # JAX's types say along which axes the count may differ. Where these include axes of copies, each count is added
    # once for each copy, and the sum is divided by their number.
    axes = jax.typeof(count).manual_axis_type.varying
    if not axes:
        return count
    copies = jax.lax.axis_size(tuple(axes & {*copied_over}))
    return jax.lax.psum(count, tuple(sorted(axes))) / copies
