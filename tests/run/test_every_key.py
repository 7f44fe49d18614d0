"""A key that nothing reads does nothing. Reads of each part of the program are recorded; together they are all keys."""

import json
import pickle
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args, get_origin

import jax
import numpy as np
import pytest
from support.harness import ONE_LAYER, ROOT, RUN
from support.images import SEES
from support.installs import one_at_a_time
from support.rollouts import AGENT, ONE, TASK

from tunix.base.errors import UserError
from tunix.checkpoints.checkpoint import check_same
from tunix.checkpoints.store import open_store
from tunix.config import Config, Section
from tunix.config.compose import compose
from tunix.config.mistakes import list_sections
from tunix.data.batches import Position, TrainBatches, split_shared
from tunix.data.dataset import load_corpus
from tunix.models.rope import layer_rope
from tunix.plan import __main__ as plan
from tunix.processes import peers
from tunix.sharding.table import Equation
from tunix.trainer import run
from tunix.training.choices import build_layout, build_mesh
from tunix.training.loss import find_loss_kind, make_completion
from tunix.training.optimizer import make_optimizer, make_schedule
from tunix.training.state import Weight, describe
from tunix.training.train_spec import assemble

YARN = "{name:yarn,factor:2,original_context:64,beta_fast:32,beta_slow:1,attention_factor:null,truncate:true}"
DIVISORS = ",".join("1" * 64)
LONGROPE = (
    f"{{name:longrope,original_context:64,short_factors:[{DIVISORS}],long_factors:[{DIVISORS}],attention_factor:null}}"
)
Reads = set[tuple[type, str]]  # section, key

# Each part composes its configs and returns what is to be recorded: checks of a config are no use of it.


def a_run(folder: Path, corpus: Path) -> Callable[[], None]:
    traced = [
        "training.profile_communication=true",
        "profile.after_step=1",
        "profile.steps=1",
        "evaluation.sample_tokens=3",
        "training.ema_decay=0.9",
        "evaluation.every_steps=2",  # and at the end: two numbers to compare
        "training.global_batch_size=4",
        "training.batch_stages=[{until_tokens: 1, global_batch_size: 4}]",  # its shape is that of the run
        "training.remat=budget",
        "plan.num_compiled=0",
    ]
    words = [
        "data=text",
        f"data.paths=['{corpus}']",
        "model.mesh_shape=[[4,2],[fsdp,tp]]",
        f"hydra.run.dir={folder}/run",
    ]
    job = compose([*RUN, *ONE_LAYER, *words, f"loading.cache_dir={folder}/cache", *traced, "training.max_steps=3"])

    def use() -> None:
        run(job)
        open_store(f"{folder}/run/checkpoints", job.config.checkpoint, True).check(3)

    return use


def a_resumed_run(folder: Path, corpus: Path) -> Callable[[], None]:
    cfg = compose(RUN).config
    saved = cfg.model_dump(mode="json", by_alias=True)

    def use() -> None:
        with pytest.raises(UserError, match="the training data"):
            check_same(cfg, saved, Position(3, 24, "other data", ""), Position(0, 0, "", ""))

    return use


def the_sources(folder: Path, corpus: Path) -> Callable[[], None]:
    fresh = f"loading.cache_dir={folder}/cache"  # what is found there is not read again
    text = ["data=text", f"data.paths=['{corpus}']"]
    configs = [compose([*RUN, *words, fresh]).config for words in (text, *words_of_every_source(folder))]

    def use() -> None:
        for cfg in configs:
            batches = TrainBatches(load_corpus(cfg).train, cfg, cfg.training, build_mesh(cfg))
            batches.stages(10, batches.data_schedule)
            find_loss_kind(cfg)

    return use


