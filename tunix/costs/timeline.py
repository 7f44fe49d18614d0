"""Activity of each device in a trace: how long each collective took, and how much of that time arithmetic hid.

Each operation in the trace is an interval of time. Collectives and all other operations are two sets of intervals, and
communication that no other operation overlaps is exposed: the device did nothing but wait for it.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from jax.profiler import ProfileData

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


def measure_devices(
    events: Iterator[Event], num_steps: int, communicating: set[str], control_flow: set[str]
) -> dict[str, Timeline]:
    """Measure each device over `num_steps` steps; the keys are devices.

    Operations in neither set are arithmetic or copies. They can hide communication. An operation of `control_flow`
    lasts as long as the operations that it runs, so it is left out.
    """
    others: dict[str, list[Event]] = defaultdict(list)
    collectives: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.name not in control_flow:
            is_collective = event.name in communicating or event.name == UNKNOWN
            (collectives if is_collective else others)[event.device].append(event)
    return {
        device: _measure_device(others[device], collectives[device], num_steps)
        for device in sorted({*others, *collectives})
    }


def _measure_device(others: list[Event], collectives: list[Event], num_steps: int) -> Timeline:
    moves = _list_intervals(collectives)  # nanoseconds, [collectives, 2]
    busy = _merge_intervals(_list_intervals(others))
    lengths = moves[:, 1] - moves[:, 0]
    exposed = lengths - _measure_covered(moves, busy)
    totals: dict[str, tuple[int, float, float]] = {}
    for event, length, alone in zip(collectives, lengths.tolist(), exposed.tolist(), strict=True):
        count, time_s, exposed_s = totals.get(event.name, (0, 0.0, 0.0))
        totals[event.name] = (count + 1, time_s + length / 1e9, exposed_s + alone / 1e9)
    # Collectives may overlap each other; their union counts such a time once.
    communicating = _merge_intervals(moves)
    communication = float(np.sum(communicating[:, 1] - communicating[:, 0]))
    return Timeline(
        _measure_span([*others, *collectives], num_steps) / 1e9,
        communication / 1e9,
        (communication - float(np.sum(_measure_covered(communicating, busy)))) / 1e9,
        totals,
    )


def _measure_span(events: list[Event], num_steps: int) -> float:
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
    begins = np.concatenate([[True], starts[1:] > ends[:-1]])  # a gap lies before this interval
    return np.stack([starts[begins], ends[np.concatenate([begins[1:], [True]])]], axis=1)


def _measure_covered(intervals: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return how much of each interval the intervals `by` cover; `by` is a result of `_merge_intervals`."""
    if not len(by):
        return np.zeros(len(intervals))
    # What lies between two times is covered as much as what lies before the second, less what lies before the first.
    # If `by` is 0 to 4 and 6 to 8, it covers 5 before 7 and 3 before 3, and so 2 of the interval from 3 to 7.
    until = np.concatenate([[0.0], np.cumsum(by[:, 1] - by[:, 0])])  # total length of the first n of `by`

    def measure_before(time: np.ndarray) -> np.ndarray:
        """Return the total length of `by` before each time."""
        index = np.searchsorted(by[:, 0], time, side="right")
        return until[index] - np.maximum(0.0, by[np.maximum(index - 1, 0), 1] - time) * (index > 0)

    return measure_before(intervals[:, 1]) - measure_before(intervals[:, 0])
