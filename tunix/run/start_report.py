"""The start report: every derived number of a run, before its first step."""

import socket

import jax
from jax.sharding import Mesh
from rich.table import Table

from tunix.base.tables import as_text
from tunix.cli.architecture import describe_keys_outside_family
from tunix.cli.intent import count_idle_rows
from tunix.config import Config
from tunix.config.mlp import ExpertsMlp
from tunix.config.step_ranges import read_steps
from tunix.config.task import Grpo
from tunix.config.training import Training
from tunix.costs.derived import derive_costs
from tunix.costs.rollout_memory import plan_rollout, read_device_bytes
from tunix.data.prompts import AnyCorpus
from tunix.processes import peers
from tunix.run.batch_report import describe_batch
from tunix.run.model_report import describe_model
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.dims import DIMS, stream_axes
from tunix.sharding.mesh import MAX_ROWS, device_table
from tunix.sharding.mesh_shape import format_mesh_shape, stream_shards, token_shards, unsplit_dims
from tunix.training.program import Program
from tunix.training.sizes import Sizes


def make_start_report(
    cfg: Config, program: Program, mesh: Mesh, sizes: Sizes, corpus: AnyCorpus | None, chosen: str
) -> str:
    """Return every derived number as text; `corpus` is None in a dry run, `chosen` is what `resolve_auto` says.

    Process 0 alone derives them: what the backward pass keeps is traced, which takes seconds.
    """
    # On every process, before the others leave: `_describe_processes` gathers.
    processes = _describe_processes() if jax.process_count() > 1 else ""
    if not peers.is_main():
        return "the start report is in train.log, the log of process 0"
    rows = {
        **describe_model(cfg, program, corpus),
        **_describe_devices(cfg, program, mesh),
        **describe_batch(cfg, program, mesh, sizes),
        **_describe_costs(cfg, program, mesh, sizes),
        **({"chosen": chosen} if chosen else {}),
        **_describe_exceptions(cfg, program, corpus),
        **(_describe_rollout(program, cfg.task, mesh) if isinstance(cfg.task, Grpo) else {}),
        **({"processes": processes} if processes else {}),
        **_describe_unsplit(cfg, mesh),
    }
    return _as_tables(f"{cfg.project_name} / {cfg.run_name}" if cfg.run_name else cfg.project_name, rows, mesh)


def _as_tables(title: str, rows: dict[str, str], mesh: Mesh) -> str:
    """Return the rows as a table, and below it the ids of the devices by their place on the mesh."""
    table = Table(show_header=False, box=None, title=title, title_justify="left")
    for name, text in rows.items():
        table.add_row(name, text)
    devices = Table(box=None)
    head, *body = device_table(mesh)
    for column in head:
        devices.add_column(column)
    for row in body:
        devices.add_row(*row)
    return f"{as_text(table)}\ndevice ids by place on the mesh\n{as_text(devices)}"


def _describe_devices(cfg: Config, program: Program, mesh: Mesh) -> dict[str, str]:
    """Return the rows about the mesh, and what its devices keep of the state and of the activations."""
    training, dtypes = cfg.training, cfg.training.dtypes
    kinds = {device.device_kind for device in mesh.devices.flat}
    return {
        "mesh": f"{format_mesh_shape(mesh.shape)} over {mesh.size} x {', '.join(sorted(kinds))}, "
        f"{jax.process_count()} process(es)" + ("; each step waits for the slowest kind" if len(kinds) > 1 else ""),
        "sharding": f"{training.sharding_strategy}; weights {dtypes['param']}, "
        f"products {_describe_products(cfg, mesh)}, gradient sums {dtypes['reduce']}; "
        + _describe_remat(program.cfg.training),
        **_describe_stream(cfg, program, mesh),
    }


def _describe_costs(cfg: Config, program: Program, mesh: Mesh, sizes: Sizes) -> dict[str, str]:
    """Return the rows about memory and arithmetic."""
    gib = {name: size / 2**30 for name, size in derive_costs(program).num_bytes.items()}
    return {
        "bytes per device": f"{gib['weights'] + gib['optimizer']:.3f} GiB = weights {gib['weights']:.3f} + "
        f"{cfg.optimizer.name} {gib['optimizer']:.3f}; predicted on top: gradients {gib['gradients']:.3f}, "
        f"gathered weights {gib['gathered']:.3f}, activations {gib['activations']:.3f}",
        "FLOPs per token": f"{sizes.flops_per_token / 1e9:.4f} GFLOP forward and backward, causal attention; "
        f"{sizes.tflop_per_step:.3f} TFLOP per step",
    }


