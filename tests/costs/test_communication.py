"""Bytes and counts of transfers, by hand: nightly cases of plan/test_plan.py compare them with compiled programs."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh
from support.harness import ONE_LAYER, ROOT, SMALL, experts

from tunix.config.compose import compose
from tunix.config.layers import ExpertsMlp, GatedMlp
from tunix.costs.communication import (
    ExpertTokens,
    LocalHeads,
    Transfer,
    _join_small,
    _list_at_ends,
    _list_expert_transfers,
    _list_in_blocks,
    _list_matmul_transfers,
    _list_stage_transfers,
    _list_weight_transfers,
    find_group,
    gather_tokens,
    hand_on_keys,
    predict_seconds,
    send_rows,
    swap_heads,
)
from tunix.costs.devices import Group, read_topology
from tunix.costs.step import Costs, derive, derive_costs, find_train_spec
from tunix.models.flops import forward_flops_per_token
from tunix.models.remat import Remat
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.mesh import explicit_sizes
from tunix.sharding.table import axis_names
from tunix.training.train_spec import TrainSpec

HEADS = LocalHeads(rows=2, queries=4, keys=2, numbers=100, num_devices=4, itemsize=2)


@pytest.mark.parametrize(("policy", "runs", "times"), [("none", False, 2), ("full", False, 3), ("none", True, 3)])
def test_swapped_heads(policy, runs, times):
    """Queries, keys, values and results there and back; two key heads are repeated for four devices."""
    transfer = swap_heads(Remat(policy), HEADS, runs)
    assert transfer.num_bytes == times * 2 * (4 + 2 * 2) * 100 * 2
    assert (transfer.kind, transfer.count, transfer.overlaps) == ("all-to-all", 4 * times, 0)


@pytest.mark.parametrize(("policy", "runs", "hops"), [("none", False, 6), ("full", False, 8), ("none", True, 9)])
def test_keys_that_go_round(policy, runs, hops):
    """Three hops of four devices, forward and backward; gradients of keys and values, float32, make four."""
    transfer = hand_on_keys(Remat(policy), HEADS, runs)
    assert transfer.num_bytes == 2 * 2 * 100 * (hops * 2 + 4 * 4)
    assert (transfer.kind, transfer.count) == ("collective-permute", 2 * (hops + 4))


def exchange(**changed: Any) -> ExpertTokens:
    """One layer whose 10 tokens of 2,048 bytes have 2 of 8 experts each, on 4 devices."""
    mlp: Any = SimpleNamespace(experts_per_token=2, num_experts=8, weighted="outputs")
    values = {"mlp": mlp, "axes": ("ep",), "num_devices": 4, "num_tokens": 10, "row": 2048, "capacity": None}
    return ExpertTokens(**values | {"layers": 1, "runs": 1, "hidden": 0.0, "results": 1} | changed)


def test_tokens_that_are_gathered_for_experts():
    """The numbers of its experts and their shares, 8 bytes each, the token, and the gradient of its sum."""
    gathered, scattered = gather_tokens(exchange())
    assert (gathered.num_bytes, gathered.count) == (40 * (2048 + 8 + 8 + 2048), 3)
    assert (scattered.num_bytes, scattered.count) == (40 * (2048 + 2048 + 8), 3)
    again, _ = gather_tokens(exchange(runs=2))
    assert again.num_bytes - gathered.num_bytes == 40 * (2048 + 8 + 8)


def test_rows_that_are_sent_to_experts():
    """A row of each choice: there, back, and the same for gradients; shares go with them, but not where they multiply
    what comes back. A buffer bounds the rows."""
    counts, rows = send_rows(exchange())
    assert (counts.num_bytes, counts.count) == (4 * 8 * 4, 1)
    assert (rows.num_bytes, rows.count) == (20 * (4 * 2048 + 2 * 4), 6)
    _, bounded = send_rows(exchange(capacity=0.5))
    assert bounded.num_bytes == rows.num_bytes // 2
    mlp: Any = SimpleNamespace(experts_per_token=2, num_experts=8, weighted="inputs")
    _, without = send_rows(exchange(mlp=mlp))
    assert (without.num_bytes, without.count) == (20 * 4 * 2048, 4)


def test_frozen_weights_are_gathered_and_not_reduced():
    def count(*words: str) -> dict[str, int]:
        cfg = compose([*ONE_LAYER, "model.mesh_shape=[[2,4],[dp,fsdp]]", *words]).config
        costs = derive(cfg, explicit_sizes(cfg.model.mesh_shape), with_activations=False)
        transfers = [each for each in costs.transfers if {*each.axes} & {"dp", "fsdp"}]
        # Sums over dp come at the end of the backward pass, where nothing hides them.
        assert {each.overlaps for each in transfers if each.kind == "all-reduce"} == {0}
        kinds = "all-gather", "reduce-scatter", "all-reduce"
        return {kind: sum(each.num_bytes for each in transfers if each.kind == kind) for kind in kinds}

    whole, updates = count(), count("model.lora.rank=2")
    assert updates["all-gather"] >= whole["all-gather"]
    assert 0 < updates["reduce-scatter"] < whole["reduce-scatter"] / 4
    assert 0 < updates["all-reduce"] < whole["all-reduce"] / 4


@pytest.mark.parametrize(("num_devices", "times"), [(2, []), (4, [2 * 3])])
def test_key_heads_that_all_devices_keep(num_devices, times):
    """Each device has the gradients of its own queries; those of keys and values of three layers are summed over all."""
    words = f"model.mesh_shape=[[{num_devices}],[tp]]", "distributed.allow_idle_devices=true"
    cfg = compose([*SMALL, *words]).config  # two heads of keys
    exchanges = list(_list_in_blocks(find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "cpu")))
    assert [each.times for each in exchanges if each[:3] == ("all-reduce", "BTKH", ("tp",))] == times


@pytest.mark.parametrize(("words", "times"), [([], 2), (["model.lora.rank=2"], 1)])
def test_tokens_that_are_gathered_at_the_ends(words, times):
    """What the head takes, and the gradient of what the lookup gives, which a frozen table does not need."""
    cfg = compose([*SMALL, "model.mesh_shape=[[4,2],[fsdp,tp]]", *words]).config
    exchanges = list(_list_at_ends(find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "cpu")))
    assert [each.times for each in exchanges if each.kind == "all-gather"] == [times]


SUMS = "reduce-scatter", "all-reduce"
WITH_TP = [*SMALL, experts(), "training.remat=none"]


def test_tokens_enter_and_leave_experts_that_tp_splits():
    """As other branches: tokens come for the products and once more for their gradients, and so do gradients of sums."""
    cfg = compose([*WITH_TP, "model.mesh_shape=[[4,2],[ep,tp]]"]).config
    exchanges = list(_list_in_blocks(find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "cpu")))
    layers, branches = cfg.model.num_layers, 2
    times = {
        kind: sum(each.times for each in exchanges if (each.kind, each.axes) == (kind, ("tp",)))
        for kind in ("all-gather", "reduce-scatter")
    }
    assert times == {"all-gather": 3 * branches * layers, "reduce-scatter": 2 * branches * layers}


def test_factors_of_experts_that_tp_splits():
    """Both devices have those beside the width of the stream, and each has a part of their gradients."""
    cfg = compose([*WITH_TP, "model.mesh_shape=[[4,2],[ep,tp]]", "model.lora.rank=2"]).config
    exchanges = _list_in_blocks(find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "cpu"))
    factors = [each for each in exchanges if each.axes and {"X", "r"} <= {*each.dim_names}]
    assert sorted(each.dim_names for each in factors) == ["XDr", "XDr", "XrD"]
    assert {(each.kind, each.axes, each.times) for each in factors} == {("all-reduce", ("tp",), cfg.model.num_layers)}


def test_no_policy_keeps_tokens_of_other_devices():
    """What experts have gathered, the backward pass gathers again, whatever `training.remat` is."""

    def gathered(remat: str) -> int:
        cfg = compose([*WITH_TP, "model.mesh_shape=[[8],[ep]]", f"training.remat={remat}"]).config
        transfers = _list_expert_transfers(find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "cpu"))
        return sum(each.num_bytes for each in transfers if each.kind == "all-gather")

    assert gathered("none") == gathered("full")


def test_stages_whose_devices_split_the_stream():
    """A part of 32 tokens of 32 numbers: half of it for each device of a stage, a quarter of that for each stage."""
    layers = "model.num_layers=4", "model.global_every=1"
    cfg = compose([*SMALL, *layers, "model.mesh_shape=[[4,2],[pp,tp]]"]).config
    transfers = list(_list_stage_transfers(find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "cpu")))
    stream, parts = 32 * 32 * 4 // 2, 4
    entered = parts + 3
    moved = {(each.kind, each.axes): each.num_bytes for each in transfers}
    assert moved["reduce-scatter", ("pp",)] == (parts + entered) * stream
    assert moved["all-gather", ("pp",)] == (entered + parts) * stream + entered * (32 + 32) * 4
    assert moved["collective-permute", ("pp", "tp")] == 2 * (entered + parts) * stream // 4
    assert not [each for each in transfers if each.kind == "all-gather" and each.axes == ("tp",)]


@pytest.mark.parametrize(("words", "leaves"), [([], 2 * 4 + 1), (["model.lora.rank=2"], 4)])
def test_parts_leave_the_stages(words, leaves):
    """Four parts with their results, and five ticks with gradients of their entries, if a table needs them."""
    layers = "model.num_layers=4", "model.global_every=1", "training.micro_batch_size=2"
    cfg = compose([*SMALL, *layers, *words, "model.mesh_shape=[[2,4],[pp,fsdp]]"]).config
    transfers = _list_stage_transfers(find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "cpu"))
    [scattered] = [each for each in transfers if each.kind == "reduce-scatter"]
    assert scattered.num_bytes == leaves * 32 * 32 * 4


def test_half_a_pass_of_a_bubble_is_counted():
    """Four layers in two chunks on two stages, and four parts: 4 1/2 passes of layers, for two sequences of a device."""
    words = "model.num_layers=4", "model.global_every=1", "training.pipeline_schedule=interleaved"
    cfg = compose([*SMALL, *words, "training.micro_batch_size=2", "model.mesh_shape=[[2,2,2],[pp,fsdp,tp]]"]).config
    transfers = _list_matmul_transfers(find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "cpu"))
    assert {each.num_bytes for each in transfers if each.kind == "reduce-scatter"} == {4.5 * 2 * 32 * 32 * 4}


def test_chunks_that_stay_on_their_stage_are_not_sent():
    """Of two chunks of a stage one is at rest where it belongs, the other one travels; so do gradients, float32 too."""
    words = "model.num_layers=4", "model.global_every=1", "training.pipeline_schedule=interleaved"
    cfg = compose([*SMALL, *words, "model.mesh_shape=[[2,4],[pp,fsdp]]"]).config
    train_spec = find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "cpu")
    *_, dealt_out = _list_stage_transfers(train_spec)
    assert dealt_out.num_bytes == bytes_per_device(train_spec.abstract["params"]["blocks"])


def test_a_teacher_in_the_loss_goes_forward():
    """Its weights are gathered once, and its products have two FLOPs; nothing of it has a gradient."""

    def find(*words: str) -> TrainSpec:
        cfg = compose(
            [*SMALL, "model.mesh_shape=[[8],[fsdp]]", "training.sharding_strategy=shard_grad_op", *words]
        ).config
        return find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "cpu")

    def moved(costs: Costs, *kinds: str) -> int:
        return sum(each.num_bytes for each in costs.transfers if each.kind in kinds and "fsdp" in each.axes)

    with_teacher = find(f"task.teacher={ROOT}/tests/models/parity/gemma3")
    alone, both = (derive_costs(each, with_activations=False) for each in (find(), with_teacher))
    arch = with_teacher.teacher.arch
    moving = [weight for weight in jax.tree.leaves(arch.weights) if not weight.equation.is_vector]
    assert moved(both, "all-gather") - moved(alone, "all-gather") == sum(4 * weight.size for weight in moving)
    assert moved(both, *SUMS) == moved(alone, *SUMS)
    assert both.flops - alone.flops == forward_flops_per_token(arch.model, arch.num_active, 32) * 32
    assert both.model_flops == alone.model_flops


@pytest.mark.parametrize(
    ("words", "gathers", "scatters", "sums"),
    [
        (["training.overlap=none"], 8, 4, 4),
        (["training.overlap=prefetch"], 9, 5, 4 + 2),
        (["training.overlap=prefetch", "training.gradient_accumulation_steps=2"], 18, 10, 4 + 2),
    ],
)
def test_blocks_that_gather_ahead_gather_and_sum_once_more(words, gathers, scatters, sums):
    """Four blocks, forward and backward; over replicas the last microbatch sums those of all, two iterations late."""
    cfg = compose([*SMALL, "model.num_layers=4", "model.mesh_shape=[[2,4],[dp,fsdp]]", *words]).config
    train_spec = find_train_spec(cfg, explicit_sizes(cfg.model.mesh_shape), "gpu")
    weights = jax.tree.leaves(train_spec.arch.weights["blocks"])
    block = sum(4 * weight.size // 4 for weight in weights if not weight.equation.is_vector)  # float32, of four
    moved: dict[str, tuple[int, int]] = {}
    for transfer in _list_weight_transfers(train_spec):
        if transfer.count > 2 and ("fsdp" in transfer.axes) == (transfer.kind != "all-reduce"):
            before = moved.setdefault(transfer.kind, (transfer.count, 0))
            assert before[0] == transfer.count
            moved[transfer.kind] = transfer.count, before[1] + transfer.num_bytes
    assert moved == {
        "all-gather": (gathers, gathers * block),
        "reduce-scatter": (scatters, scatters * block),
        "all-reduce": (sums, sums * block // 4),  # of a shard
    }


def test_small_transfers_of_a_layer_are_one():
    """Up to 30 MiB of results: of a sum the part of one device. None where two parts take turns with their experts."""

    def join(kind: str, size_mib: int, count: int, batch_parts: int = 1) -> list[int]:
        mlp = object.__new__(ExpertsMlp if batch_parts > 1 else GatedMlp)
        of_two: Any = SimpleNamespace(
            layout=SimpleNamespace(batch_parts=batch_parts),
            mesh=AbstractMesh((8,), ("fsdp",)),
            cfg=SimpleNamespace(model=SimpleNamespace(mlp=mlp)),
        )
        transfers = [Transfer(kind, ("fsdp",), count * size_mib << 20, count=count)] * 4
        return [each.num_bytes // count >> 20 for each in _join_small(transfers, of_two)]

    assert join("all-gather", 10, 5) == [30, 10]
    assert join("all-gather", 10, 5, batch_parts=2) == [10, 10, 10, 10]
    assert join("all-gather", 10, 1) == [10, 10, 10, 10]  # at the ends of the model
    assert join("reduce-scatter", 80, 5, batch_parts=2) == [240, 80]


def test_a_transfer_takes_the_time_of_each_of_its_executions():
    cluster = read_topology("h100:2x8")
    sizes = dict.fromkeys(axis_names(), 1) | {"fsdp": 4, "ep": 2, "cp": 2}
    once, often = (
        predict_seconds(Transfer("all-gather", ("fsdp",), count << 24, count=count), sizes, cluster.kind, 8)
        for count in (1, 5)
    )
    assert often == pytest.approx(5 * once)
    # Neighbours on fsdp are four devices apart: a node of 8 has two of them. On cp they stand side by side.
    groups = {axes: find_group(axes, sizes, 8) for axes in (("fsdp",), ("cp",), ("fsdp", "cp"), ("fsdp", "ep", "cp"))}
    assert groups == {
        ("fsdp",): Group(4, 2), ("cp",): Group(2, 2), ("fsdp", "cp"): Group(8, 4), ("fsdp", "ep", "cp"): Group(16, 8),
    }  # fmt: skip
