"""The GPU's own program of a step, compiled for clusters that are not there: it moves and holds what it should."""

import json
from pathlib import Path

import pytest
from support.gpu_compiler import compile_for_gpu, run_with_plugin
from support.installs import one_at_a_time

from tunix.config.compose import compose
from tunix.costs.devices import read_topology
from tunix.plan.ranking import make_candidate
from tunix.sharding.mesh import explicit_sizes

FULL = "training.remat=full"
AGAIN = 4 / 3  # FLOPs of a step in which blocks compute their forward pass again, as a multiple of the model's
# Words; the temporary GiB that the step was recorded to need, rounded up; and its FLOPs, as a multiple of the model's.
PROGRAMS = {
    "1b on 8": (["model=gemma3_1b", "plan.topology=h200:8", "model.mesh_shape=[[8],[fsdp]]", FULL], 3.45, AGAIN),
    "0.6b that keeps all": (
        ["model=qwen3_0_6b", "plan.topology=h200:8", "model.mesh_shape=[[8],[fsdp]]", "training.remat=none"], 4.2, 1.0,
    ),
    "experts on 8": (
        ["model=qwen3_30b_a3b", "model.num_layers=4", "training.seq_len=8192", "plan.topology=h200:8",
         "model.mesh_shape=[[8],[fsdp]]", FULL], 13.7, AGAIN,
    ),
    "27b on 256": (["model=gemma3_27b", "plan.topology=h200:32x8", "model.mesh_shape=[[64,4],[fsdp,tp]]", FULL], 4.2, AGAIN),
}  # fmt: skip
# Two stages, 8 parts a step: 9 ticks.
STAGES = [
    "model=qwen3_0_6b", "model.num_layers=8", "plan.topology=h200:8", "model.mesh_shape=[[2,4],[pp,fsdp]]",
    "training.remat=none", "training.overlap=none", "training.sharding_strategy=shard_grad_op",
    "training.gradient_accumulation_steps=4",
]  # fmt: skip
ON_STAGES = {str(value): [*STAGES, f"training.pipeline_recompute={value}"] for value in (False, True)}
SMALL_SHARDS = [
    "model=llama3_405b", "model.num_layers=16", "training.seq_len=8192", "training.global_batch_size=1024",
    "plan.topology=h200:128x8", "model.mesh_shape=[[256,4],[fsdp,tp]]", FULL,
]  # fmt: skip
ON_FOUR_STAGES = [
    "model=llama3_70b", "training.seq_len=8192", "training.gradient_accumulation_steps=2", "plan.topology=h100:8x8",
    "plan.memory_share=0.95", "model.mesh_shape=[[4,16],[pp,fsdp]]", FULL,
]  # fmt: skip
ON_TP = [
    "model=llama3_8b", "model.num_layers=4", "training.seq_len=8192", "training.micro_batch_size=4", "plan.topology=h100:8",
    "model.mesh_shape=[[2,4],[fsdp,tp]]", FULL,
]  # fmt: skip
# Programs that waited, and the share of their communication that may be waited for.
HIDE = {"405b on 1,024": (SMALL_SHARDS, 0.15), "70b on 4 stages": (ON_FOUR_STAGES, 0.1), "8b on tp": (ON_TP, 0.35)}
ALONE = ON_STAGES | {name: words for name, (words, _) in HIDE.items()}
GATHERED, REDUCED = ("all-gather",), ("reduce-scatter", "all-reduce")


def compile_plan(name: str, cache_dir: Path, installs_dir: Path) -> dict:
    """Return what `python -m tunix.plan --json` says of a program; one worker of the session asks, all read."""
    file = cache_dir / f"gpu_program {name}.json"
    with one_at_a_time("gpu_plans"):
        if not file.exists():
            own = ALONE[name] if name in ALONE else PROGRAMS[name][0]
            words = ["-m", "tunix.plan", *own, "plan.output=null", "--json"]
            printed = run_with_plugin(*words, installs_dir=installs_dir)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(printed)
        return json.loads(file.read_text())["fit"][0]


EACH_TIME = "0.6b that keeps all"  # the one that compiles in the shortest time
OTHERS = [pytest.param(name, marks=pytest.mark.nightly) for name in PROGRAMS if name != EACH_TIME]


@pytest.fixture(params=[EACH_TIME, *OTHERS])
def program(request, cache_dir, installs_dir) -> tuple[dict, float, float]:
    found = compile_plan(request.param, cache_dir, installs_dir)
    assert found["source"] == "compiled", found["not_compiled"]
    return found, *PROGRAMS[request.param][1:]


def test_weights_and_gradients_move_as_theory_says(program):
    plan, *_ = program
    for kinds in (GATHERED, REDUCED):
        moved = sum(
            each["num_bytes"] for each in plan["collectives"] if each["kind"] in kinds and each["axes"] != ["tp"]
        )
        derived = sum(
            size for name, size in plan["derived_bytes_moved"].items() if name.startswith(kinds) and "fsdp" in name
        )
        assert moved == pytest.approx(derived, rel=0.02), kinds


def test_nothing_else_moves(program):
    """The embedding's lookup and its gradient are the usual source of an all-to-all."""
    plan, *_ = program
    assert {each["kind"] for each in plan["collectives"]} <= {*GATHERED, *REDUCED}


