"""Tokenize and pack a corpus once: `python -m tunix.prepare [group=option] [key=value]`, with the keys of training.

Training with the same keys finds the result in `loading.cache_dir`. A folder printed here can also be copied and read
with `data=tokens data.paths=[FOLDER]`. Started again after a kill, finished shards are not made again.
"""

import logging
import sys

from tunix.compose import compose
from tunix.config import UserError


def main() -> int:
    """Exit code of the command line."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
        return 0
    try:
        config = compose(sys.argv[1:]).config
        from tunix.data.corpus import load_corpus, prepare_corpus  # after the config has passed

        logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
        logging.getLogger("tunix").setLevel(logging.INFO)
        prepared, _ = prepare_corpus(config)
        corpus = load_corpus(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(corpus.summary)
    for name, each in prepared.items():
        print(f"{name}: {each.folder}, fingerprint {each.fingerprint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
