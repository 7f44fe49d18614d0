"""Programs are compiled while the main thread reads; an error of either side ends the run, and no thread is left."""

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.lru_cache import LRUCache
from support.harness import ONE_LAYER, RUN

import tunix
from tunix.base.errors import Stopped, UserError
from tunix.config.batch import BatchShape
from tunix.config.compose import compose
from tunix.data import dataset as corpora
from tunix.processes.watchdog import Watchdog
from tunix.run import compiling as compiler

WAIT_S = 120  # for the other thread; only a failing test waits that long


@pytest.fixture
def words(tmp_path, corpus, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*RUN, *ONE_LAYER, "data=text", f"data.paths=['{corpus}']", "scheduler=constant"]


class Config:
    """Keeps what JAX is told in place of JAX."""

    jax_compilation_cache_dir = None

    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    def update(self, name: str, value: object) -> None:
        self.values[name] = value


def compiler_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("compiler")]


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (jax.disable_jit(), "JAX_DISABLE_JIT is True, and a run needs False"),
        (jax.threefry_partitionable(False), "JAX_THREEFRY_PARTITIONABLE is False, and a run needs True"),
    ],
    ids=["compiler", "digits"],
)
def test_a_run_needs_settings_of_jax(words, setting, line):
    with setting, pytest.raises(UserError, match=line):
        tunix.train(words)
    assert not Path("outputs").exists()


def test_an_error_of_the_data_while_the_step_is_compiled(words, monkeypatch):
    compiling, said = threading.Event(), threading.Event()

    def log_info(text: str, *values: object) -> None:
        if "the data cannot be read" in text % values:
            said.set()

    monkeypatch.setattr(compiler.log, "info", log_info)

    def compile_step(*_: object) -> None:
        compiling.set()
        said.wait(WAIT_S)

    def load(_: object) -> None:
        assert compiling.wait(WAIT_S)  # before the data are there
        assert compiler_threads()
        raise UserError("the data cannot be read")

    monkeypatch.setattr(compiler, "compile_step", compile_step)
    monkeypatch.setattr(corpora, "load_corpus", load)
    with pytest.raises(UserError, match="the data cannot be read"):
        tunix.train(words)
    assert said.is_set(), "the error is said before XLA is done"
    assert not compiler_threads()


def test_an_error_of_the_compiler_while_data_are_read(words, monkeypatch):
    failed, load_text = threading.Event(), corpora.load_corpus

    def compile_step(*_: object) -> None:
        failed.set()
        raise RuntimeError("XLA has no memory for this")

    def load(cfg):
        assert failed.wait(WAIT_S)
        return load_text(cfg)

    monkeypatch.setattr(compiler, "compile_step", compile_step)
    monkeypatch.setattr(corpora, "load_corpus", load)
    with pytest.raises(RuntimeError, match="XLA has no memory for this"):
        tunix.train(words)
    assert not compiler_threads()


def test_where_epochs_are_counted_the_data_tell_what_to_compile(words, monkeypatch):
    """The program of a guess would not be the one that runs: the learning rate depends on the length of the run."""
    lengths = []

    def compile_step(_program: object, spans) -> None:
        lengths.append(sum(count for count, _ in spans))
        raise RuntimeError("enough")

    monkeypatch.setattr(compiler, "compile_step", compile_step)
    with pytest.raises(RuntimeError, match="enough"):
        tunix.train([*words, "training.max_steps=5000", "training.num_epochs=0.01"])
    assert len(lengths) == 1
    assert 0 < lengths[0] < 5000


def test_a_program_is_awaited_by_all_processes_once(monkeypatch):
    """A process that ran it alone would wait in a collective for those that compile, which Gloo ends after 30 s."""
    awaited = []
    monkeypatch.setattr(compiler.peers, "together", lambda work, name, *_: awaited.append(name) or work())
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    with compiler.Compiler(mesh, Watchdog(compose([]).config.distributed)) as programs:
        for key in ("state", "step", "step", "state"):
            assert programs._wait(programs._begin(key, lambda key=key: key)) == key
    assert len(awaited) == 2


