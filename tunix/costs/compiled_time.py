"""Predicted time of a compiled program: a walk through its schedule with a clock for arithmetic and one for each link.

One clock is the device's arithmetic, another is a link to other devices. A collective is two instructions. Its
`-start` puts it on the link; arithmetic goes on. At its `-done` arithmetic waits until the collective has ended:

    instruction    gather-start   fusion.1   fusion.2   gather-done   fusion.3
    arithmetic                    |=========|=========|   waits      |========|
    link           |==================================================|
                                                       ^ exposed    ^

The wait is *exposed* communication: it makes the step longer. The rest of the collective is hidden. If each fusion
takes 2 ms and the gather takes 5 ms, arithmetic waits for 1 ms: the program takes 7 ms, of which 1 ms is exposed.

A link takes one collective at a time. Links in a node (NVLink) and the network are different hardware, so a collective
between nodes holds up none in a node: each kind has a clock of its own. Copies between the memories of device and host
(`training.offload`) go the same way on a third link; a wait for one of them counts as arithmetic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from tunix.costs.hlo import (
    ASYNC_CALLS,
    COMBINE,
    FREE,
    FUSED_KERNELS,
    KINDS,
    TRIP_COUNT,
    Collective,
    Instruction,
    Scope,
    Work,
    count_fused,
    count_fusion,
    count_grouped,
    count_trips,
    count_unfused,
    multiplies_fp8,
    parse_instructions,
    read_branches,
    read_computations,
)


class AttentionKernel(NamedTuple):
    """Work of a kernel of models/flash_attention.py."""

    num_matmul: int  # products of a pair of a query and a key
    # Share of the speed of matrix products that it reaches, by head dim: measured on one H200, where products are taken
    # to reach 693 TFLOP/s (benchmarks/results.md). The softmax takes more of the time where heads are narrow.
    shares: dict[int, float]


ATTENTION_KERNELS = {
    "attention_forward": AttentionKernel(2, {64: 0.38, 128: 0.52, 256: 0.41}),  # scores, outputs
    # Scores, and the gradients of scores and of queries.
    "attention_d_queries": AttentionKernel(3, {64: 0.58, 128: 0.64, 256: 0.46}),
    # Scores, and the gradients of scores, of keys and of values.
    "attention_d_keys": AttentionKernel(4, {64: 0.53, 128: 0.56, 256: 0.22}),
}
RECOMPUTED = ".remat"  # in the names of instructions that XLA's own rematerialization has copied
FURTHER_ROUNDS = "further_rounds"  # the scope of the loop of models/fused_experts.py
HOST_READ_S = 15e-6  # seconds in which the host reads the condition of a loop whose end is data; assumed
HOST = "host"  # the link to the host's memory
GROUPED_KERNELS = ("grouped_forward", "grouped_d_rows", "grouped_d_weights")  # of models/grouped_matmul.py


@dataclass(frozen=True)
class Speeds:
    """Speeds that the prediction assumes for one device."""

    flops_per_s: float  # of matrix products
    fp8_flops_per_s: float  # of those of 8-bit floats
    kernel_flops_per_s: float  # of our kernels of experts: grouped_matmul.py and fused_experts.py
    bytes_per_s: float  # of reading and writing the device's memory
    host_bytes_per_s: float  # between the device and the host's memory
    launch_s: float  # between the end of a kernel and the start of the next
    collective_s: Callable[[Collective], float]  # seconds of one execution
    link_of: Callable[[Collective], str] = lambda _: "peers"  # the link that it takes; each has a clock


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
    # Rows for which fused kernels have room, for each row of a device whose experts have equal loads.
    capacity_factor: float = math.nan
    # Rows that a product of experts computes for each expert beside the expert's own, by kernel.
    empty_rows: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds and counted FLOPs of one run of a program on one device."""

    compute_s: float = 0.0  # with waits for the host's memory
    exposed_s: float = 0.0  # arithmetic waits for a collective
    communication_s: float = 0.0  # of all collectives, hidden or exposed
    flops: float = 0.0  # of matrix products
    recomputed_flops: float = 0.0  # of those that XLA computes once more to save memory, whatever `training.remat` is

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    def after(self, other: "StepTime", times: float = 1) -> "StepTime":
        """Return the time of `other` followed by `times` runs of this."""
        return StepTime(
            other.compute_s + times * self.compute_s,
            other.exposed_s + times * self.exposed_s,
            other.communication_s + times * self.communication_s,
            other.flops + times * self.flops,
            other.recomputed_flops + times * self.recomputed_flops,
        )


def predict_time(hlo: str, collectives: list[Collective], speeds: Speeds, data: KernelData | None = None) -> StepTime:
    """Predict the time of a scheduled program.

    `hlo` is the text of `compiled.as_text()`, `collectives` are those that `read_collectives` found in it. `data` is
    needed where the program has kernels of our own.
    """
    return _Walk(hlo, collectives, speeds, data or KernelData()).run("ENTRY")


