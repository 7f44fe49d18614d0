"""Tokenize and pack a corpus once: `python -m tunix.prepare [group=option] [key=value]`, with the keys of training.

Training with the same keys finds the result in `loading.cache_dir`. A folder printed here can also be copied and read
with `data=tokens data.paths=[FOLDER]`. After a kill, start it again: shards that are complete are not made again.
"""

import logging
import sys

from tunix.cli import command, compose
from tunix.processes import exits
from tunix.processes.identity import refuse_several


def main() -> int:
    """Run the command line and return its exit code."""
    args = command.command_parser("prepare", __doc__).parse_intermixed_args()
    return exits.report_errors(lambda: prepare(compose.add_search_path(args.overrides, args.config_dir)))


def prepare(overrides: list[str]) -> None:
    """Prepare the corpus of the config, and print where it is."""
    refuse_several("prepare")
    config = compose.compose(overrides).config
    from tunix.rl.feeds import FEEDS  # imports jax, which takes seconds: a wrong config is refused before

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    logging.getLogger("tunix").setLevel(logging.INFO)
    config.data.try_out()
    corpus = FEEDS[config.task.documents].load(config)
    print(corpus.summary)
    for name, prepared in corpus.prepared.items():
        print(f"{name}: {prepared.folder}, fingerprint {prepared.fingerprint}")


if __name__ == "__main__":
    sys.exit(main())