@pytest.mark.parametrize("has_step", [False, True])
def test_a_stop_signal_before_the_first_step_does_not_wait_for_the_compiler(has_step, monkeypatch):
    """There is nothing to save. Later the step that needs the program is saved."""
    monkeypatch.setattr(compiler, "wait", lambda *_, **__: SimpleNamespace(done=set()))  # it takes long
    monkeypatch.setattr(compiler.watchdog, "_stop_signals", ["SIGTERM"])
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    with compiler.Compiler(mesh, Watchdog(compose([]).config.distributed)) as programs:
        programs.has_step = has_step
        refused = nullcontext() if has_step else pytest.raises(Stopped, match="SIGTERM: given up while the first")
        with refused:
            assert programs._wait(programs._begin("step", lambda: "program")) == "program"


def test_an_error_does_not_wait_for_a_program_that_is_being_compiled(monkeypatch):
    """XLA cannot be interrupted: the process ends without Python's help."""
    monkeypatch.setattr(compiler.exits, "still_works", threading.Event())
    monkeypatch.setattr(compiler.exits, "ends_with_leave", threading.Event())
    compiler.exits.ends_with_leave.set()
    begun, gate = threading.Event(), threading.Event()
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    programs = compiler.Compiler(mesh, Watchdog(compose([]).config.distributed))
    program = programs._begin("step", lambda: begun.set() or gate.wait(10))  # only a failing test waits so long
    assert begun.wait(WAIT_S)
    programs.__exit__(UserError, UserError("the data are not there"), None)
    assert program.running()
    assert compiler.exits.still_works.is_set()
    gate.set()
    program.result(WAIT_S)


@pytest.mark.parametrize(("init_from", "first"), [(None, {"state", "step"}), ("a model", {"step"})])
def test_a_run_begins_with_the_programs_that_it_needs_first(init_from, first):
    """The state is that of the config's seed; weights of a model are read, not made."""
    model = SimpleNamespace(init_from=init_from)
    train_spec: Any = SimpleNamespace(
        cfg=SimpleNamespace(seed=7, model=model), batch="step", compile_new_state=lambda seed: lambda: seed
    )
    schedule: Any = SimpleNamespace(at=lambda step: SimpleNamespace(shape="usual"), spans=lambda last: ())
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    with compiler.Compiler(mesh, Watchdog(compose([]).config.distributed)) as programs:
        programs.begin_run({"usual": train_spec}, schedule, 5)
        assert {key if key == "state" else "step" for key in programs.futures} == first
        assert programs.new_state(train_spec) == 7


def test_a_step_is_compiled_with_the_options_of_its_run(caplog, monkeypatch):
    scalar, options = jax.ShapeDtypeStruct((), float), {}
    train_spec: Any = SimpleNamespace(
        step=lambda spans: lambda state, batch: state + batch,
        abstract=scalar, abstract_batch=scalar, compiler_options=lambda: options,
    )  # fmt: skip
    reads = iter([1, 1, 1, 2])  # programs that this thread has read, before and behind each of the two
    monkeypatch.setattr(compiler, "count_reads", lambda: next(reads))
    with caplog.at_level("INFO"):
        compiler.compile_step(train_spec, [])
        compiler.compile_step(train_spec, [])
    found = [line.partition(" in ")[0] for line in caplog.messages if line.startswith("step ")]
    assert found == ["step compiled", "step read from the compile cache"]
    monkeypatch.setattr(compiler, "count_reads", lambda: 1)
    options["xla_no_such_option"] = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compiler.compile_step(train_spec, [])


