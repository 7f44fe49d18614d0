"""The command `tunix`: train, or the command that the first word names.

    python -m tunix [group=option] [key=value]      train; also `python run_training.py` and, from a wheel, `tunix`
    python -m tunix plan [group=option] [key=value] the same as `python -m tunix.plan`

A launcher may stop a process at any moment. Imports of a run take a second or more, so this file imports little, and
stop signals have their exit code before the rest is imported.
"""

import re
import runpy
import sys

from tunix.base.errors import UserError, did_you_mean
from tunix.processes import exits

COMMANDS = (
    "plan",
    "doctor",
    "verify",
    "parity",
    "prepare",
    "generate",
    "evaluate",
    "export",
    "launch",
    "compare",
    "samples",
    "play",
    "average",
    "serve",
)  # tunix.NAME


def main() -> int:
    """Run the command that the first word names, training where it names none; returns the exit code."""
    exits.report_interrupts()
    exits.announce_imports()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        from tunix.config import command_line

        del sys.argv[1]
        command_line.check_first(name)
        runpy.run_module(f"tunix.{name}", run_name="__main__", alter_sys=True)  # ends with SystemExit
    if name == "--version":  # Hydra would print its own
        from tunix.base.config_types import read_version

        print(f"tunix {read_version()}")
        return 0
    if name == "train":
        del sys.argv[1]
    elif re.fullmatch(r"\w[\w.-]*|[^=]+\.(yaml|yml|toml)", name):  # an override has a =, a flag begins with a -
        return exits.report_errors(lambda: reject_command(name))
    exits.exit_on_stop_signals()
    from tunix.train_command import train_command

    return train_command()


def reject_command(name: str) -> None:
    """Raise `UserError` for a first word that is no command, or a key that stands apart from its value."""
    from tunix.base.config_types import list_options
    from tunix.config.mistakes import list_keys

    if name.endswith((".yaml", ".yml", ".toml")):
        raise UserError(
            f"{name} is no command; --config-path FOLDER --config-name NAME reads the keys of FOLDER/NAME.yaml, and "
            "says how those of other programs are called here"
        )
    if name in list_options("task"):
        raise UserError(f"{name} is a task and no command; write task={name}")
    if any(name == key for key, _ in list_keys()):
        raise UserError(f"{name} is a key without a value; write {name}=VALUE, with no space before or behind the =")
    commands = ["train", *COMMANDS]
    raise UserError(f"there is no command {name}; choose from {', '.join(commands)}{did_you_mean(name, commands)}")


def script() -> None:
    """Run the command, and end the process with its exit code."""
    exits.leave(main())


if __name__ == "__main__":
    script()
