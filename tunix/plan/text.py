"""A plan as tables, as JSON, and as files."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from tunix.base.tables import as_text
from tunix.plan.compiled import HBM_SHARE, backend
from tunix.plan.picture import picture
from tunix.plan.ranking import GIB, Candidate, Ranking
from tunix.plan.topology import Cluster
from tunix.sharding.mesh_shape import format_mesh_shape

LABEL = "derived, compiled and predicted, not measured"


def text(ranking: Ranking, cluster: Cluster, overrides: list[str]) -> str:
    """Tables of the meshes and of what the best one moves, why others were refused, and the command for the best."""
    lines = [as_text(meshes(ranking, cluster), 190)] if ranking.fit or ranking.too_large else []
    lines.append(f"! more than the {ranking.limit / GIB:.1f} GiB that a device may use (plan.memory_share)")
    lines += [f"refused {mesh}: {reason}" for mesh, reason in ranking.refused.items()]
    every = [*ranking.fit, *ranking.too_large]
    lines += [f"{format_mesh_shape(each.sizes)} is not compiled: {each.note}" for each in every if each.note]
    lines += _assumptions(cluster, every)
    if ranking.fit:
        if ranking.fit[0].compiled:
            lines += ["", as_text(moved(ranking.fit[0]), 190)]
        lines += ["", command(overrides, ranking.fit[0])]
    return "\n".join(lines)


def meshes(ranking: Ranking, cluster: Cluster) -> Table:
    """A row for each mesh that divides the model."""
    found = Table(title=f"{cluster}: {LABEL}", title_justify="left")
    held = ("weights", "optimizer", "gradients", "temporary")
    of_time = ("compute s", "exposed s", "step s", "tokens/s", "MFU", "exposed share")
    for name in ("mesh", "batch", "from", *held, "GiB in all", *of_time):
        found.add_column(name, justify="left" if name in ("mesh", "from") else "right", no_wrap=True)
    for each in [*ranking.fit, *ranking.too_large]:
        found.add_row(
            format_mesh_shape(each.sizes),
            str(each.cfg.training.micro_batch_size),
            each.source,
            *(f"{each.num_bytes[name] / GIB:.2f}" for name in held),
            f"{each.memory / GIB:.2f}{' !' if each.memory > ranking.limit else ''}",
            *(f"{value:.3f}" for value in (each.compute_s, each.exposed_s, each.step_s)),
            f"{each.tokens_per_s:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.exposed_s / each.step_s:.0%}",
        )
    return found


def moved(candidate: Candidate) -> Table:
    """Collectives of a step of the compiled program, by mesh axis."""
    assert candidate.compiled
    title = f"collectives of a step on {format_mesh_shape(candidate.sizes)}, per device group"
    found = Table(title=title, title_justify="left")
    for name in ("axes", "collective", "dtype", "count", "GiB"):
        found.add_column(name, justify="right" if name in ("count", "GiB") else "left")
    for each in candidate.compiled.moved:
        if each.num_bytes >= 2**20:
            row = ("+".join(each.axes), each.kind, each.dtype, f"{each.count:,}", f"{each.num_bytes / GIB:.3f}")
            found.add_row(*row)
    return found


def _assumptions(cluster: Cluster, candidates: list[Candidate]) -> list[str]:
    kind = cluster.kind
    lines = [
        f"predicted with matrix products at {kind.efficiency:.0%} of {kind.peak_tflops:g} TFLOP/s, the rest at "
        f"{HBM_SHARE:.0%} of {kind.hbm_gb_per_s:g} GB/s, links at {kind.link_gb_per_s:g} GB/s in a node and "
        f"{kind.network_gb_per_s:g} GB/s per device between nodes, without latency"
    ]
    if any(each.source == "compiled by CPU" for each in candidates):
        lines.append(
            "JAX's CUDA plugin is not installed, so the CPU backend compiled: memory is an upper bound (it computes "
            "bfloat16 in float32), times are derived. For the GPU's own program: pip install --no-deps "
            f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
        )
    elif candidates and all(each.compiled is None for each in candidates):
        lines.append("nothing is compiled: temporary memory is an estimate, and all of a schedule's overlap is assumed")
    if any(not (each.compiled and each.compiled.timeline) and each.cfg.optimizer.name == "muon" for each in candidates):
        lines.append("derived: without what Muon's matrix products move, hold and compute, which is much: compile")
    return lines


def record(candidate: Candidate) -> dict[str, Any]:
    """A mesh as --json shows it; seconds, bytes, FLOPs of one device and one step."""
    added: dict[str, int] = {}
    for each in candidate.costs.transfers:
        name = f"{each.kind} {'+'.join(each.axes)}"
        added[name] = added.get(name, 0) + each.num_bytes
    compiled = candidate.compiled
    return {
        "mesh_shape": format_mesh_shape(candidate.sizes),
        "micro_batch_size": candidate.cfg.training.micro_batch_size,
        "source": candidate.source,
        "bytes_per_device": {**candidate.num_bytes, "total": candidate.memory},
        "derived_bytes_per_device": {**candidate.costs.num_bytes, "total": candidate.costs.memory},
        "derived_bytes_moved": added,
        "collectives": [asdict(each) for each in compiled.moved] if compiled else None,
        "compile_s": compiled.compile_s if compiled else None,
        "not_compiled": candidate.note or None,
        "tflop_per_step_per_device": candidate.flops / 1e12,
        "tokens_per_step": candidate.costs.tokens_per_step,
        "predicted": {
            "compute_s": candidate.compute_s,
            "communication_s": candidate.communication_s,
            "exposed_communication_s": candidate.exposed_s,
            "exposed_share": candidate.exposed_s / candidate.step_s,
            "step_time_s": candidate.step_s,
            "tokens_per_s": candidate.tokens_per_s,
            "mfu": candidate.mfu,
        },
    }  # fmt: skip


def as_json(ranking: Ranking, cluster: Cluster, overrides: list[str]) -> str:
    """Everything, for programs."""
    values = {
        "note": LABEL,
        "device": cluster.kind.model_dump(),
        "compiler": backend(),
        "limit_bytes": round(ranking.limit),
        "fit": [record(each) for each in ranking.fit],
        "too_large": [record(each) for each in ranking.too_large],
        "refused": ranking.refused,
        "command": command(overrides, ranking.fit[0]) if ranking.fit else None,
    }
    return json.dumps(values, indent=1)


def save(folder: Path, ranking: Ranking, cluster: Cluster, overrides: list[str]) -> None:
    """plan.txt, plan.json and plan.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.txt").write_text(f"{text(ranking, cluster, overrides)}\n")
    (folder / "plan.json").write_text(f"{as_json(ranking, cluster, overrides)}\n")
    (folder / "plan.png").write_bytes(picture(ranking, cluster))


def command(overrides: list[str], best: Candidate) -> str:
    """What trains on the best mesh."""
    decided = ("model.mesh_shape=", "mesh_shape=", "training.micro_batch_size=auto", "plan.")
    words = [word for word in overrides if not word.lstrip("+").startswith(decided)]
    if any(word.lstrip("+") == "training.micro_batch_size=auto" for word in overrides):
        words.append(f"training.micro_batch_size={best.cfg.training.micro_batch_size}")
    return shlex.join(["python", "run_training.py", *words, f"model.mesh_shape={format_mesh_shape(best.sizes)}"])
