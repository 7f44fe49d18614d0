"""The start report: every derived number of a run, before its first step."""

import socket

import jax
from jax.sharding import Mesh
from rich.table import Table

from tunix.base.buckets import is_address
from tunix.base.files import expand_home
from tunix.base.text import as_text, format_rows
from tunix.config import Config
from tunix.config.compose import count_idle_rows
from tunix.config.layers import ExpertsMlp
from tunix.config.pretrained_config import describe_keys_outside_family
from tunix.config.saved_runs import find_run, split_step
from tunix.config.task import Grpo, Taught
from tunix.config.training import read_steps
from tunix.config.vision import AnyVision
from tunix.costs.communication import count_microbatch_rows
from tunix.costs.rollout import PAGE, plan_rollout, read_device_bytes
from tunix.costs.step import derive_costs, find_train_spec
from tunix.data.image_processors import find_processor
from tunix.data.prompts import AnyCorpus
from tunix.data.teacher_logits import describe_logits
from tunix.huggingface.config_json import read_num_rows
from tunix.huggingface.hub import CONFIG, find
from tunix.huggingface.table import find_family
from tunix.models.flops import tower_flops
from tunix.processes import peers
from tunix.rl.table import format_environment
from tunix.sharding.arrays import AnyMesh, bytes_per_device
from tunix.sharding.mesh import (
    MAX_ROWS,
    data_shards,
    device_table,
    format_mesh_shape,
    resolve,
    stream_shards,
    token_shards,
    unsplit_dims,
)
from tunix.sharding.table import DIMS, stream_axes
from tunix.training.choices import Choices
from tunix.training.optimizer import count_phase_steps
from tunix.training.state import Architecture, State, count
from tunix.training.teacher import OfflineTeacher
from tunix.training.train_spec import Sizes, TrainSpec, derive_sizes


def describe_batch(cfg: Config, train_spec: TrainSpec, mesh: AnyMesh, sizes: Sizes) -> dict[str, str]:
    """Return the rows about the batch of a step, its way through the devices, and the length of the run."""
    batch, choices, pipeline = sizes.batch, train_spec.choices, train_spec.choices.pipeline
    reduced = f"gradients reduced every {choices.sync_every} microbatch(es)"
    if cfg.training.sync_gradients_every == "auto" and choices.sync_every > 1:
        reduced += ": once a step, which costs no memory on this mesh"
    rows = {
        "global batch": f"{batch.num_sequences:,} sequences = {batch.num_microbatches} microbatch(es) x "
        f"{data_shards(mesh.shape)} data shard(s) x {choices.batch.sequences_per_shard}; {reduced}",
        **_describe_stages(sizes),
    }
    if pipeline.num_stages > 1:
        model = train_spec.cfg.model
        layers = (model.num_layers - model.num_first_layers) // pipeline.num_stages
        behind = f" behind {model.num_first_layers} that all stages share" if model.num_first_layers else ""
        schedule = "1f1b" if pipeline.num_chunks == 1 else f"interleaved, {pipeline.num_chunks} chunks a stage"
        rows["pipeline"] = (
            f"{schedule}: {pipeline.num_stages} stages of {layers} layers{behind}; a microbatch is "
            f"{pipeline.num_parts} parts of {count_microbatch_rows(train_spec)} sequence(s) of each shard; a step is "
            f"{pipeline.num_iterations} ticks, and a stage idles in {pipeline.bubble:.0%} of them"
        )
    options = ", ".join(f"{name}={value}" for name, value in choices.options.items())
    hidden = " and ".join(["layers gather ahead"] * choices.prefetch + [options] * bool(options)) or "none"
    return rows | {
        "overlap": f"{hidden}{choices.reason('training.overlap')}",
        "tokens per step": f"{batch.num_tokens:,} = {batch.num_sequences:,} x {batch.seq_len}",
        "length": _describe_length(cfg, sizes),
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
            f"steps {period.to_text}: {shape.num_sequences:,} x {shape.seq_len:,} = {shape.num_tokens:,} tokens in "
            f"{shape.num_microbatches} microbatch(es)" + (", not reached" if not_reached else "")
        )
    num_programs = len({period.shape for period in periods})
    return {
        "batch stages": f"{'; '.join(batches)}; {num_programs} compiled programs, each made when its first step comes; "
        "the learning rate goes by steps, held-out sequences have all their tokens"
    }


