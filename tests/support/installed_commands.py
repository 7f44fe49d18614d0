"""Run scripts of an installed tunix, each in a fork of this process, which has imported the package: no test's code runs.

Writes where the package lies; then reads lines of JSON, [words, folder, file of stdout, file of stderr], and answers each
with the exit code of the script `words[0]` with the other words.
"""

import json
import os
import runpy
import sys
from functools import partial

from as_main import run_to_the_end  # the folder of this script is on the path, and `tests` is not

import tunix.__main__
import tunix.train_command
import tunix.trainer


def become(words: list[str], folder: str, out: str, err: str) -> None:
    """Be the script, in the fork, and end as Python ends; does not return."""
    os.chdir(folder)
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, stream.fileno())
        os.close(file)
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])
    run_to_the_end(partial(runpy.run_path, words[0], run_name="__main__"))


if __name__ == "__main__":
    print(json.dumps(tunix.__file__), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
