"""Collectives of a compiled program whose order XLA leaves open on CPUs.

A loop on a CPU (jaxlib 0.10.2) goes on while operations behind it in the program begin, if they take nothing that it
gives. Where both have collectives, devices reach them in different orders, and may wait for one another for ever.
"""

from functools import cache

from tunix.costs.hlo import KINDS, Instruction, parse_instructions, read_branches, read_computations


def list_races(hlo: str) -> list[str]:
    """Return pairs of a loop and of a collective behind it that takes nothing of it, by the names of instructions."""
    program = {name: parse_instructions(lines) for name, lines in read_computations(hlo).items()}

    @cache
    def has_collectives(computation: str) -> bool:
        return any(each.opcode in KINDS or runs_collectives(each) for each in program.get(computation, []))

    def runs_collectives(instruction: Instruction) -> bool:
        return any(map(has_collectives, [instruction.called, *read_branches(instruction.text)]))

    races = []
    for instructions in program.values():
        loops: list[str] = []
        taken: dict[str, set[str]] = {}  # what an instruction takes, at once or by others
        for each in instructions:
            direct = [name for name in each.operands if name in taken]
            taken[each.name] = set(direct).union(*(taken[name] for name in direct))
            is_loop = runs_collectives(each)
            if is_loop or each.opcode in KINDS:
                races += [f"{loop}, then {each.name}" for loop in loops if loop not in taken[each.name]]
            if is_loop:
                loops.append(each.name)
    return races