def test_weights_travel_in_the_dtype_of_products(program):
    plan, *_ = program
    assert {each["dtype"] for each in plan["collectives"] if each["kind"] in GATHERED} == {"bf16"}


def test_memory(program):
    plan, temporary, _ = program
    held = plan["bytes_per_device"]
    recorded = held["weights"] + held["optimizer"] + temporary * 2**30
    assert 0.9 * recorded < held["total"] < recorded
    # Of a model of few layers most is of tables, whose gradients XLA turns early or late: the larger one is derived.
    assert 0.9 < plan["derived_bytes_per_device"]["total"] / held["total"] < 1.2


def test_time_is_predicted_from_the_schedule(program):
    predicted = program[0]["predicted"]
    assert 0 < predicted["exposed_communication_s"] < predicted["communication_s"]
    assert predicted["step_time_s"] == predicted["compute_s"] + predicted["exposed_communication_s"]
    assert 0 < predicted["mfu"] < 0.7


def test_the_derived_time_is_near_the_compiled_one(program, request):
    """Else meshes that are only derived would stand in a wrong order."""
    words, *_ = PROGRAMS[request.node.callspec.params["program"]]
    cfg = compose(words).config
    sizes = explicit_sizes(cfg.model.mesh_shape)
    assert sizes is not None
    derived = make_candidate(cfg, sizes, None, read_topology(cfg.plan.topology), with_activations=False).time
    compiled = program[0]["predicted"]
    assert derived.step_s == pytest.approx(compiled["step_time_s"], rel=0.25)
    assert derived.communication_s == pytest.approx(compiled["communication_s"], rel=0.1)  # small ones are joined


def test_arithmetic_is_that_of_the_model(program):
    """Counted in its products and attention kernels: forward, backward, and forward again where remat asks for it.

    Logits are never computed again; the backward kernels compute the scores again, and blocks at the ends of ranges whole.
    """
    plan, _, times = program
    model_tflop = plan["predicted"]["mfu"] * plan["predicted"]["step_time_s"] * 989
    assert plan["tflop_per_step_per_device"] == pytest.approx(times * model_tflop, rel=0.15)


@pytest.mark.nightly
@pytest.mark.parametrize("name", HIDE)
def test_communication_hides(name, cache_dir, installs_dir):
    """Sums of two layers take turns: XLA joined them, or found no memory for their order. So do two parts of a microbatch
    on tp. Half, a quarter and 70 % of communication was waited for."""
    predicted = compile_plan(name, cache_dir, installs_dir)["predicted"]
    assert predicted["exposed_communication_s"] < HIDE[name][1] * predicted["communication_s"]


@pytest.mark.nightly
def test_stages_run_forward_once(cache_dir, installs_dir):
    """Stages that keep values of their layers leave out a forward pass of the blocks, and hold what is derived."""
    once, twice = (compile_plan(name, cache_dir, installs_dir) for name in ("False", "True"))
    tflop = [plan["tflop_per_step_per_device"] for plan in (once, twice)]
    # Of 8 layers: 2 FLOPs forward for each weight of their products and token, in 9 of 8 ticks, and attention.
    weights, tokens = 8 * 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072), once["tokens_per_step"] / 8
    forward = 9 / 8 * 2 * weights * tokens / 1e12
    assert forward < tflop[1] - tflop[0] < 1.4 * forward
    held = once["bytes_per_device"]["total"]
    assert twice["bytes_per_device"]["total"] < held
    assert once["derived_bytes_per_device"]["total"] == pytest.approx(held, rel=0.15)


ROLLOUTS = {
    "small": [
        "model=tiny", "model.num_layers=1", "model.global_every=1", "model.sliding_window=null", "model.num_kv_heads=2",
        "model.head_dim=64", "training.mixed_precision=bf16",
    ],
    "0.6b": ["model=qwen3_0_6b", "model.num_layers=2", "sampling.cache=slots"],
    "one head": ["model=gemma3_1b", "model.num_layers=4", "model.global_every=2", "sampling.cache=slots"],
    "7b": ["model=qwen2_5_7b", "model.num_layers=2", "sampling.cache=slots"],
    "0.6b, pages": ["model=qwen3_0_6b", "model.num_layers=2"],
    "one head, pages": ["model=gemma3_1b", "model.num_layers=4", "model.global_every=2"],
    "pages of 8 bits": ["model=qwen2_5_7b", "model.num_layers=2", "sampling.cache_dtype=int8"],
}  # fmt: skip


@pytest.mark.nightly(but=["small"])
@pytest.mark.parametrize("name", ROLLOUTS)
def test_the_cache_of_a_rollout_is_in_memory_once(name, installs_dir):
    """The loop over tokens writes it in place, and has no copy of it in another order.

    Pages are read by a kernel in each layer that sees all tokens: nothing has the size of the rows' tables.
    """
    words = ROLLOUTS[name]
    found = json.loads(compile_for_gpu("compile_rollout.py", *words, installs_dir=installs_dir)[-1])
    has_slots = "sampling.cache=slots" in words
    assert found["kernels"] == (0 if has_slots else 1 if name == "small" else 2)
    assert found["cache"] <= found["in_place"] < 1.01 * found["cache"]
    assert found["temporary"] < 0.1 * found["cache"]