def post_training(folder: Path, corpus: Path) -> Callable[[], None]:
    words = [
        "training.max_steps=1",
        "task.kl_coefficient=0.1",
        "task.credit=turns",
        "task.curriculum.unsolved=0.9",
        "task.rewards=[support.own_reward:letters, {function: overlong, buffer: 4}]",
        f"loading.cache_dir={folder}/cache",
    ]
    job = compose([*AGENT, *ONE, *words, f"hydra.run.dir={folder}/run"])
    pairs = compose([*RUN, *words_of_pairs(folder), "model.mesh_shape=[[1],[fsdp]]", words[-1]]).config
    teacher = [*ONE, f"task.teacher={ROOT}/tests/models/parity/llama"]
    talk = ["task=sft", "data=arithmetic", "data.below=20", words[-1]]
    taught = [[*RUN, *talk, *teacher], [*RUN, *teacher], [*TASK, *teacher, "task.teacher_loss=full"]]
    simpo = compose([*RUN, *words_of_pairs(folder), "task.objective=simpo", *ONE, words[-1]]).config
    answers = [{"prompt": "a", "completion": "b c" * (200 if n == 8 else 1), "label": n % 2 == 0} for n in range(9)]
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)))
    labelled = [
        "task=kto",
        "task.long_pairs=skip",
        "data=labelled",
        f"data.paths=[{folder}/answers.jsonl]",
        "training.seq_len=64",
    ]
    kto = compose([*RUN, *labelled, *ONE, words[-1]]).config
    (folder / "classes.jsonl").write_text(
        "\n".join(json.dumps({"text": "a b " * (n * 9 + 1), "label": n}) for n in range(9))
    )
    classes = ["task=classify", "task.labels=null", "data=jsonl", f"data.paths=[{folder}/classes.jsonl]"]
    classified = compose([*RUN, *classes, "task.long_documents=skip", *ONE, words[-1]]).config
    pairs_of_rewards = [word.replace("dpo", "reward") for word in words_of_pairs(folder)]
    reward = compose([*RUN, *pairs_of_rewards, *ONE, words[-1]]).config
    (folder / "groups.jsonl").write_text(
        "\n".join(json.dumps({"prompt": "a", "chosen": "b " * (n * 9 + 1), "rejected": "c"}) for n in range(9))
    )
    groups = ["task=embed", "task.negatives=1", "task.sizes=[8]", "data=pairs", f"data.paths=[{folder}/groups.jsonl]"]
    embedded = compose([*RUN, *groups, "task.long_documents=skip", *ONE, words[-1]]).config
    traced = pairs, kto, classified, reward, embedded, *(compose(words).config for words in taught), simpo

    def use() -> None:
        run(job)
        for cfg in traced[:6]:
            load_corpus(cfg)
        for cfg in traced:
            mesh = build_mesh(cfg)
            with jax.set_mesh(mesh):
                program = assemble(cfg, mesh)
                fields, shared = split_shared(program.abstract_batch)
                rows = {name: jax.eval_shape(lambda x: x[0], leaf) for name, leaf in fields.items()}
                if complete := make_completion(cfg, program.arch):
                    jax.eval_shape(complete, program.abstract["params"], fields)
                jax.eval_shape(
                    lambda params, rows, program=program: (
                        program.loss_fn(program.arch.module(params), rows, None).objective
                    ),
                    program.abstract["params"],
                    rows | shared,
                )

    return use


def the_optimizers(folder: Path, corpus: Path) -> Callable[[], None]:
    own = ["optimizer=custom", "optimizer.function=support.own_code:optimizer", "optimizer.arguments={decay: 0.9}"]
    words = [*([f"optimizer={name}"] for name in ("adamw", "adafactor", "lion", "muon", "sgd")), own]
    optimizers = [compose(each).config.optimizer for each in words]
    scheduler = compose(["scheduler=wsd"]).config.scheduler

    def use() -> None:
        for optimizer in optimizers:
            make_optimizer(optimizer, {"w": Weight(Equation("BTD,DF->BTF"), (4, 4), "float32")}, 1.0)
            assert optimizer.score_limit is None  # what a program asks before it makes a step that clips
        make_schedule(scheduler, 1.0, [(10, 10)])

    return use


