"""A small program for the launcher's tests: `launched.py WHAT` does WHAT[RANK] (or its last word), like exit:3 or sleep."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")


def note(name: str, text: object = "") -> None:
    """Leave a file beside the others' for the test to see."""
    Path(f"{name}.{RANK}").write_text(str(text))


def save_and_stop(number: int, _frame: object) -> None:
    note("saved", signal.Signals(number).name)
    sys.exit(75)


def sleep(_: str) -> None:
    time.sleep(60)


def stubborn(_: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("ready")
    time.sleep(60)


def saver(_: str) -> None:
    signal.signal(signal.SIGTERM, save_and_stop)
    signal.signal(signal.SIGUSR1, save_and_stop)
    note("ready")
    time.sleep(60)


def parent(_: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    note("child", child.pid)
    note("ready")
    time.sleep(60)


def fail(_: str) -> None:
    time.sleep(0.3)
    raise RuntimeError(f"trouble on rank {RANK}")


def end(code: str) -> None:
    print(f"rank {RANK} ends with {code}")
    sys.exit(int(code))


def die(number: str) -> None:
    os.kill(os.getpid(), int(number))


ACTIONS = {
    "exit": end, "die": die, "sleep": sleep, "stubborn": stubborn, "saver": saver, "parent": parent, "fail": fail,
    "env": lambda _: print({name: os.environ[name] for name in VARIABLES}),
}  # fmt: skip

if __name__ == "__main__":
    note("pid", os.getpid())
    label = sys.argv[1:][min(RANK, len(sys.argv) - 2)]
    action, _, value = label.partition(":")
    ACTIONS[action](value)
