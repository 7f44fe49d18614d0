"""Compile the attention kernels for a chip that is not there, and print their names: compile_kernels.py CHIP HEAD_DIM."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

sys.path.insert(0, str(Path(__file__).parents[2]))

from tunix.models.flash import flash
from tunix.models.seen import seen_in_row
from tunix.plan.compiled import describe_devices
from tunix.plan.topology import read_topology

chip, dim = sys.argv[1], int(sys.argv[2])
devices = describe_devices(read_topology(f"{chip}:1"))
mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Explicit,), devices=devices)


SPLIT = jax.P("fsdp")


def gradients(q, k, v, segments, window):
    @jax.shard_map(in_specs=(SPLIT,) * 4 + (jax.P(),), out_specs=SPLIT)
    def on_each_device(q, k, v, segments, window):
        out, pull_back = jax.vjp(lambda *qkv: flash(*qkv, seen_in_row(segments, window)), q, k, v)
        return pull_back(out)

    return on_each_device(q, k, v, segments, window)


def shape(*dims: int, dtype=jnp.bfloat16, spec=SPLIT) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, spec))


with jax.set_mesh(mesh):
    queries, keys = shape(1, 512, 4, dim), shape(1, 512, 2, dim)
    numbers = shape(1, 512, dtype=jnp.int32), shape(dtype=jnp.int32, spec=jax.P())
    compiled = jax.jit(gradients).lower(queries, keys, keys, *numbers).compile()
print(*sorted(set(re.findall(r'name = "(attention_\w+)"', compiled.as_text()))))
