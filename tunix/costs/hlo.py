"""What a compiled program moves between devices, read from its optimized HLO text."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_INSTRUCTION = re.compile(rf"%?(?P<name>[\w.\-]+) = (?P<type>.+?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_CONTROL = re.compile(r"%?([\w.\-]+) = .+? (?:while|conditional|call)\(")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")  # dtype and dimensions
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Collective:
    """One instruction of the program."""

    name: str  # as a trace shows it
    kind: str  # of KINDS
    dtype: str  # HLO's name of the (first) element type
    num_bytes: int  # of the whole array that a group of devices gathers, reduces or scatters
    group: tuple[int, ...]  # the first of its groups of devices, as positions in the mesh
    times: int  # executions in one run of the program: the product of the trip counts of the loops around it
    scope: str  # where it comes from in the source: JAX's name stack

    @property
    def group_size(self) -> int:
        """Devices that take part together."""
        return len(self.group)

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of a mesh of these sizes over which it communicates."""
        places = np.unravel_index(self.group, tuple(sizes.values()))
        return tuple(axis for axis, place in zip(sizes, places, strict=True) if np.ptp(place))


def collectives(hlo: str) -> list[Collective]:
    """All collectives of a program as `compiled.as_text()` gives it."""
    found = computations(hlo)
    times = _times(found)
    return [
        _parse(line, match, times[name])
        for name, lines in found.items()
        for line in lines
        if times[name] and (match := _INSTRUCTION.search(line))
    ]


def control_flow(hlo: str) -> set[str]:
    """Names of the instructions that only run others."""
    return set(_CONTROL.findall(hlo))


def computations(hlo: str) -> dict[str, list[str]]:
    """The instructions of each computation as written, in order, by its name; that of the program is ENTRY."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
            lines = found["ENTRY" if header[1] else header[2]] = []
        else:
            lines.append(line)
    return found


def branches(line: str) -> list[str]:
    """The computations of which a conditional runs one."""
    return [name for found in _BRANCHES.findall(line) for name in re.findall(r"[\w.\-]+", "".join(found))]


def _times(computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs when the program runs once."""
    times: dict[str, int] = defaultdict(int)

    def visit(name: str, factor: int) -> None:
        times[name] += factor
        for line in computations.get(name, ()):
            trips = int(found[1]) if " while(" in line and (found := TRIPS.search(line)) else 1
            for called in _CALLED.findall(line) + branches(line):
                visit(called, factor * trips)

    visit("ENTRY", 1)
    return times


def _parse(line: str, match: re.Match, times: int) -> Collective:
    arrays = [(dtype, array_bytes(dtype, dims)) for dtype, dims in ARRAY.findall(match["type"])]
    sizes, group = [size for _, size in arrays], _group(line)
    if match["start"] and match["kind"] in ("all-gather", "reduce-scatter"):  # (operands, results)
        num_bytes = max(sum(sizes[: len(sizes) // 2]), sum(sizes[len(sizes) // 2 :]))
    else:
        num_bytes = sum(sizes) * (len(group) if match["kind"] == "reduce-scatter" else 1)
    scope = re.search(r'op_name="([^"]*)"', line)
    return Collective(match["name"], match["kind"], arrays[0][0], num_bytes, group, times, scope[1] if scope else "")


def array_bytes(dtype: str, dims: str) -> int:
    """Bytes of HLO's `dtype[dims]`: a dtype's name has its bits (bf16, u4, f8e4m3fn); pred is a byte, token nothing."""
    bits = 8 if dtype == "pred" else int(found[0]) if (found := re.search(r"\d+", dtype)) else 0
    return -(-math.prod(int(dim) for dim in dims.split(",") if dim) * bits // 8)


def _group(line: str) -> tuple[int, ...]:
    """The first group, in any of the ways that HLO writes them: by mesh, by iota, as a list, as pairs."""
    if named := _MESH.search(line):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        dims, taken = [], []
        for axis, size in sizes.items():
            if part := re.search(rf"'{axis}':\((\d+)\)(\d+)", named[3]):  # a factor of the axis
                before, ours = int(part[1]), int(part[2])
                dims += [before, ours, size // (before * ours)]
                taken += [False, True, False]
            else:
                dims.append(size)
                taken.append(f"'{axis}'" in named[3])
        devices = _iota(named[2]) if named[2] else np.arange(math.prod(dims))
        chosen = devices.reshape(dims)[tuple(slice(None) if each else 0 for each in taken)]
        return tuple(map(int, chosen.flat))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=(\S+)", line):
        return tuple(map(int, _iota(iota[2]).flat[: int(iota[1])]))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return tuple(map(int, listed[1].split(",")))
    pairs = re.findall(r"[{,]\{(\d+),(\d+)\}", line) if "source_target_pairs=" in line else []
    return next(((int(source), int(target)) for source, target in pairs if source != target), (0,))


def _iota(text: str) -> np.ndarray:
    """[4,2]T(1,0): 0, 1, 2, ... in these dimensions, transposed. Or a list: 0,2,1,3."""
    if not (match := _IOTA.match(text)):
        return np.array([int(number) for number in text.split(",")])
    dims = [int(size) for size in match[1].split(",")]
    order = [int(dim) for dim in match[2].split(",")] if match[2] else range(len(dims))
    return np.arange(math.prod(dims)).reshape(dims).transpose(order)


def summary(found: list[Collective]) -> str:
    """Count and size by kind, for one run of the program: `all-gather 112 x, 3.20 GiB; ...`."""
    parts = []
    for kind in KINDS:
        ours = [c for c in found if c.kind == kind and c.group_size > 1]
        if ours:
            size = sum(c.num_bytes * c.times for c in ours)
            parts.append(f"{kind} {sum(c.times for c in ours):,} x, {size / 2**30:.3f} GiB")
    return "; ".join(parts) or "none"
