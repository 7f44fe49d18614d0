"""Programs are compiled while the main thread reads; an error of either side ends the run, and no thread is left."""

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax._src.lru_cache import LRUCache
from support.harness import ONE_LAYER, RUN

import tunix
from tunix.base.errors import Stopped, UserError
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


def test_a_program_that_a_full_disk_has_cut_does_not_end_the_cache(tmp_path, monkeypatch):
    """JAX before 0.12 looks for the time of each program before it writes another one, and raises where one has none."""
    monkeypatch.setattr(jax, "config", config := Config())
    compiler.keep_programs(compose([f"loading.cache_dir={tmp_path}"]).config)
    cache = LRUCache(config.values["jax_compilation_cache_dir"], max_size=1 << 20)
    cache.put("whole", b"program")
    (cache.path / "cut-cache").write_bytes(b"pro")
    compiler.keep_programs(compose([f"loading.cache_dir={tmp_path}"]).config)
    cache.put("next", b"program")
    assert {path.name for path in cache.path.glob("*-cache")} == {"whole-cache", "next-cache"}


def test_each_run_of_a_process_keeps_its_programs_in_its_own_cache(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(jax, "config", config := Config())

    def keep(*words: str) -> object:
        compiler.keep_programs(compose([f"loading.cache_dir={tmp_path}/{words[0]}", *words[1:]]).config)
        config.jax_compilation_cache_dir = config.values.get("jax_compilation_cache_dir")
        return config.jax_compilation_cache_dir

    first, second = keep("first"), keep("second")
    assert [Path(str(each)).relative_to(tmp_path).parts[0] for each in (first, second)] == ["first", "second"]
    assert keep("third", "training.compile_cache_gib=0") is None
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda place, mode: mode != os.W_OK)  # a folder of another user
        assert keep("first") is None
    assert "cannot be written, so each start compiles its programs; set loading.cache_dir" in caplog.text
    config.values["jax_compilation_cache_dir"] = config.jax_compilation_cache_dir = "the user's"
    assert keep("fourth") == "the user's"
