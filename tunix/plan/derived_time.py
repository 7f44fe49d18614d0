"""Time of a step that is not compiled: derived from its FLOPs, its bytes and its transfers.

Transfers that overlap arithmetic cost nothing, until they take longer than it. For the others arithmetic waits. A step
with 100 ms of arithmetic, 120 ms of transfers that overlap it and 20 ms of others takes 140 ms; 40 ms are exposed:

    arithmetic    |==================== 100 ms ====================|
    overlapping   |========================= 120 ms =========================|
    others                                                                   |= 20 ms =|
    exposed                                                        |===== 40 ms =======|
"""

from tunix.config import Config
from tunix.costs.derived import Costs
from tunix.costs.devices import compute_peak_tflops
from tunix.costs.schedule import StepTime
from tunix.costs.transfers import predict_seconds
from tunix.plan.exchange_times import predict_beyond_mean_s
from tunix.plan.topology import Cluster

PRODUCTS_SHARE = 0.8  # share of a step's arithmetic time that matrix products take


def derive_time(cfg: Config, sizes: dict[str, int], costs: Costs, cluster: Cluster) -> StepTime:
    """Return the predicted time of a step with these costs on a mesh of these sizes."""
    compute_s = _derive_compute_s(cfg, sizes, costs, cluster)
    overlapping_s = _predict_transfers_s(sizes, costs, cluster, overlaps=True)
    waited_s = _predict_transfers_s(sizes, costs, cluster, overlaps=False)
    exposed_s = max(0.0, overlapping_s - compute_s) + waited_s
    return StepTime(compute_s, exposed_s, communication_s=overlapping_s + waited_s, flops=costs.flops)


def _predict_transfers_s(sizes: dict[str, int], costs: Costs, cluster: Cluster, *, overlaps: bool) -> float:
    """Return the seconds of the transfers that overlap arithmetic, or of those that do not."""
    chosen = [transfer for transfer in costs.transfers if transfer.overlaps == overlaps]
    return sum(predict_seconds(each, sizes, cluster.kind, cluster.per_node) for each in chosen)


def _derive_compute_s(cfg: Config, sizes: dict[str, int], costs: Costs, cluster: Cluster) -> float:
    """Return the seconds of arithmetic: matrix products, everything else, and the optimizer's update."""
    kind, num_bytes = cluster.kind, costs.num_bytes
    # The optimizer's update reads and writes all of the state once; its arithmetic is small beside that.
    update_s = 2 * (num_bytes["weights"] + num_bytes["optimizer"]) / (kind.hbm_gb_per_s * 1e9)
    bf16 = kind.peak_tflops * 1e12 * kind.efficiency
    peak = compute_peak_tflops(kind, cfg.training.matmul_dtype, costs.matmul_share)
    products_s = costs.flops / (peak * 1e12 * kind.efficiency)
    # What is no product takes as long beside products of 8-bit floats as beside others.
    others_s = costs.flops / bf16 * (1 / PRODUCTS_SHARE - 1)
    beyond_mean_s = predict_beyond_mean_s(cfg, sizes, cluster, bf16 * PRODUCTS_SHARE)
    return products_s + others_s + update_s + beyond_mean_s
