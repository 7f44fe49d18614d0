"""The decoder: embedding, blocks, final norm, logits or scores; and the layer of multi-token prediction."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import reshard

from tunix.config import Model
from tunix.config.vision import Gemma3Vision
from tunix.models.attention import Heads, Method, compute_attention
from tunix.models.attention_mask import row_mask_rule, split_chunks
from tunix.models.block import Forward, HeadScores, Layer, LayerInputs, Mix, Rows
from tunix.models.layer_scan import GradientSums
from tunix.models.layer_stacks import Stacks, list_stacks
from tunix.models.layers import NO_SUMS, NORMS, BlockSums, Embedding, Initializer, LearnedPositions, Matrix, merge_runs
from tunix.models.remat import KEEP_ALL, Remat
from tunix.models.scores import ScoreHead
from tunix.models.vision import DecoderInputs, Images, VisionEncoder, find_ends
from tunix.sharding.layout import Layout


class RowMask(NamedTuple):
    """Inputs of the mask that tells which tokens of its own row a token sees, beside the layer: `Rows.mask_inputs`."""

    segment_ids: jax.Array  # [B, S] int32
    ends: jax.Array | None  # [B, S] int32 of rows with images (`MaskRule.q_ends`)


class Transformer(nnx.Module):
    """Tokens to logits. Equal blocks are a stack, an attribute with the stack's name (models/layer_stacks.py).

    `remat` says what blocks keep for their backward pass. `parts_per_stage` matters where the layout splits the layers
    into stages: it is the number of parts of a batch that wait at each stage (see `run_stages`). With `prefetch` layers
    gather their weights ahead; they must not be gathered yet.
    """

    def __init__(
        self,
        cfg: Model,
        layout: Layout,
        initializer: Initializer,
        remat: Remat = KEEP_ALL,
        parts_per_stage: int | None = None,
        prefetch: bool = False,
    ):
        self.cfg, self.layout, self.remat, self.parts_per_stage = cfg, layout, remat, parts_per_stage
        self.prefetch = prefetch
        self.gradient_sums: GradientSums | None = None  # of a step that adds up gradients in its layers
        self.reports_scores = False  # True in a step that asks blocks for `BlockSums.head_scores`
        self.block_layout = layout.inside_stage()  # of one stage's arrays; without stages it is `layout`
        self.embedding = Embedding(cfg, layout, initializer)
        self.positions = LearnedPositions(cfg, layout, initializer) if cfg.positions == "learned" else None
        # Names of attributes are names of parameters, in checkpoints too.
        for stack in list_stacks(cfg):
            setattr(self, stack.name, stack.make(cfg, self.block_layout, initializer))
        self.final_norm = NORMS[cfg.norm]("BtD", cfg, layout)
        # A model with labels gives scores in the place of logits.
        has_logits = cfg.labels is None
        self.head = Embedding(cfg, layout, initializer) if has_logits and not cfg.tied_head else None
        self.score = None if has_logits else ScoreHead(cfg, layout, initializer)
        self.layer_inputs = None if cfg.layer_inputs is None else LayerInputs(cfg, layout, initializer)
        self.mtp = None if cfg.mtp is None else MtpLayer(cfg, self.block_layout, initializer, remat)
        self.vision = None if cfg.vision is None else VisionEncoder(cfg, cfg.vision, layout, initializer)

    @property
    def stacks(self) -> Stacks:
        """All blocks, and the ways through them."""
        return Stacks(self)

    def __call__(self, tokens, positions=None, segment_ids=None, images: Images | None = None) -> jax.Array:
        """[B, T] int32 -> logits [B, T, V] float32. Without positions and segments, each row is one document."""
        vocab_weights = self.vocab_weights()
        return self.logits(vocab_weights, self.hidden(vocab_weights, tokens, positions, segment_ids, images=images)[0])

    def vocab_weights(self) -> tuple[jax.Array, jax.Array]:
        """Return the tables of both ends, gathered: [V, D] to look tokens up in and [V, D] to take logits with."""
        table = self.embedding.gathered()
        return table, table if self.head is None else self.head.gathered()

    def hidden(
        self, vocab_weights, tokens, positions=None, segment_ids=None, seed=None, images: Images | None = None
    ) -> tuple[jax.Array, BlockSums]:
        """[B, T] int32 -> [B, T, D], the result of the final norm, and the numbers of all blocks.

        `seed`, an int32 scalar, seeds the dropout of training. A model with a tower takes the images of the rows.
        """
        if positions is None:
            positions = jnp.zeros_like(tokens) + jnp.arange(tokens.shape[1])
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        # A token needs its own position alone, but the segments of all keys of its sequence: these are small, so every
        # device gets those of its sequences.
        tokens, positions = (reshard(x, self.layout.activation("BT")) for x in (tokens, positions))
        segment_ids = reshard(segment_ids, self.layout.activation("BS"))
        embedded = self.add_images(self.embed(vocab_weights, tokens, positions), positions, images, seed)
        rows = Rows(embedded.x, embedded.positions, RowMask(segment_ids, self.find_ends(images)))
        inputs = self.make_layer_inputs(tokens, rows.x)
        forward = Forward(self.mix_of_row, tokens.shape[1], seed, features=embedded.features, inputs=inputs)
        with jax.named_scope("blocks"):
            rows, first_sums = self.run_before_stages(rows, forward)
            rows, sums = self.stacks.run(rows, forward)
        return self.finish(rows.x), merge_runs(BlockSums(first_sums.penalties, None), sums)

    def hidden_further(self, vocab_weights, hidden, next_tokens, positions, segment_ids) -> tuple[jax.Array, BlockSums]:
        """[B, T, D], the result of the final norm, and the next tokens [B, T] int32 -> [B, T, D] that logits of the
        tokens after those are taken of, and the numbers of the layer of `model.mtp`."""
        assert self.mtp is not None
        next_tokens, positions = (reshard(x, self.layout.activation("BT")) for x in (next_tokens, positions))
        segment_ids = reshard(segment_ids, self.layout.activation("BS"))
        with jax.named_scope("mtp"):
            x = self.mtp.join(self.embedding.lookup(vocab_weights[0], next_tokens), hidden)
            return self.mtp(Rows(x, positions, RowMask(segment_ids, None)), Forward(self.mix_of_row, hidden.shape[1]))

    def run_before_stages(self, rows: Rows, forward: Forward) -> tuple[Rows, BlockSums]:
        """Run the layers before those that stages share, if there are some: around the stages' layers these axes split
        the batch alone, and so they do in these layers."""
        if not (self.layout.stage_axes and self.cfg.first_runs):
            return rows, NO_SUMS
        make = partial(
            Transformer, self.cfg, self.layout.before_stages(), Initializer(None), self.remat, prefetch=self.prefetch
        )
        graphdef = jax.eval_shape(lambda: nnx.split(make()))[0]
        model = nnx.merge(graphdef, nnx.state(self))
        model.reports_scores = self.reports_scores
        return model.stacks.scan_runs(self.cfg.first_runs, rows, forward._replace(mix_of=model.mix_of_row))

    def add_images(self, x: jax.Array, positions: jax.Array, images: Images | None, seed: Any = None) -> DecoderInputs:
        """Return embeddings [B, t, D], those of soft tokens made of the images, and the other inputs that the decoder
        gets of images."""
        if images is None:
            return DecoderInputs(x, [], positions)
        assert self.vision is not None, "a model of text alone is given images"
        with jax.named_scope("vision"):
            return self.vision(x, images, positions, self.remat, seed)

    def find_ends(self, images: Images | None) -> jax.Array | None:
        """Return the position behind the last key that each token of [B, S] may see; None without images."""
        if images is None or not isinstance(self.cfg.vision, Gemma3Vision):
            return None
        return find_ends(reshard(images.image_index, self.layout.activation("BS")), self.cfg.vision.tokens_per_image)

    def hidden_apart(
        self, vocab_weights, tokens, positions, forward: Forward, params: dict[str, list[Any]], images: Images | None
    ) -> tuple[jax.Array, list]:
        """[B, T] int32 -> [B, T, D], the result of the final norm, and the cache of each layer.

        `params` are the parameters of each layer of each stack on their own (`Stacks.run_apart`).
        """
        embedded = self.add_images(self.embed(vocab_weights, tokens, positions), positions, images)
        rows = Rows(embedded.x, embedded.positions, None)
        forward = forward._replace(features=embedded.features, inputs=self.make_layer_inputs(tokens, rows.x))
        with jax.named_scope("blocks"):
            rows, caches = self.stacks.run_apart(rows, forward, params)
        return self.finish(rows.x), caches

    def mix_of_row(self, layer: Layer, mask_inputs: "RowMask") -> Mix:
        """Return the mix of a layer in training: a token sees tokens of its own row."""
        is_text = mask_inputs.segment_ids > 0
        segment_ids = self.local_segments(mask_inputs.segment_ids, layer)
        mask_rule = row_mask_rule(segment_ids, layer.window, mask_inputs.ends)

        def row_attention(q, entries, heads):
            k, v = heads.expand(*entries)
            method, layout = self.method_of(heads), self.block_layout
            if not self.reports_scores:
                return compute_attention(q, k, v, mask_rule, layout, method, heads.kv_dim_name), None
            summed = method._replace(options={**method.options, "with_sums": True})
            out, log_sums = compute_attention(q, k, v, mask_rule, layout, summed, heads.kv_dim_name)
            of_text = reshard(is_text, layout.activation("BT"))[..., None]
            head_scores = HeadScores(jnp.max(jnp.where(of_text, jax.lax.stop_gradient(log_sums), -jnp.inf), (0, 1)))
            return ((out, log_sums) if "with_sums" in method.options else out), head_scores

        return Mix(row_attention, lambda recurrence: (recurrence.run_rows(segment_ids), None), is_text)

    def method_of(self, heads: Heads) -> Method:
        """Return how attention with these heads is computed."""
        return Method(self.layout.kernel_of(heads.kv_dim_name), self.layout.cp_exchange, self.cfg.kernel_options)

    def local_segments(self, segment_ids: jax.Array, layer: Layer) -> jax.Array:
        """Return segments [B, S] of which a token sees its own: documents, or in a local layer chunks of documents."""
        return split_chunks(segment_ids, layer.window) if self.cfg.local_attention == "chunk" else segment_ids

    def embed(self, vocab_weights, tokens, positions) -> jax.Array:
        """[B, T] int32 -> [B, t, D], what the first block takes."""
        with jax.named_scope("embed"):
            x = self.embedding.lookup(vocab_weights[0], tokens)
            return x if self.positions is None else self.positions(x, positions)

    def make_layer_inputs(self, tokens: jax.Array, x: jax.Array) -> jax.Array | None:
        """[B, T] int32 and their embeddings [B, t, D] -> inputs [l, B, t, p] of each layer; None without them."""
        if self.layer_inputs is None:
            return None
        with jax.named_scope("embed"):
            return self.layer_inputs(tokens, x)

    def finish(self, x: jax.Array) -> jax.Array:
        """[B, t, D] after the last block -> [B, T, D], the result of the final norm."""
        with jax.named_scope("final_norm"):
            return self.layout.gather_stream(self.final_norm(x))

    def logits(self, vocab_weights, x) -> jax.Array:
        """[B, T, D] -> [B, T, V] float32."""
        return self.embedding.logits(vocab_weights[1], x)


class MtpLayer(nnx.Module):
    """The layer of multi-token prediction (`model.mtp`): it learns to predict the token after the next one.

        state [B, T, D] of token n, behind the final norm ---> norm --+
                                                                      +-- [B, t, 2D] --> projection --> block --> norm
        table ---> vector [B, t, D] of token n + 1 ----------> norm --+                                             |
                                                                         the model's own head: logits of token n + 2

    Published files keep it as the layer behind the last one, or under a name of its own. Its block is that of a model
    of one layer (`Model.mtp_model`), so it runs as all blocks do. Logits of the next token do not depend on it. A
    sampler may guess by it (inference/sampling.py).
    """

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer, remat: Remat):
        self.cfg, self.layout, self.remat = cfg.mtp_model, layout, remat
        self.parts_per_stage, self.prefetch = None, False
        self.gradient_sums: GradientSums | None = None  # its gradients are those of autodiff
        self.token_norm, self.state_norm = (NORMS[cfg.norm]("BtD", cfg, layout) for _ in range(2))
        self.projection = Matrix("Btμ,μD->BtD", cfg, layout, initializer)
        for stack in list_stacks(self.cfg):
            setattr(self, stack.name, stack.make(self.cfg, layout, initializer))
        self.norm = NORMS[cfg.norm]("BtD", cfg, layout)

    @property
    def stacks(self) -> Stacks:
        return Stacks(self)

    def __call__(self, rows: Rows, forward: Forward) -> tuple[jax.Array, BlockSums]:
        """Rows with the result of `join` as x -> [B, T, D] that logits are taken of, and the numbers of the block."""
        rows, sums = self.stacks.run(rows, forward)
        return self.layout.gather_stream(self.norm(rows.x)), sums

    def run_apart(self, rows: Rows, forward: Forward, params: dict[str, list[Any]]) -> tuple[jax.Array, list]:
        """Return [B, T, D] as `__call__`, and the layer's cache in place of numbers (decoding; `Stacks.run_apart`)."""
        rows, caches = self.stacks.run_apart(rows, forward, params)
        return self.layout.gather_stream(self.norm(rows.x)), caches

    def join(self, tokens: jax.Array, states: jax.Array) -> jax.Array:
        """Vectors [B, t, D] of the next tokens, and states [B, T, D] -> what the block takes, [B, t, D]."""
        states = self.layout.split_stream(states)
        return self.projection.multiply(jnp.concatenate([self.token_norm(tokens), self.state_norm(states)], -1))
