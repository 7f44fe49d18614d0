"""A plan as a picture: memory of each mesh against what a device may use, and where the time of its step goes."""

from tunix.costs.figure import INK, PALE, Bar, Panel, draw
from tunix.plan.ranking import GIB, Candidate, Ranking
from tunix.plan.topology import Cluster
from tunix.sharding.mesh_shape import format_mesh_shape

MEMORY = {"weights": "#2a6f97", "optimizer": "#61a5c2", "gradients": "#e9c46a", "temporary": "#c9d6df"}
TIME = {"arithmetic": "#2a6f97", "hidden communication": "#c9d6df", "exposed communication": "#d1495b"}
MOST = 16  # meshes shown


def picture(ranking: Ranking, cluster: Cluster) -> bytes:
    """A PNG of the meshes that divide model and batch, best first."""
    meshes = [*ranking.fit, *ranking.too_large][:MOST]
    labels = [(format_mesh_shape(each.sizes), INK if each.memory <= ranking.limit else PALE) for each in meshes]
    memory = Panel("memory of a device, GiB", MEMORY, [_memory(each) for each in meshes], ranking.limit / GIB)
    time = Panel("time of a step, s (predicted)", TIME, [_time(each) for each in meshes])
    return draw(f"{cluster}: predicted, not measured", labels, [memory, time])


def _memory(candidate: Candidate) -> Bar:
    parts = {name: size / GIB for name, size in candidate.num_bytes.items()}
    return Bar(parts, f"{candidate.memory / GIB:.1f}, {candidate.source}")


def _time(candidate: Candidate) -> Bar:
    """Hidden communication goes on at the same time as arithmetic: it is shown as the part of it that it takes."""
    hidden = min(candidate.compute_s, candidate.communication_s - candidate.exposed_s)
    parts = dict(zip(TIME, (candidate.compute_s - hidden, hidden, candidate.exposed_s), strict=True))
    return Bar(parts, f"{candidate.step_s:.3g} s, MFU {candidate.mfu:.0%}")
