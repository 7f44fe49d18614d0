"""Collectives of a compiled program, read from its optimized HLO text.

HLO is XLA's own language. A program is a list of computations; a computation is a list of instructions, one a line:

    %all-gather.3 = bf16[1024,640]{1,0} all-gather(%param.2), replica_groups=[2,4]<=[8], metadata={op_name="..."}

The parser reads only what the cost report needs: kind, size, group of devices, and how often a loop runs the line.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_INSTRUCTION = re.compile(  # for `match`: to search every place of a line would take a second
    rf"\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.+?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\("
)
_CONTROL = re.compile(r"%?([\w.\-]+) = .+? (?:while|conditional|call)\(")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")  # the computation that an instruction runs
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")  # dtype and dimensions
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')  # how often a while loop runs its body


@dataclass(frozen=True)
class Collective:
    """One collective instruction of the program."""

    name: str  # the instruction's name, which a trace shows too
    kind: str  # one of KINDS
    dtype: str  # HLO's name of the (first) element type
    num_bytes: int  # size of the whole array that a group of devices gathers, reduces or scatters
    group: tuple[int, ...]  # the first of its groups of devices, as positions in the mesh
    times: int  # executions in one run of the program: the product of the trip counts of the loops around it
    scope: str  # JAX's name stack: the place in the source

    @property
    def group_size(self) -> int:
        """Number of devices that communicate with each other."""
        return len(self.group)

    def find_axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the axes over which the collective communicates, on a mesh with these axis sizes."""
        coordinates = np.unravel_index(self.group, tuple(sizes.values()))
        # Devices of a group differ in their coordinates (ptp is max - min) exactly along the axes they talk over.
        return tuple(axis for axis, values in zip(sizes, coordinates, strict=True) if np.ptp(values))


def read_collectives(hlo: str) -> list[Collective]:
    """Return all collectives of a program; `hlo` is the text of `compiled.as_text()`."""
    computations = read_computations(hlo)
    times = _count_runs(computations)
    collectives = []
    for name, lines in computations.items():
        for line in lines:
            if times[name] and (match := _INSTRUCTION.match(line)):
                collectives.append(_parse(line, match, times[name]))
    return collectives


def read_control_flow(hlo: str) -> set[str]:
    """Return the names of the instructions that only run other instructions: loops, conditionals, calls."""
    return set(_CONTROL.findall(hlo))


