"""A plan as text tables, as JSON, and as files."""

import json
import math
import os
import shlex
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from tunix.base.errors import UserError
from tunix.base.figures import INK, PALE, Bar, Panel, plot
from tunix.base.files import expand_home, find_existing
from tunix.base.text import format_table
from tunix.costs.devices import HBM_SHARE, Cluster, find_matmul_tflops
from tunix.data.teacher_logits import describe_logits
from tunix.plan.compile import GET_COMPILER, find_backend
from tunix.plan.ranking import GIB, MANY, Candidate, Ranking, count_usable_bytes
from tunix.sharding.mesh import format_mesh_shape

MEMORY = {
    "weights": "#2a6f97",
    "optimizer": "#61a5c2",
    "reference": "#8d99ae",
    "teacher": "#b08968",
    "gradients": "#e9c46a",
    "temporary": "#c9d6df",
}
TIME = {"arithmetic": "#2a6f97", "hidden communication": "#c9d6df", "exposed communication": "#d1495b"}
MAX_ROWS = 16  # meshes in the image

RECOMPUTED_SHARE = 0.01  # of the FLOPs of a step, from which a plan names what XLA computes once more


def plot_plan(ranking: Ranking, cluster: Cluster) -> bytes:
    """Return a PNG of the meshes that divide model and batch, best first.

    It shows the memory of each beside the limit of a device, and the parts of the time of its step.
    """
    candidates = [*ranking.fit, *ranking.too_large][:MAX_ROWS]
    labels = [(format_mesh_shape(each.sizes), INK if each.memory <= ranking.limit else PALE) for each in candidates]
    colors = {name: color for name, color in MEMORY.items() if any(name in each.num_bytes for each in candidates)}
    bars = [
        Bar({name: size / GIB for name, size in each.num_bytes.items()}, f"{each.memory / GIB:.1f}, {each.source}")
        for each in candidates
    ]
    memory = Panel("memory of a device, GiB", colors, bars, ranking.limit / GIB)
    time = Panel("time of a step, s (predicted)", TIME, [_make_time_bar(each) for each in candidates])
    return plot(f"{cluster}: predicted, not measured", labels, [memory, time])


def _make_time_bar(candidate: Candidate) -> Bar:
    """Return the bar of a step's time.

    Hidden communication runs at the same time as arithmetic, so it is drawn as a part of the arithmetic's length.
    """
    time = candidate.time
    hidden = min(time.compute_s, time.communication_s - time.exposed_s)
    parts = dict(zip(TIME, (time.compute_s - hidden, hidden, time.exposed_s), strict=True))
    return Bar(parts, f"{time.step_s:.3g} s, MFU {candidate.mfu:.0%}")


LABEL = "derived, compiled and predicted, not measured"


def format_text(ranking: Ranking, cluster: Cluster, overrides: list[str]) -> str:
    """Format the table of meshes, the reasons why others are refused, and the traffic and command of the best mesh."""
    candidates = [*ranking.fit, *ranking.too_large]
    lines = [_format_meshes(ranking, cluster)] if candidates else []
    if ranking.too_large:
        lines.append(f"! more than the {ranking.limit / GIB:.1f} GiB that a device may use ({ranking.limit_key})")
    lines += _list_refused(ranking.refused)
    if ranking.num_slower or ranking.num_hopeless:
        lines.append(
            f"left out: {ranking.num_slower:,} meshes that are predicted to be slower, and {ranking.num_hopeless:,} "
            "whose weights, optimizer and gradients alone are too large"
        )
    lines += [f"{format_mesh_shape(each.sizes)} is not compiled: {each.note}" for each in candidates if each.note]
    if ranking.global_batch_size:
        lines.append(f"meshes are compared on one global batch, of {ranking.global_batch_size:,} sequences")
    if ranking.chooses_remat and candidates:
        lines += _list_remat(candidates)
    for key, usual in (("cp_exchange", ("none", "ulysses")), ("expert_exchange", ("gather",))):
        for each in candidates:
            if (name := getattr(each.choices.layout, key)) not in usual:
                lines.append(f"{format_mesh_shape(each.sizes)} takes model.{key}={name}")
    lines += _list_recomputing(candidates, cluster)
    lines += _list_assumptions(cluster, candidates)
    if ranking.fit:
        lines += _list_places(ranking.fit[0], cluster)
        lines += _describe_run(ranking.fit[0], cluster)
        if ranking.fit[0].compiled:
            lines += ["", _format_traffic(ranking.fit[0])]
        if ranking.fit[0].stages:
            lines += ["", _format_stages(ranking.fit[0])]
        lines += ["", format_command(overrides, ranking)]
    return "\n".join(lines)