def test_a_batch_of_another_shape_has_a_step_of_its_own():
    """Its compiler is waited for, so the watchdog forgets how long steps take."""
    usual = BatchShape(*range(1, len(BatchShape._fields) + 1))._replace(num_microbatches=2)
    periods = [SimpleNamespace(first_step=step) for step in (1, 5)]
    schedule: Any = SimpleNamespace(periods=periods, at=lambda step: SimpleNamespace(shape=usual))
    started_over: list[int] = []
    watchdog = SimpleNamespace(start_over=lambda: started_over.append(1))
    programs: Any = SimpleNamespace(watchdog=watchdog, step=lambda train_spec, spans: train_spec)
    train_spec: Any = SimpleNamespace(with_microbatches=lambda count: f"{count} microbatches")
    steps = compiler.CompiledSteps({usual: train_spec}, schedule, (), programs)
    assert steps.changes == {5}
    batches = [{"tokens": np.zeros((count, 1))} for count in (2, 1)]
    assert [steps.is_ready(3, each) for each in batches] == [True, False]
    assert [steps.for_batch(3, each) for each in (*batches, batches[1])] == [train_spec, *["1 microbatches"] * 2]
    assert started_over == [1]


def test_the_parts_of_a_start_and_its_memory_in_words(monkeypatch):
    times = iter([10.0, 11.0, 13.0, 17.0])
    monkeypatch.setattr(compiler.time, "monotonic", lambda: next(times))
    clock = compiler.StartClock()
    for part in ("data", "state", "data"):
        clock.end(part)
    assert str(clock) == "ready for the first step after 7.0 s: data 5.0, state 2.0"
    memory = SimpleNamespace(argument_size_in_bytes=2 << 30, temp_size_in_bytes=1 << 30)
    compiled = SimpleNamespace(memory_analysis=lambda: memory)
    predicted = "memory of a device: predicted 3.000 GiB (compiled step); peak "
    assert compiler.describe_memory(compiled, 3.3) == f"{predicted}3.300 GiB, +10.0%"
    assert compiler.describe_memory(compiled, None) == f"{predicted}not measured here"


def test_a_program_that_a_full_disk_has_cut_does_not_end_the_cache(tmp_path, monkeypatch):
    """JAX before 0.12 looks for the time of each program before it writes another one, and raises where one has none."""
    monkeypatch.setattr(jax, "config", config := Config())
    compiler.keep_programs(compose([f"loading.cache_dir={tmp_path}"]).config)
    cache = LRUCache(config.values["jax_compilation_cache_dir"], max_size=1 << 20)
    cache.put("whole", b"program")
    (cache.path / "cut-cache").write_bytes(b"pro")
    with monkeypatch.context() as patch:
        patch.setattr(compiler.peers, "is_main", lambda: False)  # process 0 may be writing it
        compiler.keep_programs(compose([f"loading.cache_dir={tmp_path}"]).config)
    assert (cache.path / "cut-cache").exists()
    compiler.keep_programs(compose([f"loading.cache_dir={tmp_path}"]).config)
    cache.put("next", b"program")
    assert {path.name for path in cache.path.glob("*-cache")} == {"whole-cache", "next-cache"}


def test_each_run_of_a_process_keeps_its_programs_in_its_own_cache(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(jax, "config", config := Config())

    def keep(*words: str) -> object:
        compiler.keep_programs(compose([f"loading.cache_dir={tmp_path}/{words[0]}", *words[1:]]).config)
        config.jax_compilation_cache_dir = config.values.get("jax_compilation_cache_dir")
        return config.jax_compilation_cache_dir

    resets: list[int] = []
    monkeypatch.setattr(compiler.compilation_cache, "reset_cache", lambda: resets.append(1))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    first = keep("first")
    assert "jax_persistent_cache_min_compile_time_secs" not in config.values  # the user's own
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    second = keep("second", "training.compile_cache_gib=0.5")
    assert config.values["jax_persistent_cache_min_compile_time_secs"] == compiler.SHORTEST_COMPILE_S
    assert config.values["jax_compilation_cache_max_size"] == 1 << 29
    assert resets == [1]  # JAX has opened the first one
    assert [Path(str(each)).relative_to(tmp_path).parts[0] for each in (first, second)] == ["first", "second"]
    assert keep("third", "training.compile_cache_gib=0") is None
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda place, mode: mode != os.W_OK)  # a folder of another user
        assert keep("first") is None
    assert "cannot be written, so each start compiles its programs; set loading.cache_dir" in caplog.text
    config.values["jax_compilation_cache_dir"] = config.jax_compilation_cache_dir = "the user's"
    assert keep("fourth") == "the user's"
