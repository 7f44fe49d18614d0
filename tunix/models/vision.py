"""Images: a vision tower, and a projector of its results into the residual stream.

The tower is a vision transformer (SigLIP, arXiv:2303.15343), the projector that of Gemma 3 (arXiv:2503.19786):

    pixels [B, P, y, x, 3] uint8 -- / 255, normalized -- patches, a product, + positions --> [B', i, d]      B' = B P
        -- blocks: x + attention(norm(x)), then x + mlp(norm(x)) -- norm ---------------> [B', i, d]
        -- means over squares of patches, norm, a product ------------------------------> [B', g, D]
        -- the tokens of a row that hold soft tokens get them as their embeddings ------> [B, t, D]

Patches of one image all see one another. Each device computes the images of its own rows; tp splits heads and the
MLP as in the decoder. Devices that share the tokens of a row (cp) all compute its images.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from tunix.config import Model
from tunix.config.vision import TOWER, Vision
from tunix.models.attention_mask import MaskRule
from tunix.models.kernels import find_kernel
from tunix.models.layers import ACTIVATIONS, Bias, DropoutKey, Einsum, Initializer, LayerNorm, Matrix, RMSNorm
from tunix.models.matmul import product
from tunix.models.remat import Remat, scan_blocks
from tunix.sharding.equations import Equation
from tunix.sharding.layout import Layout


class Images(NamedTuple):
    """The images of some rows."""

    pixels: Any  # [B, P, y, x, 3] uint8
    image_index: Any  # [B, T] int32: which of the row's P * g soft tokens a token is, or -1


def find_ends(index: jax.Array, tokens_per_image: int) -> jax.Array:
    """Return the position behind the last key that each token of [B, T] may see: the end of its image, or itself.

    index    -1 0 1 2 3 -1       4 tokens of an image
    ends     1  5 5 5 5  6
    """
    positions = jnp.arange(index.shape[1], dtype=jnp.int32)
    return positions + jnp.where(index >= 0, tokens_per_image - index % tokens_per_image, 1)


class TowerAttention(nnx.Module):
    """Attention among the patches of one image: [B', i, d] -> [B', i, d]."""

    def __init__(self, cfg: Model, vision: Vision, layout: Layout, initializer: Initializer):
        self.layout, self.scale, self.num_patches = layout, vision.head_dim**-0.5, vision.num_patches
        self.q, self.k, self.v = (
            Einsum(f"{TOWER}.attention.{name}", "Bid,dqw->Biqw", cfg, layout, initializer) for name in "qkv"
        )
        self.o = Einsum(f"{TOWER}.attention.o", "Biqw,qwd->Bid", cfg, layout, initializer)

    def __call__(self, x: jax.Array, dropout_key: DropoutKey | None) -> jax.Array:
        """[B', i, d] -> [B', i, d]."""
        q, k, v = (part(x, dropout_key) for part in (self.q, self.k, self.v))

        def attend(q, k, v):
            patches = jnp.arange(self.num_patches, dtype=jnp.int32)
            one_segment = jnp.zeros((1, self.num_patches), jnp.int32)
            ends = jnp.full_like(one_segment, self.num_patches)
            rows = jnp.zeros((len(q), 1), jnp.int32)
            rule = MaskRule(patches, patches, rows + one_segment, rows + one_segment, self.num_patches, rows + ends)
            return kernel(q, k, v, rule, reach=self.num_patches)

        # Our own kernel runs where the decoder has it; a mask of all patches is nothing for others.
        kernel = find_kernel("flash" if self.layout.kernel_of("K") == "flash" else "xla")

        spec = self.layout.activation("Biqw")
        return self.o(jax.shard_map(attend, in_specs=spec, out_specs=spec)(q * self.scale, k, v), dropout_key)


class TowerBlock(nnx.Module):
    """A block of the tower: LayerNorm, attention, LayerNorm, MLP."""

    def __init__(self, cfg: Model, vision: Vision, layout: Layout, initializer: Initializer):
        self.pre_attention, self.pre_mlp = (LayerNorm("Bid", cfg, layout, eps=vision.norm_eps) for _ in range(2))
        self.attention = TowerAttention(cfg, vision, layout, initializer)
        self.mlp = TowerMlp(cfg, layout, initializer)

    def __call__(self, x: jax.Array, dropout_key: DropoutKey | None) -> jax.Array:
        """[B', i, d] -> [B', i, d]."""
        with jax.named_scope("attention"):
            x = checkpoint_name(x + self.attention(self.pre_attention(x), dropout_key), "residual")
        with jax.named_scope("mlp"):
            return x + self.mlp(self.pre_mlp(x), dropout_key)


class TowerMlp(nnx.Module):
    """Two products with GELU (its tanh formula) between them: [B', i, d] -> [B', i, d]."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer):
        self.up = Einsum(f"{TOWER}.mlp.up", "Bid,dm->Bim", cfg, layout, initializer)
        self.down = Einsum(f"{TOWER}.mlp.down", "Bim,md->Bid", cfg, layout, initializer)

    def __call__(self, x: jax.Array, dropout_key: DropoutKey | None) -> jax.Array:
        """[B', i, d] -> [B', i, d]."""
        return self.down(ACTIVATIONS["gelu"](self.up(x, dropout_key)), dropout_key)


