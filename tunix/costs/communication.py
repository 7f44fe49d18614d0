"""Communication of a traced step: bytes come from the compiled program, times from the trace.

Beside each measured row stands the prediction that `tunix.costs.derived` makes from the config.

Two bandwidths are reported, defined as in NCCL-tests (doc/PERFORMANCE.md). The algorithm bandwidth is the size of the
whole array divided by the time. The bus bandwidth is the algorithm bandwidth times the bytes that each device has to
send for one byte of the array (`BUS_FACTORS`); it can be compared with the speed of the link.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunix.config import DeviceKind
from tunix.costs.hlo import Collective
from tunix.costs.links import BUS_FACTORS
from tunix.costs.timeline import UNKNOWN, Timeline
from tunix.costs.transfers import Transfer, predict_seconds

# Parts of JAX's name stack that JAX adds by itself; only the names that our source gave are shown.
NO_SCOPE = re.compile(r"while|body|closed_call|checkpoint|cond|branch_\d+_fun|rematted_computation|.*->.*|")


@dataclass(frozen=True)
class Row:
    """One collective of a step, or the sum of all collectives of one kind over the same mesh axes.

    Numbers are for one step. Seconds are means over devices.
    """

    kind: str
    axes: tuple[str, ...]  # mesh axes, without those of size 1
    group_size: int
    count: int  # executions in one step
    num_bytes: int  # size of the whole arrays, summed over all executions
    time_s: float
    exposed_s: float  # time during which the device did nothing else
    name: str = ""  # the HLO instruction; empty for a sum
    dtype: str = ""
    scope: str = ""  # named scopes of the source, and the phase (forward, backward, ...)

    @property
    def algorithm_gb_per_s(self) -> float:
        return self.num_bytes / self.time_s / 1e9 if self.time_s else 0.0

    @property
    def bus_gb_per_s(self) -> float:
        return self.algorithm_gb_per_s * BUS_FACTORS[self.kind](self.group_size)


@dataclass(frozen=True)
class Prediction:
    """Predicted communication of one kind over the same mesh axes, in one step."""

    num_bytes: int
    time_s: float | None  # None if the speed of this kind of device is not known


@dataclass(frozen=True)
class Communication:
    """Communication of the traced steps, over all traced devices."""

    first_step: int
    num_steps: int
    timelines: dict[str, Timeline]  # keyed by device, like "process 0 device 3"
    rows: list[Row]  # one row per collective, longest first
    per_axis: list[Row]  # one row per kind and mesh axes, longest first
    predicted: dict[tuple[str, tuple[str, ...]], Prediction]  # keyed by kind and mesh axes
    unnamed_s: float  # seconds per step of NCCL kernels for which the trace names no instruction

    @property
    def steps(self) -> str:
        return f"steps {self.first_step} to {self.first_step + self.num_steps - 1}"

    def average(self, name: str) -> float:
        """Return the mean of `Timeline.name` over devices and steps, in seconds per step."""
        total_s = sum(getattr(timeline, name) for timeline in self.timelines.values())
        return total_s / len(self.timelines) / self.num_steps

    @property
    def num_lost(self) -> int:
        """Number of executions that the program ran and the trace lacks; the profiler's buffer was too small."""
        seen: dict[str, int] = defaultdict(int)
        for timeline in self.timelines.values():
            for name, (count, *_) in timeline.collectives.items():
                seen[name] += count
        num_runs = self.num_steps * len(self.timelines)
        return sum(max(0, row.count * num_runs - seen[row.name]) for row in self.rows)


def measure(
    first_step: int,
    num_steps: int,
    timelines: dict[str, Timeline],
    collectives: Iterable[Collective],
    sizes: Mapping[str, int],
    predicted: dict[tuple[str, tuple[str, ...]], Prediction],
) -> Communication:
    """Join the collectives of the compiled step with the times that the trace shows for them.

    `timelines` must not be empty. `sizes` are the sizes of the mesh axes.
    """
    share = 1 / (num_steps * len(timelines))

    def average_times(name: str) -> tuple[float, float]:
        """Return mean time and exposed time of the instruction `name`, in seconds per step and device."""
        totals = [each.collectives[name] for each in timelines.values() if name in each.collectives]
        return share * sum(time_s for _, time_s, _ in totals), share * sum(exposed_s for *_, exposed_s in totals)

    rows = []
    for collective in collectives:
        if collective.group_size > 1:
            time_s, exposed_s = average_times(collective.name)
            rows.append(
                Row(
                    kind=collective.kind,
                    axes=collective.find_axes(sizes),
                    group_size=collective.group_size,
                    count=collective.times,
                    num_bytes=collective.num_bytes * collective.times,
                    time_s=time_s,
                    exposed_s=exposed_s,
                    name=collective.name,
                    dtype=collective.dtype,
                    scope=format_scope(collective.scope),
                )
            )
    rows.sort(key=lambda row: -row.time_s)
    return Communication(
        first_step, num_steps, timelines, rows, _sum_by_axes(rows), predicted, average_times(UNKNOWN)[0]
    )


def _sum_by_axes(rows: list[Row]) -> list[Row]:
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.kind, row.axes, row.group_size].append(row)
    sums = []
    for key, members in groups.items():
        totals = (sum(getattr(row, name) for row in members) for name in ("count", "num_bytes", "time_s", "exposed_s"))
        sums.append(Row(*key, *totals))
    return sorted(sums, key=lambda row: -row.time_s)


def predict(
    transfers: Iterable[Transfer], sizes: Mapping[str, int], kind: DeviceKind | None, per_node: int
) -> dict[tuple[str, tuple[str, ...]], Prediction]:
    """Sum the transfers that `tunix.costs.derived` derives from a config, by kind and mesh axes."""
    predicted: dict[tuple[str, tuple[str, ...]], Prediction] = {}
    for transfer in transfers:
        axes = tuple(axis for axis in transfer.axes if sizes[axis] > 1)
        if not axes:
            continue
        before = predicted.get((transfer.kind, axes), Prediction(0, 0.0 if kind else None))
        time_s = None
        if kind and before.time_s is not None:
            time_s = before.time_s + predict_seconds(transfer, dict(sizes), kind, per_node)
        predicted[transfer.kind, axes] = Prediction(before.num_bytes + transfer.num_bytes, time_s)
    return predicted


def format_scope(op_name: str) -> str:
    """Format JAX's name stack as the scopes of the source and the phase: `blocks/mlp backward`.

    Where XLA has merged instructions, it writes their stacks as `common/(one:other)`. On GPUs it may write none.
    """
    if not op_name:
        return ""
    common, bracket, rest = op_name.partition("/(")
    stacks = [f"{common}/{part}" for part in rest.removesuffix(")").split(":")] if bracket else [op_name]
    scopes = list(dict.fromkeys(_read_scopes(stack) for stack in stacks))
    phases = list(dict.fromkeys(_read_phase(stack) for stack in stacks))
    return f"{' + '.join(filter(None, scopes)) or 'step'} {'/'.join(phases)}"


def _read_scopes(stack: str) -> str:
    parts = [re.sub(r"transpose\(|jvp\(|[()]", "", part) for part in stack.split("/")[1:-1]]
    return "/".join(part for part in parts if not NO_SCOPE.fullmatch(part))


def _read_phase(stack: str) -> str:
    # jax.grad wraps the names of the forward pass in jvp(...), and of the backward pass in transpose(jvp(...)).
    if "rematted_computation" in stack:
        return "recomputed"
    if "transpose(" in stack:
        return "backward"
    return "forward" if "jvp(" in stack else "update"
