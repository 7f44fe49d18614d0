"""The communication of a traced step: bytes from the program that ran, times from the trace, beside what was derived.

Bandwidths as in NCCL-tests (doc/PERFORMANCE.md): the algorithm bandwidth is the size of the whole array over the time;
the bus bandwidth is that times what each device has to send for a byte of it, and can be held against the link's speed.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunix.config import DeviceKind
from tunix.costs.hlo import Collective
from tunix.costs.timeline import UNKNOWN, Timeline
from tunix.costs.transfers import Transfer, seconds

BUS_FACTORS = {  # by the number n of devices in a group
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
}
NO_SCOPE = re.compile(r"while|body|closed_call|checkpoint|cond|branch_\d+_fun|rematted_computation|.*->.*|")


@dataclass(frozen=True)
class Row:
    """One collective of a step, or all of one kind on the same axes; of one step, seconds are the devices' mean."""

    kind: str
    axes: tuple[str, ...]  # of the mesh, without those of size 1
    group_size: int
    count: int
    num_bytes: int  # of the whole arrays, all executions together
    time_s: float
    exposed_s: float  # while nothing else ran on the device
    name: str = ""
    dtype: str = ""
    scope: str = ""  # named scopes of the source, and the phase

    @property
    def algorithm_gb_per_s(self) -> float:
        return self.num_bytes / self.time_s / 1e9 if self.time_s else 0.0

    @property
    def bus_gb_per_s(self) -> float:
        return self.algorithm_gb_per_s * BUS_FACTORS[self.kind](self.group_size)


@dataclass(frozen=True)
class Predicted:
    """Of one kind on the same axes, in one step."""

    num_bytes: int
    time_s: float | None  # None where the kind of device is not known


@dataclass(frozen=True)
class Communication:
    """Of the steps that were traced."""

    first_step: int
    num_steps: int
    timelines: dict[str, Timeline]  # by device, like "process 0 device 3"
    rows: list[Row]  # one for each collective, longest first
    per_axis: list[Row]
    predicted: dict[tuple[str, tuple[str, ...]], Predicted]
    unnamed_s: float  # of kernels that the trace ascribes to no instruction

    @property
    def steps(self) -> str:
        return f"steps {self.first_step} to {self.first_step + self.num_steps - 1}"

    def mean(self, name: str) -> float:
        """Seconds of a step in which `name` of a timeline holds, over devices."""
        return sum(getattr(each, name) for each in self.timelines.values()) / len(self.timelines) / self.num_steps

    @property
    def lost(self) -> int:
        """Executions that the program must have had and the trace does not show."""
        seen: dict[str, int] = defaultdict(int)
        for each in self.timelines.values():
            for name, (count, *_) in each.collectives.items():
                seen[name] += count
        due = self.num_steps * len(self.timelines)
        return sum(max(0, row.count * due - seen[row.name]) for row in self.rows)


def measured(
    first_step: int,
    num_steps: int,
    timelines: dict[str, Timeline],
    collectives: Iterable[Collective],
    sizes: Mapping[str, int],
    predicted: dict[tuple[str, tuple[str, ...]], Predicted],
) -> Communication:
    """`sizes` are those of the mesh; `timelines` must not be empty."""
    share = 1 / (num_steps * len(timelines))

    def times(name: str) -> tuple[float, float]:
        found = [each.collectives[name] for each in timelines.values() if name in each.collectives]
        return share * sum(time for _, time, _ in found), share * sum(exposed for *_, exposed in found)

    rows = [
        Row(each.kind, each.axes(sizes), each.group_size, each.times, each.num_bytes * each.times, *times(each.name),
            each.name, each.dtype, readable(each.scope))
        for each in collectives
        if each.group_size > 1
    ]  # fmt: skip
    rows.sort(key=lambda row: -row.time_s)
    return Communication(first_step, num_steps, timelines, rows, _per_axis(rows), predicted, times(UNKNOWN)[0])


def _per_axis(rows: list[Row]) -> list[Row]:
    together: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        together[row.kind, row.axes, row.group_size].append(row)
    found = [
        Row(*key, *(sum(getattr(row, name) for row in ours) for name in ("count", "num_bytes", "time_s", "exposed_s")))
        for key, ours in together.items()
    ]
    return sorted(found, key=lambda row: -row.time_s)


def predict(
    transfers: Iterable[Transfer], sizes: Mapping[str, int], kind: DeviceKind | None, per_node: int
) -> dict[tuple[str, tuple[str, ...]], Predicted]:
    """What `tunix.costs` derives for the config, by kind and axes."""
    found: dict[tuple[str, tuple[str, ...]], Predicted] = {}
    for transfer in transfers:
        axes = tuple(axis for axis in transfer.axes if sizes[axis] > 1)
        if not axes:
            continue
        before = found.get((transfer.kind, axes), Predicted(0, 0.0 if kind else None))
        time_s = None
        if kind and before.time_s is not None:
            time_s = before.time_s + seconds(transfer, dict(sizes), kind, per_node)
        found[transfer.kind, axes] = Predicted(before.num_bytes + transfer.num_bytes, time_s)
    return found


def readable(op_name: str) -> str:
    """JAX's name stack as the scopes of the source and the phase: `blocks/mlp backward`.

    XLA writes the stacks of what it has put together as `common/(one:other)`, or on GPUs writes none.
    """
    if not op_name:
        return ""
    common, bracket, rest = op_name.partition("/(")
    stacks = [f"{common}/{part}" for part in rest.removesuffix(")").split(":")] if bracket else [op_name]
    found = list(dict.fromkeys(_scopes(stack) for stack in stacks))
    phases = list(dict.fromkeys(_phase(stack) for stack in stacks))
    return f"{' + '.join(filter(None, found)) or 'step'} {'/'.join(phases)}"


def _scopes(stack: str) -> str:
    parts = [re.sub(r"transpose\(|jvp\(|[()]", "", part) for part in stack.split("/")[1:-1]]
    return "/".join(part for part in parts if not NO_SCOPE.fullmatch(part))


def _phase(stack: str) -> str:
    if "rematted_computation" in stack:
        return "recomputed"
    return "backward" if "transpose(" in stack else "forward" if "jvp(" in stack else "update"
