"""Collectives of a compiled program whose order XLA leaves open on CPUs.

A loop on a CPU (jaxlib 0.10.2) goes on while operations behind it in the program begin, if they take nothing that it
gives. Where both have collectives, devices reach them in different orders, and may wait for one another for ever.
"""

import re
from functools import cache

COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all"}
CALLED = re.compile(
    r"(?:body|to_apply|true_computation|false_computation|branch_computations)=\{?((?:%[\w.-]+(?:, )?)+)"
)
OPERATION = re.compile(r"[\s)}\]]([a-z][\w-]*)\(")  # behind the type of the result


def list_races(text: str) -> list[str]:
    """Return pairs of a loop and of a collective behind it that takes nothing of it, by the names of operations."""
    computations: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            lines = computations[line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")] = []
        elif found := re.match(r"  (?:ROOT )?%([\w.-]+) = (.*)", line):
            lines.append((found[1], found[2].split(", metadata=")[0]))

    def call(operation: str) -> list[str]:
        return [name for names in CALLED.findall(operation) for name in re.findall(r"[\w.-]+", names)]

    def kind(operation: str) -> str:
        return found[1] if (found := OPERATION.search(" " + operation)) else ""

    @cache
    def travels(computation: str) -> bool:
        lines = [operation for _, operation in computations.get(computation, [])]
        return any(kind(each) in COLLECTIVES or any(map(travels, call(each))) for each in lines)

    races = []
    for lines in computations.values():
        loops: list[str] = []
        taken: dict[str, set[str]] = {}  # operations before one that it takes something of, at once or by others
        for name, operation in lines:
            direct = [each for each in re.findall(r"%([\w.-]+)", operation) if each in taken]
            taken[name] = set(direct).union(*(taken[each] for each in direct))
            is_loop = kind(operation) in ("while", "conditional", "call") and any(map(travels, call(operation)))
            if is_loop or kind(operation) in COLLECTIVES:
                races += [f"{loop}, then {name}" for loop in loops if loop not in taken[name]]
            if is_loop:
                loops.append(name)
    return races
