"""`python -m tunix.plan`: what is derived is what the compiled step holds and moves; what cannot be is refused."""

import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from models.test_linear_attention import HYBRID
from PIL import Image
from support.harness import ONE_DEVICE, ROOT, SMALL, batch, experts, program

from tunix.base.errors import UserError
from tunix.base.files import read_json
from tunix.config import DeviceKind
from tunix.config.compose import compose
from tunix.config.training import REMAT
from tunix.costs.communication import Transfer, predict_seconds
from tunix.costs.compiled_time import StepTime
from tunix.costs.devices import (
    HBM_SHARE,
    KERNEL_SHARE,
    LINK_SHARE,
    Group,
    find_kind,
    predict_collective_s,
    read_device_kinds,
    read_topology,
    replace_network,
)
from tunix.costs.hlo import read_collectives
from tunix.costs.passes import FusedWork, count_weight_bytes
from tunix.costs.rollout import PAGE, USABLE, select_pages, select_rows
from tunix.costs.step import _count_repeated_flops, derive, derive_costs, find_train_spec
from tunix.models.attention import select_query_block
from tunix.models.context_parallel import select_exchange
from tunix.models.flops import chunk_flops_per_token, flops_per_token, forward_flops_per_token
from tunix.plan import __main__ as plan
from tunix.plan import derived_time
from tunix.plan.compile import WORKERS, Compiled, RunningCompiles, compile_all, find_backend
from tunix.plan.derived_time import Link, count_pairs_in_ring, resolve_exchange
from tunix.plan.ranking import (
    KNOWN_TO_FIT,
    Candidate,
    Ranking,
    _pick_to_compile,
    describe_no_fit,
    list_micro_batch_sizes,
    make_candidate,
    rank,
)
from tunix.plan.report import _list_refused, format_command, format_text, make_record
from tunix.sharding.mesh import data_shards, explicit_sizes, meshes, token_shards
from tunix.sharding.table import axis_names
from tunix.trainer import plan_run
from tunix.trainer import run as train
from tunix.training.choices import Planned, select

MICROBATCHES = 4
EXPERTS = experts()


@pytest.mark.nightly(but=["all axes"])
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        pytest.param("[[8],[fsdp]]", [], id="fsdp"),
        pytest.param("[[8],[fsdp]]", ["training.sharding_strategy=shard_optimizer"], id="zero1"),
        pytest.param("[[2,4],[dp,fsdp]]", ["training.sync_gradients_every=2"], id="hybrid"),
        pytest.param("[[8],[dp]]", ["training.sharding_strategy=no_shard"], id="copies"),
        pytest.param("[[8],[fsdp]]", ["model.lora.rank=2"], id="lora"),
        pytest.param("[[8],[fsdp]]", ["model.lora.rank=2", "model.lora.quantize_base=int8"], id="int8"),
        pytest.param("[[2,2,2],[dp,fsdp,tp]]", [], id="all axes"),
        pytest.param("[[2,2,2],[dp,fsdp,tp]]", ["training.sequence_parallel=false"], id="whole stream"),
        pytest.param("[[2,4],[fsdp,tp]]", ["model.lora.rank=2"], id="key heads on all devices"),
        pytest.param(
            "[[4,2],[fsdp,tp]]",
            ["training.remat=projections", "training.remat_every=3", "model.num_layers=6"],
            id="remat",
        ),
        pytest.param("[[4,2],[pp,fsdp]]", ["model.num_layers=8", "model.global_every=2"], id="stages"),
        pytest.param("[[4,2],[pp,tp]]", ["model.num_layers=8", "model.global_every=2"], id="stages and tp"),
        pytest.param("[[2,4],[fsdp,cp]]", [], id="cp"),
        pytest.param("[[2,4],[fsdp,cp]]", ["model.cp_exchange=ring"], id="ring"),
        pytest.param("[[2,2,2],[fsdp,cp,tp]]", ["training.remat=none"], id="cp and tp"),
        pytest.param("[[2,4],[fsdp,ep]]", [EXPERTS], id="ep"),
        pytest.param("[[2,4],[ep,tp]]", [EXPERTS], id="ep and tp"),
        pytest.param("[[2,4],[fsdp,cp]]", [*HYBRID, "model.num_layers=6"], id="linear"),
    ],
)
def test_derived_is_what_is_compiled(mesh, more):
    """State in bytes, exactly; gathered, reduced and exchanged bytes to 2 %."""
    step = program(f"model.mesh_shape={mesh}", f"training.gradient_accumulation_steps={MICROBATCHES}", *more)
    rows = batch(MICROBATCHES * data_shards(step.mesh.shape), MICROBATCHES)
    compiled = step.compile(rows)
    costs = derive(step.cfg, explicit_sizes(step.cfg.model.mesh_shape), "cpu")
    parts = data_shards(step.mesh.shape) * token_shards(step.mesh.shape)
    given = sum(leaf.nbytes for leaf in rows.values()) // parts + 8  # the batch, two counters
    held = costs.num_bytes["weights"] + costs.num_bytes["optimizer"]
    assert held + given == pytest.approx(compiled.memory_analysis().argument_size_in_bytes, abs=512)
    found = [c for c in read_collectives(compiled.as_text()) if c.group_size > 1]
    sizes = dict(step.mesh.shape)
    for kinds in (("all-gather",), ("all-reduce", "reduce-scatter"), ("all-to-all", "collective-permute")):
        moved = sum(c.num_bytes * c.times for c in found if c.kind in kinds)
        derived = sum(t.num_bytes for t in costs.transfers if t.kind in kinds and any(sizes[a] > 1 for a in t.axes))
        assert derived == pytest.approx(moved, rel=0.02), kinds


def test_weights_that_are_not_trained_have_no_gradients_to_count():
    """Of a tied embedding: all parameters are multiplied."""
    model, million = compose(SMALL).config.model, 10**6
    trained, frozen = (flops_per_token(model, million, count, seq_len=32) for count in (million, 0))
    assert trained == 3 * forward_flops_per_token(model, million, seq_len=32)
    assert trained - frozen == 2 * million


@pytest.mark.parametrize("tied", ["true", "false"])
def test_vectors_of_texts_have_no_logits_to_count(tied):
    """task=embed multiplies no table; its MFU counted the logits of every token."""
    words = [*SMALL, "data=jsonl", "data.paths=[x]", "loading.packing=pad", f"model.tied_head={tied}"]
    sizes = dict.fromkeys(axis_names(), 1) | {"tp": 2}
    sft, embed = (
        derive(compose([*words, f"task={task}"]).config, sizes, "gpu", with_activations=False)
        for task in ("sft", "embed")
    )
    of_logits = 6 * 320 * 32 * sft.tokens_per_step / 2
    assert sft.model_flops - embed.model_flops == pytest.approx(of_logits)
    assert sft.pass_bytes > embed.pass_bytes
    # The vectors of all rows are there before any loss.
    assert (sft.outside_flops, embed.outside_flops) == (0.0, pytest.approx(embed.model_flops / 3))


def test_memory_is_derived_where_there_is_no_cudnn():
    mesh, kernel = "model.mesh_shape=[[8],[fsdp]]", "model.attention=cudnn"
    cudnn, plain = (compose([*SMALL, mesh, *more]).config for more in ([kernel], []))
    sizes = explicit_sizes(plain.model.mesh_shape)
    assert 0 < derive(cudnn, sizes).memory < derive(plain, sizes).memory


