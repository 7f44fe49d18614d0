"""Images: a vision tower, and a projector of its results into the residual stream.

The tower is a vision transformer (SigLIP, arXiv:2303.15343), the projector that of Gemma 3 (arXiv:2503.19786):

    pixels [B, P, y, x, 3] uint8 -- / 255, normalized -- patches, a product, + positions --> [B', i, d]      B' = B P
        -- blocks: x + attention(norm(x)), then x + mlp(norm(x)) -- norm ---------------> [B', i, d]
        -- means over squares of patches, norm, a product ------------------------------> [B', g, D]
        -- the tokens of a row that hold soft tokens get them as their embeddings ------> [B, t, D]

Patches of one image all see one another. Each device computes the images of its own rows; tp splits heads and the
MLP as in the decoder. Devices that share the tokens of a row (cp) all compute its images.
"""

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from tunix.config import Model
from tunix.config.vision import TOWER, AnyVision, Gemma3Vision, Qwen3Vision, SmolVision
from tunix.models.attention_mask import MaskRule
from tunix.models.layers import ACTIVATIONS, Bias, DropoutKey, Einsum, Initializer, LayerNorm, Matrix, RMSNorm, identity
from tunix.models.remat import Remat, scan_blocks
from tunix.models.rope import Turns, rotate
from tunix.models.table import find_kernel
from tunix.sharding.layout import Layout
from tunix.sharding.table import Equation


class Images(NamedTuple):
    """The images of some rows."""

    # [B, P, y, x, 3] (gemma3), or patches [B, i, 3, a, b], packed and in the order of merging: uint8, or float32 as
    # transformers' processor normalizes them
    pixels: Any
    image_index: Any  # [B, T] int32: which of the row's soft tokens a token is, or -1
    grids: Any  # [B, P, 2] int32, units of each image down and across (data/image_processors.py); 0 where there is none


class PatchPositions(NamedTuple):
    """Where the patches of rows are, [B', i] int32."""

    segments: jax.Array  # image of the row
    ends: jax.Array  # position behind the last patch of the image
    turns: Turns | None = None  # sine and cosine [B', i, w / 2] of the rotations by row and column


def find_ends(index: jax.Array, tokens_per_image: int) -> jax.Array:
    """Return the position behind the last key that each token of [B, T] may see: the end of its image, or itself.

    index    -1 0 1 2 3 -1       4 tokens of an image
    ends     1  5 5 5 5  6
    """
    positions = jnp.arange(index.shape[1], dtype=jnp.int32)
    return positions + jnp.where(index >= 0, tokens_per_image - index % tokens_per_image, 1)


class TowerAttention(nnx.Module):
    """Attention among the patches of one image: [B', i, d] -> [B', i, d]."""

    def __init__(self, cfg: Model, vision: AnyVision, layout: Layout, initializer: Initializer):
        self.layout, self.scale, self.future_keys = layout, vision.head_dim**-0.5, vision.seen_patches
        self.q, self.k, self.v = (
            Einsum(f"{TOWER}.attention.{name}", "Bid,dqw->Biqw", cfg, layout, initializer) for name in "qkv"
        )
        self.o = Einsum(f"{TOWER}.attention.o", "Biqw,qwd->Bid", cfg, layout, initializer)

    def __call__(self, x: jax.Array, patch_positions: PatchPositions, dropout_key: DropoutKey | None) -> jax.Array:
        """[B', i, d] -> [B', i, d]."""
        q, k, v = (part(x, dropout_key) for part in (self.q, self.k, self.v))
        if patch_positions.turns is not None:
            q, k = (rotate(each, patch_positions.turns, "halves") for each in (q, k))

        def attend(q, k, v, segments, ends):
            patches = jnp.arange(q.shape[1], dtype=jnp.int32)
            rule = MaskRule(patches, patches, segments, segments, q.shape[1], ends)
            return kernel(q, k, v, rule, future_keys=self.future_keys)

        # Our own kernel runs where the decoder has it; a mask of all patches is nothing for others.
        kernel = find_kernel("flash" if self.layout.kernel_of("K") == "flash" else "xla")

        spec, of_patches = self.layout.activation("Biqw"), self.layout.activation("Bi")
        attend = jax.shard_map(attend, in_specs=(spec, spec, spec, of_patches, of_patches), out_specs=spec)
        return self.o(attend(q * self.scale, k, v, patch_positions.segments, patch_positions.ends), dropout_key)


