"""The decoder: embedding, runs of equal blocks, final norm. The config says of which parts a block is made."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard

from tunix.config import Model
from tunix.config.model import Run
from tunix.models.attention import attend
from tunix.models.block_sums import (
    NO_SUMS,
    BlockSums,
    Routing,
    join_layers,
    join_pattern,
    join_runs,
    join_stages,
)
from tunix.models.exchanges import choose_exchange
from tunix.models.experts import Experts, penalty_names
from tunix.models.latent import Attend, Heads, LatentAttention
from tunix.models.layers import (
    MLP,
    NORMS,
    Bias,
    Einsum,
    Embedding,
    LearnedPositions,
    divide_by_rms,
    unchanged,
)
from tunix.models.linear_attention import LinearAttention, Recurrence
from tunix.models.noise import Noise
from tunix.models.pipeline import run_stages
from tunix.models.positions import Rope, apply_rope, grow_queries, layer_rope
from tunix.models.prefetch import scan_ahead
from tunix.models.remat import KEEP_ALL, Remat, checkpoint_block, join_blocks, scan_blocks
from tunix.models.seen import cut_chunks, seen_in_row
from tunix.sharding.layout import Layout


class Mix(NamedTuple):
    """Ways in which tokens of a layer act on one another; the rest of the model works on each token alone.

    A layer takes the way of its kind. Both return the results of the tokens, and what the caller keeps.
    """

    # (queries [B, T, N, H], what tokens leave for later ones, the way from there to keys and values)
    attend: Callable[[jax.Array, tuple[jax.Array, ...], Heads], tuple[Any, Any]]
    recur: Callable[[Recurrence], tuple[jax.Array, Any]]


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245): [B, t, D] -> [B, t, D], and what `mix` keeps.

    With `model.attention_gate` each token says which numbers of its result count.
    """

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        self.cfg, self.layout, self.scale = cfg, layout, cfg.query_scale**-0.5
        self.q = Einsum("attention.q", "BTD,DNH->BTNH", cfg, layout, rngs)
        self.k = Einsum("attention.k", "BTD,DKH->BTKH", cfg, layout, rngs)
        self.v = Einsum("attention.v", "BTD,DKH->BTKH", cfg, layout, rngs)
        self.o = Einsum("attention.o", "BTNH,NHD->BtD", cfg, layout, rngs)
        self.q_norm, self.k_norm = (self._norm(letters, cfg, layout) for letters in ("BTNH", "BTKH"))
        self.sinks = Bias("BTN", cfg, layout) if cfg.attention_sinks else None
        has_gate = cfg.attention_gate
        self.gate = Einsum("attention.gate", "BTD,DNH->BTNH", cfg, layout, rngs) if has_gate else None

    def _norm(self, letters: str, cfg: Model, layout: Layout) -> Any:
        """Norm of queries or keys, over each head or over all heads together."""
        if cfg.qk_norm in ("none", "after_rotation"):
            return unchanged
        dims = {"per_head": "H", "all_heads": letters[-2:]}[cfg.qk_norm]
        return NORMS[cfg.norm](letters, cfg, layout, dims)

    def __call__(self, x, positions, rope, mix, noise):
        x = self.layout.enter_branch(x)
        q, k = self.q_norm(self.q(x, noise)), self.k_norm(self.k(x, noise))
        if self.cfg.positions == "rope":
            q, k = (apply_rope(x, positions, rope, self.cfg.rotated_pairs) for x in (q, k))
        if self.cfg.qk_norm == "after_rotation":
            q, k = (jnp.where(rope.rotates, divide_by_rms(x, self.cfg.norm_eps), x) for x in (q, k))
        if self.cfg.query_growth is not None:
            q = grow_queries(q, positions, rope, self.cfg.query_growth)
        out, kept = mix.attend(q * self.scale, (k, self.v(x, noise)), Heads(_as_they_are, self._look_back))
        out = out if self.sinks is None else self._pour(*out)
        if self.gate is not None:
            out = out * jax.nn.sigmoid(self.gate(x, noise))
        return self.o(out, noise), kept

    def _look_back(self, q: jax.Array, kept: tuple[jax.Array, ...], attend: Attend) -> Any:
        return attend(q, *kept, self.layout)

    def _pour(self, out: jax.Array, log_sums: jax.Array) -> jax.Array:
        """Return the results [B, T, N, H] as if each head's softmax had one more score, the sink, without a value.

        sum(exp(s) v) / (sum(exp(s)) + exp(sink)) = result * sigmoid(log(sum(exp(s))) - sink)
        """
        assert self.sinks is not None
        share = jax.nn.sigmoid(-self.sinks(-log_sums))
        return out * share[..., None].astype(out.dtype)