def test_large_collectives_are_as_fast_as_the_slowest_link():
    kind, sizes = read_device_kinds()["h200"], dict.fromkeys(axis_names(), 1) | {"dp": 2, "fsdp": 4, "tp": 4}
    link, network = kind.link_gb_per_s * LINK_SHARE, kind.network.nic_gb_per_s * kind.network.share

    def gigabyte(kind_of_transfer: str, *axes: str, per_node: int = 8) -> float:
        whole = predict_seconds(Transfer(kind_of_transfer, axes, 10**12), sizes, kind, per_node)
        return whole / 1000

    assert gigabyte("all-gather", "tp") == pytest.approx(0.75 / link, rel=1e-3)
    assert gigabyte("all-reduce", "tp") == pytest.approx(2 * 0.75 / link, rel=1e-3)
    assert gigabyte("all-gather", "fsdp") == pytest.approx(0.75 / (2 * network), rel=1e-3)  # two in a node
    assert gigabyte("all-reduce", "dp") == pytest.approx(2 * 0.5 / network, rel=1e-3)  # alone in its node
    assert gigabyte("all-gather", "fsdp", "ep", "cp") == gigabyte("all-gather", "fsdp")  # axes of size 1 place nobody
    sizes |= {"dp": 1, "ep": 4, "cp": 2, "tp": 1}  # a node of fsdp x ep x cp = 1 x 4 x 2: cp alone is inside of it
    assert gigabyte("all-gather", "fsdp", "cp") == pytest.approx(0.875 / (2 * network), rel=1e-3)
    sizes |= {"dp": 2, "ep": 1, "cp": 1, "tp": 4}
    of_six = gigabyte("all-gather", "tp", per_node=6)  # devices 4 and 5, 6 and 7
    assert of_six == pytest.approx(0.75 / (2 * network * 8 / 6), rel=1e-3)  # 8 cards for 6 devices


def test_small_collectives_wait_for_their_hops():
    """Latency as NCCL counts it: of the protocol that is fastest for the size; a tree has fewer hops than a ring."""
    kind = read_device_kinds()["h100"]
    eight, many = Group(8, 8), Group(128, 8)

    def microseconds(name: str, num_bytes: float, group: Group, on: DeviceKind = kind) -> float:
        return 1e6 * predict_collective_s(name, num_bytes, group, on, 8)

    assert microseconds("all-gather", 0, Group(1, 1)) == 0
    assert microseconds("all-gather", 0, eight) == pytest.approx(6.6 + 7 * 0.6)
    assert microseconds("all-gather", 0, many) == pytest.approx(6.6 + (127 - 15) * 0.6 + 15 * 2.7)
    assert microseconds("all-reduce", 0, many) == pytest.approx(6.8 + 2 * 7 * 0.6 + 2 * 4 * 5.0)  # by tree
    assert microseconds("all-reduce", 0, Group(2, 2)) == pytest.approx(6.6 + 2 * 0.6)  # by ring, twice round
    assert microseconds("all-reduce", 10**10, many) < 2.01 * microseconds("all-gather", 10**10, many)  # by ring
    split = 1000 * microseconds("all-gather", 10**6, many)
    assert split > 3 * microseconds("all-gather", 10**9, many)
    far = replace_network(kind, "efa_400")
    assert microseconds("all-gather", 0, many, far) == pytest.approx(microseconds("all-gather", 0, many) + 15 * 75)
    assert microseconds("all-reduce", 0, many, far) == pytest.approx(microseconds("all-reduce", 0, many) + 2 * 4 * 75)
    assert microseconds("all-gather", 0, eight, far) == microseconds("all-gather", 0, eight)
    slow = replace_network(kind, "tcpx_200")
    assert microseconds("all-gather", 10**10, many, slow) == pytest.approx(
        4 * microseconds("all-gather", 10**10, many), rel=0.1
    )
    with pytest.raises(UserError, match="plan.network=tcpx: there is no such network; .* did you mean tcpx_200"):
        replace_network(kind, "tcpx")


def test_a_transfer_waits_for_half_of_the_one_before_it():
    """The link is busy for half of 20 s, with transfers of 1 s; arithmetic waits for 4 others on it."""
    link = Link()
    link.put(Transfer("all-gather", ("fsdp",), 10, count=10), 10.0)
    link.put(Transfer("all-reduce", ("fsdp",), 4, overlaps=0.0, count=4), 0.04)
    link.put(Transfer("all-reduce", ("fsdp",), 4, overlaps=0.0, count=4), 0.04)  # XLA joins both
    assert link.wait_behind_others(20.0) == pytest.approx(4 * 0.5 * 0.5)
    assert link.wait_behind_others(5.0) == pytest.approx(4 * 0.5)  # it is always busy
    assert list(link.in_passes) == [5.0, 5.0]
    assert Link().wait_behind_others(20.0) == 0.0


def test_the_update_reads_the_summed_gradients():
    """Not the bytes of gradients at the moment that needs the most memory, which has parts of them as well."""
    cfg, sizes, cluster = compose(["model=llama3_8b"]).config, {"fsdp": 8}, read_topology("h100:8")
    sizes = dict.fromkeys(axis_names(), 1) | sizes
    costs = derive(cfg, sizes, "gpu", with_activations=False)
    assert costs.gradient_bytes == costs.num_bytes["weights"] < costs.num_bytes["gradients"]
    at_another = replace(costs, num_bytes=costs.num_bytes | {"gradients": 0})
    times = [derived_time.derive_time(cfg, sizes, each, cluster).step_s for each in (costs, at_another)]
    assert times[0] == times[1]


def test_what_arithmetic_cannot_hide_is_exposed(monkeypatch):
    """3 s of arithmetic, of which the backward pass has 2 s; sums of gradients that overlap it take 2.4 s. A sum of 0.2 s
    that is waited for waits for one of them, of which half is left, as often as the link is busy."""
    monkeypatch.setattr(derived_time, "_derive_compute_s", lambda *_: (3.0, 0.0))
    monkeypatch.setattr(derived_time, "predict_seconds", lambda transfer, *_: transfer.num_bytes / 10)
    sizes: Any = dict.fromkeys(axis_names(), 1) | {"fsdp": 8}
    transfers = [Transfer("reduce-scatter", ("fsdp",), 24), Transfer("all-reduce", ("fsdp",), 2, overlaps=0.0)]
    costs: Any = SimpleNamespace(model_flops=3.0, flops=3.0, transfers=transfers)
    found = derived_time.derive_time(compose([]).config, sizes, costs, read_topology("h100:8"))
    assert found.exposed_s == pytest.approx(0.2 + (2.4 - 2) + 2.4 / 3 * 2.4 / 2)
    assert (found.compute_s, found.communication_s) == (3.0, pytest.approx(2.6))


def test_links_in_a_node_and_between_nodes_are_busy_at_one_time(monkeypatch):
    monkeypatch.setattr(derived_time, "_derive_compute_s", lambda *_: (3.0, 0.0))
    monkeypatch.setattr(derived_time, "predict_seconds", lambda transfer, *_: transfer.num_bytes / 10)
    sizes: Any = dict.fromkeys(axis_names(), 1) | {"dp": 2, "fsdp": 8}
    transfers = [Transfer("reduce-scatter", ("fsdp",), 24), Transfer("all-reduce", ("dp",), 24)]
    costs: Any = SimpleNamespace(model_flops=3.0, flops=3.0, transfers=transfers)
    found = derived_time.derive_time(compose([]).config, sizes, costs, read_topology("h100:2x8"))
    assert (found.exposed_s, found.communication_s) == (pytest.approx(2.4 - 2), pytest.approx(4.8))


