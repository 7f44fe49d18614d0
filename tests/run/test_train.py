"""A whole run, in this process: its files, its numbers, its ends."""

import json
import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
from support.harness import ROOT, RUN, metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tunix
from tunix.base.errors import NotFinite, UserError
from tunix.cli.compose import compose
from tunix.cli.keys import sections
from tunix.config import Config, Section
from tunix.data.batches import TrainBatches
from tunix.data.corpus import load_corpus
from tunix.data.position import Position
from tunix.models.positions import layer_rope
from tunix.plan import __main__ as plan
from tunix.processes import joining
from tunix.run import lock
from tunix.run.compatible import check_same
from tunix.sharding.dims import Equation
from tunix.trainer import run
from tunix.training.optim import make_optimizer, make_schedule
from tunix.training.program import build_layout, build_mesh
from tunix.training.state import Weight, describe

sys.path.insert(0, str(ROOT))
from tunix.__main__ import LAUNCHERS

MESH = "model.mesh_shape=[[4,2],[fsdp,tp]]"


@pytest.fixture
def words(tmp_path, corpus, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*RUN, "data=text", f"data.paths=['{corpus}']", MESH]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """The folder of a run, for tests that only read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        names = ["project_name=demo", "run_name=first", "evaluation.sample_tokens=3"]
        return tunix.train([*RUN, "data=text", f"data.paths=['{corpus}']", MESH, *names]).folder


def test_a_runs_folder(finished):
    folder = finished
    assert folder.parts[-4:-2] == ("outputs", "demo")
    assert (folder.parents[1] / "latest").resolve() == folder
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", ".hydra", "train.log", "metrics.jsonl", "checkpoints", "environment.json"} <= names
    assert {path.name for path in (folder / ".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    environment = json.loads((folder / "environment.json").read_text())
    assert {"versions", "devices", "git_commit", "command", "processes"} <= environment.keys()
    assert {"python", "jax", "flax"} <= environment["versions"].keys()
    assert len(environment["devices"]) == 8
    log = (folder / "train.log").read_text()
    for text in ("38,352 parameters", "demo / first", "fsdp=", "tokens per step", "bytes per device", "FLOPs per token",
                 "step 6/6", "held out:", "unigram entropy of the corpus", "after >>>"):  # fmt: skip
        assert text in log or text.replace("fsdp=", '"fsdp"') in log, text


def test_metrics(finished):
    folder = finished
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    first = lines[0]
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s", "tokens_per_s_per_device", "step_time_s", "data_wait_s",
                 "mfu", "tflops_per_device", "peak_memory_gib", "skipped"):  # fmt: skip
        assert name in first
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name in {**first, **metrics(folder, "held_out")[0]}:
        assert f"`{name}`" in page, name
    assert first["mfu"] is None  # nobody knows a CPU's peak
    assert np.float32(first["loss"]) == first["loss"]  # every digit
    assert [line["tokens"] for line in lines] == [128 * n for n in range(1, 7)]
    assert lines[-1]["loss"] < first["loss"]
    held_out = metrics(folder, "held_out")
    assert [line["step"] for line in held_out] == [3, 6]
    assert held_out[0]["perplexity"] == pytest.approx(math.exp(held_out[0]["loss"]))


def test_one_run_at_a_time_writes_into_a_folder(words, monkeypatch):
    folder = tunix.train([*words, "training.max_steps=1"]).folder
    monkeypatch.setattr(lock, "HOLDER_S", 0.0)
    before = (folder / "metrics.jsonl").read_text()
    with lock.hold_lock(folder), pytest.raises(UserError, match=rf"is being written by process {os.getpid()} on "):
        tunix.train([f"resume={folder}", "training.max_steps=8"])
    assert (folder / "metrics.jsonl").read_text() == before
    tunix.train([f"resume={folder}", "training.max_steps=2"])  # a lock ends with its process


def test_one_sequence_of_one_chunk(words):
    """[B, T] with B = 1, whose logits are made at one time."""
    more = ["training.micro_batch_size=1", "training.seq_len=16", "training.loss_chunk_size=16", "training.max_steps=2"]
    first, second = (
        tunix.train([*words, *more, f"training.micro_batch_size={size}", "training.global_batch_size=2",
                     "model.mesh_shape=[[1],[tp]]", "distributed.allow_idle_devices=true"]).train["loss"]
        for size in (1, 2)
    )  # fmt: skip
    assert first == pytest.approx(second, rel=1e-6)


def test_tensorboard_reads_the_events(finished):
    folder = finished
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()
    assert {"train/loss", "train/tokens_per_s", "train/learning_rate", "held_out/bits_per_byte"} <= set(tags["scalars"])
    scalars = events.Scalars("train/loss")
    assert [(s.step, s.value) for s in scalars] == [
        (line["step"], pytest.approx(line["loss"])) for line in metrics(folder)
    ]
    assert {"config", "report", "sample"} <= set(tags["tensors"])
    (config,) = events.Tensors("config")
    assert "mesh_shape" in config.tensor_proto.string_val[0].decode()


def test_no_events_are_written_where_nobody_wants_them(words):
    silent = tunix.train([*words, "logging.sinks=[jsonl]", "training.max_steps=1"]).folder
    assert not list(silent.glob("events.*"))


def test_held_out_numbers_are_the_same_on_every_mesh(words):
    """The same steps on each mesh, and the last one filled up with masked rows."""
    base = [
        *words,
        "training.global_batch_size=8",
        "evaluation.num_sequences=13",
        "training.max_steps=2",
    ]
    found = []
    for mesh in ("[[8],[fsdp]]", "[[2,2,2],[dp,fsdp,tp]]"):
        result = tunix.train([*base, f"model.mesh_shape={mesh}"])
        found.append([result.held_out["loss"], result.held_out["bits_per_byte"], result.train["loss"]])
        assert result.held_out["eval_tokens"] > 300
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_runs_of_the_same_second_have_folders_of_their_own(words, monkeypatch):
    jobs = [compose([*words, "training.max_steps=1"]) for _ in range(2)]
    if jobs[0].run_dir != jobs[1].run_dir:
        pytest.skip("the clock ticked between the two")
    folders = [run(job).folder for job in jobs]
    assert folders[1].name == f"{folders[0].name}_1"


def test_a_folder_given_by_hand_is_not_shared(words):
    tunix.train([*words, "hydra.run.dir=mine", "training.max_steps=1"])
    before = Path("mine/metrics.jsonl").read_text()
    with pytest.raises(UserError, match=r"hydra.run.dir=mine holds another run; resume=mine goes on with it"):
        tunix.train([*words, "hydra.run.dir=mine"])
    assert Path("mine/metrics.jsonl").read_text() == before


def test_dry_run_prints_and_writes_nothing(words, capsys):
    result = tunix.train([*words, "dry_run=true", "model=gemma3_1b", "model.num_heads=4", "model.vocab_size=262144"])
    assert result.folder is None
    assert not Path("outputs").exists()
    printed = capsys.readouterr().out
    for text in ("parameters", "GiB = weights", "tokens per step", "GFLOP", "tp=1"):
        assert text in printed


def poison(monkeypatch, first_bad: int, last_bad: int) -> None:
    """NaN in the loss mask of samples in a range."""
    read = TrainBatches.read

    def poisoned(self, first_sample):
        batch = read(self, first_sample)
        if first_bad <= first_sample <= last_bad:
            batch["loss_mask"][0, 0, 0] = np.nan
        return batch

    monkeypatch.setattr(TrainBatches, "read", poisoned)


def test_a_bad_batch_is_skipped_and_counted(words, monkeypatch):
    poison(monkeypatch, 8, 8)  # step 3 of 4 sequences each
    folder = tunix.train(words).folder
    lines = metrics(folder)
    assert [line["skipped"] for line in lines] == [0, 0, 1, 0, 0, 0]
    assert [line["loss"] is None for line in lines] == [False, False, True, False, False, False]


def test_too_many_bad_batches_stop_the_run_and_name_the_samples(words, monkeypatch):
    poison(monkeypatch, 8, 10**6)
    with pytest.raises(
        NotFinite,
        match=r"not finite in 2 steps in a row .*; step 4 had samples 12 to 15. The parameters are those of step 2",
    ):
        tunix.train([*words, "training.max_skipped_steps=1", "hydra.run.dir=bad"])
    assert (Path("bad/checkpoints/3")).is_dir()


def test_unknown_compiler_options_are_named(words):
    with pytest.raises(UserError, match=r"training.compiler_options: .*xla_not_an_option"):
        tunix.train([*words, "+training.compiler_options.xla_not_an_option=true"])
    assert not Path("outputs").exists()
    assert tunix.train(
        [*words, "+training.compiler_options.xla_cpu_enable_fast_math=false", "training.max_steps=1"]
    ).folder


@pytest.mark.parametrize(
    ("limit", "steps"), [("training.max_tokens=400", 3), ("training.num_epochs=0.01", 1), ("training.max_steps=2", 2)]
)
def test_the_first_limit_reached_ends_the_run(words, limit, steps):
    result = tunix.train([*words, limit])
    assert result.train["step"] == steps


def test_without_held_out_documents_there_is_no_evaluation(words):
    result = tunix.train([*words, "data.held_out_fraction=0"])
    assert result.held_out == {}
    assert result.train["step"] == 6


def test_a_config_made_in_python(words):
    config = compose([*words, "training.max_steps=1"]).config
    assert tunix.train(config).train["step"] == 1


def test_every_key_is_read(words, tmp_path, monkeypatch):
    """A key that nothing reads does nothing. Reads of a run that uses every part are recorded, after the checks."""
    fresh = f"loading.cache_dir={tmp_path}/cache"  # what is found there is not read again
    traced = ["training.profile_communication=true", "profile.after_step=1", "profile.steps=1"]
    first = compose([*words, fresh, *traced, "training.max_steps=3", "hydra.run.dir=first"])
    two = ["distributed.num_processes=2", "distributed.process_id=0", "distributed.coordinator_address=localhost:0"]
    other = [compose([f"optimizer={name}", *two]).config for name in ("adamw", "adafactor", "lion", "muon", "sgd")]
    wsd = compose(["scheduler=wsd"]).config
    yarn = "{name:yarn,factor:2,original_context:64,beta_fast:32,beta_slow:1,attention_factor:null}"
    models = [
        compose(["model=llama3_1b", "model.lora.rank=2"]).config,
        compose(["model=gemma3_4b", "model.lora.rank=2"]).config,
        compose(["model=qwen3_0_6b", f"++model.rope_scaling={yarn}", "model.lora.rank=2"]).config,
    ]
    pods = ["launcher=kubernetes", "launcher.image=a", "launcher.volume_claim=b"]
    elsewhere = [
        compose([*pods, "hydra.run.dir=pods"]),
        compose(["launcher=slurm", "launcher.dry_run=true", "launcher.container_image=a", "hydra.run.dir=job"]),
    ]
    read: set[tuple[str, str]] = set()
    get = Section.__getattribute__

    def recorded(self, name):
        read.update((kind.__name__, name) for kind in type(self).__mro__)
        return get(self, name)

    monkeypatch.setattr(Section, "__getattribute__", recorded)
    run(first)
    changed = Position(3, 24, "other data", "")
    with pytest.raises(UserError, match="the training data"):
        check_same(first.config, first.config.model_dump(mode="json", by_alias=True), changed, Position(0, 0, "", ""))
    for corpus in read_by_every_source(tmp_path):
        cfg = compose([*RUN, *corpus, fresh]).config
        TrainBatches(load_corpus(cfg).train, cfg, build_mesh(cfg), 1).stages(10)
    for cfg in other:
        make_optimizer(cfg.optimizer, {"w": Weight(Equation("BTD,DF->BTF"), (4, 4), "float32")}, 1.0)
    make_schedule(wsd.scheduler, 1.0, 10, 10)
    for cfg in models:
        layer_rope(cfg.model)
        mesh = build_mesh(cfg)
        with jax.set_mesh(mesh):
            describe(cfg.model, build_layout(cfg, mesh))
    monkeypatch.setattr("sys.argv", ["tunix.plan", *RUN, "plan.num_compiled=0", f"plan.output={tmp_path}/plan"])
    assert plan.main() == 0
    for job in elsewhere:
        LAUNCHERS[job.config.launcher.name](job)
    monkeypatch.setattr("jax.distributed.initialize", lambda *args, **kwargs: None)
    monkeypatch.setattr("tunix.processes.joining.roll_call", lambda *args: [])
    joining.start(other[0].distributed, {})
    missing = ["Slurm.show_logs"] + ([] if find_spec("datasets") else ["HuggingFace", "Parquet"])  # needs a Slurm
    assert sorted(key for key in unread(Config, read) if not key.startswith(tuple(missing))) == []


def read_by_every_source(tmp_path: Path) -> list[list[str]]:
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
        ["data=python_docstrings", "task=sft"],
        ["data=mixture", f"data.parts={{a: {synthetic}}}", "data.weights={a: 1}", stages, "data.max_epochs={a: 9}"],
    ]
    if find_spec("datasets"):
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
        found.append(["data=parquet", f"data.paths=[{tmp_path}/a.parquet]"])
        found.append(["data=hf", "data.path=json", f"data.data_files=[{tmp_path}/a.jsonl]"])
    return found


def unread(section: type[Section], read: set[tuple[str, str]]) -> list[str]:
    owners = {
        name: [kind.__name__ for kind in section.__mro__ if name in getattr(kind, "model_fields", ())]
        for name in section.model_fields
    }
    found = [
        f"{section.__name__}.{name}" for name, kinds in owners.items() if not read & {(kind, name) for kind in kinds}
    ]
    for field in section.model_fields.values():
        for kind in sections(field.annotation):
            found += unread(kind, read)
    return found