def _describe_length(cfg: Config, sizes: Sizes) -> str:
    if sizes.total_steps is None:
        return f"{cfg.training.num_epochs} epochs: steps are known once the data are read"
    steps = sizes.total_steps
    spans = sizes.schedule.spans(steps)
    warmup, decay = (count_phase_steps(cfg.scheduler, phase, spans) for phase in ("warmup", "decay"))
    tail = f", decay over the last {decay}" if cfg.scheduler.shape.has_decay else ""
    first = cfg.training.describe_first_limit()
    return (
        f"{steps:,} steps, {sum(count * tokens for count, tokens in spans):,} tokens{first}; "
        f"{cfg.optimizer.name} at {cfg.optimizer.learning_rate:g}, {cfg.scheduler.name}, {warmup} warmup steps{tail}"
    )


def describe_model(cfg: Config, train_spec: TrainSpec, corpus: AnyCorpus | None) -> dict[str, str]:
    """Return the rows about the model and the data that it learns from."""
    arch, model, linear = train_spec.arch, cfg.model, cfg.model.linear_attention
    rows = {
        "model": f"{model.family}, {arch.num_parameters:,} parameters, {model.num_layers} layers, "
        + _describe_attention(train_spec.choices)
    }
    if linear is not None:
        rows["linear attention"] = (
            f"{model.num_linear_layers} of {model.num_layers} layers; {linear.num_value_heads} heads, each with a "
            f"memory of {linear.key_dim} x {linear.value_dim} numbers, whatever the length of a sequence"
        )
    if isinstance(model.mlp, ExpertsMlp):
        rows["experts"] = _describe_experts(cfg, train_spec, model.mlp)
    if model.mtp is not None:
        rows["multi-token prediction"] = (
            f"{count(arch.weights['mtp']):,} parameters of one more layer, whose loss counts {model.mtp.loss_weight:g}"
        )
    if model.vision is not None:
        rows["images"] = _describe_vision(cfg, train_spec, model.vision)
    return {
        **rows,
        **_describe_trained(cfg, arch, train_spec.abstract),
        **_describe_teacher(cfg, train_spec),
        "data": corpus.summary if corpus else "not read in a dry run",
    }


def _describe_teacher(cfg: Config, train_spec: TrainSpec) -> dict[str, str]:
    """Return rows about the teacher, if there is one, and about answers that nothing scores."""
    teacher, task, rows = train_spec.teacher, cfg.task, {}
    if teacher is not None:
        assert isinstance(task, Taught)
        where, how = "beside the state", "its distributions in the loss"
        if isinstance(teacher, OfflineTeacher):
            where, how = "alone, before the state is made", describe_logits(cfg, teacher.num_rows)
        elif not teacher.in_loss:
            how = "the tokens that are drawn, in their advantages"
        weights, model = "", teacher.model if isinstance(teacher, OfflineTeacher) else teacher
        if model is not None:
            num_bytes = bytes_per_device(model.abstract_params(train_spec.mesh))
            weights = f"{model.model.family}, {model.arch.num_parameters:,} parameters, {num_bytes / 2**30:.3f} GiB "
            weights += f"{where} in {train_spec.layout.compute}; "
        rows["teacher"] = f"{teacher.source}: {weights}{how}, with task.teacher_weight={task.teacher_weight:g}"
    if isinstance(task, Grpo) and not task.is_rewarded:
        rows["held out"] = "no answers: nothing scores them (task.rewards=[]); a reward of weight 0 only measures"
    return rows


