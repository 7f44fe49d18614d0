"""Process that scores answers: `tunix.rl.scoring` starts several, and talks to each through a socket.

    parent   {function, prompts, completions, columns, group_size}  ->   worker
    parent   <-  for each answer its score, or a text about what is wrong   worker

`tunix.rl.child_process` is the frame of both. Imports no jax.
"""

from typing import Any

from tunix.base import dotted_path
from tunix.rl import rewards as rewards_of_tunix
from tunix.rl.child_process import connect, describe_error
from tunix.rl.rewards import call_reward
from tunix.rl.table import find_reward

OWN_FILES = {__file__, rewards_of_tunix.__file__, dotted_path.__file__}


def serve(descriptor: int, parent: int, rewards: list[str]) -> None:
    """Import the rewards, report that all is ready, and answer requests until the parent closes the socket."""
    connection = connect(descriptor, parent)
    functions = {name: find_reward(name) for name in rewards}
    connection.send("ready")
    while True:
        try:
            name, prompts, completions, columns, group_size = connection.recv()
        except EOFError:
            return
        connection.send(score(functions[name], prompts, completions, columns, group_size))


def score(
    function: Any, prompts: list[str], completions: list[str], columns: dict[str, list[Any]], group_size: int
) -> list[float | str]:
    """Return for each answer its score, or the text of an error.

    When the function raises, it is called again for each group of answers alone, so that one bad row costs the scores
    of its group only.
    """
    try:
        return call_reward(function, prompts, completions, columns)
    except BaseException as error:  # a reward may raise anything, also SystemExit
        if len(completions) <= group_size:
            return [describe_error(error, OWN_FILES)] * len(completions)
    scores: list[float | str] = []
    for first in range(0, len(completions), group_size):
        part = slice(first, first + group_size)
        local = {name: values[part] for name, values in columns.items()}
        # A group is not longer than `group_size`, so this call goes no deeper.
        scores += score(function, prompts[part], completions[part], local, group_size)
    return scores
