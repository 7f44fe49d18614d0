"""Names that people bring from other programs are answered with ours, in words that run."""

import io
import re
import shlex
import sys
from contextlib import redirect_stdout

import pytest
from rich.table import Table

from tunix.base.errors import UserError
from tunix.base.text import print_table
from tunix.config import Config
from tunix.config.compose import compose
from tunix.config.foreign_names import read_values
from tunix.config.mistakes import find_foreign, list_keys, reject_flags
from tunix.train_command import train_command

# Words that name something of the reader's own: only their keys are checked.
OWN_NAMES = ("FOLDER", "NAME", "RUN_DIR", "FILE", "HOST", "MODULE", "my_", "latest")
GROUPS = ("mesh_shape", "hydra.run.dir", "experiment")  # words that are no keys of the config
LEGAL = {*(name for name, _ in list_keys()), *Config.model_fields, *GROUPS}
GRPO = ["training.seq_len=1024", "training.loss_chunk_size=256"]


def check_words(words: str) -> None:
    """Each key exists, and the words compose, those of a task with task=grpo."""
    keys = {*re.findall(r"(?:^| )\+?([a-z0-9_.]+)=", words)}
    assert {key for key in keys if not key.startswith("evaluation.sets.")} <= LEGAL
    if not any(name in words for name in OWN_NAMES):
        needed = ["task=grpo"] if words.startswith("task.") else []
        needed += ["model.lora.rank=8"] if words.startswith("model.lora.quantize_base=") else []
        needed += ["model=tiny_moe"] if words.startswith("model.expert_") else []
        compose([*needed, *(GRPO if re.search("^(task|sampling)", words) else []), *shlex.split(words)])


