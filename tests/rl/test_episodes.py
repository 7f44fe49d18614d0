"""Episodes: tokens that only grow, what is learnt of them, budgets, and environments that fail. The model is a script.

tests/rl/test_agents.py plays them with a model and its engine.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes import wait_until
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tunix.base.errors import UserError
from tunix.config.data import Tokenizer
from tunix.config.task import Sampling
from tunix.data.documents import Question
from tunix.data.prompts import Prompt
from tunix.data.tokenizer import train_vocab
from tunix.inference.engine import Answer
from tunix.inference.rollout import RolloutRequest
from tunix.rl.environment_pool import EnvironmentPool
from tunix.rl.environments import Reply
from tunix.rl.episodes import Episode, ObservationEncoder, Player, PrioritySlots, try_user_code

ENVIRONMENTS = '''
import time
from pathlib import Path

class Riddle:
    """Wants the number that it has said, plus one."""

    def reset(self, seed, first, **columns):
        self.number, self.seed, self.asked = first, seed, 0
        return None

    def step(self, text):
        time.sleep(0.001 * (self.seed % 3))
        self.asked += 1
        if text.startswith("fail"):
            raise RuntimeError("the riddle is broken")
        if text == f"!{self.number + self.seed % 7 + 1}":
            return None, 1.0, True
        return f"={self.number + self.seed % 7}", -0.25, False

class Says(Riddle):
    def reset(self, seed, first, **columns):
        super().reset(seed, first)
        return " Think of " + "x" * first

class BeginsLate(Riddle):
    def reset(self, seed, first, **columns):
        super().reset(seed, first)
        time.sleep(0.2)

class Shouts(Riddle):
    def reset(self, seed, **columns):
        return " <eos>"

    def step(self, text):
        return ["<eos> a <|end|>", "b"], 0.0, False

class Adder:
    def reset(self, seed, **columns): pass
    def add(self, a: int, b: int) -> int:
        "Add two numbers."
        return a + b
    def get_reward(self): return 0.5

class Meeting:
    """Waits until an environment of the other rollout is at work too."""

    def reset(self, seed, own):
        self.own = own

    def step(self, text):
        Path("met" + self.own).touch()
        deadline = time.monotonic() + 15
        while not all(Path("met" + name).exists() for name in "12"):
            if time.monotonic() > deadline:
                raise RuntimeError("nobody came")
            time.sleep(0.01)
        return None, 1.0, True
'''


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes")
    (folder / "riddles.py").write_text(ENVIRONMENTS)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def vocab():
    """One token a byte, and a special token that ends turns of the template."""
    keys = {"path": None, "train": None, "vocab_size": 259, "train_bytes": 1000, "bos_token": None, "eos_token": None}
    made = train_vocab(Tokenizer(**keys), ["a"])
    made.backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return made


def keys(max_new_tokens=100, max_turn_tokens=None) -> Sampling:
    values = {
        "temperature": 1.0,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "stop": (),
        "cache": "auto",
        "cache_dtype": None,
        "guess": 0,
        "guess_by": "prompt_lookup",
    }
    return Sampling(max_new_tokens=max_new_tokens, max_turn_tokens=max_turn_tokens, **values)


@dataclass
class Row:
    text: list[int]
    limit: int
    drawn: list[int]


class ScriptedEngine:
    """An engine whose turns follow from the text of a row by a function; they end in an order of their own."""

    def __init__(self, vocab, stop: int, policy, seed: int = 0):
        self.vocab, self.stop, self.policy, self.random = vocab, stop, policy, random.Random(seed)
        self.rows: dict[int, Row] = {}
        self.working: set[int] = set()
        self.admitted: list[tuple[int, ...]] = []

    @property
    def num_working(self) -> int:
        return len(self.working)

    def admit(self, prompt, numbers, max_new_tokens):
        self.admitted.append(tuple(numbers))
        for number in numbers:
            assert number not in self.rows
            self.rows[number] = Row(list(prompt), max_new_tokens, [])
            self.working.add(number)

    def extend(self, number, tokens, max_new_tokens):
        assert number not in self.working
        assert tokens
        self.rows[number].text += tokens
        self.rows[number].limit = max_new_tokens
        self.working.add(number)

    def release(self, number):
        self.working.discard(number)
        del self.rows[number]

    def run(self):
        ended = self.random.sample(sorted(self.working), self.random.randint(0, len(self.working)))
        return [(number, self._draw(number)) for number in sorted(ended)]

    def _draw(self, number: int) -> Answer:
        row = self.rows[number]
        said = self.policy(self.vocab.backend.decode(row.text, skip_special_tokens=False), number)
        tokens = [*self.vocab.backend.encode(said, add_special_tokens=False).ids, self.stop][: row.limit]
        row.text += tokens
        self.working.discard(number)
        return Answer(tokens, [-1.0] * len(tokens), [-2.0] * len(tokens), tokens[-1] == self.stop)


def solve(text: str, number: int) -> str:
    """Ask first, then answer; every third answer is wrong first."""
    *_, last = text.split("=") if "=" in text else [""]
    if not last:
        return "?"
    value = int(last.split("\n")[0].split("<")[0]) + 1
    wrong = number % 3 == 0 and text.count("=") == 1
    return f"!{value - wrong}"


def decode(vocab, tokens: list[int]) -> str:
    return vocab.backend.decode(tokens, skip_special_tokens=False)


def list_facts(episode: Episode) -> dict:
    """Return all of an episode but the seconds that it took."""
    turns = [{name: value for name, value in turn.items() if name != "seconds"} for turn in episode.turns]
    return {**vars(episode), "prompt": None, "turns": turns, "environment_s": 0}


def play(
    vocab,
    name,
    policy,
    *,
    prompts=3,
    group_size=4,
    seed=0,
    rows=None,
    sampling=None,
    max_turns=5,
    longest=100,
    limit_s=None,
    tool_calls="hermes",
):
    """Play episodes; return them, and the engine."""
    stop = vocab.backend.token_to_id("<eos>")
    engine = ScriptedEngine(vocab, stop, policy, seed)
    episodes = []
    for group in range(prompts):
        messages = [{"role": "user", "content": f"Riddle {group}."}]
        text = vocab.chat.render(messages, True)
        tokens = vocab.backend.encode(text, add_special_tokens=False).ids
        prompt = Prompt(tokens, text, {"first": group}, Question(messages, {}))
        episodes += [Episode(group * group_size + n, prompt, 100 + group) for n in range(group_size)]
    with EnvironmentPool(f"riddles:{name}", {}, tool_calls, 2, 20.0, 400) as pool:
        task = SimpleNamespace(
            describe_tools=list, chat_template_kwargs=None, max_turns=max_turns, episode_timeout_s=limit_s
        )
        player = Player(pool, task, vocab, [stop], longest)
        player.play(engine, episodes, RolloutRequest([], sampling or keys(), group_size, 0), rows)
    assert not engine.rows
    return episodes, engine


def test_tokens_only_grow_and_observations_are_not_learnt(vocab):
    (episode, *_), _ = play(vocab, "Riddle", solve, prompts=1)
    text = "?<eos>\ntool:\n=2\nassistant:\n!2<eos>\ntool:\n=2\nassistant:\n!3<eos>"
    assert decode(vocab, episode.tokens) == text
    learnt = "".join(
        decode(vocab, [token]) if own else "." for token, own in zip(episode.tokens, episode.learnt, strict=True)
    )
    assert learnt == "?<eos>" + "." * 21 + "!2<eos>" + "." * 21 + "!3<eos>"
    assert [decode(vocab, episode.tokens[first:stop]) for first, stop in episode.spans] == [
        "?<eos>",
        "!2<eos>",
        "!3<eos>",
    ]
    assert episode.rewards == [-0.25, -0.25, 1.0]
    assert (episode.reward, episode.stopped, episode.last_turn) == (0.5, True, "!3")
    assert {own: {lp} for own, lp in zip(episode.learnt, episode.sampled_log_probabilities, strict=True)} == {
        True: {-2.0}, False: {0.0},
    }  # fmt: skip
    roles = [turn["role"] for turn in episode.turns]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert episode.turns[1] | {"seconds": 0} == {"role": "tool", "content": "=2", "reward": -0.25, "seconds": 0}


@pytest.mark.parametrize("rows", [None, 4, 1])
def test_neither_rows_nor_waits_change_an_episode(vocab, rows):
    first, engine = play(vocab, "Riddle", solve)
    again, _ = play(vocab, "Riddle", solve, seed=5, rows=rows)
    assert list(map(list_facts, first)) == list(map(list_facts, again))
    assert sorted(engine.admitted) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)], "a prompt is computed once"
    assert {episode.seed for episode in first[:4]} == {100}


def test_rollouts_play_beside_one_another(vocab):
    """While one waits for its environments, another one has the devices: here each waits for the other's."""
    stop = vocab.backend.token_to_id("<eos>")

    def policy(text, number):
        return "?"

    with EnvironmentPool("riddles:Meeting", {}, "hermes", 4, 20.0, 400) as pool:
        task = SimpleNamespace(describe_tools=list, chat_template_kwargs=None, max_turns=5, episode_timeout_s=None)
        player = Player(pool, task, vocab, [stop], 100)

        def play_one(name: str) -> list[Episode]:
            tokens = vocab.backend.encode("?", add_special_tokens=False).ids
            prompt = Prompt(tokens, "?", {"own": name}, Question([], {}))
            episodes = [Episode(number, prompt, 1) for number in range(2)]
            engine = ScriptedEngine(vocab, stop, policy)
            player.play(engine, episodes, RolloutRequest([], keys(), 2, 0, rank=int(name)), None)
            return episodes

        with ThreadPoolExecutor(2) as threads:
            played = [*threads.map(play_one, ["1", "2"])]
    assert [(episode.problem, episode.reward) for each in played for episode in each] == [("", 1.0)] * 4


