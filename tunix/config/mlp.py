"""The part of a block that works on each token alone: one MLP, or experts of which a router chooses a few."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunix.base.section import Count, CountOrZero, Flag, Positive, PositiveOrZero, Section

Activation = Literal["silu", "gelu", "relu2", "xielu"]


class GatedMlp(Section):
    """A linear unit gated by its activation (Shazeer 2020, arXiv:2002.05202)."""

    kind: Literal["gated"]
    """The activation of one product gates another."""
    activation: Activation
    """SiLU, GELU by its tanh formula, squared ReLU (relu2, arXiv:2109.08668), or xIELU (arXiv:2411.13010)."""


class PlainMlp(Section):
    """Two products with an activation between them."""

    kind: Literal["plain"]
    """One product, the activation, another product."""
    activation: Activation
    """SiLU, GELU by its tanh formula, squared ReLU (relu2, arXiv:2109.08668), or xIELU (arXiv:2411.13010)."""


class ExpertsMlp(Section):
    """A mixture of experts: gated MLPs, of which a router chooses a few for each token (arXiv:1701.06538)."""

    kind: Literal["experts"]
    """Experts, and a router that chooses among them."""
    activation: Literal["silu", "gelu", "clamped_silu"]
    """SiLU, GELU by its tanh formula, or GPT-OSS's gate: x of at most 7 times sigmoid(1.702 x), times what it gates,
    within 7 of 0, plus 1. The shared expert and dense layers have the first two."""
    biases: Flag
    """The router's logits and each projection of an expert have a bias."""
    num_experts: Count
    """Experts of a layer (X)."""
    experts_per_token: Count
    """Experts that compute each token."""
    expert_dim: Count
    """Hidden width of one expert (G)."""
    shared_dim: Count | None
    """Hidden width of a shared expert, which computes every token beside the chosen ones (U); null for none."""
    shared_gate: Flag
    """The shared expert's result is multiplied by the sigmoid of a projection of the token to one number."""
    dense_layers: CountOrZero
    """Number of first layers that have one gated MLP of width mlp_dim and no experts."""
    every: Count
    """Every n-th layer has experts; the others have one gated MLP of width mlp_dim."""
    scores: Literal["softmax", "sigmoid"]
    """Scores of the experts, out of the router's logits: softmax over all experts, or a sigmoid of each."""
    normalized: Flag
    """Divide the scores of a token's experts by their sum, before the results are added with these weights."""
    scale: Positive
    """The weights are multiplied by this."""
    weighted: Literal["results", "inputs"]
    """What the weights of a token's experts multiply: the experts' results, or the token before they compute it."""
    num_groups: Count
    """Groups of equal size that the experts are in; 1 for no groups."""
    groups_per_token: Count
    """Groups that a token's experts are taken from: those with the largest sum of two scores (arXiv:2412.19437)."""
    balance_loss: PositiveOrZero
    """Weight of the loss that balances the experts' loads within each sequence (arXiv:2412.19437, equation 17)."""
    z_loss: PositiveOrZero
    """Weight of the square of log(Z), Z the sum of exp(router's logits), per token (arXiv:2202.08906)."""
    bias_rate: PositiveOrZero | None
    """Each expert has a bias in the choice, not in the weights; after a step it rises by this where the expert's load
    was below the mean, and falls by this where it was above (arXiv:2408.15664). null for no bias."""
    beside_mlp: Flag
    """Each layer also has a gated MLP of width mlp_dim, with norms of its own before and after it, and so have the
    experts; the router takes the residual stream, divided by its root mean square and sqrt(embed_dim), times a trained
    scale; and the weight of each expert is multiplied by a trained number (Gemma 4)."""

    @model_validator(mode="after")
    def _check(self) -> "ExpertsMlp":
        prefix, groups = "model.mlp.", self.num_groups
        if self.num_experts % groups:
            raise ValueError(f"{prefix}num_experts={self.num_experts} is not divisible by {prefix}num_groups={groups}")
        if self.groups_per_token > groups:
            raise ValueError(
                f"{prefix}groups_per_token={self.groups_per_token} is more than {prefix}num_groups={groups}"
            )
        if self.activation == "clamped_silu" and (self.shared_dim or self.dense_layers or self.every > 1):
            raise ValueError(
                f"{prefix}activation=clamped_silu is one of experts; set {prefix}shared_dim=null, "
                f"{prefix}dense_layers=0 and {prefix}every=1, or {prefix}activation=silu"
            )
        if self.shared_gate and self.shared_dim is None:
            raise ValueError(
                f"{prefix}shared_gate=true: there is no shared expert; give {prefix}shared_dim, or leave the gate out"
            )
        choices = self.num_experts // groups * self.groups_per_token
        if self.experts_per_token > choices:
            where = (
                f"{prefix}num_experts={self.num_experts}"
                if groups == 1
                else (
                    f"the {choices} experts in {prefix}groups_per_token={self.groups_per_token} of "
                    f"{prefix}num_groups={groups} groups"
                )
            )
            raise ValueError(f"{prefix}experts_per_token={self.experts_per_token} is more than {where}; lower it")
        return self


# Keys of experts that say how they are trained, and nothing about what the decoder computes.
TRAINING_KEYS = ("balance_loss", "z_loss")

AnyMlp = Annotated[GatedMlp | PlainMlp | ExpertsMlp, Field(discriminator="kind")]
