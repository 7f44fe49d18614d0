"""Names that people bring from other programs, and the words that mean the same here.

The programs are OLMo-core, Nanotron, TRL and transformers, torchtitan, MaxText, accelerate, PyTorch FSDP, Agent-Tunix
and MDL-Toolkit. A test composes the words of every row.
"""

import re
from collections.abc import Mapping, Sequence

from tunix.base.errors import UserError

# Our words, and the keys of other programs that they answer. Those keys are written without their section, in lower
# case with underscores, with a blank between two of them. Many keys of theirs have the same answer; this order writes
# each answer once. `KEYS` below is the same table by their keys, for a look-up.
NAMES_OF_KEYS: dict[str, str] = {
    # optimizer and schedule
    "optimizer.learning_rate=3e-4": "lr max_lr peak_lr",
    "optimizer.b1=0.9 optimizer.b2=0.95": "betas",
    "optimizer.b1=0.9": "beta1 adam_beta1 adam_b1",
    "optimizer.b2=0.95": "beta2 adam_beta2 adam_b2",
    "optimizer.eps=1e-8": "adam_epsilon epsilon",
    "optimizer.weight_decay=0.1": "adam_weight_decay wd",
    "optimizer=adamw": "opt_type optim optimizer_type",
    "optimizer.groups=[{params:embedding,weight_decay:0.0}]": "group_overrides",
    "scheduler=warmup_cosine": "lr_scheduler lr_scheduler_type schedule_type lr_decay_style",
    "scheduler.warmup_steps=100": "lr_warmup_steps num_warmup_steps warmup warmup_iters",
    "scheduler.warmup_ratio=0.03": "warmup_fraction",
    "scheduler.final_ratio=0.1": "min_lr min_decay_lr lr_min_ratio alpha_f",
    "training.max_grad_norm=1.0": (
        "clip_grad grad_clip gradient_clip_val gradient_clipping gradient_clipping_threshold clip_grad_norm"
    ),
    # batch and length
    "training.micro_batch_size=4": (
        "batch_size per_device_batch_size per_device_train_batch_size local_batch_size device_batch_size "
        "rank_microbatch_size train_micro_batch_size_per_gpu"
    ),
    "training.gradient_accumulation_steps=4": (
        "gradient_accumulation grad_accum grad_accum_steps accumulate_grad_batches batch_accumulation_per_replica"
    ),
    "training.global_batch_size=256": "train_batch_size",
    "training.global_batch_size=256 training.batch_stages=[{until_step:1000,global_batch_size:64}]": (
        "rampup_batch_size step_batch_size_schedule enable_rampup_batch_size global_rampup_samples "
        "per_device_batch_size_start batch_size_warmup"
    ),
    "training.seq_len=2048": (
        "sequence_length max_seq_len max_seq_length max_sequence_length max_target_length max_length block_size"
    ),
    "training.max_steps=1000": (
        "steps num_steps train_steps total_steps max_iters max_duration num_batches num_train_steps duration"
    ),
    "training.num_epochs=1": "epochs max_epochs num_train_epochs",
    # precision, memory, mesh
    "training.mixed_precision=bf16": "bf16 fp16 precision autocast_precision amp",
    "training.compute_dtype=bfloat16": "dtype torch_dtype",
    "training.remat=full": (
        "gradient_checkpointing activation_checkpointing activation_checkpoint ac_config recompute_layer "
        "remat_policy recompute_granularity"
    ),
    "training.sharding_strategy=full_shard": "fsdp fsdp_sharding_strategy zero_stage dp_config",
    "model.mesh_shape=[[-1],[dp]]": "dp dp_size",
    "model.mesh_shape=[[-1,2],[fsdp,tp]]": (
        "tp tp_size tensor_parallel_size tensor_parallel_degree ici_tensor_parallelism"
    ),
    "model.mesh_shape=[[-1],[fsdp]]": "data_parallel_shard_degree ici_fsdp_parallelism",
    "model.mesh_shape=[[2,-1],[dp,fsdp]]": "data_parallel_replicate_degree",
    "model.mesh_shape=[[-1,2],[fsdp,cp]]": "context_parallel_size context_parallel_degree ici_context_parallelism",
    # model
    "model.init_from=ORGANISATION/NAME": "model_name model_name_or_path pretrained_model_name_or_path",
    "model.embed_dim=256": "hidden_size d_model n_embd dim base_emb_dim",
    "model.mlp_dim=512": "intermediate_size ffn_dim",
    "model.num_layers=12": "num_hidden_layers n_layers n_layer",
    "model.num_heads=8": "num_attention_heads n_heads n_head",
    "model.num_kv_heads=1": "num_key_value_heads n_kv_heads",
    "model.context_length=4096": "max_position_embeddings",
    "model.tied_head=true": "tie_word_embeddings",
    "model.lora.rank=16": "lora_rank lora_r",
    "model.lora.alpha=32": "lora_alpha",
    "model.lora.dropout=0.05": "lora_dropout",
    "model.lora.targets=attention": "lora_module_path lora_target_modules",
    "model.lora.rank=16 model.lora.quantize_base=int8": "load_in_8bit",
    "model.lora.rank=16 model.lora.quantize_base=nf4": "load_in_4bit",
    "model.attention=xla": "attn_implementation",
    # data
    "data=text data.paths=[FOLDER]": "dataset dataset_path train_dataset data_path data_dir data_source",
    "data=hf data.path=NAME": "dataset_name hf_dataset_or_datasets",
    "tokenizer.path=FOLDER_OR_ID": "tokenizer_name tokenizer_name_or_path",
    "loading.read_threads=4": "num_workers dataloader_num_workers num_loading_workers",
    # checkpoints, evaluation, logs
    "hydra.run.dir=FOLDER": "output_dir output save_folder checkpoints_path checkpoint_dir",
    "checkpoint.save_every_steps=100": (
        "save_steps save_interval save_interval_steps checkpoint_interval checkpoint_period ephemeral_save_interval"
    ),
    "checkpoint.max_to_keep=3": "save_total_limit max_checkpoints_to_keep",
    "resume=RUN_DIR": "resume_from_checkpoint resume_checkpoint_path load_path load_checkpoint_path",
    "evaluation.every_steps=100": "eval_steps eval_interval eval_every_n_steps val_check_interval",
    "evaluation.num_sequences=64": "num_test_batches num_eval_batches",
    "data.held_out_fraction=0.1": "train_fraction val_fraction",
    "logging.every_steps=10": (
        "log_interval logging_steps log_freq iteration_step_info_interval metrics_collect_interval"
    ),
    "logging.level=info": "log_level log_lvl",
    "logging.ranks=[0]": "log_filter_type",
    "logging.sinks=[jsonl,tensorboard]": "report_to tensorboard",
    "project_name=NAME": "project wandb_project",
    "run_name=NAME": "experiment_name run",
    "seed=1": "random_seed init_seed",
    # GRPO; names with a point are those of a section `grpo`
    "task=grpo task.group_size=8": "grpo.num_generations num_generations",
    "task=grpo task.passes_per_rollout=1": "grpo.num_iterations",
    "task=grpo task.kl_coefficient=0.08": "grpo.beta",
    "task=grpo task.clip_low=0.2": "grpo.epsilon",
    "sampling.stop=['<end_of_turn>']": "grpo.eos_tokens eos_tokens",
    "task=grpo task.rewards=[{function:exact_match,weight:1}]": "reward_function reward_funcs",
    "sampling.max_new_tokens=256": "max_generation_steps max_completion_length",
    "sampling=greedy": "inference_config",
    # the run
    "dry_run=true": "dry_run_only",
    "training.profile_communication=true": "profile profiler",
    "distributed.init_timeout_s=600": "init_timeout ddp_timeout",
    "distributed.coordinator_address=HOST:29500": "master_addr",
    "training.offload=optimizer": "cpu_offload",
    "distributed.num_processes=1": "world_size",
}

