"""The life of a program in a fork: it runs, and ends as Python ends."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def run_to_the_end(program: Callable[[], object]) -> NoReturn:
    """Run a program in this process, and end the process with the code and the message that Python would give it."""
    code: object = 0
    is_interrupted = False
    try:
        program()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # waits for threads that are not daemons, as Python does before the functions of atexit
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code if isinstance(code, int) else int(code is not None))
