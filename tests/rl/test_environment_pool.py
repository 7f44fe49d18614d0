"""The pool of environments: what raises, hangs, ends its process, forks, grows or says nonsense costs its own episode alone."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.processes import wait_until

from tunix.base.errors import UserError
from tunix.rl.environment_pool import EnvironmentPool, Session, _Holder
from tunix.rl.environments import Reply

ENVIRONMENTS = '''
import functools, os, random, signal, subprocess, sys, time
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
    def swallows(self):
        while True:
            try:
                time.sleep(600)
            except TimeoutError:
                pass
    def forks(self): os.fork()
    def dies_before_its_child(self):
        if not os.fork():
            time.sleep(600)
        os._exit(3)
    def leaves_a_server(self):
        program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
        words = ["sh", "-c", f"'{sys.executable}' -c '{program}' > server &"]
        subprocess.run(words, start_new_session=True)  # its parent is gone at once
    def grows(self):
        data = []
        while True:
            data.append(bytearray(10**7))
    def close(self):
        if self.sum == 77:
            time.sleep(600)

class Once(Sums):
    replays = False

class Tools:
    replays = False
    kept = []
    def reset(self, seed, first): pass
    def load(self) -> str:
        """Load."""
        self.kept.append(bytearray(150 * 2**20))
        return "loaded"
    def wait(self, seconds: float) -> str:
        """Wait."""
        time.sleep(seconds)

class ToolsAgain(Tools):
    replays = True

class Chance(Sums):
    def step(self, text):
        super().step(text)
        return str(time.perf_counter()), 0.0, False

class Leaks(Sums):
    kept = []
    def reset(self, seed, first):
        self.kept.append(bytearray(150 * 2**20))
        super().reset(seed, first)

@functools.cache
def load():
    time.sleep(1.5)

class LoadsLong(Sums):
    def reset(self, seed, first):
        load()
        super().reset(seed, first)

    def step(self, text):
        return super().step(text) if text else (None, 0.0, True)

class Sets:
    def reset(self, seed):
        self.ways = {"north", "south", "east", "west"}
        return " ".join(self.ways)

    def step(self, text):
        return " ".join(self.ways), 0.0, False

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
    with pool.open() as session:
        return play_in(session, episodes)


def play_in(session: Session, episodes: dict[int, list[str]]) -> dict[int, list]:
    said = {number: [] for number in episodes}
    for number in episodes:
        session.ask(number, ("reset", 100 + number, {"first": number}))
    waiting = set(episodes)
    while waiting:
        for answered in session.replies(30.0):
            number, texts = answered.number, episodes[answered.number]
            said[number].append(answered.problem or answered.reply)
            if answered.problem or len(said[number]) > len(texts):
                waiting.discard(number)
                session.ask(number, ("forget",))
            else:
                session.ask(number, ("step", texts[len(said[number]) - 1]))
    return said


def test_episodes_of_several_processes(folder):
    with make_pool("Sums") as pool:
        said = play(pool, {number: ["add 1", "add 2"] for number in range(5)})
        with pool.open() as session:
            again = play_in(session, {number: ["add 1", "add 2"] for number in range(5)})
            for number in range(5):
                session.ask(number, ("reset", 1, {"first": 1}))
            assert [holder.num_episodes for holder in pool.holders] == [3, 2]
        assert [holder.num_episodes for holder in pool.holders] == [0, 0]
        assert session.num_lost == 0
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
        words = {number: ["add 1", "add 1", f"{word} 1", "add 1"] for number, word in bad.items()}
        with pool.open() as session:
            mixed = play_in(session, good | words)
    problems = {number: mixed[number][-1] for number in bad if isinstance(mixed[number][-1], str)}
    assert problems.keys() == {0, 1, 2, 5}
    assert problems[0].startswith("ZeroDivisionError: division by zero (")
    assert "my_environments.py, line" in problems[0]
    assert problems[1].startswith("SystemExit: enough (")
    assert problems[2] == "its process ended with exit code 3, twice"
    assert problems[5].startswith("MemoryError: ")
    assert session.num_lost == 4, (
        "two for the episode that dies, one for that which dies once, one for that which grows"
    )
    assert {number: mixed[number] for number in good if number not in problems} == {
        number: expected[number] for number in good if number not in problems
    }


def test_an_environment_that_hangs_is_killed_with_its_children(folder):
    with make_pool("Sums", processes=1, timeout_s=1.0) as pool:
        words = {0: ["add 1", "hangs 1"], 1: ["add 1", "add 1"], 77: ["add 1"], 78: ["add 1", "add 1"]}
        with pool.open() as session:
            said = play_in(session, words)
        assert session.num_lost == 1 or said[78], "a close that hangs costs no episode"
    assert said[0][-1] == "its process takes longer than 1 s"
    assert [reply.reward for reply in said[1]] == [0.0, 2.0, 3.0]
    assert [reply.reward for reply in said[78]] == [0.0, 79.0, 80.0]
    child = int((folder / "child").read_text())
    wait_until(lambda: not Path(f"/proc/{child}").exists(), "the end of a process that an environment has started", 30)


def test_what_episodes_leave_in_memory_ends_one_episode_and_not_all_later_ones(folder):
    with make_pool("Leaks", processes=1) as pool:
        last = [play(pool, {0: ["add 1"]})[0][-1] for _ in range(6)]
    failed = [isinstance(each, str) and each.startswith("MemoryError") for each in last]
    assert failed == [False, False, True, False, False, True]


def test_what_tools_leave_in_memory_ends_one_episode_too(folder):
    """The model read the error, as that of its call, and each later call had it."""
    with make_pool("ToolsAgain", processes=1, memory_mib=250) as pool:
        call = '<tool_call>{"name": "load", "arguments": {}}</tool_call>'
        first, second, third = (play(pool, {number: [call]})[number][-1] for number in range(3))
    assert (first.observations, third.observations) == (["loaded"], ["loaded"])
    assert second.startswith("MemoryError:  (")


def test_a_new_process_has_time_to_load(folder):
    """An environment that loads at its first call longer than a call may take fails no later episode."""
    with make_pool("LoadsLong", processes=1, timeout_s=1.0) as pool:
        pool.try_out({"first": 0})
        late, *others = (play(pool, {0: [word]})[0] for word in ("hangs 1", "add 1", "add 2"))
    assert late[-1] == "its process takes longer than 1 s"
    assert [replies[-1].reward for replies in others] == [1.0, 2.0]


def test_what_an_environment_has_forked_or_left(folder):
    """A child that lives longer than its process hides no death; a server with a session of its own ends with it."""
    with make_pool("Sums", processes=1, timeout_s=60.0) as pool:
        start_time = time.monotonic()
        said = play(pool, {0: ["dies_before_its_child 1"]})
        assert time.monotonic() - start_time < 60.0, "the deadline of a call has not ended it"
        assert said[0][-1] == "its process ended with exit code 3, twice"
        said = play(pool, {0: ["leaves_a_server 1", "add 1"]})
        assert [reply.reward for reply in said[0]] == [0.0, 1.0, 2.0]
        note = folder / "server"
        wait_until(lambda: note.exists() and note.read_text().endswith("\n"), "the server of an environment", 30)
        server = psutil.Process(int(note.read_text()))
        assert is_alive(server)
    wait_until(lambda: not is_alive(server), "the end of the server", 30)


def is_alive(process: psutil.Process) -> bool:
    """A zombie has ended: whether it is waited for is up to the process that has adopted it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_late_call_ends_one_episode_of_those_that_are_not_played_again(folder):
    words = {0: ["add 1", "hangs 1"], 1: ["add 1"] * 3, 77: ["add 1"], 2: ["swallows 1"], 3: ["add 1"] * 4}
    with make_pool("Once", processes=1, timeout_s=1.0) as pool, pool.open() as session:
        said = play_in(session, {number: words[number] for number in (0, 1, 77)})
        assert session.num_lost == 0
        late = play_in(session, {number: words[number] for number in (2, 3)})
    assert said[0][-1].startswith("LateCall: not done after 1 s (")
    assert "my_environments.py, line" in said[0][-1]
    assert [reply.reward for reply in said[1]] == [0.0, 2.0, 3.0, 4.0]
    assert late[2][-1] == "its process takes longer than 2 s"
    assert late[3][-1] == "its process was lost, and replays=False forbids to play it again"


