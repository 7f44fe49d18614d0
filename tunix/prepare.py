"""Tokenize and pack a corpus once: `python -m tunix.prepare [group=option] [key=value]`, with the keys of training.

Training with the same keys finds the result in `loading.cache_dir`. A folder printed here can also be copied and read
with `data=tokens data.paths=[FOLDER]`. Started again after a kill, finished shards are not made again.
"""

import logging
import sys

from tunix import exits
from tunix.compose import compose


def main() -> int:
    """Exit code of the command line."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
        return 0
    return exits.reported(lambda: prepare(sys.argv[1:]))


def prepare(overrides: list[str]) -> None:
    config = compose(overrides).config
    from tunix.data.corpus import load_corpus  # after the config has passed

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    logging.getLogger("tunix").setLevel(logging.INFO)
    corpus = load_corpus(config)
    print(corpus.summary)
    for name, each in corpus.prepared.items():
        print(f"{name}: {each.folder}, fingerprint {each.fingerprint}")


if __name__ == "__main__":
    sys.exit(main())
