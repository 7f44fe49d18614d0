"""Memory and time of a rollout on one device, and the programs that it compiles; derived, without a device."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from tunix.config import Config, DeviceKind
from tunix.config.task import Grpo
from tunix.costs.communication import count_shard_bytes, find_gathered_dtype, find_shard_shape
from tunix.costs.memory import estimate_inside_bytes
from tunix.models.flops import forward_flops_per_token
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.mesh import whole_sequences
from tunix.sharding.mesh_shape import data_shards
from tunix.training.program import Program

# Sizes of a rollout: how its arrays are padded, and from this its compiled programs and its memory.
#
# A rollout draws answers to many prompts at once. Shapes are rounded up, so that few programs serve all of them:
#
#     prompts     padded on the left to a power of two
#     rows        rounded up to 1, 2, 3, 4, 6, 8, 12, 16, ... prompts, times the answers to each
#     slots       of the cache: a power of two, at most twice what is filled; it grows while the answers grow
#     stretches   the host looks at the answers after 8, 16, 32, 64, 128, 192, ... tokens, and lets ended rows go

SMALLEST_PROMPT = 16  # tokens that a prompt is padded to, and more by powers of two
SMALLEST_CACHE = 128  # slots; below it, weights are nearly all that is read for a token
CHUNK = 64  # tokens between two looks at the answers
FIRST_CHUNK = 8
MATRIX_SHARE = 0.25  # of a device's memory: quantized weights that take more of it as matrices stay codes
FEWEST_ROWS = 8  # of a data shard, that are not halved again: reading the weights is most of the time


def pad_prompt(num_tokens: int) -> int:
    """Return the tokens that prompts of at most `num_tokens` are padded to."""
    return max(SMALLEST_PROMPT, 1 << (num_tokens - 1).bit_length())


def pad_prompts(num_prompts: int) -> int:
    """Return the number that so many prompts are filled up to: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << (num_prompts - 1).bit_length()
    return power * 3 // 4 if power >= 4 and num_prompts <= power * 3 // 4 else power


