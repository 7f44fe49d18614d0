"""Compiled programs, read from their optimized HLO text: collectives, instructions, and the work of each.

HLO is XLA's own language. A program is a list of computations; a computation is a list of instructions, one a line:

    %all-gather.3 = bf16[1024,640]{1,0} all-gather(%param.2), replica_groups=[2,4]<=[8], metadata={op_name="..."}

The parser reads only what the cost report needs: kind, size, group of devices, and how often a loop runs the line.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

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
TRIP_COUNT = re.compile(r'known_trip_count":\{"n":"(\d+)"')  # how often a while loop runs its body
_DUE = re.compile(r'/one_of_(\d+)/while"')  # the scope of a loop that runs in one of so many ticks of the stages


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
            if times.get(name) and (match := _INSTRUCTION.match(line)):
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


def count_trips(line: str) -> float:
    """Return how often a loop runs its body; 1 where nothing says so, and for what is no loop.

    Of loops that run once or not at all, HLO does not have it: `if_due` of training/pipeline_schedule.py names them.
    """
    if due := _DUE.search(line):
        return 1 / int(due[1])
    trip_count = TRIP_COUNT.search(line)
    return int(trip_count[1]) if trip_count else 1


def _count_runs(computations: dict[str, list[str]]) -> dict[str, int]:
    """Count how often each computation runs when the program runs once."""
    times: dict[str, float] = defaultdict(float)

    def visit(name: str, factor: float) -> None:
        times[name] += factor
        for line in computations.get(name, ()):
            trips = count_trips(line) if " while(" in line else 1
            for called in _CALLED.findall(line):
                visit(called, factor * trips)
            for branch in read_branches(line):
                visit(branch, factor)

    visit("ENTRY", 1)
    return {name: math.ceil(count) for name, count in times.items()}


def _parse(line: str, match: re.Match, times: int) -> Collective:
    # The type of a -start is (operands, results), and may end with numbers without dimensions that only XLA needs.
    has_operands = match["start"] and match["kind"] != "all-reduce"
    arrays = [(dtype, dims) for dtype, dims in ARRAY.findall(match["type"]) if dims or not has_operands]
    sizes, group = [count_array_bytes(*array) for array in arrays], _read_group(line)
    if match["kind"] == "ragged-all-to-all":
        num_bytes = min(sizes[:2])  # of the operand and the result: no more rows travel than the smaller one has
    elif has_operands:
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
    if entries := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return tuple(map(int, entries[1].split(",")))
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
        if members := [each for each in collectives if each.kind == kind and each.group_size > 1]:
            size = sum(each.num_bytes * each.times for each in members)
            parts.append(f"{kind} {sum(each.times for each in members):,} x, {size / 2**30:.3f} GiB")
    return "; ".join(parts) or "none"


_INSTRUCTION_PARTS = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_PLACED_ARRAY = re.compile(ARRAY.pattern + r"(\{[^}]*\})?")  # an array with its layout, which may name a memory
_HOST = "S(5)"  # XLA's name of the host's pinned memory
_KERNEL_NAME = re.compile(r'name = "(\w+)"')


@dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    type: str  # dtype and dimensions of the result, as written
    opcode: str
    operands: tuple[str, ...]  # names of instructions of the same computation
    text: str  # the rest of the line, from the operands on

    @property
    def num_bytes(self) -> int:
        return sum(count_array_bytes(dtype, dims) for dtype, dims in ARRAY.findall(self.type))

    @property
    def host_bytes(self) -> int:
        """Bytes of the result in the host's memory."""
        arrays = _PLACED_ARRAY.findall(self.type)
        return sum(count_array_bytes(dtype, dims) for dtype, dims, layout in arrays if _HOST in layout)

    @property
    def dims(self) -> list[int]:
        """Dimensions of the first array of the result."""
        array = ARRAY.search(self.type)
        return [int(size) for size in array[2].split(",") if size] if array else []

    @property
    def called(self) -> str:
        """Name of the computation that the instruction runs; empty if it runs none."""
        call = _CALLED.search(self.text)
        return call[1] if call else ""

    @property
    def kernel(self) -> str:
        """Name of the kernel that Triton compiled for it; empty for every other instruction."""
        name = _KERNEL_NAME.search(self.text) if "__gpu$xla.gpu.triton" in self.text else None
        return name[1] if name else ""


