"""Tokenize a corpus with n processes: each makes every n-th shard, in a cache that all of them see.

    process 0    shard 0    shard 2    shard 4        then the index over all shards
    process 1    shard 1    shard 3

A shard does not depend on the process that makes it. So the corpus is the same as one that a single process makes.
"""

import logging
import os
import time
from functools import partial
from pathlib import Path

import jax

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.data.tokenize import find_folder, find_units, make_share
from tunix.data.tokenized_sources import find_inputs, list_sources, take_all
from tunix.processes import peers
from tunix.processes.shared_disk import find_blind

log = logging.getLogger(__name__)


def make_shares(cfg: Config) -> None:
    """Make the missing shards of a corpus and of evaluation.sets, each process its share; every process calls this.

    Raises:
        UserError: a process does not see the cache of process 0 or sees other documents, or a share cannot be made.
    """
    begun = time.perf_counter()
    _check_shared(Path(cfg.loading.cache_dir).expanduser())
    inputs = peers.main_first(lambda: find_inputs(cfg), "finding the tokenizer")  # process 0 may have to train it
    sources = {name: (source, inputs.units[name]) for name, source in list_sources(cfg).items() if name in inputs.units}
    for name, source in cfg.evaluation.sets.items():
        everything = take_all(source)
        sources[f"evaluation.sets.{name}"] = everything, find_units(everything, cfg.loading)
    workers = cfg.loading.prepare_processes or max(1, (os.cpu_count() or 1) // peers.num_on_host())
    loading = cfg.loading.model_copy(update={"prepare_processes": workers})
    share = slice(jax.process_index(), None, jax.process_count())
    for name, (source, units) in sources.items():
        folder = find_folder(source, units, cfg.task, inputs.vocabulary, loading)
        _check_same(name, folder.name)
        work = partial(make_share, source, units, cfg.task, inputs.vocabulary, loading, share)
        peers.together(work, f"tokenizing {name}", peers.NO_LIMIT_S)
    log.info("%d processes have tokenized in %.1f s", jax.process_count(), time.perf_counter() - begun)


def _check_shared(cache_dir: Path) -> None:
    """Raise `UserError` where some process does not see the cache of process 0."""
    peers.on_main(lambda: cache_dir.mkdir(parents=True, exist_ok=True), "making the cache")
    if blind := find_blind(cache_dir):
        hosts = ", ".join(sorted({peers.hosts()[rank] for rank in blind}))
        raise UserError(
            f"loading.cache_dir={cache_dir} of {peers.hosts()[0]} is not seen by {hosts}; name a folder that all hosts "
            "share, or prepare on one host and copy the folder that it prints (data=tokens)"
        )


def _check_same(name: str, key: str) -> None:
    """Raise `UserError` where the documents of a source are not the same on all processes."""
    keys = peers.gather(key, f"documents of {name}")
    other = next((rank for rank, theirs in enumerate(keys) if theirs != keys[0]), None)
    if other is not None:
        raise UserError(
            f"data: process 0 ({peers.hosts()[0]}) and process {other} ({peers.hosts()[other]}) see different "
            f"documents of {name}, or different versions of its files; read them from a disk that all hosts share"
        )