def _list_refused(refused: dict[str, str]) -> list[str]:
    """Return a line for each reason, with its meshes; of many meshes, a line with one mesh for each key."""
    if len(refused) <= MANY:
        meshes: dict[str, list[str]] = {}
        for mesh, reason in refused.items():
            meshes.setdefault(reason, []).append(mesh)
        return [f"refused {' '.join(names)}: {reason}" for reason, names in meshes.items()]
    # Many meshes are refused for the same key, which a reason names before its first `=`.
    examples: dict[str, list[str]] = {}
    for mesh, reason in refused.items():
        examples.setdefault(reason.split(" is not divisible")[0].split("=")[0], []).append(f"{mesh}: {reason}")
    return [f"refused {len(lines):,} meshes, like {lines[0]}" for lines in examples.values()]


def _format_meshes(ranking: Ranking, cluster: Cluster) -> str:
    """Format a table with a row for each mesh that divides the model."""
    shown = [*ranking.fit, *ranking.too_large]
    others = [name for name in ("reference", "teacher") if any(name in each.num_bytes for each in shown)]
    memory = ("weights", "optimizer", *others, "gradients", "temporary")
    time = ("compute s", "exposed s", "step s", "tokens/s", "MFU", "exposed share")
    rollout = ("rollout GiB", "rollout s") if any(each.rollout for each in shown) else ()
    rows = []
    for each in shown:
        step = each.time
        rows.append(
            [
                format_mesh_shape(each.sizes),
                str(each.cfg.training.sequences_per_shard),
                each.source,
                *(f"{each.num_bytes.get(name, 0) / GIB:.2f}" for name in memory),
                f"{each.memory / GIB:.2f}{' !' if each.memory > ranking.limit else ''}",
                *(f"{seconds:.3f}" for seconds in (step.compute_s, step.exposed_s, step.step_s)),
                *(f"{each.tokens_per_s:,.0f}", f"{each.mfu:.1%}", f"{step.exposed_s / step.step_s:.0%}"),
                *((f"{each.rollout_memory / GIB:.2f}", f"{each.rollout_s:.3f}") if rollout else ()),
            ]
        )
    columns = ("mesh", "batch", "from", *memory, "GiB in all", *time, *rollout)
    return format_table(f"{cluster}: {LABEL}", columns, ("mesh", "from"), rows)


def _format_traffic(candidate: Candidate) -> str:
    """Format a table of the compiled step's collectives by mesh axis, without those of less than 1 MiB."""
    assert candidate.compiled
    title, left = f"collectives of a step on {format_mesh_shape(candidate.sizes)}", ("axes", "collective", "dtype")
    rows = [
        ("+".join(each.axes), each.kind, each.dtype, f"{each.count:,}", f"{each.num_bytes / GIB:.3f}")
        for each in candidate.compiled.traffic
        if each.num_bytes >= 2**20
    ]
    return format_table(f"{title}, per device group", (*left, "count", "GiB"), left, rows)


