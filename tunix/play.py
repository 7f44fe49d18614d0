"""Play an environment by hand, or let a checkpoint play it: `python -m tunix.play environment=NAME [checkpoint=RUN]`.

By hand, a line of stdin is a turn, and a line that ends with a backslash goes on in the next one. The environment runs
in a process of its own, with the limits that it has in training, and gets the texts that it would get there.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunix.base.errors import UserError, escape_controls
from tunix.base.files import read_json_lines, read_line, temporary_folder
from tunix.config import Config, Evaluate, Play
from tunix.config.command_line import read_settings, run_command
from tunix.config.compose import compose
from tunix.config.task import Grpo
from tunix.data.prompts import Prompt, PromptCorpus, load_prompts
from tunix.evaluate import make_config
from tunix.inference.rollout import derive_seed
from tunix.processes import peers
from tunix.rl.environment_pool import EnvironmentPool, Request, Session
from tunix.rl.environments import Reply
from tunix.rl.evaluation import evaluate_answers, is_sampling
from tunix.rl.table import find_environment, format_environment
from tunix.rl.tool_parsers import TOOL_CALLS

# No model reads the prompts where a person plays, so they may be long.
WITHOUT_MODEL = (
    "model.context_length=32768",
    "training.seq_len=32768",
    "sampling.max_new_tokens=1",
    "data.held_out_fraction=0",
)
EPISODES = 10  # that a checkpoint plays where the key `episodes` is null


def play(command: Play) -> None:
    """Play episodes, and print them turn by turn.

    Raises:
        UserError: there is no environment, it fails, or the data or the checkpoint cannot be read.
    """
    if command.checkpoint is not None:
        play_by_checkpoint(command)
        return
    if command.environment is None:
        compose([*command.overrides])  # a key that is none is the reason
        raise UserError("nothing is to be played; give environment=NAME, or checkpoint=RUN")
    if texts := [word for word in command.overrides if is_sampling(word)]:
        raise UserError(f"{texts[0]}: nothing is drawn where you play; add checkpoint=RUN, or leave it out")
    words = ["task=grpo", f"task.environment={format_environment(command.environment)}", *WITHOUT_MODEL]
    cfg = compose([*words, *command.overrides]).config
    if not isinstance(cfg.task, Grpo) or cfg.task.environment is None:
        raise UserError(f"task={cfg.task.name} has no environment; leave the key task out")
    if peers.is_main():
        play_by_hand(command, cfg, cfg.task)


# By hand.


def play_by_hand(command: Play, cfg: Config, task: Grpo) -> None:
    """Ask stdin for turns, until the episodes or the input are over."""
    tool_calls = "hermes" if task.tool_calls == "auto" else task.tool_calls
    has_data = any(word.split("=")[0].split(".")[0] in ("data", "+experiment") for word in command.overrides)
    corpus = load_prompts(cfg, cfg.training.seq_len) if has_data else None
    lines = _read_turns()
    assert task.environment is not None
    # Tools are described in each episode; a game says itself what may be done.
    if not task.describe_tools() and (about := inspect.getdoc(find_environment(task.environment))):
        print(f"{format_environment(task.environment)}\n{_indent(about)}", flush=True)
    pool = EnvironmentPool(
        task.environment, task.environment_options or {}, tool_calls, 1,
        task.environment_timeout_s, task.environment_memory_mib, () if corpus is None else corpus.column_names,
    )  # fmt: skip
    with pool:
        for number in range(command.episodes or 1):
            prompt = None if corpus is None else _find_prompt(corpus, command.row + number)
            if not number:  # what it loads at its first call is not late, as in training
                pool.try_out({} if prompt is None else prompt.columns)
            with pool.open() as session:
                seed = derive_seed(command.seed, "environment", number)
                _play_episode(session, task, prompt, seed, lines, tool_calls)


def _find_prompt(corpus: PromptCorpus, row: int) -> Prompt:
    """Return a prompt by its number in the training data; raises `UserError` where there are fewer."""
    rest = row
    for part in corpus.train.values():
        if rest < len(part):
            return part[rest]
        rest -= len(part)
    raise UserError(f"row={row}: the data have {row - rest:,} prompts; the first is row=0")


def _read_turns() -> Iterator[str]:
    """Yield the turns of stdin."""
    text = ""
    with suppress(EOFError):
        while True:
            line = read_line()
            if line.endswith("\\"):
                text += line[:-1] + "\n"
                continue
            yield text + line
            text = ""
    if text:  # the input has ended within a turn
        yield text.removesuffix("\n")


def _play_episode(
    session: Session, task: Grpo, prompt: Prompt | None, seed: int, lines: Iterator[str], tool_calls: str
) -> None:
    if prompt is not None:
        print(f"prompt\n{_indent(prompt.text)}", flush=True)
    for tool in task.describe_tools():
        function = tool["function"]
        parameters = ", ".join(function["parameters"]["properties"])
        print(f"tool {function['name']}({parameters}): {function['description']}")
        if tool_calls in TOOL_CALLS:  # not a function of the user's own
            example = TOOL_CALLS[tool_calls].example.replace("NAME", function["name"])
            print(f"a call is {example}", flush=True)
    reply = _ask(session, ("reset", seed, {} if prompt is None else prompt.columns))
    _show(reply.observations)
    total, num_turns = 0.0, 0
    while not reply.done:
        text = next(lines, None) if num_turns < task.max_turns else None
        if text is None:  # the input is over, or the turns are: the environment may have a reward for what was done
            reply = _ask(session, ("finish",))
            total += reply.reward
            break
        num_turns += 1
        reply = _ask(session, ("step", text))
        total += reply.reward
        _show(reply.observations)
        print(f"reward {reply.reward:g}{', calls that failed: ' + str(reply.tool_errors) if reply.tool_errors else ''}")
    print(f"the episode is over after {num_turns} turns; the environment's reward is {total:g}", flush=True)


def _ask(session: Session, request: Request) -> Reply:
    """Return the reply of the one episode of a session; raises `UserError` where its environment fails."""
    session.ask(0, request)
    while not (answers := session.replies(1.0)):
        pass
    if answers[0].reply is None:
        raise UserError(f"task.environment={session.pool.name} fails: {answers[0].problem}")
    return answers[0].reply


def _show(observations: Sequence[str] | None) -> None:
    for text in observations or []:
        print(f"environment\n{_indent(text)}", flush=True)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in escape_controls(text).splitlines())


# By a checkpoint.


def play_by_checkpoint(command: Play) -> None:
    """Let a model play episodes from held-out prompts as evaluation does, and print them."""
    length = "sampling.max_new_tokens="
    overrides = [word for word in command.overrides if not word.startswith(length)]
    lengths = [word.removeprefix(length) for word in command.overrides if word.startswith(length)]
    count = command.episodes or EPISODES
    with temporary_folder("tunix_play_") as folder:
        file = Path(folder) / "episodes.jsonl"
        given: dict[str, Any] = {
            "checkpoint": command.checkpoint, "weights": command.weights, "overrides": overrides,
            "num_prompts": count, "samples": str(file), "max_new_tokens": next(iter(lengths), None),
        }  # fmt: skip
        settings = read_settings(Evaluate, ["checkpoint=given", "metric=reward"], given)
        if command.environment is not None:
            words = [f"task.environment={format_environment(command.environment)}"]
            own = peers.main_first(
                lambda: make_config(settings.model_copy(update={"overrides": ()})), "reading the task"
            )
            if not isinstance(own.task, Grpo) and not any(word.startswith("task=") for word in overrides):
                words.insert(0, "task=grpo")  # a model of another task plays too
            settings = settings.model_copy(update={"overrides": (*words, *overrides)})
        cfg = peers.main_first(lambda: make_config(settings), "reading the config")
        if not isinstance(cfg.task, Grpo) or cfg.task.environment is None:
            raise UserError(
                f"checkpoint={command.checkpoint} was trained without an environment; give environment=NAME"
            )
        for _ in evaluate_answers(settings, cfg.model_copy(update={"seed": command.seed}), [str(command.checkpoint)]):
            pass
        if peers.is_main():
            for row in read_json_lines(file):
                print_episode(row)


def print_episode(row: dict[str, Any]) -> None:
    """Print an episode: its prompt, its turns, and its reward with each part."""
    print(f"prompt\n{_indent(row['prompt'])}")
    for turn in row["turns"]:
        print(f"{turn['role']}\n{_indent(turn['content'])}")
    parts = ", ".join(f"{key.removeprefix('reward_')} {x:g}" for key, x in row.items() if key.startswith("reward_"))
    ended = "" if row["stopped"] else ", cut"
    print(f"reward {row['reward']:g} ({parts}), {row['num_tokens']} tokens{ended}\n", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(Play, play))
