"""Predicted time of a compiled program: a walk through its schedule with two clocks.

One clock is the device's arithmetic, the other is the link to other devices. A collective is two instructions. Its
`-start` puts it on the link; arithmetic goes on. At its `-done` arithmetic waits until the collective has ended:

    instruction    gather-start   fusion.1   fusion.2   gather-done   fusion.3
    arithmetic                    |=========|=========|   waits      |========|
    link           |==================================================|
                                                       ^ exposed    ^

The wait is *exposed* communication: it makes the step longer. The rest of the collective is hidden. The link takes one
collective at a time. Copies between the memories of device and host (`training.offload`) go the same way on a link of
their own; a wait for one of them counts as arithmetic.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import NamedTuple

from tunix.costs.hlo import ARRAY, KINDS, TRIPS, Collective, array_bytes, read_branches, read_computations

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
_PLACED_ARRAY = re.compile(ARRAY.pattern + r"(\{[^}]*\})?")  # an array with its layout, which may name a memory
_HOST = "S(5)"  # XLA's name of the host's pinned memory
_KERNEL_NAME = re.compile(r'name = "(\w+)"')
# Products in the kernels of models/flash.py: scores and outputs; scores, gradients of scores and of queries; scores,
# gradients of scores, of keys and of values.
KERNEL_PRODUCTS = {"attention_forward": 2, "attention_d_queries": 3, "attention_d_keys": 4}
GROUPED_KERNELS = ("grouped_forward", "grouped_d_rows", "grouped_d_weights")  # of models/grouped.py
# Instructions that take no time: they name parts of arrays, or the backend runs them once.
_ASYNC_CALLS = ("fusion-start", "async-start")  # run a computation beside what follows, until their `-done`
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"}


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
        return sum(array_bytes(dtype, dims) for dtype, dims in ARRAY.findall(self.type))

    @property
    def host_bytes(self) -> int:
        """Bytes of the result in the host's memory."""
        arrays = _PLACED_ARRAY.findall(self.type)
        return sum(array_bytes(dtype, dims) for dtype, dims, layout in arrays if _HOST in layout)

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


class Work(NamedTuple):
    """Work of an instruction: FLOPs of matrix products, bytes moved in the device's memory and in the host's."""

    flops: float = 0.0
    device_bytes: float = 0
    host_bytes: float = 0

    def plus(self, other: "Work") -> "Work":
        """Return the sum of both."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Speeds:
    """Speeds that the prediction assumes for one device."""

    flops_per_s: float  # of matrix products
    fp8_flops_per_s: float  # of those of 8-bit floats
    kernel_flops_per_s: float  # of our kernels: models/flash.py, which also compute a softmax, and models/grouped.py
    bytes_per_s: float  # of reading and writing the device's memory
    host_bytes_per_s: float  # between the device and the host's memory
    launch_s: float  # between the end of a kernel and the start of the next
    collective_s: Callable[[Collective], float]  # seconds of one execution


@dataclass(frozen=True)
class KernelData:
    """Numbers that decide what our own kernels compute, and that are data of the program: HLO does not have them.

    A program with a kernel whose number is missing has no time (NaN).
    """

    # Pairs of a query and a key that an attention kernel computes in a row: blocks are skipped as documents and windows
    # say.
    pairs_per_row: float = math.nan
    ring_pairs: dict[str, float] = field(default_factory=dict)  # the same of a device's block, by suffix of the kernel
    # For which a device has rows, where experts have equal loads: those of a layer on all devices, unless a buffer is
    # bounded. It computes its own.
    num_experts: float = math.nan
    # Rows that a grouped product computes for each expert beside the expert's own, by kernel.
    empty_rows: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds and counted FLOPs of one run of a program on one device."""

    compute_s: float = 0.0  # with waits for the host's memory
    exposed_s: float = 0.0  # arithmetic waits for a collective
    communication_s: float = 0.0  # of all collectives, hidden or exposed
    flops: float = 0.0  # of matrix products

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    def after(self, other: "StepTime", times: int = 1) -> "StepTime":
        """Return the time of `other` followed by `times` runs of this."""
        return StepTime(
            other.compute_s + times * self.compute_s,
            other.exposed_s + times * self.exposed_s,
            other.communication_s + times * self.communication_s,
            other.flops + times * self.flops,
        )


