"""Values that a run leaves open: the mesh (plan.choose_mesh=true), the micro batch (training.micro_batch_size=auto) or
what blocks keep (training.remat=budget or auto), and the exchange of attention (model.cp_exchange=auto)."""

import json
import logging
import math
import socket

import jax

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.costs.devices import find_kind, replace_network
from tunix.plan.cluster import Cluster, read_topology
from tunix.plan.derived_time import resolve_exchange
from tunix.plan.ranking import (
    GIB,
    describe_choice,
    describe_no_fit,
    find_open_key,
    fix_batch,
    make_candidate,
    rank,
    replace_mesh,
)
from tunix.processes import peers
from tunix.sharding.mesh_shape import format_mesh_shape, resolve, token_shards
from tunix.training.choices import Planned

log = logging.getLogger(__name__)


def plan_run(cfg: Config) -> tuple[Planned, str]:
    """Return values of the keys that a config leaves open, the same on every process, and in words what was chosen.

    Raises:
        UserError: nothing fits. The message says how much is missing and what would fit.
    """
    cfg, chosen = _resolve_planned(cfg)
    cfg, exchange = _resolve_cp_exchange(cfg)
    cfg, remat = _resolve_remat(cfg)
    return Planned.of(cfg), "; ".join(filter(None, (chosen, exchange, remat)))


def _resolve_cp_exchange(cfg: Config) -> tuple[Config, str]:
    """Return the config with the exchange that is predicted to be faster on this run's devices, and the reason.

    Devices whose speed is not known leave `auto` to the sizes of the model (`select_exchange`).
    """
    if cfg.model.cp_exchange != "auto" or find_kind(jax.devices()[0].device_kind) is None:
        return cfg, ""
    sizes = resolve(cfg.model.mesh_shape, jax.device_count(), cfg.dims, cfg.distributed.allow_idle_devices)
    if token_shards(sizes) == 1:
        return cfg, ""
    cfg, reason = resolve_exchange(cfg, sizes, _describe_cluster(cfg))
    if reason:
        log.info("%s", reason)
    return cfg, reason


def _resolve_remat(cfg: Config) -> tuple[Config, str]:
    """Return the config with the policy that `tunix.plan` would take on this run's devices, and the reason.

    Nothing is compiled. Devices whose memory is not known leave `auto` to their platform (`REMAT_BY_PLATFORM`).
    """
    kind = find_kind(jax.devices()[0].device_kind)
    if cfg.training.remat != "auto" or kind is None:
        return cfg, ""
    sizes = resolve(cfg.model.mesh_shape, jax.device_count(), cfg.dims, cfg.distributed.allow_idle_devices)
    candidate = make_candidate(cfg, sizes, None, _describe_cluster(cfg))
    policy = candidate.choices.remat.policy
    reason = (
        f"training.remat={policy}: a step needs {candidate.memory / GIB:.1f} GiB of a device (derived), and may use "
        f"{cfg.plan.memory_share:.0%} of {kind.memory_gib:g}"
    )
    log.info("%s", reason)
    return cfg.with_training(remat=policy), reason


def _resolve_planned(cfg: Config) -> tuple[Config, str]:
    """Return the config with mesh, micro batch and remat policy in place of what it leaves open, and what was chosen.

    Process 0 chooses the mesh that `tunix.plan` ranks first, and sends it to the others. The text is empty where
    nothing is open.

    Raises:
        UserError: nothing fits. The message says how much is missing and what would fit.
    """
    chooses_mesh = cfg.plan.choose_mesh and cfg.model.mesh_shape == "auto"
    if not chooses_mesh and find_open_key(cfg) is None:
        return cfg, ""
    cluster, answer = _describe_cluster(cfg), {}
    if chooses_mesh:
        cfg = fix_batch(cfg, cluster.num_devices)
    # One process chooses for all: a mesh that differs between processes would hang the run.
    if peers.is_main():
        try:
            answer = _select(cfg if chooses_mesh else _resolve_mesh(cfg), cluster)
        except UserError as error:
            answer = {"error": str(error)}  # raised on every process, so that all of them leave with exit code 2
    answer = json.loads(peers.agree(json.dumps(answer), "choosing a mesh"))
    if "error" in answer:
        raise UserError(answer["error"])
    log.info("%s", answer["message"])
    return replace_mesh(cfg, answer["sizes"], answer["choice"]), answer["message"]


def _select(cfg: Config, cluster: Cluster) -> dict:
    ranking = rank(cfg, cluster, log.info)
    if not ranking.fit:
        raise UserError(describe_no_fit(ranking, cluster, "this run's devices"))
    best = ranking.fit[0]
    key, choice, also = find_open_key(cfg), None, ""
    if key:
        choice, also = getattr(best.cfg.training, key), f", {describe_choice(cfg, best.cfg)}"
    message = (
        f"chosen by plan: model.mesh_shape={format_mesh_shape(best.sizes)}{also}; predicted ({best.source}): "
        f"{best.memory / GIB:.2f} of {ranking.limit / GIB:.1f} GiB, {best.time.step_s:.3g} s a step"
    )
    return {"sizes": best.sizes, "choice": choice, "message": message}


def _resolve_mesh(cfg: Config) -> Config:
    """Return the config with the sizes of this run's mesh in place of `auto` or -1."""
    allow_idle = cfg.distributed.allow_idle_devices
    return replace_mesh(cfg, resolve(cfg.model.mesh_shape, jax.device_count(), cfg.dims, allow_idle))


def _describe_cluster(cfg: Config) -> Cluster:
    """Describe this run's devices as a cluster. If their kind is not known, the kind of plan.topology replaces it."""
    kind = find_kind(jax.devices()[0].device_kind) or read_topology(cfg.plan.topology).kind
    if cfg.plan.network:
        kind = replace_network(kind, cfg.plan.network)
    num_devices = jax.device_count()
    if not isinstance(cfg.model.mesh_shape, str) and -1 not in cfg.model.mesh_shape[0]:
        num_devices = math.prod(cfg.model.mesh_shape[0])  # other devices stay idle, if that is allowed
    num_nodes = len(set(peers.gather(socket.gethostname(), "choosing a mesh")))
    per_node = max(1, num_devices // num_nodes)
    return Cluster(kind, num_devices // per_node, per_node)
