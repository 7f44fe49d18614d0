"""Costs of a training step, derived from config and mesh; no device and no compile is needed."""

from dataclasses import dataclass

import jax

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.costs.communication import Transfer, list_expert_transfers, list_matmul_transfers, list_transfers
from tunix.costs.devices import compute_peak_tflops, find_kind, find_matmul_tflops, read_device_kinds
from tunix.costs.memory import count_activation_bytes, count_state_bytes, find_program
from tunix.models.flops import chunk_flops_per_token, flops_per_token, forward_flops_per_token
from tunix.models.layers import parameter_name
from tunix.models.remat import product_name
from tunix.models.table import MATMUL_DTYPES
from tunix.sharding.equations import Equation
from tunix.training.program import Program
from tunix.training.state import Architecture

# Products of the numbers of `training.matmul_dtype`: devices that have them, and their share of the arithmetic.

# Letters of experts, of a router's scores, and of inputs of layers: their products keep the compute dtype.
OTHERS = "XYp"


def check_matmul_dtype(cfg: Config, platform: str, device_kind: str) -> None:
    """Raise `UserError` where `training.matmul_dtype` is asked of devices that do not multiply its numbers.

    CPUs are no mistake: they emulate it, for tests and for a look at the loss. `device_kind` is the driver's name.
    """
    dtype, kind = cfg.training.matmul_dtype, find_kind(device_kind)
    if dtype is None or platform == "cpu" or (kind is not None and find_matmul_tflops(kind, dtype) is not None):
        return
    chips = ", ".join(each.name for each in read_device_kinds().values() if find_matmul_tflops(each, dtype) is not None)
    raise UserError(
        f"training.matmul_dtype={dtype}: {device_kind} has no products of {MATMUL_DTYPES[dtype].numbers} that are "
        f"known here; {chips} have them, and CPUs emulate them. Leave training.matmul_dtype=null"
    )


def compute_matmul_share(cfg: Config, arch: Architecture, seq_len: int) -> float:
    """Return the share of a step's model FLOPs that products of `training.matmul_dtype` have; 0 without it."""
    if cfg.training.matmul_dtype is None:
        return 0.0
    flops = 0.0
    trained = jax.tree.leaves(arch.is_trained)
    for (path, weight), is_trained in zip(jax.tree.leaves_with_path(arch.weights), trained, strict=True):
        if _is_narrow(parameter_name(path), weight.equation):
            flops += (6 if is_trained else 4) * weight.size
    return flops / flops_per_token(cfg.model, arch.num_active, arch.num_active_trained, seq_len)


def find_run_peak_tflops(cfg: Config, arch: Architecture, seq_len: int, device_kind: str) -> float | None:
    """Return the peak of one device for a run's products, by the driver's name; None if the name is not known."""
    kind = find_kind(device_kind)
    return (
        compute_peak_tflops(kind, cfg.training.matmul_dtype, compute_matmul_share(cfg, arch, seq_len)) if kind else None
    )


def _is_narrow(name: str, equation: Equation) -> bool:
    """Return whether a parameter's products are of `training.matmul_dtype`: those of an `Einsum` (models/layers.py)."""
    return equation.is_stacked and name.endswith(".w") and not set(OTHERS) & set(equation.w)


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
    recompute = _derive_recompute_fraction(program)
    # `flops` leaves out what linear attention computes inside of its chunks: one time forward and two times backward.
    all_flops = flops + recompute * forward_flops + (3 + recompute) * chunk_flops
    lists = list_transfers, list_matmul_transfers, list_expert_transfers
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


def _derive_recompute_fraction(program: Program) -> float:
    """Return the share of the blocks' products that the backward pass computes again; the logits are not in blocks."""
    recompute, in_all = 0.0, 0
    for path, weight in jax.tree.leaves_with_path(program.arch.weights):
        if weight.equation.is_stacked and not weight.equation.is_vector:
            size = round(weight.size * weight.used)
            recompute += size * program.choices.remat.recompute_fraction(product_name(parameter_name(path)))
            in_all += size
    return recompute / in_all


def _count_pipeline_flops(program: Program, flops: float, forward_flops: float, num_tokens: float) -> float:
    """Return the FLOPs that stages add on one device: the bubble, and the forward pass of the stages once more.

    `flops` are those without stages, of `num_tokens` tokens. The logits are outside of the stages. In a bubble a stage
    computes what nobody uses: 4 stages with 12 parts take 12 + 3 ticks, 15 / 12 = 1.25 for each part, so the blocks'
    FLOPs grow by a quarter.
    """
    model, pipeline = program.cfg.model, program.choices.pipeline
    logits = 2.0 * model.vocab_size * model.embed_dim * num_tokens  # forward; three times in all
    recompute = pipeline.recompute_runs * (forward_flops - logits)
    in_blocks = flops - 3 * logits + recompute
    return recompute + in_blocks * (pipeline.iterations_per_microbatch - 1)