def _describe_experts(cfg: Config, train_spec: TrainSpec, mlp: ExpertsMlp) -> str:
    """Return in words which experts there are, how tokens reach those of other devices, and what may be dropped."""
    extra = f", a shared one of width {mlp.shared_dim:,}" if mlp.shared_dim else ""
    extra += f", beside an MLP of width {cfg.model.mlp_dim:,}" if mlp.beside_mlp else ""
    dense = f"; the first {mlp.dense_layers} layers are dense" if mlp.dense_layers else ""
    dense += f"; of {mlp.every} layers in a row, the last has experts" if mlp.every > 1 else ""
    layout, reason, factor = train_spec.layout, train_spec.choices.reason, cfg.model.expert_buffer_factor
    exchange = "no token is dropped"
    if any(train_spec.mesh.shape[axis] > 1 for axis in layout.expert_axes):
        if factor is not None:
            exchange = f"a device has room for {factor:g} x the rows of equal loads, and drops what does not fit"
        exchange += f"; exchange by {layout.expert_exchange}{reason('model.expert_exchange')}"
    return (
        f"{mlp.experts_per_token} of {mlp.num_experts} of width {mlp.expert_dim:,} for each token{extra}{dense}; "
        f"{train_spec.arch.num_active:,} parameters compute a token; {exchange}; products by {layout.expert_products}"
        + reason("model.expert_products")
    )


def _describe_vision(cfg: Config, train_spec: TrainSpec, vision: AnyVision) -> str:
    """Return in words what sees, what of it is trained, and what an image costs."""
    parts, trained, texts = train_spec.arch.weights["vision"], train_spec.arch.trained_weights["vision"], []
    for name in ("tower", "projector"):
        number = count(trained[name])
        texts.append(f"{name} {count(parts[name]):,} parameters, {f'{number:,} trained' if number else 'frozen'}")
    gflop = tower_flops(cfg.model, train_spec.arch.trained_shares_of_vision) / 1e9
    slots = cfg.training.images_per_row
    max_size = find_processor(vision).describe_max_size()
    return (
        f"{'; '.join(texts)}; {slots} of {max_size} a sequence, each {vision.num_patches:,} patches, "
        f"{vision.tokens_per_image} tokens, {gflop:,.3f} GFLOP"
    )


def _describe_attention(choices: Choices) -> str:
    """Return the attention kernel in words, and why it was chosen."""
    texts, exchange = [], choices.layout.cp_exchange
    for dim_name, kernel in choices.layout.kernels:
        suffix = " in global layers" if dim_name == "k" else ""
        texts.append(f"{kernel} attention{suffix}{choices.reason(f'model.attention.{dim_name}')}")
    text = ", ".join(texts)
    if exchange == "none":
        return text
    return f"{text} by {exchange}{choices.reason('model.cp_exchange')}"


def _describe_trained(cfg: Config, arch: Architecture, state: State) -> dict[str, str]:
    """Return rows about the files that the weights come from, and the part of them that is trained."""
    rows, lora = {}, cfg.model.lora
    if source := cfg.model.init_from:
        rows["weights from"] = source
        if not cfg.resume and not find_run(source, "model.init_from"):
            in_files = read_num_rows(find(source, CONFIG), find_family(cfg.model.family))
            if added := cfg.model.vocab_size - in_files:
                rows["weights from"] += (
                    f"; {added:,} rows of vocabulary added to its {in_files:,}, each the mean of those"
                )
    if cfg.dry_run and (fetched := _list_fetched(cfg)):
        rows["fetched"] = f"{', '.join(fetched)}; with model.vocab_size=auto its tokenizer too; no weights"
    if cfg.model.init_adapter:
        rows["updates from"] = cfg.model.init_adapter
    if lora.rank:
        trained = arch.num_trained
        rows["trained"] = (
            f"{trained:,} parameters ({trained / arch.num_parameters:.2%}): rank {lora.rank} updates of {lora.targets}"
            + (f", and {lora.train_also} fully" if lora.train_also else "")
        )
        base, stored_as = bytes_per_device(arch.frozen(state["params"])), cfg.training.dtypes["param"]
        if lora.quantize_base:
            stored_as = f"matrices of attention and MLP {lora.quantize_base}, the rest {stored_as}"
        num_frozen = count(arch.frozen(arch.weights))
        rows["frozen base"] = f"{num_frozen:,} parameters, {base / 2**20:,.3f} MiB per device: {stored_as}"
    return rows