def _format_stages(candidate: Candidate) -> str:
    """Format a table of the batches of training.batch_stages, and of the batch that follows them."""
    by_shape, rows = {each.choices.shape: each for each in (*candidate.stages, candidate)}, []
    for period in candidate.cfg.training.batch_schedule(candidate.sizes).periods:
        each, shape = by_shape[period.shape], period.shape
        batch = (f"{number:,}" for number in (shape.num_sequences, shape.seq_len, shape.num_tokens))
        predicted = f"{each.memory / GIB:.2f}", f"{each.time.step_s:.3f}", f"{each.tokens_per_s:,.0f}"
        rows.append([period.to_text, *batch, each.source, *predicted])
    columns = ("steps", "sequences", "tokens each", "tokens a step", "from", "GiB in all", "step s", "tokens/s")
    title = f"stages of the batch on {format_mesh_shape(candidate.sizes)}"
    return format_table(title, columns, ("steps", "from"), rows)


def _describe_run(candidate: Candidate, cluster: Cluster) -> list[str]:
    """Return a line that says how long the whole run takes; none where only the data tell how many steps it has."""
    if (run := candidate.predict_run()) is None:
        return []
    steps, seconds = run
    first, hours = candidate.cfg.training.describe_first_limit(), seconds * cluster.num_devices / 3600
    return [
        f"{steps:,} steps{first} on {format_mesh_shape(candidate.sizes)} take {timedelta(seconds=round(seconds))}, "
        f"{hours:,.1f} GPU hours, without starts, evaluations and saves (predicted)"
    ]


def _list_places(candidate: Candidate, cluster: Cluster) -> list[str]:
    """Return a line that says which devices of a node learn and which draw, and what new weights cost; or none."""
    rollout, learning = candidate.rollout, candidate.cluster.per_node
    if rollout is None or rollout.apart is None:
        return []
    copy_s, gather_s = candidate.weights_s
    resting, gathered = rollout.resting_bytes / GIB, rollout.costs.num_bytes["gathered weights"] / GIB
    return [
        f"of each of {cluster.num_nodes} node(s), devices 0 to {learning - 1} learn, on "
        f"{format_mesh_shape(candidate.sizes)} of all nodes, and {learning} to {cluster.per_node - 1} draw, on "
        f"{format_mesh_shape(rollout.apart.shape)}; for a rollout each of these gets {resting:.2f} GiB "
        f"of weights from its node ({copy_s:.3f} s) and gathers them to {gathered:.2f} GiB ({gather_s:.3f} s)"
    ]


def _list_recomputing(candidates: list[Candidate], cluster: Cluster) -> list[str]:
    """Return lines that name the compiled steps in which XLA computes much once more, and what to set."""
    lines = []
    for each in candidates:
        time = each.compiled.step_time if each.compiled else None
        if each.compiled and time is not None and time.recomputed_flops > RECOMPUTED_SHARE * time.flops:
            estimate = each.compiled.memory + 16 * GIB  # XLA's may be so much above what the program then takes
            share = estimate / count_usable_bytes(each.cfg, cluster)  # XLA allows this factor of them
            slop_factor = max(112, 10 * math.ceil(10 * share))
            lines.append(
                f"{format_mesh_shape(each.sizes)}: XLA takes the step for larger than the memory, and computes "
                f"{time.recomputed_flops / time.flops:.0%} of its FLOPs once more, beside what training.remat says. "
                "Its estimate may be 10 GiB too large: it uses more of the memory with "
                f"+training.compiler_options.xla_gpu_memory_limit_slop_factor={slop_factor} (its own value is 95). "
                "Or set training.remat=full"
            )
    return lines


