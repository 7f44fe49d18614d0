"""Work of the instructions of a compiled program: FLOPs of matrix products, and bytes that are read and written.

A fusion is one kernel made of many instructions. It reads its parameters and writes its root; what lies between stays
in registers. Parameters are often whole stacks of layers, of which a fusion takes a slice:

    %stack = f32[48,1024,4096] parameter(0)        counts as a slice: 1/48 of it is read
    %layer = f32[1,1024,4096] dynamic-slice(%stack, %n)
    ROOT %y = bf16[1024,4096] convert(%layer)      counts whole: it is written
"""

import math
import re
from functools import reduce
from typing import NamedTuple

from tunix.costs.instructions import Computations, Instruction, Scope

# Instructions that take no time: they name parts of arrays, or the backend runs them once.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"}
ASYNC_CALLS = ("fusion-start", "async-start")  # run a computation beside what follows, until their `-done`


class Work(NamedTuple):
    """Work of an instruction: FLOPs of matrix products, bytes moved in the device's memory and in the host's."""

    flops: float = 0.0
    device_bytes: float = 0
    host_bytes: float = 0

    def add(self, other: "Work") -> "Work":
        """Return the sum of both."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


def count_moved_bytes(instruction: Instruction, scope: Scope, program: Computations) -> int:
    """Count the bytes that an instruction, or the fusion that it runs, reads and writes; `scope` is its computation."""
    is_fusion = instruction.opcode == "fusion"
    work = count_fusion(instruction.called, program) if is_fusion else count_alone(instruction, scope)
    return round(work.device_bytes + work.host_bytes)


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
    if user.opcode == "dynamic-update-slice" and _skip_bitcasts(user.operands[0], scope) == parameter.name:
        return 0  # updated in place
    return parameter.num_bytes


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
    updates = root.opcode == "dynamic-update-slice"
    return _count_moved(root, scope[root.operands[1]].num_bytes if updates else root.num_bytes)


def count_alone(instruction: Instruction, scope: Scope) -> Work:
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


def _count_flops(instruction: Instruction, scope: Scope) -> float:
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


def multiplies_fp8(instruction: Instruction, scope: Scope, program: Computations) -> bool:
    """Return whether an instruction multiplies matrices of 8-bit floats, itself or in the fusion that it is."""
    if instruction.opcode == "fusion":
        inside = {each.name: each for each in program.get(instruction.called, ())}
        return any(multiplies_fp8(each, inside, program) for each in inside.values())
    is_product = instruction.opcode == "dot" or "__cublas" in instruction.text
    return is_product and all(scope[factor].type.startswith("f8") for factor in instruction.operands[:2])