def _reshape(x: jax.Array, *sizes: int) -> jax.Array:
    """Return x [B', ...] with other dimensions behind the first one."""
    rows = jax.typeof(x).sharding.spec[0]
    return jax.lax.reshape(x, (len(x), *sizes), out_sharding=PartitionSpec(rows, *[None] * len(sizes)))


class Patches(nnx.Module):
    """Patches as vectors: a product of their pixels, a bias, and a vector for each place in the image."""

    def __init__(self, cfg: Model, vision: Vision, layout: Layout, initializer: Initializer):
        self.vision, self.layout, self.equation = vision, layout, Equation("Bid,id->Bid")
        self.product = Matrix("Bizab,zabd->Bid", cfg, layout, initializer)
        self.bias = Bias("Bid", cfg, layout)
        shape = vision.num_patches, vision.embed_dim
        table = initializer.normal(shape, layout.param, vision.embed_dim**-0.5)
        self.positions = nnx.Param(table, equation=self.equation)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """[B', y, x, 3] uint8 -> [B', i, d]."""
        mean, std = (jnp.asarray(each, jnp.float32) for each in (self.vision.image_mean, self.vision.image_std))
        pixels = ((pixels.astype(jnp.float32) / 255 - mean) / std).astype(self.layout.compute)
        side, size = self.vision.patches_per_side, self.vision.patch_size
        split = _reshape(pixels, side, size, side, size, pixels.shape[-1])  # [B', rows, a, columns, b, z]
        patches = _reshape(split.transpose(0, 1, 3, 5, 2, 4), side * side, pixels.shape[-1], size, size)
        x = self.bias(product(self.product.equation, patches, self.product.gathered(), self.layout))
        table, spec = self.layout.gather(self.positions[...], self.equation), self.layout.activation("Bid")
        return (x + jax.lax.broadcast_in_dim(table, x.shape, (1, 2), out_sharding=spec)).astype(x.dtype)


