"""Memory and time of a rollout on one device, and the programs that it compiles; derived, without a device."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.config import Config, DeviceKind
from tunix.config.task import Grpo
from tunix.costs.communication import (
    Transfer,
    count_local_numbers,
    count_shard_bytes,
    find_gathered_dtype,
    find_shard_shape,
    predict_seconds,
)
from tunix.costs.devices import Cluster, Group, predict_collective_s
from tunix.costs.memory import count_teacher_bytes, estimate_inside_bytes
from tunix.models.flops import forward_flops_per_token
from tunix.models.kernels import select_cache
from tunix.sharding.arrays import AnyMesh, bytes_per_device
from tunix.sharding.mesh import data_shards, whole_sequences
from tunix.sharding.table import keeping_axes
from tunix.training.choices import select_rollout_sizes
from tunix.training.state import Architecture, abstract_params
from tunix.training.train_spec import TrainSpec

# Sizes of a rollout: how its arrays are padded, and from this its compiled programs and its memory.
#
# Shapes are rounded up, so that few programs serve all rollouts (inference/engine.py):
#
#     prompts     padded to a power of two, and 1, 2, 4, 8, ... of them computed at one time
#     rows        of a data shard: 1, 2, 3, 4, 6, 8, 12, 16, ...; halved at the end of a rollout, when half are enough
#     slots       of the cache: a power of two, at most twice what the longest row fills, or those of the longest row
#                 that may be; it grows while rows grow
#     pages       in the place of slots (sampling.cache=pages): the table of a row has room for as many tokens as slots
#     tokens      drawn as one loop on the devices, between two looks of the host

MIN_PROMPT = 16  # tokens that a prompt is padded to, and more by powers of two
PREFILL_TOKENS = 16384  # of prompts that a data shard computes at one time; a longer prompt is computed alone
MIN_CACHE = 128  # slots; below it, weights are nearly all that is read for a token
PAGE = 16  # tokens of a page; a row has 8 too many in the mean
CHUNK = 64  # tokens of a row that are drawn between two looks of the host, at most
MATRIX_SHARE = 0.25  # of a device's memory: quantized weights that take more of it as matrices stay codes
# Rows of a data shard that are not halved again: reading the weights is most of the time. On a GPU with pages, where a
# row that has ended reads nothing, that holds for more of them, and a program takes much longer to compile.
MIN_ROWS, MIN_PAGED_ROWS = 8, 64


def pad_prompt(num_tokens: int) -> int:
    """Return the tokens that prompts of at most `num_tokens` are padded to."""
    return max(MIN_PROMPT, pad_batch(num_tokens))


def pad_batch(count: int) -> int:
    """Return the number that so many prompts are filled up to: 1, 2, 4, 8, 16, ..."""
    return 1 << (count - 1).bit_length()


def pad_few(count: int) -> int:
    """Return the number that so many rows with observations are filled up to: 1, 4, 16, 64, ..."""
    return 1 << (pad_batch(count).bit_length() // 2 * 2)


def pad_rows(count: int) -> int:
    """Return the number that so many rows of a data shard are filled up to: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = pad_batch(count)
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def count_prefill_prompts(num_tokens: int) -> int:
    """Return how many prompts of at most `num_tokens` a data shard computes at one time."""
    return max(1, PREFILL_TOKENS // pad_prompt(num_tokens))


def count_slots(num_tokens: int, max_length: int) -> int:
    """Return the slots of the cache for rows of `num_tokens` tokens that have `max_length` tokens at the end.

    A cache that would have nearly all slots has all of them: while a cache grows, the old one is in memory too.
    """
    slots = max(MIN_CACHE, pad_batch(num_tokens))
    return max_length if slots > 3 * max_length // 4 else slots


def count_pages(num_tokens: int) -> int:
    """Return the pages of so many tokens of a row."""
    return -(-num_tokens // PAGE)


def select_fewer_rows(rows: int, going_on: int, min_rows: int = MIN_ROWS) -> int:
    """Return the rows of a data shard to go on with, of which `going_on` are needed: all, a half, a quarter, ..."""
    while rows % 2 == 0 and rows // 2 >= max(min_rows, going_on):
        rows //= 2
    return rows


def fit_as_matrices(num_bytes: int, device_bytes: int | None) -> bool:
    """Return whether quantized weights, `num_bytes` as matrices, are made matrices once and not at each use.

    `device_bytes` is the memory of a device; None, as of a CPU, sets no limit.
    """
    return device_bytes is None or num_bytes <= MATRIX_SHARE * device_bytes


USABLE = 0.9  # share of a device's memory: the rest is for what is not derived


@dataclass(frozen=True)
class CacheSpec:
    """Contents of a cache: what it holds of a token, and where."""

    dtype: str | None = None  # "int8", or None for the dtype of products
    by_mtp: bool = False  # the layer of model.mtp guesses, and has slots too
    has_pages: bool = False  # layers that see all tokens have pages, in place of slots
    num_pages: int | None = None  # of a data shard; None: as many as its rows need


@dataclass(frozen=True)
class RolloutCosts:
    """Costs of a rollout on one device."""

    rows: int  # answers that its data shard draws at one time, with those that only fill up
    num_bytes: dict[str, int]  # at one time, beside the training state, by what it is
    num_programs: int  # of the model; a run compiles at most so many, each when it is first needed
    bytes_read: float  # for all answers: weights, cache and logits once for each token of all rows
    flops: float  # for all prompts and answers

    @property
    def memory(self) -> int:
        return sum(self.num_bytes.values())

    def with_others(self, count: int) -> "RolloutCosts":
        """Return the costs where so many other rollouts have weights and caches beside this one."""
        if not count:
            return self
        held = sum(self.num_bytes[name] for name in ("gathered weights", "cache", "other cache"))
        return replace(self, num_bytes=self.num_bytes | {"other rollouts": count * held})

    def predict_seconds(self, kind: DeviceKind) -> float:
        """Return the time of all answers, each as long as it may be, where memory or products are the limit."""
        return max(
            self.bytes_read / (kind.hbm_gb_per_s * 1e9), self.flops / (kind.peak_tflops * 1e12 * kind.efficiency)
        )


@dataclass(frozen=True)
class RolloutPlan:
    """A rollout of a run: its prompts, the steps that it serves, and its costs."""

    num_prompts: int
    max_prompt_length: int
    steps: int  # from one rollout to the next
    rows_at_once: int  # answers that are drawn at one time, over the whole mesh
    num_pages: int | None  # of a data shard, if the memory bounds them; None: those of slots, or what the rows need
    at_once: int  # rollouts that have caches at one time
    costs: RolloutCosts  # of all these
    reference_bytes: int  # of the model of step 0, which is beside the training state in steps too
    copy_bytes: int  # of one device that draws: weights at rest that wait for their turn (task.staleness)
    apart: AnyMesh | None  # of task.rollout_devices; None: the mesh that learns draws
    resting_bytes: int  # of one device that draws: weights as they come from the devices that learn

    def predict_weights_s(self, cluster: Cluster) -> tuple[float, float]:
        """Return the seconds in which weights go to devices of their own, and in which these gather them.

        `cluster` has the devices that draw. Each gets its part from the devices of its node.
        """
        if self.apart is None:
            return 0.0, 0.0
        kind, sizes, gathered = cluster.kind, dict(self.apart.shape), self.costs.num_bytes["gathered weights"]
        copy_s = predict_collective_s("collective-permute", self.resting_bytes, Group(2, 2), kind, cluster.per_node)
        return copy_s, predict_seconds(Transfer("all-gather", keeping_axes(), gathered), sizes, kind, cluster.per_node)


def plan_rollout(train_spec: TrainSpec, device_bytes: int | None) -> RolloutPlan:
    """Return the rollout of a run with task=grpo; see `derive_rollout_costs`."""
    task = _read_task(train_spec)
    cycle = task.cycle(train_spec.batch.num_sequences)
    num_answers = _count_answers(train_spec)
    rows = min(num_answers, select_rows(train_spec, device_bytes) or num_answers)
    at_once = select_rollouts_at_once(train_spec, device_bytes)
    num_pages = select_pages(train_spec, rows, device_bytes)
    costs = _derive_costs_of_run(train_spec, rows, device_bytes, num_pages).with_others(at_once - 1)
    return RolloutPlan(
        cycle.samples,
        train_spec.cfg.max_prompt_length,
        cycle.steps,
        rows,
        num_pages,
        at_once,
        costs,
        count_reference_bytes(train_spec),
        count_copy_bytes(train_spec),
        None if task.rollout_devices is None else find_rollout_mesh(train_spec),
        _count_resting_bytes(train_spec),
    )


def find_rollout_mesh(train_spec: TrainSpec) -> AnyMesh:
    """Return the mesh that draws answers: that of the program, or one of task.rollout_devices, which need not exist."""
    if _read_task(train_spec).rollout_devices is None:
        return train_spec.mesh
    mesh, num_hosts = train_spec.mesh, train_spec.num_hosts
    if isinstance(mesh, Mesh):
        num_hosts = len({device.process_index for device in mesh.devices.flat})
    sizes = select_rollout_sizes(train_spec.cfg, mesh.shape, num_hosts)
    return train_spec.abstract_mesh.update(axis_sizes=tuple(sizes[axis] for axis in train_spec.mesh.axis_names))


def count_copy_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes of one device that draws for the copies of weights that wait there, as the mesh at rest has
    them."""
    task = _read_task(train_spec)
    return (task.staleness + 1) * _count_resting_bytes(train_spec) if task.staleness else 0


def _count_resting_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes of one device that draws for weights as the mesh at rest has them."""
    return bytes_per_device(abstract_params(train_spec.arch, find_rollout_mesh(train_spec)))


def count_reference_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes of one device for the reference of task.kl_coefficient; 0 where no second model is kept."""
    task = train_spec.cfg.task
    if not (isinstance(task, Grpo) and task.kl_coefficient) or train_spec.cfg.model.keeps_base:
        return 0
    return bytes_per_device(describe_reference(train_spec))


def describe_reference(train_spec: TrainSpec) -> Any:
    """Return shapes, dtypes and shardings of a reference: those of parameters in the dtype of products.

    Codes of quantized weights stay codes.
    """

    def shape(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = train_spec.layout.compute if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    return jax.tree.map(shape, train_spec.abstract["params"])


def read_device_bytes() -> int | None:
    """Return the memory of this process's first device; None where the backend does not count, as on CPUs."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def select_rows(train_spec: TrainSpec, device_bytes: int | None) -> int | None:
    """Return the answers of a run with task=grpo that are drawn at one time, over the whole mesh; None for all.

    task.rollout_rows=auto takes all answers of a rollout, or fewer, so that their rows of the cache fit into
    `device_bytes` beside the training state, the reference and the teacher. One row on each data shard is the least.
    With pages there is room for a quarter of each row: few answers are as long as they may be, and all at one time.
    """
    task = _read_task(train_spec)
    if task.rollout_rows != "auto":
        return task.rollout_rows
    if device_bytes is None:
        return None
    free = _count_free_bytes(train_spec, device_bytes)
    shards = data_shards(whole_sequences(find_rollout_mesh(train_spec)).shape)
    count = pad_rows(math.ceil(_count_answers(train_spec) / shards))

    def fits(count: int) -> bool:
        if rollout_has_pages(train_spec):
            max_pages = count_pages(_find_max_length(train_spec.cfg))
            fitting = _count_fitting_pages(train_spec, count, device_bytes, free)
            return fitting >= max(2 * max_pages, PAGE_SHARE * count * max_pages)
        return _derive_costs_of_run(train_spec, count * shards, device_bytes).memory <= free

    # The sizes of `pad_rows` are tried: 16, 12, 8, 6, 4, 2, 1.
    while count > 1 and not fits(count):
        count = pad_rows(count * 2 // 3)
    return count * shards


PAGE_SHARE = 0.25  # pages of a row, of those that it needs when it is as long as it may be


def rollout_has_pages(train_spec: TrainSpec) -> bool:
    """Return whether rollouts of a run have pages (sampling.cache).

    Raises:
        UserError: they, or those of evaluations, are to have pages, and the model cannot have them there.
    """
    cfg, device, compute = train_spec.cfg, train_spec.abstract_mesh.abstract_device, train_spec.layout.compute
    where = cfg.model, compute, device, train_spec.platform
    select_cache(cfg.evaluation.sampling.cache, *where, "evaluation.sampling.cache")
    return select_cache(cfg.sampling.cache, *where) == "pages"


def select_pages(train_spec: TrainSpec, rows: int | None, device_bytes: int | None) -> int | None:
    """Return the pages of a data shard of a run with task=grpo, for so many answers at one time over the whole mesh.

    They take the memory that is left, as far as rows can use them. None: nothing bounds them, or there are slots.
    """
    if rows is None or device_bytes is None or not rollout_has_pages(train_spec):
        return None
    if select_rollouts_at_once(train_spec, device_bytes) > 1:  # all of their rows fit with all of their tokens
        return None
    shards = data_shards(whole_sequences(find_rollout_mesh(train_spec)).shape)
    count, max_pages = pad_rows(math.ceil(rows / shards)), count_pages(_find_max_length(train_spec.cfg))
    fitting = _count_fitting_pages(train_spec, count, device_bytes, _count_free_bytes(train_spec, device_bytes))
    return max(2 * max_pages, min(fitting, (count + 1) * max_pages))


def _count_fitting_pages(train_spec: TrainSpec, rows: int, device_bytes: int, free: float) -> int:
    """Return how many pages fit into the free bytes of a device, beside the other arrays of so many rows on it."""
    mesh = whole_sequences(find_rollout_mesh(train_spec))
    others = _derive_costs_of_run(train_spec, rows * data_shards(mesh.shape), device_bytes, num_pages=0).memory
    page_bytes = count_page_bytes(train_spec.arch, mesh, _describe_cache(train_spec))
    return max(0, int((free - others) // page_bytes))


def _describe_cache(train_spec: TrainSpec, num_pages: int | None = None) -> CacheSpec:
    """Return the cache of rollouts of a run, whose data shards have so many pages if there are pages."""
    sampling = train_spec.cfg.sampling
    return CacheSpec(sampling.cache_dtype, sampling.by_mtp, rollout_has_pages(train_spec), num_pages)


def select_rollouts_at_once(train_spec: TrainSpec, device_bytes: int | None) -> int:
    """Return how many rollouts of a run with task=grpo have caches at one time.

    One, where nothing but the devices is waited for. With an environment it is all that are begun (task.staleness), or
    as many as fit with all of their rows.
    """
    task = _read_task(train_spec)
    if task.environment is None or not task.staleness:
        return 1
    max_rollouts, answers = task.staleness + 1, _count_answers(train_spec)
    if isinstance(task.rollout_rows, int):
        return min(max_rollouts, max(1, task.rollout_rows // answers))
    if device_bytes is None or task.rollout_rows is None:
        return max_rollouts
    costs = _derive_costs_of_run(train_spec, answers, device_bytes)
    free = _count_free_bytes(train_spec, device_bytes)
    return max((n for n in range(2, max_rollouts + 1) if costs.with_others(n - 1).memory <= free), default=1)


def _read_task(train_spec: TrainSpec) -> Grpo:
    """Return the task of a run that has rollouts."""
    assert isinstance(train_spec.cfg.task, Grpo)
    return train_spec.cfg.task


def _count_answers(train_spec: TrainSpec) -> int:
    """Return the answers of a rollout."""
    task = _read_task(train_spec)
    return task.cycle(train_spec.batch.num_sequences).samples * task.group_size


def _count_free_bytes(train_spec: TrainSpec, device_bytes: int) -> float:
    """Return the bytes of a device that rollouts may take, beside what rests there."""
    others = count_copy_bytes(train_spec)
    if _read_task(train_spec).rollout_devices is None:  # else nothing of learning is there
        others += bytes_per_device(train_spec.abstract)
        others += count_reference_bytes(train_spec) + count_teacher_bytes(train_spec)
    return USABLE * device_bytes - others


def _find_max_length(cfg: Config) -> int:
    """Return the tokens of a row at most: prompts are filled up."""
    return pad_prompt(cfg.max_prompt_length) + cfg.sampling.max_new_tokens


def _derive_costs_of_run(
    train_spec: TrainSpec, rows: int, device_bytes: int | None, num_pages: int | None = None
) -> RolloutCosts:
    """Return the costs of a rollout of a run, of which so many answers are drawn at one time over the whole mesh.

    `num_pages` bounds the pages of a data shard, if there are pages.
    """
    cfg, task = train_spec.cfg, _read_task(train_spec)
    prompts = task.cycle(train_spec.batch.num_sequences).samples
    sizes = rows, prompts, task.group_size, cfg.max_prompt_length, cfg.sampling.max_new_tokens
    mesh, cache = find_rollout_mesh(train_spec), _describe_cache(train_spec, num_pages)
    return derive_rollout_costs(train_spec.arch, mesh, *sizes, cache, device_bytes)


def derive_rollout_costs(
    arch: Architecture,
    mesh: AnyMesh,
    rows_at_once: int,
    num_prompts: int,
    answers_per_prompt: int,
    max_prompt_length: int,
    max_new_tokens: int,
    cache: CacheSpec = CacheSpec(),
    device_bytes: int | None = None,
) -> RolloutCosts:
    """Return the costs of answers to `num_prompts` prompts, of which `rows_at_once` are drawn at one time on `mesh`.

    Prompts have at most `max_prompt_length` tokens. `device_bytes` is the memory of a device, if it is known: it
    decides in which form quantized weights are used.
    """
    mesh, layout = whole_sequences(mesh), arch.layout.for_generation()
    shards = data_shards(mesh.shape)
    rows = pad_rows(math.ceil(rows_at_once / shards))
    answers = num_prompts * answers_per_prompt / shards  # of a data shard
    length = pad_prompt(max_prompt_length)
    max_length = length + max_new_tokens
    # Prompts are computed when rows are free for answers to them; entries of the one before may still wait for rows.
    begun = min(math.ceil(num_prompts / shards), math.ceil(rows / answers_per_prompt) + 1)
    prompts = min(count_prefill_prompts(max_prompt_length), pad_batch(begun))
    slots = _list_slots(length, max_length)
    paged = False if cache.has_pages else None
    row_bytes = [_count_cache_bytes(arch, mesh, num_slots, cache, paged) for num_slots in slots]
    page_bytes = count_page_bytes(arch, mesh, cache) if cache.has_pages else 0
    entries = _count_cache_bytes(arch, mesh, slots[0], cache)
    # Pages without a bound grow as slots do; a prompt that is to have more answers may have pages that no row has.
    spare = pad_batch(count_pages(max_prompt_length)) if answers_per_prompt > 1 else 0
    unbounded = [rows * count_pages(each) + spare for each in slots]
    growing = unbounded if cache.num_pages is None else [cache.num_pages]
    vocab = arch.model.vocab_size
    local_vocab = find_shard_shape((vocab,), layout.activation("V"), mesh)[0]
    parts = {
        "gathered weights": _count_weight_bytes(arch, mesh, device_bytes),
        "cache": rows * row_bytes[-1] + growing[-1] * page_bytes,
        # While a cache grows, or is cut to half of its rows, the old one and the new one are there.
        "other cache": max(
            rows * max([*row_bytes[-2:-1], row_bytes[-1] // 2 if select_fewer_rows(rows, 0) < rows else 0]),
            sum(growing[-2:-1]) * page_bytes,
        ),
        # float32: the device's part of the vocabulary, and the whole rows that it draws from, with their exponentials.
        "logits": 4 * max(rows, prompts) * (local_vocab + 2 * vocab),
        # Prompts at work, and the entries of the cache that they leave for the answers to them.
        "prompts": prompts * (estimate_inside_bytes(arch.model, layout, mesh, length) + entries),
    }
    every_token = parts["gathered weights"] + parts["logits"]
    # Each token reads all weights, and the cache of all rows. The cache grows while the first rows do, and stays so.
    tokens_at = [min(each, max_length) - before for before, each in zip([length, *slots], slots, strict=False)]
    first_rows = sum(count * size for count, size in zip(tokens_at, row_bytes, strict=True)) * rows
    rounds = max(1, answers / rows)  # that so many answers take, one after the other
    later_rows = (rounds - 1) * max_new_tokens * row_bytes[-1] * rows
    if cache.has_pages:  # of each row those are read that it has; as many rows are at work as have some
        mean = count_pages(length + max_new_tokens // 2)
        rounds = max(1, answers / min(rows, max(1, growing[-1] / mean)))
        later_rows += answers * max_new_tokens * mean * page_bytes
    bytes_read = rounds * max_new_tokens * every_token + first_rows + later_rows
    tokens = num_prompts / shards * length + answers * max_new_tokens
    flops = forward_flops_per_token(arch.model, arch.num_active, max_length) * tokens
    num_programs = _count_programs(rows, length, max_length)
    return RolloutCosts(rows, parts, num_programs, bytes_read, flops * shards / mesh.size)


def _count_weight_bytes(arch: Architecture, mesh: AnyMesh, device_bytes: int | None) -> int:
    """Return the bytes of all weights gathered; of a quantized one those of its matrix, if all matrices fit."""
    layout, quantized, matrices = arch.layout.for_generation(), 0, 0
    for weight in jax.tree.leaves(arch.weights):
        spec = layout.in_use(weight.equation)
        size = count_shard_bytes(weight, spec, find_gathered_dtype(weight, layout), mesh)
        quantized += size
        if weight.equation.is_quantized and not weight.equation.is_scales:
            size = count_shard_bytes(weight, spec, layout.compute, mesh) * weight.size // math.prod(weight.shape)
        matrices += size
    return matrices if fit_as_matrices(matrices, device_bytes) else quantized


def count_page_bytes(arch: Architecture, mesh: AnyMesh, cache: CacheSpec) -> int:
    """Return the bytes of one device for a page, in all layers that have pages."""
    return _count_cache_bytes(arch, mesh, PAGE, cache, paged=True)


def _count_cache_bytes(
    arch: Architecture, mesh: AnyMesh, num_slots: int, cache: CacheSpec, paged: bool | None = None
) -> int:
    """Return the bytes of keys and values of one row, or of their latents; of 8 bits, with their scales.

    A local layer has as many slots as its window. A layer of linear attention has a memory of fixed size. The layer of
    model.mtp has slots where it guesses, and the state that it takes next. `paged` True counts only the layers that may
    have pages, and False the others.
    """
    model, layout, by_mtp = arch.model, arch.layout, cache.by_mtp and not paged
    compute = jnp.dtype(layout.compute).itemsize
    item, scale = (1, 4) if cache.dtype == "int8" else (compute, 0)
    num_bytes = model.embed_dim * compute if by_mtp else 0
    for each in (model, model.mtp_model) if by_mtp else (model,):
        windows = each.list_windows(num_slots)
        for heads, layers in each.head_kinds.items():
            local_heads = find_shard_shape((heads.num_kv_heads,), layout.activation(heads.dim_names[0]), mesh)[0]
            vectors = [heads.dim] * (2 * local_heads) if each.latent is None else [each.latent.dim, each.num_rotated]
            counted = [layer for layer in layers if not each.is_shared(layer)]
            if paged is not None:
                counted = [layer for layer in counted if (each is model and model.is_paged(layer)) == paged]
            num_bytes += sum(windows[layer] for layer in counted) * sum(size * item + scale for size in vectors)
    num_linear = 0 if paged else model.num_linear_layers
    return num_bytes + num_linear * _count_memory_bytes(arch, mesh) if num_linear else num_bytes


def _count_memory_bytes(arch: Architecture, mesh: AnyMesh) -> int:
    """Return the bytes that linear attention keeps of one row: the delta rule's memory, and inputs of the filters."""
    dims, layout = arch.model.dims, arch.layout
    size = partial(count_local_numbers, dims, layout=layout, mesh=mesh)
    inputs = (dims["Z"] - 1) * (2 * size("IE") + size("JM"))
    return 4 * size("JEM") + inputs * jnp.dtype(layout.compute).itemsize


def _list_slots(length: int, max_length: int) -> list[int]:
    """Return the numbers of slots of a cache from prompts of `length` tokens to rows of `max_length`."""
    slots = [count_slots(length + 1, max_length)]
    while slots[-1] < max_length:
        slots.append(count_slots(slots[-1] + 1, max_length))
    return slots


def _count_programs(rows: int, length: int, max_length: int) -> int:
    """Count the programs of prompts of all lengths up to `length`, and of loops with all rows down to the fewest."""
    lengths = [MIN_PROMPT << n for n in range((length // MIN_PROMPT).bit_length())]
    prefills = sum(min(count_prefill_prompts(each), pad_batch(rows)).bit_length() for each in lengths)
    sizes = {select_fewer_rows(rows, rows >> halvings) for halvings in range(rows.bit_length())}
    return 1 + prefills + len(sizes) * len(_list_slots(MIN_PROMPT, max_length))