def test_who_is_interrupted_waits_for_the_devices_no_more(monkeypatch):
    """Ctrl-C while held-out prompts wait for them: the threads that draw ahead waited behind it forever, and the run with them."""

    def interrupt(is_next):
        raise KeyboardInterrupt

    slots = PrioritySlots(1)
    monkeypatch.setattr(slots.changed, "wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt), slots.hold(rank=0):
        pass
    assert (slots.waiting, slots.free) == ([], 1)


def test_the_lowest_rank_is_next():
    slots, order = PrioritySlots(1), []

    def work(rank: int) -> None:
        with slots.hold(rank):
            order.append(rank)

    with slots.hold(0):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in (3, 1, 2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(slots.waiting) == 3, "three threads that wait")
    for thread in threads:
        thread.join()
    assert order == [1, 2, 3]


def test_budgets(vocab):
    turns, _ = play(vocab, "Riddle", lambda text, number: "?", max_turns=2, prompts=1, group_size=2)
    assert [(episode.num_turns, episode.stopped, episode.reward) for episode in turns] == [(2, False, -0.5)] * 2
    assert turns[0].learnt[-1], "what an environment says after the last turn is not seen"
    tokens, _ = play(vocab, "Riddle", lambda text, number: "?", sampling=keys(30), prompts=1, group_size=2)
    assert [len(episode.tokens) for episode in tokens] == [2 + 21 + 2] * 2, "a second observation does not fit"
    assert not tokens[0].stopped
    cut, _ = play(vocab, "Riddle", lambda text, number: "?" * 50, sampling=keys(100, 10), prompts=1, group_size=2)
    assert [(len(episode.tokens), episode.stopped, episode.num_turns) for episode in cut] == [(10, False, 1)] * 2
    cut, _ = play(
        vocab, "Riddle", lambda text, number: "!" if "!" not in text else "?" * 50, sampling=keys(30, 10), prompts=1,
        group_size=2,
    )  # fmt: skip
    assert [(len(episode.tokens), episode.num_turns) for episode in cut] == [(30, 2)] * 2, "both budgets bound a turn"
    late, _ = play(vocab, "Riddle", lambda text, number: "?", prompts=1, group_size=2, limit_s=1e-9)
    assert [(episode.num_turns, episode.stopped, episode.reward) for episode in late] == [(1, False, -0.25)] * 2
    late, _ = play(vocab, "BeginsLate", lambda text, number: "?", prompts=1, group_size=2, limit_s=0.2)
    assert [episode.num_turns for episode in late] == [1] * 2, "`reset` is one of its calls"
    tools, _ = play(vocab, "Adder", lambda text, number: "<tool_call>" * 9, sampling=keys(20), prompts=1, group_size=2)
    assert [(episode.reward, episode.stopped) for episode in tools] == [(0.5, False)] * 2, (
        "get_reward is asked at the end"
    )


def test_an_environment_that_fails_costs_its_episode_alone(vocab):
    episodes, _ = play(vocab, "Riddle", lambda text, number: "fail" if number == 5 else solve(text, number))
    assert [episode.number for episode in episodes if episode.problem] == [5]
    assert episodes[5].problem.startswith("RuntimeError: the riddle is broken (")
    assert (episodes[5].reward, episodes[4].reward) == (0.0, 0.75)


def test_tools(vocab):
    def policy(text, number):
        if "tool:" in text:
            return f"It is {text.rpartition('tool:')[2].split()[0]}."
        calls = [f'<tool_call>{{"name": "add", "arguments": {{"a": {n}, "b": 1}}}}</tool_call>' for n in range(2)]
        return "".join(calls) + ("<tool_call>{}</tool_call>" if number else "")

    (plain, failing), _ = play(vocab, "Adder", policy, prompts=1, group_size=2, sampling=keys(900))
    assert [turn["content"] for turn in plain.turns[1:]] == ["1", "2", "It is 2."]
    assert (plain.reward, plain.tool_errors, failing.tool_errors) == (0.5, 0, 1)
    assert failing.turns[3]["content"].startswith("error: ValueError: a call is an object like")


# Templates that show what a tool says behind a call alone, with its name (GPT-OSS) or in the turn that called (Gemma 4,
# whose next turn begins without a header), or with the id of the call (Kimi K2); one takes nine letters as an id.
OF_CALLS = {
    "harmony": (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ called.name or raise_exception('no call before') }}:"
        "{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}{% set called.name = m.tool_calls[-1].function.name %}"
        "{{ m.tool_calls[-1].function.arguments | tojson }}<eos>{% else %}{{ m.role }}:{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
        'to=functions.NAME<|message|>{"a": 1, "b": 2}', 'NAME:"RESULT"<|end|>assistant:',
    ),
    "gemma": (
        "{% for m in messages %}{% if m.role == 'tool' and called.name %}response:{{ m.name }}<{{ m.content }}>{% elif "
        "m.tool_calls %}{% set called.name = 1 %}model:{% for c in m.tool_calls %}{{ c.function.arguments.a }}}{% endfor %}"
        "<eos>{% elif m.role != 'tool' %}{{ m.role }}:{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt and not called.name %}model:{% endif %}",
        "<|tool_call>call:NAME{a:1,b:2}<tool_call|>", "response:NAME<RESULT>",
    ),
    "kimi": (
        "{% for m in messages %}{{ m.name or m.role }}:{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}<eos>"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
        '<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"a": 1, "b": 2}<|tool_call_end|>',
        "NAME:## Return of functions.NAME:0\nRESULT<eos>assistant:",
    ),
    "json": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('id') }}"
        "{% endif %}[{{ m.content }}:{{ m.tool_call_id }}]{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c | tojson }}{% endfor %}<eos>{% endif %}{% endfor %}",
        '[TOOL_CALLS][{"name": "NAME", "arguments": {"a": 1, "b": 2}, "id": "IDENTITY"}]', "[RESULT:IDENTITY]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("format", OF_CALLS)