def _list_fetched(cfg: Config) -> list[str]:
    """Return what a dry run has fetched from a bucket, a web server or the hub."""
    fetched = []
    if source := cfg.resume or cfg.model.init_from:
        if is_address(source) and find_run(source, "resume" if cfg.resume else "model.init_from"):
            fetched.append(f"config.yaml of {split_step(source)[0]}")
        elif not expand_home(source).exists() and source != "latest":
            fetched.append(f"config.json of {source}")
    adapter = cfg.model.init_adapter
    if adapter and not cfg.resume and not expand_home(adapter).exists():
        fetched.append(f"the adapter {adapter} (its tensors' names say what it updates)")
    return fetched


def make_start_report(
    cfg: Config, train_spec: TrainSpec, mesh: Mesh, sizes: Sizes, corpus: AnyCorpus | None, chosen: str
) -> str:
    """Return every derived number as text; `corpus` is None in a dry run, `chosen` is what `plan_run` says.

    Process 0 alone derives them: what the backward pass keeps is traced, which takes seconds.
    """
    # On every process, before the others leave.
    hosts = peers.gather(f"{socket.gethostname()}, {jax.local_device_count()} device(s)", "devices")
    if not peers.is_main():
        return "the start report is in train.log, the log of process 0"
    rows = describe_model(cfg, train_spec, corpus)
    rows |= _describe_devices(cfg, train_spec, mesh)
    rows |= describe_batch(cfg, train_spec, mesh, sizes)
    rows |= _describe_costs(cfg, train_spec, sizes)
    rows |= {"chosen": chosen} if chosen else {}
    rows |= _describe_exceptions(cfg, train_spec, corpus)
    rows |= _describe_rollout(train_spec, cfg.task) if isinstance(cfg.task, Grpo) else {}
    if len(hosts) > 1:
        more = [f"... {len(hosts) - MAX_ROWS} more"] if len(hosts) > MAX_ROWS else []
        rows["processes"] = "; ".join([f"{rank} on {host}" for rank, host in enumerate(hosts[:MAX_ROWS])] + more)
    for dim_name, axes in unsplit_dims(cfg.dims, mesh.shape).items():
        split = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
        rows[DIMS[dim_name].name] = f"{cfg.dims[dim_name]:,} on {split}: every device keeps all"
    title = f"{cfg.project_name} / {cfg.run_name}" if cfg.run_name else cfg.project_name
    devices = Table(box=None)
    head, *body = device_table(mesh)
    for column in head:
        devices.add_column(column)
    for row in body:
        devices.add_row(*row)
    return f"{format_rows(rows, title)}\ndevice ids by place on the mesh\n{as_text(devices)}"


def make_report_of_launched(cfg: Config, num_devices: int, platform: str) -> str:
    """Return the derived numbers of a run on devices that are elsewhere, as text; they are not asked for anything.
    Raises `UserError` where the mesh divides neither model nor batch."""
    sizes = resolve(cfg.model.mesh_shape, num_devices, cfg.dims, cfg.distributed.allow_idle_devices)
    train_spec = find_train_spec(cfg, sizes, platform)
    of_run = derive_sizes(train_spec, None)
    rows = describe_model(cfg, train_spec, None)
    rows["mesh"] = f"{format_mesh_shape(sizes)} over {num_devices} devices ({platform}), which are not here"
    rows |= describe_batch(cfg, train_spec, train_spec.mesh, of_run) | _describe_costs(cfg, train_spec, of_run)
    return format_rows(rows | _describe_exceptions(cfg, train_spec, None))


