"""Process that holds the environments of some episodes: `tunix.rl.environment_pool` starts several.

    parent   ("play", key, requests)         ->   child   an object for each episode, by its key
    parent   <-  (replies, problem, seconds)      child
    parent   ("forget", key)                 ->   child   ends an episode, also one that is not there

    requests   ("reset", seed, columns) · ("step", text) · ("finish",)

The requests of an episode are the newest one, or, where this process does not have the episode, all since its reset:
an environment that gets its seed and the texts of its turns again comes into the same state.
"""

import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tunix.base import dotted_path
from tunix.rl import environments
from tunix.rl.environments import OpenEnvironment, Reply, open_environment
from tunix.rl.scoring import connect, describe_error
from tunix.rl.table import find_environment

OWN_FILES = {__file__, environments.__file__, dotted_path.__file__}
Request = tuple[Any, ...]
Key = tuple[int, int]  # of an episode: the number of its session (environment_pool.py), and its own


def serve(
    descriptor: int, parent: int, name: str | list[str], options: dict[str, Any], tool_calls: str, memory_mib: int
) -> None:
    """Import the environment, report that all is ready, and answer requests until the parent closes the socket."""
    connection = connect(descriptor, parent)
    process_id = os.getpid()
    make = partial(open_environment, find_environment(name), options, tool_calls)
    # Of anonymous memory: what libraries map without using it does not count. A child that it starts has the same.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mib * 2**20, memory_mib * 2**20))
    episodes: dict[Key, OpenEnvironment] = {}
    connection.send("ready")
    while True:
        try:
            kind, key, *rest = connection.recv()
        except EOFError:
            return
        start_time = time.perf_counter()
        if kind == "play":
            replies, problem = play(episodes, make, key, rest[0])
        else:
            replies, problem = [], ""
            with suppress(Exception):  # an error while it is closed changes nothing that is known of the episode
                if key in episodes:
                    episodes.pop(key).close()
        if os.getpid() != process_id:  # the environment has forked, and its child comes here too
            os._exit(0)
        connection.send((replies, problem, time.perf_counter() - start_time))


def play(
    episodes: dict[Key, OpenEnvironment], make: Callable[[], OpenEnvironment], key: Key, requests: list[Request]
) -> tuple[list[Reply], str]:
    """Return the replies of an episode's environment, and the text of an error, which ends the episode."""
    replies = []
    try:
        for request in requests:
            replies.append(_call(episodes, make, key, request))
    except BaseException as error:  # an environment may raise anything, also SystemExit
        return replies, describe_error(error, OWN_FILES)
    return replies, ""


def _call(
    episodes: dict[Key, OpenEnvironment], make: Callable[[], OpenEnvironment], key: Key, request: Request
) -> Reply:
    kind, *arguments = request
    if kind == "reset":
        episodes[key] = make()
        return episodes[key].reset(*arguments)
    if kind == "step":
        return episodes[key].step(*arguments)
    assert kind == "finish", kind
    return Reply(None, episodes[key].finish(), True)
