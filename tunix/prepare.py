"""Tokenize and pack a corpus before training: `python -m tunix.prepare [group=option] [key=value]`.

The keys are those of training. Training with the same keys finds the result in `loading.cache_dir`. The folders that
the command prints can also be copied, and read with `data=tokens data.paths=[FOLDER]`. If the command was killed, start
it again: it makes the shards that are missing. Several processes of a launcher share the work if all see the cache.
"""

import logging
import os
import sys

from tunix.config import Config, command_line, compose
from tunix.config.compose import add_search_path
from tunix.processes import exits


def main() -> int:
    """Run the command line and return its exit code."""
    args = command_line.command_parser("prepare", __doc__).parse_intermixed_args()
    # Nothing here needs an accelerator. JAX would take most of its memory, which another run may be using.
    os.environ["JAX_PLATFORMS"] = "cpu"

    def run() -> int:
        cfg = compose.compose(add_search_path(args.overrides, args.config_dir)).config
        return command_line.run_joined("prepare", cfg.distributed, compose.list_info(cfg), lambda: prepare(cfg))

    return exits.report_errors(run)


def prepare(cfg: Config) -> None:
    """Prepare the corpus of the config, and print where it is."""
    import jax

    from tunix.batch_sources import load_data
    from tunix.data.dataset import make_shares
    from tunix.processes import peers

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    logging.getLogger("tunix").setLevel(logging.INFO if peers.is_main() else logging.WARNING)
    cfg.data.try_out()
    if jax.process_count() > 1:
        make_shares(cfg)
    corpus = peers.main_first(lambda: load_data(cfg), "preparing the data")
    if peers.is_main():
        print(corpus.summary)
        for name, prepared in corpus.prepared.items():
            print(f"{name}: {prepared.folder}, fingerprint {prepared.fingerprint}")


if __name__ == "__main__":
    sys.exit(main())