class Tower(nnx.Module):
    """The vision transformer: [B', y, x, 3] uint8 -> [B', i, d]. Its blocks are one stack."""

    def __init__(self, cfg: Model, vision: Vision, layout: Layout, initializer: Initializer):
        self.cfg, self.num_layers = cfg, vision.num_layers
        self.patches = Patches(cfg, vision, layout, initializer)

        def make_one(key: jax.Array | None) -> tuple[nnx.GraphDef, nnx.State]:
            return nnx.split(TowerBlock(cfg, vision, layout, Initializer(key)))

        graphdef, params = jax.vmap(make_one, axis_size=self.num_layers)(initializer.split(self.num_layers))
        self.blocks = nnx.merge(graphdef, params)
        self.norm = LayerNorm("Bid", cfg, layout, eps=vision.norm_eps)

    def __call__(self, pixels: jax.Array, remat: Remat, seed: Any) -> jax.Array:
        """[B', y, x, 3] uint8 -> [B', i, d]; `seed` is for the dropout of low-rank updates, or None."""
        graphdef, params = nnx.split(self.blocks)

        def block(x, params, number, seed):
            dropout_key = None
            if seed is not None:  # of other layers than the decoder's
                key = jax.random.fold_in(jax.random.key(seed), self.cfg.num_layers + number)
                dropout_key = DropoutKey(key)
            return nnx.merge(graphdef, params)(x, dropout_key), None

        layers = ((params, jnp.arange(self.num_layers)),)
        x, _ = scan_blocks([block], self.patches(pixels), layers, seed, remat._replace(every=1))
        return self.norm(x)


class Projector(nnx.Module):
    """Results of the tower as soft tokens: [B', i, d] -> [B', g, D]. A soft token is a square of patches."""

    def __init__(self, cfg: Model, vision: Vision, layout: Layout, initializer: Initializer):
        self.layout, self.vision = layout, vision
        self.norm = RMSNorm("Bgd", cfg, layout, offset=1.0, eps=vision.norm_eps)
        self.product = Matrix("Bgd,dD->BgD", cfg, layout, initializer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B', i, d] -> [B', g, D]."""
        tokens = self.vision.tokens_per_side
        size = self.vision.patches_per_side // tokens
        squares = _reshape(x.astype(jnp.float32), tokens, size, tokens, size, x.shape[-1])
        means = _reshape(squares.mean((2, 4)), tokens * tokens, x.shape[-1]).astype(x.dtype)
        return product(self.product.equation, self.norm(means), self.product.gathered(), self.layout)


class Eyes(nnx.Module):
    """Tower and projector, and the way of their results into the rows."""

    def __init__(self, cfg: Model, vision: Vision, layout: Layout, initializer: Initializer):
        self.layout = layout
        self.tower = Tower(cfg, vision, layout, initializer)
        self.projector = Projector(cfg, vision, layout, initializer)

    def __call__(self, x: jax.Array, images: Images, remat: Remat, seed: Any) -> jax.Array:
        """Return embeddings [B, t, D] of tokens with those of the soft tokens in their places."""
        pixels = reshard(images.pixels, self.layout.activation("Bjyxz"))
        flat = jax.lax.reshape(
            pixels, (pixels.shape[0] * pixels.shape[1], *pixels.shape[2:]), out_sharding=self.layout.activation("Byxz")
        )
        with jax.named_scope("tower"):
            seen = self.tower(flat, remat, seed)
        with jax.named_scope("projector"):
            soft = self.projector(seen).astype(x.dtype)
        rows = self.layout.activation("BgD")
        soft = jax.lax.reshape(soft, (x.shape[0], pixels.shape[1] * soft.shape[1], soft.shape[2]), out_sharding=rows)
        index = self.layout.split_stream(reshard(images.image_index, self.layout.activation("BT")))
        specs = rows, self.layout.activation("Bt"), self.layout.activation("BtD")
        return jax.shard_map(_replace, in_specs=specs, out_specs=specs[2])(soft, index, x)


def _replace(soft: jax.Array, index: jax.Array, x: jax.Array) -> jax.Array:
    """Return x [B, t, D] with the soft tokens [B, s, D] of an index [B, t] in their places; -1 keeps x."""
    taken = jnp.take_along_axis(soft, jnp.maximum(index, 0)[:, :, None], axis=1)
    return jnp.where((index >= 0)[:, :, None], taken, x)
