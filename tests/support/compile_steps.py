"""Compile a small step for H100s that are not there, once for each name in `WAYS`: `python compile_steps.py NAME ...`.

Prints a line of JSON for each name: the bytes of its arguments and temporaries, the bytes that the update reads and
writes, the number of parameters, what lies in the host's memory or is copied there, what layers do to the sums of
their gradients, in how many products XLA adds to a sum, how many sums depend on the order of threads, how many values of one layer are copied into an array of
all layers, how many are cut out of one in the loop over microbatches, and the share of sums over devices that begin
behind the backward pass of all layers.
"""

import json
import math
import re
import sys

import jax
import numpy as np

from tunix.config.compose import compose
from tunix.costs.devices import read_topology
from tunix.costs.hlo import (
    ARRAY,
    FREE,
    Instruction,
    count_array_bytes,
    count_fusion,
    count_unfused,
    parse_instructions,
    read_collectives,
    read_computations,
)
from tunix.plan.compile import compile_for, describe_devices
from tunix.training.choices import build_mesh
from tunix.training.train_spec import assemble

WORDS = [
    "plan.topology=h100:1",
    "model=tiny", "model.embed_dim=512", "model.mlp_dim=1024", "model.num_layers=2", "model.num_heads=4",
    "model.num_kv_heads=1", "model.head_dim=128", "model.vocab_size=2048", "tokenizer.vocab_size=2048",
    "model.context_length=512",
    "model.sliding_window=256", "model.mesh_shape=[[1],[fsdp]]", "training.seq_len=512", "training.micro_batch_size=4",
    "training.mixed_precision=bf16", "training.remat=dots",
]  # fmt: skip
ON_8_DEVICES = ["plan.topology=h100:8", "model.mesh_shape=[[8],[fsdp]]"]
ACCUMULATED = "training.gradient_accumulation_steps=4"
BY_ZERO_1 = [ACCUMULATED, "training.sharding_strategy=shard_optimizer"]
WAYS = {
    **{name: [f"training.offload={name}"] for name in ("none", "optimizer", "activations")},
    "unrolled": ["training.unroll_layers=true"],
    "unrolled on 8 devices": [*ON_8_DEVICES, "model.num_layers=8", "training.unroll_layers=true"],
    "near the limit of its memory": ["plan.memory_share=0.002"],
    "accumulated": [ACCUMULATED],
    "accumulated, unrolled": [*BY_ZERO_1, "training.unroll_layers=true"],
    "accumulated, unrolled on 8 devices": [  # XLA splits the sum of a small product
        *ON_8_DEVICES, *BY_ZERO_1, "training.unroll_layers=true", "model.embed_dim=2048", "model.mlp_dim=16384",
        "model.num_heads=32", "model.num_kv_heads=16",
    ],
    "accumulated by ZeRO 1": BY_ZERO_1,
}  # fmt: skip
CUT_OUT = r'= bf16\[1,[\d,]+\]\S* slice\(.*op_name="[^"]*/while/body/[^"]*blocks\)+/slice"'  # a layer's weight
# A sum of floats for places of which one may come twice: on a GPU, threads add in any order.
UNORDERED = r"= (?:bf16|f16|f32)\[.* scatter\((?!.*unique_indices=true)"
ON_HOST = "S(5)"  # how XLA writes the host's pinned memory in a type


def update_bytes(program: dict[str, list[Instruction]]) -> int:
    """Return what the instructions of the update read and write, without the norm of the gradients, which is a sum."""
    scope, moved = {each.name: each for each in program["ENTRY"]}, 0
    for instruction in scope.values():
        index = re.search(r'op_name="[^"]*/optimizer/([^"]*)"', instruction.text)
        if index and index[1] != "reduce_sum" and instruction.opcode not in FREE:
            is_fusion = instruction.opcode == "fusion"
            work = count_fusion(instruction.called, program) if is_fusion else count_unfused(instruction, scope)
            moved += round(work.device_bytes + work.host_bytes)
    return moved


def moments_on_host(program: dict[str, list[Instruction]]) -> dict[str, int]:
    """Return the bytes of the arguments that lie in the host's memory, and of what copies write there."""
    held = sum(each.num_bytes for each in program["ENTRY"] if each.opcode == "parameter" and ON_HOST in each.type)
    copied = 0
    for instruction in (each for lines in program.values() for each in lines if each.opcode == "copy-start"):
        target = instruction.type.split("}")[0]  # of (target, source, context)
        if ON_HOST in target:
            copied += sum(count_array_bytes(*array) for array in ARRAY.findall(target))
    return {"rests_on_host": held, "copied_to_host": copied}