@pytest.mark.parametrize(("dtype", "share"), [("null", 0.0), ("fp8", 0.9)])
def test_arithmetic_is_that_of_products_kernels_passes_and_the_update(dtype, share, monkeypatch):
    """Products of 8 bits are all that is left beside kernels, which have a tenth of all and more."""
    attention = derived_time.AttentionWork(counted_flops=2e15, seconds=5.0)
    monkeypatch.setattr(derived_time, "derive_attention", lambda *_: attention)
    cfg, cluster = compose([f"training.matmul_dtype={dtype}"]).config, read_topology("h100:8")
    kind, fused = cluster.kind, FusedWork(counted_flops=1e15, flops=3e15, num_bytes=1e12)
    costs: Any = SimpleNamespace(
        num_bytes={"weights": 1e9, "optimizer": 2e9}, gradient_bytes=3e9, flops=10e15, matmul_share=share, fused=fused,
        pass_bytes=4e12, tokens_per_step=8000,
    )  # fmt: skip
    compute_s, outside_s = derived_time._derive_compute_s(cfg, {}, costs, cluster)
    flops_per_s, bytes_per_s = kind.peak_tflops * 1e12 * kind.efficiency, kind.hbm_gb_per_s * 1e9 * HBM_SHARE
    products_s = 7e15 / (flops_per_s if not share else kind.fp8_tflops * 1e12 * kind.efficiency)
    update_s = 2 * 6e9 / bytes_per_s
    kernels_s = 3e15 / (flops_per_s * KERNEL_SHARE) + 5.0
    assert compute_s == pytest.approx(products_s + kernels_s + 5e12 / bytes_per_s + update_s)
    logits = 6 * cfg.num_outputs * cfg.model.embed_dim * 1000
    assert outside_s == pytest.approx(update_s + logits / flops_per_s)


def test_attention_computes_its_pairs_as_often_as_it_runs(monkeypatch):
    """Two microbatches of 5 rows, 7 heads and 3 layers with a window of 4; the forward pass runs twice more."""
    case: Any = SimpleNamespace(
        recompute=2.0, recompute_products=0.5, windows={4: 3}, microbatches=2,
        heads=SimpleNamespace(num_devices=1, rows=5, queries=7, itemsize=2), kind=SimpleNamespace(dim=1, value_dim=3),
        cluster=read_topology("h100:8"), flash_blocks=None, kernel="xla",
        cfg=SimpleNamespace(training=SimpleNamespace(seq_len=4096)),
    )  # fmt: skip
    monkeypatch.setattr(derived_time, "_list_cases", lambda *_: [case])
    kind, layers = case.cluster.kind, 2 * 5 * 7 * 3
    flops_per_s, bytes_per_s = kind.peak_tflops * 1e12 * kind.efficiency, kind.hbm_gb_per_s * 1e9 * HBM_SHARE
    cfg = compose([*SMALL, "training.seq_len=4096"]).config
    found = derived_time.derive_attention(cfg, dict.fromkeys(axis_names(), 1), case.cluster)
    pairs, flops = 1 + 2 + 3 + 4 * 4093, (2 * (1 + 3), 8 * 1 + 6 * 3)
    assert found.counted_flops == layers * pairs * 3.5 * flops[0]
    times = (3 * 4 + 2 * 2) / bytes_per_s, (4 * 4 + 5 * 2) / bytes_per_s  # scores pass through memory
    computed = (4096 + select_query_block(4096)) * 4096 / 2  # the triangle of its blocks
    assert found.seconds == pytest.approx(layers * computed * (3 * times[0] + times[1]))
    case.kernel = "cudnn"
    assert derived_time._predict_pair_times(case) == tuple(each / (flops_per_s * KERNEL_SHARE) for each in flops)


def test_the_memory_of_a_mesh_is_that_of_the_largest_need():
    """Of a step with a teacher beside it, of the batch of another stage, or of what runs alone."""

    def make(memory: int, **more: Any) -> Candidate:
        costs: Any = SimpleNamespace(**{"memory": memory, "standalone_bytes": 0, "num_bytes": {}} | more)
        cluster: Any = None
        return Candidate({}, compose([]).config, cluster, costs, cluster)

    compiled: Any = SimpleNamespace(memory=80, step_time=None)
    assert make(100).memory == 100
    assert make(100, standalone_bytes=500).memory == 500
    assert replace(make(100), stages=(make(150), make(90))).memory == 150
    assert replace(make(100), stages=(make(150),), compiled=compiled).memory == 80 + 50
    with_teacher = make(100, num_bytes={"teacher": 7})
    assert replace(with_teacher, compiled=compiled).memory == 87  # the derived memory has it already


def test_a_ring_waits_for_its_slowest_transfer(monkeypatch):
    """Keys travel while a block is computed; backward, gradients too, and the last ones go home alone."""
    monkeypatch.setattr(derived_time, "_predict_pair_times", lambda case: derived_time.PairTimes(1.0, 2.0))
    monkeypatch.setattr(derived_time, "_count_pairs", lambda case, window: np.array([4.0, 3.0]))
    monkeypatch.setattr(derived_time, "predict_seconds", lambda transfer, *_: transfer.num_bytes)
    heads = SimpleNamespace(
        rows=1, queries=1, numbers=1, keys=1, itemsize=2
    )  # keys and values of 4 s, gradients of 8 s
    case: Any = SimpleNamespace(heads=heads, recompute=1, sizes={}, cluster=SimpleNamespace(kind=None, per_node=8))
    assert derived_time.time_of_ring(case, 9) == 2 * (4 + 3) + (8 + 8) + 8


def test_derived_collectives_are_counted():
    """Each block of each microbatch gathers forward and backward; the bytes are the same."""
    words = [*SMALL, "model.mesh_shape=[[8],[fsdp]]", "training.gradient_accumulation_steps=2"]
    costs = derive(compose(words).config, {axis: 8 if axis == "fsdp" else 1 for axis in axis_names()})
    gathers = [each.count for each in costs.transfers if each.kind == "all-gather"]
    assert max(gathers) == 2 * 2 * 3
    assert min(gathers) == 1  # the table


def test_passes_over_weights_are_counted_in_each_microbatch_and_part():
    """Of weights that are gathered once a step: a layer is cut out of its stack twice (4 bytes), its gradient is added
    to a sum (10). On stages in each part, and the table of logits with its sum (16) and two chunks (10)."""

    def count(mesh: str, *words: str) -> float:
        cfg = compose([*SMALL, f"model.mesh_shape={mesh}", "training.sharding_strategy=shard_optimizer", *words]).config
        sizes = explicit_sizes(cfg.model.mesh_shape)
        assert sizes is not None
        spec = find_train_spec(cfg, sizes, "gpu")
        weights = jax.tree.leaves(spec.arch.weights)
        stacked[mesh] = sum(each.size for each in weights if each.equation.is_stacked)
        table[mesh] = spec.arch.weights["embedding"]["table"].size
        return count_weight_bytes(spec)

    stacked, table = dict[str, int](), dict[str, int]()
    one = "[[8],[fsdp]]"
    loop, unrolled = (
        count(one, "training.gradient_accumulation_steps=4", f"training.unroll_layers={each}") for each in (False, True)
    )
    assert loop - unrolled == pytest.approx(4 * 2 * 4 * stacked[one])
    stages = "[[2,4],[pp,fsdp]]"
    few, many = (
        count(stages, "model.num_layers=4", "training.micro_batch_size=16", f"training.pipeline_microbatches={parts}")
        for parts in (4, 8)
    )
    of_layers, of_table = 2 * 4 + 10, 6 + 16 + 2 * 10
    norm = 6 * 64  # behind the last layer
    expected = 4 * (of_layers * stacked[stages] / 2 + of_table * table[stages] + norm)
    assert many - few == pytest.approx(expected, rel=1e-2)


def test_peaks_are_those_of_the_kinds():
    assert find_kind("NVIDIA H100 80GB HBM3") == read_device_kinds()["h100"]
    assert find_kind("NVIDIA H100 PCIe") == read_device_kinds()["h100_pcie"]
    # The A100 of 40 GB has half of the memory of the one whose name its own contains.
    names = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"
    assert [find_kind(name).memory_gib for name in names] == [39.4, 79.2, 79.2]
    assert find_kind("cpu") is None


