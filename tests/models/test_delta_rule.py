"""The gated delta rule: chunks, and devices that share rows, say what one token after the other says, for packed
documents too."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.models.linear_attention import move_on, number_runs, run_chunks, run_shard, step
from tunix.sharding.mesh import device_mesh

BATCH, LENGTH, KEYS, VALUES, KEY_DIM, VALUE_DIM = 2, 23, 2, 6, 5, 7
# Documents that begin and end within chunks and at their ends; a number that comes back is another document.
SEGMENTS = np.array([[3] * 8 + [5] + [3] * 14, [1] * 20 + [2] * 3], np.int32)


def inputs() -> tuple[np.ndarray, ...]:
    """Return queries, keys, values, decays and betas of all tokens."""
    rng, rows = np.random.default_rng(0), (BATCH, LENGTH)
    queries, keys = (rng.normal(size=(*rows, KEYS, KEY_DIM)) for _ in range(2))
    values, decay = rng.normal(size=(*rows, VALUES, VALUE_DIM)), -rng.exponential(size=(*rows, VALUES))
    return tuple(x.astype(np.float32) for x in (queries, keys, values, decay, rng.uniform(size=(*rows, VALUES))))


def one_by_one(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return results and memory of tokens one after the other; the memory is emptied where a document begins."""
    starts = np.pad(SEGMENTS[:, 1:] != SEGMENTS[:, :-1], [(0, 0), (1, 0)])

    def token(memory, now):
        begin, *arrays = now
        memory = jnp.where(begin[:, None, None, None], 0, memory)
        out, memory = step(*(x[:, None] for x in arrays), memory)
        return memory, out[:, 0]

    in_order = jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), 1, 0), (starts, *arrays))
    memory, out = jax.lax.scan(token, jnp.zeros((BATCH, VALUES, KEY_DIM, VALUE_DIM)), in_order)
    return jnp.moveaxis(out, 0, 1), memory


def test_chunks_equal_steps():
    """Results, memory and gradients, with chunks that the row fills in part, and with one chunk of the whole row."""
    arrays, weights = inputs(), np.random.default_rng(1).normal(size=(BATCH, LENGTH, VALUES, VALUE_DIM))

    def gradients(run):
        def total(*arrays):
            out, memory = run(*arrays)
            return jnp.sum(out * weights) + jnp.sum(memory**2), (out, memory)

        return jax.jit(jax.grad(total, argnums=range(5), has_aux=True))(*arrays)

    expected = gradients(one_by_one)
    for chunk in (4, 64):
        found = gradients(lambda *arrays, chunk=chunk: run_chunks(*arrays, number_runs(SEGMENTS), chunk=chunk))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


def test_memory_answers_with_the_value_of_a_key():
    """Without decay, and with beta 1, a key that is written again has its new value alone."""
    keys = np.eye(3, dtype=np.float32)[[0, 1, 0, 0]].reshape(1, 4, 1, 3)
    values = np.array([5.0, 7.0, 2.0, 9.0], np.float32).reshape(1, 4, 1, 1)
    decay, beta = np.zeros((1, 4, 1), np.float32), np.ones((1, 4, 1), np.float32)
    _, memory = jax.jit(run_chunks)(keys, keys, values, decay, beta, np.zeros((1, 4), np.int32))
    np.testing.assert_allclose(memory.ravel(), [9, 7, 0], atol=1e-4)


# Of 24 tokens: documents over all devices, over a few, within one, and that begin where a device does.
SHARED_SEGMENTS = np.array([[1] * 24, [1] * 7 + [2] * 2 + [3] * 15, [1] * 12 + [2] * 12, range(24)], np.int32)


@pytest.mark.nightly(but=["8"])
@pytest.mark.parametrize("num_devices", [2, 8])
def test_devices_that_share_rows_equal_one(num_devices):
    """Results and gradients, of filters' tokens too: with 8 devices a filter of 6 tokens reaches over two of 3."""
    rng, (rows, length) = np.random.default_rng(0), SHARED_SEGMENTS.shape
    shapes = (KEYS, KEY_DIM), (KEYS, KEY_DIM), (VALUES, VALUE_DIM), (VALUES,), (VALUES,)
    q, k, v, decay, beta = (rng.normal(size=(rows, length, *shape)).astype(np.float32) for shape in shapes)
    arrays = q, k, v, -np.abs(decay) / 4, 1 / (1 + np.exp(-beta))
    runs, weights = jax.jit(number_runs)(SHARED_SEGMENTS), rng.normal(size=(7, rows, length, VALUES, VALUE_DIM))

    def gradients(devices):
        spec = jax.P(None, "cp")
        with jax.set_mesh(device_mesh(((devices,), ("cp",)), {}, allow_idle=True)):

            @partial(jax.shard_map, in_specs=(spec,) * 6, out_specs=((spec,) * 6, spec))
            def shared(*arrays):
                *arrays, runs = arrays
                runs = jax.lax.all_gather(runs, "cp", axis=1, tiled=True)
                return move_on(6, arrays[2], runs), run_shard(*arrays, runs)

            def loss(*arrays):
                moved, out = shared(*arrays, jax.device_put(runs, spec))
                return sum(jnp.sum(x**2 * y) for x, y in zip((*moved, out), weights, strict=True)), out

            return jax.jit(jax.grad(loss, argnums=range(5), has_aux=True))(*jax.device_put(arrays, spec))

    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), gradients(num_devices), gradients(1))
