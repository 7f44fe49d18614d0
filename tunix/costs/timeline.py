"""What devices did while a step was traced: how long each collective took, and how much of that arithmetic hid."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from jax.profiler import ProfileData

GPU = re.compile(r"/device:GPU:\d+")
NCCL = re.compile(r"nccl(?:Dev)?Kernel", re.IGNORECASE)
UNKNOWN = "(not named)"  # kernels of NCCL that the trace ascribes to no instruction


@dataclass(frozen=True)
class Event:
    """One operation on one device."""

    device: str  # number among those of its process
    name: str  # of the HLO instruction; of the kernel where the trace does not say
    start_ns: float
    end_ns: float


@dataclass
class Timeline:
    """Of one device, over all steps traced; seconds."""

    span_s: float = 0.0  # from the first operation of a step to its last
    communication_s: float = 0.0  # during which at least one collective runs
    exposed_s: float = 0.0  # and nothing else
    collectives: dict[str, tuple[int, float, float]] = field(default_factory=dict)  # executions, time, exposed time


def events(trace: ProfileData, module: str, communicating: set[str]) -> Iterator[Event]:
    """Operations of the program `module`; `communicating` are the names of its collectives.

    On GPUs, kernels stand on the lines of their streams and carry the instruction as `hlo_op`. On CPUs the lines are
    threads, which all devices share, and `device_ordinal` tells whose operation it is.
    """
    planes = [plane for plane in trace.planes if GPU.fullmatch(plane.name)]
    for plane in planes or trace.planes:
        for line in plane.lines:
            if planes and not line.name.startswith("Stream"):
                continue  # the same operations again, by name or by step
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module", module) != module or not ("hlo_op" in stats or NCCL.match(event.name)):
                    continue
                name = str(stats.get("hlo_op", UNKNOWN))
                if NCCL.match(event.name) and name not in communicating:
                    name = UNKNOWN
                device = plane.name.rpartition(":")[2] if planes else str(stats["device_ordinal"])
                yield Event(device, name, event.start_ns, event.end_ns)


def timelines(
    found: Iterator[Event], num_steps: int, communicating: set[str], control_flow: set[str]
) -> dict[str, Timeline]:
    """By device, of so many steps. What is in neither set is arithmetic, or copying, that can hide communication."""
    by_device: dict[str, tuple[list[Event], list[Event]]] = defaultdict(lambda: ([], []))
    for event in found:
        if event.name not in control_flow:
            by_device[event.device][event.name in communicating or event.name == UNKNOWN].append(event)
    return {device: _timeline(*both, num_steps) for device, both in sorted(by_device.items())}


def _timeline(others: list[Event], collectives: list[Event], num_steps: int) -> Timeline:
    work, moves = _intervals(others), _intervals(collectives)
    hides, lengths = _union(work), moves[:, 1] - moves[:, 0]
    exposed = lengths - _covered(moves, hides)
    found: dict[str, tuple[int, float, float]] = {}
    for event, length, alone in zip(collectives, lengths.tolist(), exposed.tolist(), strict=True):
        count, time_s, exposed_s = found.get(event.name, (0, 0.0, 0.0))
        found[event.name] = (count + 1, time_s + length / 1e9, exposed_s + alone / 1e9)
    together = _union(moves)
    communication = float(np.sum(together[:, 1] - together[:, 0]))
    return Timeline(
        _span([*others, *collectives], num_steps) / 1e9,
        communication / 1e9,
        (communication - float(np.sum(_covered(together, hides)))) / 1e9,
        found,
    )


def _span(found: list[Event], num_steps: int) -> float:
    """Nanoseconds within steps, without what runs between them: their ends are those of what runs once in each."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in found:
        times[event.name].append((event.start_ns, event.end_ns))
    once = [sorted(each) for each in times.values() if len(each) == num_steps]
    return sum(max(end for _, end in step) - min(start for start, _ in step) for step in zip(*once, strict=True))


def _intervals(found: list[Event]) -> np.ndarray:
    return np.array([(event.start_ns, event.end_ns) for event in found]).reshape(-1, 2)


def _union(intervals: np.ndarray) -> np.ndarray:
    """The same time [intervals, 2] as intervals that are sorted and do not touch."""
    if not len(intervals):
        return intervals
    sorted_ = intervals[np.argsort(intervals[:, 0])]
    starts, ends = sorted_[:, 0], np.maximum.accumulate(sorted_[:, 1])
    begins = np.concatenate([[True], starts[1:] > ends[:-1]])
    return np.stack([starts[begins], ends[np.concatenate([begins[1:], [True]])]], axis=1)


def _covered(intervals: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Length of each interval that lies in the union `by`."""
    if not len(by):
        return np.zeros(len(intervals))
    until = np.concatenate([[0.0], np.cumsum(by[:, 1] - by[:, 0])])

    def before(time: np.ndarray) -> np.ndarray:
        """Length of `by` before a time."""
        index = np.searchsorted(by[:, 0], time, side="right")
        return until[index] - np.maximum(0.0, by[np.maximum(index - 1, 0), 1] - time) * (index > 0)

    return before(intervals[:, 1]) - before(intervals[:, 0])
