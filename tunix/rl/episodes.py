"""Episodes: answers of several turns, between which an environment speaks.

    prompt        p p p                                given
    turn 1              a a s                          drawn; s is the token that stops it          learnt
    observation               o o o o                  what the environment says, in the template   not learnt
    turn 2                            b b s            drawn                                        learnt

Tokens are only ever added: what was drawn is never made text and read again. While an environment works, its row of the
engine waits with its cache, and the others go on. The tokens of an episode depend on its prompt, the seed and what its
environment says alone: not on how long environments take, on rows, or on which process holds them.

With several processes each holds the environments of its share of the episodes. All of them run the engine together, so
they exchange the replies before each stretch of tokens.

Several rollouts may be under way at one time, in threads of one process. One of them has the devices: a rollout that
waits for its environments lends them to the others.
"""

import heapq
import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from tunix.base.errors import UserError
from tunix.config.task import Grpo
from tunix.data.chat import NO_ID, WORDS, Options
from tunix.data.prompts import Prompt
from tunix.data.thoughts import split_thought
from tunix.data.tokenizer import Vocab, break_special_texts, compile_special_texts, decode, special_tokens
from tunix.inference.engine import Answer, Engine
from tunix.inference.rollout import RolloutRequest, Sampler, derive_seed
from tunix.inference.sampling import select_sampling
from tunix.processes import peers
from tunix.rl.environment_pool import Answered, EnvironmentPool, Session
from tunix.rl.environments import Reply, gives_reward
from tunix.rl.scoring import Scorer, Scores
from tunix.rl.table import find_environment, format_environment
from tunix.rl.tool_parsers import choose_tool_calls

log = logging.getLogger(__name__)

NAME, ID = re.compile(r"[\w.-]{1,64}"), re.compile(r"[\w.:-]{1,100}")  # of calls, as a template may show them
WAIT_S = 0.2  # for a reply, when no row can draw; then it is asked whether the run is to stop


# What an environment says, as tokens behind a turn.