def test_a_late_call_of_a_tool_ends_its_turn(folder):
    """It was an error that the model read; a second one had no limit, and the process ended with all of its episodes."""
    call = '<tool_call>{"name": "wait", "arguments": {"seconds": SECONDS}}</tool_call>'
    late, soon = (call.replace("SECONDS", seconds) for seconds in ("9", "0"))
    with make_pool("Tools", processes=1, timeout_s=0.3) as pool:
        said = play(pool, {1: [late + late], 2: [soon]})
    assert said[1][-1].startswith("LateCall: not done after 0.3 s (")
    assert said[2][-1].observations == ["None"]


def test_a_program_that_is_late_leaves_no_folder(tmp_path, monkeypatch):
    """Its process is killed, and cannot remove what it has made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = '<tool_call>{"name": "python", "arguments": {"code": "import time; time.sleep(60)"}}</tool_call>'
    with EnvironmentPool("python", {}, "hermes", 1, 0.5, 400) as pool:
        assert play(pool, {1: [text]})[1][-1] == "its process takes longer than 0.5 s"
        assert not list(tmp_path.iterdir())


def test_an_episode_that_is_played_again_has_the_time_of_all_its_calls():
    holder, asked = object.__new__(_Holder), []
    holder.pool, holder.index = SimpleNamespace(timeout_s=2.0, replays=True), 0
    holder.played, holder.present = {}, set()

    def exchange(kind, key, timeout_s, requests):
        asked.append((timeout_s, len(requests)))
        return ["said"] * len(requests), "", 0.5

    holder._exchange = exchange
    session = SimpleNamespace(number=1, seconds=[0.0])
    for number in range(4):
        if number == 3:  # its process was lost
            holder.present.clear()
        assert holder._ask(session, 7, ("step", str(number))).reply == "said"
    assert (asked, session.seconds) == ([(2.0, 1)] * 3 + [(8.0, 4)], [2.0])


def test_what_is_not_played_again(folder):
    words = {0: ["add 1", "dies 1"], 1: ["add 1"] * 3}
    with make_pool("Once", processes=1) as pool:
        said = play(pool, words)
    assert said[1][-1] == "its process was lost, and replays=False forbids to play it again"
    with make_pool("Chance", processes=1) as pool:
        said = play(pool, words)
    assert said[1][-1] == "played again, it says something else; set replays = False on its class"


def test_a_process_that_is_killed_from_outside(folder):
    with make_pool("Sums", processes=1) as pool, pool.open() as session:
        session.ask(0, ("reset", 1, {"first": 0}))
        (before,) = session.replies(30.0)
        os.kill(pool.holders[0].process.process.pid, signal.SIGKILL)
        session.ask(0, ("step", "add 1"))
        (after,) = session.replies(30.0)
        assert (after.problem, after.reply.reward, session.num_lost) == ("", 1.0, 1)
        # Replies of episodes that were given up do not come later.
        session.ask(0, ("step", "add 1"))
        with pool.open() as later:
            session.__exit__()
            later.ask(0, ("reset", 1, {"first": 0}))
            time.sleep(0.2)
            assert [answered.reply for answered in later.replies(30.0)] == [before.reply]


def test_the_order_of_a_set_is_the_same_in_another_process(folder, monkeypatch):
    """The episode of a process that was lost said something else, and was given up."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with make_pool("Sets", processes=1) as pool, pool.open() as session:
        session.ask(0, ("reset", 1, {}))
        (before,) = session.replies(30.0)
        os.kill(pool.holders[0].process.process.pid, signal.SIGKILL)
        session.ask(0, ("step", "go"))
        (after,) = session.replies(30.0)
    assert (after.problem, after.reply) == ("", before.reply)


