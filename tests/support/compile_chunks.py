"""Compile for two H100s that are not there how layers on stages add their gradients to the sums of their chunk.

Prints the bytes that each of these kernels moves for one parameter of a layer, without those of products, as JSON.
"""

import json

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
    program = {name: parse_instructions(lines) for name, lines in read_computations(hlo).items()}
    kernels = [each for lines in program.values() for each in lines if each.opcode == "fusion"]
    works = [(each.name, count_fusion(each.called, program)) for each in kernels]
    moved = {name: work.device_bytes / (INPUTS * OUTPUTS) for name, work in works if not work.flops}
    print(json.dumps({name: num_bytes for name, num_bytes in moved.items() if num_bytes > 0.5}))


if __name__ == "__main__":
    main()