def read_computations(hlo: str) -> dict[str, list[str]]:
    """Return the lines of each computation, keyed by its name; the computation that runs first is named ENTRY."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
            lines = computations["ENTRY" if header[1] else header[2]] = []
        else:
            lines.append(line)
    return computations


def read_branches(line: str) -> list[str]:
    """Return the names of the computations of which a conditional runs one."""
    return [name for names in _BRANCHES.findall(line) for name in re.findall(r"[\w.\-]+", "".join(names))]


def _count_runs(computations: dict[str, list[str]]) -> dict[str, int]:
    """Count how often each computation runs when the program runs once."""
    times: dict[str, int] = defaultdict(int)

    def visit(name: str, factor: int) -> None:
        times[name] += factor
        for line in computations.get(name, ()):
            trips = int(count[1]) if " while(" in line and (count := TRIPS.search(line)) else 1
            for called in _CALLED.findall(line) + read_branches(line):
                visit(called, factor * trips)

    visit("ENTRY", 1)
    return times


def _parse(line: str, match: re.Match, times: int) -> Collective:
    arrays = [(dtype, count_array_bytes(dtype, dims)) for dtype, dims in ARRAY.findall(match["type"])]
    if match["start"] and match["kind"] != "all-reduce":
        # The type of a -start is (operands, results), and may end with numbers without dimensions that only XLA needs.
        arrays = [(dtype, count_array_bytes(dtype, dims)) for dtype, dims in ARRAY.findall(match["type"]) if dims]
    sizes, group = [size for _, size in arrays], _read_group(line)
    if match["kind"] == "ragged-all-to-all":
        num_bytes = min(sizes[:2])  # of the operand and the result: no more rows travel than the smaller one has
    elif match["start"] and match["kind"] != "all-reduce":
        # The larger half is the whole array.
        num_bytes = max(sum(sizes[: len(sizes) // 2]), sum(sizes[len(sizes) // 2 :]))
    else:
        # The result of a reduce-scatter is one device's part, so the whole array is as many times larger.
        num_bytes = sum(sizes) * (len(group) if match["kind"] == "reduce-scatter" else 1)
    scope = re.search(r'op_name="([^"]*)"', line)
    return Collective(match["name"], match["kind"], arrays[0][0], num_bytes, group, times, scope[1] if scope else "")


def count_array_bytes(dtype: str, dims: str) -> int:
    """Return the bytes of HLO's `dtype[dims]`.

    The first number in a dtype's name is its bits (bf16, u4, f8e4m3fn). `pred` takes a byte, `token` takes none.
    """
    digits = re.search(r"\d+", "8" if dtype == "pred" else dtype)
    bits = int(digits[0]) if digits else 0
    return -(-math.prod(int(dim) for dim in dims.split(",") if dim) * bits // 8)


def _read_group(line: str) -> tuple[int, ...]:
    """Return the first group of devices. HLO writes groups in four ways: by mesh, by iota, as a list, as pairs.

    by mesh:   replica_groups=mesh['fsdp'=4,'tp'=2] {'fsdp'}
    by iota:   replica_groups=[2,4]<=[4,2]T(1,0)             2 groups of 4: count, reshape, transpose
    as a list: replica_groups={{0,2,4,6},{1,3,5,7}}
    as pairs:  source_target_pairs={{0,1},{1,2}}             of a collective-permute
    """
    if named := _MESH.search(line):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        dims, taken = [], []
        for axis, size in sizes.items():
            if part := re.search(rf"'{axis}':\((\d+)\)(\d+)", named[3]):  # only a factor of the axis takes part
                before, ours = int(part[1]), int(part[2])
                dims += [before, ours, size // (before * ours)]
                taken += [False, True, False]
            else:
                dims.append(size)
                taken.append(f"'{axis}'" in named[3])
        devices = _read_iota(named[2]) if named[2] else np.arange(math.prod(dims))
        group = devices.reshape(dims)[tuple(slice(None) if is_taken else 0 for is_taken in taken)]
        return tuple(map(int, group.flat))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=(\S+)", line):
        return tuple(map(int, _read_iota(iota[2]).flat[: int(iota[1])]))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return tuple(map(int, listed[1].split(",")))
    pairs = re.findall(r"[{,]\{(\d+),(\d+)\}", line) if "source_target_pairs=" in line else []
    return next(((int(source), int(target)) for source, target in pairs if source != target), (0,))


def _read_iota(text: str) -> np.ndarray:
    """Read device numbers: `[4,2]T(1,0)` is 0, 1, 2, ... in these dimensions, transposed; `0,2,1,3` is a list."""
    if not (match := _IOTA.match(text)):
        return np.array([int(number) for number in text.split(",")])
    dims = [int(size) for size in match[1].split(",")]
    order = [int(dim) for dim in match[2].split(",")] if match[2] else range(len(dims))
    return np.arange(math.prod(dims)).reshape(dims).transpose(order)


def summarise(collectives: list[Collective]) -> str:
    """Format count and size by kind for one run of the program: `all-gather 112 x, 3.200 GiB; ...`."""
    parts = []
    for kind in KINDS:
        members = [each for each in collectives if each.kind == kind and each.group_size > 1]
        if members:
            size = sum(each.num_bytes * each.times for each in members)
            parts.append(f"{kind} {sum(each.times for each in members):,} x, {size / 2**30:.3f} GiB")
    return "; ".join(parts) or "none"