AUTO = [*SMALL, "training.micro_batch_size=auto", "training.global_batch_size=64"]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """The command, in an empty folder; nothing is compiled unless asked for."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        compiled = [] if "plan.num_compiled" in " ".join(words) else ["plan.num_compiled=0"]
        monkeypatch.setattr(sys, "argv", ["tunix.plan", *compiled, *words])
        code = plan.main()
        return code, *capsys.readouterr()

    return run


def test_ranks_what_fits_and_says_why_not_the_rest(run):
    code, out, _ = run(*SMALL, "plan.topology=h200:2x4", "--json")
    assert code == 0
    found = json.loads(out)
    speeds = [each["predicted"]["tokens_per_s"] for each in found["fit"]]
    assert speeds == sorted(speeds, reverse=True)
    predicted = found["fit"][0]["predicted"]
    assert predicted["run_s"] == pytest.approx(predicted["steps"] * predicted["step_time_s"])
    assert "model.num_heads=4 is not divisible by mesh axis tp=8" in found["refused"]['[[8],["tp"]]']
    assert len(found["fit"]) + len(found["refused"]) == len(list(meshes(8, compose(SMALL).config.dims)))
    assert not [mesh for mesh in found["refused"] if "ep" in mesh]  # a model without experts has nothing for it
    assert f"model.mesh_shape={found['fit'][0]['mesh_shape']}" in found["command"]
    sharded, copied = (
        next(e for e in found["fit"] if e["mesh_shape"] == f'[[8],["{axis}"]]') for axis in ("fsdp", "dp")
    )
    assert sharded["bytes_per_device"]["optimizer"] < copied["bytes_per_device"]["optimizer"] / 7


def test_stages_are_refused_with_their_reason(run):
    """The number of parts that stages may split is 1 here, which alone would say nothing."""
    words = ["model.layer_inputs={dim:8}", "plan.topology=h200:2", "--json"]
    refused = json.loads(run(*SMALL, *words)[1])["refused"]
    reason = "model.layer_inputs gives a layer arrays that do not travel from stage to stage"
    assert reason in refused['[[2],["pp"]]']


def test_meshes_that_are_refused_for_one_reason_share_a_line():
    lines = _list_refused({"A": "ep=2 splits experts", "B": "ep=2 splits experts", "C": "ep=4 splits experts"})
    assert lines == ["refused A B: ep=2 splits experts", "refused C: ep=4 splits experts"]


@pytest.mark.parametrize(("rank", "passes"), [(0, 3), (4, 2)])
def test_the_bubble_of_stages_has_no_logits(rank, passes):
    """Of a table that low-rank updates leave frozen there are two passes, not three: the bubble was too small."""
    sizes, costs = dict.fromkeys(axis_names(), 1) | {"pp": 3}, []
    for rows in (512, 1024):
        cfg = compose([*SMALL, f"model.lora.rank={rank}", f"model.vocab_size={rows}", "training.seq_len=48"]).config
        costs.append(derive(cfg, sizes, "cpu", with_activations=False))
    further = 2 * 512 * cfg.model.embed_dim * costs[0].tokens_per_step / 3
    assert costs[1].flops - costs[0].flops == pytest.approx(passes * further)


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        (["training.remat=full"], 3),
        (["training.remat=full", "model.lora.rank=4"], 2),
        (["task=dpo", "data=pairs", "data.paths=[none]", "loading.packing=pad"], 4),
        (
            [
                "model=glm4_5_air",
                "model.rotated_dim=4",
                "model.sliding_window=null",
                "model.global_every=1",
                experts(),
                "model.mtp={loss_weight: 0.3}",
                "training.remat=full",
            ],
            6,
        ),
    ],
    ids=["remat", "lora", "dpo", "mtp"],
)
def test_logits_are_in_no_block(words, passes):
    """No policy computes them again; a loss whose tokens depend on one another does."""
    costs = []
    for rows in (512, 1024):
        cfg = compose([*SMALL, *words, f"model.vocab_size={rows}"]).config
        costs.append(derive(cfg, dict.fromkeys(axis_names(), 1), "cpu", with_activations=False))
    further = 2 * 512 * cfg.model.embed_dim * costs[0].tokens_per_step
    assert costs[1].flops - costs[0].flops == pytest.approx(passes * further)


def test_a_bubble_computes_blocks_that_nobody_uses():
    """Blocks of further layers on stages; of one microbatch in four parts a stage computes 4 + 3."""
    costs, sizes = [], dict.fromkeys(axis_names(), 1) | {"pp": 4}
    for layers in (4, 8):
        words = f"model.num_layers={layers}", "model.global_every=1", "training.remat=none"
        train_spec = find_train_spec(compose([*SMALL, *words]).config, sizes, "cpu")
        costs.append(derive_costs(train_spec, with_activations=False))
    pipeline = train_spec.choices.pipeline
    assert (pipeline.num_parts, pipeline.num_microbatches) == (4, 1)
    forward = (costs[1].model_flops - costs[0].model_flops) / 3
    passes = (3 + pipeline.recompute_runs) * 7 / 4
    assert costs[1].flops - costs[0].flops == pytest.approx(passes * forward)


def test_chunks_of_linear_attention_are_computed_forward_and_twice_backward():
    linear = "{num_key_heads: 2, num_value_heads: 4, key_dim: 8, value_dim: 8, filter_size: 4}"
    words = f"++model.linear_attention={linear}", "model.sliding_window=null", "model.attention_gate=true"
    cfg = compose([*SMALL, *words, "training.remat=none"]).config
    costs = derive(cfg, dict.fromkeys(axis_names(), 1), "cpu", with_activations=False)
    chunks = chunk_flops_per_token(cfg.model, 32, 1) * costs.tokens_per_step
    assert costs.flops - costs.model_flops == pytest.approx(3 * chunks) != 0


def test_a_program_is_that_of_its_platform():
    cfg, sizes = compose(SMALL).config, dict.fromkeys(axis_names(), 1)
    assert [find_train_spec(cfg, sizes, platform).platform for platform in ("cpu", "gpu")] == ["cpu", "gpu"]


@pytest.mark.parametrize(("num_devices", "rows", "keys", "logits"), [(2, 320, 0, 0), (4, 320, 3, 0), (4, 321, 3, 3)])
def test_products_that_all_devices_of_tp_compute(num_devices, rows, keys, logits):
    """Two heads of keys and of values are split over two devices; of four devices each computes both heads. So it is
    with a vocabulary that the devices do not divide."""
    words = "training.remat=none", f"model.mesh_shape=[[{num_devices}],[tp]]", "distributed.allow_idle_devices=true"
    cfg = compose([*SMALL, *words, f"model.vocab_size={rows}"]).config
    train_spec = find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "cpu")
    heads = cfg.model.num_layers * 2 * cfg.model.num_kv_heads * cfg.model.head_dim
    more = cfg.model.embed_dim * (keys * heads + logits * rows)  # products of a number with a weight
    assert _count_repeated_flops(train_spec, 10) == 3 * 2 * more * 10


def test_xlas_own_products_of_experts_take_the_rows_of_all():
    """Each of the experts of a device multiplies all rows; one expert a row was counted."""
    words = [*SMALL, EXPERTS, "model.mesh_shape=[[2],[ep]]", "training.remat=none"]
    once, all_rows = (
        derive(compose([*words, f"model.expert_products={name}"]).config, dict.fromkeys(axis_names(), 1) | {"ep": 2})
        for name in ("fused", "xla")
    )
    model = compose(words).config.model
    of_expert = 3 * model.embed_dim * model.mlp.expert_dim * len(model.expert_layers)
    rows = once.tokens_per_step / 2 * model.mlp.experts_per_token
    assert once.model_flops == all_rows.model_flops
    assert all_rows.flops - once.flops == pytest.approx(6 * of_expert * rows * (model.mlp.num_experts / 2 - 1))


@pytest.mark.parametrize(("optimizer", "told"), [("muon", True), ("adamw", False)])
def test_what_muon_adds_is_told_to_be_missing(optimizer, told, run):
    _, out, _ = run(*SMALL, f"optimizer={optimizer}", "model.mesh_shape=[[8],[fsdp]]", "plan.topology=h200:8")
    assert ("derived numbers leave out the matrix products of Muon" in out) == told


def test_a_cluster_that_is_not_there(run):
    """27 billion parameters on 256 devices, one mesh; no device is made."""
    num_devices = jax.device_count()
    code, out, _ = run("model=gemma3_27b", "plan.topology=h200:32x8", 'model.mesh_shape=[[64,4],["fsdp","tp"]]')
    assert code == 0
    assert "32 x 8 H200: derived, compiled and predicted, not measured" in out
    assert out.splitlines()[-1] == 'python run_training.py model=gemma3_27b \'model.mesh_shape=[[64,4],["fsdp","tp"]]\''
    assert jax.device_count() == num_devices


def test_meshes_are_compared_on_one_batch(run):
    """The batch of a mesh of data shards alone; the command carries it, whatever a saved run says."""
    code, out, _ = run(*SMALL, "plan.topology=h200:2x2", "training.gradient_accumulation_steps=2", "--json")
    assert code == 0
    found = json.loads(out)
    assert {each["tokens_per_step"] for each in found["fit"]} == {4 * 2 * 32}
    assert "training.global_batch_size=8" in found["command"]
    assert re.findall(r"gradient_accumulation_steps=\w+", found["command"]) == ["gradient_accumulation_steps=null"]


def test_the_command_has_the_keys_that_its_numbers_depend_on():
    """Of `plan` the share of the memory, by which `auto` of a run chooses, too; not what the plan has chosen itself."""
    kept = ["training.remat_every=3", "plan.memory_share=0.9", "plan.network=efa_400"]
    chosen = ["training.remat=budget", "training.remat_memory_gib=4", "plan.topology=h200:8", "mesh_shape=fsdp"]
    best: Any = SimpleNamespace(
        cfg=compose(["training.remat=dots"]).config, sizes=dict.fromkeys(axis_names(), 1) | {"fsdp": 8}
    )
    command = format_command([*kept, *chosen], Ranking([best], [], {}, 0.0, open_key="remat"))
    mesh = """'model.mesh_shape=[[8],["fsdp"]]'"""
    assert command == f"python run_training.py {' '.join(kept)} training.remat=dots {mesh}"


def test_compiles_until_the_first_place_is_settled(monkeypatch):
    """Each compiled mesh turns out to be slower than it was derived: all that may be faster are compiled too."""
    compiled = []

    def compile_slow(configs, cluster):
        compiled.extend(cfg.model.mesh_shape for cfg in configs)
        slow = StepTime(compute_s=1e9)
        return [Compiled("gpu", 1, 1, [], slow, 0.0) for _ in configs]

    monkeypatch.setattr("tunix.plan.ranking.compile_all", compile_slow)
    cfg, cluster = compose([*SMALL, "plan.num_compiled=1"]).config, read_topology("h200:4")
    ranking = rank(cfg, cluster)
    assert len(compiled) == len(ranking.fit) > 3
    assert all(each.compiled for each in ranking.fit)
    compiled.clear()
    monkeypatch.setattr("tunix.plan.ranking.compile_all", lambda configs, _: [no_time(configs)] * len(configs))
    ranking = rank(cfg, cluster)
    derived = [each for each in ranking.fit if not each.compiled]
    assert derived
    assert all(each.tokens_per_s <= ranking.fit[0].tokens_per_s for each in derived)


def test_a_plan_ends_where_every_compile_fails(monkeypatch):
    """It tried one mesh after the other, however many they were."""
    calls = []
    monkeypatch.setattr("tunix.plan.ranking.compile_all", lambda configs, _: calls.append(configs) or ["no compiler"])
    ranking = rank(compose([*SMALL, "plan.num_compiled=1"]).config, read_topology("h200:4"))
    assert len(ranking.fit) > 3
    assert len(calls) == 1
    # The CPU backend compiles for no more than 2,048 devices.
    monkeypatch.setattr("tunix.plan.ranking.find_backend", lambda: "cpu")
    lines: list[str] = []
    rank(compose([*SMALL, "model.mesh_shape=[[2049],[dp]]"]).config, read_topology("h200:2049"), lines.append)
    assert len(calls) == 1
    assert lines[-1].startswith("nothing is compiled: XLA's CPU backend compiles for at most 2,048 devices")


def no_time(_) -> Compiled:
    """A compiled step that takes no time: nothing can be faster."""
    return Compiled("gpu", 1, 1, [], StepTime(compute_s=1e-12), 0.0)


def test_a_plan_names_steps_that_xla_computes_once_more(monkeypatch):
    """From 1 % of the FLOPs on, with the share and what to set: more for a step that fills the device."""
    words = [*SMALL, "plan.num_compiled=1", "model.mesh_shape=[[4],[fsdp]]", "plan.memory_share=0.95"]
    cluster, texts = read_topology("h200:4"), []
    for recomputed, num_gib in ((0.5, 1), (15.0, 1), (15.0, 132)):
        time = StepTime(1.0, flops=100.0, recomputed_flops=recomputed)
        step = Compiled("gpu", num_gib << 30, 1, [], time, 0.0)
        monkeypatch.setattr("tunix.plan.ranking.compile_all", lambda configs, _, step=step: [step] * len(configs))
        texts.append(format_text(rank(compose(words).config, cluster), cluster, words))
    assert "once more" not in texts[0]
    assert "computes 15% of its FLOPs once more, beside what training.remat says" in texts[1]
    assert "+training.compiler_options.xla_gpu_memory_limit_slop_factor=112" in texts[1]
    assert "+training.compiler_options.xla_gpu_memory_limit_slop_factor=120" in texts[2]


def test_one_compile_is_for_the_fastest():
    """Not for the mesh of least memory."""
    ranking = rank(compose([*AUTO, "plan.num_compiled=0"]).config, read_topology("h200:8"))
    candidates = [*reversed(ranking.fit)]
    (index,) = _pick_to_compile(candidates, 1, ranking.limit)
    assert candidates[index].tokens_per_s == max(each.tokens_per_s for each in candidates)


@pytest.mark.nightly
def test_compiled_by_the_cpu_where_there_is_no_cuda_plugin(run, tmp_path):
    """The other compiler, an automatic micro batch that shrinks until it fits, and the files that are left behind.

    With the plugin: test_gpu_program.py.
    """
    if find_backend() == "gpu":
        pytest.skip("the CUDA plugin is installed here")
    words = [*AUTO, "plan.num_compiled=1", "plan.topology=h200:8", "model.mesh_shape=[[8],[fsdp]]"]
    code, out, told = run(*words, "plan.memory_share=5e-6")  # 757 kB: more than 2 sequences take, less than 4 do
    assert code == 0
    assert told.count("compiled in") == 2
    assert "JAX's CUDA plugin is not installed" in out
    folder = tmp_path / "outputs" / "plan"
    assert (folder / "plan.txt").read_text() == out
    found = json.loads((folder / "plan.json").read_text())
    (best,) = found["fit"]
    assert best["source"] == "compiled by CPU"
    assert {each["kind"] for each in best["collectives"]} <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert best["bytes_per_device"]["total"] < found["limit_bytes"]
    assert best["micro_batch_size"] == 2
    width, height = Image.open(folder / "plan.png").size
    assert width > height > 100


def test_ctrl_c_does_not_wait_for_compiles(tmp_path, monkeypatch):
    """They take minutes, and XLA cannot be interrupted."""
    compiler, begun = tmp_path / "python", tmp_path / "begun"
    compiler.write_text(f"#!/bin/sh\necho $$ >> {begun}\nexec sleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(compiler))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

    def press() -> None:
        while len(begun.read_text().split() if begun.exists() else []) < WORKERS:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        list(compile_all([compose(SMALL).config] * 3, read_topology("h100:8")))
    signal.signal(signal.SIGINT, before)
    numbers = begun.read_text().split()
    assert len(numbers) == WORKERS
    assert not [number for number in numbers if Path(f"/proc/{number}").exists()]


def test_no_compile_starts_behind_ctrl_c():
    running = RunningCompiles()
    running.kill()
    with pytest.raises(RuntimeError, match="have been killed"):
        running.start({})


def test_what_does_not_compile_is_told(run, recwarn):
    jax.devices()  # as in a run: from then on JAX warns of every fork
    words = ["plan.num_compiled=1", "model.mesh_shape=[[8],[fsdp]]", "++training.compiler_options={xla_no_such: true}"]
    code, out, _ = run(*SMALL, *words)
    assert code == 0
    assert '[[8],["fsdp"]] is not compiled: ' in out
    assert "xla_no_such" in out
    assert not [each for each in recwarn if "fork" in str(each.message)]


def test_the_largest_micro_batch_that_fits(run):
    """In an eighth of the memory, a smaller one."""
    mesh = "model.mesh_shape=[[8],[fsdp]]"
    found = []
    for share in (0.75, 6e-6):
        code, out, _ = run(*AUTO, mesh, f"plan.memory_share={share}", "--json")
        assert code == 0
        best = json.loads(out)["fit"][0]
        assert f"training.micro_batch_size={best['micro_batch_size']} " in json.loads(out)["command"]
        found.append(best["micro_batch_size"])
    assert found[0] == 8  # all of the batch on each of eight shards
    assert found[1] in (1, 2, 4)


def test_answers_that_share_rows_get_two_microbatches():
    words = ["task=grpo", "data=arithmetic", "model=adder", "sampling.max_new_tokens=12", "task.answers_per_row=4"]
    cfg = compose([*words, "training.micro_batch_size=auto", "training.global_batch_size=16"]).config
    assert list_micro_batch_sizes(cfg, dict.fromkeys(axis_names(), 1)) == [1, 2, 4, 8]


def test_a_run_takes_what_plan_would():
    cfg = compose([*AUTO, "plan.choose_mesh=true", "plan.num_compiled=0"]).config
    ours, message = plan_run(cfg)
    assert f"training.micro_batch_size={ours.batch.micro_batch_size}" in message
    assert ours.batch.micro_batch_size in list_micro_batch_sizes(cfg, explicit_sizes(ours.mesh_shape))
    ranking = rank(cfg, read_topology("h200:8"))
    assert ranking.fit[0].sizes == explicit_sizes(ours.mesh_shape)
    kept, _ = plan_run(compose([*AUTO, "model.mesh_shape=[[2,4],[tp,dp]]", "plan.num_compiled=0"]).config)
    assert explicit_sizes(kept.mesh_shape) == dict.fromkeys(axis_names(), 1) | {"dp": 4, "tp": 2}
    assert kept.batch.micro_batch_size == 16
    untouched = compose(SMALL).config
    assert plan_run(untouched) == (Planned.of(untouched), "")


@pytest.mark.nightly
def test_the_config_of_a_run_stays_as_it_was_typed(tmp_path):
    """What a plan chooses is in no file but the report: the config in the checkpoint is config.yaml."""
    train(
        compose(
            [
                *AUTO,
                ONE_DEVICE,
                "distributed.allow_idle_devices=true",
                "plan.num_compiled=0",
                "training.max_steps=1",
                f"hydra.run.dir={tmp_path}",
            ]
        )
    )
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["training"]["micro_batch_size"] == "auto"
    in_checkpoint = read_json(tmp_path / "checkpoints" / "1" / "run" / "metadata")["config"]
    assert {name: in_checkpoint[name] for name in ("model", "training")} == {
        name: saved[name] for name in ("model", "training")
    }


def test_the_exchange_of_attention_that_is_faster(monkeypatch):
    """A ring where few key/value heads travel over a slow network; Ulysses where attention computes long."""
    words = ["model=llama3_70b", "model.mesh_shape=[[2,8],[cp,tp]]", "plan.output=null"]
    for length, network, faster in (
        (4096, "infiniband_400", "ring"),
        (4096, "ethernet_100", "ring"),
        (32768, "infiniband_400", "ulysses"),
    ):
        cfg = compose([*words, f"training.seq_len={length}", f"plan.network={network}"]).config
        cluster, sizes = read_topology("h200:2x8", network), explicit_sizes(cfg.model.mesh_shape)
        chosen, reason = resolve_exchange(cfg, sizes, cluster)
        assert (chosen.model.cp_exchange, reason.split(":")[0]) == (faster, f"model.cp_exchange={faster}")
        candidate = make_candidate(cfg, sizes, None, cluster, with_activations=False)
        assert make_record(candidate)["cp_exchange"] == faster
    given = cfg.model_copy(update={"model": cfg.model.model_copy(update={"attention": "cudnn"})})
    assert resolve_exchange(given, sizes, cluster) == (given, ""), "a ring has no such kernel"
    seeing = compose(["model=gemma3_12b_vision", *words[1:], "training.seq_len=4096"]).config
    assert resolve_exchange(seeing, sizes, cluster) == (seeing, ""), "tokens of an image see later ones"
    with pytest.raises(UserError, match="does not divide model.num_heads=16, and keys cannot go round in a ring"):
        select_exchange(seeing.model, sizes | {"cp": 3}, "auto")

    # All devices of a ring wait for the last one: it computes twice the mean.
    pairs = count_pairs_in_ring(4096, 4096, num_devices=8)
    assert sum(pairs) == 512 * 4096
    assert list(count_pairs_in_ring(4096, 512, num_devices=8) > 0) == [True] * 2 + [False] * 6
    ring = make_candidate(compose([*words, "model.cp_exchange=ring"]).config, sizes, None, cluster, False)
    ulysses = make_candidate(compose([*words, "model.cp_exchange=ulysses"]).config, sizes, None, cluster, False)
    assert ring.time.compute_s > ulysses.time.compute_s

    small = compose([*SMALL, "model.mesh_shape=[[4,2],[fsdp,cp]]"]).config
    assert plan_run(small) == (Planned.of(small), ""), "the speed of CPUs is not known"
    monkeypatch.setattr("tunix.trainer.find_kind", lambda _: cluster.kind)
    ours, message = plan_run(small)
    assert message.startswith(f"model.cp_exchange={ours.cp_exchange}: attention is predicted to take")


@pytest.mark.nightly
def test_a_budget_keeps_the_most_that_fits():
    """Derived, and compiled once; the run's report says what was chosen."""
    budget = [*SMALL, "training.remat=budget", "model.mesh_shape=[[8],[fsdp]]"]
    cluster, sizes = read_topology("h200:8"), dict.fromkeys(axis_names(), 1) | {"fsdp": 8}
    needs = {
        policy: derive(compose([*SMALL, f"training.remat={policy}"]).config, sizes, "gpu").memory for policy in REMAT
    }
    assert needs["none"] > needs["dots"] > needs["projections"] > needs["attention"] > needs["full"]
    for more_bytes, policy in ((1, "dots"), (-1, "projections")):
        gib = (needs["dots"] + more_bytes) / KNOWN_TO_FIT / 2**30
        words = [*budget, f"training.remat_memory_gib={gib}", "plan.num_compiled=0"]
        assert rank(compose(words).config, cluster).fit[0].cfg.training.remat == policy
    ours, message = plan_run(compose([*budget, "plan.num_compiled=1"]).config)
    assert ours.remat == "none"
    assert "training.remat=none; predicted (compiled" in message
    with pytest.raises(UserError, match=r"or raise training.remat_memory_gib"):
        plan_run(compose([*budget, "training.remat_memory_gib=1e-6", "plan.num_compiled=0"]).config)