def walk(hlo: str, collectives: list[Collective], speeds: Speeds, data: KernelData | None = None) -> StepTime:
    """Predict the time of a scheduled program.

    `hlo` is the text of `compiled.as_text()`, `collectives` are those that `read_collectives` found in it. `data` is
    needed where the program has kernels of our own.
    """
    data = data or KernelData()
    program = {name: parse_instructions(lines) for name, lines in read_computations(hlo).items()}
    collective_s = {each.name: speeds.collective_s(each) for each in collectives}
    work_of = cache(lambda name: _count_work(name, program))  # a fusion may run many times

    def count(instruction: Instruction, scope: dict[str, Instruction]) -> Work:
        is_fusion = instruction.opcode in ("fusion", *_ASYNC_CALLS)
        return work_of(instruction.called) if is_fusion else _count_alone(instruction, scope)

    def run_instruction(instruction: Instruction, scope: dict[str, Instruction]) -> StepTime:
        """Time of an instruction that is no collective; `scope` is its computation."""
        if instruction.opcode == "conditional":  # the slowest branch counts
            return max(map(run, read_branches(instruction.text)), key=lambda branch: branch.step_s).after(StepTime())
        if instruction.opcode in ("while", "call"):
            trips = TRIPS.search(instruction.text)
            return run(instruction.called).after(StepTime(), int(trips[1]) if trips else 1)
        flops_per_s = speeds.fp8_flops_per_s if _multiplies_fp8(instruction, scope, program) else speeds.flops_per_s
        work = count(instruction, scope)
        kernel = _kernel_name(instruction)
        of_whole = kernel.removesuffix("_own").removesuffix("_before")  # models/ring_flash.py
        if products := KERNEL_PRODUCTS.get(of_whole, 0):
            batch, _, heads, dim = scope[instruction.operands[0]].dims  # queries [B, T, N, H]
            in_block = data.ring_pairs.get(kernel[len(of_whole) :], math.nan)
            pairs = data.pairs_per_row if kernel == of_whole else in_block
            flops = 2.0 * products * batch * heads * dim * pairs
            work, flops_per_s = work._replace(flops=flops), speeds.kernel_flops_per_s
        if kernel in GROUPED_KERNELS:
            work = _count_grouped(instruction, scope, data.num_experts, data.empty_rows.get(kernel, math.nan))
            flops_per_s = speeds.kernel_flops_per_s
        # A kernel computes and reads at the same time: the slowest of these decides ("roofline").
        of_memory = work.device_bytes / speeds.bytes_per_s, work.host_bytes / speeds.host_bytes_per_s
        launch_s = 0.0 if instruction.opcode in FREE else speeds.launch_s
        return StepTime(launch_s + max(work.flops / flops_per_s, *of_memory), flops=work.flops)

    @cache
    def run(name: str) -> StepTime:
        scope = {instruction.name: instruction for instruction in program.get(name, ())}
        total, link_free, host_free = StepTime(), 0.0, 0.0  # *_free: when a link has sent everything so far
        ends: dict[str, float] = {}  # when each collective and each copy that has started ends
        for instruction in scope.values():
            opcode = instruction.opcode
            kind = opcode.removesuffix("-start").removesuffix("-done")
            if opcode.endswith("-done") and kind not in KINDS:
                wait = ends.get(instruction.operands[0], 0.0) - total.step_s
                total = replace(total, compute_s=total.compute_s + max(0.0, wait))
                continue
            if opcode.endswith("-start") and kind not in KINDS and (size := count(instruction, scope).host_bytes):
                host_free = ends[instruction.name] = max(total.step_s, host_free) + size / speeds.host_bytes_per_s
                continue
            if kind not in KINDS:
                total = run_instruction(instruction, scope).after(total)
                continue
            # A collective is `-start` and `-done`, or one instruction that is both.
            if not opcode.endswith("-done"):
                seconds = collective_s[instruction.name]
                link_free = ends[instruction.name] = max(total.step_s, link_free) + seconds
                total = replace(total, communication_s=total.communication_s + seconds)
            if not opcode.endswith("-start"):
                start = instruction.operands[0] if opcode.endswith("-done") else instruction.name
                end = ends[start]
                total = replace(total, exposed_s=total.exposed_s + max(0.0, end - total.step_s))
        return total

    return run("ENTRY")


def parse_instructions(lines: list[str]) -> list[Instruction]:
    """Return the instructions of a computation; `lines` are those of `read_computations`."""
    instructions = []
    for line in lines:
        if match := _INSTRUCTION.match(line):
            name, kind, opcode, rest = match.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.split(")")[0])
            instructions.append(Instruction(name, kind, opcode, tuple(operands), rest))
    return instructions


def count_moved_bytes(
    instruction: Instruction, scope: dict[str, Instruction], program: dict[str, list[Instruction]]
) -> int:
    """Count the bytes that an instruction, or the fusion that it runs, reads and writes; `scope` is its computation."""
    is_fusion = instruction.opcode == "fusion"
    work = _count_work(instruction.called, program) if is_fusion else _count_alone(instruction, scope)
    return round(work.device_bytes + work.host_bytes)


