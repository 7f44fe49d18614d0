"""Each mistake gets its one line; each key has a meaning, a place, and an effect."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf
from support import composing
from support.harness import ROOT

from tunix.base.config_types import CONF
from tunix.base.errors import UserError
from tunix.base.files import read_yaml
from tunix.config import Average, Config, Evaluate, Export, Generate, Play, Samples, Serve
from tunix.config.compose import add_search_path, compose, compose_overrides, to_yaml
from tunix.config.mistakes import _list_leaves, list_keys
from tunix.config.pretrained_config import fill_from_run
from tunix.huggingface.config_json import write_config
from tunix.sharding.table import axis_names

MISTAKES = [
    ("training.micro_batchsize=4", "unknown key training.micro_batchsize; did you mean training.micro_batch_size?"),
    ("max_steps=4", "unknown key max_steps; did you mean training.max_steps?"),
    ("+training.foo=1", "unknown key training.foo; docs/config.md lists all keys"),
    ("trainig.max_steps=4", "unknown key trainig.max_steps; did you mean training.max_steps?"),
    ("modl=tiny", "unknown key modl; did you mean model?"),
    ("optimizer=lion optimizer.eps=1", "unknown key optimizer.eps: optimizer=lion has none; its keys are learning_rate,"),
    ("model=deepseek_v3 model.attention=cudnn", "model.attention=cudnn: cuDNN takes values as wide as keys, and model.latent.value_dim=128 is not model.head_dim=192"),
    ("model=gemma3_2b", "model=gemma3_2b: conf/model has no such file; the nearest of its "),
    ("model=gemma3_1bb", "are gemma3_1b, "),
    ("experiment=quick_test", "write +experiment="),
    ("model.mesh_shape=[[4,2],[fsdp,foo]]", "unknown axis 'foo'; axes are pp, dp, fsdp, ep, cp, tp"),
    ("model.mesh_shape={tp:2}", "model.mesh_shape={'tp': 2}: expected [[sizes], [axis names]]"),
    ("model.mesh_shape=[[4,2],[fsdp,fsdp]]", "axis fsdp is named twice"),
    ("model.num_heads=6 model.num_kv_heads=4", "model.num_heads=6 is not divisible by model.num_kv_heads=4"),
    ("model.cp_exchange=ring model.attention=cudnn", "model.attention=cudnn: the kernels of model.cp_exchange=ring are"),
    ("model.sliding_window=null", "model.sliding_window must be given with model.global_every=6"),
    ("model=llama3_1b model.rope_theta=null", "model.rope_theta must be given with model.positions=rope"),
    ("model=llama3_1b model.rope_scaling.name=yarm", "model.rope_scaling.name=yarm: expected one of none, linear, llama3, yarn, longrope, proportional; did you mean yarn?"),
    ("model=llama3_1b model.rope_scaling.factor=0", "model.rope_scaling.factor=0: expected a number above 0"),
    ("model=qwen3_4b model.rope_scaling={name:linear,factor:4.0}", "model.rope_scaling is changed as a whole by ++model.rope_scaling={...}"),
    ("model=pretrained", "model=pretrained needs model.init_from=DIR"),
    ("model.init_from=/nowhere", "model.init_from=/nowhere is neither a folder nor the ID of a model"),
    ("training.seq_len=10000 training.loss_chunk_size=100", "training.seq_len=10000 is more than model.context_length=8192"),
    ("model.mlp=gated_sliu", "model.mlp=gated_sliu: expected gated_silu, gated_gelu, gelu, or a mapping like {kind:gated,activation:silu}; did you mean gated_silu?"),
    ("model.head_dim=7", "model.head_dim=7 must be even"),
    ("training.seq_len=abc", "training.seq_len=abc: expected a whole number"),
    ("training.seq_len=1.5", "training.seq_len=1.5: expected a whole number"),
    ("training.seq_len=true", "training.seq_len=true: expected a number"),
    ("checkpoint.max_to_keep=null", "checkpoint.max_to_keep=null: expected a whole number"),
    ("data=text data.paths=null", "data.paths=null: expected a list like [a,b]"),
    ("model.scaled_embedding=null", "model.scaled_embedding=null: expected true or false"),
    ("training.ema_decay=2", "training.ema_decay=2: expected a number below 1, a list like [a,b] or null"),
    ("training.compiler_options.xla_x=1", "training.compiler_options has no xla_x yet; write +training.compiler_options.xla_x=VALUE to add it"),
    ("+experiment=grpo_python_tool task.environment_options={rows:1}", "task.environment_options has no rows yet; write +task.environment_options.rows=VALUE to add it, or ~task.environment_options +task.environment_options={rows:VALUE} to set it alone"),
    ("+experiment=grpo_look_up task.environment_options={rows:1}", "task.environment_options: look_up: got an unexpected keyword argument 'rows'; its options: none"),
    ("+experiment=grpo_look_up task.credit=turns task.advantage=batch_std", "task.credit=turns compares the answers to one prompt, and task.advantage=batch_std those of a step; set task.advantage=group_std"),
    ("+experiment=grpo_python_tool task.environment=search_folder task.environment_options=null", "task.environment_options: search_folder: missing a required argument: 'folder'"),
    ("+experiment=grpo_look_up task.environment=lookup", "openenv, or package.module:name, a list like [a,b] or null; did you mean look_up?"),
    ("+experiment=distill_addition", "a weight of 0 for exact_match leaves nothing to learn from; name a reward, or give task.teacher=RUN"),
    ("data.paths=[x]", "unknown key data.paths: data=python_stdlib has none; its keys are held_out_fraction, max_document_bytes, source, decode_errors; data=text or jsonl or csv or parquet or tokens has paths"),
    ("launcher.nodes=2", "unknown key launcher.nodes: launcher=local has none; its keys are name; launcher=slurm or kubernetes or ray has nodes"),
    ("resume=", "resume is empty; expected a run's folder, RUN_DIR/checkpoints/STEP or latest, or resume=null"),
    ("training.z_loss=-1", "training.z_loss=-1: expected a number of at least 0"),
    ("training.z_loss=0.1 task.loss=mine", "training.z_loss=0.1: task.loss=mine has no such term; set it to 0"),
    ("checkpoint.async=maybe", "checkpoint.async=maybe: expected true or false"),
    ("training.sharding_strategy=fullshard", "expected one of full_shard, shard_grad_op, shard_optimizer, no_shard; did you mean full_shard?"),
    ("training.global_batch_size=8 training.gradient_accumulation_steps=2", "training.gradient_accumulation_steps=2 and training.global_batch_size=8 are both set; keep one"),
    ("training.global_batch_size=8 training.global_batch_tokens=2048", "are both set"),
    ("model.mesh_shape=[[4],[fsdp]] training.global_batch_size=100", "training.global_batch_size=100 is not divisible by 64 = micro_batch_size=16 x 4 data shards; nearest: 64 or 128"),
    ("model.mesh_shape=[[4],[fsdp]] training.global_batch_tokens=9000", "x 4 data shards x seq_len=128; nearest: 8192 or 16384"),
    ("model.mesh_shape=[[1],[fsdp]] training.gradient_accumulation_steps=6 training.sync_gradients_every=4", "does not divide the 6 microbatches of a step; it may be 1, 2, 3, 6"),
    ("training.micro_batch_tokens=100", "training.micro_batch_tokens=100 is no multiple of training.seq_len=128; nearest: 128 or 256"),
    ("training.micro_batch_tokens=256 training.micro_batch_size=auto", "training.micro_batch_size=auto are both set"),
    ("training.max_steps=null", "the run has no end; set one of training.max_steps"),
    ("training.loss_chunk_size=half", "training.loss_chunk_size=half: expected a whole number or auto"),
    ("task=grpo model.mesh_shape=[[8],[fsdp]] training.micro_batch_size=1 task.group_size=3", "task.group_size=3 does not divide the 8 answers of a step (training.global_batch_size); nearest: a batch of 24 or 48, or task.group_size=2 or 4 or 8"),
    ("task=grpo task.rollout_rows=some", "task.rollout_rows=some: expected a whole number, auto or null"),
    ("distributed.shared_filesystem=maybe", "distributed.shared_filesystem=maybe: expected true or false or auto"),
    ("model.lora.quantize_base=int9", "expected one of int8, nf4 or null; did you mean int8?"),
    ("scheduler.warmup_steps=5 scheduler.warmup_tokens=5", "scheduler.warmup_steps and scheduler.warmup_tokens are both set"),
    ("scheduler.warmup_steps=0.1", "scheduler.warmup_steps=0.1: a share of the run is scheduler.warmup_ratio=0.1"),
    ("scheduler.decay_steps=5 scheduler.decay_tokens=5", "scheduler.decay_steps and scheduler.decay_tokens are both set"),
    ("scheduler=wsd scheduler.warmup_ratio=0.5 scheduler.decay_ratio=0.8", "scheduler.warmup_ratio=0.5 and scheduler.decay_ratio=0.8 are more than the run together"),
    ("optimizer.groups=[{params:'(',weight_decay:0}]", "optimizer.groups.0.params=(: not a regular expression"),
    ("optimizer=sgd optimizer.momentum=0 optimizer.moments=int8", "optimizer.moments=int8: optimizer.momentum=0 keeps no moments"),
    ("optimizer.b1=1", "optimizer.b1=1: expected a number below 1"),
    ("optimizer=muon optimizer.beta=1", "optimizer.beta=1: expected a number below 1"),
    ("optimizer.groups=[{param:a}]", "unknown key optimizer.groups.0.param; did you mean optimizer.groups.0.params?"),
    ("optimizer.groups=[{params:a,lr:1}]", "unknown key optimizer.groups.0.lr; its keys are params, weight_decay, learning_rate"),
    ("training.batch_stages=[{steps:2}]", "unknown key training.batch_stages.0.steps; its keys are until_step, until_tokens, global_batch_size, seq_len"),
    ("data=mixture data.parts={a:{source:text,paths:[x],text_column:t}} data.weights={a:1}", "unknown key data.parts.a.text_column; its keys are"),
    ("optimizer.groups={params:a}", "optimizer.groups={params:a}: expected a list like [a,b]"),
    ("optimizer=adamw,muon", "optimizer=adamw,muon: --multirun runs each of them; as a list it is optimizer=[adamw,muon]"),
    ("optimizer=null", "optimizer=null: takes a file of conf/optimizer (adafactor, adamw, custom, lion, muon, sgd); its keys are set by optimizer.KEY"),
    ("training=[tiny]", "training=[tiny]: takes a file of conf/training (default, seq_1024, tiny); its keys are set by training.KEY=VALUE"),
    ("+experiment=[quick_tst]", "experiment=quick_tst: conf/experiment has no such file; choose from distill_addition, "),
    ("training=5", "training=5: takes a file of conf/training"),
    ("mesh_shape=[[4,2],[fsdp,tp]]", "takes a file of conf/mesh_shape (auto, fsdp, hsdp, hybrid, tp); shapes go to model.mesh_shape"),
    ("data=text", "data.paths must be given: files, folders, globs, or addresses of them"),
    ("data=mixture data.parts={a:{source:text,paths:[x],held_out_fraction:0,extensions:[.txt],decode_errors:skp}} data.weights={a:1}", "data.parts.a.decode_errors=skp: expected one of skip, error, replace; did you mean skip?"),
    ("data=mixture data.parts={a:{source:text}} data.weights={a:1}", "data.parts.a.paths is missing"),
    ("data=mixture data.parts={a:{source:synthetic,held_out_fraction:0,num_documents:1,mean_document_bytes:1}} data.weights={a:0.5}", "data.weights add up to 0.5, not to 1; scaled: {a: 1}"),
    ("data=mixture data.parts={a:{source:synthetic,held_out_fraction:0,num_documents:1,mean_document_bytes:1}} data.weights={a:0}", "data.weights add up to 0, not to 1; give a part a share"),
    ("data=mixture data.parts={a:{source:synthetic,held_out_fraction:0,num_documents:1,mean_document_bytes:1}} data.weights={a:1} data.stages=[{name:x,from_step:1,weights:{a:0}}]", "stage x add up to 0, not to 1"),
    ("data=mixture data.parts={a:{source:synthetic,held_out_fraction:0,num_documents:1,mean_document_bytes:1}} data.weights={a:-1}", "data.weights.a=-1: expected a number of at least 0"),
    ("data=mixture data.parts={a:{source:synthetic,held_out_fraction:0,num_documents:1,mean_document_bytes:1}} data.weights={b:1}", "data.weights names b, data.parts are a; name the same"),
    ("data=mixture data.parts={a:{source:synthetic,held_out_fraction:0,num_documents:1,mean_document_bytes:1}} data.weights={a:1} data.stages=[{name:x,weights:{a:1}}]", "stage x needs one of from_step and from_tokens"),
    ("seed=99999999999999999999", "seed=99999999999999999999: expected a number below 2147483648"),
    ("evaluation.sample_temperature=1e-39", "evaluation.sample_temperature=1e-39: must be 0, which takes the likeliest token, or at least 1e-6"),
    ("logging.wandb=???", "logging.wandb must be given: null, or its keys"),
    ("data=hf", "data.path must be given: name on the hub"),
    ("data=csv data.paths=[a] data.delimiter=ab", "data.delimiter=ab"),
    ("tokenizer.vocab_size=9000", "tokenizer.vocab_size=9000 is more than model.vocab_size=4096"),
    ("distributed.num_processes=2 distributed.process_id=2 distributed.coordinator_address=a:1", "distributed.process_id=2 must be below"),
    ("launcher=slurm launcher.nodes=4 model.mesh_shape=[[4,2],[fsdp,tp]]", "fsdp=4 x tp=2 needs 8 devices, 32 are asked for by launcher.nodes=4 x launcher.gpus_per_node=8; legal here: "),
    ("launcher=slurm launcher.nodes=1 launcher.gpus_per_node=3 model.mesh_shape=[[-1,2],[fsdp,tp]]", "2 does not divide the 3 devices that are asked for by launcher.nodes=1 x launcher.gpus_per_node=3"),
    ("launcher=slurm launcher.gpus_per_node=0 launcher.tasks_per_node=2 model.mesh_shape=[[8],[fsdp]]", "8 devices, 4 are asked for by launcher.nodes=2 x launcher.tasks_per_node=2"),
    ("launcher=slurm training.global_batch_size=24", "training.global_batch_size=24 is not divisible by 256"),
    ("launcher=slurm launcher.tasks_per_node=2", "launcher.tasks_per_node=2 must be 1 or launcher.gpus_per_node=8"),
    ("launcher=slurm launcher.time_limit=soon", "launcher.time_limit=soon: expected MINUTES, HH:MM:SS or DAYS-HH:MM:SS"),
    ("launcher=slurm launcher.extra_env=[NCCL]", "launcher.extra_env.0=NCCL: expected NAME=VALUE, in quotes"),
    ("launcher=ray launcher.name=${oc.env:NOTHING} launcher.port=1", "unknown key launcher.port; launcher=kubernetes has port"),
    ("task=null task=sft", "task=null: takes a file of conf/task"),
    ("model.mtp.loss_weight=0.1", "unknown key model.mtp.loss_weight: model.mtp is null; set it as a whole: model.mtp={loss_weight: VALUE, ...}"),
    ("launcher=slurm launcher.image=a", "unknown key launcher.image: launcher=slurm has none; its keys are"),
    ("task.teacher=-1", "task.teacher=-1 is neither a folder nor the ID of a model"),
    ("launcher=slrum", "launcher=slrum: conf/launcher has no such file; choose from kubernetes, local, ray, slurm; did you mean slurm?"),
    ("launcher=slurm launcher.time_limit=2", "launcher.signal_before_end_s=120 must be less than launcher.time_limit=2, which is 120 s"),
    ("launcher=kubernetes launcher.image=a launcher.volume_claim=b launcher.extra_env=['NODE_RANK=1']", "launcher.extra_env has NODE_RANK, which the manifest sets"),
    ("launcher=kubernetes launcher.image=a launcher.volume_claim=b launcher.namespace=My_Ns", "launcher.namespace=My_Ns"),
    ("launcher=ray launcher.min_nodes=3", "launcher.min_nodes=3 is more than launcher.nodes=2"),
    ("launcher=ray launcher.extra_env=['RANK=1']", "launcher.extra_env has RANK, which the launcher sets for each process"),
    ("launcher=ray launcher.address='ray://head:10001'", "launcher.address=ray://head:10001: expected auto, or HOST:PORT of the head node"),
    ("launcher=ray launcher.resources=[H100]", "launcher.resources.0=H100: expected NAME=NUMBER, in quotes"),
    ("launcher=kubernetes", "launcher.image must be given: container image with tunix"),
    ("training.max_steps=${nothing}", "training.max_steps: Interpolation key 'nothing' not found"),
    ("training.max_steps=${oc.env:NOTHING}", "training.max_steps: Environment variable 'NOTHING' not found"),
    ("training.seq_len=[1", "cannot read training.seq_len=[1"),
    ("resume=latest", "resume=latest: there is no outputs/tunix/latest"),
    ("model.norm=layer model.qk_norm=per_head", "model.qk_norm=per_head needs an RMSNorm, not model.norm=layer"),
    ("resume=/nowhere", "resume=/nowhere: /nowhere is not a run's folder"),
    ("model.qk_norm=after_rotation model.positions=learned", "model.qk_norm=after_rotation needs rotations, not model.positions=learned"),
    ("model.query_growth={rate:0.1,every:9,offset:0,layers:unrotated}", "model.query_growth.layers=unrotated needs layers without positions"),
    ("model.lora.rank=2 model.lora.targets=attnetion", "model.lora.targets=attnetion: matches none of attention.q, "),
    ("model.head_dim=15", "model.head_dim=15 must be even: RoPE rotates pairs"),
    ("model.lora.rank=2 model.lora.quantize_base=nf4 model.embed_dim=33", "model.embed_dim=33 must be even: model.lora.quantize_base=nf4"),
    ("training.ema_decay=[0.9,0.9]", "training.ema_decay=[0.9, 0.9]: expected a number, each decay once or null"),
    ("model.mesh_shape=[[2,2],[fsdp]]", "model.mesh_shape=[[2, 2], ['fsdp']]: 2 sizes for 1 axes; expected "),
    ("task=grpo task.rewards=[{function:model}]", "the reward model needs path: {function: model, path: ...}"),
    ("model=gemma4_e2b model.global_heads=null", "model.shared_kv needs model.global_heads, and a gated MLP in each layer; set model.shared_kv=null"),
    ("model=qwen3_vl_2b model.rope_sections=[1,2,3]", "model.rope_sections=[1, 2, 3] must be 64 pairs together, half of model.head_dim=128"),
    ("model=gemma4_e2b model.global_heads.head_dim=511", "model.global_heads.head_dim=511 must be even: RoPE rotates pairs"),
    ("optimizer=muon optimizer.qk_clip=100", "optimizer.qk_clip=100.0: model.qk_norm divides queries and keys by their size"),
    ("model=gemma3_4b_vision model.vision=null", "model.family=gemma3_vision has a tower: model.vision=null goes with another family"),
    ("model=smolvlm_256m model.vision.image_size=511 model.vision.patch_size=1 model.vision.merge_size=1", "model.vision.image_size=511 must be even"),
    ("training.global_batch_size=8 training.batch_stages=[{until_step:2,global_batch_size:3,seq_len:64}]", "training.batch_stages.0.global_batch_size=3 sequences of 64 tokens are not cut from whole ones of training.seq_len=128; nearest: 2 or 4"),
    ("training.seq_len=0 training.max_steps=-1", "training.seq_len=0: expected a number of at least 1\ntraining.max_steps=-1"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_mistakes(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        compose(words.split(" "))
    assert message in str(error.value)
    lines = str(error.value).splitlines()
    assert len({line.partition("=")[0] for line in lines}) == len(lines)  # a key has one line


@pytest.mark.parametrize(
    "word", ["seed=" + "9" * 5000, "data.paths=" + "[" * 700 + "]" * 700], ids=["digits", "brackets"]
)
def test_a_word_that_the_parser_of_hydra_fails_for(word):
    with pytest.raises(UserError, match="^a word cannot be read: (Exceeds the limit|maximum recursion depth)"):
        compose([word])


@pytest.mark.parametrize("shape", ["[[4,1],[fsdp,tp]]", '[[4,1],["fsdp","tp"]]', "'[[4,1],[fsdp,tp]]'"])
def test_mesh_shape_with_quotes_lost_and_kept(shape):
    assert compose([f"model.mesh_shape={shape}"]).config.model.mesh_shape == ((4, 1), ("fsdp", "tp"))


def test_the_fault_of_a_value_of_a_legal_form_stands_alone():
    """The other forms, a list or null, would not help."""
    with pytest.raises(UserError, match="on PYTHONPATH$"):
        compose(["+experiment=grpo_look_up", "task.environment=nowhere:Game"])


@pytest.mark.parametrize("shape", [path.stem for path in (CONF / "mesh_shape").glob("*.yaml")])
def test_mesh_shape_as_a_group(shape):
    assert compose([f"mesh_shape={shape}"]).config.model.mesh_shape


@pytest.mark.parametrize(
    "choice",
    [
        f"{path.parent.name}={path.stem}"
        for path in sorted(CONF.glob("*/*.yaml"))
        if path.parent.name not in ("experiment", "command", "saved") and path.stem != "pretrained"
    ],
)
def test_every_choice_composes(choice):
    sys.path.insert(0, str(ROOT))
    from tools.config_reference import REQUIRED

    needed = REQUIRED | {"data=conversations_csv": REQUIRED["data=csv"]}
    compose([choice, *needed.get(choice, [])])


def test_what_tests_remember_is_what_hydra_merges(monkeypatch):
    words = ["model=gemma4_e2b", "task=grpo", "mesh_shape=fsdp", "+data@evaluation.sets.more=text", "hydra.run.dir=run"]
    remembered = compose_overrides(words)
    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", composing._merge)
    assert str(OmegaConf.to_container(remembered)) == str(OmegaConf.to_container(compose_overrides(words)))


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_compose_and_say_what_to_expect(path):
    needed = {"distill_addition": [f"task.teacher={ROOT}/tests/models/parity/gemma3"]}
    compose([f"+experiment={path.stem}", *needed.get(path.stem, [])])
    head = path.read_text().splitlines()
    assert head[0] == "# @package _global_"
    info = "\n".join(line for line in head[1:8] if line.startswith("#"))
    for word in (f"+experiment={path.stem}", "Hardware:", "Time:", "Loss:"):
        assert word in info, f"{path.name} does not open with {word}"


@pytest.mark.parametrize("name", ["qwen3_1_7b", "gemma3_1b"])
def test_the_experiment_on_gsm8k_takes_the_models_that_it_names(name, tmp_path):
    """From config.json as Hugging Face has it; a plan needs no file at all, and counts the whole vocabulary."""
    published = compose([f"model={name}"]).config.model
    (tmp_path / "config.json").write_text(json.dumps(write_config(published)))
    model = compose(["+experiment=grpo_gsm8k", f"model.init_from={tmp_path}"]).config.model
    assert (model.embed_dim, model.vocab_size, model.lora.rank) == (published.embed_dim, published.vocab_size, 32)
    assert compose(["+experiment=grpo_gsm8k"]).config.model.vocab_size == 151_936


def test_a_saved_config_composes_to_itself(tmp_path):
    config = compose(["optimizer=muon", "model.mesh_shape=[[2,-1],[dp,fsdp]]"]).config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert compose([f"resume={tmp_path}"]).config.model_copy(update={"resume": None}) == config
    assert compose([], config_dir=tmp_path).config == config


def test_resume_applies_overrides_to_the_saved_config(tmp_path):
    saved = compose(
        ["optimizer=muon", "training.seq_len=64", "training.loss_chunk_size=64", "model.mesh_shape=[[1],[tp]]"]
    ).config
    (tmp_path / "config.yaml").write_text(to_yaml(saved))
    changed = compose(
        [f"resume={tmp_path}", "optimizer.beta=0.9", "scheduler=wsd", "mesh_shape=fsdp", "model=tiny"]
    ).config
    assert changed.optimizer.beta == 0.9
    assert changed.scheduler.name == "wsd"
    assert changed.model.mesh_shape == ((-1,), ("fsdp",))
    assert changed.training.seq_len == 64
    # Another optimizer has the rate of its own file, not that of model=tiny, and the mesh stays.
    changed = compose([f"resume={tmp_path}", "optimizer=adamw"]).config
    assert changed.optimizer.learning_rate == compose(["training=default"]).config.optimizer.learning_rate == 3e-4
    assert changed.model.mesh_shape == ((1,), ("tp",))
    # A group may be chosen for several places.
    places = ["data=text", "data.paths=[/x]", "sampling@evaluation.sampling=liberal"]
    sets = [
        word for name in "ab" for word in (f"evaluation.sets.{name}=text", f"evaluation.sets.{name}.paths=[/{name}]")
    ]
    changed = compose([f"resume={tmp_path}", "sampling.max_new_tokens=8", *places, *sets]).config
    assert (changed.data.source, changed.sampling.temperature) == ("text", saved.sampling.temperature)
    assert changed.evaluation.sampling.top_k == 2000
    assert [source.paths for source in changed.evaluation.sets.values()] == [("/a",), ("/b",)]
    (tmp_path / "checkpoints" / "30").mkdir(parents=True)
    job = compose([f"resume={tmp_path}/checkpoints/30"])
    assert (job.run_dir, job.resume_step) == (tmp_path, 30)
    assert job.config.model.mesh_shape == ((1,), ("tp",))
    # A teacher that is new stays the one of its newest step, as that of a new run does.
    taught = compose([f"resume={tmp_path}", f"task.teacher={tmp_path}"]).config
    assert taught.task.teacher == f"{tmp_path}/checkpoints/30"
    assert compose([f"resume={tmp_path}", f"hydra.run.dir={tmp_path}/../{tmp_path.name}"]).run_dir == tmp_path
    said = f"hydra.run.dir=new: resume={tmp_path}/checkpoints/30 goes on in the run's own folder, {tmp_path}; leave"
    with pytest.raises(UserError, match=re.escape(said)):
        compose([f"resume={tmp_path}/checkpoints/30", "hydra.run.dir=new"])


@pytest.mark.parametrize(
    ("text", "damage"),
    [
        ("", "it has no section model"),
        ("- 1", "it has no sections"),
        ("model: {a: ", "it is not YAML"),
        ("model: 1", "it has no section model"),
        (None, "it has no section launcher"),
    ],
)
def test_a_damaged_config_of_a_run_is_named(text, damage, tmp_path):
    whole = to_yaml(compose(["model.mesh_shape=[[1],[tp]]"]).config)
    (tmp_path / "config.yaml").write_text(whole.partition("launcher:")[0] if text is None else text)
    with pytest.raises(UserError) as error:
        compose([f"resume={tmp_path}"])
    way_out = f"remove {tmp_path} if it has no checkpoints"
    assert str(error.value) == f"{tmp_path}/config.yaml is damaged ({damage}); {way_out}"
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(whole)
    with pytest.raises(UserError, match="; cp .* restores it"):
        compose([f"resume={tmp_path}"])


def test_a_place_inside_a_run_is_answered_with_the_run(tmp_path):
    (tmp_path / "checkpoints" / "3" / "state").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("")
    for index in ("checkpoints", "checkpoints/3/state", "config.yaml"):
        with pytest.raises(UserError, match=re.escape(f"did you mean resume={tmp_path}?")):
            compose([f"resume={tmp_path}/{index}"])


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        (["optimizer=adamw"], 0.015),
        (["optimizer=muon"], 0.015),
        (["optimizer=lion"], 5e-4),
        (["model=gemma3_270m"], 3e-4),
    ],
)
def test_the_rate_of_tiny_is_that_of_its_own_optimizer(words, rate, tmp_path):
    fresh = compose(words).config
    assert fresh.optimizer.learning_rate == rate
    (tmp_path / "config.yaml").write_text(to_yaml(fresh))
    assert compose([f"resume={tmp_path}"]).config.optimizer.learning_rate == rate
    assert compose([f"resume={tmp_path}", "optimizer=adamw"]).config.optimizer.learning_rate == 3e-4


@pytest.mark.parametrize("fresh", [True, False])
def test_a_folder_of_ones_own(fresh, tmp_path):
    folder = tmp_path / "my conf"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "optimizer" / "mine.yaml").write_text("defaults: [lion]\nlearning_rate: 1.0\n")
    (tmp_path / "config.yaml").write_text(to_yaml(compose([]).config))
    words = ["optimizer=mine"] if fresh else [f"resume={tmp_path}", "optimizer=mine"]
    optimizer = compose(add_search_path(words, folder)).config.optimizer
    assert (optimizer.name, optimizer.learning_rate) == ("lion", 1.0)
    with pytest.raises(UserError, match="--config-dir nowhere: there is no such folder"):
        add_search_path([], "nowhere")


def test_batch_keys_agree():
    base, four = ["model.mesh_shape=[[4],[fsdp]]"], dict.fromkeys(axis_names(), 1) | {"fsdp": 4}
    for words in (
        "training.gradient_accumulation_steps=3",
        "training.global_batch_size=192",
        "training.global_batch_tokens=24576",
    ):
        assert compose([*base, words]).config.training.batch_shape(four).num_microbatches == 3
    assert compose(base).config.training.batch_shape(four).num_microbatches == 1
    in_tokens = compose([*base, "training.micro_batch_tokens=1024"]).config.training
    assert in_tokens.batch_shape(four) == (1, 4 * 1024 // in_tokens.seq_len, in_tokens.seq_len)


def test_the_linters_of_a_commit_see_all_files_with_keys():
    """A commit that changed a key of a data source left docs/config.md as it was."""
    (hook,) = [
        hook
        for hook in read_yaml((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
        if hook["id"] == "reference"
    ]
    files = {inspect.getfile(section) for _, _, section in _list_leaves()}
    assert {file for file in files if not re.match(hook["files"], str(Path(file).relative_to(ROOT)))} == set()


def test_every_key_is_described():
    assert [key for key, description in list_keys() if not description] == []


@pytest.mark.parametrize("root", [Config, Average, Evaluate, Export, Generate, Play, Samples, Serve])
def test_types_have_no_defaults(root):
    """Each value stands in a file of conf/, so that `--cfg job` shows all that a run uses."""
    assert [key for key, name, kind in _list_leaves(root) if not kind.model_fields[name].is_required()] == []


def test_the_reference_page_is_current():
    sys.path.insert(0, str(ROOT))
    from tools.config_reference import page

    assert (ROOT / "docs" / "config.md").read_text() == page(), "run `make docs`"


def test_a_mistake_is_answered_within_a_second_and_before_jax():
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "sys.argv = ['run_training.py', 'training.micro_batchsize=4']\n"
        "import run_training\n"
        "code = run_training.main()\n"
        "print(code, 'jax' in sys.modules, time.perf_counter() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    code, jax_there, seconds = done.stdout.split()
    assert (code, jax_there) == ("2", "False")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("importing")]  # on a busy machine
    assert lines == ["error: unknown key training.micro_batchsize; did you mean training.micro_batch_size?"]
    assert re.fullmatch(r"[\d.]+", seconds)


def test_rotations_of_local_layers_are_no_part_of_a_model_without_them():
    """So a run can be averaged with its export, whose config.json does not say them."""
    words = ["model.global_every=1", "model.sliding_window=null"]
    kept, absent = (compose([*words, f"model.local_rope_theta={theta}"]).config.model for theta in ("1e4", "null"))
    assert kept.architecture == absent.architecture


def test_a_run_that_begins_with_another_has_its_stacks(tmp_path):
    """Of a run with first layers of their own, "cannot be read" was said: its arrays had another shape."""
    (tmp_path / "config.yaml").write_text(to_yaml(compose(["model=tiny", "model.layers_before_stages=2"]).config))
    values = {"model": {"init_from": str(tmp_path)}, "tokenizer": {}}
    fill_from_run(values, tmp_path, 1)
    assert values["model"]["layers_before_stages"] == 2
    values["model"] = {"init_from": str(tmp_path), "layers_before_stages": 3}
    with pytest.raises(UserError, match=r"stages=3, but .*config.yaml says 2; leave it out, or begin with the export"):
        fill_from_run(values, tmp_path, 1)


def test_a_copy_of_a_model_finds_its_layers_anew():
    model, same = (compose(["model=tiny"]).config.model for _ in range(2))
    assert model.runs[-1].layers.stop == model.num_layers
    assert model.model_copy(update={"num_layers": 1}).runs[-1].layers.stop == 1
    assert model == same  # whether its runs were asked for or not
    assert hash(model) == hash(same)
