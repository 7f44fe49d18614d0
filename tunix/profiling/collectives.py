"""What a compiled program moves between devices, read from its optimized HLO text."""

import re
from collections import defaultdict
from dataclasses import dataclass

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
}

_INSTRUCTION = re.compile(rf"= (?P<type>.+?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_CALLED = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Collective:
    """One instruction of the program."""

    kind: str  # of KINDS
    dtype: str  # HLO's name of the (first) element type
    num_bytes: int  # of the whole array that a group of devices gathers, reduces or scatters
    group_size: int  # devices that take part together
    times: int  # executions in one run of the program: the product of the trip counts of the loops around it
    scope: str  # where it comes from in the source: JAX's name stack


def collectives(hlo: str) -> list[Collective]:
    """All collectives of a program as `compiled.as_text()` gives it."""
    computations = _computations(hlo)
    times = _times(computations)
    return [
        _parse(line, match, times[name])
        for name, lines in computations.items()
        for line in lines
        if times[name] and (match := _INSTRUCTION.search(line))
    ]


def _computations(hlo: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
            lines = found["ENTRY" if header[1] else header[2]] = []
        else:
            lines.append(line)
    return found


def _times(computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs when the program runs once."""
    times: dict[str, int] = defaultdict(int)

    def visit(name: str, factor: int) -> None:
        times[name] += factor
        for line in computations.get(name, ()):
            trips = int(found[1]) if " while(" in line and (found := _TRIPS.search(line)) else 1
            branches = _BRANCHES.search(line)
            for called in _CALLED.findall(line) + (re.findall(r"[\w.\-]+", branches[1]) if branches else []):
                visit(called, factor * trips)

    visit("ENTRY", 1)
    return times


def _parse(line: str, match: re.Match, times: int) -> Collective:
    arrays = [(dtype, _bytes(dtype, dims)) for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match["type"])]
    sizes, group = [size for _, size in arrays], _group_size(line)
    if match["start"] and match["kind"] in ("all-gather", "reduce-scatter"):  # (operands, results)
        num_bytes = max(sum(sizes[: len(sizes) // 2]), sum(sizes[len(sizes) // 2 :]))
    else:
        num_bytes = sum(sizes) * (group if match["kind"] == "reduce-scatter" else 1)
    scope = re.search(r'op_name="([^"]*)"', line)
    return Collective(match["kind"], arrays[0][0], num_bytes, group, times, scope[1] if scope else "")


def _bytes(dtype: str, dims: str) -> int:
    size = ITEM_BYTES.get(dtype, 4)
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size


def _group_size(line: str) -> int:
    """Devices of one group, in any of the three ways that HLO writes them."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\))? \{([^}]*)\}", line):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        product = 1
        for axis in re.findall(r"'(\w+)'", named[2]):
            product *= sizes[axis]
        return product
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return len(listed[1].split(",")) if listed else 1


def summary(found: list[Collective]) -> str:
    """Count and size by kind, for one run of the program: `all-gather 112 x, 3.20 GiB; ...`."""
    parts = []
    for kind in KINDS:
        ours = [c for c in found if c.kind == kind and c.group_size > 1]
        if ours:
            size = sum(c.num_bytes * c.times for c in ours)
            parts.append(f"{kind} {sum(c.times for c in ours):,} x, {size / 2**30:.3f} GiB")
    return "; ".join(parts) or "none"
