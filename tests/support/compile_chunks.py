"""Compile for two H100s that are not there how stages take layers and add gradients to sums.

Prints as JSON the bytes that each kernel moves for one parameter of a layer, without those of products, where layers
add to the sums of their chunk; the copies of sums to which ticks add that have a loss or an embedding; and the arrays
of the layers of one chunk where a tick computes with one of its layers after the other.
"""

import json
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, reshard

from tunix.config.compose import compose
from tunix.costs.devices import read_topology
from tunix.costs.hlo import count_fusion, parse_instructions, read_computations
from tunix.models.pipeline import Chunks, Lanes
from tunix.plan.compile import describe_devices
from tunix.training.choices import build_layout, build_mesh
from tunix.training.pipeline_schedule import Turns

STAGES, CHUNKS, LAYERS, TOKENS, INPUTS, OUTPUTS = 2, 2, 3, 128, 2048, 4096
WORDS = [
    "model=tiny", "model.num_layers=12", "model.mesh_shape=[[2],[pp]]", "training.pipeline_schedule=interleaved",
    "training.pipeline_chunks=2", "training.sharding_strategy=shard_grad_op",
]  # fmt: skip


def main() -> None:
    cfg = compose(WORDS).config
    mesh = build_mesh(cfg, describe_devices(read_topology("h100:2")))
    on_stages = PartitionSpec("pp")
    with jax.set_mesh(mesh):
        chunks, turns = Chunks(Lanes(build_layout(cfg, mesh)), CHUNKS), Turns(STAGES, CHUNKS, 6)

        def tick(total, now, x, d_y):
            slot = turns.backward(now, reshard(jnp.arange(STAGES), on_stages))

            def layer(carry, each):
                total, number = carry
                gradient = jnp.einsum("STD,STF->SDF", *each, out_sharding=on_stages)
                return (chunks.add_layer(slot.chunk, total, gradient, number, None), number - 1), None

            return jax.lax.scan(layer, (total, jnp.asarray(LAYERS - 1)), (x, d_y), reverse=True)[0][0], None

        def step(total, x, d_y):
            return jax.lax.scan(lambda total, now: tick(total, now, x, d_y), total, jnp.arange(13))[0]

        def array(dtype, spec, *shape):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        total = array(jnp.float32, on_stages, STAGES, CHUNKS, LAYERS, INPUTS, OUTPUTS)
        values = [
            array(jnp.bfloat16, PartitionSpec(None, "pp"), LAYERS, STAGES, TOKENS, dim) for dim in (INPUTS, OUTPUTS)
        ]
        hlo = jax.jit(step, donate_argnums=0).lower(total, *values).compile().as_text() or ""
        chunk_arrays = list_chunk_arrays(chunks, turns, array)
    program = {name: parse_instructions(lines) for name, lines in read_computations(hlo).items()}
    kernels = [each for lines in program.values() for each in lines if each.opcode == "fusion"]
    works = [(each.name, count_fusion(each.called, program)) for each in kernels]
    moved = {name: work.device_bytes / (INPUTS * OUTPUTS) for name, work in works if not work.flops}
    copies = list_copies_of_sums(NamedSharding(mesh, PartitionSpec()))
    moved = {name: num_bytes for name, num_bytes in moved.items() if num_bytes > 0.5}
    print(json.dumps([moved, copies, chunk_arrays]))


def list_chunk_arrays(chunks: Chunks, turns: Turns, array: Callable[..., jax.ShapeDtypeStruct]) -> list[str]:
    """Compile ticks in which each stage multiplies by the layers of one of its chunks."""

    def tick(x, now, weights):
        slot = turns.forward(now, reshard(jnp.arange(STAGES), PartitionSpec("pp")))

        def layer(x, number):
            weight = chunks.take_layer(slot.chunk, weights, number)
            return jnp.einsum("STD,SDF->STF", x, weight, out_sharding=PartitionSpec("pp")), None

        return jax.lax.scan(layer, x, jnp.arange(LAYERS))[0], None

    def step(x, weights):
        return jax.lax.scan(lambda x, now: tick(x, now, weights), x, jnp.arange(13))[0]

    shapes = (STAGES, TOKENS, INPUTS), (STAGES, CHUNKS, LAYERS, INPUTS, INPUTS)
    hlo = jax.jit(step).lower(*(array(jnp.bfloat16, PartitionSpec("pp"), *shape) for shape in shapes)).compile()
    return re.findall(rf"(\S+) = bf16\[(?:1,)*{LAYERS},{INPUTS},{INPUTS}\]", hlo.as_text() or "")


def list_copies_of_sums(whole: NamedSharding) -> list[str]:
    """Compile a loop over ticks in which some add to the gradient of one table and some to that of another."""
    turns = Turns(STAGES, CHUNKS, 6)

    def tick(sums, now):
        def finish(head, table, weight):
            return head + jnp.outer(jnp.sin(jnp.arange(INPUTS) + now), jnp.arange(OUTPUTS)), table, weight + 1

        def leave(head, table, weight):
            return head, table.at[jnp.arange(TOKENS) * now].add(1), weight

        sums = turns.if_due(turns.finishing(now)[0], finish, *sums)
        return turns.if_due(turns.returning(now)[0], leave, *sums), None

    shapes = (INPUTS, OUTPUTS), (INPUTS, OUTPUTS), ()
    sums = tuple(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole) for shape in shapes)
    step = jax.jit(lambda sums: jax.lax.scan(tick, sums, jnp.arange(13))[0], donate_argnums=0)
    hlo = step.lower(sums).compile().as_text() or ""
    return re.findall(rf"(\S+) = f32\[{INPUTS},{OUTPUTS}\]\S* copy\(", hlo)


if __name__ == "__main__":
    main()
