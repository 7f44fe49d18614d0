"""Command lines beside training, `python -m tunix.NAME`. Imports no jax.

`generate`, `evaluate` and `export` have keys of their own, a section of conf/command (`run_command`). `plan`, `doctor`,
`verify` and `prepare` take the keys of training (`command_parser`). Commands that several processes can do together
join by `run_joined`.
"""

import argparse
import logging
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tunix.base.config_types import CONF, list_options
from tunix.base.errors import FlagParser, UserError, did_you_mean
from tunix.base.text import as_typed, flat
from tunix.config import Average, Config, Distributed, Evaluate, Export, Generate, Play, Section, Serve, compose
from tunix.config.mistakes import describe_errors, list_keys, reject_flags, reject_number, validate
from tunix.config.task import FILTERS
from tunix.processes import exits, supervisor
from tunix.processes.rollcall import list_versions

S = TypeVar("S", bound=Section)
JOINING = "distributed."  # words that begin so say which process of several this one is

# Commands that import for seconds, of which `check_first` reads the words before.
WITH_KEYS = {each.__name__.lower(): each for each in (Average, Evaluate, Export, Generate, Play, Serve)}
WITH_KEYS_OF_TRAINING = "plan", "doctor", "verify"


def check_first(name: str) -> None:
    """End the process where the words of `python -m tunix.NAME` have a mistake, which the command would find later."""
    argv = sys.argv[1:]
    if any(word.startswith("-") or "=" not in word for word in argv):  # flags are the command's own
        return

    def check() -> None:
        if section := WITH_KEYS.get(name):
            own, others, _ = _split_words(section, argv)
            _read_words(section, own, others)
        elif name in WITH_KEYS_OF_TRAINING and not (name == "verify" and find_checked_folder(argv)):
            compose.compose(argv)

    if code := exits.report_errors(check):
        sys.exit(code)
    exits.announce_imports()


def find_checked_folder(argv: list[str]) -> str | None:
    """Return the FOLDER of `verify checkpoint=FOLDER`; None without it, or where it names a file of conf/checkpoint."""
    choices = [f"checkpoint={name}" for name in list_options("checkpoint")]
    passed = [word for word in argv if word.startswith("checkpoint=") and word not in choices]
    if passed and len(argv) > 1:
        others = " ".join(word for word in argv if word != passed[0])
        raise UserError(f"{passed[0]} compares files with their digests and takes no other words: {others}")
    if not passed:
        return None
    folder = passed[0].partition("=")[2]
    if folder[:1] in ("'", '"'):  # quotes for Hydra, which some names need in other commands
        with describe_errors():
            folder = str(OverridesParser.create().parse_override(passed[0]).value())
    return folder


