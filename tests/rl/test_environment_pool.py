"""The pool of environments: what raises, hangs, ends its process, forks, grows or says nonsense costs its own episode alone."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.processes import wait_until

from tunix.base.errors import UserError
from tunix.rl.environment_pool import EnvironmentPool

ENVIRONMENTS = '''
import os, random, signal, subprocess, sys, time
from pathlib import Path

if "FAIL" in os.environ:
    raise ImportError("the library is too old")

class Sums:
    """Says the sum of the numbers so far; the words of a turn may do something worse first."""

    def reset(self, seed, first, **columns):
        self.sum = first
        self.random = random.Random(seed)
        return f"{seed} {self.sum}"

    def step(self, text):
        word, number = text.split()
        getattr(self, word)()
        self.sum += int(number)
        return f"{self.sum} {self.random.random()} {'jax' in sys.modules}", float(self.sum), self.sum > 9

    def add(self): pass
    def raises(self): 1 / 0
    def exits(self): sys.exit("enough")
    def dies(self): os._exit(3)
    def dies_once(self):
        try:
            os.mkdir("died")
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
    def hangs(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path("child").write_text(str(child.pid))
        time.sleep(600)
    def forks(self): os.fork()
    def grows(self):
        data = []
        while True:
            data.append(bytearray(10**7))
    def close(self):
        if self.sum == 77:
            time.sleep(600)

class Once(Sums):
    replays = False

class Chance(Sums):
    def step(self, text):
        super().step(text)
        return str(time.perf_counter()), 0.0, False

class Broken(Sums):
    def step(self, text):
        return None
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with environments of a user, which is the current one."""
    folder, before = tmp_path_factory.mktemp("environments"), Path.cwd()
    (folder / "my_environments.py").write_text(ENVIRONMENTS)
    os.chdir(folder)
    yield folder
    os.chdir(before)


def make_pool(kind: str, processes: int = 2, timeout_s: float = 20.0, memory_mib: int = 400) -> EnvironmentPool:
    return EnvironmentPool(f"my_environments:{kind}", {}, "hermes", processes, timeout_s, memory_mib)


def play(pool: EnvironmentPool, episodes: dict[int, list[str]]) -> dict[int, list]:
    """Play some episodes, each with the texts of its turns; return what each was replied, and last the problem."""
    pool.begin()
    said = {number: [] for number in episodes}
    for number in episodes:
        pool.ask(number, ("reset", 100 + number, {"first": number}))
    waiting = set(episodes)
    while waiting:
        for answered in pool.replies(30.0):
            number, texts = answered.number, episodes[answered.number]
            said[number].append(answered.problem or answered.reply)
            if answered.problem or len(said[number]) > len(texts):
                waiting.discard(number)
                pool.forget(number)
            else:
                pool.ask(number, ("step", texts[len(said[number]) - 1]))
    return said


def test_episodes_of_several_processes(folder):
    with make_pool("Sums") as pool:
        said = play(pool, {number: ["add 1", "add 2"] for number in range(5)})
        again = play(pool, {number: ["add 1", "add 2"] for number in range(5)})
        assert pool.num_lost == 0
        pids = [holder.process.process.pid for holder in pool.holders]
    assert said == again
    assert said[3][0].observations == ["103 3"]
    assert [reply.reward for reply in said[3]] == [0.0, 4.0, 6.0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "True" not in str(said[3][1].observations), "a process of environments has imported jax"


def test_bad_episodes_cost_themselves_alone(folder):
    """A process that is lost takes six episodes with it, of which five are played again, and say the same."""
    good = {number: ["add 1"] * 4 for number in range(12)}
    bad = {0: "raises", 1: "exits", 2: "dies", 3: "dies_once", 4: "forks", 5: "grows"}
    with make_pool("Sums") as pool:
        expected = play(pool, good)
        mixed = play(pool, good | {number: ["add 1", "add 1", f"{word} 1", "add 1"] for number, word in bad.items()})
        num_lost = pool.num_lost
    problems = {number: mixed[number][-1] for number in bad if isinstance(mixed[number][-1], str)}
    assert problems.keys() == {0, 1, 2, 5}
    assert problems[0].startswith("ZeroDivisionError: division by zero (")
    assert "my_environments.py, line" in problems[0]
    assert problems[1].startswith("SystemExit: enough (")
    assert problems[2] == "its process ended with exit code 3, twice"
    assert problems[5].startswith("MemoryError: ")
    assert num_lost == 3, "two for the episode that dies, one for that which dies once"
    assert {number: mixed[number] for number in good if number not in problems} == {
        number: expected[number] for number in good if number not in problems
    }


def test_an_environment_that_hangs_is_killed_with_its_children(folder):
    with make_pool("Sums", processes=1, timeout_s=1.0) as pool:
        said = play(pool, {0: ["add 1", "hangs 1"], 1: ["add 1", "add 1"], 77: ["add 1"], 78: ["add 1", "add 1"]})
        assert pool.num_lost == 1 or said[78], "a close that hangs costs no episode"
    assert said[0][-1] == "its process takes longer than 1 s"
    assert [reply.reward for reply in said[1]] == [0.0, 2.0, 3.0]
    assert [reply.reward for reply in said[78]] == [0.0, 79.0, 80.0]
    child = int((folder / "child").read_text())
    wait_until(lambda: not Path(f"/proc/{child}").exists(), "the end of a process that an environment has started", 30)


def test_what_is_not_played_again(folder):
    words = {0: ["add 1", "dies 1"], 1: ["add 1"] * 3}
    with make_pool("Once", processes=1) as pool:
        said = play(pool, words)
    assert said[1][-1] == "its process was lost, and replays=False forbids to play it again"
    with make_pool("Chance", processes=1) as pool:
        said = play(pool, words)
    assert said[1][-1] == "played again, it says something else; set replays = False on its class"


def test_a_process_that_is_killed_from_outside(folder):
    with make_pool("Sums", processes=1) as pool:
        pool.begin()
        pool.ask(0, ("reset", 1, {"first": 0}))
        (before,) = pool.replies(30.0)
        os.kill(pool.holders[0].process.process.pid, signal.SIGKILL)
        pool.ask(0, ("step", "add 1"))
        (after,) = pool.replies(30.0)
        assert (after.problem, after.reply.reward, pool.num_lost) == ("", 1.0, 1)
        # Replies of episodes that were given up do not come later.
        pool.ask(0, ("step", "add 1"))
        pool.begin()
        pool.ask(0, ("reset", 1, {"first": 0}))
        time.sleep(0.2)
        assert [answered.reply for answered in pool.replies(30.0)] == [before.reply]


def test_an_environment_is_tried_out_first(folder, capfd, monkeypatch):
    with make_pool("Broken") as pool, pytest.raises(UserError) as error:
        pool.try_out({"first": 1})
    assert str(error.value) == (
        "task.environment=my_environments:Broken fails: ValueError: step returned None, not (observation, reward, done)"
    )
    with make_pool("Sums") as pool, pytest.raises(UserError, match="reset takes the column first, which the data lack"):
        pool.try_out({"q": 1})
    with pytest.raises(UserError, match="my_environments has no function or class Nowhere"):
        make_pool("Nowhere")
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(UserError, match=r"Sums: its process ended with exit code 1 .*; its error is on stderr"):
        make_pool("Sums").__enter__()
    assert "the library is too old" in capfd.readouterr().err