class TowerBlock(nnx.Module):
    """A block of the tower: LayerNorm, attention, LayerNorm, MLP."""

    def __init__(self, cfg: Model, vision: AnyVision, layout: Layout, initializer: Initializer):
        self.pre_attention, self.pre_mlp = (LayerNorm("Bid", cfg, layout, eps=vision.norm_eps) for _ in range(2))
        self.attention = TowerAttention(cfg, vision, layout, initializer)
        self.mlp = TowerMlp(cfg, layout, initializer)

    def __call__(self, x: jax.Array, patch_positions: PatchPositions, dropout_key: DropoutKey | None) -> jax.Array:
        """[B', i, d] -> [B', i, d]."""
        with jax.named_scope("attention"):
            x = checkpoint_name(x + self.attention(self.pre_attention(x), patch_positions, dropout_key), "residual")
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

    def __init__(self, cfg: Model, vision: AnyVision, layout: Layout, initializer: Initializer):
        self.vision, self.layout, self.equation = vision, layout, Equation("Bid,id->Bid")
        time = "φ" if isinstance(vision, Qwen3Vision) else ""
        self.product = Matrix(f"Biz{time}ab,z{time}abd->Bid", cfg, layout, initializer)
        self.bias = Bias("Bid", cfg, layout)
        shape = vision.num_positions, vision.embed_dim
        table = initializer.normal(shape, layout.param, vision.embed_dim**-0.5)
        self.positions = nnx.Param(table, equation=self.equation)

    def embed(self, pixels: jax.Array) -> jax.Array:
        """Patches [B', i, 3, a, b] -> [B', i, d], without their places. Those of float32 are normalized already."""
        mean, std = (
            jnp.asarray(each, jnp.float32)[:, None, None] for each in (self.vision.image_mean, self.vision.image_std)
        )
        normalized = (pixels.astype(jnp.float32) / 255 - mean) / std if pixels.dtype == jnp.uint8 else pixels
        patches = normalized.astype(self.layout.compute)
        if isinstance(self.vision, Qwen3Vision):
            shape = *patches.shape[:3], self.vision.frames, *patches.shape[3:]
            spec = PartitionSpec(jax.typeof(patches).sharding.spec[0], *[None] * 5)
            patches = jax.lax.broadcast_in_dim(patches, shape, (0, 1, 2, 4, 5), out_sharding=spec)
        return self.bias(self.product.multiply(patches))

    def table(self) -> jax.Array:
        """Return the vectors of places, gathered: [i, d]."""
        return self.layout.gather(self.positions[...], self.equation)


class Tower(nnx.Module):
    """The vision transformer. Its blocks are one stack."""

    def __init__(self, cfg: Model, vision: AnyVision, layout: Layout, initializer: Initializer):
        self.cfg, self.layout, self.vision = cfg, layout, vision
        self.patches = Patches(cfg, vision, layout, initializer)
        self.blocks = initializer.make_stack(vision.num_layers, lambda own: TowerBlock(cfg, vision, layout, own))
        is_normed = not isinstance(vision, Qwen3Vision)
        self.norm = LayerNorm("Bid", cfg, layout, eps=vision.norm_eps) if is_normed else identity

    def __call__(self, images: Images, remat: Remat, seed: Any) -> tuple[jax.Array, list[jax.Array]]:
        """Return the results [B', i, d] of the tower, and those of `deepstack_layers`; `seed` is for the dropout of
        low-rank updates, or None."""
        x, patch_positions = (_read_any_size if isinstance(self.vision, Qwen3Vision) else _read_square)(self, images)
        graphdef, params = nnx.split(self.blocks)

        def block(x, params, number, shared):
            seed, patch_positions = shared
            dropout_key = None
            if seed is not None:  # of other layers than the decoder's
                dropout_key = DropoutKey(jax.random.fold_in(jax.random.key(seed), self.cfg.num_layers + number))
            return nnx.merge(graphdef, params)(x, patch_positions, dropout_key), None

        taken, ends = [], [layer + 1 for layer in self.vision.deepstack_layers]
        for first, last in pairwise(dict.fromkeys([0, *ends, self.vision.num_layers])):
            layers = jax.tree.map(lambda each, part=slice(first, last): each[part], params)
            numbered, shared = ((layers, jnp.arange(first, last)),), (seed, patch_positions)
            x, _ = scan_blocks([block], x, numbered, shared, remat._replace(every=1))
            taken += [x] if last in ends else []
        return self.norm(x), taken


