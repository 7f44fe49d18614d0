"""What a run leaves to `auto`: its mesh (plan.choose_mesh), its micro batch (training.micro_batch_size=auto)."""

import json
import logging
import math
import socket

import jax

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.costs.devices import kind_named
from tunix.plan.ranking import GIB, nothing_fits, on_mesh, rank
from tunix.plan.topology import Cluster, read_topology
from tunix.processes import peers
from tunix.sharding.mesh_shape import format_mesh_shape, resolve

log = logging.getLogger(__name__)


def decided(cfg: Config) -> Config:
    """The config with what it leaves to auto, the same on every process: process 0 chooses, as tunix.plan ranks.

    Raises:
        UserError: nothing fits, by how much, and what would.
    """
    chooses_mesh = cfg.plan.choose_mesh and cfg.model.mesh_shape == "auto"
    if not chooses_mesh and cfg.training.micro_batch_size != "auto":
        return cfg
    cluster, answer = _cluster(cfg), {}
    if peers.is_main():
        try:
            answer = _choose(cfg if chooses_mesh else _with_mesh(cfg), cluster)
        except UserError as error:
            answer = {"mistake": str(error)}
    answer = json.loads(peers.agree(json.dumps(answer), "choosing a mesh"))
    if "mistake" in answer:
        raise UserError(answer["mistake"])
    log.info("%s", answer["told"])
    ours = on_mesh(cfg, answer["sizes"], answer["micro_batch_size"])
    return ours.model_copy(update={"launcher": cfg.launcher})


def _choose(cfg: Config, cluster: Cluster) -> dict:
    ranking = rank(cfg, cluster, log.info)
    if not ranking.fit:
        raise UserError(nothing_fits(ranking, cluster, "this run's devices"))
    best = ranking.fit[0]
    size = best.cfg.training.sequences_per_shard
    told = (
        f"chosen by plan: model.mesh_shape={format_mesh_shape(best.sizes)}, training.micro_batch_size={size}; "
        f"predicted ({best.source}): {best.memory / GIB:.2f} of {ranking.limit / GIB:.1f} GiB, "
        f"{best.step_s:.3g} s a step"
    )
    return {"sizes": best.sizes, "micro_batch_size": size, "told": told}


def _with_mesh(cfg: Config) -> Config:
    return on_mesh(cfg, resolve(cfg.model.mesh_shape, jax.device_count(), cfg.dims, cfg.distributed.allow_idle_devices))


def _cluster(cfg: Config) -> Cluster:
    """This run's devices as a cluster; of a kind that is not known, plan.topology's stands in."""
    kind = kind_named(jax.devices()[0].device_kind) or read_topology(cfg.plan.topology).kind
    num_devices = jax.device_count()
    if not isinstance(cfg.model.mesh_shape, str) and -1 not in cfg.model.mesh_shape[0]:
        num_devices = math.prod(cfg.model.mesh_shape[0])  # others are left idle, if that is allowed
    num_nodes = len(set(peers.gather(socket.gethostname(), "choosing a mesh")))
    per_node = max(1, num_devices // num_nodes)
    return Cluster(kind, num_devices // per_node, per_node)
