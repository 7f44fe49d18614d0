"""Layers on stages: the same numbers as on one device, and what does not fit the stages is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.collective_order import list_races
from support.harness import SGD, batch, experts, program

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.models.pipeline import Chunks, Lanes, list_sends
from tunix.sharding.arrays import to_global
from tunix.sharding.table import axis_names
from tunix.training.pipeline_schedule import Turns, assign_slots

# Four layers, of which every second one is global: the windows travel with the layers. Low-rank updates beside weights
# that are trained too. Dropout draws the same for a row of a microbatch, whichever part the row is in.
LAYERS = ["model.num_layers=4", "model.global_every=2", "model.lora.rank=2", "model.lora.train_also=."]
NOISY = [
    *LAYERS, *SGD, "model.lora.targets=attention.o|mlp.up", "model.lora.dropout=0.5",
    "training.gradient_accumulation_steps=2",
]  # fmt: skip
IDLE = "distributed.allow_idle_devices=true"
EXPERTS = experts(num_experts=4, dense_layers=2)
EXPERTS_ALL = experts(num_experts=4)


@pytest.fixture(scope="module")
def reference() -> list[dict[str, float]]:
    return program("model.mesh_shape=[[1],[fsdp]]", IDLE, *NOISY, "training.micro_batch_size=8").run(batch(16, 2))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("[[2,2,2],[pp,fsdp,tp]]", ["training.micro_batch_size=2", "training.pipeline_schedule=interleaved"]),
        ("[[2,2,2],[pp,fsdp,tp]]", ["training.micro_batch_size=2", "training.pipeline_schedule=interleaved",
                                    "training.sharding_strategy=shard_grad_op"]),
        ("[[2,2,2],[pp,fsdp,tp]]", ["training.micro_batch_size=2"]),
        ("[[2,2,2],[pp,fsdp,tp]]", ["training.micro_batch_size=2", "training.pipeline_schedule=interleaved",
                                    "training.pipeline_recompute=true"]),
        *(("[[2,2,2],[pp,fsdp,tp]]", ["training.micro_batch_size=2", f"training.pipeline_schedule={schedule}",
                                      "training.overlap=prefetch", "training.sync_gradients_every=1"])
          for schedule in ("1f1b", "interleaved")),
        ("[[4],[pp]]", ["training.micro_batch_size=2", "training.pipeline_microbatches=4", "training.remat=none", IDLE,
                        "training.sharding_strategy=shard_grad_op"]),
        ("[[2],[pp]]", ["training.micro_batch_size=4", IDLE]),
    ],
    ids=["interleaved, gathered in blocks", "interleaved, gathered once", "1f1b, gathered in blocks",
         "interleaved, forward twice", "1f1b, gathered ahead", "interleaved, gathered ahead", "1f1b, larger parts",
         "1f1b, parts of one row"],
)  # fmt: skip
def test_stages_leave_the_result_unchanged(mesh, more, reference):
    step = program(f"model.mesh_shape={mesh}", *NOISY, *more)
    for ours, theirs in zip(step.run(batch(16, 2)), reference, strict=True):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    assert not list_races(step.compiled.as_text())
    query = step.state["params"]["blocks"]["attention"]["q"]["w"]
    assert query.shape[0] == 4, "a checkpoint has the layers in one array, whatever splits them"
    assert query.sharding.spec[0] == "pp"
    assert query.addressable_shards[0].data.shape[0] == 4 // step.mesh.shape["pp"]


def test_dropout_in_parts_of_one_row():
    """No axis splits the rows beside the stages; numbers are those of a case of the test above."""
    words = "model.lora.rank=2", "model.lora.targets=attention.o", "model.lora.dropout=0.5", "model.num_layers=2"
    program("model.mesh_shape=[[2],[pp]]", *words, "model.global_every=1", *SGD, IDLE).lower(batch(2))


def test_devices_reach_collectives_of_stages_in_one_order():
    """The layers of a part run again while those of another part may still run."""
    words = *SGD, "model.num_layers=4", "training.pipeline_recompute=true", "training.micro_batch_size=4", IDLE
    assert not list_races(program("model.mesh_shape=[[2,2],[pp,tp]]", *words).compile(batch(8)).as_text())


DENSE_FIRST = [
    EXPERTS, "model.num_layers=7", "model.layers_before_stages=3", "model.mlp.balance_loss=0.01", *LAYERS[2:], *SGD, "model.lora.targets=attention.o",
    "model.lora.dropout=0.5", "training.gradient_accumulation_steps=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def dense_first() -> list[dict[str, float]]:
    return program("model.mesh_shape=[[1],[fsdp]]", IDLE, *DENSE_FIRST, "training.micro_batch_size=8").run(batch(16, 2))


@pytest.mark.nightly  # each day: the forward pass (`test_held_out_loss_on_stages`)
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("[[2,2],[pp,fsdp]]", ["training.micro_batch_size=2"]),
        ("[[2,2,2],[pp,ep,tp]]", ["training.micro_batch_size=2", "training.pipeline_schedule=interleaved",
                                  "training.overlap=prefetch", "training.sync_gradients_every=1"]),
        ("[[4,2],[pp,cp]]", ["training.micro_batch_size=2", "training.pipeline_microbatches=4",
                             "training.sharding_strategy=shard_grad_op"]),
    ],
    ids=["1f1b, gathered in blocks", "interleaved, gathered ahead", "1f1b, gathered once"],
)  # fmt: skip
def test_dense_layers_before_stages(mesh, more, dense_first):
    """Two dense layers and one with experts before four on stages; dropout draws by rows there too."""
    step = program(f"model.mesh_shape={mesh}", IDLE, *DENSE_FIRST, *more)
    for ours, theirs in zip(step.run(batch(16, 2)), dense_first, strict=True):
        for name in ("loss", "grad_norm", "balance_loss"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    assert not list_races(step.compiled.as_text())
    layers = {
        name: step.state["params"][name]["attention"]["q"]["w"]
        for name in ("first_dense_blocks", "first_blocks", "blocks")
    }
    assert [layers[name].addressable_shards[0].data.shape[0] for name in layers] == [2, 1, 4 // step.mesh.shape["pp"]]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [LAYERS, [EXPERTS_ALL, "model.num_layers=2"], [EXPERTS, "model.num_layers=5", "model.layers_before_stages=3"]],
    ids=["windows", "experts", "dense first"],
)
def test_held_out_loss_on_stages(words):
    """The forward pass alone: six parts on two stages, and what routers add to the objective."""

    def forward(mesh, *more):
        step = program(*words, f"model.mesh_shape={mesh}", IDLE, *more)
        rows = {name: leaf[0] for name, leaf in to_global(batch(12), step.mesh).items()}
        with jax.set_mesh(step.mesh):
            loss = jax.jit(lambda params, rows: step.built.loss_fn(step.arch.module(params), rows, None))
            return loss(step.state["params"], rows)

    ours = forward("[[2,2],[pp,fsdp]]", "training.micro_batch_size=3")
    theirs = forward("[[1],[fsdp]]", "training.micro_batch_size=12")
    np.testing.assert_allclose(ours.objective, theirs.objective, rtol=1e-5)
    np.testing.assert_allclose(ours.sums["loss"], theirs.sums["loss"], rtol=1e-5)


@pytest.mark.nightly
def test_memory_of_1f1b_does_not_grow_with_parts():
    """Twice the microbatches are twice the parts; the batch itself is an argument of the step."""

    def temporary(microbatches):
        words = ["model.mesh_shape=[[2,2,2],[pp,fsdp,tp]]", *LAYERS, "training.micro_batch_size=2"]
        step = program(*words, f"training.gradient_accumulation_steps={microbatches}")
        rows = batch(8 * microbatches, microbatches)
        dealt_out_anew = sum(leaf.nbytes for leaf in rows.values()) // 4  # tokens in the place of sequences
        return step.compile(rows).memory_analysis().temp_size_in_bytes - dealt_out_anew

    assert temporary(4) <= 1.02 * temporary(2)


@pytest.mark.nightly
def test_quantized_layers_on_stages_are_traced():
    """Codes become matrices inside of a stage."""
    step = program("model.mesh_shape=[[2,4],[pp,fsdp]]", *LAYERS[:3], "model.lora.quantize_base=nf4")
    with jax.set_mesh(step.mesh):
        rows = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch().items()}
        jax.eval_shape(step.step, step.state, rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.num_layers=26", "model.mesh_shape=[[4,2],[pp,fsdp]]"],
         r"num_layers=26: 4 stages do not divide the 26 .*; set model.layers_before_stages=2, take 2 or 13 or 26 stages, or leave"),
        (["model.num_layers=4", "model.mesh_shape=[[4,2],[pp,fsdp]]", "training.pipeline_microbatches=2"],
         r"pipeline_microbatches=2 does not fit 4 stages .* nearest: 4, or auto"),
        (["model.num_layers=4", "model.mesh_shape=[[2,4],[pp,fsdp]]", "training.micro_batch_size=6",
          "training.pipeline_microbatches=8"],
         r"must be a multiple of 2 that divides 12; nearest: 4 or 6 or 12, or auto"),
        (["model.num_layers=4", "model.mesh_shape=[[4,2],[pp,fsdp]]", "training.seq_len=30"],
         r"training.seq_len=30 is split over 4 devices of the mesh axes pp x cp; nearest: 28 or 32, or leave pp out of"),
        (["model.num_layers=6", "model.mesh_shape=[[2,4],[pp,fsdp]]", "training.pipeline_schedule=interleaved"],
         r"training.pipeline_chunks=2 does not divide the 3 layers of each of 2 stages; nearest: 3, or training.pipeline_"),
        (["model.num_layers=4", "model.mesh_shape=[[4,2],[pp,fsdp]]", "training.pipeline_schedule=interleaved"],
         r"training.pipeline_chunks=2 does not divide the 1 layers of .*; set training.pipeline_schedule=1f1b"),
        (["model.num_layers=4", "model.mesh_shape=[[2,4],[pp,fsdp]]", "training.remat_every=2"],
         r"training.remat_every=2: stages keep .* set training.pipeline_recompute=true, or leave pp out of"),
        (["model.num_layers=4", "model.mesh_shape=[[2,4],[pp,fsdp]]", "training.offload=activations"],
         r"training.offload=activations: stages keep .* set training.pipeline_recompute=true, or leave pp out of"),
        (["model.num_layers=8", "model.mesh_shape=[[4,2],[pp,fsdp]]", EXPERTS],
         r"num_layers=8: 4 stages do not divide the 6 .*; set model.layers_before_stages=4, take 2 or 3 or 6 stages, or leave"),
        (["model.num_layers=8", "model.layers_before_stages=1", EXPERTS],
         r"layers_before_stages=1 must be at least the 2 dense layers before experts, and below model.num_layers=8; set it"),
    ],
    ids=["layers", "fewer parts than stages", "sequences", "tokens", "chunks", "no chunks",
         "groups of layers", "kept values on the host",
         "dense layers before experts", "dense layers on stages"],
)  # fmt: skip
def test_what_does_not_fit_the_stages(words, message):
    with pytest.raises(UserError, match=message):
        program(*words)


@pytest.mark.parametrize(
    ("schedule", "given", "iterations"),
    [
        ("1f1b", "auto", 37),
        ("1f1b", 4, 13),
        ("interleaved", "auto", 2 * 36 + 1),
    ],
)
def test_ticks_and_bubble(schedule, given, iterations):
    """Of three microbatches on two stages, which 1F1B fills once a step."""
    words = ["training.micro_batch_size=6", "training.gradient_accumulation_steps=3"]
    keys = [f"training.pipeline_microbatches={given}", f"training.pipeline_schedule={schedule}"]
    pipeline = compose([*words, *keys]).config.training.pipeline(dict.fromkeys(axis_names(), 1) | {"pp": 2})
    assert pipeline.num_iterations == iterations
    work = 3 * (12 if given == "auto" else given) * pipeline.num_chunks
    assert pipeline.bubble == pytest.approx((iterations - work) / iterations)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_layers_add_to_their_place_of_a_chunk(num_chunks):
    """One layer after the other leaves the sums that a chunk at once leaves; the stages work on different chunks."""
    step = program("model.mesh_shape=[[2,2],[pp,fsdp]]", "model.num_layers=4", "model.global_every=1", IDLE)
    with jax.set_mesh(step.mesh):
        chunks = Chunks(Lanes(step.built.choices.layout), num_chunks)
        keys = jax.random.split(jax.random.key(0), 2)
        places = (2, num_chunks, 3, 4) if num_chunks > 1 else (2, 3, 4)
        total, more = jax.random.normal(keys[0], places), jax.random.normal(keys[1], (2, 3, 4))
        total, more, chunk = (jax.device_put(x, PartitionSpec("pp")) for x in (total, more, jnp.arange(2) % num_chunks))

        def one_by_one(total):
            for layer in range(3):
                total = chunks.add_layer(chunk, total, more[:, layer], layer, None)
            return total

        def take_one_by_one(total):
            return jnp.stack([chunks.take_layer(chunk, total, jnp.asarray(layer)) for layer in range(3)], 1)

        ours, theirs = jax.jit(one_by_one)(total), jax.jit(lambda total: chunks.add(total, more, chunk))(total)
        np.testing.assert_array_equal(ours, theirs)
        if num_chunks > 1:
            taken = jax.jit(lambda total: chunks.take(total, chunk))(total)
            np.testing.assert_array_equal(jax.jit(take_one_by_one)(total), taken)


def test_turns_of_interleaved_stages():
    """Each stage goes forward and backward through each part once for each chunk, after the stages before it."""
    num_stages, num_chunks, num_parts = 4, 3, 8
    turns, stages = Turns(num_stages, num_chunks, num_parts), np.arange(num_stages)
    (_, _, _), (begin, end, _), (_, last, _) = turns.loops
    times = {}
    for name, turn_of, iterations in (("F", turns.forward, range(end)), ("B", turns.backward, range(begin, last))):
        for now in iterations:
            chunk, part = turn_of(now, stages)
            for stage in stages:
                if 0 <= part[stage] < num_parts:
                    key = name, part[stage], chunk[stage] * num_stages + stage
                    assert key not in times
                    times[key] = now
    for part in range(num_parts):
        for index in range(num_stages * num_chunks):
            after = times["F", part, index], times["B", part, index]
            if index:
                assert after == (times["F", part, index - 1] + 1, times["B", part, index - 1] - 1)
            assert after[1] > after[0] or index == num_stages * num_chunks - 1
    assert len(times) == 2 * num_parts * num_stages * num_chunks


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(4, 1), (4, 5), (3, 2), (8, 3)])
def test_slots_hold_what_stages_keep(num_stages, num_chunks):
    """A stage finds in its slot what it put there for the same part and chunk, and there are no more slots than parts
    that are under way at one time, however many follow (costs/memory.py counts them)."""
    num_parts, stages = 5 * num_stages, np.arange(num_stages)
    turns, slots = Turns(num_stages, num_chunks, num_parts), assign_slots(num_stages, num_chunks, num_parts)
    assert slots.num_slots == (num_chunks + 1) * num_stages - 1
    (_, begin, _), (_, end, _), (_, last, _) = turns.loops
    held = [dict[int, tuple[int, int] | None]() for _ in stages]
    for now in range(last):
        ahead, back = turns.forward(now, stages), turns.backward(now, stages)
        for stage in stages:
            if now < end:
                is_work = 0 <= ahead.part[stage] < num_parts
                held[stage][slots.put[now, stage]] = (ahead.chunk[stage], ahead.part[stage]) if is_work else None
            if now >= begin:
                found = held[stage][slots.taken[now, stage]]  # in a bubble too it has been put there
                if 0 <= back.part[stage] < num_parts:
                    assert found == (back.chunk[stage], back.part[stage])


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(4, 2), (2, 4), (6, 4), (3, 5)])
def test_each_chunk_is_dealt_to_its_stage(num_stages, num_chunks):
    """Each permute takes one chunk of each stage, and gives each stage one."""
    places = set()
    for number in range(num_chunks):
        trips = list_sends(num_stages, num_chunks, number)
        assert sorted(trip[0] for trip in trips) == sorted(trip[2] for trip in trips) == list(range(num_stages))
        assert all(root * num_chunks + index == slot * num_stages + there for root, index, there, slot in trips)
        places |= {trip[:2] for trip in trips}
    assert len(places) == num_stages * num_chunks
