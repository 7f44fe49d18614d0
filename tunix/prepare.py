"""Tokenize and pack a corpus once: `python -m tunix.prepare [group=option] [key=value]`, with the keys of training.

Training with the same keys finds the result in `loading.cache_dir`. A folder printed here can also be copied and read
with `data=tokens data.paths=[FOLDER]`. Started again after a kill, finished shards are not made again.
"""

import logging
import sys

from tunix.cli import command, compose
from tunix.processes import exits


def main() -> int:
    """Exit code of the command line."""
    args = command.command_parser("prepare", __doc__).parse_intermixed_args()
    return exits.reported(lambda: prepare(compose.searched(args.overrides, args.config_dir)))


def prepare(overrides: list[str]) -> None:
    config = compose.compose(overrides).config
    from tunix.data.corpus import load_corpus  # after the config has passed

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    logging.getLogger("tunix").setLevel(logging.INFO)
    config.data.try_out()
    corpus = load_corpus(config)
    print(corpus.summary)
    for name, each in corpus.prepared.items():
        print(f"{name}: {each.folder}, fingerprint {each.fingerprint}")


if __name__ == "__main__":
    sys.exit(main())