def _read_square(tower: Tower, images: Images) -> tuple[jax.Array, PatchPositions]:
    """Return patches [B', i, d] of square images [B, P, y, x, 3], each a row of its own, and their places."""
    layout, vision = tower.layout, tower.vision
    pixels = reshard(images.pixels, layout.activation("Bjyxz"))
    pixels = jax.lax.reshape(
        pixels, (pixels.shape[0] * pixels.shape[1], *pixels.shape[2:]), out_sharding=layout.activation("Byxz")
    )
    side, size = vision.patches_per_side, vision.patch_size
    pixels = pixels[:, : side * size, : side * size]
    split = _reshape(pixels, side, size, side, size, pixels.shape[-1])  # [B', rows, a, columns, b, z]
    patches = _reshape(split.transpose(0, 1, 3, 5, 2, 4), side * side, pixels.shape[-1], size, size)
    x, spec = tower.patches.embed(patches), layout.activation("Bid")
    x = (x + jax.lax.broadcast_in_dim(tower.patches.table(), x.shape, (1, 2), out_sharding=spec)).astype(x.dtype)
    zeros = jnp.zeros(x.shape[:2], jnp.int32, out_sharding=layout.activation("Bi"))
    return x, PatchPositions(zeros, zeros + x.shape[1])


class PatchPlaces(NamedTuple):
    """Where patches are in their images, [B, i] int32. Patches behind the last image are in an image of 0 rows."""

    image: jax.Array
    end: jax.Array  # of its patches among those of the row
    row: jax.Array
    column: jax.Array
    rows: jax.Array  # of the image
    columns: jax.Array


