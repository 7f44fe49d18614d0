"""Compile kernels for a chip that is not there: compile_kernels.py CHIP (HEAD_DIM | experts).

Prints the names of the attention kernels; of a layer of experts what its program has, as JSON.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

from tunix.cli.compose import compose
from tunix.costs.schedule import Speeds, walk
from tunix.models.experts import Experts
from tunix.models.flash import flash
from tunix.models.seen import seen_in_row
from tunix.plan.compiled import describe_devices, kernel_data
from tunix.plan.topology import read_topology
from tunix.sharding.dims import axis_names
from tunix.training.program import build_layout

SPLIT = jax.P("fsdp")
WITHOUT_TIME = Speeds(1.0, 1.0, 1.0, 1.0, 0.0, lambda _: 0.0)


def compile_attention(mesh: Mesh, dim: int) -> str:
    """Return the program of attention and its gradients, as text."""

    def gradients(q, k, v, segments, window):
        @jax.shard_map(in_specs=(SPLIT,) * 4 + (jax.P(),), out_specs=SPLIT)
        def on_each_device(q, k, v, segments, window):
            out, pull_back = jax.vjp(lambda *qkv: flash(*qkv, seen_in_row(segments, window)), q, k, v)
            return pull_back(out)

        return on_each_device(q, k, v, segments, window)

    def shape(*dims: int, dtype=jnp.bfloat16, spec=SPLIT) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, spec))

    queries, keys = shape(1, 512, 4, dim), shape(1, 512, 2, dim)
    numbers = shape(1, 512, dtype=jnp.int32), shape(dtype=jnp.int32, spec=jax.P())
    return jax.jit(gradients).lower(queries, keys, keys, *numbers).compile().as_text()


def compile_experts(mesh: Mesh, kind: str, num_tokens: int = 4096) -> dict[str, Any]:
    """Return what the program of a layer of Qwen 3 30B-A3B with its gradients has, and what its definition says."""
    cfg = compose(["model=qwen3_30b_a3b", "model.mesh_shape=[[1],[fsdp]]", "training.param_dtype=bfloat16"]).config
    layout = build_layout(cfg, mesh)
    layer, state = nnx.split(nnx.eval_shape(lambda: Experts(cfg.model, layout, nnx.Rngs(0))))
    shaped = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, jax.P())), state
    )
    spec = layout.activation("BtD")
    x = jax.ShapeDtypeStruct((1, num_tokens, 2048), jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))

    def gradients(state, x):
        out, pull_back = jax.vjp(lambda state, x: nnx.merge(layer, state)(x, None)[0], state, x)
        return pull_back(out)

    compiled = jax.jit(gradients).lower(shaped, x).compile()
    text = compiled.as_text()
    counts = Counter(re.findall(r'name = "(grouped_\w+)"', text))
    return {
        "kernels": dict(sorted(counts.items())),
        "flops": walk(text, [], WITHOUT_TIME, kernel_data(cfg, kind)).flops,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


chip, what = sys.argv[1:]
cluster = read_topology(f"{chip}:1")
devices = describe_devices(cluster)
axes = axis_names() if what == "experts" else ("fsdp",)
mesh = jax.make_mesh((1,) * len(axes), axes, axis_types=(AxisType.Explicit,) * len(axes), devices=devices)
with jax.set_mesh(mesh):
    if what == "experts":
        print(json.dumps(compile_experts(mesh, cluster.kind.name)))
    else:
        print(*sorted(set(re.findall(r'name = "(attention_\w+)"', compile_attention(mesh, int(what))))))
