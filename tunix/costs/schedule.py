"""How long a compiled program is predicted to take: its schedule walked with two clocks, of arithmetic and of links.

Arithmetic goes on between a collective's `-start` and its `-done`; at `-done` it waits for what is left.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from tunix.costs.hlo import ARRAY, KINDS, TRIPS, Collective, array_bytes, branches, computations

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
# Of no time: names for parts of arrays, and what a backend does once.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"}


@dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    type: str  # of the result, as written
    opcode: str
    operands: tuple[str, ...]
    text: str  # the line from its operands on

    @property
    def num_bytes(self) -> int:
        return sum(array_bytes(dtype, dims) for dtype, dims in ARRAY.findall(self.type))

    @property
    def dims(self) -> list[int]:
        """Of the first array of the result."""
        found = ARRAY.search(self.type)
        return [int(size) for size in found[2].split(",") if size] if found else []

    @property
    def called(self) -> str:
        """The computation that it runs."""
        found = _CALLED.search(self.text)
        return found[1] if found else ""


@dataclass(frozen=True)
class Speeds:
    """What the arithmetic of a device is assumed to reach, and the seconds that a collective takes."""

    flops_per_s: float
    bytes_per_s: float
    collective_s: Callable[[Collective], float]


@dataclass(frozen=True)
class Timeline:
    """Predicted seconds and counted FLOPs of one run of a program on one device."""

    compute_s: float = 0.0
    exposed_s: float = 0.0  # waiting for collectives
    communication_s: float = 0.0  # of all collectives, hidden or not
    flops: float = 0.0  # of matrix products

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    def after(self, other: "Timeline", times: int = 1) -> "Timeline":
        return Timeline(
            other.compute_s + times * self.compute_s,
            other.exposed_s + times * self.exposed_s,
            other.communication_s + times * self.communication_s,
            other.flops + times * self.flops,
        )


def walk(hlo: str, found: list[Collective], speeds: Speeds) -> Timeline:
    """The timeline of a scheduled program, `compiled.as_text()`, with the collectives that were read from it."""
    program = {name: _parsed(lines) for name, lines in computations(hlo).items()}
    collective_s = {each.name: speeds.collective_s(each) for each in found}
    work = cache(lambda name: _work(name, program))

    def one(instruction: Instruction, scope: dict[str, Instruction]) -> Timeline:
        """Of an instruction that is no collective."""
        if instruction.opcode == "conditional":
            return max(map(run, branches(instruction.text)), key=lambda branch: branch.step_s).after(Timeline())
        if instruction.opcode in ("while", "call"):
            trips = TRIPS.search(instruction.text)
            return run(instruction.called).after(Timeline(), int(trips[1]) if trips else 1)
        flops, num_bytes = work(instruction.called) if instruction.opcode == "fusion" else _alone(instruction, scope)
        return Timeline(max(flops / speeds.flops_per_s, num_bytes / speeds.bytes_per_s), flops=flops)

    @cache
    def run(name: str) -> Timeline:
        scope = {each.name: each for each in program.get(name, ())}
        total, link_free = Timeline(), 0.0
        ends: dict[str, float] = {}  # of collectives under way
        for instruction in scope.values():
            kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
            if kind not in KINDS:
                total = one(instruction, scope).after(total)
                continue
            if not instruction.opcode.endswith("-done"):
                seconds = collective_s[instruction.name]
                link_free = ends[instruction.name] = max(total.step_s, link_free) + seconds
                total = replace(total, communication_s=total.communication_s + seconds)
            if not instruction.opcode.endswith("-start"):
                end = ends[instruction.operands[0] if instruction.opcode.endswith("-done") else instruction.name]
                total = replace(total, exposed_s=total.exposed_s + max(0.0, end - total.step_s))
        return total

    return run("ENTRY")


def _parsed(lines: list[str]) -> list[Instruction]:
    found = []
    for line in lines:
        if match := _INSTRUCTION.match(line):
            name, kind, opcode, rest = match.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.split(")")[0])
            found.append(Instruction(name, kind, opcode, tuple(operands), rest))
    return found


def _work(name: str, program: dict[str, list[Instruction]]) -> tuple[float, int]:
    """FLOPs of a fusion's products, and the bytes that it reads and writes.

    Of an array from which it takes slices it reads those; an array that it updates in place it writes in that part.
    """
    scope = {each.name: each for each in program.get(name, ())}
    flops, num_bytes = 0.0, 0
    for instruction in scope.values():
        flops += _flops(instruction, scope)
        if instruction.called and instruction.opcode == "fusion":
            flops += _work(instruction.called, program)[0]
        if instruction.opcode == "parameter":
            users = _users(instruction, scope)
            parts = [_part(user, instruction, scope) for user in users]
            num_bytes += min(instruction.num_bytes, sum(parts))
    if scope:
        num_bytes += _written(list(scope.values())[-1], scope)
    return flops, num_bytes


def _users(instruction: Instruction, scope: dict[str, Instruction]) -> list[Instruction]:
    """Instructions that take its values, past those that only name them."""
    found = []
    for each in scope.values():
        if instruction.name in each.operands:
            found += _users(each, scope) if each.opcode == "bitcast" else [each]
    return found


def _part(user: Instruction, parameter: Instruction, scope: dict[str, Instruction]) -> int:
    """Bytes of a parameter that one of its users reads."""
    if user.opcode in ("dynamic-slice", "slice", "gather"):
        return user.num_bytes
    if user.opcode == "dynamic-update-slice" and _source(user.operands[0], scope) == parameter.name:
        return 0
    return parameter.num_bytes


def _source(name: str, scope: dict[str, Instruction]) -> str:
    while scope[name].opcode == "bitcast":
        name = scope[name].operands[0]
    return name


def _written(root: Instruction, scope: dict[str, Instruction]) -> int:
    if root.opcode == "tuple":
        return sum(_written(scope[name], scope) for name in root.operands)
    if root.opcode == "bitcast":
        return _written(scope[root.operands[0]], scope)
    return scope[root.operands[1]].num_bytes if root.opcode == "dynamic-update-slice" else root.num_bytes


def _alone(instruction: Instruction, scope: dict[str, Instruction]) -> tuple[float, int]:
    """FLOPs and bytes of an instruction outside of a fusion."""
    if instruction.opcode in FREE:
        return 0.0, 0
    if instruction.opcode in ("dynamic-slice", "slice"):
        return 0.0, 2 * instruction.num_bytes
    read = sum(scope[name].num_bytes for name in instruction.operands if name in scope)
    return _flops(instruction, scope), read + instruction.num_bytes


def _flops(instruction: Instruction, scope: dict[str, Instruction]) -> float:
    """Two for each multiplication of a matrix product, also in a fused attention kernel; 0 of anything else."""
    if "__cudnn$fmha" in instruction.text:  # of [B, T, N, H]: two products forward, five backward, masked or not
        batch, length, heads, dim = scope[instruction.operands[0]].dims
        products = 5 if "Backward" in instruction.text else 2
        return 2.0 * products * batch * heads * dim * length * scope[instruction.operands[1]].dims[1]
    if instruction.opcode != "dot" and "__cublas" not in instruction.text:
        return 0.0
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[:=][{\[]"?([\d,"]+)[}\]]', instruction.text)
    if not contracted or not instruction.operands:
        return 0.0
    left = scope[instruction.operands[0]].dims
    summed = math.prod(left[int(dim)] for dim in contracted[1].replace('"', "").split(","))
    return 2.0 * math.prod(instruction.dims) * summed
