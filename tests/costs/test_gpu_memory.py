"""The GPU's own program of a small step: what its update moves, and what travels to the host's pinned memory."""

import json

import pytest
from support.gpu_compiler import compile_for_gpu
from support.installs import one_at_a_time

LAYERS, ROWS = 2, 4 * 512  # of tests/support/compile_steps.py: layers, and tokens of a microbatch


@pytest.fixture(scope="module")
def compiled(cache_dir, installs_dir):
    """What tests/support/compile_steps.py says about one of its ways; one worker of the session asks, all read."""

    def compile_step(name: str) -> dict:
        file = cache_dir / f"gpu_memory {name}.json"
        with one_at_a_time("gpu_memory"):
            if not file.exists():
                lines = compile_for_gpu("compile_steps.py", name, installs_dir=installs_dir)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(lines[-1])
            return json.loads(file.read_text())[name]

    return compile_step


@pytest.mark.nightly
def test_the_update_moves_at_most_30_bytes_a_parameter(compiled):
    """AdamW in float32: weight and two moments are read and written, the gradient is read: 28 with a whole gradient."""
    step = compiled("none")
    assert 24 <= step["update"] / step["parameters"] <= 30
    assert step["host_arrays"] == []
    assert step["rests_on_host"] == step["copied_to_host"] == 0


@pytest.mark.nightly
def test_no_sum_depends_on_the_order_of_threads(compiled):
    """JAX's own gradient of a lookup does, so that two runs on a GPU differ in their last digits."""
    assert compiled("none")["unordered"] == 0


@pytest.mark.nightly
def test_moments_on_the_host_travel_both_ways_once(compiled):
    """Both moments of each parameter, in float32. The update reads them where they lie, and copies bring them back."""
    step, plain = compiled("optimizer"), compiled("none")
    moments = 2 * 4 * step["parameters"]
    assert step["rests_on_host"] == step["copied_to_host"] == moments
    assert plain["arguments"] - step["arguments"] == pytest.approx(moments, rel=1e-3)
    assert step["update"] == pytest.approx(plain["update"], rel=1e-3)


@pytest.mark.nightly
def test_activations_on_the_host_leave_the_device(compiled):
    """What a block takes and the products that `dots` keeps; the gradient of the loss and the last block's stay."""
    step, plain = compiled("activations"), compiled("none")
    assert {f"bf16[{LAYERS},4,512,512]", f"bf16[{LAYERS},4,512,1024]", f"bf16[{LAYERS},4,512,4,128]"} <= {
        *step["host_arrays"]
    }
    assert step["arguments"] == plain["arguments"]
    one_product = 2 * LAYERS * ROWS * 1024  # bytes of the wide product of the MLP in all layers
    assert step["temporary"] < plain["temporary"] - 2 * one_product


@pytest.mark.nightly
def test_values_of_unrolled_layers_stay_where_they_are_made(compiled):
    """In a loop each kept value and each gradient is copied into an array of all layers, which is filled with zeros."""
    step, plain = compiled("unrolled"), compiled("none")
    assert step["copied_into_stacks"] == 0 < plain["copied_into_stacks"]
    assert step["temporary"] < 1.1 * plain["temporary"]  # nothing more is kept


@pytest.mark.nightly
def test_a_step_is_compiled_for_the_memory_that_a_run_may_use(compiled):
    """Where it is short, XLA computes values once more; in a run it knows of `XLA_PYTHON_CLIENT_MEM_FRACTION`."""
    assert compiled("near the limit of its memory")["recomputed"] > 0 == compiled("none")["recomputed"]


@pytest.mark.nightly
def test_unrolled_layers_are_cut_out_of_stacks_once_a_step(compiled):
    """A layer that is cut out in each microbatch is a copy, which stays until the layer's backward pass."""
    assert compiled("accumulated, unrolled")["cut_out_in_loop"] == 0


@pytest.mark.nightly
def test_unrolled_layers_send_their_gradients_beside_the_next_layer(compiled):
    """The sums of the first of eight layers come last, and with them those of the table and of the second layer."""
    assert compiled("unrolled on 8 devices")["share_behind_layers"] < 0.4


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["accumulated", "accumulated by ZeRO 1"])
def test_layers_add_their_gradients_to_the_sums(way, compiled):
    """A layer of a float32 sum is read and written in one kernel, and gradients of all layers never exist at once."""
    step = compiled(way)
    assert step["sums"] == {"f32": ["in place"] * step["matrices"]}


@pytest.mark.nightly
def test_unrolled_layers_add_to_the_sums_inside_of_products(compiled):
    """So do all products of a layer, those of queries, keys and values too, which XLA would merge."""
    step = compiled("accumulated, unrolled on 8 devices")
    assert step["in_products"] == step["matrices"] * LAYERS


def test_stages_copy_neither_sums_nor_chunks(installs_dir):
    """One kernel reads 2 and 4 bytes of a parameter and writes 4: nothing is stacked, and no chunk is written again.

    Ticks without a loss or an embedding leave the sums of the tables where they are; with `cond` XLA copies them.
    Layers come out of the array of all chunks.
    """
    *_, answer = compile_for_gpu("compile_chunks.py", installs_dir=installs_dir)
    moved, copies, chunk_arrays = json.loads(answer)
    assert list(moved.values()) == [pytest.approx(10, rel=1e-3)]
    assert not copies
    assert not chunk_arrays