Scope = dict[str, Instruction]  # the instructions of one computation by name, in the order of the schedule
Computations = dict[str, list[Instruction]]  # of a program, by name


def parse_instructions(lines: list[str]) -> list[Instruction]:
    """Return the instructions of a computation; `lines` are those of `read_computations`."""
    instructions = []
    for line in lines:
        if match := _INSTRUCTION_PARTS.match(line):
            name, kind, opcode, remaining = match.groups()
            if 'custom_call_target="AllocateBuffer"' in remaining:  # memory, into which nothing is written yet
                opcode = ALLOCATE
            operands = re.findall(r"%([\w.\-]+)", remaining.split(")")[0])
            instructions.append(Instruction(name, kind, opcode, tuple(operands), remaining))
    return instructions


# Work of the instructions of a compiled program: FLOPs of matrix products, and bytes that are read and written.
#
# A fusion is one kernel made of many instructions. It reads its parameters and writes its root; what lies between stays
# in registers. Parameters are often whole stacks of layers, of which a fusion takes a slice:
#
#     %stack = f32[48,1024,4096] parameter(0)        counts as a slice: 1/48 of it is read
#     %layer = f32[1,1024,4096] dynamic-slice(%stack, %n)
#     ROOT %y = bf16[1024,4096] convert(%layer)      counts whole: it is written

# Instructions that take no time: they name parts of arrays, or the backend runs them once.
ALLOCATE = "allocate-buffer"  # written as a custom call
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all",
    ALLOCATE,
}  # fmt: skip
ASYNC_CALLS = ("fusion-start", "async-start")  # run a computation beside what follows, until their `-done`


