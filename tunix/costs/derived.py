"""Costs of a training step, derived from config and mesh; no device and no compile is needed."""

from dataclasses import dataclass

import jax

from tunix.config import Config
from tunix.costs.activation_memory import count_activation_bytes
from tunix.costs.expert_transfers import list_expert_transfers
from tunix.costs.matmul_dtypes import compute_matmul_share
from tunix.costs.product_transfers import list_product_transfers
from tunix.costs.program_cache import find_program
from tunix.costs.state_memory import count_state_bytes
from tunix.costs.transfers import Transfer, list_transfers
from tunix.models.flops import chunk_flops_per_token, flops_per_token, forward_flops_per_token
from tunix.models.paths import parameter_name
from tunix.models.remat import product_name
from tunix.training.program import Program


@dataclass(frozen=True)
class Costs:
    """Costs of one optimizer step on one device."""

    num_bytes: dict[str, int]  # at one time, by what they are for
    transfers: list[Transfer]
    model_flops: float  # what MFU counts
    flops: float  # with what rematerialization computes again
    tokens_per_step: int  # of the whole mesh
    matmul_share: float = 0.0  # of the FLOPs: products of `training.matmul_dtype`

    @property
    def memory(self) -> int:
        return sum(self.num_bytes.values())


def derive(cfg: Config, sizes: dict[str, int], platform: str | None = None, with_activations: bool = True) -> Costs:
    """Return the costs of a step of `cfg` on a mesh of these sizes; see `find_program` and `derive_costs`."""
    return derive_costs(find_program(cfg, sizes, platform), with_activations)


def derive_costs(program: Program, with_activations: bool = True) -> Costs:
    """Return the costs of a step of a program.

    Activations are traced, which takes most of the time. Without them, everything else is the same.
    """
    cfg, arch, batch = program.cfg, program.arch, program.batch
    num_tokens = batch.num_tokens / program.mesh.size  # of one device
    flops = flops_per_token(cfg.model, arch.num_active, arch.num_active_trained, batch.seq_len) * num_tokens
    forward_flops = forward_flops_per_token(cfg.model, arch.num_active, batch.seq_len) * num_tokens
    chunk_flops = chunk_flops_per_token(cfg.model, batch.seq_len) * num_tokens
    again = _derive_share_again(program)
    # `flops` leaves out what linear attention computes inside of its chunks: one time forward and two times backward.
    all_flops = flops + again * forward_flops + (3 + again) * chunk_flops
    lists = list_transfers, list_product_transfers, list_expert_transfers
    with jax.sharding.use_abstract_mesh(program.abstract_mesh):
        num_bytes = count_state_bytes(program) | {
            "activations": count_activation_bytes(program) if with_activations else 0
        }
        transfers = [transfer for each in lists for transfer in each(program)]
    return Costs(
        num_bytes,
        transfers,
        flops,
        all_flops + _count_pipeline_flops(program, all_flops, forward_flops, num_tokens),
        batch.num_tokens,
        compute_matmul_share(cfg, arch, batch.seq_len),
    )


def _derive_share_again(program: Program) -> float:
    """Return the share of the blocks' products that the backward pass computes again; the logits are not in blocks."""
    again, in_all = 0.0, 0
    for path, weight in jax.tree.leaves_with_path(program.arch.weights):
        if weight.equation.is_stacked and not weight.equation.is_vector:
            size = round(weight.size * weight.used)
            again += size * program.remat.computes_again(product_name(parameter_name(path)))
            in_all += size
    return again / in_all


def _count_pipeline_flops(program: Program, flops: float, forward_flops: float, num_tokens: float) -> float:
    """Return the FLOPs that stages add on one device: the bubble, and the forward pass of the stages once more.

    `flops` are those without stages, of `num_tokens` tokens. The logits are outside of the stages. In a bubble a stage
    computes what nobody uses: 4 stages with 12 parts (gpipe) take 12 + 3 ticks, 15 / 12 = 1.25 for each part, so the
    blocks' FLOPs grow by a quarter.
    """
    model, pipeline = program.cfg.model, program.pipeline
    logits = 2.0 * model.vocab_size * model.embed_dim * num_tokens  # forward; three times in all
    again = pipeline.runs_again * (forward_flops - logits)
    in_blocks = flops - 3 * logits + again
    return again + in_blocks * (pipeline.ticks_per_part - 1)