def _count_work(name: str, program: dict[str, list[Instruction]]) -> Work:
    """Count the work of a fusion.

    If a fusion takes slices of an array, only the slices are read. If it updates an array in place, only the updated
    part is written. In a scan over layers both are a small part of the stacked array.
    """
    scope = {instruction.name: instruction for instruction in program.get(name, ())}
    work = Work()
    for instruction in scope.values():
        work = work.plus(Work(_flops(instruction, scope)))
        if instruction.called and instruction.opcode == "fusion":
            work = work.plus(Work(_count_work(instruction.called, program).flops))
        if instruction.opcode == "parameter":
            parts = [_bytes_read(user, instruction, scope) for user in _find_users(instruction, scope)]
            work = work.plus(_in_memory_of(instruction, min(instruction.num_bytes, sum(parts))))
    return work.plus(_count_written(list(scope.values())[-1], scope)) if scope else work


def _in_memory_of(array: Instruction, num_bytes: int) -> Work:
    """Return the work of reading or writing bytes where an array is."""
    return Work(host_bytes=num_bytes) if array.host_bytes else Work(device_bytes=num_bytes)


def _multiplies_fp8(
    instruction: Instruction, scope: dict[str, Instruction], program: dict[str, list[Instruction]]
) -> bool:
    """Return whether an instruction multiplies matrices of 8-bit floats, itself or in the fusion that it is."""
    if instruction.opcode == "fusion":
        inside = {each.name: each for each in program.get(instruction.called, ())}
        return any(_multiplies_fp8(each, inside, program) for each in inside.values())
    is_product = instruction.opcode == "dot" or "__cublas" in instruction.text
    return is_product and all(scope[factor].type.startswith("f8") for factor in instruction.operands[:2])


def _find_users(instruction: Instruction, scope: dict[str, Instruction]) -> list[Instruction]:
    """Return the instructions that take its values. A bitcast only renames an array, so its own users count."""
    users = []
    for other in scope.values():
        if instruction.name in other.operands:
            users += _find_users(other, scope) if other.opcode == "bitcast" else [other]
    return users


def _bytes_read(user: Instruction, parameter: Instruction, scope: dict[str, Instruction]) -> int:
    """Return the bytes of a parameter that one of its users reads."""
    if user.opcode in ("dynamic-slice", "slice", "gather"):
        return user.num_bytes
    if user.opcode == "dynamic-update-slice" and _skip_bitcasts(user.operands[0], scope) == parameter.name:
        return 0  # updated in place
    return parameter.num_bytes


def _skip_bitcasts(name: str, scope: dict[str, Instruction]) -> str:
    while scope[name].opcode == "bitcast":
        name = scope[name].operands[0]
    return name


def _count_written(root: Instruction, scope: dict[str, Instruction]) -> Work:
    """Count what a fusion writes; `root` is its last instruction, the result."""
    if root.opcode == "tuple":
        parts = [_count_written(scope[name], scope) for name in root.operands]
        return reduce(Work.plus, parts, Work())
    if root.opcode == "bitcast":
        return _count_written(scope[root.operands[0]], scope)
    updates = root.opcode == "dynamic-update-slice"
    return _in_memory_of(root, scope[root.operands[1]].num_bytes if updates else root.num_bytes)


def _count_alone(instruction: Instruction, scope: dict[str, Instruction]) -> Work:
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
    return Work(_flops(instruction, scope), both - host, host)


def _kernel_name(instruction: Instruction) -> str:
    """Return the name of a kernel that Triton compiled; empty for every other instruction."""
    name = _KERNEL_NAME.search(instruction.text) if "__gpu$xla.gpu.triton" in instruction.text else None
    return name[1] if name else ""


def _count_grouped(
    instruction: Instruction, scope: dict[str, Instruction], num_experts: float, empty_rows: float
) -> Work:
    """Count the work of a grouped product, whose experts have equal loads.

    Its last two operands are rows [R, in] and weights [X, in, out], of which the result is [R, out]; or two arrays of
    rows, of which it is [X, in, out]. The rows are those of all experts, of which X are on this device. `empty_rows` is
    how many rows the kernel computes for each expert beside those that the expert has.
    """
    arrays = [scope[name] for name in instruction.operands[-2:]] + [instruction]
    weights = next(array for array in arrays if len(array.dims) == 3)
    here, num_inputs, num_outputs = weights.dims
    of_rows = [array for array in arrays if array is not weights]
    share = here / num_experts
    num_rows = of_rows[0].dims[0] * share
    flops = 2.0 * (num_rows + here * empty_rows) * num_inputs * num_outputs
    return Work(flops, weights.num_bytes + share * sum(array.num_bytes for array in of_rows))


def _flops(instruction: Instruction, scope: dict[str, Instruction]) -> float:
    """Count FLOPs of matrix products, two for each multiplication, also in a fused attention kernel.

    Everything else counts 0: its time is that of reading and writing memory.
    """
    # cuDNN's fused attention, operands [B, T, N, H]: two products forward, five backward. The mask saves none.
    if "__cudnn$fmha" in instruction.text:
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