def the_models(folder: Path, corpus: Path) -> Callable[[], None]:
    yarn = ["model=qwen3_0_6b", f"++model.rope_scaling={YARN}"]
    longrope = ["model=qwen3_0_6b", f"++model.rope_scaling={LONGROPE}"]
    sizes = ["model=llama3_1b"], ["model=gemma3_4b"], ["model=gpt2_124m"], yarn, longrope
    configs = [compose([*words, "model.lora.rank=2"]).config for words in sizes]
    configs += [
        compose([f"model={size}", "model.num_layers=4"]).config
        for size in ("deepseek_v3", "llama4_scout", "qwen3_5_9b")
    ]
    configs += [compose([f"model={size}", "model.num_layers=6"]).config for size in ("gemma4_31b",)]
    small = ["++model.shared_kv={layers: 5, mlp_dim: 12288}", "model.num_layers=10"]
    configs += [compose(["model=gemma4_e2b", *small]).config]
    biased = ["model.mlp.bias_rate=0.1", "model.mlp.balance_loss=0.1", "model.mlp.z_loss=0.1", "model.mlp.num_groups=2"]
    grows = "model.query_growth={rate: 0.1, every: 8, offset: 0, layers: all}"
    with_experts = compose(["model=tiny_moe", *biased, grows, "model.mesh_shape=[[2,4],[fsdp,ep]]"]).config

    seeing = [
        "model.vision.freeze_tower=false",
        "training.images_per_row=1",
        "training.seq_len=32",
        "model.lora.rank=2",
    ]
    further = ["model.mtp={loss_weight: 0.3}", "training.seq_len=32"]

    def use() -> None:
        words_of = dict.fromkeys(("gemma3_vision", "qwen3_vl", "smolvlm"), seeing) | {"glm4_moe": further}
        for name, words in words_of.items():
            cfg = compose([f"model.init_from={ROOT}/tests/models/parity/{name}", *words, *ONE]).config
            mesh = build_mesh(cfg)
            with jax.set_mesh(mesh):
                program = assemble(cfg, mesh)
                jax.eval_shape(program.step([(10, 10)]), program.abstract, program.abstract_batch)
        for cfg in configs:
            if cfg.model.positions == "rope":
                for layers in cfg.model.stacks.values():
                    layer_rope(cfg.model, layers, 64)
            mesh = build_mesh(cfg)
            with jax.set_mesh(mesh):
                describe(cfg.model, build_layout(cfg, mesh))
        mesh = build_mesh(with_experts)
        with jax.set_mesh(mesh):
            program = assemble(with_experts, mesh)
            jax.eval_shape(program.step([(10, 10)]), program.abstract, program.abstract_batch)

    return use


def a_plan(folder: Path, corpus: Path) -> Callable[[], None]:
    def use() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["tunix.plan", *RUN, "plan.num_compiled=0", f"plan.output={folder}/plan"])
            assert plan.main() == 0

    return use


def the_launchers(folder: Path, corpus: Path) -> Callable[[], None]:
    pods = ["launcher=kubernetes", "launcher.image=a", "launcher.volume_claim=b", f"hydra.run.dir={folder}/pods"]
    slurm = ["launcher=slurm", "launcher.dry_run=true", "launcher.container_image=a", f"hydra.run.dir={folder}/job"]
    jobs = [compose(pods), compose(slurm), compose(["launcher=ray", "dry_run=true"])]

    def use() -> None:
        for job in jobs:
            import_module(f"tunix.launch.{job.config.launcher.name}").launch(job)

    return use


def processes_that_join(folder: Path, corpus: Path) -> Callable[[], None]:
    two = ["distributed.num_processes=2", "distributed.process_id=0", "distributed.coordinator_address=localhost:1"]
    cfg = compose(two).config

    def use() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jax.distributed.initialize", lambda *args, **kwargs: None)
            patch.setattr("tunix.processes.peers.roll_call", lambda *args: [])
            peers.join(cfg.distributed, {})

    return use


PARTS: dict[Callable, tuple[str, ...]] = {  # and the fields of the config of which the part reads every key
    a_run: ("tokenizer", "training", "scheduler", "checkpoint", "logging", "profile"),
    post_training: ("task", "sampling"),
    a_resumed_run: (),
    the_sources: ("data", "tokenizer"),
    the_optimizers: ("optimizer", "scheduler"),
    the_models: (),
    a_plan: (),
    the_launchers: ("launcher",),
    processes_that_join: (),
}


@pytest.fixture(scope="module")
def reads(corpus, cache_dir, tmp_path_factory) -> Callable[[Callable], Reads]:
    """What a part reads of its configs; one worker of the session uses the part, all know what it read."""

    @cache
    def reads(part: Callable[[Path, Path], Callable[[], None]]) -> Reads:
        file = cache_dir / f"reads_of_{part.__name__}.pickle"
        with one_at_a_time(file.stem):
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(pickle.dumps(record(part)))
            return pickle.loads(file.read_bytes())

    def record(part: Callable[[Path, Path], Callable[[], None]]) -> Reads:
        use, read, get = part(tmp_path_factory.mktemp("part"), corpus), set(), Section.__getattribute__

        def recorded(self, name):
            read.update((kind, name) for kind in type(self).__mro__)
            return get(self, name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Section, "__getattribute__", recorded)
            use()
        return read

    return reads


@pytest.mark.nightly(but=["a_run"])
@pytest.mark.parametrize("part", [part for part in PARTS if PARTS[part]], ids=lambda part: part.__name__)
def test_a_part_reads_its_keys(part, reads):
    read = reads(part)
    for field in PARTS[part]:
        for kind in list_sections(Config.model_fields[field].annotation):
            assert [key for key in unread(kind, read) if not key.startswith(untested())] == []


