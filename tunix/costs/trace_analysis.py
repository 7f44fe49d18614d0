"""Traces of a step: when each device computed and communicated, beside what a plan predicts.

Each operation in the trace is an interval of time. Collectives and all other operations are two sets of intervals,
and communication that no other operation overlaps is exposed: the device did nothing but wait for it.
"""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from jax.profiler import ProfileData

from tunix.base.figures import INK, Bar, Panel, plot
from tunix.base.text import format_table
from tunix.config import DeviceKind
from tunix.costs.communication import Transfer, predict_seconds
from tunix.costs.devices import BUS_FACTORS
from tunix.costs.hlo import Collective

GPU = re.compile(r"/device:GPU:\d+")
NCCL = re.compile(r"nccl(?:Dev)?Kernel", re.IGNORECASE)
UNKNOWN = "(not named)"  # NCCL kernels for which the trace names no instruction


@dataclass(frozen=True)
class Event:
    """One operation on one device."""

    device: str  # its number within its process
    name: str  # the HLO instruction, or `UNKNOWN`
    start_ns: float
    end_ns: float


@dataclass
class Timeline:
    """Seconds of one device, summed over all traced steps."""

    span_s: float = 0.0  # from the first operation of a step to its last
    communication_s: float = 0.0  # at least one collective runs
    exposed_s: float = 0.0  # at least one collective runs, and nothing else
    # Executions, time and exposed time of each collective, keyed by its instruction.
    collectives: dict[str, tuple[int, float, float]] = field(default_factory=dict)


def read_events(trace: ProfileData, module: str, communicating: set[str]) -> Iterator[Event]:
    """Yield the operations of the program `module`; `communicating` are the names of its collectives.

    A trace is planes of lines of events. On GPUs a plane is a device, a line is a stream, an event is a kernel, and the
    event's `hlo_op` is its instruction. On CPUs a line is a thread, which all devices share, and the event's
    `device_ordinal` is its device.
    """
    planes = [plane for plane in trace.planes if GPU.fullmatch(plane.name)]
    for plane in planes or trace.planes:
        for line in plane.lines:
            if planes and not line.name.startswith("Stream"):
                continue  # other lines repeat the same operations, grouped by name or by step
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module", module) != module or not ("hlo_op" in stats or NCCL.match(event.name)):
                    continue
                name = str(stats.get("hlo_op", UNKNOWN))
                if NCCL.match(event.name) and name not in communicating:
                    name = UNKNOWN
                device = plane.name.rpartition(":")[2] if planes else str(stats["device_ordinal"])
                yield Event(device, name, event.start_ns, event.end_ns)


def compute_device_times(
    events: Iterator[Event], num_steps: int, communicating: set[str], control_flow: set[str]
) -> dict[str, Timeline]:
    """Measure each device over `num_steps` steps; the keys are devices.

    Operations in neither set are arithmetic or copies. They can hide communication. An operation of `control_flow`
    lasts as long as the operations that it runs, so it is left out.
    """
    compute: dict[str, list[Event]] = defaultdict(list)
    collectives: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.name not in control_flow:
            is_collective = event.name in communicating or event.name == UNKNOWN
            (collectives if is_collective else compute)[event.device].append(event)
    devices = sorted({*compute, *collectives})
    return {device: _compute_device_time(compute[device], collectives[device], num_steps) for device in devices}


def _compute_device_time(compute: list[Event], collectives: list[Event], num_steps: int) -> Timeline:
    moves = _list_intervals(collectives)  # nanoseconds, [collectives, 2]
    busy = _merge_intervals(_list_intervals(compute))
    lengths = moves[:, 1] - moves[:, 0]
    exposed = lengths - _compute_covered(moves, busy)
    totals: dict[str, tuple[int, float, float]] = {}
    for event, length, alone in zip(collectives, lengths.tolist(), exposed.tolist(), strict=True):
        count, time_s, exposed_s = totals.get(event.name, (0, 0.0, 0.0))
        totals[event.name] = (count + 1, time_s + length / 1e9, exposed_s + alone / 1e9)
    # Collectives may overlap each other; their union counts such a time once.
    communicating = _merge_intervals(moves)
    communication = float(np.sum(communicating[:, 1] - communicating[:, 0]))
    exposed_ns = communication - float(np.sum(_compute_covered(communicating, busy)))
    span_ns = _compute_span([*compute, *collectives], num_steps)
    return Timeline(span_ns / 1e9, communication / 1e9, exposed_ns / 1e9, totals)