def _list_assumptions(cluster: Cluster, candidates: list[Candidate]) -> list[str]:
    kind, narrow = cluster.kind, ""
    if share := max((each.costs.matmul_share for each in candidates), default=0.0):
        dtype = candidates[0].cfg.training.matmul_dtype
        assert dtype is not None
        narrow = f" ({share:.0%} of the arithmetic {dtype}: of {find_matmul_tflops(kind, dtype):g})"
    lines = [
        f"predicted with matrix products at {kind.efficiency:.0%} of {kind.peak_tflops:g} TFLOP/s{narrow}, the rest at "
        f"{HBM_SHARE:.0%} of {kind.hbm_gb_per_s:g} GB/s, "
        f"collectives as NCCL predicts them, with links of {kind.link_gb_per_s:g} GB/s in a node and "
        f"{kind.nics_per_node} network cards a node of {kind.network.nic_gb_per_s:g} GB/s"
    ]
    if any(each.rollout for each in candidates):
        lines.append(
            "a rollout is derived, with every answer as long as it may be; its memory counts weights and optimizer "
            "too. Tokens/s are those of steps and rollouts together, MFU is that of steps alone"
        )
    if seconds := max((each.outside_s for each in candidates), default=0.0):
        lines.append(
            f"tokens/s count a forward pass beside each step too, of at most {seconds:.3f} s: of the model of step 0 "
            "with task=grpo, of what compares all rows with task=kto and task=embed"
        )
    if candidates and (cfg := candidates[0].cfg).task.offline_top_k is not None:
        learnt, gib = describe_logits(cfg, cfg.model.vocab_size), candidates[0].costs.standalone_bytes / GIB
        lines.append(f"the teacher takes {gib:.2f} GiB of a device alone, before the state: a run learns {learnt}")
    if any(each.source == "compiled by CPU" for each in candidates):
        lines.append(
            "JAX's CUDA plugin is not installed, so the CPU backend compiled: memory is an upper bound (it computes "
            f"bfloat16 in float32), times are derived. For the GPU's own program: {GET_COMPILER}"
        )
    elif candidates and all(each.compiled is None for each in candidates):
        lines.append("nothing is compiled: temporary memory is an estimate, and all of a schedule's overlap is assumed")
    if any(each.source != "compiled" and each.cfg.optimizer.name == "muon" for each in candidates):
        lines.append(
            "derived numbers leave out the matrix products of Muon, which take much memory, communication and time; "
            "compile to see them (plan.num_compiled)"
        )
    return lines


def make_record(candidate: Candidate) -> dict[str, Any]:
    """Return a mesh as --json shows it: seconds, bytes and FLOPs of one device and one step."""
    derived_bytes: dict[str, int] = {}
    for transfer in candidate.costs.transfers:
        name = f"{transfer.kind} {'+'.join(transfer.axes)}"
        derived_bytes[name] = derived_bytes.get(name, 0) + transfer.num_bytes
    compiled, run, rollout, rollout_devices = candidate.compiled, candidate.predict_run(), candidate.rollout, None
    if rollout is not None and rollout.apart is not None:
        rollout_devices = {
            "mesh_shape": format_mesh_shape(rollout.apart.shape),
            "weight_bytes_per_device": rollout.resting_bytes,
            **dict(zip(("copy_s", "gather_s"), candidate.weights_s, strict=True)),
        }
    return {
        "mesh_shape": format_mesh_shape(candidate.sizes),
        "micro_batch_size": candidate.cfg.training.sequences_per_shard,
        "remat": candidate.choices.remat.policy,
        "cp_exchange": candidate.choices.layout.cp_exchange,
        "expert_exchange": candidate.choices.layout.expert_exchange,
        "source": candidate.source,
        "bytes_per_device": {**candidate.num_bytes, "total": candidate.memory},
        "derived_bytes_per_device": {**candidate.costs.num_bytes, "total": candidate.costs.memory},
        "derived_bytes_moved": derived_bytes,
        "collectives": [asdict(each) for each in compiled.traffic] if compiled else None,
        "compile_s": compiled.compile_s if compiled else None,
        "not_compiled": candidate.note or None,
        "tflop_per_step_per_device": candidate.time.flops / 1e12,
        "tokens_per_step": candidate.costs.tokens_per_step,
        "predicted": {
            "compute_s": candidate.time.compute_s,
            "communication_s": candidate.time.communication_s,
            "exposed_communication_s": candidate.time.exposed_s,
            "exposed_share": candidate.time.exposed_s / candidate.time.step_s,
            "step_time_s": candidate.time.step_s,
            "tokens_per_s": candidate.tokens_per_s,
            "mfu": candidate.mfu,
            "steps": run and run[0],
            "run_s": run and run[1],
            "rollout_s": candidate.rollout_s if candidate.rollout else None,
            "outside_s": candidate.outside_s,
        },
        "rollout_bytes_per_device": candidate.rollout_memory or None,
        "rollout_devices": rollout_devices,
        "batch_stages": [make_record(stage) for stage in candidate.stages],
    }