@pytest.mark.nightly  # keys of the model and of the plan are seen by this test alone
def test_every_key_is_read(reads):
    read = set.union(*map(reads, PARTS))
    keys = sorted(key for key in unread(Config, read) if not key.startswith(untested()))
    assert keys == [], ", ".join(keys)


def untested() -> tuple[str, ...]:
    """Keys whose reads are not seen: by a Slurm, by a Ray cluster, by a bucket, by a sink (which gets plain values), by a package that is missing."""
    return (
        "Checkpoint.timeout_s", "Slurm.show_logs", "Ray.address", "Ray.max_restarts", "Ray.start_timeout_s",
        "Logging.every_steps", "Logging.close_timeout_s", "Logging.wandb", "Logging.mlflow", "Logging.webhook",
        "Logging.prometheus", "WandbKeys.", "MlflowKeys.", "WebhookKeys.", "PrometheusKeys.",
        *([] if find_spec("datasets") else ["HuggingFace", "Parquet"]),
        *([] if find_spec("reasoning_gym") else ["ReasoningGym"]),
    )  # fmt: skip


def words_of_pairs(folder: Path) -> list[str]:
    """Words of task=dpo on pairs made on the spot."""
    pairs = [{"prompt": "a", "chosen": "b c" * size, "rejected": "d"} for size in (*[1] * 9, 200)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return [
        "task=dpo",
        "task.long_pairs=skip",
        "data=pairs",
        f"data.paths=[{folder}/pairs.jsonl]",
        "distributed.allow_idle_devices=true",
        "training.seq_len=64",
    ]


def words_of_every_source(tmp_path: Path) -> list[list[str]]:
    """Words of a small corpus from each source, made on the spot."""
    rows = [{"text": f"text {n} " * 40, "q": f"{n}?", "a": f"{n}! " * 40, "s": "Short."} for n in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.csv").write_text("text\n" + "\n".join(row["text"] for row in rows))
    np.resize([*[9] * 99, 3], 2000).astype(np.uint16).tofile(tmp_path / "a.bin")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello " * 40}]
    (tmp_path / "b.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 8 + "not json")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    columns = ["data.columns.prompt=q", "data.columns.completion=a", "data.columns.system=s"]
    tokenizer = [f"tokenizer.path={tmp_path}/tokenizer.json", "tokenizer.train=true"]
    synthetic = "{source: synthetic, held_out_fraction: 0.1, num_documents: 9, mean_document_bytes: 200}"
    stages = "data.stages=[{name: later, from_step: 9, weights: {a: 1}}]"
    found = [
        ["data=jsonl", f"data.paths=[{tmp_path}/a.jsonl]", *tokenizer],
        [
            "data=jsonl",
            f"data.paths=[{tmp_path}/a.jsonl]",
            "task=sft",
            f"task.chat_template={tmp_path}/own.jinja",
            *columns,
        ],
        ["data=jsonl", f"data.paths=[{tmp_path}/b.jsonl]", "task=sft", "data.bad_rows=skip"],
        ["data=csv", f"data.paths=[{tmp_path}/a.csv]"],
        ["data=tokens", f"data.paths=[{tmp_path}/a.bin]", tokenizer[0], "data.document_end=3"],
        ["data=synthetic", "data.num_documents=9"],
        ["data=custom", "data.function=support.own_code:documents", "data.arguments={count: 200}"],
        words_of_pairs(tmp_path),
        ["data=python_docstrings", "task=sft"],
        ["data=arithmetic", "data.below=20", "task=sft"],
        ["data=look_up", "data.num_rows=200", "task=sft"],
        ["data=shapes", "data.num_rows=60", "task=sft", *SEES],
        ["data=mixture", f"data.parts={{a: {synthetic}}}", "data.weights={a: 1}", stages, "data.max_epochs={a: 9}"],
    ]
    if find_spec("reasoning_gym"):
        found.append(["data=reasoning_gym", "data.tasks={chain_sum: {}}", "data.num_problems=99"])
    if find_spec("datasets"):
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
        found.append(["data=parquet", f"data.paths=[{tmp_path}/a.parquet]"])
        found.append(["data=hf", "data.path=json", f"data.data_files=[{tmp_path}/a.jsonl]"])
    return found


def unread(section: type[Section], read: Reads) -> list[str]:
    """Keys of this section and of those in it that nobody has read, `source` and `name` apart, which choose a section."""
    found = []
    for name, field in section.model_fields.items():
        owners = {(kind, name) for kind in section.__mro__ if name in getattr(kind, "model_fields", ())}
        chooses = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        if not read & owners and not chooses:
            found.append(f"{section.__name__}.{name}")
        for kind in list_sections(field.annotation):
            found += unread(kind, read)
    return found
