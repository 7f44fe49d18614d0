"""Several commands in one process: `commands.py evaluate checkpoint=... -- export checkpoint=... distributed.process_id=0`.

Words that begin with distributed. go to every command.
"""

import sys

from tunix import prepare, verify
from tunix.config import Evaluate, Export, Generate
from tunix.config.command_line import run_command
from tunix.config.compose import compose
from tunix.evaluate import evaluate
from tunix.export import export
from tunix.generate import generate
from tunix.processes import supervisor

COMMANDS = {
    "evaluate": lambda: run_command(Evaluate, evaluate),
    "generate": lambda: run_command(Generate, generate),
    "export": lambda: run_command(Export, export),
    "prepare": prepare.main,
    "verify": verify.main,
}


def split(words: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            parts.append([])
        elif not word.startswith("distributed."):
            parts[-1].append(word)
    return parts


def main(words: list[str]) -> int:
    """Run the commands one after the other, in the child of a supervisor; return the first exit code that is not 0."""
    shared = [word for word in words if word.startswith("distributed.")]
    if (code := supervisor.supervise(compose(shared).config.distributed)) is not None:
        return code
    for name, *own in split(words):
        sys.argv[1:] = [*own, *shared]
        if code := COMMANDS[name]():
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