@pytest.mark.parametrize(("more_bytes", "policy"), [(1, "dots"), (-1, "full")])
def test_a_policy_that_keeps_products_where_they_are_known_to_fit(more_bytes, policy, monkeypatch):
    """By derived memory, in a plan and in a run on the same devices."""
    cluster, sizes = read_topology("h200:8"), dict.fromkeys(axis_names(), 1) | {"fsdp": 8}
    needed = derive(compose([*SMALL, "training.remat=dots"]).config, sizes, "gpu").memory
    share = (needed + more_bytes) / KNOWN_TO_FIT / (cluster.kind.memory_gib * 2**30)
    words = [*SMALL, "model.mesh_shape=[[8],[fsdp]]", f"plan.memory_share={share}", "plan.num_compiled=0"]
    cfg = compose(words).config
    ranking = rank(cfg, cluster)
    assert ranking.fit[0].cfg.training.remat == policy
    assert f"training.remat={policy}: every mesh" in format_text(ranking, cluster, words)
    offloaded = compose([*words, "training.offload=activations"]).config
    assert rank(offloaded, cluster).fit[0].cfg.training.remat == "full"

    assert plan_run(cfg) == (Planned.of(cfg), ""), "the memory of CPUs is not known"
    monkeypatch.setattr("tunix.trainer.find_kind", lambda _: cluster.kind)
    ours, message = plan_run(cfg)
    assert ours.remat == policy
    assert message.startswith(f"training.remat={policy}: a step needs ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.remat=budget", "training.micro_batch_size=auto"], "both take what memory is left"),
        (["training.remat_memory_gib=4"], "training.remat=auto takes what it needs"),
    ],
)
def test_a_budget_that_contradicts_another_key(words, message):
    with pytest.raises(UserError, match=message):
        compose([*SMALL, *words])


