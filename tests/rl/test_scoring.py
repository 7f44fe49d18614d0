"""Scoring: rewards that raise, hang, die or return nonsense are counted and named, and nothing hangs."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.harness import ROOT
from support.processes import wait_until

from tunix.base.errors import UserError
from tunix.config.rewards import FunctionTerm
from tunix.rl.environment_pool import EnvironmentPool
from tunix.rl.scoring import LateProcess, LostProcess, Scorer, ScoringProcess, _split, describe_error

REWARDS = '''
import math, os, re, signal, subprocess, sys, time
from pathlib import Path

def letters(prompts, completions, **columns):
    return [len(text) for text in completions]

def about(prompts, completions, level):
    """A number made of everything that a reward is given."""
    signal.signal(signal.SIGALRM, lambda *_: None)  # only the main thread may do this
    return [value + ("jax" in sys.modules) + 100 * len(prompt) for prompt, value in zip(prompts, level)]

def given(prompts, completions, hint):
    return [each is not None for each in hint]

def alone(prompts, completions):
    """Fail in the process that comes first; in others, take long."""
    try:
        os.mkdir("first")
    except FileExistsError:
        time.sleep(600)
    return 1 / 0

def troubled(trouble):
    def reward(prompts, completions):
        return trouble(len(completions)) if "bad" in completions else [1.0] * len(completions)
    return reward

def stuck(count):
    """Start another process and let no thread of this one run again."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path("child").write_text(str(child.pid))
    re.match("(a+)+$", "a" * 60 + "b")

raises = troubled(lambda count: 1 / 0)
hangs = troubled(stuck)
dies = troubled(lambda count: os._exit(3))
is_killed = troubled(lambda count: os.kill(os.getpid(), signal.SIGKILL))
nan = troubled(lambda count: [math.nan] * count)
short = troubled(lambda count: [1.0] * (count - 1))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with rewards of a user, which is the current one."""
    folder, before = tmp_path_factory.mktemp("scoring"), Path.cwd()
    (folder / "my_rewards.py").write_text(REWARDS)
    os.chdir(folder)
    yield folder
    os.chdir(before)


def terms(*names, weight=1.0):
    return [
        FunctionTerm.model_construct(
            function=name if name == "format" else f"my_rewards:{name}", weight=weight, name=None
        )
        for name in names
    ]


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc").is_dir() else True


def test_scores_of_a_batch(folder):
    two = [*terms("letters", weight=0.5), *terms("about")]
    with Scorer(two, 3, 20, "stop") as scorer:
        scorer.try_out("?", {"level": 1, "answer": "1"})
        assert {worker.sample[1][0] for worker in scorer.workers} == {"1"}  # of the processes that follow, too
        pids = [worker.process.pid for worker in scorer.workers]
        words = ["a" * n for n in range(7)]
        scores = scorer.score(["?", "?!"] * 3 + ["?"], words, {"level": range(7)})
        # Between two batches a process is killed from outside: nobody is to blame.
        os.kill(pids[0], signal.SIGKILL)
        again = scorer.score(["?", "?!"] * 3 + ["?"], words, {"level": range(7)})
        assert not scorer.score([], [], {"level": []}).total
    about = [100 + 0, 200 + 1, 100 + 2, 200 + 3, 100 + 4, 200 + 5, 100 + 6]
    assert scores.values == again.values == {"letters": list(range(7)), "about": about}
    assert scores.total == [0.5 * n + value for n, value in enumerate(about)]
    assert scores.errors == again.errors == {"letters": 0, "about": 0}
    assert not any(scores.failed)
    assert not any(map(is_running, pids))


def test_a_column_that_no_row_of_a_batch_has_is_none(folder):
    """It was an error where other rows of the data have it: the answers of the batch got no score."""
    with Scorer(terms("given"), 1, 20, "stop", column_names=["hint"]) as scorer:
        scorer.try_out("?", {"answer": "1"})
        assert scorer.score(["?"] * 2, ["a", "b"], {}).total == [0, 0]
        assert scorer.score(["?"] * 2, ["a", "b"], {"hint": ["this", None]}).total == [1, 0]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_deadline_may_be_in_ages(folder):
    """In more seconds than the system's clock counts."""
    with Scorer(terms("letters"), 1, 1e12, "stop") as scorer:
        assert scorer.score(["?"], ["aa"], {}).total == [2]


def test_rewards_that_fail_are_counted_and_named(folder, caplog):
    names = "raises", "hangs", "dies", "is_killed", "nan", "short", "letters"
    with Scorer(terms(*names), 2, 1.0, "zero") as scorer:
        scorer.try_out("?", {})
        scores = scorer.score(["?"] * 6, ["a", "b", "c", "d", "bad", "f"], {})
        pids = [worker.process.pid for worker in scorer.workers]
    # An error costs one answer its score; a process that is lost costs those of its share, the second half.
    alone, share = [1, 1, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0]
    assert scores.values == {
        "raises": alone, "hangs": share, "dies": share, "is_killed": share, "nan": share, "short": alone,
        "letters": [1, 1, 1, 1, 3, 1],
    }  # fmt: skip
    assert scores.errors == {"raises": 1, "hangs": 3, "dies": 3, "is_killed": 3, "nan": 3, "short": 1, "letters": 0}
    assert scores.failed == [False, False, False, True, True, True]
    for line in (
        "reward raises: 1 of 6 answers have no score and get 0: ZeroDivisionError: division by zero (",
        "reward hangs: 3 of 6 answers have no score and get 0: takes longer than 1 s",
        "reward dies: 3 of 6 answers have no score and get 0: ended with exit code 3",
        "reward is_killed: 3 of 6 answers have no score and get 0: was killed by SIGKILL",
        "reward nan: 3 of 6 answers have no score and get 0: returned nan for an answer",
        "reward short: 1 of 6 answers have no score and get 0: ValueError: returned 0 scores for 1 answers",
    ):
        assert line in caplog.text
    child = int((folder / "child").read_text())
    wait_until(lambda: not is_running(child), "the end of a process that a killed reward has started", 30)
    assert not any(map(is_running, pids))


