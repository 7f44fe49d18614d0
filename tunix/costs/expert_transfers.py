"""Collectives of experts: what devices with different experts send each other, by the name of the exchange."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp

from tunix.base.dotted import import_object
from tunix.config.exchange_tables import EXPERT_EXCHANGES
from tunix.config.mlp import ExpertsMlp
from tunix.costs.transfers import Transfer, find_shard_shape
from tunix.models.expert_exchanges import count_rows
from tunix.sharding.mesh_shape import count_devices
from tunix.training.program import Program

NUMBER = 4  # bytes of the number of an expert, of a share and of a count


class Exchanged(NamedTuple):
    """Sizes and counts of an exchange of experts in one step."""

    axes: tuple[str, ...]  # that split the experts
    num_devices: int  # along them
    num_tokens: int  # of one device in a microbatch
    per_token: int  # experts of a token
    num_experts: int  # of a layer
    row: int  # bytes of a token in products
    room: float | None  # of `count_rows`
    weighs_inputs: bool
    layers: float  # layers with experts x microbatches, with those of the bubble of a pipeline
    runs: float  # forward passes of a layer: one, and those that the backward pass needs again
    results: float  # forward passes of which the results come back: nothing but a norm behind them needs them again


def list_expert_transfers(program: Program) -> list[Transfer]:
    """Return the collectives of one step that bring tokens to experts of other devices, and results back."""
    cfg, layout, mesh, batch = program.cfg, program.layout, program.mesh, program.batch
    axes, mlp = layout.expert_axes, cfg.model.mlp
    num_devices = count_devices(mesh.shape, axes)
    if num_devices == 1 or not isinstance(mlp, ExpertsMlp):
        return []
    num_tokens = math.prod(find_shard_shape((batch.num_rows, batch.seq_len), layout.activation("BT"), mesh))
    pipeline, remat = program.pipeline, program.remat
    exchanged = Exchanged(
        axes,
        num_devices,
        num_tokens,
        mlp.experts_per_token,
        mlp.num_experts,
        row=cfg.model.embed_dim * jnp.dtype(layout.compute).itemsize,
        room=cfg.model.expert_buffer_factor,
        weighs_inputs=mlp.weighted == "inputs",
        layers=cfg.model.num_expert_layers * batch.num_microbatches * pipeline.ticks_per_part,
        runs=1 + remat.computes_again("exchange") + pipeline.runs_again,
        results=1 + pipeline.runs_again + remat.computes_again("product") * (cfg.model.norm_placement != "pre"),
    )
    return list(import_object(EXPERT_EXCHANGES[layout.expert_exchange].transfers)(exchanged))


def gather_tokens(each: Exchanged) -> Iterator[Transfer]:
    """Yield gathers of tokens, experts and shares, reduce-scatters of sums, and the opposite for gradients.

    An example: tokens of 2,048 bytes (`row`) with 2 experts each; their numbers are 8 bytes (`choices`), and so are
    their shares. Where the backward pass needs nothing again, one layer moves for each token

        all-gather       2,048 + 8 + 8   forward: the token, the numbers of its experts, their shares
                         2,048           backward: the gradient of its sum
        reduce-scatter   2,048           forward: the sum of its experts' results
                         2,048 + 8       backward: the gradients of the token and of its shares
    """
    own = each.num_tokens * each.num_devices  # tokens of a group
    choices = each.per_token * NUMBER
    gathers = each.runs * (each.row + 2 * choices) + each.row
    count = round(each.layers * (3 * each.runs + 1))
    yield Transfer("all-gather", each.axes, round(each.layers * own * gathers), overlaps=False, count=count)
    num_bytes = round(each.layers * own * ((each.results + 1) * each.row + choices))
    count = round(each.layers * (each.results + 2))
    yield Transfer("reduce-scatter", each.axes, num_bytes, overlaps=False, count=count)


def send_rows(each: Exchanged) -> Iterator[Transfer]:
    """Yield counts that all devices gather, rows and their shares there, results back, and the same for gradients.

    A row is a token on its way to one expert: a token with 2 experts sends 2 rows. Before rows travel, each device
    tells all others how many rows it has for each expert.

        forward    counts to all   rows and shares to the experts   results back
        backward                   gradients of results there       gradients of rows and shares back
    """
    counts = each.num_devices * each.num_experts * NUMBER
    times = each.layers * each.runs
    yield Transfer("all-gather", each.axes, round(times * counts), overlaps=False, count=round(times))
    num_own = each.num_experts // each.num_devices
    room = count_rows(each.num_tokens, each.per_token, each.num_devices, num_own, each.room)
    num_rows = min(each.num_tokens * each.per_token, room)
    there = each.runs + 1
    shares = 0.0 if each.weighs_inputs else there
    num_bytes = round(each.layers * num_rows * ((there + each.results + 1) * each.row + shares * NUMBER))
    count = round(each.layers * (there + each.results + 1 + shares))
    yield Transfer("ragged-all-to-all", each.axes, num_bytes, overlaps=False, count=count)
