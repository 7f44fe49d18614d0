"""Values at the edges, and a process in odd surroundings: one line, and no traceback."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import groupby
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from support.harness import ROOT, run_python

import tunix
from tunix.base.errors import UserError
from tunix.base.files import expand_home, find_way_out, make_once
from tunix.config.compose import compose, format_resume, reject_missing_inputs
from tunix.processes import exits
from tunix.sharding.mesh import list_divisors
from tunix.trainer import _warn_of_lost_steps


@pytest.mark.parametrize(
    "word",
    [
        "training.max_steps=9223372036854775808", "training.max_steps=2147483648", "training.max_tokens=1e23",
        "training.max_tokens=9223372036854775808", "training.ema_decay=1.0", "training.ema_decay=[0.9,1]",
        "training.ema_decay=[0.9,0.9]", "loading.cache_dir=''", "project_name=../../x", "project_name=/x",
        "project_name=''", "project_name=a/../b",
    ],
)  # fmt: skip
def test_a_value_that_cannot_work_is_refused(word):
    with pytest.raises(UserError, match=word.split("=")[0].replace(".", r"\.")) as error:
        compose([word])
    assert all(word.split("=")[0] in line for line in str(error.value).splitlines())


@pytest.mark.parametrize("folder", ["/a/run", "/a/a run, {x}=[1]", "/a/it's $HOME"])
def test_the_way_to_resume_can_be_typed_as_it_is_shown(folder):
    [word] = shlex.split(format_resume(folder))
    assert OverridesParser.create().parse_override(word).value() == folder


def test_data_without_a_source_is_refused():
    with pytest.raises(UserError, match=r"data\.source is missing"):
        compose(["~data.source"])


@pytest.mark.parametrize("key", ["model", "task", "data", "tokenizer", "model.family"])
def test_a_key_that_is_read_before_the_check_may_be_taken_away(key):
    with pytest.raises(UserError, match=rf"{key}\S* is missing"):
        compose(["+experiment=grpo_addition", f"~{key}"])


def test_values_at_the_edge_work():
    words = ["training.max_steps=2147483647", "training.max_tokens=9223372036854775807", "project_name=a/b"]
    config = compose([*words, "training.ema_decay=[0.9,0.99]"]).config
    assert config.training.batch_schedule is not None
    assert config.project_name == "a/b"


@pytest.mark.parametrize("word", ["hydra.run.dir=", "hydra.run.dir=''", 'hydra.run.dir=""'])
def test_the_run_folder_has_a_name(word):
    with pytest.raises(UserError, match=r"hydra\.run\.dir is empty"):
        reject_missing_inputs(compose([word]))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; make room"),
        (OSError("No space left on device: 12 requested and 0 written"), "0 written; make room"),
        (OSError(errno.EMFILE, "Too many open files"), "raise the limit of open files"),
        (OSError(errno.EFBIG, "File too large"), "raise the limit of a file's size"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied; set loading.cache_dir to a writable"),
    ],
)
def test_a_disk_that_refuses_has_its_reason_and_way_out(tmp_path, error, words):
    def make(_):
        raise error

    with pytest.raises(UserError, match=words) as raised:
        make_once(tmp_path / "x", make)
    assert "None" not in str(raised.value)
    assert find_way_out(error, "set loading.cache_dir to a writable folder") in str(raised.value)


def run_here(code, words=(), **kwargs):
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, **kwargs
    )  # fmt: skip


@pytest.mark.parametrize("handled", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_leaves_nothing_of_what_is_being_made(number, handled, tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from tunix.base.files import make_once, write_whole; "
        "from tunix.processes import exits; exits.exit_on_stop_signals() if sys.argv[2] == 'True' else None; "
        "end = lambda _: os.kill(os.getpid(), int(sys.argv[1])); "
        "make_once(Path('new'), lambda new: (new.mkdir(), write_whole(new / 'config.json', '{}'), "
        "make_once(Path('cache/inner'), end)))"
    )
    hears = lambda: signal.signal(number, signal.SIG_DFL)  # noqa: E731 - also where the tests ignore SIGHUP
    done = run_here(code, cwd=tmp_path, words=[str(int(number)), str(handled)], preexec_fn=hears)
    assert done.returncode == (75 if handled else -number), done.stderr
    assert [*tmp_path.rglob("*")] == [tmp_path / "cache"]


def test_a_terminal_that_was_closed_changes_no_exit_code():
    code = (
        "import sys; from tunix.processes import exits; exits.drop_unread_output(); sys.stdin.read()\n"
        "print('saved', flush=True); sys.exit(75)"
    )
    master, slave = os.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=slave, cwd=ROOT) as process:
        os.close(slave)
        os.close(master)
    assert process.returncode == 75


def test_an_output_that_does_not_block_its_writers_gets_every_line():
    """ssh leaves a terminal so, which it shares with others; Python gives up where it is full."""
    code = "from tunix.processes import exits; exits.drop_unread_output(); print('line\\n' * 100_000)"
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen([sys.executable, "-c", code], stdout=writer, cwd=ROOT) as process, open(reader) as output:
        os.close(writer)
        time.sleep(0.5)  # the pipe is full by now
        assert output.read().count("line\n") == 100_000
    assert process.returncode == 0


@pytest.mark.parametrize("words", [["-u"], []], ids=["unbuffered", "as it is"])
def test_a_line_of_progress_is_written_when_it_is_said(words):
    """Containers set PYTHONUNBUFFERED, so that `kubectl logs` has each line at once."""
    code = "import os, sys; from tunix.processes import exits; exits.drop_unread_output(); print('compiling', file=sys.stderr); os._exit(0)"
    done = subprocess.run([sys.executable, *words, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    assert done.stderr == "compiling\n"


def test_a_user_without_a_home_gets_no_folder_of_that_name(monkeypatch):
    """As one whose number is in no list of users, in a container; `rm -r ~` would be the way to remove it."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(UserError, match="^~/.cache/tunix: this user has no home; set the environment variable HOME"):
        expand_home("~/.cache/tunix")
    assert str(expand_home("a~/b")) == "a~/b"


