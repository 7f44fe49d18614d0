"""A plan as a picture: memory of each mesh beside the limit of a device, and the parts of the time of its step."""

from tunix.costs.figure import INK, PALE, Bar, Panel, draw
from tunix.plan.candidates import GIB, Candidate
from tunix.plan.ranking import Ranking
from tunix.plan.topology import Cluster
from tunix.sharding.mesh_shape import format_mesh_shape

MEMORY = {
    "weights": "#2a6f97",
    "optimizer": "#61a5c2",
    "reference": "#8d99ae",
    "gradients": "#e9c46a",
    "temporary": "#c9d6df",
}
TIME = {"arithmetic": "#2a6f97", "hidden communication": "#c9d6df", "exposed communication": "#d1495b"}
MAX_ROWS = 16  # meshes in the picture


def draw_plan(ranking: Ranking, cluster: Cluster) -> bytes:
    """Return a PNG of the meshes that divide model and batch, best first."""
    candidates = [*ranking.fit, *ranking.too_large][:MAX_ROWS]
    labels = [(format_mesh_shape(each.sizes), INK if each.memory <= ranking.limit else PALE) for each in candidates]
    colors = {name: color for name, color in MEMORY.items() if any(name in each.num_bytes for each in candidates)}
    memory = Panel(
        "memory of a device, GiB", colors, [_make_memory_bar(each) for each in candidates], ranking.limit / GIB
    )
    time = Panel("time of a step, s (predicted)", TIME, [_make_time_bar(each) for each in candidates])
    return draw(f"{cluster}: predicted, not measured", labels, [memory, time])


def _make_memory_bar(candidate: Candidate) -> Bar:
    parts = {name: size / GIB for name, size in candidate.num_bytes.items()}
    return Bar(parts, f"{candidate.memory / GIB:.1f}, {candidate.source}")


def _make_time_bar(candidate: Candidate) -> Bar:
    """Return the bar of a step's time.

    Hidden communication runs at the same time as arithmetic, so it is drawn as a part of the arithmetic's length.
    """
    time = candidate.time
    hidden = min(time.compute_s, time.communication_s - time.exposed_s)
    parts = dict(zip(TIME, (time.compute_s - hidden, hidden, time.exposed_s), strict=True))
    return Bar(parts, f"{time.step_s:.3g} s, MFU {candidate.mfu:.0%}")
