"""The decoder's architecture, and the mesh."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from tunix import layout
from tunix.config.base import Count, Positive, Section

MeshShape = Annotated[Any, AfterValidator(layout.parse)]


class Model(Section):
    """A decoder's architecture and size, and the mesh it is laid out on."""

    family: Literal["gemma3"]
    """Architecture: how the parts below are put together."""
    vocab_size: Count
    """Rows of the embedding table; at least the tokenizer's words."""
    embed_dim: Count
    """Width of the residual stream (D)."""
    mlp_dim: Count
    """Hidden width of the gated MLP (F)."""
    num_layers: Count
    """Decoder blocks (L)."""
    num_heads: Count
    """Query heads (N)."""
    num_kv_heads: Count
    """Key/value heads (K); each serves num_heads / num_kv_heads query heads."""
    head_dim: Count
    """Width of one head (H), even."""
    sliding_window: Count
    """Tokens that a local layer attends to, itself included."""
    global_every: Count
    """Every n-th layer attends to all earlier tokens; the others are local."""
    rope_theta: Positive
    """RoPE base of global layers."""
    local_rope_theta: Positive
    """RoPE base of local layers."""
    rope_scale: Positive
    """Positions of global layers are divided by this (linear RoPE scaling)."""
    query_scale: Positive
    """Queries are multiplied by query_scale ** -0.5."""
    norm_eps: Positive
    """Added to the mean square in RMSNorm."""
    attention: Literal["xla", "cudnn"]
    """Attention kernel: plain XLA anywhere, cuDNN flash on GPUs."""
    mesh_shape: MeshShape
    """Device mesh: `[[sizes], [axis names]]` of the axes dp, fsdp, tp in any order, one -1 to fill; or `auto`, all
    devices on fsdp."""

    @property
    def dims(self) -> dict[str, int]:
        """Size of each dimension of the weights by its letter (`layout.LETTERS`)."""
        return {
            "V": self.vocab_size, "D": self.embed_dim, "F": self.mlp_dim, "L": self.num_layers,
            "N": self.num_heads, "K": self.num_kv_heads, "H": self.head_dim,
        }  # fmt: skip

    @model_validator(mode="after")
    def _check(self) -> "Model":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not divisible by model.num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even: RoPE rotates pairs")
        sizes = layout.explicit_sizes(self.mesh_shape)
        if sizes:
            layout.check_divides(self.dims, sizes)
        return self