def test_an_error_is_described_in_words_that_a_file_takes():
    """Python gives a name of a file that is no UTF-8 with halves of pairs of surrogates."""
    assert describe_error(FileNotFoundError("no caf\udce9.txt\nhere"), set()) == "FileNotFoundError: no caf?.txt"


def test_a_reward_that_fails_ends_the_run(folder):
    with Scorer(terms("raises"), 1, 20, "stop") as scorer, pytest.raises(UserError) as error:
        scorer.score(["?"], ["bad"], {})
    assert "rewards: my_rewards:raises fails: ZeroDivisionError: division by zero (" in str(error.value)
    assert "reward_errors=zero scores such answers 0 and counts them" in str(error.value)
    with Scorer(terms("about"), 1, 20, "zero") as scorer, pytest.raises(UserError, match="it takes the column level"):
        scorer.try_out("?", {"answer": "1"})


def test_the_other_processes_end_in_silence(folder, caplog):
    """One process finds that a reward fails while another one computes: this one is killed, and nobody hears of it."""
    with pytest.raises(UserError, match="ZeroDivision"), Scorer(terms("alone"), 2, 20, "stop") as scorer:
        scorer.try_out("?", {})
    assert not caplog.text


def test_a_reward_that_cannot_be_imported(folder, capfd):
    with pytest.raises(UserError, match="ended with exit code 1 while it imported them; its error is on stderr"):
        Scorer(terms("nowhere"), 2, 20, "stop").__enter__()
    assert "my_rewards has no function or class nowhere" in capfd.readouterr().err


@pytest.mark.parametrize("when", ["first", "again"])
def test_a_process_that_the_system_refuses_is_named(when, monkeypatch):
    """As where the user has too many (ulimit -u): the run ended by a traceback, and saved nothing."""

    def refuse(*words, **options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    started, message = subprocess.Popen, r"cannot be started \(Resource temporarily unavailable\)"

    def score() -> None:
        with Scorer([FunctionTerm(function="length", weight=1.0, name=None)], 1, 5.0, "zero") as scorer:
            scorer.workers[0].kill()
            monkeypatch.setattr("subprocess.Popen", refuse)
            scorer.score(["a"], ["b"], {})

    def play() -> None:
        with EnvironmentPool("calculator", {}, "hermes", 1, 5.0, 400) as pool, pool.open() as session:
            pool.holders[0].process.kill()
            monkeypatch.setattr("subprocess.Popen", refuse)
            session.ask(0, ("reset", 0, {}))
            session.replies(5.0)

    for work, name in (
        (score, "rewards: the process that scores with length"),
        (play, "calculator: (its|a new) process"),
    ):
        monkeypatch.setattr("subprocess.Popen", refuse if when == "first" else started)
        with pytest.raises(UserError, match=f"{name} {message}"):
            work()


def test_workers_end_with_their_parent(folder):
    """Also while a reward lets no thread of the worker run."""
    code = """
from types import SimpleNamespace
from tunix.rl.scoring import Scorer
term = SimpleNamespace(function="my_rewards:hangs", label="hangs", weight=1.0)
with Scorer([term], 1, 600, "zero") as scorer:
    print(scorer.workers[0].process.pid, flush=True)
    scorer.score(["?"], ["bad"], {})
"""
    (folder / "child").unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        pid = int(parent.stdout.readline())
        try:
            wait_until(
                lambda: (folder / "child").is_file() and bool((folder / "child").read_text()), "the reward's process",
                still_possible=lambda: parent.poll() is None,
            )  # fmt: skip
            assert is_running(pid)
        finally:
            parent.kill()
    os.kill(int((folder / "child").read_text()), signal.SIGKILL)
    wait_until(lambda: not is_running(pid), "the end of a worker whose parent was killed", 30)
    assert parent.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("lost", "tries"), [(LateProcess, 1), (LostProcess, 2)])
def test_how_often_a_lost_process_is_asked(lost, tries):
    """One that is late would take the time a second time. A new process loads first what rewards load."""
    worker, asked = object.__new__(ScoringProcess), []
    worker.functions, worker.sample, worker.closed, worker.start_s = ["a", "b"], ([], ["42"], {}), False, 9.0
    worker.connection = SimpleNamespace(close=lambda: None)
    worker.kill = worker.start = worker.wait_for_rewards = lambda: None

    def exchange(request, timeout_s):
        asked.append((request[0], timeout_s))
        if timeout_s == 1.0:
            raise lost("is gone")

    worker.exchange = exchange
    assert worker.ask(("a", [], ["x", "y"], {}, 1), 1.0) == ["is gone"] * 2
    assert asked == [("a", 1.0), ("a", 9.0), ("b", 9.0)] * tries


def test_whole_groups_stay_together():
    assert _split(12, 4, 2) == [slice(0, 4), slice(4, 12)]
    assert _split(10, 2, 3) == [slice(0, 2), slice(2, 6), slice(6, 10)]
    assert _split(7, 1, 3) == [slice(0, 2), slice(2, 4), slice(4, 7)]
    assert _split(3, 3, 4) == [slice(0, 3)]
    assert _split(0, 2, 4) == []
