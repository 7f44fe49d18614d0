"""Layers that gather ahead sum their gradients over replicas beside the layers before them, and once a step."""

import jax
import pytest
from support.harness import Program, batch, program

from tunix.costs.hlo import read_collectives
from tunix.training.choices import select

MICROBATCHES = 3
WORDS = (
    "model.mesh_shape=[[2,2],[dp,fsdp]]", "distributed.allow_idle_devices=true", "training.sync_gradients_every=1",
    f"training.gradient_accumulation_steps={MICROBATCHES}",
)  # fmt: skip


@pytest.fixture(scope="module")
def ahead() -> Program:
    return program(*WORDS, "training.overlap=prefetch")


@pytest.mark.nightly
def test_the_numbers_are_those_of_a_plain_scan(ahead):
    data = batch(sequences=4 * MICROBATCHES, microbatches=MICROBATCHES)
    plain = program(*WORDS, "training.overlap=none")
    for expected, metrics in zip(plain.run(data, 2), ahead.run(data, 2), strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5)


def test_several_microbatches_are_summed_over_replicas_in_the_last_one(ahead):
    """The sums of layers travel once a step, with two of zeros; the table's, which is in no layer, in each microbatch."""
    text = ahead.compile(batch(4 * MICROBATCHES, MICROBATCHES)).as_text()
    found = [c for c in read_collectives(text) if c.kind == "all-reduce" and c.group == (0, 2)]
    params = ahead.built.abstract["params"]
    layers = [leaf for path, leaf in jax.tree.leaves_with_path(params["blocks"]) if path[-1].key != "scale"]
    num_layers, shards = layers[0].shape[0], 2
    expected = sum(4 * leaf.size for leaf in layers) * (num_layers + 2) / num_layers / shards
    expected += MICROBATCHES * 4 * params["embedding"]["table"].size / shards
    assert sum(each.num_bytes * each.times for each in found) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("mesh", "limit", "is_early"),
    [("[[2,4],[dp,fsdp]]", 64, True), ("[[8],[fsdp]]", 8, True), ("[[2,4],[pp,fsdp]]", 64, False)],
)
def test_sums_over_replicas_do_not_queue_behind_gathers(mesh, limit, is_early):
    built = program(f"model.mesh_shape={mesh}", "model.num_layers=4").built
    options = select(built.cfg, built.abstract_mesh, "gpu").options
    assert options["xla_gpu_experimental_parallel_collective_overlap_limit"] == limit
    assert ("xla_gpu_experimental_collective_start_as_early_as_possible" in options) == is_early
