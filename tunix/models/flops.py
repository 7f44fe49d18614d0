"""Arithmetic that a step needs, and what devices can do: the two halves of model FLOPs utilisation (MFU)."""

from collections.abc import Sequence

import numpy as np

from tunix.config import Model
from tunix.config.vision import NUM_CHANNELS, AnyVision, Qwen3Vision, SmolVision
from tunix.models.linear_attention import CHUNK, count_rounds


def flops_per_token(cfg: Model, num_active: int, num_trained: int, seq_len: int, needs_head: bool = True) -> float:
    """Return FLOPs of both passes per token: the forward pass three times, less the gradients of frozen weights.

    6 x parameters (4 x those that are frozen; none of tables that are only looked up: a tied embedding counts, for the
    logits) and 12 x heads x head dim x tokens attended to (PaLM, arXiv:2204.02311, appendix B, halved for causality).
    What rematerialization computes again does not count. `num_active` and `num_trained` are parameters that compute a
    token: of experts, those of as many as a token is sent to. Without `needs_head` there are no logits (task=embed).
    """
    # Three products for each weight: y = x W, and backward dx = dy W^T and dW = x^T dy. A frozen weight needs no dW.
    frozen = max(0, _multiplied(cfg, num_active, needs_head) - num_trained)
    return 3 * forward_flops_per_token(cfg, num_active, seq_len, needs_head) - 2.0 * frozen


def forward_flops_per_token(cfg: Model, num_active: int, seq_len: int, needs_head: bool = True) -> float:
    """Return two FLOPs for each product with a weight, or with a key or value that the mask and the window let through.

    Linear attention reads the memory of each head, corrects it, and asks it: three products with E x M numbers.
    """
    # A layer of `model.mtp` has scores, and logits of its own.
    further = 0.0 if cfg.mtp is None else _score_flops(cfg.mtp_model, seq_len) + 2.0 * cfg.vocab_size * cfg.embed_dim
    memory = 0.0 if cfg.linear_attention is None else 6.0 * cfg.num_linear_layers * cfg.linear_attention.state_size
    return 2.0 * _multiplied(cfg, num_active, needs_head) + _score_flops(cfg, seq_len) + further + memory


def _score_flops(cfg: Model, seq_len: int) -> float:
    return sum(
        2.0 * cfg.num_heads * (heads.dim + heads.value_dim) * attended_tokens(cfg, seq_len, layers)
        for heads, layers in cfg.head_kinds.items()
    )


def chunk_flops_per_token(cfg: Model, seq_len: int, num_shards: int = 1) -> float:
    """Return FLOPs that linear attention by chunks has beyond those of token by token; MFU does not count them.

    Within a chunk, keys meet keys and queries, and a triangular system is solved (`models/linear_attention.py`). Where
    `num_shards` devices share a sequence, memory and results have more columns.
    """
    linear = cfg.linear_attention
    if linear is None:
        return 0.0
    local_tokens = seq_len // num_shards
    size, both = min(CHUNK, local_tokens), linear.key_dim + linear.value_dim
    # For each token and each token of its chunk: scores of keys with keys and with queries; in each value head the
    # triangular system with its two right sides, and the sum of errors.
    key_flops = 4 * linear.num_key_heads * linear.key_dim
    value_flops = linear.num_value_heads * (both + 2 * linear.value_dim)
    flops: float = size * (key_flops + value_flops)
    if num_shards > 1:
        # Three products of a token and the sum of errors for each column of a unit matrix, and what these columns make
        # of the memory before; for all tokens of a device, the products of the rounds in `pass_memory`.
        more: float = 6 * linear.key_dim + 2 * size + 2 * linear.value_dim
        more += 2 * linear.key_dim * both * count_rounds(num_shards) / local_tokens
        flops += linear.num_value_heads * linear.key_dim * more
    return float(cfg.num_linear_layers * flops)


def tower_flops(cfg: Model, trained_shares: tuple[float, float], recompute: float = 0.0) -> float:
    """Return FLOPs of both passes per image of tower and projector; 0 of a model of text alone.

    `trained_shares` are those of the parameters of both (`Architecture.trained_shares_of_vision`). A part that is
    trained has three passes, as in `flops_per_token`. A tower without anything trained has one, as no gradient reaches
    it. `recompute` is the share of a trained tower that the backward pass computes again.
    """
    vision = cfg.vision
    if vision is None:
        return 0.0
    tower, projector = forward_tower_flops(cfg, vision)
    tower_share, projector_share = trained_shares
    tower_passes = 1 + tower_share + ((1 + recompute) if tower_share else 0)
    # The gradient goes through the projector's products to the tower, or to a norm before them. smolvlm has none there.
    goes_through = tower_share or (projector_share and not isinstance(vision, SmolVision))
    projector_passes = 1 + projector_share + (1 if goes_through else 0)
    return tower_passes * tower + projector_passes * projector


def forward_tower_flops(cfg: Model, vision: AnyVision) -> tuple[float, float]:
    """Return FLOPs of the forward pass of the tower for an image of the largest size, and those of the projector."""
    width, patches = vision.embed_dim, vision.num_patches
    products = patches * width * (4 * width + 2 * vision.mlp_dim) + 2 * patches * vision.seen_patches * width
    pixels, projector = NUM_CHANNELS * vision.patch_size**2, width * cfg.embed_dim
    if isinstance(vision, SmolVision):
        projector *= vision.merged
    if isinstance(vision, Qwen3Vision):
        pixels, merged = vision.frames * pixels, vision.merged * width
        projector = (1 + len(vision.deepstack_layers)) * merged * (merged + cfg.embed_dim)
    tower = 2.0 * (vision.num_layers * products + patches * pixels * width)
    return tower, 2.0 * vision.tokens_per_image * projector


def attended_tokens(cfg: Model, seq_len: int, layers: Sequence[int]) -> float:
    """Return the tokens that a token attends to, a mean over `seq_len` tokens and a sum over these layers."""
    context = np.arange(1, seq_len + 1)
    count_local = {
        "window": lambda window: np.minimum(context, window),
        "chunk": lambda window: (context - 1) % window + 1,
    }[cfg.local_attention]
    # Token n of a row sees n tokens; with a window of 4: 1 2 3 4 4 4; with chunks of 4: 1 2 3 4 1 2.
    windows = cfg.list_windows(seq_len)
    return float(sum(count_local(windows[layer]).mean() for layer in layers))


def _multiplied(cfg: Model, num_active: int, needs_head: bool) -> int:
    # A lookup multiplies nothing. Of one table or two, one is multiplied, for the logits.
    has_logits = cfg.labels is None
    num_tables = (1 if cfg.tied_head or not has_logits else 2) - (has_logits and needs_head)
    looked_up = num_tables * cfg.vocab_size + (cfg.context_length if cfg.positions == "learned" else 0)
    rows = 0 if cfg.layer_inputs is None else cfg.vocab_size * cfg.num_layers * cfg.layer_inputs.dim
    return num_active - looked_up * cfg.embed_dim - rows
