"""Tokenize and pack a corpus before training: `python -m tunix.prepare [group=option] [key=value]`.

The keys are those of training. Training with the same keys finds the result in `loading.cache_dir`. The folders that
the command prints can also be copied, and read with `data=tokens data.paths=[FOLDER]`. If the command was killed, start
it again: it makes the shards that are missing. Several processes of a launcher share the work if all see the cache.
With `task.teacher=MODEL task.teacher_top_k=K` it also computes the logits of a teacher, on the devices of a run.
"""

import logging
import os
import sys

from tunix.base.progress import announcing
from tunix.config import Config, command_line, compose
from tunix.config.compose import add_search_path
from tunix.processes import exits, supervisor


def main() -> int:
    """Run the command line and return its exit code."""
    args = command_line.command_parser("prepare", __doc__).parse_intermixed_args()

    def run() -> int:
        cfg = compose.compose(add_search_path(args.overrides, args.config_dir)).config
        if cfg.task.offline_top_k is None:
            # Nothing needs an accelerator. JAX would take most of its memory, which another run may be using.
            os.environ["JAX_PLATFORMS"] = "cpu"
        info = compose.list_info(cfg)
        return command_line.run_joined("prepare", cfg.distributed, info, lambda: prepare(cfg), args.overrides)

    return exits.report_errors(run, supervisor.tell_refusal)


def prepare(cfg: Config) -> None:
    """Prepare the corpus of the config, and print where it is; compute the logits of its teacher, if it has one."""
    import jax

    from tunix.data.dataset import Corpus, make_shares
    from tunix.feeds import load_data
    from tunix.inference.teacher import give_logits
    from tunix.processes import peers
    from tunix.trainer import plan_run
    from tunix.training.choices import build_mesh
    from tunix.training.train_spec import assemble

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    logging.getLogger("tunix").setLevel(logging.INFO if peers.is_main() else logging.WARNING)
    cfg.data.try_out()
    if jax.process_count() > 1:
        make_shares(cfg)
    with announcing("preparing the data", peers.print_progress):
        corpus = load_data(cfg)
    if peers.is_main():
        print(corpus.summary)
        for name, prepared in corpus.prepared.items():
            print(f"{name}: {prepared.folder}, fingerprint {prepared.fingerprint}")
    if cfg.task.offline_top_k is not None:
        assert isinstance(corpus, Corpus)
        planned, _ = plan_run(cfg)
        mesh = build_mesh(cfg, planned=planned)
        with jax.set_mesh(mesh):
            folder = give_logits(cfg, corpus, assemble(cfg, mesh, planned=planned), mesh)
        if peers.is_main():
            print(f"logits of the teacher: {folder}")


if __name__ == "__main__":
    sys.exit(main())