class ObservationEncoder:
    """Turns what an environment says into the tokens between a turn and the next one."""

    def __init__(self, vocab: Vocab, stop: Sequence[int], options: Options):
        """`stop` ends a turn, and `options` are the variables of the chat template. Raises `UserError` where the
        template shows neither a message of a tool nor one of the user behind an answer."""
        self.vocab, self.stop, self.options = vocab, frozenset(stop), options
        self.role = vocab.chat.choose_observation_role(options)
        self.special = compile_special_texts(vocab.backend)
        self.marks = self.stop & special_tokens(vocab.backend)
        example = self._encode_results([WORDS], [("tool", NO_ID)])  # as the template shows the result of a call
        self.shows_calls = example is not None and WORDS in decode(vocab.backend, example, False)
        # Where the template shows what a tool says behind a call, and no token between them ends a turn:
        if options.get("tools") and not self.shows_calls and (text := vocab.chat.read_end_of_call(options)):
            log.warning(
                "task.chat_template writes %r between a call and what a tool says, and none of its tokens ends a "
                "turn: the model would go on and make up what the tool says; name the token in sampling.stop",
                text[-80:],
            )

    def encode(self, texts: Sequence[str], calls: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Return the tokens behind a turn that has ended with its stop token, up to where the next one begins.

        `calls` are the names and ids of the calls that each of the texts answers, of an environment with tools. Raises
        `UserError` where the chat template refuses the texts.
        """
        texts = list(map(self.mask, texts))
        if calls and self.shows_calls and (tokens := self._encode_results(texts, calls)) is not None:
            return tokens
        tokens = self._tokenize(self.vocab.chat.text_after_turn(self.role, texts, self.options))
        # The turn was drawn with the token that stops it: that of the template is left out, with white space before it.
        for number, token in enumerate(tokens):
            if token in self.stop:
                return tokens[number + 1 :]
            if decode(self.vocab.backend, [token], False).strip():
                break
        return tokens

    def _encode_results(self, texts: Sequence[str], calls: Sequence[tuple[str, str]]) -> list[int] | None:
        """Return the tokens behind a turn with calls; None where the template refuses them."""
        named = [(name if NAME.fullmatch(name) else "tool", id if ID.fullmatch(id) else NO_ID) for name, id in calls]
        for each in (named, [(name, NO_ID) for name, _ in named]):  # a template may refuse ids that a model has drawn
            with suppress(UserError):
                tokens = self._tokenize(self.vocab.chat.text_after_turn("tool", texts, self.options, each))
                end = next((number for number, token in enumerate(tokens) if token in self.marks), None)
                return None if end is None else tokens[end + 1 :]
        return None

    def _tokenize(self, text: str) -> list[int]:
        """Return the tokens of what the template writes behind a turn, for which "?" stands."""
        self.vocab.backend.encode_special_tokens = False
        ((_, encoded),) = self.vocab.encode_sequences([["?", text]])
        return encoded.tolist()

    def mask(self, text: str) -> str:
        return break_special_texts(text, self.special)


# An episode while it is played, and afterwards.


@dataclass
class Episode:
    """One answer of several turns."""

    number: int  # of the answer in the rollout
    prompt: Prompt
    seed: int  # of the environment, the same for all answers to the prompt
    begin: list[int] = field(default_factory=list)  # the prompt's tokens, with what `reset` has said
    tokens: list[int] = field(default_factory=list)  # behind them, of all turns and observations
    learnt: list[bool] = field(default_factory=list)  # of each token: drawn, and not said by the environment
    log_probabilities: list[float] = field(default_factory=list)  # of each token; 0 where it was not drawn
    sampled_log_probabilities: list[float] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)  # {role, content}, and of environments seconds and reward
    spans: list[tuple[int, int]] = field(default_factory=list)  # of each turn of the model: its tokens in `tokens`
    rewards: list[float] = field(default_factory=list)  # of each turn of the model
    stopped: bool = True  # by the environment, or by an answer without a call; False: a budget has ended it
    problem: str = ""  # what is wrong with its environment; it has no score then
    tool_errors: int = 0
    environment_s: float = 0.0  # seconds that its environment has worked
    num_guessed: int | None = None  # of the tokens (`Answer.num_guessed`)
    reset: list[str] = field(default_factory=list)  # what `reset` has said, which is a part of the prompt
    last_turn: str = ""  # the model's last turn without its thought, where special tokens mark it: what rewards score

    @property
    def num_turns(self) -> int:
        return len(self.spans)

    @property
    def reward(self) -> float:
        """Sum of what the environment has given; 0 where it has failed."""
        return 0.0 if self.problem else sum(self.rewards)

    @property
    def transcript(self) -> list[dict[str, Any]]:
        """The turns, behind what `reset` has said: what a reader of files needs to understand them."""
        return [*({"role": "user", "content": text} for text in self.reset), *self.turns]

    def add_turn(self, drawn: Answer, text: str, said: str) -> None:
        self.spans.append((len(self.tokens), len(self.tokens) + len(drawn.tokens)))
        self.rewards.append(0.0)
        self.tokens += drawn.tokens
        if drawn.num_guessed is not None:
            self.num_guessed = (self.num_guessed or 0) + drawn.num_guessed
        self.learnt += [True] * len(drawn.tokens)
        self.log_probabilities += drawn.log_probabilities
        self.sampled_log_probabilities += drawn.sampled_log_probabilities
        self.turns.append({"role": "assistant", "content": text})
        self.last_turn = said

    def add_observation(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.learnt += [False] * len(tokens)
        self.log_probabilities += [0.0] * len(tokens)
        self.sampled_log_probabilities += [0.0] * len(tokens)

    def to_answer(self) -> Answer:
        log_probs = self.log_probabilities, self.sampled_log_probabilities
        return Answer(self.tokens, *log_probs, self.stopped, self.num_guessed)

    def describe(self) -> dict[str, Any]:
        """Return what samples.jsonl says of an episode beside what it says of every answer."""
        return {
            "learnt": list(map(int, self.learnt)),
            "turns": self.transcript,
            **({"problem": self.problem} if self.problem else {}),
        }


@dataclass(frozen=True)
class Played:
    """Episodes that are over, and what their environments took."""

    episodes: list[Episode]
    tool_s: float  # that the busiest process of environments has worked
    num_lost: int  # processes of environments
    task: Grpo

    def numbers(self) -> dict[str, float]:
        """Return what metrics.jsonl says of episodes beside what it says of all answers."""
        return {
            "turns": float(np.mean([episode.num_turns for episode in self.episodes])),
            "seen_tokens": float(np.mean([len(episode.learnt) - sum(episode.learnt) for episode in self.episodes])),
            "tool_errors": sum(episode.tool_errors for episode in self.episodes),
            "tool_s": self.tool_s,
            "environment_lost": self.num_lost,
        }

    def add_rewards(self, scores: Scores) -> Scores:
        """Return scores of the last turns with what the environments have given; an episode that failed gets 0.

        Raises:
            UserError: an environment has failed, and task.environment_errors is "stop".
        """
        environment, stops = self.task.environment, self.task.environment_errors == "stop"
        name = format_environment(environment)
        problems = [each.problem for each in self.episodes if each.problem]
        if problems and stops:
            hint = "task.environment_errors=zero scores such episodes 0 and counts them"
            raise UserError(f"task.environment={name} fails: {problems[0]}; {hint}")
        if problems:
            log.warning(
                "environment %s: %d of %d episodes have no score and get 0: %s",
                name, len(problems), len(self.episodes), problems[0],
            )  # fmt: skip
        rewards = [episode.reward for episode in self.episodes]
        total = [reward + score for reward, score in zip(rewards, scores.total, strict=True)]
        values = scores.values | ({LABEL: rewards} if gives_reward(find_environment(environment or "")) else {})
        errors = scores.errors | {LABEL: len(problems)}
        failed = [before or bool(each.problem) for before, each in zip(scores.failed, self.episodes, strict=True)]
        return Scores(values, self.drop_failed(total), errors, scores.seconds, failed=failed)

    def drop_failed(self, total: Sequence[float]) -> list[float]:
        """Return total scores with 0 for an episode whose environment has failed."""
        return [0.0 if each.problem else score for each, score in zip(self.episodes, total, strict=True)]


def join_played(parts: Sequence[Played]) -> Played:
    """Return the episodes of several rollouts as those of one."""
    episodes = [episode for part in parts for episode in part.episodes]
    tool_s, num_lost = sum(part.tool_s for part in parts), sum(part.num_lost for part in parts)
    return Played(episodes, tool_s, num_lost, parts[0].task)


LABEL = "environment"  # of its reward in records


class Drawn(NamedTuple):
    """All answers to the first prompt of a request, then all to the second, ..., and their texts."""

    answers: list[Answer]
    texts: list[str]  # without the token that stopped an answer; of an episode of all of its tokens
    played: Played | None = None  # the episodes that the answers are, where there is an environment
    thoughts: Sequence[str] = ()  # of answers that are no episodes (data/thoughts.py); "" of one without

    def part(self, rows: slice) -> "Drawn":
        """Return some of the answers."""
        played = None if self.played is None else replace(self.played, episodes=self.played.episodes[rows])
        return Drawn(self.answers[rows], self.texts[rows], played, self.thoughts[rows])


def make_pool(task: Grpo, vocab: Vocab, column_names: Sequence[str]) -> EnvironmentPool | None:
    """Return the pool of a task's environment, which is not started; None where the task has none."""
    if task.environment is None:
        return None
    name = choose_tool_calls(vocab.chat.source) if task.tool_calls == "auto" else task.tool_calls
    if task.describe_tools():
        log.info("tools of %s: calls are read as %s (task.tool_calls)", format_environment(task.environment), name)
    limits = task.environment_processes, task.environment_timeout_s, task.environment_memory_mib
    return EnvironmentPool(task.environment, task.environment_options or {}, name, *limits, column_names)


def try_user_code(example: Prompt, scorer: Scorer, pool: EnvironmentPool | None) -> None:
    """Call the environment and the rewards once, with the columns of a prompt. Raises `UserError` where one of them
    fails, or what `reset` says has no place in such prompts."""
    columns = example.columns
    if pool is not None:
        replies = pool.try_out(columns)  # the first ones are of `reset`
        if replies and replies[0].observations:
            example.find_question()
        columns = columns | {"turns": [{"role": "assistant", "content": ""}]}
    scorer.try_out(example.text, columns)


def credit_turns(
    episodes: Sequence[Episode],
    rewards: np.ndarray,
    zeroed: Sequence[bool],
    advantage: Callable[[np.ndarray], np.ndarray],
    seq_len: int,
) -> np.ndarray:
    """Return advantages of tokens [P x G, T]: those of a turn compare what is rewarded from it on with the others.

        rewards of two episodes     0  0  1         of each turn and behind it     1  1  1
                                    0  0                                           0  0
        centered, turn by turn      0.5  0.5  0
                                   -0.5 -0.5        nothing compares with the third turn, which has no advantage

    `rewards` [P, G] are those of whole episodes. What they have beside the environment's (`task.rewards`, penalties)
    counts for each turn. An episode that is `zeroed` has none of its environment.
    """
    returns = []
    for episode, total, is_zeroed in zip(episodes, rewards.reshape(-1), zeroed, strict=True):
        given = np.array(episode.rewards) * (not is_zeroed and not episode.problem)
        returns.append(float(total) - given.sum() + np.cumsum(given[::-1])[::-1])
    of_tokens = np.zeros((len(episodes), seq_len), np.float32)
    size = rewards.shape[1]
    for first in range(0, len(episodes), size):
        group = range(first, first + size)
        for turn in range(max(len(returns[row]) for row in group)):
            rows = [row for row in group if len(returns[row]) > turn]
            if len(rows) == 1:
                continue
            values = advantage(np.array([[returns[row][turn] for row in rows]]))[0]
            for row, value in zip(rows, values, strict=True):
                # The target at a place is the token behind it, as in `arrange_answers`.
                begin, (start, stop) = len(episodes[row].begin) - 1, episodes[row].spans[turn]
                of_tokens[row, begin + start : begin + stop] = value
    return of_tokens


class PrioritySlots:
    """So many slots, each held by one thread: of the threads that wait, the one with the lowest rank is next.

    slots = PrioritySlots(1)
    with slots.hold(rank=3):
        ...                          # one thread at a time is here
        with slots.lend(rank=3):
            ...                      # here another one may be there; this one waits for something else
    """

    def __init__(self, count: int):
        self.free, self.changed = count, threading.Condition()
        self.waiting: list[tuple[int, int]] = []  # a heap of (rank, number of the call)
        self.calls = itertools.count()

    @contextmanager
    def hold(self, rank: int) -> Iterator[None]:
        """Wait for a slot, and hold it for a block."""
        self._take(rank)
        try:
            yield
        finally:
            self._give_back()

    @contextmanager
    def lend(self, rank: int) -> Iterator[None]:
        """Give the slot of this thread to others for a block, and wait for one after it."""
        self._give_back()
        try:
            yield
        finally:
            self._take(rank)

    def _take(self, rank: int) -> None:
        with self.changed:
            ticket = rank, next(self.calls)
            heapq.heappush(self.waiting, ticket)
            try:
                self.changed.wait_for(lambda: self.free and self.waiting[0] == ticket)
                self.free -= 1
            finally:  # also at Ctrl-C: the threads behind this one would wait forever
                self.waiting.remove(ticket)
                heapq.heapify(self.waiting)
                self.changed.notify_all()

    def _give_back(self) -> None:
        with self.changed:
            self.free += 1
            self.changed.notify_all()


class Player:
    """Plays episodes: rows of an engine, and replies of a pool of environments."""

    def __init__(self, pool: EnvironmentPool, task: Grpo, vocab: Vocab, stop: Sequence[int], max_prompt_length: int):
        """`stop` ends a turn. A prompt has at most `max_prompt_length` tokens, with what `reset` says. Raises
        `UserError` where the chat template does not show what an environment says."""
        tools = task.describe_tools()
        options = (task.chat_template_kwargs or {}) | ({"tools": tools} if tools else {})
        self.pool, self.task, self.vocab, self.max_prompt_length = pool, task, vocab, max_prompt_length
        self.has_tools, self.encoder = bool(tools), ObservationEncoder(vocab, stop, options)
        self.rank, self.num_processes = jax.process_index(), jax.process_count()
        self.devices = PrioritySlots(1)  # of the rollout that computes

    def rollout(
        self, sampler: Sampler, params: Any, request: RolloutRequest, rows_at_once: int | None, stop: tuple[int, ...]
    ) -> Played:
        """Play the episodes of a request with parameters at rest; `stop` ends a turn. See `play`.

        The episodes of a group meet the same environment: its seed follows from that of the request.
        """
        size, keys = request.group_size, request.sampling
        episodes = [
            Episode(index * size + member, prompt, derive_seed(request.seed, "environment", index))
            for index, prompt in enumerate(request.prompts, request.first_prompt)
            for member in range(size)
        ]
        sampling = select_sampling(keys, stop)
        max_length = self.max_prompt_length + keys.max_new_tokens
        rows = len(episodes) if rows_at_once is None else min(rows_at_once, len(episodes))
        with self.devices.hold(request.rank):
            engine = sampler.engine(params, sampling, request.seed, max_length, rows, fixed_shapes=True)
        return self.play(engine, episodes, request, rows_at_once)

    def play(self, engine: Engine, episodes: list[Episode], request: RolloutRequest, max_rows: int | None) -> Played:
        """Play episodes to their ends; those of a group follow one another.

        Every process calls it with the same arguments, and gets all episodes. At most `max_rows` are played at one
        time; None plays all.

        Raises:
            UserError: a process of environments cannot be started again.
        """
        with self.pool.open() as session, self.devices.hold(request.rank):
            game = _Game(self, session, engine, episodes, request)
            run_s = 0.0  # of the newest stretch of tokens
            while game.live or game.waiting:
                if request.between_chunks is not None:
                    request.between_chunks()
                game.begin_groups(max_rows)
                # While most rows wait for their environments, a stretch of tokens costs nearly as much as one of all
                # rows: then it is worth a wait of the same time.
                waits = len(game.live) - engine.num_working > engine.num_working
                timeout_s = min(WAIT_S, run_s) if waits else 0.0
                for answered in self._gather_replies(game, timeout_s if engine.num_working else WAIT_S):
                    game.take_reply(answered)
                start_time = time.perf_counter()
                for number, drawn in engine.run():
                    game.take_turn(number, drawn)
                run_s = time.perf_counter() - start_time
        facts = peers.gather([max(session.seconds), session.num_lost], "times of environments")
        return Played(episodes, max(fact[0] for fact in facts), sum(fact[1] for fact in facts), self.task)

    def _gather_replies(self, game: "_Game", timeout_s: float) -> list[Answered]:
        """Return the replies that have come to any process, in the order of the episodes."""

        def wait() -> list[Answered]:
            with self.devices.lend(game.request.rank) if timeout_s else nullcontext():
                return game.session.replies(timeout_s)

        here = peers.together(wait, "replies of environments")
        replies = [
            Answered(number * self.num_processes + rank, None if reply is None else Reply(*reply), problem, seconds)
            for rank, part in enumerate(peers.gather(here, "replies of environments"))
            for number, reply, problem, seconds in part
        ]
        return sorted(replies, key=lambda answered: answered.number)


class _Game:
    """Episodes of one call of `Player.play`: what each is at."""

    def __init__(
        self, player: Player, session: Session, engine: Engine, episodes: list[Episode], request: RolloutRequest
    ):
        self.player, self.session, self.engine = player, session, engine
        self.request, self.keys, size = request, request.sampling, request.group_size
        self.waiting = [episodes[first : first + size] for first in range(0, len(episodes), size)][::-1]
        self.live: dict[int, Episode] = {}
        self.resets: dict[int, list[Episode]] = {}  # groups of which some have not answered `reset`, by each number
        self.num_resets: dict[int, int] = {}  # replies that a group still waits for, by its first number
        self.held: set[int] = set()  # episodes that have a row, or wait for one
        self.finishing: set[int] = set()  # episodes that wait for the reward at their end

    def begin_groups(self, rows_at_once: int | None) -> None:
        """Begin groups while there is room for their episodes; one is always played."""
        while self.waiting and (
            not self.live or rows_at_once is None or len(self.live) + len(self.waiting[-1]) <= rows_at_once
        ):
            group = self.waiting.pop()
            self.num_resets[group[0].number] = len(group)
            for episode in group:
                self.live[episode.number], self.resets[episode.number] = episode, group
                self._ask(episode.number, "reset", episode.seed, episode.prompt.columns)

    def take_reply(self, answered: Answered) -> None:
        episode = self.live[answered.number]
        episode.environment_s += answered.seconds
        group = self.resets.pop(episode.number, None)
        if group is not None:
            self._take_reset(episode, answered)
            first = group[0].number
            self.num_resets[first] -= 1
            if not self.num_resets[first]:
                self._admit(group)
        elif answered.reply is None:
            self._end(episode, answered.problem)
        else:
            self._take_step(episode, answered.reply, answered.seconds)

    def take_turn(self, number: int, drawn: Answer) -> None:
        """Take a turn that has ended, and let the environment answer it."""
        episode, backend = self.live[number], self.player.vocab.backend
        # Special tokens are a part of the text: some models mark their calls with them.
        text = decode(backend, drawn.text_tokens, False)
        _, answer = split_thought(backend, drawn.text_tokens, [*episode.begin, *episode.tokens])
        said = text if len(answer) == len(drawn.text_tokens) else decode(backend, answer)
        episode.add_turn(drawn, text, said)
        if drawn.stopped:
            self._ask(number, "step", text if self.player.has_tools else said)
        else:
            self._finish(episode)

    def _take_reset(self, episode: Episode, answered: Answered) -> None:
        """Take what an environment says at the beginning."""
        episode.begin = episode.prompt.tokens
        if answered.reply is None:
            self._end(episode, answered.problem)
        elif answered.reply.observations:
            episode.reset = list(map(self.player.encoder.mask, answered.reply.observations))
            try:
                episode.begin = episode.prompt.encode_with(self.player.vocab, episode.reset)
            except UserError as error:
                self._end(episode, str(error))
                return
            if (length := len(episode.begin)) > self.player.max_prompt_length:
                episode.begin = episode.prompt.tokens
                self._end(
                    episode,
                    f"with what reset says the prompt has {length} tokens; training.seq_len leaves "
                    f"{self.player.max_prompt_length}",
                )

    def _admit(self, group: list[Episode]) -> None:
        """Let a group begin to draw: those with the same tokens share what is computed of them."""
        by_tokens: dict[tuple[int, ...], list[int]] = {}
        for episode in group:
            if episode.number in self.live:
                by_tokens.setdefault(tuple(episode.begin), []).append(episode.number)
        for tokens, numbers in by_tokens.items():
            self.held.update(numbers)
            self.engine.admit(tokens, numbers, self._bound(self.keys.max_new_tokens))

    def _bound(self, room: int) -> int:
        """Return the most tokens of a turn that has room for so many."""
        return min(room, self.keys.max_turn_tokens or room)

    def _take_step(self, episode: Episode, reply: Reply, seconds: float) -> None:
        task = self.player.task
        episode.rewards[-1] += reply.reward
        if episode.number in self.finishing:
            self._end(episode)
            return
        episode.tool_errors += reply.tool_errors
        observations = reply.observations or []
        for text in observations:
            episode.turns.append({"role": "tool", "content": text})
        if observations:
            episode.turns[-1] |= {"reward": reply.reward, "seconds": round(seconds, 3)}
        if reply.done:
            self._end(episode)
        elif episode.num_turns >= task.max_turns or episode.environment_s > (task.episode_timeout_s or math.inf):
            self._finish(episode)
        else:
            self._go_on(episode, observations, reply.calls)

    def _go_on(self, episode: Episode, observations: list[str], calls: Sequence[tuple[str, str]]) -> None:
        """Let an episode draw its next turn behind what the environment has said."""
        try:
            tokens = self.player.encoder.encode(observations, calls)
        except UserError as error:
            self._end(episode, str(error))
            return
        room = self.keys.max_new_tokens - len(episode.tokens) - len(tokens)
        if room < 1:
            self._finish(episode)
            return
        episode.add_observation(tokens)
        self.engine.extend(episode.number, tokens, self._bound(room))

    def _finish(self, episode: Episode) -> None:
        """End an episode that a budget ends: its environment may still have a reward for it."""
        episode.stopped = False
        self._release(episode)
        self.finishing.add(episode.number)
        self._ask(episode.number, "finish")

    def _end(self, episode: Episode, problem: str = "") -> None:
        episode.problem = problem
        self._release(episode)
        del self.live[episode.number]
        self._ask(episode.number, "forget")

    def _release(self, episode: Episode) -> None:
        if episode.number in self.held:
            self.held.discard(episode.number)
            self.engine.release(episode.number)

    def _ask(self, number: int, *request: Any) -> None:
        """Send a request of an episode to its environment, if this process has it."""
        if number % self.player.num_processes == self.player.rank:
            self.session.ask(number // self.player.num_processes, request)