def test_what_a_tool_says_stands_behind_its_call_as_in_the_template(vocab, format):
    source, call, said = OF_CALLS[format]
    other = replace(vocab, chat_template="{% set called = namespace(name=none) %}" + source)
    names, ids = {1: "nothing"}, {2: "abcdefghi", 3: "short"}

    def policy(text, number):
        written = call.replace("NAME", names.get(number, "add")).replace("IDENTITY", ids.get(number, ""))
        return "done" if written in text else written

    episodes, _ = play(other, "Adder", policy, prompts=1, sampling=keys(500), tool_calls=format)
    for episode in episodes:
        behind = said.replace("NAME", names.get(episode.number, "add")).replace("RESULT", episode.turns[1]["content"])
        behind = behind.replace("IDENTITY", "abcdefghi" if episode.number == 2 else "000000000")
        assert decode(vocab, episode.tokens).partition("<eos>")[2] == f"{behind}done<eos>"


def test_a_call_that_no_token_ends_is_said(vocab, caplog):
    """A model that was trained here with the template of GPT-OSS has no files that name `<|call|>`."""
    other = replace(vocab, chat_template="{% set called = namespace(name=none) %}" + OF_CALLS["harmony"][0])
    for end in ("<eos>", "<|end|>"):
        ObservationEncoder(other, [vocab.backend.token_to_id(end)], {"tools": [{"name": "add"}]})
    assert caplog.text.count("and none of its tokens ends a turn") == 1
    assert "<eos>tool:" in caplog.text


