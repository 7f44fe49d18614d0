"""Sequence parallelism: devices that share products split the tokens of the residual stream.

That loss and gradients are the same with it is held on every mesh with tp (sharding/test_every_mesh.py), that the derived
bytes are the compiled ones by plan/test_plan.py.
"""

import pytest
from support.harness import SMALL, batch, program

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.costs.step import derive, find_train_spec
from tunix.sharding.table import axis_names

TP = "model.mesh_shape=[[2,4],[fsdp,tp]]"


def sizes(**of_axes: int) -> dict[str, int]:
    return dict.fromkeys(axis_names(), 1) | of_axes


def layout_of(*words: str, **of_axes: int):
    return find_train_spec(compose([*SMALL, *words]).config, sizes(**of_axes)).layout


@pytest.mark.parametrize(
    ("words", "axes", "splits"),
    [
        ([], {"fsdp": 2, "tp": 4}, True),
        ([], {"cp": 2, "tp": 2}, True),
        ([], {"fsdp": 8}, False),
        (["training.sequence_parallel=false"], {"tp": 4}, False),
        (["training.seq_len=30"], {"tp": 4}, False),
    ],
)
def test_the_stream_is_split_where_devices_divide_its_tokens(words, axes, splits):
    layout = layout_of(*words, **axes)
    assert layout.splits_stream == splits
    assert (layout.activation("BtD") != layout.activation("BTD")) == splits
    assert layout.for_generation().activation("BtD") == layout.activation("BTD")  # of one token after the other


def test_what_cannot_be_split_is_refused_where_it_is_asked_for():
    training = compose([*SMALL, "training.seq_len=30", "training.sequence_parallel=true"]).config.training
    with pytest.raises(
        UserError, match="sequence_parallel=true splits training.seq_len=30 over 8 .* nearest: 24 or 32"
    ):
        training.splits_stream(sizes(cp=2, tp=4))


@pytest.mark.nightly
def test_biases_are_added_to_a_split_stream():
    """LayerNorm and biases of output projections; XLA aborts on ones [B, t] times a vector, so ones have all of x."""
    words = [TP, "model.norm=layer", "model.qk_norm=none", "model.biases=.", "training.micro_batch_size=4"]
    split, whole = (program(*words, f"training.sequence_parallel={value}").run(batch(8)) for value in ("true", "false"))
    for ours, theirs in zip(split, whole, strict=True):
        assert [ours[name] for name in ("loss", "grad_norm")] == pytest.approx(
            [theirs[name] for name in ("loss", "grad_norm")], rel=1e-5
        )


def test_a_gradient_of_a_norm_is_a_sum_over_the_devices_that_split_the_stream():
    found = find_train_spec(compose([*SMALL, TP]).config, sizes(fsdp=2, tp=4))
    scale = found.arch.weights["blocks"]["pre_mlp"]["scale"].equation
    assert "tp" in found.layout.gradient_axes(scale)
    assert "tp" not in found.layout.gradient_axes(found.arch.weights["blocks"]["mlp"]["up"]["w"].equation)


def test_a_gradient_of_a_table_that_tp_does_not_divide_is_no_sum_over_tp():
    """Rows are looked up for all tokens, before the stream is split, so each device computes the whole gradient: as a
    sum it was tp times too large."""
    words = [*SMALL, TP, "model.vocab_size=321", "++model.layer_inputs={dim: 6}"]
    found = find_train_spec(compose(words).config, sizes(fsdp=2, tp=4))
    for name in ("embedding", "layer_inputs"):
        assert "tp" not in found.layout.gradient_axes(found.arch.weights[name]["table"].equation)


def test_what_a_block_keeps_is_split():
    """With remat=full, what the backward pass keeps of the blocks is the stream alone."""
    words = ["training.remat=full", "model.num_layers=12"]
    kept = {}
    for asked in ("true", "false"):
        cfg = compose([*SMALL, TP, *words, f"training.sequence_parallel={asked}"]).config
        kept[asked] = derive(cfg, sizes(fsdp=2, tp=4)).num_bytes["activations"]
    stream = 12 * 32 * 32 * 4  # layers, tokens, width, float32
    assert kept["false"] - kept["true"] > 0.7 * stream