def format_json(ranking: Ranking, cluster: Cluster, overrides: list[str]) -> str:
    """Format the whole ranking as JSON."""
    values = {
        "note": LABEL,
        "device": cluster.kind.model_dump(),
        "compiler": find_backend(),
        "limit_bytes": round(ranking.limit),
        "fit": [make_record(each) for each in ranking.fit],
        "too_large": [make_record(each) for each in ranking.too_large],
        "refused": ranking.refused,
        "command": format_command(overrides, ranking) if ranking.fit else None,
    }
    return json.dumps(values, indent=1)


def find_folder(output: str) -> Path:
    """Return the folder of `plan.output`; raises `UserError` where it cannot be made."""
    folder = expand_home(output).absolute()
    above = find_existing(folder)
    if not above.is_dir() or not os.access(above, os.W_OK):
        problem = "is write-protected" if above.is_dir() else "is not a folder"
        raise UserError(f"plan.output={output} cannot be written: {above} {problem}; name another folder")
    return folder


def _list_remat(candidates: list[Candidate]) -> list[str]:
    """Return which policy each mesh chose: the most common one in a line without their names."""
    by_policy: dict[str, list[str]] = {}
    for each in candidates:
        by_policy.setdefault(each.choices.remat.policy, []).append(format_mesh_shape(each.sizes))
    *others, common = sorted(by_policy, key=lambda policy: len(by_policy[policy]))
    lines = [f"training.remat={policy}: {', '.join(by_policy[policy])}" for policy in others]
    return [*lines, f"training.remat={common}: {'the others' if others else 'every mesh'}"]


def save(folder: Path, ranking: Ranking, cluster: Cluster, overrides: list[str]) -> None:
    """Write plan.txt, plan.json and plan.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.txt").write_text(f"{format_text(ranking, cluster, overrides)}\n")
    (folder / "plan.json").write_text(f"{format_json(ranking, cluster, overrides)}\n")
    (folder / "plan.png").write_bytes(plot_plan(ranking, cluster))


def format_command(overrides: list[str], ranking: Ranking) -> str:
    """Return the command that trains on the best mesh."""
    best = ranking.fit[0]
    key = ranking.open_key
    # Of the keys of `plan` a run reads those by which `auto` chooses: its share of the memory, and the network.
    replaced = {"model.mesh_shape", "mesh_shape", "training.remat_memory_gib", f"training.{key}"}
    replaced |= {f"plan.{name}" for name in ("topology", "choose_mesh", "num_compiled", "output")}
    replaced |= {"training.gradient_accumulation_steps"} if ranking.replaces_accumulation else set()
    words = [word for word in overrides if word.lstrip("+").partition("=")[0] not in replaced]
    if key:
        words.append(f"training.{key}={getattr(best.cfg.training, key)}")
    if ranking.replaces_accumulation:  # which a saved run or a file of values may set, too
        words.append("training.gradient_accumulation_steps=null")
    if ranking.global_batch_size:
        words.append(f"training.global_batch_size={ranking.global_batch_size}")
    return shlex.join(["python", "run_training.py", *words, f"model.mesh_shape={format_mesh_shape(best.sizes)}"])