def test_what_is_rewarded_has_no_thought_that_special_tokens_mark(vocab):
    """A game reads, and rewards score, what GPT-OSS says in its channel `final`."""
    backend = Backend.from_str(vocab.backend.to_str())
    backend.add_special_tokens(
        [AddedToken(mark, special=True) for mark in ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")]
    )

    def policy(text, number):
        said = "<|start|>assistant<|channel|>final<|message|>" + solve(text, number)
        return f"<|channel|>analysis<|message|>Guess.{said}" if number else said

    episodes, _ = play(replace(vocab, backend=backend), "Riddle", policy, prompts=1, sampling=keys(400), longest=100)
    plain, _ = play(vocab, "Riddle", solve, prompts=1)
    assert [episode.reward for episode in episodes] == [episode.reward for episode in plain]
    assert {episode.last_turn for episode in episodes} == {"!3"}
    assert episodes[1].turns[0]["content"].startswith("<|channel|>analysis<|message|>Guess.<|start|>assistant")


def test_what_reset_says_belongs_to_the_prompt(vocab):
    episodes, engine = play(vocab, "Says", solve, longest=45)
    texts = [vocab.backend.decode(episode.begin, skip_special_tokens=False) for episode in episodes]
    assert texts[8] == "<bos>user:\nRiddle 2. Think of xx\nassistant:\n"
    assert [episode.problem for episode in episodes[:4]] == [""] * 4
    said = [episode.describe()["turns"][: -len(episode.turns)] for episode in episodes]
    assert said[8] == [{"role": "user", "content": " Think of xx"}], "samples.jsonl has it; rewards see the turns alone"
    assert sorted(engine.admitted) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    long, engine = play(vocab, "Says", solve, longest=len(episodes[4].begin))
    assert {episode.problem for episode in long[:8]} == {""}
    (problem,) = {episode.problem for episode in long[8:]}
    assert problem == "with what reset says the prompt has 40 tokens; training.seq_len leaves 39"
    assert not long[8].tokens
    # Prompts of a copied folder are refused before anything is written: each episode would fail.
    pool = SimpleNamespace(try_out=lambda columns: [Reply(["Think of xx"], 0.0, False)])
    with pytest.raises(UserError, match="data=tokens keeps the tokens alone; give rows"):
        try_user_code(Prompt([1], "a", {}), SimpleNamespace(try_out=lambda *_: None), pool)


def test_a_tool_cannot_write_a_special_token(vocab):
    episodes, _ = play(vocab, "Shouts", lambda text, number: "?", prompts=1, group_size=2, max_turns=2)
    assert decode(vocab, episodes[0].begin) == "<bos>user:\nRiddle 0. < eos>\nassistant:\n"
    text = vocab.backend.decode(episodes[0].tokens, skip_special_tokens=False)
    assert text == "?<eos>\ntool:\n< eos> a < |end|>\ntool:\nb\nassistant:\n?<eos>"


def test_the_template_closes_a_turn_that_another_token_has_stopped(vocab):
    """Of the text behind a turn the token that stops it is left out, with the white space before it."""
    end = vocab.backend.token_to_id("<|end|>")
    chat = "{% for m in messages %}<{{ m.role }}>{{ m.content }} <|end|>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    other = replace(vocab, chat_template=chat)
    assert decode(vocab, ObservationEncoder(other, [end], {}).encode(["7"])) == "\n<tool>7 <|end|>\n<assistant>"
    assert decode(vocab, ObservationEncoder(other, [1], {}).encode(["7"])) == " <|end|>\n<tool>7 <|end|>\n<assistant>"
    assert decode(vocab, ObservationEncoder(other, [end], {}).encode([])) == "\n<assistant>"
    silent = replace(vocab, chat_template="{{ messages[0].content }}")
    with pytest.raises(UserError, match="shows neither a message of the role tool nor one of the role user"):
        ObservationEncoder(silent, [end], {})
    assert Path("riddles.py").exists()