def _describe_devices(cfg: Config, train_spec: TrainSpec, mesh: Mesh) -> dict[str, str]:
    """Return the rows about the mesh, and what its devices keep of the state and of the activations."""
    training, dtypes, remat = cfg.training, cfg.training.dtypes, train_spec.choices.remat
    kinds = {device.device_kind for device in mesh.devices.flat}
    # What blocks keep for their backward pass, and what waits in the host's memory.
    kept = f"remat {remat.policy}"
    if remat.every > 1:
        kept += f" in one of {remat.every} blocks, none in the others"
    if training.offload != "none":
        kept += f"; {training.offload} in the host's memory"
    multiplied = dtypes["compute"]
    if training.matmul_dtype is not None:
        others = "logits and experts" if isinstance(cfg.model.mlp, ExpertsMlp) else "logits"
        emulated = ", emulated: this is slow" if mesh.devices.flat[0].platform == "cpu" else ""
        multiplied = f"{training.matmul_dtype} ({dtypes['compute']} in {others}{emulated})"
    return {
        "mesh": f"{format_mesh_shape(mesh.shape)} over {mesh.size} x {', '.join(sorted(kinds))}, "
        f"{jax.process_count()} process(es)" + ("; each step waits for the slowest kind" if len(kinds) > 1 else ""),
        "sharding": f"{training.sharding_strategy}; weights {dtypes['param']}, "
        f"products {multiplied}, gradient sums {dtypes['reduce']}; {kept}",
        **_describe_stream(cfg, train_spec, mesh),
    }


def _describe_costs(cfg: Config, train_spec: TrainSpec, sizes: Sizes) -> dict[str, str]:
    """Return the rows about memory and arithmetic."""
    gib = {name: size / 2**30 for name, size in derive_costs(train_spec).num_bytes.items()}
    return {
        "bytes per device": f"{gib['weights'] + gib['optimizer']:.3f} GiB = weights {gib['weights']:.3f} + "
        f"{cfg.optimizer.name} {gib['optimizer']:.3f}; predicted on top: gradients {gib['gradients']:.3f}, "
        f"gathered weights {gib['gathered']:.3f}, activations {gib['activations']:.3f}",
        "FLOPs per token": f"{sizes.flops_per_token / 1e9:.4f} GFLOP forward and backward, causal attention; "
        f"{sizes.tflop_per_step:.3f} TFLOP per step",
    }


def _describe_exceptions(cfg: Config, train_spec: TrainSpec, corpus: AnyCorpus | None) -> dict[str, str]:
    """Return rows about what most runs do not have; each is there only where it holds."""
    training, rows = cfg.training, {}
    num_tokens = corpus.vocab.num_tokens if corpus else None
    if idle := count_idle_rows(cfg, num_tokens):
        # The rows of initial weights stay, also with auto.
        advice = "" if cfg.model.init_from else "; model.vocab_size=auto gives as many rows as tokens"
        rows["vocabulary"] = (
            f"{cfg.model.vocab_size:,} rows of embedding, of which no token reaches {idle:,}: the tokenizer has "
            f"{num_tokens or cfg.tokenizer.vocab_size:,} tokens{advice}"
        )
    if skipped := [read_steps(text) for text in training.skip_steps]:
        ranges = ", ".join(f"{steps[0]:,} to {steps[-1]:,}" for steps in skipped)
        rows["left out"] = f"data of {sum(map(len, skipped)):,} steps: {ranges}"
    if train_spec.guard:
        rows["spikes"] = (
            f"loss or gradient norm more than {train_spec.guard.deviations:g} standard deviations above the mean of "
            f"the last {train_spec.guard.window} steps: the update is skipped; more than {training.max_spikes} in "
            "a row end the run"
        )
    if ema := train_spec.abstract.get("copies", {}):
        size = f"{bytes_per_device(ema) / 2**30:.3f} GiB of {cfg.optimizer.name}'s bytes"
        location = "in the host's memory" if training.ema_memory == "host" else size
        rows["copies"] = f"{', '.join(ema)}: {location}"
    if reason := describe_keys_outside_family(cfg.model):
        rows["tunix.export"] = f"cannot write this model as a {cfg.model.family}: {reason}"
    return rows


