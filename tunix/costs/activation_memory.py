"""Memory of activations: what the forward pass keeps for the backward pass, and what one layer needs while it works.

The first part is traced: JAX says which arrays the backward pass takes. The second part is an estimate, because XLA
decides which arrays of a layer exist at the same time.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from tunix.config import Config, Model
from tunix.config.exchange_tables import EXPERT_EXCHANGES
from tunix.config.mlp import ExpertsMlp
from tunix.costs.transfers import count_part_rows, find_shard_shape
from tunix.models.attention import choose_query_block
from tunix.models.delta_rule import CHUNK
from tunix.models.exchanges import choose_exchange, is_in_blocks
from tunix.models.expert_exchanges import buffer_rows_per_token
from tunix.models.kernels import choose_kernel
from tunix.models.remat import Remat
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.dims import STREAM_TOKENS, data_axes
from tunix.sharding.layout import Layout
from tunix.sharding.mesh_shape import count_devices, token_shards
from tunix.training.chunks import count_chunk_positions
from tunix.training.program import Program, abstract_batch
from tunix.training.state import abstract_params, describe

MARKS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)  # primes
# Keys of the section training that change nothing of what one sequence keeps: how many sequences there are, and when a
# run ends.
OTHER_KEYS = {
    "micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "global_batch_tokens", "batch_stages",
    "pipeline_microbatches", "pipeline_schedule", "pipeline_chunks", "max_steps", "max_tokens", "num_epochs",
    "time_limit_s", "hard_stop", "skip_steps", "max_skipped_steps", "max_spikes", "compile_cache_gib",
}  # fmt: skip
QUEUES = 3  # of the rows of a microbatch: what enters the stages, what leaves them, and one of their gradients
LONG = 2048  # tokens of a sequence on one device, of which all are traced


def count_activation_bytes(program: Program) -> int:
    """Return the bytes of activations: kept of each sequence, and one layer's inside or the logits of a chunk.

    On stages the forward pass keeps of each tick the rows that a stage takes; a part of the batch at a time has in one
    stage what it has without stages.
    """
    training, layout, mesh, pipeline = program.cfg.training, program.layout, program.mesh, program.pipeline
    inside = estimate_inside_bytes(program.cfg, layout, mesh, training.seq_len)
    own_tokens = find_shard_shape((training.seq_len,), layout.activation("T"), mesh)[0]
    words = find_shard_shape((program.cfg.model.vocab_size,), layout.activation("V"), mesh)[0]

    def count_logit_bytes(num_rows: int, num_tokens: int) -> float:
        """Return the bytes of a chunk's logits in float32, and of part of their gradient, for each row."""
        return 1.75 * count_chunk_positions(training.loss_chunk_size, num_rows, num_tokens) * words * 4

    num_rows, residual = training.sequences_per_shard, _count_residual_bytes(program)
    if pipeline.num_stages == 1:
        return round(num_rows * (residual + max(inside, count_logit_bytes(num_rows, own_tokens))))
    # With stages: what ticks keep, `num_kept` rows of a part, and the larger of what is at work in one tick.
    row = _count_stream_bytes(program) + 4 * (own_tokens + training.seq_len)  # with its positions and segments
    rows_of_part = count_part_rows(program.cfg, mesh)
    at_work = rows_of_part * (residual / (pipeline.num_stages * pipeline.num_chunks) + inside)
    if pipeline.is_stream:
        loss = rows_of_part * count_logit_bytes(rows_of_part, own_tokens // pipeline.num_stages)
        num_kept = 2 * pipeline.num_stages * pipeline.num_chunks + QUEUES
        return round(num_kept * rows_of_part * row + max(at_work, loss))
    # GPipe keeps the rows of each tick of a microbatch: 4 stages with 12 parts have 15 ticks. A stream (above) keeps
    # rows only until their backward pass comes by (Turns): with 4 stages those of 2 x 4 + 3 parts, however many follow.
    num_kept = pipeline.num_ticks // pipeline.num_microbatches
    queues_and_loss = num_rows * (QUEUES * row + count_logit_bytes(num_rows, own_tokens))
    return round(num_kept * rows_of_part * row + max(at_work, queues_and_loss))


def estimate_inside_bytes(cfg: Config, layout: Layout, mesh: Mesh | AbstractMesh, length: int) -> int:
    """Return the bytes inside of one layer on one device, for a sequence of `length` tokens. An estimate."""
    model, item = cfg.model, jnp.dtype(layout.compute).itemsize
    own = {letter: find_shard_shape((size,), layout.activation(letter), mesh)[0] for letter, size in model.dims.items()}
    tokens = find_shard_shape((length,), layout.activation("T"), mesh)[0]
    heads, kinds = own["N"], model.kinds_of_heads
    # Numbers of queries and keys of a token; of key/value heads that every device keeps, it uses one.
    head_numbers = max((heads + min(own[each.letters[0]], heads)) * each.dim for each in kinds)
    mlp = _count_mlp_numbers(model, layout, mesh, own)
    copies = 2 if token_shards(mesh.shape) == 1 else 4  # of queries, keys, values and results: exchanged ones are more
    inside = 2 * tokens * item * (6 * own["D"] + copies * head_numbers + mlp)
    # Also where a mesh has no devices. Devices that share a sequence split its scores, by heads or by keys.
    kernels = {choose_kernel(model.attention, each.dim, layout.compute, model.attention_options).name for each in kinds}
    if is_in_blocks(choose_exchange(model, mesh.shape).name) or "xla" in kernels:
        inside += heads * min(length, choose_query_block(length)) * tokens * (4 + item)
    if model.linear_attention is None:
        return inside
    numbers = _count_linear_numbers(model, length, own)  # float32
    return max(inside, round(2 * tokens * (item * (6 * own["D"] + mlp) + 4 * numbers)))


def _count_mlp_numbers(model: Model, layout: Layout, mesh: Mesh | AbstractMesh, own: dict[str, int]) -> int:
    """Return the numbers that the MLP has inside for each token of a device; `own` has its sizes of dimensions."""
    mlp = (2 if model.mlp.kind == "plain" else 3) * max(own["F"], own.get("f", 0))
    if not isinstance(model.mlp, ExpertsMlp):
        return mlp
    # Rows for which the exchange has room, for each token of this device.
    num_rows = buffer_rows_per_token(model, count_devices(mesh.shape, layout.expert_axes), layout.expert_exchange)
    expert_numbers = num_rows * (3 * own["G"] + 2 * own["D"]) + 3 * own.get("U", 0)
    if EXPERT_EXCHANGES[layout.expert_exchange].has_buffer:  # sent, and returned
        expert_numbers += 2 * model.mlp.experts_per_token * own["D"]
    if model.mlp.beside_mlp:
        return round(expert_numbers) + mlp
    return max(round(expert_numbers), mlp if "dense_blocks" in model.stacks else 0)


def _count_linear_numbers(model: Model, length: int, own: dict[str, int]) -> float:
    """Return the numbers that linear attention has inside for each token of a device (models/delta_rule.py)."""
    linear = model.linear_attention
    assert linear is not None
    chunk = min(CHUNK, length)
    per_value_head = 3 * linear.value_dim + 2 * linear.key_dim + 4 * chunk + linear.key_dim * linear.value_dim / chunk
    return 2 * own["I"] * linear.key_dim + own["J"] * per_value_head


_known_residual_bytes: dict[tuple[str | int, ...], int] = {}  # a plan asks for one model on many meshes


def _count_residual_bytes(program: Program) -> int:
    """Return the bytes that `training.remat` keeps of a sequence for the backward pass, on one device.

    On stages, they are those of the same program without stages, whose axis then splits the batch alone.
    """
    cfg = program.cfg
    config = cfg.model.model_dump_json(exclude={"mesh_shape"}), cfg.training.model_dump_json(exclude=OTHER_KEYS)
    # Each data shard has its own sequences, so the axes that split the batch change nothing of one sequence.
    others = (size for axis, size in program.mesh.shape.items() if axis not in data_axes())
    key = (*config, program.layout.expert_exchange, *others)
    if key not in _known_residual_bytes:
        _known_residual_bytes[key] = _trace_residuals(program)
    return _known_residual_bytes[key]


def _trace_residuals(program: Program) -> int:
    """Trace the forward pass, and return the bytes of what it leaves for the backward pass of one sequence.

    Some residuals are weights. To tell those of the sequences apart, the number of sequences is a prime p that divides
    no other size: it divides a size of each array that grows with the sequences, and of no other array.

        [p, T, D]   grows: an activation         [D, F]   does not: a weight
    """
    cfg, mesh = program.cfg, program.mesh
    # cuDNN's kernel cannot be traced without cuDNN; it keeps what the plain one keeps of long sequences.
    plain = cfg.model.model_copy(update={"attention": "xla"})
    layout, remat = program.layout.with_all_layers(), program.remat
    # Where what is kept waits in the host's memory, what blocks take does too: the rest is outside of blocks.
    arch = describe(plain, layout, Remat("full") if remat.on_host else remat)

    def residuals(params, batch):
        rows, seed = {name: leaf[0] for name, leaf in batch.items()}, jnp.zeros((), jnp.int32)

        def objective(trained):
            return program.loss_fn(arch.module(arch.merge(trained, params)), rows, seed).objective

        return jax.vjp(objective, arch.trained(params))[1]

    prime = next(prime for prime in MARKS if all(size % prime for size in cfg.dims.values() if size))
    # What is kept of a sequence grows with its tokens. The plain attention is a piece of program for each block of
    # queries, so a long sequence takes long to trace: a part of it is traced, and counted several times.
    times, length = 1, cfg.training.seq_len
    shards = length // find_shard_shape((length,), layout.activation(STREAM_TOKENS), mesh)[0]
    while length % (2 * times * shards) == 0 and length // (2 * times) >= LONG * token_shards(mesh.shape):
        times *= 2
    values = {
        "micro_batch_size": prime, "global_batch_size": None, "global_batch_tokens": None, "batch_stages": (),
        "seq_len": length // times,
    }  # fmt: skip
    marked = cfg.model_copy(update={"training": cfg.training.model_copy(update=values)})
    leaves = jax.tree.leaves(jax.eval_shape(residuals, abstract_params(arch, mesh), abstract_batch(marked, mesh)))
    grown = [leaf for leaf in leaves if any(size % prime == 0 for size in leaf.shape)]
    num_bytes = times * bytes_per_device(grown) // prime
    return num_bytes - cfg.model.num_layers * _count_stream_bytes(program) if remat.on_host else num_bytes


def _count_stream_bytes(program: Program) -> int:
    """Return the bytes of the residual stream of one sequence on one device."""
    layout = program.layout
    own_tokens = find_shard_shape((program.cfg.training.seq_len,), layout.activation(STREAM_TOKENS), program.mesh)[0]
    return own_tokens * program.cfg.model.embed_dim * jnp.dtype(layout.compute).itemsize
