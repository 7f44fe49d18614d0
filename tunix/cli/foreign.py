"""Names that people bring from other programs, and the words that mean the same here.

The programs are OLMo-core, Nanotron, TRL and transformers, torchtitan, MaxText, accelerate, PyTorch FSDP, Agent-Tunix
and MDL-Toolkit. A test composes the words of every row.
"""

import re
from collections.abc import Sequence

from tunix.base.errors import UserError

ACCUMULATION = "training.gradient_accumulation_steps=4"
SIZES = "training.micro_batch_size=4"
STAGES = "training.global_batch_size=256 training.batch_stages=[{until_step:1000,global_batch_size:64}]"

# A name without its section, in lower case with underscores, and our words.
KEYS: dict[str, str] = {
    # optimizer and schedule
    "lr": "optimizer.learning_rate=3e-4",
    "max_lr": "optimizer.learning_rate=3e-4",
    "peak_lr": "optimizer.learning_rate=3e-4",
    "betas": "optimizer.b1=0.9 optimizer.b2=0.95",
    "beta1": "optimizer.b1=0.9",
    "beta2": "optimizer.b2=0.95",
    "adam_beta1": "optimizer.b1=0.9",
    "adam_beta2": "optimizer.b2=0.95",
    "adam_b1": "optimizer.b1=0.9",
    "adam_b2": "optimizer.b2=0.95",
    "adam_epsilon": "optimizer.eps=1e-8",
    "epsilon": "optimizer.eps=1e-8",
    "adam_weight_decay": "optimizer.weight_decay=0.1",
    "wd": "optimizer.weight_decay=0.1",
    "opt_type": "optimizer=adamw",
    "optim": "optimizer=adamw",
    "optimizer_type": "optimizer=adamw",
    "group_overrides": "optimizer.groups=[{params:embedding,weight_decay:0.0}]",
    "lr_scheduler": "scheduler=warmup_cosine",
    "lr_scheduler_type": "scheduler=warmup_cosine",
    "schedule_type": "scheduler=warmup_cosine",
    "lr_decay_style": "scheduler=warmup_cosine",
    "lr_warmup_steps": "scheduler.warmup_steps=100",
    "num_warmup_steps": "scheduler.warmup_steps=100",
    "warmup": "scheduler.warmup_steps=100",
    "warmup_iters": "scheduler.warmup_steps=100",
    "warmup_fraction": "scheduler.warmup_ratio=0.03",
    "min_lr": "scheduler.final_ratio=0.1",
    "min_decay_lr": "scheduler.final_ratio=0.1",
    "lr_min_ratio": "scheduler.final_ratio=0.1",
    "alpha_f": "scheduler.final_ratio=0.1",
    "clip_grad": "training.max_grad_norm=1.0",
    "grad_clip": "training.max_grad_norm=1.0",
    "gradient_clip_val": "training.max_grad_norm=1.0",
    "gradient_clipping": "training.max_grad_norm=1.0",
    "gradient_clipping_threshold": "training.max_grad_norm=1.0",
    "clip_grad_norm": "training.max_grad_norm=1.0",
    # batch and length
    "batch_size": SIZES,
    "per_device_batch_size": SIZES,
    "per_device_train_batch_size": SIZES,
    "local_batch_size": SIZES,
    "device_batch_size": SIZES,
    "rank_microbatch_size": SIZES,
    "train_micro_batch_size_per_gpu": SIZES,
    "gradient_accumulation": ACCUMULATION,
    "grad_accum": ACCUMULATION,
    "grad_accum_steps": ACCUMULATION,
    "accumulate_grad_batches": ACCUMULATION,
    "batch_accumulation_per_replica": ACCUMULATION,
    "train_batch_size": "training.global_batch_size=256",
    "rampup_batch_size": STAGES,
    "step_batch_size_schedule": STAGES,
    "enable_rampup_batch_size": STAGES,
    "global_rampup_samples": STAGES,
    "per_device_batch_size_start": STAGES,
    "batch_size_warmup": STAGES,
    "sequence_length": "training.seq_len=2048",
    "max_seq_len": "training.seq_len=2048",
    "max_seq_length": "training.seq_len=2048",
    "max_sequence_length": "training.seq_len=2048",
    "max_target_length": "training.seq_len=2048",
    "max_length": "training.seq_len=2048",
    "block_size": "training.seq_len=2048",
    "steps": "training.max_steps=1000",
    "num_steps": "training.max_steps=1000",
    "train_steps": "training.max_steps=1000",
    "total_steps": "training.max_steps=1000",
    "max_iters": "training.max_steps=1000",
    "max_duration": "training.max_steps=1000",
    "num_batches": "training.max_steps=1000",
    "num_train_steps": "training.max_steps=1000",
    "epochs": "training.num_epochs=1",
    "max_epochs": "training.num_epochs=1",
    "num_train_epochs": "training.num_epochs=1",
    "duration": "training.max_steps=1000",
    # precision, memory, mesh
    "bf16": "training.mixed_precision=bf16",
    "fp16": "training.mixed_precision=bf16",
    "precision": "training.mixed_precision=bf16",
    "autocast_precision": "training.mixed_precision=bf16",
    "amp": "training.mixed_precision=bf16",
    "dtype": "training.compute_dtype=bfloat16",
    "torch_dtype": "training.compute_dtype=bfloat16",
    "gradient_checkpointing": "training.remat=full",
    "activation_checkpointing": "training.remat=full",
    "activation_checkpoint": "training.remat=full",
    "ac_config": "training.remat=full",
    "recompute_layer": "training.remat=full",
    "remat_policy": "training.remat=full",
    "recompute_granularity": "training.remat=full",
    "fsdp": "training.sharding_strategy=full_shard",
    "fsdp_sharding_strategy": "training.sharding_strategy=full_shard",
    "zero_stage": "training.sharding_strategy=full_shard",
    "dp_config": "training.sharding_strategy=full_shard",
    "dp": "model.mesh_shape=[[-1],[dp]]",
    "tp": "model.mesh_shape=[[-1,2],[fsdp,tp]]",
    "tp_size": "model.mesh_shape=[[-1,2],[fsdp,tp]]",
    "tensor_parallel_size": "model.mesh_shape=[[-1,2],[fsdp,tp]]",
    "tensor_parallel_degree": "model.mesh_shape=[[-1,2],[fsdp,tp]]",
    "data_parallel_shard_degree": "model.mesh_shape=[[-1],[fsdp]]",
    "data_parallel_replicate_degree": "model.mesh_shape=[[2,-1],[dp,fsdp]]",
    "context_parallel_size": "model.mesh_shape=[[-1,2],[fsdp,cp]]",
    "context_parallel_degree": "model.mesh_shape=[[-1,2],[fsdp,cp]]",
    "ici_context_parallelism": "model.mesh_shape=[[-1,2],[fsdp,cp]]",
    "ici_fsdp_parallelism": "model.mesh_shape=[[-1],[fsdp]]",
    "ici_tensor_parallelism": "model.mesh_shape=[[-1,2],[fsdp,tp]]",
    # model
    "model_name": "model.init_from=ORGANISATION/NAME",
    "model_name_or_path": "model.init_from=ORGANISATION/NAME",
    "pretrained_model_name_or_path": "model.init_from=ORGANISATION/NAME",
    "hidden_size": "model.embed_dim=256",
    "d_model": "model.embed_dim=256",
    "n_embd": "model.embed_dim=256",
    "dim": "model.embed_dim=256",
    "base_emb_dim": "model.embed_dim=256",
    "intermediate_size": "model.mlp_dim=512",
    "ffn_dim": "model.mlp_dim=512",
    "num_hidden_layers": "model.num_layers=12",
    "n_layers": "model.num_layers=12",
    "n_layer": "model.num_layers=12",
    "num_attention_heads": "model.num_heads=8",
    "n_heads": "model.num_heads=8",
    "n_head": "model.num_heads=8",
    "num_key_value_heads": "model.num_kv_heads=1",
    "n_kv_heads": "model.num_kv_heads=1",
    "max_position_embeddings": "model.context_length=4096",
    "tie_word_embeddings": "model.tied_head=true",
    "lora_rank": "model.lora.rank=16",
    "lora_r": "model.lora.rank=16",
    "lora_alpha": "model.lora.alpha=32",
    "lora_dropout": "model.lora.dropout=0.05",
    "lora_module_path": "model.lora.targets=attention",
    "lora_target_modules": "model.lora.targets=attention",
    "load_in_8bit": "model.lora.rank=16 model.lora.quantize_base=int8",
    "load_in_4bit": "model.lora.rank=16 model.lora.quantize_base=nf4",
    "attn_implementation": "model.attention=xla",
    # data
    "dataset": "data=text data.paths=[FOLDER]",
    "dataset_name": "data=hf data.path=NAME",
    "hf_dataset_or_datasets": "data=hf data.path=NAME",
    "dataset_path": "data=text data.paths=[FOLDER]",
    "train_dataset": "data=text data.paths=[FOLDER]",
    "data_path": "data=text data.paths=[FOLDER]",
    "data_dir": "data=text data.paths=[FOLDER]",
    "data_source": "data=text data.paths=[FOLDER]",
    "tokenizer_name": "tokenizer.path=FOLDER_OR_ID",
    "tokenizer_name_or_path": "tokenizer.path=FOLDER_OR_ID",
    "num_workers": "loading.read_threads=4",
    "dataloader_num_workers": "loading.read_threads=4",
    "num_loading_workers": "loading.read_threads=4",
    # checkpoints, evaluation, logs
    "output_dir": "hydra.run.dir=FOLDER",
    "output": "hydra.run.dir=FOLDER",
    "save_folder": "hydra.run.dir=FOLDER",
    "checkpoints_path": "hydra.run.dir=FOLDER",
    "checkpoint_dir": "hydra.run.dir=FOLDER",
    "save_steps": "checkpoint.save_every_steps=100",
    "save_interval": "checkpoint.save_every_steps=100",
    "save_interval_steps": "checkpoint.save_every_steps=100",
    "checkpoint_interval": "checkpoint.save_every_steps=100",
    "checkpoint_period": "checkpoint.save_every_steps=100",
    "ephemeral_save_interval": "checkpoint.save_every_steps=100",
    "save_total_limit": "checkpoint.max_to_keep=3",
    "max_checkpoints_to_keep": "checkpoint.max_to_keep=3",
    "resume_from_checkpoint": "resume=RUN_DIR",
    "resume_checkpoint_path": "resume=RUN_DIR",
    "load_path": "resume=RUN_DIR",
    "load_checkpoint_path": "resume=RUN_DIR",
    "eval_steps": "evaluation.every_steps=100",
    "eval_interval": "evaluation.every_steps=100",
    "eval_every_n_steps": "evaluation.every_steps=100",
    "val_check_interval": "evaluation.every_steps=100",
    "num_test_batches": "evaluation.num_sequences=64",
    "num_eval_batches": "evaluation.num_sequences=64",
    "train_fraction": "data.held_out_fraction=0.1",
    "val_fraction": "data.held_out_fraction=0.1",
    "log_interval": "logging.every_steps=10",
    "logging_steps": "logging.every_steps=10",
    "log_freq": "logging.every_steps=10",
    "iteration_step_info_interval": "logging.every_steps=10",
    "metrics_collect_interval": "logging.every_steps=10",
    "log_level": "logging.level=info",
    "log_lvl": "logging.level=info",
    "log_filter_type": "logging.ranks=[0]",
    "report_to": "logging.sinks=[jsonl,tensorboard]",
    "tensorboard": "logging.sinks=[jsonl,tensorboard]",
    "project": "project_name=NAME",
    "wandb_project": "project_name=NAME",
    "experiment_name": "run_name=NAME",
    "run": "run_name=NAME",
    "random_seed": "seed=1",
    "init_seed": "seed=1",
    # GRPO, by their sections there
    "grpo.num_generations": "task=grpo task.group_size=8",
    "grpo.num_iterations": "task=grpo task.passes_per_rollout=1",
    "grpo.beta": "task=grpo task.kl_coefficient=0.08",
    "grpo.epsilon": "task=grpo task.clip_low=0.2",
    "num_generations": "task=grpo task.group_size=8",
    "grpo.eos_tokens": "sampling.stop=['<end_of_turn>']",
    "eos_tokens": "sampling.stop=['<end_of_turn>']",
    "reward_function": "task=grpo task.rewards=[{function:exact_match,weight:1}]",
    "reward_funcs": "task=grpo task.rewards=[{function:exact_match,weight:1}]",
    "max_generation_steps": "sampling.max_new_tokens=256",
    "max_completion_length": "sampling.max_new_tokens=256",
    "inference_config": "sampling=greedy",
    # the run
    "dry_run_only": "dry_run=true",
    "profile": "training.profile_communication=true",
    "profiler": "training.profile_communication=true",
    "init_timeout": "distributed.init_timeout_s=600",
    "ddp_timeout": "distributed.init_timeout_s=600",
    "master_addr": "distributed.coordinator_address=HOST:29500",
    "cpu_offload": "training.offload=optimizer",
    "world_size": "distributed.num_processes=1",
}

