"""The command lines beside training, `python -m tunix.NAME`: keys of their own, or those of training. Knows no jax."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from tunix.cli.keys import keys
from tunix.cli.mistakes import explained, validated
from tunix.config import Section
from tunix.config.values import CONF
from tunix.processes import exits

S = TypeVar("S", bound=Section)


def command_line(section: type[S], work: Callable[[S], None]) -> int:
    """`python -m tunix.NAME key=value ...`: exit code 2 and one line on stderr for what the user got wrong.

    A section with `overrides` is given there the words whose keys are not its own.
    """
    words, name = sys.argv[1:], section.__name__.lower()
    if "--help" in words or "-h" in words:
        print(f"python -m tunix.{name} key=value ...\n\n{section.__doc__}\n")
        for key, field in keys(section):
            print(f"  {key:24} {' '.join((field.description or '').split())}")
        return 0
    fields = section.model_fields
    others = [word for word in words if "overrides" in fields and word.split("=")[0] not in fields]
    own, more = [word for word in words if word not in others], {"overrides": others} if others else {}
    return exits.reported(lambda: work(settings(section, own, more)))


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Of a command `python -m tunix.NAME` that takes the keys of training, beside flags of its own."""
    parser = argparse.ArgumentParser(
        f"python -m tunix.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as run_training.py takes them")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of one's own, laid out like conf/")
    return parser


def settings(section: type[S], words: list[str], more: dict[str, Any] | None = None) -> S:
    """The section of conf/command, with the words that change it, and `more` keys on top."""
    with explained(section):
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(CONF / "command"), version_base="1.3"):
            composed = hydra.compose(section.__name__.lower(), words)
        values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return validated(section, values | (more or {}))