def _compute_span(events: list[Event], num_steps: int) -> float:
    """Return the nanoseconds within steps, without the time between two steps.

    The trace does not say where a step begins. An instruction that ran exactly `num_steps` times ran once in each step,
    so the k-th runs of all such instructions belong to step k.
    """
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        times[event.name].append((event.start_ns, event.end_ns))
    once = [sorted(runs) for runs in times.values() if len(runs) == num_steps]
    return sum(max(end for _, end in step) - min(start for start, _ in step) for step in zip(*once, strict=True))


def _list_intervals(events: list[Event]) -> np.ndarray:
    return np.array([(event.start_ns, event.end_ns) for event in events]).reshape(-1, 2)


def _merge_intervals(intervals: np.ndarray) -> np.ndarray:
    """Merge intervals [intervals, 2] that overlap or touch; the result is sorted."""
    if not len(intervals):
        return intervals
    sorted_ = intervals[np.argsort(intervals[:, 0])]
    starts, ends = sorted_[:, 0], np.maximum.accumulate(sorted_[:, 1])
    begin = np.concatenate([[True], starts[1:] > ends[:-1]])  # a gap lies before this interval
    return np.stack([starts[begin], ends[np.concatenate([begin[1:], [True]])]], axis=1)


def _compute_covered(intervals: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return how much of each interval the intervals `by` cover; `by` is a result of `_merge_intervals`."""
    if not len(by):
        return np.zeros(len(intervals))
    # What lies between two times is covered as much as what lies before the second, less what lies before the first.
    # If `by` is 0 to 4 and 6 to 8, it covers 5 before 7 and 3 before 3, and so 2 of the interval from 3 to 7.
    until = np.concatenate([[0.0], np.cumsum(by[:, 1] - by[:, 0])])  # total length of the first n of `by`

    def compute_before(time: np.ndarray) -> np.ndarray:
        """Return the total length of `by` before each time."""
        index = np.searchsorted(by[:, 0], time, side="right")
        return until[index] - np.maximum(0.0, by[np.maximum(index - 1, 0), 1] - time) * (index > 0)

    return compute_before(intervals[:, 1]) - compute_before(intervals[:, 0])


# Communication of a traced step: bytes come from the compiled program, times from the trace.
#
# Beside each measured row stands the prediction that `tunix.costs.step` makes from the config.
#
# Two bandwidths are reported, defined as in NCCL-tests (doc/PERFORMANCE.md). The algorithm bandwidth is the size of the
# whole array divided by the time. The bus bandwidth is the algorithm bandwidth times the bytes that each device has to
# send for one byte of the array (`BUS_FACTORS`); it can be compared with the speed of the link.

# Parts of JAX's name stack that JAX adds by itself; only the names that our source gave are shown.
NO_SCOPE = re.compile(r"while|body|closed_call|eval_jaxpr|checkpoint|cond|branch_\d+_fun|rematted_computation|.*->.*|")


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
        """Return the mean of the field `name` of timelines over devices and steps, in seconds per step."""
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
            group = collective.kind, collective.find_axes(sizes), collective.group_size
            num_bytes, named = collective.num_bytes * collective.times, (collective.name, collective.dtype)
            times = average_times(collective.name)
            rows.append(Row(*group, collective.times, num_bytes, *times, *named, format_scope(collective.scope)))
    rows.sort(key=lambda row: -row.time_s)
    sums: dict[tuple[str, tuple[str, ...], int], Row] = {}
    for row in rows:
        key = row.kind, row.axes, row.group_size
        before = sums.get(key, Row(*key, 0, 0, 0.0, 0.0))
        num_bytes, time_s = before.num_bytes + row.num_bytes, before.time_s + row.time_s
        sums[key] = Row(*key, before.count + row.count, num_bytes, time_s, before.exposed_s + row.exposed_s)
    per_axis = sorted(sums.values(), key=lambda row: -row.time_s)
    return Communication(first_step, num_steps, timelines, rows, per_axis, predicted, average_times(UNKNOWN)[0])


def predict(
    transfers: Iterable[Transfer], sizes: Mapping[str, int], kind: DeviceKind | None, per_node: int
) -> dict[tuple[str, tuple[str, ...]], Prediction]:
    """Sum the transfers that `tunix.costs.step` derives from a config, by kind and mesh axes."""
    predicted: dict[tuple[str, tuple[str, ...]], Prediction] = {}
    for transfer in transfers:
        if axes := tuple(axis for axis in transfer.axes if sizes[axis] > 1):
            before = predicted.get((transfer.kind, axes), Prediction(0, 0.0))
            time_s = (before.time_s or 0.0) + predict_seconds(transfer, dict(sizes), kind, per_node) if kind else None
            predicted[transfer.kind, axes] = Prediction(before.num_bytes + transfer.num_bytes, time_s)
    return predicted


def format_scope(op_name: str) -> str:
    """Format JAX's name stack as the scopes of the source and the phase: `blocks/mlp backward`.

    Where XLA has merged instructions, it writes their stacks as `common/(one:other)`. On GPUs it may write none.
    """
    if not op_name:
        return ""
    common, bracket, remaining = op_name.partition("/(")
    stacks = [f"{common}/{part}" for part in remaining.removesuffix(")").split(":")] if bracket else [op_name]
    scopes: dict[str, None] = {}  # each once, in their order
    for stack in stacks:
        parts = [re.sub(r"transpose\(|jvp\(|[()]", "", part) for part in stack.split("/")[1:-1]]
        scopes["/".join(part for part in parts if not NO_SCOPE.fullmatch(part))] = None
    phases = dict.fromkeys(map(_read_phase, stacks))
    return f"{' + '.join(filter(None, scopes)) or 'step'} {'/'.join(phases)}"


def _read_phase(stack: str) -> str:
    # jax.grad wraps the names of the forward pass in jvp(...), and of the backward pass in transpose(jvp(...)).
    if "rematted_computation" in stack:
        return "recomputed"
    if "transpose(" in stack:
        return "backward"
    return "forward" if "jvp(" in stack else "update"


# What `profile/` of a run shows.

MIB = 2**20
TIMED = ("ms/step", "exposed ms", "algbw GB/s", "busbw GB/s")
COLUMNS = (
    "collective", "kind", "axes", "group_size", "dtype", "count_per_step", "bytes_per_step", "time_s", "exposed_s",
    "algorithm_gb_per_s", "bus_gb_per_s", "scope",
)  # fmt: skip


def format_text(communication: Communication) -> str:
    """Format the sums, then a table by mesh axis and a table by collective."""
    step_s, all_s, exposed_s = (communication.average(name) for name in ("span_s", "communication_s", "exposed_s"))
    timelines = communication.timelines
    devices = sorted(timelines, key=lambda device: timelines[device].communication_s)
    least, most = (
        _format_ms(timelines[device].communication_s / communication.num_steps) for device in (devices[0], devices[-1])
    )
    lines = [
        f"{communication.steps}, {len(devices)} devices traced; times are means over devices and steps",
        f"step {_format_ms(step_s)} ms = nothing but communication {_format_ms(exposed_s)} ms "
        f"+ the rest {_format_ms(step_s - exposed_s)} ms, "
        f"which hides {_format_ms(all_s - exposed_s)} ms of communication",
        f"in collectives, waiting included: {devices[0]} least, {least} ms; {devices[-1]} most, {most} ms. "
        "The others wait for the device that spends least",
    ]
    if communication.num_lost:
        lines.append(
            f"INCOMPLETE: the trace lacks {communication.num_lost:,} executions of collectives; trace fewer steps"
        )
    if communication.unnamed_s:
        unnamed_ms = _format_ms(communication.unnamed_s)
        lines.append(f"besides, {unnamed_ms} ms of NCCL kernels for which the trace names no instruction")
    return "\n".join([*lines, "", _format_axes(communication), "", _format_collectives(communication), ""])


def _format_axes(communication: Communication) -> str:
    left, rows = dict(communication.predicted), []
    for row in communication.per_axis:
        derived = _format_prediction(left.pop((row.kind, row.axes), None))
        measured = f"{row.count:,}", f"{row.num_bytes / MIB:,.2f}", *_format_times(row)
        rows.append(["+".join(row.axes), row.kind, *measured, *derived])
    # Predictions without a measured row: XLA chose another collective for them.
    for (kind, axes), prediction in left.items():
        rows.append(["+".join(axes), kind, "0", *["-"] * 5, *_format_prediction(prediction)])
    columns = ("axes", "kind", "count", "MiB/step", *TIMED, "derived MiB", "predicted ms")
    return format_table("by mesh axis, beside what is derived from the config", columns, ("axes", "kind"), rows, 200)


def _format_collectives(communication: Communication) -> str:
    rows = []
    for row in communication.rows:
        kib_each = row.num_bytes / row.count / 1024 if row.count else 0.0
        counts = f"{row.count:,}", f"{kib_each:,.1f}"
        rows.append([row.kind, "+".join(row.axes), row.dtype, *counts, *_format_times(row), row.scope, row.name])
    columns = ("kind", "axes", "dtype", "count", "KiB each", *TIMED, "where", "instruction")
    left = ("kind", "axes", "dtype", "where", "instruction")
    return format_table("by collective of the compiled step", columns, left, rows, 200)


def _format_prediction(derived: Prediction | None) -> tuple[str, str]:
    if derived is None:
        return "-", "-"
    return f"{derived.num_bytes / MIB:,.2f}", _format_ms(derived.time_s) if derived.time_s is not None else "-"


def _format_times(row: Row) -> list[str]:
    """Return the cells of the columns `TIMED`."""
    speeds = row.algorithm_gb_per_s, row.bus_gb_per_s
    return [_format_ms(row.time_s), _format_ms(row.exposed_s), *(f"{speed:.3g}" for speed in speeds)]


def _format_ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"


def format_csv(communication: Communication) -> str:
    """Return CSV with one line for each collective of a step."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in communication.rows:
        counted = row.group_size, row.dtype, row.count, row.num_bytes
        times = (row.time_s, row.exposed_s, row.algorithm_gb_per_s, row.bus_gb_per_s)
        numbers = (f"{number:.6g}" for number in times)
        writer.writerow([row.name, row.kind, "+".join(row.axes), *counted, *numbers, row.scope])
    return file.getvalue()


COLOURS = {"arithmetic": "#b9c4cc", "communication, hidden": "#8fb8de", "communication, exposed": "#d1495b"}
ARITHMETIC, HIDDEN, EXPOSED = COLOURS


def plot_communication(communication: Communication) -> bytes:
    """Return a PNG: a bar for the step, then one for each kind of collective on its axes.

    A vertical line across a bar marks the predicted time.
    """
    step_s, exposed_s = communication.average("span_s"), communication.average("exposed_s")
    labels = ["step"]
    bars = [Bar({ARITHMETIC: step_s - exposed_s, EXPOSED: exposed_s}, f"{1e3 * step_s:,.2f} ms")]
    for row in communication.per_axis:
        predicted = communication.predicted.get((row.kind, row.axes))
        text = f"{1e3 * row.time_s:,.2f} ms, {row.count:,} x, {row.bus_gb_per_s:,.3g} GB/s on the bus"
        parts = {HIDDEN: row.time_s - row.exposed_s, EXPOSED: row.exposed_s}
        labels.append(f"{row.kind} {'+'.join(row.axes)}")
        bars.append(Bar(parts, text, predicted.time_s if predicted else None))
    notes = {"predicted": INK} if any(bar.mark is not None for bar in bars) else {}
    title = f"communication of {communication.steps}, {len(communication.timelines)} devices"
    return plot(title, [(label, INK) for label in labels], [Panel("time of a step", COLOURS, bars, notes=notes)])
