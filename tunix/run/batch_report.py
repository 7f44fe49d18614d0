"""Rows of the start report about the batch of a step, its way through the devices, and the length of the run."""

from jax.sharding import Mesh

from tunix.config import Config
from tunix.costs.transfers import count_part_rows
from tunix.sharding.mesh_shape import data_shards
from tunix.training.optim import count_phase_steps
from tunix.training.program import Program
from tunix.training.sizes import Sizes


def describe_batch(cfg: Config, program: Program, mesh: Mesh, sizes: Sizes) -> dict[str, str]:
    """Return the rows about the batch of a step, its way through the devices, and the length of the run."""
    batch = sizes.batch
    return {
        "global batch": f"{batch.num_sequences:,} sequences = {batch.num_microbatches} microbatch(es) x "
        f"{data_shards(mesh.shape)} data shard(s) x {cfg.training.sequences_per_shard}; " + _describe_sums(program),
        **_describe_stages(sizes),
        **_describe_pipeline(cfg, mesh),
        "overlap": _describe_overlap(program),
        "tokens per step": f"{batch.num_tokens:,} = {batch.num_sequences:,} x {batch.seq_len}",
        "length": _describe_length(cfg, sizes),
    }


def _describe_pipeline(cfg: Config, mesh: Mesh) -> dict[str, str]:
    """Return the pipeline in words, and nothing where the layers are not split into stages."""
    pipeline = cfg.training.pipeline(mesh.shape)
    if pipeline.num_stages == 1:
        return {}
    layers, rows = cfg.model.num_layers // pipeline.num_stages, count_part_rows(cfg, mesh)
    chunks = f" in {pipeline.num_chunks} chunks" if pipeline.num_chunks > 1 else ""
    return {
        "pipeline": f"{pipeline.schedule}: {pipeline.num_stages} stages of {layers} layers{chunks}; a microbatch is "
        f"{pipeline.num_parts} parts of {rows} sequence(s) of each shard; a step is {pipeline.num_ticks} ticks, and a "
        f"stage idles in {pipeline.bubble:.0%} of them"
    }


def _describe_stages(sizes: Sizes) -> dict[str, str]:
    """Return the batch of each stage in words, and nothing where there are no stages."""
    periods = sizes.schedule.periods
    if len(periods) == 1:
        return {}
    batches = []
    for period in periods:
        shape = period.shape
        not_reached = sizes.total_steps is not None and period.first_step > sizes.total_steps
        batches.append(
            f"steps {period.in_words}: {shape.num_sequences:,} x {shape.seq_len:,} = {shape.num_tokens:,} tokens in "
            f"{shape.num_microbatches} microbatch(es)" + (", not reached" if not_reached else "")
        )
    num_programs = len({period.shape for period in periods})
    return {
        "batch stages": f"{'; '.join(batches)}; {num_programs} compiled programs, each made when its first step comes; "
        "the learning rate goes by steps, held-out sequences have all their tokens"
    }


def _describe_overlap(program: Program) -> str:
    """Return in words what hides communication, and why."""
    overlap = program.overlap
    options = ", ".join(f"{name}={value}" for name, value in overlap.options.items())
    parts = ["layers gather ahead"] * overlap.prefetch + [options] * bool(options)
    return f"{' and '.join(parts) or 'none'} ({overlap.reason})"


def _describe_sums(program: Program) -> str:
    """Return in words how often gradients are summed over devices, and why."""
    text = f"gradients reduced every {program.sync_every} microbatch(es)"
    is_chosen = program.cfg.training.sync_gradients_every == "auto" and program.sync_every > 1
    return f"{text}: once a step, which costs no memory on this mesh" if is_chosen else text


def _describe_length(cfg: Config, sizes: Sizes) -> str:
    if sizes.total_steps is None:
        return f"{cfg.training.num_epochs} epochs: steps are known once the data are read"
    steps = sizes.total_steps
    spans = sizes.schedule.spans(steps)
    warmup, decay = (count_phase_steps(cfg.scheduler, phase, spans) for phase in ("warmup", "decay"))
    tail = f", decay over the last {decay}" if cfg.scheduler.shape.has_decay else ""
    return (
        f"{steps:,} steps, {sum(count * tokens for count, tokens in spans):,} tokens; "
        f"{cfg.optimizer.name} at {cfg.optimizer.learning_rate:g}, {cfg.scheduler.name}, {warmup} warmup steps{tail}"
    )