def test_the_current_folder_was_deleted(tmp_path):
    code = (
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); from tunix.processes import exits; "
        "sys.exit(exits.report_errors(lambda: print('never')))"
    )
    done = run_here(code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the current folder was deleted; change to one that exists (cd)\n"


@pytest.mark.parametrize("module", ["tunix", "tunix.compare"])
def test_another_encoding_than_utf8(module, tmp_path):
    """Texts are UTF-8, whatever LANG says; a word shows it, which Python would else take for other characters."""
    latin = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", module, "größe"]
    done = subprocess.run(words, capture_output=True, env={**os.environ, **latin}, cwd=tmp_path)
    assert done.returncode == 2
    assert "größe" in done.stderr.decode()


def test_python_code_says_that_texts_have_another_encoding(monkeypatch):
    monkeypatch.setattr(exits, "reads_utf8", lambda: False)
    for call in (partial(tunix.train, ["model=tiny"]), partial(tunix.load_pretrained, "nowhere")):
        with pytest.raises(UserError, match="Python reads texts as .* here, and they are UTF-8; set PYTHONUTF8=1"):
            call()


def test_a_command_does_not_wait_for_what_works_on_as_python_ends(tmp_path):
    code = (
        "import atexit, sys, time, types; from tunix.processes import exits\n"
        "sys.modules['tunix.processes.peers'] = types.SimpleNamespace(disconnect=lambda: print('told'))\n"
        "atexit.register(time.sleep, 60); exits.still_works.set(); exits.leave(3)"
    )
    done = run_here(code, cwd=tmp_path, timeout=30)
    assert (done.returncode, done.stdout) == (3, "told\n")  # the other processes of the run do not wait for this one


def test_a_program_that_ends_early_leaves_no_thread_to_pythons_end(tmp_path):
    """Python 3.13 would wait for it forever: `tunix verify --steps=many`, and each process in which a plan compiles."""
    code = (
        "import atexit, threading; atexit.register(lambda: print(threading.active_count()))\n"
        "from tunix.processes import exits; exits.announce_imports(); print(threading.active_count())"
    )
    assert run_here(code, cwd=tmp_path).stdout == "2\n1\n"


@pytest.mark.parametrize("fork", [False, True], ids=["exec", "fork"])
def test_ctrl_c_is_one_line(fork, tmp_path):
    """A fork of tests/support/forks.py ends as a program of a user does.

    Python does not take itself apart, beside threads of XLA that still compile.
    """
    (tmp_path / "program.py").write_text(
        "import atexit, os, signal, time; from tunix.processes import exits; atexit.register(print, 'at exit')\n"
        "class Late:\n    def __del__(self): print('taken apart')\n"
        "late = Late()\n"
        "exits.report_errors(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)))"
    )
    done = run_python("program.py", cwd=tmp_path, fork=fork)
    assert done.returncode == -2  # a shell says 130
    assert done.stderr == "interrupted\n"
    assert fork or done.stdout == "at exit\n"


def test_ctrl_c_while_a_command_imports_is_one_line(tmp_path):
    """A command imports for seconds: numpy, its first library, stands for all of them here."""
    (tmp_path / "numpy.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    (tmp_path / "hydra.py").write_text((tmp_path / "numpy.py").read_text())
    assert_interrupted(tmp_path)


def test_ctrl_c_of_which_an_extension_makes_another_error_is_one_line(tmp_path):
    for name in ("numpy.py", "hydra.py"):
        (tmp_path / name).write_text(
            "import os, signal\n"
            "try:\n"
            "    os.kill(os.getpid(), signal.SIGINT)\n"
            "    [0] * 100\n"
            "except KeyboardInterrupt as error:\n"
            "    raise ImportError('numpy._core.multiarray failed to import') from error\n"
        )
    assert_interrupted(tmp_path)


def assert_interrupted(tmp_path):
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = [sys.executable, "-m", "tunix.generate", "checkpoint=x"]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    slowly = "importing tunix: "  # how long it takes, on a busy machine
    lines = [line for line in done.stderr.splitlines() if not line.startswith(slowly)]
    assert (done.returncode, lines) == (-2, ["interrupted"])


def test_a_resumed_run_that_lost_its_checkpoints_is_warned(tmp_path, caplog):
    job = SimpleNamespace(run_dir=tmp_path, config=SimpleNamespace(checkpoint=SimpleNamespace(save_every_steps=3)))
    _warn_of_lost_steps(job)  # no metrics yet
    for steps, warned in (((1, 2), False), ((1, 2, 3, 4), True)):
        lines = "".join(json.dumps({"step": step}) + "\n" for step in steps) + '{"step": 5, "lo'  # cut by a crash
        (tmp_path / "metrics.jsonl").write_text(lines)
        _warn_of_lost_steps(job)
        assert ("has steps up to 4, and checkpoints are saved every 3" in caplog.text) == warned


@pytest.mark.nightly
def test_imports_from_a_slow_disk_are_announced(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("from tunix.base import progress; progress.QUIET_S = 0.05\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, str(ROOT / "run_training.py"), "dry_run=true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=True)
    announced = [work for work, _ in groupby(line.partition(":")[0] for line in done.stderr.splitlines())]
    assert announced == ["importing tunix", "importing JAX", "importing tunix"]


@pytest.mark.parametrize("number", [4294967296, 2**62, 10**15 + 37])
def test_divisors_of_a_large_number_take_no_time(number):
    assert number in list_divisors(number)


@pytest.mark.parametrize("word", ["launcher.gpus_per_node=4294967296", "launcher.nodes=1000000"])
def test_a_cluster_that_nobody_has_is_refused(word):
    with pytest.raises(UserError, match="launcher.gpus_per_node|no mesh of"):
        compose(["launcher=slurm", word])