def _as_they_are(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return k, v


MIXERS: dict[str, Callable[[Model, Layout, nnx.Rngs], nnx.Module]] = {
    "attention": Attention,
    "latent": LatentAttention,
    "linear": LinearAttention,
}
MLPS: dict[str, Callable[[Model, Layout, nnx.Rngs], nnx.Module]] = {
    "gated": partial(MLP, kind="gated"),
    "plain": partial(MLP, kind="plain"),
    "experts": Experts,
}


class Block(nnx.Module):
    """Attention and MLP around the residual stream, with norms before them, after them, or both.

    `mixer` is a key of `MIXERS`, `mlp` one of `MLPS`.
    """

    def __init__(self, cfg: Model, layout: Layout, mixer: str, mlp: str, rngs: nnx.Rngs):
        def norm(wanted: bool) -> Any:
            return NORMS[cfg.norm]("BtD", cfg, layout) if wanted else unchanged

        self.multiplier = cfg.residual_multiplier
        before, after = cfg.norm_placement != "post", cfg.norm_placement != "pre"
        self.attention = MIXERS[mixer](cfg, layout, rngs)
        self.mlp = MLPS[mlp](cfg, layout, rngs)
        self.pre_attention, self.post_attention = norm(before), norm(after)
        self.pre_mlp, self.post_mlp = norm(before), norm(after)

    def __call__(self, x, positions, rope, mix: Mix, noise: Noise | None = None) -> tuple[jax.Array, Any, BlockSums]:
        """Return [B, t, D], what `mix` keeps, and numbers for the loss."""
        with jax.named_scope("attention"):
            h, kept = self.attention(self.pre_attention(x), positions, rope, mix, noise)
            x = checkpoint_name(x + self._scaled(self.post_attention(h)), "residual")
        with jax.named_scope("mlp"):
            h, sums = self.mlp(self.pre_mlp(x), noise)
            return x + self._scaled(self.post_mlp(h)), kept, sums

    def _scaled(self, h: jax.Array) -> jax.Array:
        return h if self.multiplier == 1 else h * jnp.asarray(self.multiplier, h.dtype)


class Stack(NamedTuple):
    """Equal blocks. Their parameters are one tree, in which each array has a first dimension L."""

    name: str  # of the tree in the module
    layers: tuple[int, ...]  # numbers of its layers in the whole model
    mixer: str  # key of `MIXERS`
    mlp: str  # key of `MLPS`


class Layer(NamedTuple):
    """Values in which a layer differs from the others of its stack; with a first dimension L, those of all layers."""

    number: Any  # int32 scalar, in the whole model
    window: Any  # int32 scalar: a query sees its own token and the `window - 1` before it
    rope: Rope | None  # None with learned positions


class Rows(NamedTuple):
    """Arrays [B, ...] that a block takes of sequences. In a pipeline they travel from stage to stage together."""

    x: Any  # [B, t, D], the residual stream; a block changes it and nothing else
    positions: Any  # [B, T] int32
    beside: Any  # what the mix needs of the sequences: a tree of arrays, or None
    # On stages alone:
    penalties: Any = None  # {name: [B]}, those of the layers so far
    numbers: jax.Array | None = None  # [B] int32 in the microbatch: dropout draws by them


class Transformer(nnx.Module):
    """Tokens to logits. Equal blocks are a stack, and stacks may take turns. So 80 layers are as short a program as 8:

        one stack           blocks 0 1 2 3 ...                          a scan over layers
        stacks take turns   dense_blocks 0 2 4 ..., blocks 1 3 5 ...    a scan over pairs of layers
        one after another   dense_blocks 0 1, blocks 2 3 4 ...          two scans

    `remat` says what blocks keep for their backward pass. `parts_per_stage` matters where the layout splits the layers
    into stages: it is the number of parts of a batch that wait at each stage (see `run_stages`). With `prefetch` layers
    gather their weights ahead; they must not be gathered yet.
    """

    def __init__(
        self,
        cfg: Model,
        layout: Layout,
        rngs: nnx.Rngs,
        remat: Remat = KEEP_ALL,
        parts_per_stage: int | None = None,
        prefetch: bool = False,
    ):
        self.cfg, self.layout, self.remat, self.parts_per_stage = cfg, layout, remat, parts_per_stage
        self.prefetch = prefetch
        self.block_layout = layout.inside_stage()
        self.embedding = Embedding(cfg, layout, rngs)
        self.positions = LearnedPositions(cfg, layout, rngs) if cfg.positions == "learned" else None
        for stack in self.stacks:
            make = partial(Block, cfg, self.block_layout, stack.mixer, stack.mlp)
            setattr(self, stack.name, _stacked(make, len(stack.layers), rngs))
        self.final_norm = NORMS[cfg.norm]("BtD", cfg, layout)
        self.head = None if cfg.tied_head else Embedding(cfg, layout, rngs)

    @property
    def _rotates(self) -> bool:
        return self.cfg.positions == "rope"

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks in the order of their first layers."""
        attention = "attention" if self.cfg.latent is None else "latent"
        stacks = []
        for name, layers in self.cfg.stacks.items():
            mixer = "linear" if self.cfg.is_linear(layers[0]) else attention
            mlp = "gated" if name == "dense_blocks" else self.cfg.mlp.kind
            stacks.append(Stack(name, layers, mixer, mlp))
        return tuple(stacks)

    def __call__(self, tokens, positions=None, segment_ids=None) -> jax.Array:
        """[B, T] int32 -> logits [B, T, V] float32. Without the last two, each row is one document."""
        tables = self.tables()
        return self.logits(tables, self.hidden(tables, tokens, positions, segment_ids)[0])

    def tables(self) -> tuple[jax.Array, jax.Array]:
        """The tables of both ends, gathered: [V, D] to look tokens up in and [V, D] to take logits with."""
        table = self.embedding.gathered()
        return table, table if self.head is None else self.head.gathered()

    def hidden(self, tables, tokens, positions=None, segment_ids=None, seed=None) -> tuple[jax.Array, BlockSums]:
        """[B, T] int32 -> [B, T, D], the result of the final norm, and the numbers of all blocks.

        `seed`, an int32 scalar, seeds the dropout of training.
        """
        if positions is None:
            positions = jnp.zeros_like(tokens) + jnp.arange(tokens.shape[1])
        if segment_ids is None:
            segment_ids = jnp.zeros_like(tokens)
        tokens, positions = (reshard(x, self.layout.activation("BT")) for x in (tokens, positions))
        segment_ids = reshard(segment_ids, self.layout.activation("BS"))  # of whole sequences: once, not in each layer
        length = tokens.shape[1]
        x, _, sums = self.run_blocks(tables, tokens, positions, self.mix_of_row, length, seed, beside=segment_ids)
        return x, sums

    def mix_of_row(self, layer: Layer, segment_ids: jax.Array) -> Mix:
        """Return the mix of a layer in training: a token sees tokens of its own row; `segment_ids` are [B, S] int32."""
        segment_ids = self.local_segments(segment_ids, layer)
        seen, exchange = seen_in_row(segment_ids, layer.window), choose_exchange(self.cfg).name
        kernel, options = self.cfg.attention, self.cfg.attention_options

        def attend_to_row(q, kept, heads):
            k, v = heads.expand(*kept)
            return attend(q, k, v, seen, self.block_layout, kernel, exchange, **options), None

        return Mix(attend_to_row, lambda recurrence: (recurrence.run_rows(segment_ids)[0], None))

    def local_segments(self, segment_ids: jax.Array, layer: Layer) -> jax.Array:
        """Return segments [B, S] of which a token sees its own: documents, or in a local layer chunks of documents."""
        return cut_chunks(segment_ids, layer.window) if self.cfg.local_attention == "chunk" else segment_ids

    def embed(self, tables, tokens, positions) -> jax.Array:
        """[B, T] int32 -> [B, t, D], what the first block takes."""
        with jax.named_scope("embed"):
            x = self.embedding.lookup(tables[0], tokens)
            return x if self.positions is None else self.positions(x, positions)

    def run_blocks(
        self,
        tables,
        tokens,
        positions,
        mix_of: Callable[[Layer, Any], Mix],
        length: int,
        seed=None,
        layers: dict[str, list[dict[str, Any]]] | None = None,
        beside: Any = None,
        reach: int | jax.Array | None = None,
    ) -> tuple[jax.Array, list, BlockSums]:
        """[B, T] int32 -> [B, T, D] after the final norm, what the mixes keep, and the numbers of all blocks.

        `mix_of(layer, beside)` gives the mix of a layer, in sequences that grow to `length` tokens; `beside` is a tree
        of arrays [B, ...], and a mix gets those of its own rows. Each run is a scan: one piece of program, in which
        layers are data, and mixes keep nothing.

        `layers` gives, by the name of a stack, the parameters of each of its layers as a tree of their own. Then each
        layer is a piece of program of its own, its number and its window are Python's, and what is kept is a list with
        one entry for each layer, of any shapes.

        `reach` is the number of tokens that the sequences end with, if they grow beyond `length`.
        """
        kept: list = []
        sums = NO_SUMS
        rows = Rows(self.embed(tables, tokens, positions), positions, beside)
        with jax.named_scope("blocks"):
            for run in self.cfg.runs:
                if layers is None:
                    rows, sums_here = self._scan_run(run, rows, mix_of, length, seed, reach)
                else:
                    rows, kept_here, sums_here = self._run_apart(run, layers, rows, mix_of, length, seed, reach)
                    kept += kept_here
                sums = join_runs(sums, sums_here)
        with jax.named_scope("final_norm"):
            return self.layout.join_stream(self.final_norm(rows.x)), kept, sums

    def layers_of(self, stack: Stack, length: int, reach: int | jax.Array | None = None) -> tuple[Any, Layer]:
        """Return parameters and values of the layers of a stack, arrays [L, ...], for sequences of `length` tokens.

        `reach` is the number of tokens that the sequences end with, if they grow beyond `length`.
        """
        windows = self.cfg.windows(length)
        reach = length if reach is None else reach
        rope = layer_rope(self.cfg, stack.layers, reach) if self._rotates else None
        params = nnx.state(getattr(self, stack.name))
        of_layers = jnp.asarray(stack.layers), jnp.asarray([windows[layer] for layer in stack.layers])
        return params, Layer(*of_layers, rope)

    def scan_layers(self, pattern: tuple[str, ...], layers, rows: Rows, mix_of, seed) -> tuple[Rows, BlockSums]:
        """Run layers of stacks that take turns on some rows, and return the rows and the sums of the layers.

        `layers` are parameters and values of the layers at each place of the pattern, arrays [turns, ...].
        """

        def block_of(name):
            graphdef = nnx.graphdef(getattr(self, name))

            def block(x, params, layer, others):
                beside_x, seed = others
                after, (_, sums) = self._one_layer(graphdef, Rows(x, *beside_x), (params, layer), mix_of, seed)
                return after.x, sums

            return block

        blocks = [block_of(name) for name in pattern]
        # What a block does not change stays outside: the scan would keep it for each layer.
        others = tuple(rows[1:]), seed
        if self.prefetch:
            params, values = zip(*layers, strict=True)
            again = checkpoint_block(join_blocks(blocks), self.remat)
            x, sums = scan_ahead(again, params, rows.x, values, others, self.block_layout)
        else:
            x, sums = scan_blocks(blocks, rows.x, layers, others, self.remat)
        return rows._replace(x=x), join_pattern([join_layers(each) for each in sums])

    def _one_layer(self, graphdef, rows: Rows, each, mix_of, seed) -> tuple[Rows, tuple[Any, BlockSums]]:
        params, layer = each
        noise = None
        if seed is not None:
            noise = Noise(jax.random.fold_in(jax.random.key(seed), layer.number), rows.numbers)
        mix = mix_of(layer, rows.beside)
        x, kept, sums = nnx.merge(graphdef, params)(rows.x, rows.positions, layer.rope, mix, noise)
        return rows._replace(x=x), (kept, sums)

    def enter_stages(self, rows: Rows, seed) -> Rows:
        """Return rows of a whole microbatch as stages take them."""
        spec = self.layout.activation("B")
        count = len(rows.positions)
        draws = seed is not None and self.cfg.lora.rank and self.cfg.lora.dropout
        numbers = reshard(jnp.arange(count), spec) if draws else None
        penalties = {name: reshard(jnp.zeros(count), spec) for name in penalty_names(self.cfg)}
        return rows._replace(penalties=penalties, numbers=numbers)

    def run_on_stage(self, stack: Stack, layers, rows: Rows, mix_of, seed) -> tuple[Rows, Routing | None]:
        """Run the layers of a stage on rows of `enter_stages`, and return the rows and the routing of its experts."""
        rows, sums = self.scan_layers((stack.name,), (layers,), rows, mix_of, seed)
        return rows._replace(penalties=jax.tree.map(jnp.add, rows.penalties, sums.penalties)), sums.routing

    def _scan_run(self, run: Run, rows: Rows, mix_of, length, seed, reach) -> tuple[Rows, BlockSums]:
        if self.layout.stage_axes:
            (stack,) = self.stacks
            on_stage = partial(self.run_on_stage, stack, mix_of=mix_of, seed=seed)
            layers, rows = self.layers_of(stack, length, reach), self.enter_stages(rows, seed)
            rows, routing = run_stages(on_stage, layers, rows, self.layout, self.parts_per_stage)
            return rows, BlockSums(rows.penalties, join_stages(routing))
        stacks = {stack.name: stack for stack in self.stacks}
        of_stacks = {name: self.layers_of(stacks[name], length, reach) for name in run.pattern}
        of_places = []
        for place, name in enumerate(run.pattern):
            numbers = run.layers[place :: len(run.pattern)]
            at = [stacks[name].layers.index(number) for number in numbers]
            of_places.append(_take_layers(of_stacks[name], at))
        return self.scan_layers(run.pattern, tuple(of_places), rows, mix_of, seed)

    def _run_apart(self, run: Run, layers, rows: Rows, mix_of, length, seed, reach) -> tuple[Rows, list, BlockSums]:
        windows, results = self.cfg.windows(length), []
        rope = layer_rope(self.cfg, run.layers, length if reach is None else reach) if self._rotates else None
        for place, number in enumerate(run.layers):
            stack = run.pattern[place % len(run.pattern)]
            layer = Layer(number, windows[number], jax.tree.map(lambda of_all, place=place: of_all[place], rope))
            params = layers[stack][self.cfg.stacks[stack].index(number)]
            graphdef = nnx.graphdef(getattr(self, stack))
            rows, result = self._one_layer(graphdef, rows, (params, layer), mix_of, seed)
            results.append(result)
        all_kept, all_sums = zip(*results, strict=True)
        one_layer_each = [jax.tree.map(lambda value: value[None], sums) for sums in all_sums]
        return rows, list(all_kept), join_pattern([join_layers(sums) for sums in one_layer_each])

    def logits(self, tables, x) -> jax.Array:
        """[B, T, D] -> [B, T, V] float32."""
        return self.embedding.logits(tables[1], x)


def _take_layers(layers: Any, places: list[int]) -> Any:
    """Return the layers at these places, which have equal distances, of arrays [L, ...]."""
    step = places[1] - places[0] if len(places) > 1 else 1

    def take(x: jax.Array) -> jax.Array:
        return x if len(places) == len(x) else jax.lax.slice_in_dim(x, places[0], places[-1] + 1, step)

    return jax.tree.map(take, layers)


def _stacked(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules as one, whose parameters have a first dimension of this size."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    params = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(jax.random.split(rngs.params(), count))
    return nnx.merge(graphdef, params)