class Work(NamedTuple):
    """Work of an instruction: FLOPs of matrix products, bytes moved in the device's memory and in the host's."""

    flops: float = 0.0
    device_bytes: float = 0
    host_bytes: float = 0

    def add(self, other: "Work") -> "Work":
        """Return the sum of both."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


def count_fusion(name: str, program: Computations) -> Work:
    """Count the work of a fusion.

    If a fusion takes slices of an array, only the slices are read. If it updates an array in place, only the updated
    part is written. In a scan over layers both are a small part of the stacked array.
    """
    scope = {instruction.name: instruction for instruction in program.get(name, ())}
    work = Work()
    # FLOPs come from inside, bytes from the edges: parameters that are read, and the root that is written.
    for instruction in scope.values():
        work = work.add(Work(_count_flops(instruction, scope)))
        if instruction.called and instruction.opcode == "fusion":
            work = work.add(Work(count_fusion(instruction.called, program).flops))  # its arrays are in registers too
        if instruction.opcode == "parameter":
            parts = [_count_read(user, instruction, scope) for user in _find_users(instruction, scope)]
            work = work.add(_count_moved(instruction, min(instruction.num_bytes, sum(parts))))
    return work.add(_count_written(list(scope.values())[-1], scope)) if scope else work


def _count_moved(array: Instruction, num_bytes: int) -> Work:
    """Return the work of reading or writing bytes where an array is."""
    return Work(host_bytes=num_bytes) if array.host_bytes else Work(device_bytes=num_bytes)


def _find_users(instruction: Instruction, scope: Scope) -> list[Instruction]:
    """Return the instructions that take its values. A bitcast only renames an array, so its own users count."""
    users = []
    for other in scope.values():
        if instruction.name in other.operands:
            users += _find_users(other, scope) if other.opcode == "bitcast" else [other]
    return users


def _count_read(user: Instruction, parameter: Instruction, scope: Scope) -> int:
    """Return the bytes of a parameter that one of its users reads."""
    if user.opcode in ("dynamic-slice", "slice", "gather"):
        return user.num_bytes
    if _find_update(user, scope) and _skip_bitcasts(user.operands[0], scope) == parameter.name:
        return 0  # updated in place
    return parameter.num_bytes


def _find_update(instruction: Instruction, scope: Scope) -> Instruction | None:
    """Return the numbers that an instruction writes into a part of its first operand; None for any other one."""
    if instruction.opcode == "dynamic-update-slice":
        return scope[instruction.operands[1]]
    # A scatter of one array has three operands: the array, the places, the numbers. An array that the same fusion
    # computes is written whole.
    if instruction.opcode == "scatter" and len(instruction.operands) == 3:
        operand, _, update = instruction.operands
        return scope[update] if scope[_skip_bitcasts(operand, scope)].opcode == "parameter" else None
    return None


def _skip_bitcasts(name: str, scope: Scope) -> str:
    """Return the name of the array that this one renames, through all bitcasts."""
    while scope[name].opcode == "bitcast":
        name = scope[name].operands[0]
    return name


def _count_written(root: Instruction, scope: Scope) -> Work:
    """Count what a fusion writes; `root` is its last instruction, the result."""
    if root.opcode == "tuple":
        parts = [_count_written(scope[name], scope) for name in root.operands]
        return reduce(Work.add, parts, Work())
    if root.opcode == "bitcast":
        return _count_written(scope[root.operands[0]], scope)
    update = _find_update(root, scope)
    return _count_moved(root, update.num_bytes if update else root.num_bytes)


def count_unfused(instruction: Instruction, scope: Scope) -> Work:
    """Count the work of an instruction that is in no fusion."""
    if instruction.opcode in FREE:
        return Work()
    if instruction.opcode in ("dynamic-slice", "slice"):
        return Work(device_bytes=2 * instruction.num_bytes)
    operands = [scope[name] for name in instruction.operands if name in scope]
    if instruction.opcode == "copy-start":  # its result is a tuple: the copy and what is copied
        [copied] = operands
        return Work(host_bytes=copied.num_bytes) if instruction.host_bytes else Work(device_bytes=2 * copied.num_bytes)
    host = sum(array.host_bytes for array in (*operands, instruction))
    both = sum(array.num_bytes for array in (*operands, instruction))
    return Work(_count_flops(instruction, scope), both - host, host)


PRODUCTS = ("dot", "scaled-dot")  # opcodes; of the second, factors have a scale for each block of numbers


def _count_flops(instruction: Instruction, scope: Scope) -> float:
    """Count FLOPs of matrix products, two for each multiplication, also in a fused attention kernel.

    Everything else counts 0: its time is that of reading and writing memory.
    """
    # cuDNN's fused attention, operands [B, T, N, H]: two products forward, five backward. The mask saves none.
    if "__cudnn$fmha" in instruction.text:
        batch, length, heads, dim = scope[instruction.operands[0]].dims
        num_matmul = 5 if "Backward" in instruction.text else 2
        return 2.0 * num_matmul * batch * heads * dim * length * scope[instruction.operands[1]].dims[1]
    if instruction.opcode not in PRODUCTS and "__cublas" not in instruction.text:
        return 0.0
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[:=][{\[]"?([\d,"]+)[}\]]', instruction.text)
    if not contracted or not instruction.operands:
        return 0.0
    left = scope[instruction.operands[0]].dims
    summed = math.prod(left[int(dim)] for dim in contracted[1].replace('"', "").split(","))
    return 2.0 * math.prod(instruction.dims) * summed


def count_grouped(instruction: Instruction, scope: Scope, num_experts: float, empty_rows: float) -> Work:
    """Count the work of a grouped product, whose experts have equal loads.

    Its last two operands are rows [R, in] and weights [X, in, out], of which the result is [R, out]; or two arrays of
    rows, of which it is [X, in, out]. The rows are those of all experts, of which X are on this device. `empty_rows` is
    how many rows the kernel computes for each expert beside those that the expert has.
    """
    arrays = [scope[name] for name in instruction.operands[-2:]] + [instruction]
    weights = next(array for array in arrays if len(array.dims) == 3)
    here, num_inputs, num_outputs = weights.dims
    row_arrays = [array for array in arrays if array is not weights]
    share = here / num_experts
    num_rows = row_arrays[0].dims[0] * share
    flops = 2.0 * (num_rows + here * empty_rows) * num_inputs * num_outputs
    return Work(flops, weights.num_bytes + share * sum(array.num_bytes for array in row_arrays))


class FusedKernel(NamedTuple):
    """Work of a kernel of models/fused_experts.py: its products, and what it reads and writes of each row."""

    num_matmul: int  # products of rows [capacity, D] and [capacity, G] with weights, or with one another
    wide: int  # arrays of rows of width D
    narrow: int  # arrays of rows of width G


FUSED_KERNELS = {
    "experts_up": FusedKernel(2, 1, 3),
    "experts_down": FusedKernel(1, 1, 1),
    "experts_d_hidden": FusedKernel(1, 1, 5),
    "experts_d_down": FusedKernel(1, 1, 1),
    "experts_d_inputs": FusedKernel(2, 1, 2),
    "experts_d_rows": FusedKernel(2, 1, 2),
}
COMBINE = "experts_combine"


def count_fused(instruction: Instruction, scope: Scope, capacity_factor: float, empty_rows: float) -> Work:
    """Count the work of a kernel of models/fused_experts.py, whose experts have equal loads.

    Its arrays of rows have `capacity_factor` times as many rows as equal loads give. `empty_rows` is how many rows it
    computes for each expert beside those that the expert has.
    """
    arrays = [scope[name] for name in instruction.operands]
    results = [[int(size) for size in dims.split(",") if size] for _, dims in ARRAY.findall(instruction.type)]
    if instruction.kernel == COMBINE:
        places, z = arrays[-2:]
        return Work(0.0, places.num_bytes + z.num_bytes / capacity_factor + instruction.num_bytes)
    each = FUSED_KERNELS[instruction.kernel]
    shapes = [array.dims for array in arrays]
    num_experts, *sides = next(dims for dims in (*shapes, *results) if len(dims) == 3)  # weights, or their gradient
    if instruction.kernel in ("experts_down", "experts_d_hidden", "experts_d_down"):  # these are [X, G, D]
        sides.reverse()
    dim, width = sides
    # Results are rows; of those that are weights, the longest operand of one dimension are the tokens of rows.
    gives_rows = len(results[0]) == 2
    num_rows = (results[0][0] if gives_rows else max(dims[0] for dims in shapes if len(dims) == 1)) / capacity_factor
    itemsize = min(count_array_bytes(dtype, "1") for dtype, _ in ARRAY.findall(instruction.type))
    flops = 2.0 * each.num_matmul * (num_rows + num_experts * empty_rows) * dim * width
    numbers = num_rows * (each.wide * dim + each.narrow * width) + each.num_matmul * num_experts * dim * width
    return Work(flops, itemsize * numbers)


def multiplies_fp8(instruction: Instruction, scope: Scope, program: Computations) -> bool:
    """Return whether an instruction multiplies matrices of 8-bit floats, itself or in the fusion that it is."""
    if instruction.opcode == "fusion":
        inside = {each.name: each for each in program.get(instruction.called, ())}
        return any(multiplies_fp8(each, inside, program) for each in inside.values())
    is_product = instruction.opcode in PRODUCTS or "__cublas" in instruction.text
    return is_product and all(scope[factor].type.startswith("f8") for factor in instruction.operands[:2])