@pytest.mark.parametrize(("more_bytes", "chunk_size"), [(1, 2048), (-1, "auto")])
def test_larger_chunks_of_logits_where_they_are_known_to_fit(more_bytes, chunk_size, monkeypatch):
    """8,192 rows of a device by derived memory, in a plan and in a run on the same devices."""
    long = [*SMALL, "model.context_length=4096", "training.seq_len=4096", "training.micro_batch_size=4"]
    long += ["model.vocab_size=32000"]  # logits are the peak
    cluster, sizes = read_topology("h200:8"), dict.fromkeys(axis_names(), 1) | {"fsdp": 8}
    needed = derive(
        compose([*long, "training.remat=full", "training.loss_chunk_size=2048"]).config, sizes, "gpu"
    ).memory
    share = (needed + more_bytes) / KNOWN_TO_FIT / (cluster.kind.memory_gib * 2**30)
    words = ["training.remat=full", "training.loss_chunk_size=auto", "model.mesh_shape=[[8],[fsdp]]"]
    cfg = compose([*long, *words, f"plan.memory_share={share}"]).config
    assert make_candidate(cfg, sizes, None, cluster).cfg.training.loss_chunk_size == chunk_size
    monkeypatch.setattr("tunix.trainer.find_kind", lambda _: cluster.kind)
    ours, message = plan_run(cfg)
    assert ours.loss_chunk_size == chunk_size
    assert ("training.loss_chunk_size=2048: a step with 8,192 rows of logits" in message) == (chunk_size == 2048)
    of_config = find_train_spec(cfg, sizes, "gpu")
    reported = derive_costs(replace(of_config, choices=select(cfg, of_config.mesh, "gpu", ours)))
    assert (reported.memory == needed) == (chunk_size == 2048)
    # With stages of the batch a run keeps chunks of 4,096 rows, and so does the plan of each stage.
    stages = ["training.global_batch_size=64", "training.batch_stages=[{until_step:5,global_batch_size:32}]"]
    staged = make_candidate(compose([*long, *words, *stages]).config, sizes, None, cluster)
    assert len(staged.stages) == 1
    assert staged.memory == staged.costs.memory < needed