def test_no_key_of_ours_is_taken_for_another():
    """A key that exists is never answered with another one."""
    keys = [*LEGAL, "optimizer.groups.0.params", "training.compiler_options.dp", "evaluation.sets.run", "model.lora"]
    assert {key: find_foreign(key, "1") for key in keys if key not in GROUPS} == dict.fromkeys(
        (key for key in keys if key not in GROUPS), ""
    )
    assert not {name for name in read_values() if name not in LEGAL}


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("optimizer.lr=1e-3", "unknown key optimizer.lr; here it is optimizer.learning_rate="),
        ("optimizer.betas=[.9,.95]", "here it is optimizer.b1=.9 optimizer.b2=.95"),
        ("optimizer.beta1=.9", "here it is optimizer.b1=.9"),
        ("training.eval_every_n_steps=10", "here it is evaluation.every_steps=10"),
        ("training.steps=10", "here it is training.max_steps=10"),
        ("training.dtype=bfloat16", "here it is training.compute_dtype=bfloat16"),
        ("output_dir=x", "here it is hydra.run.dir=x"),
        ("num_train_epochs=3", "here it is training.num_epochs=3 training.max_steps=null"),
        ("checkpoint_dir=x", "here it is checkpoint.folder=x"),
        ("model.lora_rank=8", "here it is model.lora.rank=8"),
        ("training.gradient_checkpointing=true", "here it is training.remat=full"),
        ("+optimizer.schedule_type=linear", "here it is scheduler=warmup_linear"),
        ("training.cpu_offload=true", "here it is training.offload=optimizer"),
        ("train_module.dp_config={name: hsdp, param_dtype: bfloat16}", "here it is mesh_shape=hsdp training.sharding_strategy=full_shard; here it is training.compute_dtype=bfloat16"),
        ("train_module.dp_config='{name: ddp}'", "here it is model.mesh_shape=[[-1],[dp]]"),
        ("train_module.ac_config={mode: budget, activation_memory_budget: 0.9}", "here it is training.remat=budget; here it is training.remat training.remat_memory_gib: GiB"),
        ("train_module.rank_microbatch_size=16384", "here it is training.micro_batch_tokens=16384"),
        ("scheduler.min_lr=3e-5", "here it is scheduler.final_ratio: a share"),
        ("~training.gradient_clip", "here it is training.max_grad_norm=null"),
        ("epsilon=0.2", "here it is task=grpo task.clip_low=0.2 task.clip_high=0.2 (that of an optimizer is optimizer.eps)"),
        ("steps_per_generation=16", "here it is task=grpo task.steps_per_rollout: steps of the optimizer; TRL counts microbatches"),
        ("data.train_batch_size=64", "here it is task=grpo training.global_batch_size: answers; verl counts prompts"),
        ("trainer.max_duration={value: 1, unit: epochs}", "(where its unit is steps; training.max_tokens counts tokens, training.num_epochs epochs)"),
        ("tool_parser_name=qwen", "here it is task=grpo task.tool_calls=hermes"),
        ("LoraConfig.init_lora_weights=True", "here it is model.lora.init=zero"),
        ("load_in_8bit=false", "unknown key load_in_8bit; leave it out"),
        ("data.val_files=a.parquet", "here it is evaluation.sets.test=parquet evaluation.sets.test.paths=[a.parquet]"),
        ("checkpoint.keep_latest_k=3", "here it is checkpoint.max_to_keep=3"),
        ("max_samples=100", "tunix has none: training.max_steps or training.max_tokens bound a run"),
        ("optim=paged_adamw_8bit", "here it is optimizer=adamw optimizer.moments=int8"),
        ("ffn_hidden_size=64", "here it is model.mlp_dim=64"),
        ("loss_type=ipo", "here it is task=dpo task.objective=ipo"),
        ("loss_type=cispo", "here it is task=grpo task.clip=weights task.clip_low=1"),
        ("loss_type=hinge", "here it is task=grpo task.divide_by or task.clip or task=dpo task.objective, whose"),
        ("loss_type=robust", "here it is task=dpo task.objective=robust data=pairs"),
        ("use_dft_loss=true", "here it is task=sft task.loss=dft"),
        ("loss_type=kto", "here it is task=kto data=labelled data.paths="),
        ("vllm_importance_sampling_correction=true", "here it is task=grpo task.importance=sequence_mask task.max_importance=3"),
        ("vllm_importance_sampling_mode=token_mask", "here it is task=grpo task.importance=mask"),
        ("vllm_importance_sampling_mode=sequence_mask", "here it is task=grpo task.importance=sequence_mask"),
        ("lr_scheduler_type=cosine", "here it is scheduler=warmup_cosine (behind a warmup of scheduler.warmup_ratio=0.05"),
        ("scale_rewards=group", "here it is task=grpo task.advantage=group_std"),
        ("lr_scheduler.decay_ratio=0.1", "here it is scheduler=wsd scheduler.decay_ratio=0.1"),
        ("lr_scheduler.min_lr_factor=0.1", "here it is scheduler.final_ratio=0.1"),
        ("remat_policy=save_dot_with_context_except_mlp", "here it is training.remat, whose values docs/config.md lists"),
        ("grpo.beta=0.08", "here it is task=grpo task.kl_coefficient=0.08"),
        ("training.sharding_strategy=FULL_SHARD", "here it is training.sharding_strategy=full_shard"),
        ("training.sharding_strategy=HYBRID_SHARD", "here it is mesh_shape=hsdp"),
        ("training.mixed_precision=bfloat16", "here it is training.mixed_precision=bf16"),
        ("training.remat=selective", "here it is training.remat=dots"),
        ("scheduler=cosine", "here it is scheduler=warmup_cosine"),
        ("optimizer=adam", "here it is optimizer=adamw"),
        ("task=rloo", "here it is task=grpo task.advantage=leave_one_out"),
        ("task=orpo", "here it is task=dpo task.objective=orpo"),
        ("task=SFT", "did you mean sft?"),
        ("data=huggingface", "here it is data=hf data.path=NAME"),
        ("data.format=alpaca", "here it is task=sft data=jsonl data.paths=[FILE]"),
        ("data.held_out=0.1", "did you mean data.held_out_fraction?"),
        ("checkpoint.every=100", "here it is checkpoint.save_every_steps=100"),
        ("evaluation.every=100", "did you mean evaluation.every_steps?"),
        ("loss_weights=[0.8,0.2]", "here it is task=dpo task.sft_weight: one objective is trained"),
        ("model.attention=flash_attention_2", "here it is model.attention=auto"),
        ("model.lora.rank=8 model.lora.targets=all-linear", "here it is model.lora.targets='attention|mlp'"),
        ("model.lora.rank=8 model.lora.targets=[attention.q,mlp]", """ "model.lora.targets='attention.q|mlp'" matches any"""),
        ("model.lora.rank=8 model.lora.quantize_base=4bit", "here it is model.lora.quantize_base=nf4"),
        ("logging.sinks=wandb", "a list of one is logging.sinks=[wandb]"),
        ("training.offload=cpu", "here it is training.offload=optimizer"),
        ("training.seq_len=4k", "in digits it is training.seq_len=4000 (or 4096)"),
        ("training.max_tokens=1.5B", "in digits it is training.max_tokens=1500000000"),
        ("training.time_limit_s=1.5h", "in digits it is training.time_limit_s=5400"),
        ("model.mesh_shape=[[4,2],[data,model]]", "unknown axis 'data'; axes are pp, dp, fsdp, ep, cp, tp; did you mean dp?"),
        ("training.compiler_options=xla", "expected a mapping like {key: value}"),
        ("resume=true", "resume=latest is the last run of a project"),
        ("+training.sync_gradients_every=2", "+training.sync_gradients_every: the config has this key already; write it without +"),
        ("wandb.enabled=true", "unknown key wandb.enabled; docs/config.md lists all keys"),
        ("trainer.weight_decay=0.1", "unknown key trainer.weight_decay; did you mean optimizer.weight_decay?"),
        ("tokens.micro_batch_size=2", "did you mean training.micro_batch_size?"),
        ("optim.type=fancy", "unknown key optim.type; here it is optimizer, whose values"),
        ("trainer.loss.type=default", "unknown key trainer.loss.type; docs/config.md lists all keys"),
        ("trainer.model.ac.freq=1", "unknown key trainer.model.ac.freq; docs/config.md lists all keys"),
        ("model.ep=2", "here it is model.mesh_shape=[[-1,2],[fsdp,ep]]"),
        ("validation.steps=10", "here it is evaluation.num_sequences: a number"),
        ("validation.dataset=c4", "here it is evaluation.sets.test="),
        ("val_kwargs.n=4", "here it is task=grpo evaluation.num_samples=4"),
        ("optimizer.epsilon=1e-8", "here it is optimizer.eps=1e-8"),
        ("orchestrator.batch_size=128", "here it is task=grpo training.global_batch_size=128"),
        ("async_grpo.max_trajectory_age_steps=1", "here it is task=grpo task.staleness=1 (always"),
        ("async_training.staleness_threshold=0.5", "here it is task=grpo task.staleness: a number of rollouts"),
        ("report_to=none", "here it is logging.sinks=[jsonl]"),
        ("profiler=xplane", "here it is training.profile_communication=true"),
        ("logging.wandb.name=a", "unknown key logging.wandb.name; docs/config.md lists all keys"),
        ("data.train_files=a.parquet", "here it is data=parquet data.paths=[a.parquet]"),
        ("data.train_files=[a.parquet,b.parquet]", "here it is data=parquet data.paths=[a.parquet,b.parquet]"),
        ("checkpoint=run", "here it is resume=run"),
        ("resume=run,other", "resume=run,other: resume goes on with one run; name one"),
        ("RUN_DIR", "RUN_DIR: words have the form key=value"),
        ("critic.optim.lr=1e-5", "unknown key critic.optim.lr; tunix has none: there is no model of values"),
        ("rollout.tensor_model_parallel_size=2", "tunix has none: one program holds weights, rollouts and training"),
        ("trainer.checkpointer.save_interval=30m", "here it is checkpoint.save_every_steps: a number of steps"),
        ("env.id=game", "tunix has none: task.environment=MODULE:NAME"),
        ("wobble.id=game", "unknown key wobble.id; docs/config.md lists all keys"),
        ("rope_theta=10000", "unknown key rope_theta; did you mean model.rope_theta?"),
        ("norm_eps=1e-5", "unknown key norm_eps; did you mean model.norm_eps?"),
        ("training.wobble=1", "unknown key training.wobble; docs/config.md lists all keys"),
    ],
)  # fmt: skip
def test_answers(word, answer):
    with pytest.raises(UserError) as error:
        compose(word.split(" ") if re.match(r"\S+ \w[\w.]*=", word) else [word])
    assert answer in str(error.value)
    assert "\n" not in str(error.value)


