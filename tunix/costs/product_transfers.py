"""Collectives of activations around products: sums over devices, and tokens that enter and leave branches."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix.config.mlp import ExpertsMlp
from tunix.costs.transfers import Transfer, find_shard_shape
from tunix.models.paths import parameter_name
from tunix.models.remat import product_name
from tunix.sharding.dims import EXPERTS, STREAM_TOKENS, TOKENS
from tunix.sharding.equations import Equation
from tunix.training.program import Program
from tunix.training.state import Weight

ENTERED = "BTD"  # what the first products of a branch take, and the sums of its last product before they are scattered


class Exchange(NamedTuple):
    """Collectives of one kind on arrays of the same dimensions."""

    kind: str
    letters: str
    axes: tuple[str, ...]
    times: float  # in one microbatch


def list_product_transfers(program: Program) -> list[Transfer]:
    """Return the collectives of one step that bring activations to products and sum their results.

    A product `x,w->y` of a block runs forward, once more where `training.remat` computes it again, and transposed for
    the gradient of x.
    """
    cfg, layout, mesh, batch = program.cfg, program.layout, program.mesh, program.batch
    sizes = cfg.dims | {"B": batch.num_rows, STREAM_TOKENS: batch.seq_len}
    item = jnp.dtype(layout.compute).itemsize
    transfers = []

    def add(kind: str, axes: tuple[str, ...], num_bytes: float, times: float) -> None:
        count = round(batch.num_microbatches * times)
        transfers.append(Transfer(kind, axes, round(count * num_bytes), overlaps=False, count=count))

    def count_numbers(letters: str) -> int:
        return math.prod(find_shard_shape([sizes[letter] for letter in letters], layout.activation(letters), mesh))

    for kind, letters, axes, times in (*_list_in_blocks(program), *_list_at_ends(program)):
        if axes and times:
            add(kind, axes, count_numbers(letters) * item, times)
    if isinstance(cfg.model.mlp, ExpertsMlp) and layout.stream_axes:  # numbers of a token's experts, and their weights
        layers = cfg.model.num_expert_layers * program.pipeline.ticks_per_part
        forward = 1 + program.remat.computes_again("product") + program.pipeline.runs_again
        choices = count_numbers("BT") * cfg.model.mlp.experts_per_token * 4
        add("all-gather", layout.stream_axes, choices, 2 * forward * layers)
        add("reduce-scatter", layout.stream_axes, choices, layers)  # the gradient of the weights
    return transfers


def _list_in_blocks(program: Program) -> Iterator[Exchange]:
    """Yield the exchanges around the products of blocks."""
    cfg, layout, pipeline = program.cfg, program.layout, program.pipeline
    remat, stream = program.remat, layout.stream_axes
    entered: dict[str, float] = {}  # layers of each branch that tokens enter, by its name
    expert_exchanges: list[Exchange] = []  # of one expert
    for path, weight in jax.tree.leaves_with_path(program.arch.weights):
        equation = weight.equation.dequantized()
        if not equation.is_stacked or equation.is_vector or equation.is_scales:
            continue
        name, layers = parameter_name(path), weight.shape[0] * pipeline.ticks_per_part
        again = remat.computes_again(product_name(name))
        if name.split(".")[1] == "mlp" and _gives_stream(equation) and cfg.model.norm_placement == "pre":
            again = 0.0  # nothing behind the last product needs its result again
        forward = (1 + again + pipeline.runs_again) * layers
        if EXPERTS in equation.w:
            # Sums of experts' products are summed over devices once for each token: not once for each expert, and not
            # apart for the two products that take it.
            expert_exchanges = [*_list_around_expert(program, equation, forward, layers), *expert_exchanges]
        elif stream and equation.leaves_branch:
            axes, summed = layout.product_axes(equation), equation.y.replace(STREAM_TOKENS, TOKENS)
            yield Exchange("reduce-scatter", summed, axes, forward)
            yield Exchange("all-gather", summed, axes, layers)  # of its gradient
            yield Exchange("all-reduce", equation.x, layout.product_axes(equation.transposed()), layers)
        else:
            yield Exchange("all-reduce", equation.y, layout.product_axes(equation), forward)
            if stream and equation.x == ENTERED and not _is_update(equation):
                entered[name.rsplit(".", 2)[0]] = layers
            else:
                yield Exchange("all-reduce", equation.x, layout.product_axes(equation.transposed()), layers)
    yield from dict.fromkeys(expert_exchanges)
    for layers in entered.values():
        times = 2 + pipeline.runs_again  # no policy keeps what a branch takes
        yield Exchange("all-gather", ENTERED, stream, times * layers)
        yield Exchange("reduce-scatter", ENTERED, stream, layers)


def _list_around_expert(program: Program, equation: Equation, forward: float, layers: float) -> Iterator[Exchange]:
    """Yield the exchanges around a product of experts, which runs forward `forward` times in all its `layers`."""
    layout = program.layout
    gives, takes = layout.product_axes(equation), layout.product_axes(equation.transposed())
    if not layout.stream_axes:
        yield Exchange("all-reduce", ENTERED, gives, forward)
        yield Exchange("all-reduce", ENTERED, takes, layers)
    elif gives:
        yield Exchange("reduce-scatter", ENTERED, gives, forward)
        yield Exchange("all-gather", ENTERED, gives, layers)
    else:
        again = program.remat.computes_again("product")
        yield Exchange("all-gather", ENTERED, takes, (1 + again) * layers)
        yield Exchange("reduce-scatter", ENTERED, takes, layers)


def _list_at_ends(program: Program) -> Iterator[Exchange]:
    """Yield the exchanges of embedding and head.

    A vocabulary that is split is summed over in the lookup of tokens, and in the gradient of the logits' product.
    """
    table: Weight = program.arch.weights["embedding"]["table"]
    yield Exchange("all-reduce", ENTERED, program.layout.product_axes(table.equation.transposed()), 2)
    if (inputs := program.arch.weights.get("layer_inputs")) is not None:  # a lookup in a table of its own
        yield Exchange("all-reduce", "BTlp", program.layout.product_axes(inputs["table"].equation), 1)
    # What the head takes, and the gradient of what the lookup gives: the stream begins and ends between them.
    yield Exchange("all-gather", ENTERED, program.layout.stream_axes, 2)


def _is_update(equation: Equation) -> bool:
    """Return whether a low-rank update has this product: it takes what the product beside it takes."""
    return "r" in equation.w


def _gives_stream(equation: Equation) -> bool:
    return equation.y.endswith("D") and not equation.x.endswith("D")