def find_places(grids: jax.Array, num_patches: int, merge: int) -> PatchPlaces:
    """Return where the patches of images with so many rows and columns, grids [B, P, 2], are.

    Squares of merge x merge patches come one after the other; an image of 2 x 4 patches, merge=2:

        0 1 4 5
        2 3 6 7
    """
    patch_positions, (rows, columns) = jnp.arange(num_patches, dtype=jnp.int32), jnp.moveaxis(grids, -1, 0)
    ends = jnp.cumsum(rows * columns, axis=1)
    image = jnp.sum(patch_positions[None, :, None] >= ends[:, None, :], axis=2)  # [B, i]

    def of_image(values: jax.Array, otherwise: int) -> jax.Array:
        filler = jnp.full_like(values[:, :1], otherwise)
        return jnp.take_along_axis(jnp.concatenate([values, filler], 1), image, axis=1)

    starts = of_image(ends - rows * columns, 0)
    height, width = of_image(rows, 0), of_image(columns, 0)
    end = of_image(ends, num_patches)
    within, across = patch_positions - starts, jnp.maximum(width // merge, 1)
    square, inner = within // merge**2, within % merge**2
    row, column = square // across * merge + inner // merge, square % across * merge + inner % merge
    known = height > 0
    return PatchPlaces(image, end, jnp.where(known, row, 0), jnp.where(known, column, 0), height, width)


def _read_any_size(tower: Tower, images: Images) -> tuple[jax.Array, PatchPositions]:
    """Return patches [B, i, d] of images of any size, packed one after the other, and their places."""
    layout, vision = tower.layout, tower.vision
    assert isinstance(vision, Qwen3Vision)
    pixels = reshard(images.pixels, layout.activation("Bizab"))
    spec = layout.activation("Bj")
    read = jax.shard_map(
        lambda grids: find_places(grids, pixels.shape[1], vision.merge_size),
        in_specs=spec, out_specs=layout.activation("Bi"),
    )  # fmt: skip
    places = read(reshard(images.grids, spec))
    x, side = tower.patches.embed(pixels), vision.patches_per_side
    # Between the four entries of the table that are around a patch; the corners of image and table are the same.
    y, z = (
        at.astype(jnp.float32) * ((side - 1) / jnp.maximum(size - 1, 1).astype(jnp.float32))
        for at, size in ((places.row, places.rows), (places.column, places.columns))
    )
    table, total = tower.patches.table(), jnp.zeros((), jnp.float32)
    for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
        at = [jnp.minimum(jnp.floor(each).astype(jnp.int32) + step, side - 1) for each, step in ((y, down), (z, right))]
        share = [abs(1 - step - (each - jnp.floor(each))) for each, step in ((y, down), (z, right))]
        vectors = table.at[at[0] * side + at[1]].get(out_sharding=layout.activation("Bid"))
        total = total + vectors * (share[0] * share[1])[..., None]
    # A quarter of a head turns by the row, a quarter by the column, each number with its pair in the other half.
    count = vision.head_dim // 2
    frequencies = jnp.asarray(vision.rope_theta ** -(np.arange(0, count, 2) / count), jnp.float32)
    angles = jnp.concatenate([at[..., None] * frequencies for at in (places.row, places.column)], axis=-1)
    return (x + total).astype(x.dtype), PatchPositions(places.image, places.end, (jnp.sin(angles), jnp.cos(angles)))


class Projector(nnx.Module):
    """Results of the tower as soft tokens: [B', i, d] -> [B', g, D]. A soft token is a square of patches."""

    def __init__(self, cfg: Model, vision: Gemma3Vision, layout: Layout, initializer: Initializer):
        self.vision = vision
        self.norm = RMSNorm("Bgd", cfg, layout, offset=1.0, eps=vision.norm_eps)
        self.product = Matrix("Bgd,dD->BgD", cfg, layout, initializer)

    def __call__(self, x: jax.Array, taken: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        """[B', i, d] -> [B', g, D]."""
        tokens = self.vision.tokens_per_side
        size = self.vision.patches_per_side // tokens
        squares = _reshape(x.astype(jnp.float32), tokens, size, tokens, size, x.shape[-1])
        means = _reshape(squares.mean((2, 4)), tokens * tokens, x.shape[-1]).astype(x.dtype)
        return self.product.multiply(self.norm(means)), []


class Merger(nnx.Module):
    """Squares of patches as soft tokens: [B, i, d] -> [B, g, D]. A LayerNorm of each patch, or with `norms_square` of
    each square, and two products with GELU between them."""

    def __init__(self, cfg: Model, vision: Qwen3Vision, layout: Layout, initializer: Initializer, norms_square: bool):
        self.merged, self.norms_square = vision.merged, norms_square
        dims, normed = ("Bgψd", "ψd") if norms_square else ("Bid", None)
        self.norm = LayerNorm(dims, cfg, layout, normed, eps=vision.norm_eps)
        self.up, self.up_bias = Matrix("Bgψd,ψdλ->Bgλ", cfg, layout, initializer), Bias("Bgλ", cfg, layout)
        self.down, self.down_bias = Matrix("Bgλ,λD->BgD", cfg, layout, initializer), Bias("BgD", cfg, layout)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, i, d] -> [B, g, D]."""
        x = x if self.norms_square else self.norm(x)
        squares = _reshape(x, x.shape[1] // self.merged, self.merged, x.shape[2])
        squares = self.norm(squares) if self.norms_square else squares
        h = ACTIVATIONS["gelu_exact"](self.up_bias(self.up.multiply(squares)))
        return self.down_bias(self.down.multiply(h))


class MergingProjector(nnx.Module):
    """Mergers of the tower's results, and of those of `deepstack_layers`."""

    def __init__(self, cfg: Model, vision: Qwen3Vision, layout: Layout, initializer: Initializer):
        self.merger, self.count = Merger(cfg, vision, layout, initializer, False), len(vision.deepstack_layers)
        self.deepstack = initializer.make_stack(self.count, lambda own: Merger(cfg, vision, layout, own, True))

    def __call__(self, x: jax.Array, taken: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        """[B, i, d] -> [B, g, D], and the same of each that was taken."""
        graphdef, params = nnx.split(self.deepstack)
        mergers = (nnx.merge(graphdef, jax.tree.map(lambda p, n=n: p[n], params)) for n in range(self.count))
        return self.merger(x), [merger(each) for merger, each in zip(mergers, taken, strict=True)]


class ShufflingProjector(nnx.Module):
    """A product of squares of patches as soft tokens: [B', i, d] -> [B', g, D]."""

    def __init__(self, cfg: Model, vision: SmolVision, layout: Layout, initializer: Initializer):
        self.vision = vision
        self.product = Matrix("Bgψd,ψdD->BgD", cfg, layout, initializer)

    def __call__(self, x: jax.Array, taken: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        """[B', i, d] -> [B', g, D]."""
        size, tokens = self.vision.merge_size, self.vision.patches_per_side // self.vision.merge_size
        rows = _reshape(x, tokens, size, tokens, size, x.shape[-1])
        squares = _reshape(rows.transpose(0, 1, 3, 2, 4, 5), tokens**2, size**2, x.shape[-1])
        return self.product.multiply(squares), []


# By the kind of the tower.
PROJECTORS: dict[str, Any] = {"gemma3": Projector, "qwen3_vl": MergingProjector, "smolvlm": ShufflingProjector}


class DecoderInputs(NamedTuple):
    """Input of a decoder that sees images."""

    x: jax.Array  # [B, t, D], embeddings with the soft tokens in their places
    features: list[jax.Array]  # [B, t, D] each, to be added behind the first layers; 0 where there is no soft token
    positions: jax.Array  # [B, T], or [B, T, 3] of tokens that have a row and a column


class VisionEncoder(nnx.Module):
    """Tower and projector, and the way of their results into the rows."""

    def __init__(self, cfg: Model, vision: AnyVision, layout: Layout, initializer: Initializer):
        self.layout, self.vision = layout, vision
        self.tower = Tower(cfg, vision, layout, initializer)
        self.projector = PROJECTORS[vision.kind](cfg, vision, layout, initializer)

    def __call__(self, x: jax.Array, images: Images, positions: jax.Array, remat: Remat, seed: Any) -> DecoderInputs:
        """Return what the decoder gets, for embeddings [B, t, D] and places [B, T] in documents."""
        with jax.named_scope("tower"):
            seen, taken = self.tower(images, remat, seed)
        with jax.named_scope("projector"):
            soft, features = self.projector(seen, taken)
        rows = self.layout.activation("BgD")
        index = self.layout.split_stream(reshard(images.image_index, self.layout.activation("BT")))
        specs = rows, self.layout.activation("Bt"), self.layout.activation("BtD")

        def place(soft: jax.Array, x: jax.Array) -> jax.Array:
            count = soft.shape[0] * soft.shape[1] // len(x)
            soft = jax.lax.reshape(soft.astype(x.dtype), (len(x), count, soft.shape[2]), out_sharding=rows)
            return jax.shard_map(_replace, in_specs=specs, out_specs=specs[2])(soft, index, x)

        zeros = jnp.zeros_like(x)
        placed = [place(each, zeros) for each in features]
        return DecoderInputs(place(soft, x), placed, self._find_positions(images, positions))

    def _find_positions(self, images: Images, positions: jax.Array) -> jax.Array:
        """Return positions [B, T, 3] in time, of rows and of columns; [B, T] of a tower that has none of these."""
        vision = self.vision
        if not isinstance(vision, Qwen3Vision):
            return positions
        find = partial(find_positions, num_patches=images.pixels.shape[1], merge=vision.merge_size)
        whole = PartitionSpec(self.layout.activation("BT")[0])  # a place in time depends on all earlier tokens
        arrays = (positions, images.image_index, images.grids)
        found = jax.shard_map(find, in_specs=whole, out_specs=whole)(*(reshard(each, whole) for each in arrays))
        return reshard(found, PartitionSpec(*self.layout.activation("BT"), None))


def find_positions(positions: jax.Array, index: jax.Array, grids: jax.Array, num_patches: int, merge: int) -> jax.Array:
    """Return positions [B, T, 3] in time, of rows and of columns, for places [B, T] in documents (M-RoPE).

    All tokens of an image have its first one's place in time, to which rows and columns are added. What follows is as
    far behind as the longer side of the image; one of 2 x 3 soft tokens:

        time       0 1 2 2 2 2 2 2 5 6
        rows       0 1 2 2 2 3 3 3 5 6
        columns    0 1 2 3 4 2 3 4 5 6
    """
    places = find_places(grids, num_patches, merge)
    is_soft, patch = index >= 0, jnp.maximum(index, 0) * merge**2

    def of_tokens(values: jax.Array) -> jax.Array:
        return jnp.where(is_soft, jnp.take_along_axis(values, patch, axis=1), 0)

    is_last = of_tokens(places.end) == patch + merge**2
    longer = jnp.maximum(of_tokens(places.rows), of_tokens(places.columns)) // merge
    steps = jnp.where(is_soft, jnp.where(is_last, longer, 0), 1) - 1  # to the next token, beside the usual 1
    before = jnp.cumsum(steps, axis=1) - steps
    starts = jnp.maximum(jnp.arange(positions.shape[1], dtype=jnp.int32) - positions, 0)
    time = positions + before - jnp.take_along_axis(before, starts, axis=1)
    return jnp.stack([time, *(time + of_tokens(each) // merge for each in (places.row, places.column))], axis=-1)


def _replace(soft: jax.Array, index: jax.Array, x: jax.Array) -> jax.Array:
    """Return x [B, t, D] with the soft tokens [B, s, D] of an index [B, t] in their places; -1 keeps x."""
    taken = jnp.take_along_axis(soft, jnp.maximum(index, 0)[:, :, None], axis=1)
    return jnp.where((index >= 0)[:, :, None], taken, x)