def count_prompts_at_once(rows_at_once: int | None, answers_per_prompt: int) -> int | None:
    """Return the prompts that are answered at one time, where so many answers are drawn; None for all."""
    return None if rows_at_once is None else max(1, rows_at_once // answers_per_prompt)


def spread_prompts(num_prompts: int, answers_per_prompt: int, num_shards: int) -> tuple[int, int]:
    """Return the number that so many prompts are filled up to, and how often each is computed.

    The data shards divide the product of both. Each prompt is computed once where the shards divide the prompts. Fewer
    prompts than shards are computed several times, and the answers to one are spread over several shards: with 8 shards
    and 8 answers to a prompt, 32 prompts are computed once, and each of 3 prompts 8 times, once for each answer.
    """
    count, best = pad_prompts(num_prompts), []
    for repeats in range(1, answers_per_prompt + 1):
        if answers_per_prompt % repeats == 0:
            multiple = num_shards // math.gcd(num_shards, repeats)
            best.append((-(-count // multiple) * multiple, repeats))
    return min(best)


def count_slots(num_times: int, last: int) -> int:
    """Return the slots of the cache for `num_times` times of rows that end at `last` times at the latest."""
    return min(last, max(SMALLEST_CACHE, 1 << (num_times - 1).bit_length()))


def find_next_look(number: int, last: int) -> int:
    """Return the number of tokens after which the host looks next, when it has `number` of at most `last`.

    It looks after 8, 16, 32, 64 tokens, and from then on after every 64.
    """
    if number < CHUNK:
        return min(last, max(FIRST_CHUNK, 1 << number.bit_length()))
    return min(last, (number // CHUNK + 1) * CHUNK)


def select_fewer_rows(rows: int, going_on: int) -> int:
    """Return the rows of a data shard to go on with, of which `going_on` have no end yet: a half, a quarter, ..."""
    while rows % 2 == 0 and rows // 2 >= max(FEWEST_ROWS, going_on):
        rows //= 2
    return rows


def fit_as_matrices(num_bytes: int, device_bytes: int | None) -> bool:
    """Return whether quantized weights, `num_bytes` as matrices, are made matrices once and not at each use.

    `device_bytes` is the memory of a device; None, as of a CPU, sets no limit.
    """
    return device_bytes is None or num_bytes <= MATRIX_SHARE * device_bytes


USABLE = 0.9  # share of a device's memory: the rest is for what is not derived


@dataclass(frozen=True)
class RolloutCosts:
    """Costs of a rollout on one device."""

    rows: int  # answers that the device draws at one time, with those that only fill up
    num_bytes: dict[str, int]  # at one time, beside the training state, by what it is
    num_programs: int  # of the model; a run compiles at most so many, each when it is first needed
    bytes_read: int  # for the tokens of these rows: weights, cache and logits once for each token
    flops: float  # for the prompts and the tokens of these rows

    @property
    def memory(self) -> int:
        return sum(self.num_bytes.values())

    def predict_seconds(self, kind: DeviceKind) -> float:
        """Return the time of these rows, all of them as long as they may be, where memory or products are the limit."""
        return max(
            self.bytes_read / (kind.hbm_gb_per_s * 1e9), self.flops / (kind.peak_tflops * 1e12 * kind.efficiency)
        )


@dataclass(frozen=True)
class RolloutPlan:
    """A rollout of a run: its prompts, the steps that it serves, and its costs."""

    num_prompts: int
    max_prompt_length: int
    steps: int  # from one rollout to the next
    num_batches: int  # in which its prompts are answered, one after the other
    costs: RolloutCosts  # of a wave
    reference_bytes: int  # of the model of step 0, which is beside the training state in steps too


def plan_rollout(program: Program, device_bytes: int | None) -> RolloutPlan:
    """Return the rollout of a run with task=grpo; see `derive_rollout_costs`."""
    task = program.cfg.task
    assert isinstance(task, Grpo)
    cycle = task.cycle(program.batch.num_sequences)
    rows = select_rows(program, device_bytes)
    at_once = min(cycle.samples, count_prompts_at_once(rows, task.group_size) or cycle.samples)
    costs = _derive_batch_costs(program, at_once, device_bytes)
    num_batches = math.ceil(cycle.samples / at_once)
    max_prompt_length = _find_max_prompt_length(program.cfg)
    return RolloutPlan(
        cycle.samples, max_prompt_length, cycle.steps, num_batches, costs, count_reference_bytes(program)
    )


def count_reference_bytes(program: Program) -> int:
    """Return the bytes of one device for the reference of task.kl_coefficient; 0 where no second model is kept."""
    task = program.cfg.task
    if not (isinstance(task, Grpo) and task.kl_coefficient) or program.cfg.model.keeps_base:
        return 0
    return bytes_per_device(describe_reference(program))


def describe_reference(program: Program) -> Any:
    """Return shapes, dtypes and shardings of a reference: those of parameters in the dtype of products.

    Codes of quantized weights stay codes.
    """

    def shape(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = program.layout.compute if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    return jax.tree.map(shape, program.abstract["params"])


def read_device_bytes() -> int | None:
    """Return the memory of this process's first device; None where the backend does not count, as on CPUs."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def select_rows(program: Program, device_bytes: int | None) -> int | None:
    """Return the answers of a run with task=grpo that are drawn at one time, over the whole mesh; None for all.

    task.rollout_rows=auto takes all prompts of a rollout, or a half, a quarter, ... of them, so that their answers fit
    into `device_bytes` beside the training state and the reference. The answers to one prompt are the least.
    """
    task = program.cfg.task
    assert isinstance(task, Grpo)
    if task.rollout_rows != "auto":
        return task.rollout_rows
    if device_bytes is None:
        return None
    free = USABLE * device_bytes - bytes_per_device(program.abstract) - count_reference_bytes(program)
    count = task.cycle(program.batch.num_sequences).samples
    # Halves, so that few sizes are tried. The answers to one prompt stay together: its keys are computed once.
    while count > 1 and _derive_batch_costs(program, count, device_bytes).memory > free:
        count = math.ceil(count / 2)
    return count * task.group_size


def _find_max_prompt_length(cfg: Config) -> int:
    return cfg.training.seq_len - cfg.sampling.max_new_tokens


def _derive_batch_costs(program: Program, num_prompts: int, device_bytes: int | None) -> RolloutCosts:
    """Return the costs of the answers to so many prompts of a run, drawn at one time."""
    cfg = program.cfg
    assert isinstance(cfg.task, Grpo)
    arguments = num_prompts, cfg.task.group_size, _find_max_prompt_length(cfg), cfg.sampling.max_new_tokens
    return derive_rollout_costs(program, *arguments, device_bytes)


def derive_rollout_costs(
    program: Program,
    num_prompts: int,
    answers_per_prompt: int,
    max_prompt_length: int,
    max_new_tokens: int,
    device_bytes: int | None = None,
) -> RolloutCosts:
    """Return the costs of answers to `num_prompts` prompts that are drawn at one time.

    Prompts have at most `max_prompt_length` tokens. `device_bytes` is the memory of a device, if it is known: it
    decides in which form quantized weights are used.
    """
    mesh, layout = whole_sequences(program.mesh), program.layout.for_generation()
    shards = data_shards(mesh.shape)
    count, repeats = spread_prompts(num_prompts, answers_per_prompt, shards)
    prompts, rows = count * repeats // shards, count * answers_per_prompt // shards
    length = pad_prompt(max_prompt_length)
    chunks = _list_chunks(length, max_new_tokens)
    # A stretch reads the cache of its length: it is larger for later tokens.
    caches = [_count_cache_bytes(program, mesh, slots) * rows for _, slots in chunks]
    sizes = sorted(set(caches))
    vocab = program.cfg.model.vocab_size
    local_vocab = find_shard_shape((vocab,), layout.activation("V"), mesh)[0]
    parts = {
        "gathered weights": _count_weight_bytes(program, mesh, device_bytes),
        "cache": sizes[-1],
        # While a cache grows, or is cut to half of its rows, the old one and the new one are there.
        "other cache": max([*sizes[-2:-1], sizes[-1] // 2 if select_fewer_rows(rows, 0) < rows else 0]),
        # float32: the device's part of the vocabulary, and the whole rows that it draws from, with their exponentials.
        "logits": 4 * rows * (local_vocab + 2 * vocab),
        "prompts": prompts * estimate_inside_bytes(program.cfg, layout, mesh, length),
    }
    every_token = parts["gathered weights"] + parts["logits"]
    # Each token reads all weights, and the cache as long as it is in its stretch.
    bytes_read = sum(count * (every_token + cache) for (count, _), cache in zip(chunks, caches, strict=True))
    tokens = prompts * length + rows * max_new_tokens
    model = program.cfg.model
    flops = forward_flops_per_token(model, program.arch.num_active, length + max_new_tokens) * tokens
    num_programs = _count_programs(rows, length, max_new_tokens)
    return RolloutCosts(rows, parts, num_programs, bytes_read, flops * shards / mesh.size)


def _count_weight_bytes(program: Program, mesh: Mesh | AbstractMesh, device_bytes: int | None) -> int:
    """Return the bytes of all weights gathered; of a quantized one those of its matrix, if all matrices fit."""
    layout, quantized, matrices = program.layout.for_generation(), 0, 0
    for weight in jax.tree.leaves(program.arch.weights):
        spec = layout.in_use(weight.equation)
        size = count_shard_bytes(weight, spec, find_gathered_dtype(weight, layout), mesh)
        quantized += size
        if weight.equation.is_quantized and not weight.equation.is_scales:
            size = count_shard_bytes(weight, spec, layout.compute, mesh) * weight.size // math.prod(weight.shape)
        matrices += size
    return matrices if fit_as_matrices(matrices, device_bytes) else quantized


def _count_cache_bytes(program: Program, mesh: Mesh | AbstractMesh, num_slots: int) -> int:
    """Return the bytes of keys and values of one row, or of their latents.

    A local layer has as many slots as its window. A layer of linear attention has a memory of fixed size.
    """
    model, layout = program.cfg.model, program.layout
    windows, num_bytes = model.list_windows(num_slots), 0
    for heads, layers in model.head_kinds.items():
        local_heads = find_shard_shape((heads.num_kv_heads,), layout.activation(heads.dim_names[0]), mesh)[0]
        numbers = 2 * local_heads * heads.dim if model.latent is None else model.latent.dim + model.num_rotated
        num_bytes += (
            sum(windows[layer] for layer in layers if not model.is_shared(layer))
            * numbers
            * jnp.dtype(layout.compute).itemsize
        )
    num_linear = sum(model.is_linear(layer) for layer in range(model.num_layers))
    return num_bytes + num_linear * _count_memory_bytes(program, mesh) if num_linear else num_bytes


def _count_memory_bytes(program: Program, mesh: Mesh | AbstractMesh) -> int:
    """Return the bytes that linear attention keeps of one row: the delta rule's memory, and inputs of the filters."""
    model, layout = program.cfg.model, program.layout
    dims = model.dims

    def size(dim_names: str) -> int:
        return math.prod(
            find_shard_shape([dims[dim_name] for dim_name in dim_names], layout.activation(dim_names), mesh)
        )

    inputs = (dims["Z"] - 1) * (2 * size("IE") + size("JM"))
    return 4 * size("JEM") + inputs * jnp.dtype(layout.compute).itemsize


def _list_chunks(length: int, max_new_tokens: int) -> list[tuple[int, int]]:
    """Return (tokens, slots of the cache) of each stretch of answers to prompts padded to `length`."""
    number, last, chunks = 1, length + max_new_tokens, []
    while number < max_new_tokens:
        end = find_next_look(number, max_new_tokens)
        chunks.append((end - number, count_slots(length + end, last)))
        number = end
    return chunks or [(1, count_slots(length + 1, last))]


def _count_programs(rows: int, length: int, max_new_tokens: int) -> int:
    """Count the programs of prompts of all lengths up to `length`, and of loops with all rows down to the fewest."""
    lengths = [SMALLEST_PROMPT << n for n in range((length // SMALLEST_PROMPT).bit_length())]
    sizes = {select_fewer_rows(rows, rows >> halvings) for halvings in range(rows.bit_length())}
    slots = {slots for each in lengths for _, slots in _list_chunks(each, max_new_tokens)}
    return 1 + len(lengths) + len(sizes) * len(slots)
