"""The life of a program in a fork: it runs, and ends as Python ends."""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_to_the_end(program: Callable[[], object]) -> NoReturn:
    """Run a program in this process, and end the process with the code and the message that Python would give it."""
    code: object = 0
    try:
        program()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # waits for threads that are not daemons, as Python does before the functions of atexit
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