def _describe_stream(cfg: Config, train_spec: TrainSpec, mesh: Mesh) -> dict[str, str]:
    """Return in words which tokens of the residual stream a device has; nothing where no axis could split them."""
    training, num_tokens = cfg.training, cfg.training.seq_len // token_shards(mesh.shape)
    together = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in stream_axes())
    if stream_shards(mesh.shape) == 1:
        useless = f"training.sequence_parallel=true changes nothing with {together}"
        return {"residual stream": useless} if training.sequence_parallel is True else {}
    if train_spec.layout.splits_stream:
        text, reason = f"{num_tokens // stream_shards(mesh.shape):,} of", f"split over {together}"
    elif training.sequence_parallel is False:
        text, reason = "all", "training.sequence_parallel=false"
    else:
        text, reason = "all", f"{together} does not divide the tokens, or the experts have biases"
    return {"residual stream": f"{text} {num_tokens:,} tokens of a sequence in each branch on a device ({reason})"}


def _describe_rollout(train_spec: TrainSpec, task: Grpo) -> dict[str, str]:
    """Return the numbers of a rollout, and its memory beside the training state, which a step does not need then."""
    cfg = train_spec.cfg
    rollout = plan_rollout(train_spec, read_device_bytes())
    costs = rollout.costs
    parts = " + ".join(f"{name} {size / 2**30:.3f}" for name, size in costs.num_bytes.items())
    rows = {}
    if task.staleness:
        mesh = "the mesh of training"
        if rollout.apart is not None:
            mesh = f"{format_mesh_shape(rollout.apart.shape)}, the last {task.rollout_devices} devices of each host"
        rows["drawn ahead"] = (
            f"{task.staleness} rollout(s) beside learning, on {mesh}, by weights {task.staleness * rollout.steps} "
            f"step(s) old; {rollout.at_once} at one time have a cache; copies of weights "
            f"{rollout.copy_bytes / 2**30:.3f} GiB (task.staleness={task.staleness})"
        )
    if rollout.reference_bytes:
        rows["reference"] = (
            f"{rollout.reference_bytes / 2**30:.3f} GiB beside the state: the model of step 0 in "
            f"{train_spec.layout.compute} (task.kl_coefficient={task.kl_coefficient:g})"
        )
    if task.environment is not None:
        rows["environment"] = (
            f"{format_environment(task.environment)}, at most {task.max_turns} turns; {task.environment_processes} "
            f"processes on each host, {task.environment_timeout_s:g} s a call"
        )
    rows_at_once = f", {rollout.rows_at_once:,} over the whole mesh (task.rollout_rows={task.rollout_rows})"
    shared = f", which share {(rollout.num_pages or 0) * PAGE:,} tokens in pages (sampling.cache={cfg.sampling.cache})"
    pages = "" if rollout.num_pages is None else shared
    is_limited = rollout.rows_at_once < rollout.num_prompts * task.group_size
    return rows | {
        "rollout": f"{rollout.num_prompts:,} prompts of at most {rollout.max_prompt_length:,} tokens "
        f"x {task.group_size} answers of at most {cfg.sampling.max_new_tokens:,}, for {rollout.steps} step(s); "
        f"{costs.rows:,} answers at a time on a device" + (rows_at_once if is_limited else "") + pages,
        "bytes of a rollout": f"{costs.memory / 2**30:.3f} GiB beside weights and {cfg.optimizer.name} = {parts}; at "
        f"most {costs.num_programs} compiled programs",
    }