def test_a_run_that_fits_nowhere():
    cfg = compose([*AUTO, "plan.memory_share=1e-12", "plan.num_compiled=0"]).config
    with pytest.raises(UserError, match=r"fits on no mesh of this run's devices: .* needs .* more than the 0.0 GiB"):
        plan_run(cfg)


@pytest.mark.nightly
def test_what_would_make_it_fit(run):
    """Weights and optimizer of 405 billion parameters: 4.4 TiB."""
    code, out, error = run("model=llama3_405b", "plan.topology=h200:8")
    assert code == 2
    assert "[[8],[" in out
    assert re.search(r"more devices \((\d+) hold weights and optimizer alone\)", error)[1] == "44"
    assert "optimizer=lion" in error


def test_rollouts_are_counted():
    """Memory is that of the larger of step and rollout; time is that of both. A token reads weights and cache once."""
    words = ["model=qwen3_0_6b", "model.mesh_shape=[[8],[fsdp]]", "task=grpo", "data=gsm8k", "tokenizer.path=x.json"]
    sizes = ["training.seq_len=1024", "training.global_batch_size=128", "plan.num_compiled=0", "sampling.cache=slots"]

    def config(*more):
        return compose([*words, *sizes, "sampling.max_new_tokens=512", *more]).config

    def best(*more):
        return rank(config(*more), read_topology("h100:8")).fit[0]

    one, two = best(), best("task.steps_per_rollout=2")
    assert one.rollout.costs.rows == 16  # 128 answers over 8 devices
    state = one.costs.num_bytes["weights"] + one.costs.num_bytes["optimizer"]
    assert one.rollout_memory == state + one.rollout.costs.memory
    weights = 2 * 596_049_920  # bfloat16
    assert one.rollout.costs.num_bytes["gathered weights"] == pytest.approx(weights, rel=1e-3)
    cache_row = 28 * 2 * 8 * 128 * 2  # layers, keys and values, heads, head width, bytes: of one slot
    least = 511 * weights + 16 * cache_row * 512 * 511  # half of the longest prompt and answer, on average
    assert least < one.rollout.costs.bytes_read < 2.5 * least
    assert one.rollout_s == pytest.approx(one.rollout.costs.bytes_read / 3.35e12, rel=1e-3)
    assert one.tokens_per_s == pytest.approx(one.costs.tokens_per_step / (one.time.step_s + one.rollout_s))
    assert two.rollout.costs.rows == 32
    assert two.rollout_s < one.rollout_s  # the weights are read once for the answers of two steps
    assert best("task.rollout_rows=64").rollout.rows_at_once == 64
    program = find_train_spec(one.cfg, one.sizes)
    memories = None, 80 << 30, one.rollout_memory, 1 << 20
    assert [select_rows(program, device_bytes) for device_bytes in memories] == [None, 128, 96, 8]
    with_reference = best("task.kl_coefficient=0.1")
    reference = with_reference.num_bytes["reference"]  # the parameters rest in float32, the reference in bfloat16
    assert reference == one.costs.num_bytes["weights"] // 2
    seconds = one.costs.tokens_per_step / np.array([one.tokens_per_s, with_reference.tokens_per_s])
    pass_s = one.costs.model_flops / 3 / (one.cluster.kind.peak_tflops * 1e12 * one.cluster.kind.efficiency)
    assert np.diff(seconds)[0] == pytest.approx(pass_s, rel=1e-3)  # and with it the pass of the model of step 0
    assert with_reference.memory == max(with_reference.costs.memory + reference, one.rollout_memory + reference)
    fits = (one.rollout_memory + 2**20) / USABLE  # all answers at one time, but for the reference
    cfgs = one.cfg, with_reference.cfg, config("task.kl_coefficient=0.1", "model.lora.rank=8")
    rows = [select_rows(find_train_spec(cfg, one.sizes), round(fits)) for cfg in cfgs]
    assert rows == [128, 96, 128]
    # Pages: no more than rows can use, with those of a prompt that waits; or what is left of the memory.
    paged = best("sampling.cache=auto")
    assert paged.rollout.num_pages == 17 * 1024 // PAGE
    assert paged.rollout.costs.num_bytes["cache"] == 17 * 1024 * cache_row
    assert paged.rollout.costs.num_bytes["other cache"] == 0
    assert least < paged.rollout.costs.bytes_read < one.rollout.costs.bytes_read
    program, few = find_train_spec(paged.cfg, one.sizes, "gpu"), round((one.rollout_memory - (1 << 30)) / USABLE)
    rows, num_pages = select_rows(program, few), select_pages(program, 128, few)
    assert rows == 128
    assert 17 * 1024 // PAGE // 4 < num_pages < 17 * 1024 // PAGE
    used = paged.rollout_memory - (17 * 1024 - num_pages * PAGE) * cache_row
    assert few * USABLE - PAGE * cache_row < used <= few * USABLE
    # What helps where a rollout is what does not fit.
    costs = replace(one.rollout.costs, num_bytes=one.rollout.costs.num_bytes | {"cache": 1 << 40})
    many = replace(one, rollout=replace(one.rollout, costs=costs))
    message = describe_no_fit(Ranking([], [many], {}, 80 << 30), read_topology("h100:8"))
    assert "most of it rollout; take more devices, task.rollout_rows=auto, a smaller sampling.max_new_tokens" in message


