"""Process that scores answers: `tunix.rl.scoring` starts several, and talks to each through a socket.

    parent   {function, prompts, completions, columns, group_size}  ->   worker
    parent   <-  for each answer its score, or a text about what is wrong   worker

A reward runs in the main thread of its process, so that it may set alarms (math-verify does). When the parent is gone,
the socket ends and so does the worker; a thread watches the parent while a reward runs. Imports no jax.
"""

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tunix.rl import rewards as rewards_of_tunix
from tunix.rl.rewards import call_reward
from tunix.rl.table import find_reward

OWN_FILES = {__file__, rewards_of_tunix.__file__}
PR_SET_PDEATHSIG = 1  # prctl(2): a signal for this process when its parent ends


def serve(descriptor: int, parent: int, rewards: list[str]) -> None:
    """Import the rewards, report that all is ready, and answer requests until the parent closes the socket."""
    # The parent decides when a worker ends. A handler that does nothing is not passed on to what a reward starts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":  # also ends a reward that lets no other thread run, like a regular expression
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
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
            return [describe_error(error)] * len(completions)
    scores: list[float | str] = []
    for first in range(0, len(completions), group_size):
        part = slice(first, first + group_size)
        local = {name: values[part] for name, values in columns.items()}
        # A group is not longer than `group_size`, so this call goes no deeper.
        scores += score(function, prompts[part], completions[part], local, group_size)
    return scores


def describe_error(error: BaseException) -> str:
    """Return one line about an error: its type, its text, and where the user's code raised it.

    An error that tunix raises, like that of a missing column, has no place.
    """
    text = (str(error).splitlines() or [""])[0][:300]
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename not in OWN_FILES]
    index = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{index}"


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: the kernel then gives it another parent."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
