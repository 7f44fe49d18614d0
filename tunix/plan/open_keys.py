"""The values of keys that a run leaves open (`auto`), chosen on the devices that it has."""

import json
import logging
import math

import jax

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.costs.devices import Cluster, find_kind, read_topology, replace_network
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
from tunix.sharding.mesh import format_mesh_shape, resolve, token_shards
from tunix.training.choices import Planned, split_devices

log = logging.getLogger(__name__)


def plan_run(cfg: Config) -> tuple[Planned, str]:
    """Return values of the keys that a config leaves open, the same on every process, and in words what was chosen.

    Nothing is compiled for exchange and policy, which are those that `tunix.plan` would take on this run's devices.
    Devices whose speed and memory are not known leave `auto` to the sizes of the model (`select_exchange`) and to
    their platform (`REMAT_BY_PLATFORM`).

    Raises:
        UserError: nothing fits. The message says how much is missing and what would fit.
    """
    # A key that takes what memory is left (`find_open_key`) has taken what larger chunks of logits would need.
    memory_is_left = find_open_key(cfg) is None
    cfg, chosen = _resolve_planned(cfg)
    reasons, kind = [chosen], find_kind(jax.devices()[0].device_kind)
    if kind is not None and "auto" in (cfg.model.cp_exchange, cfg.training.remat, cfg.training.loss_chunk_size):
        sizes, cluster = _resolve_mesh(cfg), _describe_cluster(cfg)
        if cfg.model.cp_exchange == "auto" and token_shards(sizes) > 1:
            cfg, reason = resolve_exchange(cfg, sizes, cluster)
            reasons.append(reason)
        candidate = make_candidate(cfg, sizes, None, cluster)
        if cfg.training.remat == "auto":
            policy = candidate.choices.remat.policy
            cfg = cfg.with_training(remat=policy)
            reasons.append(
                f"training.remat={policy}: a step needs {candidate.memory / GIB:.1f} GiB of a device (derived), and "
                f"may use {cfg.plan.memory_share:.0%} of {kind.memory_gib:g}"
            )
        chunk_size = candidate.cfg.training.loss_chunk_size
        if memory_is_left and chunk_size != cfg.training.loss_chunk_size:
            cfg = cfg.with_training(loss_chunk_size=chunk_size)
            num_rows = chunk_size * candidate.choices.batch.sequences_per_shard
            reasons.append(
                f"training.loss_chunk_size={chunk_size}: a step with {num_rows:,} rows of logits at a time needs "
                f"{candidate.memory / GIB:.1f} GiB of a device (derived)"
            )
    reasons = [reason for reason in reasons if reason]
    for reason in reasons:
        log.info("%s", reason)
    return Planned.of(cfg), "; ".join(reasons)


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
            answer = _select(cfg if chooses_mesh else replace_mesh(cfg, _resolve_mesh(cfg)), cluster)
        except UserError as error:
            answer = {"error": str(error)}  # raised on every process, so that all of them leave with exit code 2
    answer = json.loads(peers.agree(json.dumps(answer), "choosing a mesh"))
    if "error" in answer:
        raise UserError(answer["error"])
    return replace_mesh(cfg, answer["sizes"], answer["choice"]), answer["message"]


def _select(cfg: Config, cluster: Cluster) -> dict:
    ranking = rank(cfg, cluster, log.info)
    if not ranking.fit:
        raise UserError(describe_no_fit(ranking, cluster, "this run's devices"))
    best = ranking.fit[0]
    key, choice, also = find_open_key(cfg), None, ""
    if key:
        choice, also = getattr(best.cfg.training, key), f", {describe_choice(cfg, best.cfg)}"
    kind = find_kind(jax.devices()[0].device_kind)
    suffix = "" if kind else f" on a device of plan.topology={cfg.plan.topology}, since this machine's are not known"
    message = (
        f"chosen by plan: model.mesh_shape={format_mesh_shape(best.sizes)}{also}; predicted ({best.source}): "
        f"{best.memory / GIB:.2f} of {ranking.limit / GIB:.1f} GiB, {best.time.step_s:.3g} s a step{suffix}"
    )
    return {"sizes": best.sizes, "choice": choice, "message": message}


def _resolve_mesh(cfg: Config) -> dict[str, int]:
    """Return the sizes of this run's mesh, also where they are `auto` or -1."""
    return resolve(cfg.model.mesh_shape, _count_devices(cfg), cfg.dims, cfg.distributed.allow_idle_devices)


def _count_devices(cfg: Config) -> int:
    """Return how many devices of this run learn."""
    return len(split_devices(cfg, jax.devices())[0])


def _describe_cluster(cfg: Config) -> Cluster:
    """Describe this run's devices as a cluster. If their kind is not known, the kind of plan.topology replaces it."""
    kind = find_kind(jax.devices()[0].device_kind) or read_topology(cfg.plan.topology).kind
    if cfg.plan.network:
        kind = replace_network(kind, cfg.plan.network)
    num_devices = _count_devices(cfg)
    if not isinstance(cfg.model.mesh_shape, str) and -1 not in cfg.model.mesh_shape[0]:
        num_devices = math.prod(cfg.model.mesh_shape[0])  # other devices stay idle, if that is allowed
    per_node = max(1, num_devices // len(set(peers.hosts())))
    return Cluster(kind, num_devices // per_node, per_node)