def test_a_default_of_theirs_undoes_nothing():
    """verl's use_kl_in_reward=false beside use_kl_loss=true: words that are copied in any order give one run."""
    for name in ("load_in_4bit", "use_kl_loss", "use_kl_in_reward", "optimizer_offload", "enable_activation_offload"):
        with pytest.raises(UserError, match=f"unknown key {name}; leave it out"):
            compose([f"{name}=False"])


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--dry-run"], "--dry-run: there is no such flag; keys are written without dashes: dry_run=true"),
        (["--lr", "1e-3"], "--lr: there is no such flag; here it is optimizer.learning_rate=1e-3"),
        (["--seq=3"], "--seq: there is no such flag; docs/config.md lists all keys"),
        (["--max_steps=100"], "--max_steps: there is no such flag; here it is training.max_steps=100"),
        (["--training.max_stepz", "5"], "--training.max_stepz: there is no such flag; did you mean training.max_steps?"),
        (["--model", "gemma3_1bb"], "--model: there is no such flag; model takes a file of conf/model; did you mean gemma3_1b?"),
        (["--output_dir=x"], "--output_dir: there is no such flag; here it is hydra.run.dir=x"),
        (["--config-file", "x"], "--config-file: there is no such flag; here it is --config-path FOLDER --config-name NAME"),
        (["--config", "sft.yaml"], "--config: there is no such flag; here it is --config-path FOLDER --config-name NAME"),
        (["--config-path", "nowhere", "--config-name", "mine"], "--config-path: Primary config directory not found."),
        (["--config-name", "mine"], "--config-name=mine: there is no mine.yaml; --config-path names its folder"),
        (["--dp", "4", "--pp=2", "--tp", "2"], "--dp, --pp, --tp: there is no such flag; here it is model.mesh_shape=[[2,4,-1,2],[pp,dp,fsdp,tp]]"),
        (["--dp-shard-size=4", "--tp=2"], "--dp-shard-size, --tp: there is no such flag; here it is model.mesh_shape=[[-1,4,2],[dp,fsdp,tp]]"),
        (["parallelism.data_parallel_shard_degree=-1", "tp=2"], "here it is model.mesh_shape=[[-1,2],[fsdp,tp]]"),
        (["--info", "config-groups"], "--info config-groups: choose from all, config, defaults"),
        (["--multirun", "hydra/sweeper=optuna", "seed=1,2"], "hydra/sweeper=optuna: "),
    ],
)  # fmt: skip
def test_flags_of_other_programs(words, answer, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_training.py", *words])
    assert train_command() == 2
    err = capsys.readouterr().err
    assert answer in err
    assert len(err.splitlines()) == 1


def test_each_flag_has_its_line():
    with pytest.raises(UserError) as error:
        reject_flags(["--run_name", "x", "--nodes", "4", "model=tiny", "--help"], ["--help"])
    assert str(error.value).splitlines() == [
        "--run_name: there is no such flag; keys are written without dashes: run_name=x",
        "--nodes: there is no such flag; here it is launcher=slurm launcher.nodes=4",
    ]


def test_each_key_of_another_program_has_its_line():
    with pytest.raises(UserError) as error:
        compose(["lr=1e-3", "dp=4", "wobble.x=1", "tp=2", "dp=8"])
    assert str(error.value).splitlines() == [
        "unknown key dp, tp; here it is model.mesh_shape=[[4,-1,2],[dp,fsdp,tp]]",
        "unknown key lr; here it is optimizer.learning_rate=1e-3",
        "unknown key wobble.x; docs/config.md lists all keys",
        "unknown key dp; here it is model.mesh_shape=[[8],[dp]] (one key holds all axes)",
    ]


def test_output_that_is_no_terminal_is_not_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("a long heading of a column", "another")
    table.add_row("x" * 200, "y" * 50)
    out = io.StringIO()
    with redirect_stdout(out):
        print_table(table)
    assert "x" * 200 in out.getvalue()
    assert "y" * 50 in out.getvalue()
    assert "…" not in out.getvalue()


def test_a_file_of_another_program_is_answered_by_its_keys_alone(tmp_path):
    """It lacks all sections of ours: a line for each stood before the answers."""
    (tmp_path / "base.yaml").write_text("steps: 150_001\nmax_target_length: 2048\n")
    with pytest.raises(UserError) as error:
        compose([], str(tmp_path), "base")
    assert str(error.value).splitlines() == [
        "unknown key steps; here it is training.max_steps=150001",
        "unknown key max_target_length; here it is training.seq_len=2048",
    ]
