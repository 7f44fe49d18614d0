"""What a run is about to do, in numbers, before it does it."""

import io
import math
from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from tunix.config import Config
from tunix.data.batches import Packed
from tunix.data.corpus import Corpus
from tunix.flops import flops_per_token
from tunix.layout import MESH_AXES, kv_heads_replicated, shown
from tunix.mesh import bytes_per_device, data_shards, device_table
from tunix.optim import phase_steps
from tunix.state import Architecture, State


@dataclass(frozen=True)
class Sizes:
    """The numbers that follow from config and mesh."""

    num_microbatches: int  # A
    micro_batch: int  # B: sequences over all data shards
    tokens_per_step: int
    total_steps: int | None  # None: only the data will tell
    flops_per_token: float
    num_devices: int

    @property
    def batch_size(self) -> int:
        return self.num_microbatches * self.micro_batch


def derive_sizes(cfg: Config, mesh: Mesh, num_parameters: int, corpus: Corpus | None) -> Sizes:
    """`corpus` is None in a dry run."""
    training = cfg.training
    microbatches = training.accumulation(data_shards(mesh))
    micro_batch = training.micro_batch_size * data_shards(mesh)
    batch = microbatches * micro_batch
    limits = [training.max_steps]
    if training.max_tokens is not None:
        limits.append(max(1, training.max_tokens // (batch * training.seq_len)))
    if training.num_epochs is not None and corpus is not None:
        epoch = len(Packed(corpus.train, training.seq_len))
        limits.append(max(1, math.floor(training.num_epochs * epoch / batch)))
    known = [limit for limit in limits if limit is not None]
    return Sizes(
        microbatches,
        micro_batch,
        batch * training.seq_len,
        min(known) if known else None,
        flops_per_token(cfg.model, num_parameters, training.seq_len),
        mesh.size,
    )


def start_report(cfg: Config, arch: Architecture, state: State, mesh: Mesh, sizes: Sizes, corpus: Corpus | None) -> str:
    """Every derived number as text; `state` may be shapes, `corpus` is None in a dry run."""
    training, strategy = cfg.training, cfg.training.sharding_strategy
    params, optimizer = bytes_per_device(state["params"]), bytes_per_device(state["opt_state"])
    shards = data_shards(mesh)
    kinds = {device.device_kind for device in mesh.devices.flat}
    rows = [
        ("model", f"{cfg.model.family}, {arch.num_parameters:,} parameters, {cfg.model.num_layers} layers, {cfg.model.attention} attention"),
        ("data", corpus.summary if corpus else "not read in a dry run"),
        ("mesh", f"{shown(mesh.shape, MESH_AXES)} over {mesh.size} x {', '.join(sorted(kinds))} in {jax.process_count()} processes"),
        ("sharding", f"{strategy}; weights {training.dtypes['param']}, products {training.dtypes['compute']}, gradient sums {training.dtypes['reduce']}; remat {training.remat}"),
        (
            "global batch",
            f"{sizes.batch_size:,} sequences = {sizes.num_microbatches} microbatches x {shards} data shards x {training.micro_batch_size}; "
            f"gradients reduced every {training.sync_gradients_every}",
        ),
        ("tokens per step", f"{sizes.tokens_per_step:,} = {sizes.batch_size:,} x {training.seq_len}"),
        ("length", _length(cfg, sizes)),
        ("bytes per device", f"{(params + optimizer) / 2**30:.3f} GiB = weights {params / 2**30:.3f} + {cfg.optimizer.name} {optimizer / 2**30:.3f}; gradients and activations come on top"),
        ("FLOPs per token", f"{sizes.flops_per_token / 1e9:.4f} GFLOP (forward and backward, causal attention); {sizes.flops_per_token * sizes.tokens_per_step / 1e12:.3f} TFLOP per step"),
    ]  # fmt: skip
    if kv_heads_replicated(cfg.model.dims, mesh.shape):
        rows.append(
            (
                "key/value heads",
                f"{cfg.model.num_kv_heads} heads on tp={mesh.shape['tp']}: every device keeps all of them",
            )
        )
    table = Table(
        show_header=False,
        box=None,
        title=f"{cfg.project_name}{f' / {cfg.run_name}' if cfg.run_name else ''}",
        title_justify="left",
    )
    for row in rows:
        table.add_row(*row)
    devices = Table(title="device ids by place on the mesh", title_justify="left", box=None)
    head, *body = device_table(mesh)
    for column in head:
        devices.add_column(column)
    for row in body:
        devices.add_row(*row)
    return _text(table) + "\n" + _text(devices)


def _length(cfg: Config, sizes: Sizes) -> str:
    if sizes.total_steps is None:
        return f"{cfg.training.num_epochs} epochs: steps are known once the data are read"
    steps = sizes.total_steps
    warmup, decay = (phase_steps(cfg.scheduler, phase, steps, sizes.tokens_per_step) for phase in ("warmup", "decay"))
    tail = f", decay over the last {decay}" if cfg.scheduler.name in ("wsd", "sqrt_decay") else ""
    return (
        f"{steps:,} steps, {steps * sizes.tokens_per_step:,} tokens; {cfg.optimizer.name} at {cfg.optimizer.learning_rate:g}, "
        f"{cfg.scheduler.name} with {warmup} warmup steps{tail}"
    )


def _text(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