# Values that other programs spell otherwise, in the same form: for each key of ours, our words and their values.
NAMES_OF_VALUES: dict[str, dict[str, str]] = {
    "training.sharding_strategy": {
        "training.sharding_strategy=full_shard": "full_shard fsdp zero3",
        "training.sharding_strategy=shard_grad_op": "shard_grad_op zero2",
        "training.sharding_strategy=no_shard": "no_shard",
        "mesh_shape=hsdp training.sharding_strategy=full_shard": "hybrid_shard hsdp",
        "model.mesh_shape=[[-1],[dp]]": "ddp",
        "training.sharding_strategy=shard_optimizer": "zero1",
    },
    "training.mixed_precision": {
        "training.mixed_precision=bf16": "bfloat16 fp16",
        "training.mixed_precision=fp32": "float32 no",
    },
    "training.remat": {
        "training.remat=dots": "selective minimal",
        "training.remat=full": "true",
        "training.remat=none": "false",
    },
    "scheduler.name": {
        "scheduler=warmup_cosine": "cosine cosine_with_warmup",
        "scheduler=warmup_linear": "linear",
        "scheduler=sqrt_decay": "1-sqrt",
    },
    "optimizer.name": {
        "optimizer=adamw": "adam adamw_torch adamw_torch_fused adamwfused",
    },
}
GROUPS = {"scheduler": "scheduler.name", "optimizer": "optimizer.name"}  # groups whose file names are values