@dataclass
class _Clocks:
    """Times of one computation so far: of its arithmetic, and of each link."""

    total: StepTime = field(default_factory=StepTime)
    free: dict[str, float] = field(default_factory=dict)  # when each link has sent everything so far
    ends: dict[str, float] = field(default_factory=dict)  # when each collective and each copy that has started ends

    def start(self, link: str, name: str, seconds: float) -> None:
        # It begins when both are ready: arithmetic has come to it, and the link has sent what was put there before.
        self.free[link] = self.ends[name] = max(self.total.step_s, self.free.get(link, 0.0)) + seconds
        if link != HOST:
            self.total = replace(self.total, communication_s=self.total.communication_s + seconds)

    def wait_for(self, name: str) -> float:
        """Return the seconds until a collective or a copy ends; 0 for what takes no time on a link."""
        return max(0.0, self.ends.get(name, 0.0) - self.total.step_s)


class _Walk:
    """A walk through the computations of a program, each of which is timed once, however often it runs."""

    def __init__(self, hlo: str, collectives: list[Collective], speeds: Speeds, data: KernelData):
        self.program = {name: parse_instructions(lines) for name, lines in read_computations(hlo).items()}
        self.collectives = {each.name: (speeds.link_of(each), speeds.collective_s(each)) for each in collectives}
        self.speeds, self.data = speeds, data
        self.run = cache(self._run)
        self.count_fusion = cache(lambda name: count_fusion(name, self.program))

    def _run(self, name: str) -> StepTime:
        """Return the time of a computation, instruction after instruction in the order of the schedule."""
        scope = {instruction.name: instruction for instruction in self.program.get(name, ())}
        clocks = _Clocks()
        for instruction in scope.values():
            opcode = instruction.opcode
            starts, ends = opcode.endswith("-start"), opcode.endswith("-done")
            if opcode.removesuffix("-start").removesuffix("-done") in KINDS:
                # A collective is `-start` and `-done`, or one instruction that is both.
                if not ends:
                    link, seconds = self.collectives[instruction.name]
                    clocks.start(link, instruction.name, seconds)
                if not starts:
                    wait_s = clocks.wait_for(instruction.operands[0] if ends else instruction.name)
                    clocks.total = StepTime(exposed_s=wait_s).after(clocks.total)
            elif ends:
                clocks.total = StepTime(clocks.wait_for(instruction.operands[0])).after(clocks.total)
            elif starts and (num_bytes := self._count(instruction, scope).host_bytes):
                clocks.start(HOST, instruction.name, num_bytes / self.speeds.host_bytes_per_s)
            else:
                clocks.total = self._time(instruction, scope).after(clocks.total)
        return clocks.total

    def _time(self, instruction: Instruction, scope: Scope) -> StepTime:
        """Return the time of an instruction that is no collective; `scope` is its computation."""
        if instruction.opcode == "conditional":  # the slowest branch counts
            return max(map(self.run, read_branches(instruction.text)), key=lambda branch: branch.step_s)
        if instruction.opcode in ("while", "call"):
            # Further rounds: none with equal loads; the host reads that.
            if FURTHER_ROUNDS in instruction.text and not TRIP_COUNT.search(instruction.text):
                return StepTime(HOST_READ_S)
            return self.run(instruction.called).after(StepTime(), count_trips(instruction.text))
        speeds, (work, flops_per_s) = self.speeds, self._work_and_speed(instruction, scope)
        # A kernel computes and reads at the same time: the slowest of these decides ("roofline").
        memory_s = work.device_bytes / speeds.bytes_per_s, work.host_bytes / speeds.host_bytes_per_s
        launch_s = 0.0 if instruction.opcode in FREE else speeds.launch_s
        recomputed_flops = work.flops if RECOMPUTED in instruction.name else 0.0
        seconds = launch_s + max(work.flops / flops_per_s, *memory_s)
        return StepTime(seconds, flops=work.flops, recomputed_flops=recomputed_flops)

    def _work_and_speed(self, instruction: Instruction, scope: Scope) -> tuple[Work, float]:
        """Return the work of an instruction, and the FLOPs per second with which the device does it.

        HLO shows nothing of the inside of our own kernels: their FLOPs come from the shapes of their operands.
        """
        speeds, data, kernel = self.speeds, self.data, instruction.kernel
        if kernel in (*FUSED_KERNELS, COMBINE):
            work = count_fused(instruction, scope, data.capacity_factor, data.empty_rows.get(kernel, math.nan))
            return work, speeds.kernel_flops_per_s
        if kernel in GROUPED_KERNELS:
            work = count_grouped(instruction, scope, data.num_experts, data.empty_rows.get(kernel, math.nan))
            return work, speeds.kernel_flops_per_s
        work = self._count(instruction, scope)
        name = kernel.removesuffix("_own").removesuffix("_before")  # two kernels of models/ring.py for each
        if attention := ATTENTION_KERNELS.get(name):
            batch, _, heads, dim = scope[instruction.operands[0]].dims  # queries [B, T, N, H]
            in_block = data.ring_pairs.get(kernel[len(name) :], math.nan)
            pairs = data.pairs_per_row if kernel == name else in_block
            flops = 2.0 * attention.num_matmul * batch * heads * dim * pairs
            return work._replace(flops=flops), speeds.flops_per_s * attention.shares[dim]
        is_fp8 = multiplies_fp8(instruction, scope, self.program)
        return work, speeds.fp8_flops_per_s if is_fp8 else speeds.flops_per_s

    def _count(self, instruction: Instruction, scope: Scope) -> Work:
        """Count the work of an instruction; that of a fusion is counted once, though it may run many times."""
        is_fusion = instruction.opcode in ("fusion", *ASYNC_CALLS)
        return self.count_fusion(instruction.called) if is_fusion else count_unfused(instruction, scope)