def _describe_exceptions(cfg: Config, program: Program, corpus: AnyCorpus | None) -> dict[str, str]:
    """Return rows about what most runs do not have; each is there only where it holds."""
    training, rows = cfg.training, {}
    num_tokens = corpus.vocabulary.num_tokens if corpus else None
    if idle := count_idle_rows(cfg, num_tokens):
        rows["vocabulary"] = (
            f"{cfg.model.vocab_size:,} rows of embedding, of which no token reaches {idle:,}: the tokenizer has "
            f"{num_tokens or cfg.tokenizer.vocab_size:,} tokens; model.vocab_size=auto gives as many rows as tokens"
        )
    if skipped := [read_steps(text) for text in training.skip_steps]:
        ranges = ", ".join(f"{steps[0]:,} to {steps[-1]:,}" for steps in skipped)
        rows["left out"] = f"data of {sum(map(len, skipped)):,} steps: {ranges}"
    if program.guard:
        rows["spikes"] = (
            f"loss or gradient norm more than {program.guard.deviations:g} standard deviations above the mean of the "
            f"last {program.guard.window} steps: the update is skipped; more than {training.max_spikes} in "
            "a row end the run"
        )
    if copies := program.abstract.get("copies", {}):
        size = f"{bytes_per_device(copies) / 2**30:.3f} GiB of {cfg.optimizer.name}'s bytes"
        place = "in the host's memory" if training.ema_memory == "host" else size
        rows["copies"] = f"{', '.join(copies)}: {place}"
    if why := describe_keys_outside_family(cfg.model):
        rows["tunix.export"] = f"cannot write this model as a {cfg.model.family}: {why}"
    return rows


def _describe_unsplit(cfg: Config, mesh: Mesh) -> dict[str, str]:
    """Return a row for each dimension that its mesh axes do not divide."""
    rows = {}
    for letter, axes in unsplit_dims(cfg.dims, mesh.shape).items():
        split = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
        rows[DIMS[letter].name] = f"{cfg.dims[letter]:,} on {split}: every device keeps all"
    return rows


def _describe_remat(training: Training) -> str:
    """Return in words what blocks keep for their backward pass, and what waits in the host's memory."""
    text = f"remat {training.remat}"
    if training.remat_every > 1:
        text += f" in one of {training.remat_every} blocks, none in the others"
    return text if training.offload == "none" else f"{text}; {training.offload} in the host's memory"


def _describe_stream(cfg: Config, program: Program, mesh: Mesh) -> dict[str, str]:
    """Return in words which tokens of the residual stream a device has; nothing where no axis could split them."""
    training, num_tokens = cfg.training, cfg.training.seq_len // token_shards(mesh.shape)
    together = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in stream_axes())
    if stream_shards(mesh.shape) == 1:
        useless = f"training.sequence_parallel=true changes nothing with {together}"
        return {"residual stream": useless} if training.sequence_parallel is True else {}
    if program.layout.splits_stream:
        text, why = f"{num_tokens // stream_shards(mesh.shape):,} of", f"split over {together}"
    elif training.sequence_parallel is False:
        text, why = "all", "training.sequence_parallel=false"
    else:
        text, why = "all", f"{together} does not divide the tokens, or the experts have biases"
    return {"residual stream": f"{text} {num_tokens:,} tokens of a sequence in each branch on a device ({why})"}


def _describe_rollout(program: Program, task: Grpo, mesh: Mesh) -> dict[str, str]:
    """Return the numbers of a rollout, and its memory beside the training state, which a step does not need then."""
    cfg = program.cfg
    rollout = plan_rollout(program, read_device_bytes())
    costs = rollout.costs
    parts = " + ".join(f"{name} {size / 2**30:.3f}" for name, size in costs.num_bytes.items())
    reference = {}
    if rollout.reference_bytes:
        reference["reference"] = (
            f"{rollout.reference_bytes / 2**30:.3f} GiB beside the state: the model of step 0 in "
            f"{program.layout.compute} (task.kl_coefficient={task.kl_coefficient:g})"
        )
    return reference | {
        "rollout": f"{rollout.num_prompts:,} prompts of at most {rollout.longest_prompt:,} tokens "
        f"x {task.group_size} answers of at most {cfg.sampling.max_new_tokens:,}, for {rollout.steps} step(s); "
        f"{costs.rows:,} answers at a time on a device"
        + (f", in {rollout.waves} waves (task.rollout_rows={task.rollout_rows})" if rollout.waves > 1 else ""),
        "bytes of a rollout": f"{costs.memory / 2**30:.3f} GiB beside weights and {cfg.optimizer.name} = {parts}; at "
        f"most {costs.num_programs} compiled programs",
    }


def _describe_products(cfg: Config, mesh: Mesh) -> str:
    """Return in words what numbers products multiply."""
    compute = cfg.training.dtypes["compute"]
    if cfg.training.matmul_dtype is None:
        return compute
    emulated = ", emulated: this is slow" if mesh.devices.flat[0].platform == "cpu" else ""
    others = "logits and experts" if isinstance(cfg.model.mlp, ExpertsMlp) else "logits"
    return f"{cfg.training.matmul_dtype} ({compute} in {others}{emulated})"


def _describe_processes() -> str:
    """Return the host and the number of devices of each process, in a line."""
    hosts = peers.gather(f"{socket.gethostname()}, {jax.local_device_count()} device(s)", "devices")
    lines = [f"{rank} on {host}" for rank, host in enumerate(hosts[:MAX_ROWS])]
    if len(hosts) > MAX_ROWS:
        lines.append(f"... {len(hosts) - MAX_ROWS} more")
    return "; ".join(lines)