def _by_their_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return our words by each name of other programs."""
    return {theirs: ours for ours, text in names.items() for theirs in text.split()}


KEYS = _by_their_names(NAMES_OF_KEYS)
VALUES = {key: _by_their_names(names) for key, names in NAMES_OF_VALUES.items()}

# Keys of other programs that nothing here stands for, and what to do instead.
MISSING: dict[str, str] = {
    "compile_model": "every step is compiled",
    "torch_compile": "every step is compiled",
    "auto_wrap_policy": "training.sharding_strategy=full_shard gathers the weights of one block at a time",
    "wrapping_strategy": "training.sharding_strategy=full_shard gathers the weights of one block at a time",
    "prefetch_factor": "training.overlap=prefetch gathers one layer ahead",
    "dataloader_prefetch_factor": "loading.prefetch_batches counts the batches that are ready",
    "wandb_disabled": "logging.sinks names what is written",
    "num_passes": "python -m tunix.evaluate num_samples=N draws several answers to each question",
    "shuffle": "the order of the data is random, and follows from the seed",
}

# Flags of other command lines, and our words.
FLAGS: dict[str, str] = {
    "dry_run": "dry_run=true",
    "config_file": "--config-path FOLDER --config-name NAME",
    "debug": "dry_run=true",
}


def find_key(key: str) -> str:
    """Return what a name of another program is here, as the end of a message; empty for an unknown name."""
    leaf = _normal(key.rpartition(".")[2])
    if words := KEYS.get(_normal(key)) or KEYS.get(leaf):
        return f"here it is {words}"
    return f"tunix has none: {MISSING[leaf]}" if leaf in MISSING else ""


def find_value(key: str, value: str) -> str:
    """Return what the value of another program is here, as the end of a message; empty for an unknown value."""
    words = VALUES.get(GROUPS.get(key, key), {}).get(value.lower())
    return f"; here it is {words}" if words else ""


def refuse_flags(words: Sequence[str], own: Sequence[str]) -> None:
    """Raise `UserError` for a flag that is none of ours (`own`): keys are written without dashes."""
    for word in words:
        flag, _, value = word.partition("=")
        if not re.fullmatch(r"--[A-Za-z][\w.-]*", flag) or any(known.startswith(flag) for known in own):
            continue
        name = _normal(flag.lstrip("-"))
        if name in FLAGS:
            hint = f"here it is {FLAGS[name]}"
        elif not (hint := find_key(name)):
            hint = f"keys are written without dashes: {flag.lstrip('-').replace('-', '_')}={value or 'VALUE'}"
        raise UserError(f"{flag}: there is no such flag; {hint}")


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")