def updates_of_sums(program: dict[str, list[Instruction]], shapes: set[tuple[int, ...]]) -> dict[str, list[str]]:
    """Return what the backward scan writes into arrays of these shapes, those of stacked matrices [L, ...].

    By dtype: "in place" for a kernel that reads and writes one layer of the array, and "written" for any other one.
    """
    found: dict[str, list[str]] = {}
    for name, lines in program.items():
        for each in (each for each in lines if name != "ENTRY" and each.opcode == "fusion"):
            arrays = [(dtype, tuple(map(int, dims.split(",")))) for dtype, dims in ARRAY.findall(each.type) if dims]
            backward = re.search(r'op_name="[^"]*transpose\(jvp\(blocks\)\)[^"]*dynamic_update_slice', each.text)
            if backward and arrays[0][1] in shapes:
                *inside, root = program[each.called]
                reads = [other for other in inside if other.opcode == "dynamic-slice"]
                in_place = any(other.operands[0] == root.operands[0] for other in reads)
                found.setdefault(arrays[0][0], []).append("in place" if in_place else "written")
    return found


def count_adding_products(program: dict[str, list[Instruction]], sizes: set[int]) -> int:
    """Return how many products in loops add to a float32 sum of so many numbers."""
    fusions = [each for name, lines in program.items() if name != "ENTRY" for each in lines if each.opcode == "fusion"]
    sums = [each for each in fusions if each.type.startswith("f32") and math.prod(each.dims) in sizes]
    return sum({"dot", "add"} <= {other.opcode for other in program[each.called]} for each in sums)


def share_behind_layers(program: dict[str, list[Instruction]], hlo: str) -> float:
    """Return the share of the bytes of all reduce-scatters in those that begin behind the last kernel of attention."""
    num_bytes = {each.name: each.num_bytes for each in read_collectives(hlo) if each.kind == "reduce-scatter"}
    (lines,) = (lines for lines in program.values() if any(each.kernel.startswith("attention_d") for each in lines))
    last = max(place for place, each in enumerate(lines) if each.kernel.startswith("attention_d"))
    return sum(num_bytes.get(each.name, 0) for each in lines[last:]) / sum(num_bytes.values())


def main() -> None:
    for name in sys.argv[1:]:
        cfg = compose([*WORDS, *WAYS[name]]).config
        cluster = read_topology(cfg.plan.topology, cfg.plan.network)
        devices = describe_devices(cluster, cfg.plan.memory_share)
        compiled, hlo = compile_for(cfg, cluster, devices, timed=False)
        mesh = build_mesh(cfg, devices)
        with jax.set_mesh(mesh):
            params = assemble(cfg, mesh).abstract["params"]
        shapes, blocks = jax.tree.leaves(params), jax.tree.leaves(params["blocks"])
        program = {name: parse_instructions(lines) for name, lines in read_computations(hlo).items()}
        answer = {
            "arguments": compiled.argument_bytes,
            "temporary": compiled.temporary_bytes,
            "parameters": sum(int(np.prod(leaf.shape)) for leaf in shapes),
            "update": update_bytes(program),
            "host_arrays": sorted(
                {
                    dtype + dims
                    for lines in program.values()
                    for each in lines
                    for dtype, dims in re.findall(r"(\w+)(\[[\d,]*\])\{[^}]*S\(5\)", each.type)
                }
            ),
            **moments_on_host(program),
            "matrices": sum(leaf.ndim > 2 for leaf in blocks),
            "recomputed": hlo.count(".remat"),
            "unordered": len(re.findall(UNORDERED, hlo)),
            "copied_into_stacks": len(re.findall(r'op_name="[^"]*blocks[^"]*dynamic_update_slice"', hlo)),
            "cut_out_in_loop": len(re.findall(CUT_OUT, hlo)),
            "share_behind_layers": share_behind_layers(program, hlo) if name == "unrolled on 8 devices" else 0,
            "in_products": count_adding_products(program, {leaf.size // len(leaf) for leaf in blocks if leaf.ndim > 2}),
            "sums": updates_of_sums(program, {leaf.shape for leaf in blocks if leaf.ndim > 2}),
        }
        print(json.dumps({name: answer}), flush=True)


if __name__ == "__main__":
    main()
