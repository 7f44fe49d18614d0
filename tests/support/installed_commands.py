"""Run scripts of an installed tunix, each in a fork of this process, which has imported the package: no test's code runs.

Writes where the package lies; then reads lines of JSON, [words, folder, file of stdout, file of stderr], and answers each
with the exit code of the script `words[0]` with the other words.
"""

import json
import os
import runpy
import sys
import threading
import traceback

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
    code: object = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    print(json.dumps(tunix.__file__), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
