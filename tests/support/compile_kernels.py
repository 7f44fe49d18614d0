"""Compile kernels for a chip that is not there: compile_kernels.py CHIP WHAT.

WHAT is HEAD_DIM, HEAD_DIM-capped, HEAD_DIM-images, experts-MODEL-PRODUCTS, rows, ulysses or ring. Prints the names of the attention kernels. Of a layer of experts, also on four devices that exchange rows, and of attention
on two devices that share a sequence, it prints what the program has, as JSON.
"""

import json
import re
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh

from tunix.config.compose import compose
from tunix.costs.compiled_time import Speeds, predict_time
from tunix.costs.devices import read_topology
from tunix.costs.hlo import read_collectives
from tunix.models.attention import Method, compute_attention
from tunix.models.attention_mask import row_mask_rule
from tunix.models.experts import Experts
from tunix.models.flash_attention import flash
from tunix.models.kernels import EXPERT_BLOCKS
from tunix.models.layers import Initializer
from tunix.models.table import CP_EXCHANGES, FUSED
from tunix.plan.compile import derive_kernel_data, describe_devices
from tunix.sharding.table import axis_names
from tunix.training.choices import build_layout

SPLIT = jax.P("fsdp")
HOPPER = ("H100", "H200")
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
WITHOUT_TIME = Speeds(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, lambda _: 0.0)


def compile_attention(mesh: Mesh, dim: int, options: dict[str, Any]) -> str:
    """Return the program of attention and its gradients, as text; `options` are those of the kernel."""

    def gradients(q, k, v, segments, window):
        @jax.shard_map(in_specs=(SPLIT,) * 4 + (jax.P(),), out_specs=SPLIT)
        def on_each_device(q, k, v, segments, window):
            ends = segments if "future_keys" in options else None  # any numbers: nothing runs
            out, pull_back = jax.vjp(
                lambda *qkv: flash(*qkv, row_mask_rule(segments, window, ends), **options), q, k, v
            )
            return pull_back(out)

        return on_each_device(q, k, v, segments, window)

    def shape(*dims: int, dtype=jnp.bfloat16, spec=SPLIT) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, spec))

    queries, keys = shape(1, 512, 4, dim), shape(1, 512, 2, dim)
    numbers = shape(1, 512, dtype=jnp.int32), shape(dtype=jnp.int32, spec=jax.P())
    return jax.jit(gradients).lower(queries, keys, keys, *numbers).compile().as_text()


def compile_experts(mesh: Mesh, kind: str, model: str, products: str, num_tokens: int = 4096) -> dict[str, Any]:
    """Return what the program of a layer of a model with its gradients has, and what its definition says.

    XLA refuses a kernel that spills registers into memory. One is allowed to: on Hopper the fastest block for the
    gradient of a SiLU spills, so the other kernels are compiled beside a block that does not.
    """
    words = [f"model={model}", "model.mesh_shape=[[1],[fsdp]]", "training.param_dtype=bfloat16"]
    cfg = compose([*words, f"model.expert_products={products}"]).config
    layout = build_layout(cfg, mesh)
    layer, state = nnx.split(nnx.eval_shape(lambda: Experts(cfg.model, layout, Initializer(None))))
    shaped = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, jax.P())), state
    )
    spec = layout.activation("BtD")
    shape = (1, num_tokens, cfg.model.embed_dim)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))

    def gradients(state, x):
        out, pull_back = jax.vjp(lambda state, x: nnx.merge(layer, state)(x, None)[0], state, x)
        return pull_back(out)

    def compile_layer(options: dict[str, Any]) -> jax.stages.Compiled:
        return jax.jit(lambda *arrays: gradients(*arrays)).lower(shaped, x).compile(options)

    chip = next((chip for chip in HOPPER if chip in kind), None)
    if chip and products == FUSED and cfg.model.mlp.activation == "silu":
        in_use = EXPERT_BLOCKS[chip]
        EXPERT_BLOCKS[chip] = in_use._replace(d_hidden=EXPERT_BLOCKS["B200"].d_hidden)
        compile_layer(NO_SPILLS)
        EXPERT_BLOCKS[chip] = in_use
        compiled = compile_layer({})
    else:
        compiled = compile_layer(NO_SPILLS)
    text = compiled.as_text()
    counts = Counter(re.findall(r'name = "((?:grouped|experts)_\w+)"', text))
    return {
        "kernels": dict(sorted(counts.items())),
        "flops": predict_time(text, [], WITHOUT_TIME, derive_kernel_data(cfg, kind, dict(mesh.shape))).flops,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def compile_exchange(mesh: Mesh, exchange: str) -> dict[str, list[str]]:
    """Return kernels and collectives of attention and its gradients, of a sequence that two devices share."""
    cfg = compose(["model=qwen3_0_6b", "model.mesh_shape=[[2],[cp]]", f"model.cp_exchange={exchange}"]).config
    layout = build_layout(cfg, mesh)

    def gradients(q, k, v, segments):
        def attended(q, k, v):
            return compute_attention(q, k, v, row_mask_rule(segments, 300), layout, Method("flash", exchange, {}))

        out, pull_back = jax.vjp(attended, q, k, v)
        return pull_back(out)

    def shape(dim_names: str, *dims: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, layout.activation(dim_names)))

    queries, keys = shape("BTNH", 1, 1024, 4, 128), shape("BTKH", 1, 1024, 2, 128)
    segments = shape("BS", 1, 1024, dtype=jnp.int32)
    text = jax.jit(gradients).lower(queries, keys, keys, segments).compile().as_text()
    return {
        "kernels": sorted(set(re.findall(r'name = "(attention_\w+)"', text))),
        "collectives": sorted({each.kind for each in read_collectives(text)}),
    }


chip, label = sys.argv[1:]
cluster = read_topology(f"{chip}:{2 if label in CP_EXCHANGES else 1}")
devices = describe_devices(cluster)
dim, _, kind = label.partition("-")
axes = ("fsdp",) if dim.isdigit() else axis_names()
sizes = [len(devices) if axis == ("fsdp" if dim.isdigit() else "cp") else 1 for axis in axes]
mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Explicit,) * len(axes), devices=devices)
with jax.set_mesh(mesh):
    if label.startswith("experts"):
        print(json.dumps(compile_experts(mesh, cluster.kind.name, *label.split("-")[1:])))
    elif label in CP_EXCHANGES:
        print(json.dumps(compile_exchange(mesh, label)))
    else:
        options = {"": {}, "capped": {"cap": 30.0, "with_sums": True}, "images": {"future_keys": 255}}[kind]
        text = compile_attention(mesh, int(dim), options)
        print(*sorted(set(re.findall(r'name = "(attention_\w+)"', text))))