def test_sessions_share_processes(folder):
    """Episodes of two rollouts have the same numbers and do not meet, also when a process of both is lost or one ends."""
    words = {number: ["add 1", "add 2"] for number in range(4)}
    with make_pool("Sums", processes=1) as pool:
        alone = play(pool, words)
        with pool.open() as first:
            first.ask(0, ("reset", 7, {"first": 5}))
            (before,) = first.replies(30.0)
            with pool.open() as second:
                assert play_in(second, words) == alone
                assert play_in(second, {8: ["dies 1"]})[8][-1] == "its process ended with exit code 3, twice"
            first.ask(0, ("step", "add 3"))
            (after,) = first.replies(30.0)
        assert (before.reply.observations, after.reply.reward) == (["7 5"], 8.0)
        assert (first.num_lost, second.num_lost) == (0, 2)
        pool.fail(ZeroDivisionError("a thread of the pool has ended"))
        with pytest.raises(ZeroDivisionError):
            first.replies(30.0)


def test_an_environment_is_tried_out_first(folder, capfd, monkeypatch):
    with make_pool("Broken") as pool, pytest.raises(UserError) as error:
        pool.try_out({"first": 1})
    assert str(error.value) == (
        "task.environment=my_environments:Broken fails: ValueError: step returned None, not (observation, reward, done)"
    )
    with make_pool("Sums") as pool, pytest.raises(UserError, match="reset takes the column first, which the data lack"):
        pool.try_out({"q": 1})
    # Other rows of the data have the column.
    pool = EnvironmentPool("my_environments:Sums", {}, "hermes", 1, 20.0, 400, ["first", "q"])
    with pool, pool.open() as session:
        session.ask(0, ("reset", 5, {"q": 1}))
        (answered,) = session.replies(30.0)
    assert answered.reply == Reply(["5 None"], 0.0, False)
    with pytest.raises(UserError, match="my_environments has no function or class Nowhere"):
        make_pool("Nowhere")
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(UserError, match=r"Sums: its process ended with exit code 1 .*; its error is on stderr"):
        make_pool("Sums").__enter__()
    assert "the library is too old" in capfd.readouterr().err
