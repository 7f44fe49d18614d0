"""Time read off a program's schedule: what stands between a collective's start and its done hides it."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from tunix.costs.compiled_time import ATTENTION_KERNELS, KernelData, Speeds, predict_time
from tunix.costs.devices import read_topology
from tunix.costs.hlo import Collective, Work, count_trips, count_unfused, parse_instructions, read_collectives
from tunix.plan.compile import assume_speeds
from tunix.sharding.table import axis_names
from tunix.training.pipeline_schedule import Turns

HLO = """HloModule step, is_scheduled=true

%product (a: bf16[64,128], b: bf16[128,32]) -> bf16[64,32] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[128,32]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%update (stack: f32[9,100], row: f32[1,100], at: s32[]) -> f32[9,100] {
  %stack = f32[9,100]{1,0} parameter(0)
  %row = f32[1,100]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %written = f32[9,100]{1,0} dynamic-update-slice(%stack, %row, %at, %zero)
}

%body (state: (s32[], f32[9,100])) -> (s32[], f32[9,100]) {
  %state = (s32[], f32[9,100]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %stack.1 = f32[9,100]{1,0} get-tuple-element(%state), index=1
  %w = bf16[64,64]{1,0} constant(0)
  %v = bf16[128,32]{1,0} constant(0)
  %gather-start = (bf16[64,64]{1,0}, bf16[64,128]{1,0}) all-gather-start(%w), replica_groups=[1,2]<=[2], dimensions={1}
  %row.1 = f32[1,100]{1,0} constant(0)
  %kept = f32[9,100]{1,0} fusion(%stack.1, %row.1, %n), kind=kLoop, calls=%update
  %gather-done = bf16[64,128]{1,0} all-gather-done(%gather-start)
  %y = bf16[64,32]{1,0} fusion(%gather-done, %v), kind=kCustom, calls=%product
  ROOT %next = (s32[], f32[9,100]{1,0}) tuple(%n, %kept)
}

%condition (state.1: (s32[], f32[9,100])) -> pred[] {
  %state.1 = (s32[], f32[9,100]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (start: (s32[], f32[9,100])) -> (s32[], f32[9,100]) {
  %start = (s32[], f32[9,100]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[9,100]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""
PRODUCT, MOVED = 2 * 64 * 128 * 32, 2 * 100 * 4 + 4  # FLOPs; bytes: one row read, one written, and its number


@pytest.mark.parametrize(("gather_s", "exposed_s"), [(MOVED / 2, 0), (MOVED + 3, 3)], ids=["hidden", "partly exposed"])
def test_what_stands_between_start_and_done_hides(gather_s, exposed_s):
    found = read_collectives(HLO)
    assert [each.times for each in found] == [5]
    timeline = predict_time(
        HLO,
        found,
        Speeds(
            flops_per_s=PRODUCT / 1e5,
            fp8_flops_per_s=1.0,
            kernel_flops_per_s=1.0,
            bytes_per_s=1.0,
            host_bytes_per_s=1.0,
            launch_s=0.0,
            collective_s=lambda _: gather_s,
        ),
    )
    assert timeline.flops == 5 * PRODUCT
    assert timeline.compute_s == pytest.approx(5 * (MOVED + 1e5))  # the loop's stack is updated in place
    assert timeline.communication_s == pytest.approx(5 * gather_s)
    assert timeline.exposed_s == pytest.approx(5 * exposed_s)


TWO_LINKS = """
HloModule two_links

ENTRY %main (w: bf16[64,64]) -> bf16[64,128] {
  %w = bf16[64,64]{1,0} parameter(0)
  %far-start = (bf16[64,64]{1,0}, bf16[64,128]{1,0}) all-gather-start(%w), replica_groups=[1,2]<=[2], dimensions={1}
  %near-start = (bf16[64,64]{1,0}, bf16[64,128]{1,0}) all-gather-start(%w), replica_groups=[1,2]<=[2], dimensions={1}
  %near-done = bf16[64,128]{1,0} all-gather-done(%near-start)
  ROOT %far-done = bf16[64,128]{1,0} all-gather-done(%far-start)
}
"""


@pytest.mark.parametrize(("links", "waits_s"), [("one", 13), ("own", 10)])
def test_a_gather_in_a_node_does_not_wait_for_one_between_nodes(links, waits_s):
    """13 s where both take one link, one after the other; 10 s, those of the longer one, where each has its own."""
    speeds = Speeds(
        math.inf, math.inf, math.inf, math.inf, math.inf, 0.0,
        collective_s=lambda each: {"far": 10.0, "near": 3.0}[each.name.removesuffix("-start")],
        link_of=lambda each: each.name if links == "own" else "one",
    )  # fmt: skip
    timeline = predict_time(TWO_LINKS, read_collectives(TWO_LINKS), speeds)
    assert timeline.exposed_s == pytest.approx(waits_s)
    assert timeline.communication_s == pytest.approx(13)


def test_links_of_a_cluster():
    """On two nodes of 8 devices a gather over fsdp stays in a node, and a sum over dp goes between the nodes."""
    sizes = dict.fromkeys(axis_names(), 1) | {"dp": 2, "fsdp": 8}
    speeds = assume_speeds(read_topology("h100:2x8"), sizes)
    within = Collective("a", "all-gather", "bf16", 1 << 20, tuple(range(8)), 1, "")
    across = Collective("b", "all-reduce", "f32", 1 << 20, (0, 8), 1, "")
    assert speeds.link_of(within) != speeds.link_of(across)
    alone = assume_speeds(read_topology("h100:16"), sizes)
    assert alone.link_of(within) == alone.link_of(across)


def test_a_scatter_writes_its_numbers_alone():
    hlo = HLO.replace("dynamic-update-slice(%stack, %row, %at, %zero)", "scatter(%stack, %at, %row), to_apply=%set")
    counting = Speeds(math.inf, math.inf, math.inf, 1.0, 1.0, 0.0, lambda collective: 0.0)
    assert "scatter" in hlo
    whole = hlo.replace("scatter(%stack,", "scatter(%new,").replace(
        "%zero = s32[] constant(0)", "%new = f32[9,100]{1,0} broadcast(%at)"
    )
    seconds = [predict_time(text, read_collectives(text), counting).compute_s for text in (HLO, hlo, whole)]
    assert seconds[0] == seconds[1] < seconds[2]


def test_memory_into_which_nothing_is_written_takes_no_time():
    """What XLA puts in the place of zeros that every iteration of a loop writes over."""
    buffer = '%zero = f32[9,100]{1,0} custom-call(), custom_call_target="AllocateBuffer"'
    [instruction] = parse_instructions([f"  {buffer}"])
    assert count_unfused(instruction, {}) == Work()
    [instruction] = parse_instructions([f"  {buffer.replace('AllocateBuffer', 'Sharding')}"])
    assert count_unfused(instruction, {}) == Work(device_bytes=9 * 100 * 4)


@pytest.mark.parametrize("opcode", ["dot", "scaled-dot"])
def test_products_of_8_bit_floats_have_their_own_speed(opcode):
    hlo = HLO.replace("%a = bf16", "%a = f8e4m3fn").replace("%b = bf16", "%b = f8e5m2").replace(" dot(", f" {opcode}(")
    speeds = Speeds(
        flops_per_s=1.0, fp8_flops_per_s=PRODUCT / 1e5, kernel_flops_per_s=1.0, bytes_per_s=1.0, host_bytes_per_s=1.0,
        launch_s=0.0,
        collective_s=lambda _: 0.0,
    )  # fmt: skip
    assert predict_time(hlo, read_collectives(hlo), speeds).compute_s == pytest.approx(5 * (MOVED + 1e5))


CONDITIONAL = """HloModule step, is_scheduled=true

%short (a: f32[10]) -> f32[10] {
  %a = f32[10]{0} parameter(0)
  ROOT %b = f32[10]{0} negate(%a)
}

%long (c: f32[10]) -> f32[10] {
  %c = f32[10]{0} parameter(0)
  %d = f32[10]{0} negate(%c)
  ROOT %e = f32[10]{0} negate(%d)
}

ENTRY %main (which: pred[], x: f32[10]) -> f32[10] {
  %which = pred[] parameter(0)
  %x = f32[10]{0} parameter(1)
  ROOT %either = f32[10]{0} conditional(%which, %x, %x), BRANCHES
}
"""


@pytest.mark.parametrize(
    "written", ["branch_computations={%short, %long}", "true_computation=%long, false_computation=%short"]
)
def test_a_conditional_takes_as_long_as_its_slowest_branch(written):
    hlo = CONDITIONAL.replace("BRANCHES", written)
    timeline = predict_time(
        hlo,
        [],
        Speeds(
            flops_per_s=1.0,
            fp8_flops_per_s=1.0,
            kernel_flops_per_s=1.0,
            bytes_per_s=1.0,
            host_bytes_per_s=1.0,
            launch_s=0.0,
            collective_s=lambda _: 0.0,
        ),
    )
    assert timeline.compute_s == 2 * (2 * 10 * 4)  # two instructions, each reads and writes ten numbers


def test_a_loop_of_stages_counts_as_often_as_it_is_due():
    """The loss of a tick of interleaved stages runs in one of five: a fifth of it counts, and of its transfers."""
    counting = Speeds(math.inf, math.inf, math.inf, 1.0, 1.0, 0.0, lambda _: 0.0)
    due = '%either = f32[10]{0} while(%x), body=%long, metadata={op_name="jit(step)/while/body/one_of_5/while"}'
    in_entry = re.sub("%either = .*", due, CONDITIONAL)
    assert predict_time(in_entry, [], counting).compute_s == pytest.approx(160 / 5)
    gathers = CONDITIONAL.replace(
        "%d = f32[10]{0} negate(%c)", "%d = f32[20]{0} all-gather(%c), replica_groups={{0,1}}"
    )
    in_loop = HLO.replace("%w = bf16[64,64]{1,0} constant(0)", due)
    program = gathers.split("ENTRY")[0] + in_loop
    assert {each.name: each.times for each in read_collectives(program)} == {"d": 1, "gather-start": 5}


def test_a_compiled_schedule_of_stages_says_how_often_a_loop_is_due():
    turns = Turns(num_stages=2, num_chunks=5, num_parts=4)
    compiled = jax.jit(lambda due, x: turns.if_due(due, lambda x: (jnp.sin(x) @ x,), x)).lower(True, jnp.ones((8, 8)))
    (line,) = (line for line in compiled.compile().as_text().splitlines() if " while(" in line)
    assert count_trips(line) == 1 / 5


EMA = """HloModule step, is_scheduled=true

%write (stack: f32[9,100], row: f32[1,100], at: s32[]) -> f32[9,100] {
  %stack = f32[9,100]{1,0:S(5)} parameter(0)
  %row = f32[1,100]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %written = f32[9,100]{1,0:S(5)} dynamic-update-slice(%stack, %row, %at, %at)
}

ENTRY %main (kept: f32[9,100], x: f32[1,100], m: f32[50], n: s32[]) -> f32[9,100] {
  %kept = f32[9,100]{1,0:S(5)} parameter(0)
  %x = f32[1,100]{1,0} parameter(1)
  %m = f32[50]{0:S(5)} parameter(2)
  %n = s32[] parameter(3)
  %write-start = ((f32[9,100]{1,0:S(5)}, f32[1,100]{1,0}, s32[]), f32[9,100]{1,0:S(5)}, u32[]) fusion-start(%kept, %x, %n), kind=kCustom, calls=%write
  %copy-start = (f32[50]{0}, f32[50]{0:S(5)}, u32[]) copy-start(%m)
  %y = f32[1,100]{1,0} negate(%x)
  %write-done = f32[9,100]{1,0:S(5)} fusion-done(%write-start)
  %z = f32[50]{0} negate(%m)
  %copy-done = f32[50]{0} copy-done(%copy-start)
  ROOT %out = f32[9,100]{1,0:S(5)} bitcast(%write-done)
}
"""


def test_copies_to_the_host_go_on_beside_arithmetic():
    """A slice of a stack, 400 bytes, then 200 bytes; `negate` of 800 bytes hides; a kernel reads 200 bytes there."""
    speeds = Speeds(
        flops_per_s=1.0, fp8_flops_per_s=1.0, kernel_flops_per_s=1.0, bytes_per_s=2.0, host_bytes_per_s=1.0,
        launch_s=0.0, collective_s=lambda _: 0.0,
    )  # fmt: skip
    # 800 bytes of the device end with the slice; the kernel waits for the host; the second copy ends meanwhile.
    assert predict_time(EMA, [], speeds).compute_s == 400 + 200
    slower = replace(speeds, host_bytes_per_s=0.5)
    assert predict_time(EMA, [], slower).compute_s == 800 + 400


KERNEL = """HloModule step, is_scheduled=true

ENTRY %main (q: bf16[2,1024,4,64], k: bf16[2,1024,2,64]) -> bf16[2,1024,4,64] {
  %q = bf16[2,1024,4,64]{3,2,1,0} parameter(0)
  %k = bf16[2,1024,2,64]{3,2,1,0} parameter(1)
  ROOT %dq = bf16[2,1024,4,64]{3,2,1,0} custom-call(%q, %k), custom_call_target="__gpu$xla.gpu.triton", backend_config={grid_x = 4 : i32, name = "attention_d_queries", num_warps = 8 : i32}
}
"""


# Nothing but our own kernels takes time.
OF_KERNELS = Speeds(
    flops_per_s=1e30,
    fp8_flops_per_s=1e30,
    kernel_flops_per_s=10.0,
    bytes_per_s=1e30,
    host_bytes_per_s=1e30,
    launch_s=0.0,
    collective_s=lambda _: 0.0,
)


def test_attention_kernels_have_the_products_of_the_pairs_that_they_compute():
    """Three for each pair, at the share of the speed of products that the kernel reaches with heads of 64."""
    speeds = replace(OF_KERNELS, flops_per_s=10.0)
    timeline = predict_time(KERNEL, [], speeds, KernelData(pairs_per_row=1000.0))
    assert timeline.flops == 2 * 3 * 2 * 4 * 64 * 1000
    share = ATTENTION_KERNELS["attention_d_queries"].shares[64]
    assert timeline.compute_s == pytest.approx(timeline.flops / (10 * share))


GROUPED = """HloModule step, is_scheduled=true

ENTRY %main (rows: bf16[640,64], w: bf16[8,64,32], begin: s32[8]) -> bf16[8,64,32] {
  %rows = bf16[640,64]{1,0} parameter(0)
  %w = bf16[8,64,32]{2,1,0} parameter(1)
  %at = s32[8]{0} parameter(2)
  %y = bf16[640,32]{1,0} custom-call(%at, %at, %at, %rows, %w), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "grouped_forward", num_warps = 8 : i32}
  ROOT %dw = bf16[8,64,32]{2,1,0} custom-call(%at, %at, %rows, %y), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "grouped_d_weights", num_warps = 8 : i32}
}
"""


def test_grouped_kernels_have_the_products_of_the_rows_of_their_own_experts():
    """A device has 8 of 16 experts, so half of the rows are others'; a kernel computes a few rows more for each expert."""
    data = KernelData(num_experts=16, empty_rows={"grouped_forward": 4.0, "grouped_d_weights": 2.0})
    timeline = predict_time(GROUPED, [], OF_KERNELS, data)
    assert timeline.flops == 2 * 64 * 32 * (320 + 8 * 4 + 320 + 8 * 2)
    assert timeline.compute_s == pytest.approx(timeline.flops / 10)
    slow_memory = replace(OF_KERNELS, kernel_flops_per_s=1e30, bytes_per_s=1.0)
    read_and_written = 2 * (320 * (64 + 32) + 8 * 64 * 32)
    assert predict_time(GROUPED, [], slow_memory, data).compute_s == pytest.approx(2 * read_and_written)
    assert math.isnan(predict_time(GROUPED, [], OF_KERNELS).flops)


FUSED = """HloModule step, is_scheduled=true

%condition (carry: (s32[], bf16[640,64])) -> pred[] {
  %carry = (s32[], bf16[640,64]{1,0}) parameter(0)
  ROOT %goes_on = pred[] constant(true)
}

%round (carry.1: (s32[], bf16[640,64])) -> (s32[], bf16[640,64]) {
  ROOT %carry.1 = (s32[], bf16[640,64]{1,0}) parameter(0)
}

ENTRY %main (x: bf16[900,64], w: bf16[8,64,32], token: s32[640], place: s32[900,2]) -> bf16[900,64] {
  %x = bf16[900,64]{1,0} parameter(0)
  %w = bf16[8,64,32]{2,1,0} parameter(1)
  %token = s32[640]{0} parameter(2)
  %place = s32[900,2]{1,0} parameter(3)
  %up.remat = (bf16[640,32]{1,0}, bf16[640,32]{1,0}, bf16[640,32]{1,0}) custom-call(%token, %x, %w, %w), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "experts_up", num_warps = 8 : i32}
  %a = bf16[640,32]{1,0} get-tuple-element(%up.remat), index=0
  %d_inputs = (bf16[8,64,32]{2,1,0}, bf16[8,64,32]{2,1,0}) custom-call(%token, %x, %a, %a), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "experts_d_inputs", num_warps = 8 : i32}
  %z = bf16[640,64]{1,0} custom-call(%token, %a, %w), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "experts_d_rows", num_warps = 8 : i32}
  %number = s32[] constant(1)
  %first = (s32[], bf16[640,64]{1,0}) tuple(%number, %z)
  %more = (s32[], bf16[640,64]{1,0}) while(%first), condition=%condition, body=%round, metadata={op_name="jit(step)/experts/further_rounds/while"}
  ROOT %y = bf16[900,64]{1,0} custom-call(%place, %z), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "experts_combine", num_warps = 4 : i32}
}
"""


def test_fused_kernels_have_the_products_of_equal_loads():
    """Of 640 rows 1.25 times as many as equal loads give, 512 are taken. Further rounds cost a look of the host each."""
    empty_rows = {"experts_up": 4.0, "experts_d_inputs": 2.0, "experts_d_rows": 4.0}
    data = KernelData(capacity_factor=1.25, empty_rows=empty_rows)
    timeline = predict_time(FUSED, [], OF_KERNELS, data)
    up = 2 * 2 * 64 * 32 * (512 + 8 * 4)
    assert timeline.flops == up + 2 * 2 * 64 * 32 * (512 + 8 * 2) + 2 * 2 * 64 * 32 * (512 + 8 * 4)
    assert timeline.recomputed_flops == up
    assert timeline.compute_s == pytest.approx(timeline.flops / 10 + 15e-6)
    slow_memory = replace(OF_KERNELS, kernel_flops_per_s=1e30, bytes_per_s=1.0)
    rows = 512 * (64 + 3 * 32) + 512 * (64 + 2 * 32) + 512 * (64 + 2 * 32)
    read_and_written = 2 * (rows + 3 * 2 * 8 * 64 * 32) + 4 * 900 * 2 + 2 * (512 * 64 + 900 * 64)
    assert predict_time(FUSED, [], slow_memory, data).compute_s == pytest.approx(read_and_written)
    assert math.isnan(predict_time(FUSED, [], OF_KERNELS).flops)
