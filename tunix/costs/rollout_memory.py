"""Memory of a rollout on one device, and the programs that it compiles; derived, without a device or a compile."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from tunix.costs.derived import inside_bytes
from tunix.costs.rollout_sizes import (
    SMALLEST_PROMPT,
    count_slots,
    fewer_rows,
    fit_as_matrices,
    next_look,
    pad_prompt,
    spread_prompts,
)
from tunix.costs.transfers import gathered_dtype, shard_bytes, shard_shape
from tunix.sharding.mesh_shape import data_shards
from tunix.training.program import Program


@dataclass(frozen=True)
class RolloutCosts:
    """Costs of a rollout on one device."""

    rows: int  # answers that the device draws at one time, with those that only fill up
    num_bytes: dict[str, int]  # at one time, beside the training state, by what it is
    num_programs: int  # of the model; a run compiles at most so many, each when it is first needed

    @property
    def memory(self) -> int:
        return sum(self.num_bytes.values())


def rollout_costs(
    program: Program,
    mesh: Mesh | AbstractMesh,
    num_prompts: int,
    answers_per_prompt: int,
    longest_prompt: int,
    max_new_tokens: int,
    device_bytes: int | None = None,
) -> RolloutCosts:
    """Return the costs of answers to `num_prompts` prompts that are drawn at one time.

    Prompts have at most `longest_prompt` tokens. `device_bytes` is the memory of a device, if it is known: it decides
    in which form quantized weights are used.
    """
    shards = data_shards(mesh.shape)
    count, copies = spread_prompts(num_prompts, answers_per_prompt, shards)
    prompts, rows = count * copies // shards, count * answers_per_prompt // shards
    length = pad_prompt(longest_prompt)
    caches = [_cache_bytes(program, mesh, slots) * rows for slots in _cache_slots(length, max_new_tokens)]
    vocabulary = program.cfg.model.vocab_size
    own_words = shard_shape((vocabulary,), program.layout.activation("V"), mesh)[0]
    parts = {
        "gathered weights": _weight_bytes(program, mesh, device_bytes),
        # While a cache grows, the old one is still there.
        "cache": max(old + new for old, new in zip([0, *caches], caches, strict=False)),
        # float32: the device's part of the vocabulary, and the whole rows that it draws from, with their exponentials.
        "logits": 4 * rows * (own_words + 2 * vocabulary),
        "prompts": prompts * inside_bytes(program.cfg, program.layout, mesh, length),
    }
    return RolloutCosts(rows, parts, _count_programs(rows, length, max_new_tokens))


def _weight_bytes(program: Program, mesh: Mesh | AbstractMesh, device_bytes: int | None) -> int:
    """Bytes of all weights gathered; of a quantized one those of its matrix, if all matrices fit."""
    layout, codes, matrices = program.layout, 0, 0
    for weight in jax.tree.leaves(program.arch.weights):
        spec = layout.in_use(weight.equation)
        size = shard_bytes(weight, spec, gathered_dtype(weight, layout), mesh)
        codes += size
        if weight.equation.is_quantized and not weight.equation.is_scales:
            size = shard_bytes(weight, spec, layout.compute, mesh) * weight.size // math.prod(weight.shape)
        matrices += size
    return matrices if fit_as_matrices(matrices, device_bytes) else codes


def _cache_bytes(program: Program, mesh: Mesh | AbstractMesh, num_slots: int) -> int:
    """Bytes of keys and values of one row; a local layer has as many slots as its window."""
    model, layout = program.cfg.model, program.layout
    heads = shard_shape((model.num_kv_heads,), layout.activation("K"), mesh)[0]
    return 2 * sum(model.windows(num_slots)) * heads * model.head_dim * jnp.dtype(layout.compute).itemsize


def _cache_slots(length: int, max_new_tokens: int) -> list[int]:
    """Slots of the caches, one after the other, of prompts padded to `length`."""
    number, slots = 1, []
    while number < max_new_tokens:
        number = next_look(number, max_new_tokens)
        slots.append(count_slots(length + number, length + max_new_tokens))
    return sorted(set(slots)) or [count_slots(length + 1, length + max_new_tokens)]


def _count_programs(rows: int, length: int, max_new_tokens: int) -> int:
    """Count the programs of prompts of all lengths up to `length`, and of loops with all rows down to the fewest."""
    lengths = [SMALLEST_PROMPT << n for n in range((length // SMALLEST_PROMPT).bit_length())]
    sizes = {fewer_rows(rows, rows >> halvings) for halvings in range(rows.bit_length())}
    slots = {slots for each in lengths for slots in _cache_slots(each, max_new_tokens)}
    return 1 + len(lengths) + len(sizes) * len(slots)