def test_a_kind_of_ones_own(run, tmp_path):
    own = tmp_path / "toaster.yaml"
    own.write_text(json.dumps(read_device_kinds()["h100"].model_dump() | {"name": "Toaster"}))
    code, out, _ = run(*SMALL, f"plan.topology={own}:2", "model.mesh_shape=[[2],[fsdp]]", "--json")
    assert code == 0
    assert json.loads(out)["device"]["name"] == "Toaster"


def test_a_derived_plan_needs_no_device_for_a_chosen_kernel():
    words = [
        experts(expert_dim=128),
        "model.embed_dim=128",
        "model.expert_products=grouped",
        "training.mixed_precision=bf16",
        "model.mesh_shape=[[4],[fsdp]]",
        "plan.num_compiled=0",
    ]
    ranking = rank(compose([*SMALL, *words]).config, read_topology("h100:4"))
    assert len(ranking.fit) == 1, ranking


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan.topology=h200"], "plan.topology=h200: expected KIND:GPUS or KIND:NODESxGPUS like h200:8"),
        (["plan.topology=h200:4x"], "plan.topology=h200:4x: expected KIND:GPUS"),
        (["plan.topology=h200:0"], "plan.topology=h200:0: expected KIND:GPUS"),
        (["plan.topology=h200:10000000x8"], "plan.topology=h200:10000000x8: expected at most 1,000,000 devices"),
        (["plan.topology=h20:8"], "there is no kind h20; kinds are a100, a100_40gb, b200, h100, h100_pcie, h200, l40s, or FILE.yaml; did you mean h200?"),
        (["plan.topology=none.yaml:8"], "none.yaml cannot be read: No such file"),
        (["plan.topologie=h200:8"], "did you mean plan.topology?"),
        (["plan.memory_share=2"], "plan.memory_share=2: expected a number of at most 1"),
        (["plan.memory_share=0"], "plan.memory_share=0: expected a number above 0"),
        (["training.seq_length=4"], "here it is training.seq_len=4"),
        (["model.mesh_shape=[[4],[fsdp]]"], "fsdp=4 needs 4 devices, 8 are in plan.topology"),
        (["training.global_batch_size=3", "model.mesh_shape=auto", "model.num_heads=3", "model.num_kv_heads=3"], "no mesh of 8 devices divides this model and batch"),
        (["task=grpo", "data=arithmetic", "sampling.cache=pages", "sampling.max_new_tokens=8", "model.head_dim=8", "model.mesh_shape=[[8],[fsdp]]"], "error: sampling.cache=pages: the kernel of pages takes heads of"),
        (["task=grpo", "data=arithmetic", "task.answers_per_row=2", "sampling.max_new_tokens=8", "model.mesh_shape=[[8],[fsdp]]"], "error: task.answers_per_row=2: a step has one microbatch"),
        (["plan.output=/dev/null/plan"], "plan.output=/dev/null/plan cannot be written: /dev/null is not a folder"),
        (["model=llama3_405b", "plan.topology=l40s:8", "model.mesh_shape=[[8],[fsdp]]"], "the model fits on no mesh of plan.topology: [[8],[\"fsdp\"]] needs"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_input(words, message, run):
    code, _, error = run("plan.topology=h200:8", *words) if "plan.topology" not in " ".join(words) else run(*words)
    assert code == 2
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: H200", "{", " is not YAML"),
        (None, "H200", ": expected a mapping like {key: value}"),
        ("network: inf", "network: sinf", ": network=sinfiniband_400: there is no such network; choose from "),
        ("memory_gib", "memory_gb", ": memory_gib is missing; unknown key memory_gb; did you mean memory_gib?"),
        ("fp8_tflops: 1979.0", "fp8_tflops: fast", ": fp8_tflops=fast: expected a number"),
    ],
)
def test_wrong_files_of_devices(old, new, message, tmp_path):
    whole = (ROOT / "conf/command/device/h200.yaml").read_text()
    (file := tmp_path / "mine.yaml").write_text(whole.replace(old, new, 1) if old else new)
    with pytest.raises(UserError, match=re.escape(f"plan.topology: {file}{message}")):
        read_topology(f"{file}:8")


@pytest.mark.parametrize(("more_bytes", "micro_batch_size"), [(1, 4), (-1, 2)])
def test_a_micro_batch_that_is_known_to_fit(more_bytes, micro_batch_size, monkeypatch):
    """By derived memory, where nothing is compiled, and where no compile succeeds."""
    monkeypatch.setattr("tunix.plan.ranking.compile_all", lambda cfgs, cluster: ["XLA fails" for _ in cfgs])
    cluster, sizes = read_topology("h200:8"), dict.fromkeys(axis_names(), 1) | {"fsdp": 8}
    words = [*SMALL, "training.remat=full", "training.global_batch_size=64", "model.mesh_shape=[[8],[fsdp]]"]
    needed = derive(compose([*words, "training.micro_batch_size=4"]).config, sizes, "gpu").memory
    share = (needed + more_bytes) / KNOWN_TO_FIT / (cluster.kind.memory_gib * 2**30)
    words += ["training.micro_batch_size=auto", f"plan.memory_share={share}"]
    for num_compiled in (0, 1):
        ranking = rank(compose([*words, f"plan.num_compiled={num_compiled}"]).config, cluster)
        assert ranking.fit[0].cfg.training.micro_batch_size == micro_batch_size


def test_a_mesh_that_the_batch_refuses_is_left_out_of_many(monkeypatch):
    """16 data shards do not divide 24 sequences, whose number on a device is open."""
    monkeypatch.setattr("tunix.plan.ranking.MANY", 4)
    words = [*SMALL, "training.micro_batch_size=auto", "training.global_batch_size=24", "plan.num_compiled=0"]
    ranking = rank(compose([*words, "model.num_heads=8"]).config, read_topology("h200:16"))
    assert ranking.fit