# What has no counterpart, and what to do.
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

# Values of a key that other programs spell otherwise, in lower case, and ours.
VALUES: dict[str, dict[str, str]] = {
    "training.sharding_strategy": {
        "full_shard": "training.sharding_strategy=full_shard",
        "shard_grad_op": "training.sharding_strategy=shard_grad_op",
        "no_shard": "training.sharding_strategy=no_shard",
        "hybrid_shard": "mesh_shape=hsdp training.sharding_strategy=full_shard",
        "hsdp": "mesh_shape=hsdp training.sharding_strategy=full_shard",
        "fsdp": "training.sharding_strategy=full_shard",
        "ddp": "model.mesh_shape=[[-1],[dp]]",
        "zero1": "training.sharding_strategy=shard_optimizer",
        "zero2": "training.sharding_strategy=shard_grad_op",
        "zero3": "training.sharding_strategy=full_shard",
    },
    "training.mixed_precision": {
        "bfloat16": "training.mixed_precision=bf16",
        "float32": "training.mixed_precision=fp32",
        "no": "training.mixed_precision=fp32",
        "fp16": "training.mixed_precision=bf16",
    },
    "training.remat": {
        "selective": "training.remat=dots",
        "minimal": "training.remat=dots",
        "true": "training.remat=full",
        "false": "training.remat=none",
    },
    "scheduler.name": {
        "cosine": "scheduler=warmup_cosine",
        "linear": "scheduler=warmup_linear",
        "cosine_with_warmup": "scheduler=warmup_cosine",
        "1-sqrt": "scheduler=sqrt_decay",
    },
    "optimizer.name": {
        "adam": "optimizer=adamw",
        "adamw_torch": "optimizer=adamw",
        "adamw_torch_fused": "optimizer=adamw",
        "adamwfused": "optimizer=adamw",
    },
}
GROUPS = {"scheduler": "scheduler.name", "optimizer": "optimizer.name"}  # groups whose file names are values

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