def _split_words(section: type[Section], argv: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the words for the keys of a section, those for its key `overrides`, and those that join processes."""
    fields = section.model_fields
    joins = [word for word in argv if word.startswith(JOINING)]
    others = [word for word in argv if "overrides" in fields and word.split("=")[0] not in fields]
    return [word for word in argv if word not in others and word not in joins], others, joins


def _read_words(section: type[S], own: list[str], others: list[str]) -> S:
    """Return the settings of a command: words for its own keys, and for its key `overrides`."""
    for key in (word.partition("=")[0] for word in others):
        hint = "" if "." in key or key in Config.model_fields else did_you_mean(key, list(section.model_fields))
        if hint:
            raise UserError(f"unknown key {key}{hint}")
    return read_settings(section, own, {"overrides": others} if others else {})


def run_command(section: type[S], work: Callable[[S], str | None]) -> int:
    """Run `work` with the section that `python -m tunix.NAME key=value ...` describes; return the exit code.

    An error of the user's gives exit code 2 and one line on stderr. If the section has a key `overrides`, it gets the
    words whose keys are not the section's own: they are keys of training. Words like distributed.num_processes=2, and
    the environment, make this process one of several, which join before they work. What `work` returns is printed, of
    several processes by process 0.
    """
    argv, name = sys.argv[1:], section.__name__.lower()
    if "--help" in argv or "-h" in argv:
        text = describe_command(section, f"python -m tunix.{name} key=value ...")
        return exits.report_errors(lambda: print(text))
    print_warnings()
    command_args, others, joins = _split_words(section, argv)

    def run() -> int:
        _reject_dashes(section, argv)
        settings = _read_words(section, command_args, others)
        info = flat({name: settings.model_dump(mode="json")})
        if given := info.get(f"{name}.overrides"):
            info[f"{name}.overrides"] = [word for word in given if not word.startswith(JOINING)]

        def work_and_print() -> None:
            from tunix.processes import peers

            text = work(settings)
            if text is not None and peers.is_main():
                print(text)

        return run_joined(name, compose.compose(joins).config.distributed, info, work_and_print, argv)

    return exits.report_errors(run, supervisor.tell_refusal)


def _reject_dashes(section: type[Section], argv: list[str]) -> None:
    """Raise `UserError` for a flag of a command that has keys alone."""
    name = section.__name__.lower()
    if swept := [word for word in argv if word in ("--multirun", "-m")]:
        lists = [word.replace("=", "=[", 1) + "]" for word in argv if "," in word and "[" not in word]
        raise UserError(f"tunix.{name} has no {swept[0]}{f'; a list is {lists[0]}' if lists else ''}")
    if flags := [word.partition("=")[0] for word in argv if word.startswith("-")]:
        key = flags[0].lstrip("-").replace("-", "_")
        keys = [each for each, _ in list_keys(section)]
        if key not in keys:  # --port is server.port
            key = next((each for each in keys if each.endswith(f".{key}")), key)
        form = f"a key is written {key}=VALUE"
        if key == "config_dir" and "overrides" in section.model_fields:
            form = "a folder of your own config files is 'hydra.searchpath=[file:///FOLDER]'"
        raise UserError(f"tunix.{name} has no {flags[0]}; {form}; `python -m tunix.{name} --help` lists its keys")


def describe_command(section: type[Section], usage: str) -> str:
    """Return the help of a command with the keys of a section and their defaults, as wide as the terminal."""
    values: Any = OmegaConf.to_container(compose.compose_file(CONF / "command" / section.__name__.lower()))
    defaults = flat(values)
    lines = [usage, "", *_wrap(section.__doc__ or "", indent=""), ""]
    for key, description in list_keys(section):
        typed = key if defaults[key] == "???" else f"{key}={as_typed(defaults[key])}"
        lines += [f"  {typed}", *_wrap(description, indent=" " * 6)]
    return "\n".join(lines)


def _wrap(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, 120)
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def run_local(section: type[S], work: Callable[[S], str | None]) -> int:
    """Run `work` as `run_command` does, in this process alone and without jax; return the exit code.

    A word without a `=` is the value of the key `run`: `python -m tunix.NAME RUN key=value`.
    """
    argv, name = sys.argv[1:], section.__name__.lower()
    if "--help" in argv or "-h" in argv:
        text = describe_command(section, f"python -m tunix.{name} RUN key=value ...")
        return exits.report_errors(lambda: print(text))
    print_warnings()

    def run() -> None:
        _reject_dashes(section, argv)
        plain = [word for word in argv if "=" not in word]
        words = [word for word in argv if "=" in word]
        if len(plain) > 1:
            raise UserError(f"{plain[1]}: one RUN is named already, {plain[0]}; other words are key=value")
        given = {"run": plain[0]} if plain else {}
        # Composed with a stand-in, because the characters of a path may have a meaning in Hydra's grammar.
        text = work(read_settings(section, [*words, *(f"{key}=given" for key in given)], given))
        if text is not None:
            print(text)

    return exits.report_errors(run)


def print_warnings() -> None:
    """Print warnings on stderr, as their text alone.

    `force`: orbax, which some commands import, has set up logging with another format already. A run of this process
    may have set the level of tunix's own messages to another one.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("tunix").setLevel(logging.NOTSET)


def run_joined(
    name: str, distributed: Distributed, info: dict[str, Any], work: Callable[[], int | None], words: Sequence[str]
) -> int:
    """Run `work` in one process, or in several that join first; return the exit code.

    Each of several processes has a parent that watches it, and a watchdog that ends it when another one fails. `info`
    are values that must be the same on all of them; of `words`, the command line, it says which key is given twice.
    Stop signals end the command at once, unless it handles them.
    """
    if (code := supervisor.supervise(distributed, stop_code=None)) is not None:
        return code

    def join_and_work() -> int | None:
        from tunix.processes import peers, watchdog  # jax starts here, after the config has passed

        peers.join(distributed, list_versions() | info)
        exits.restore_stop_signals()  # JAX's runtime has replaced the effect of SIGTERM: it would only note it
        with watchdog.Watchdog(distributed) as watching, watching.phase(name, math.inf, is_announced=False):
            if repeated := compose.remark_on_repeated(words):
                peers.print_progress(repeated)
            return work()

    return supervisor.run_member(distributed, join_and_work)


class _KeyParser(FlagParser):
    """Answers a flag that the command lacks with the key that it is, as training does."""

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            reject_flags(sys.argv[1:] if args is None else args, list(self._option_string_actions))
        except UserError as error:
            self.error(str(error))
        return super().parse_intermixed_args(args, namespace)


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command `python -m tunix.NAME` that takes the keys of training.

    The command adds its own flags to the parser.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = _KeyParser(f"python -m tunix.{name}", description=description, formatter_class=form)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as run_training.py takes them")
    parser.add_argument("--config-dir", metavar="DIR", help="your own folder of config files, laid out like conf/")
    return parser


def read_settings(section: type[S], argv: list[str], more: dict[str, Any] | None = None) -> S:
    """Return the section of conf/command, changed by the words of the command line and then by the values `more`."""
    preset = _find_preset(argv) if "sampling" in section.model_fields else []
    with describe_errors(section):
        for override in OverridesParser.create().parse_overrides([*argv]):
            reject_number(override, section)
        composed = compose.compose_file(CONF / "command" / section.__name__.lower(), [*preset, *argv])
        values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return validate(section, values | (more or {}))


def _find_preset(argv: list[str]) -> list[str]:
    """Return the keys of a file of conf/sampling as words, if `sampling=NAME` is among the words. Raises `UserError`
    where there is no such file."""
    name = next((word.partition("=")[2] for word in reversed(argv) if word.startswith("sampling=")), "null")
    if name == "null":
        return []
    names = list_options("sampling")
    if name not in names:
        raise UserError(f"sampling={name}: expected one of {', '.join(names)}{did_you_mean(name, names)}")
    values = compose.compose_file(CONF / "sampling" / name)
    return [f"{key}={'null' if values[key] is None else values[key]}" for key in ("temperature", *FILTERS)]
