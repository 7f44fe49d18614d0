"""Instructions of a compiled program, as its optimized HLO text writes them."""

import re
from dataclasses import dataclass

from tunix.costs.hlo import ARRAY, count_array_bytes

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
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
        if match := _INSTRUCTION.match(line):
            name, kind, opcode, rest = match.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.split(")")[0])
            instructions.append(Instruction(name, kind, opcode, tuple(operands), rest))
    return instructions
