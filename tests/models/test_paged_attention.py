"""The pages of a cache: attention to them on GPUs, interpreted on CPUs; which row gets which page, and when."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support.harness import SMALL

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.costs.rollout import PAGE, count_pages
from tunix.inference.kv_cache import quantize
from tunix.inference.page_pool import PagePool
from tunix.models.attention import Scaled
from tunix.models.paged_attention import _attend, attend_to_pages
from tunix.training.choices import build_layout, build_mesh

PAGES, DIM = 40, 16


def expected(q, k, v, table, times, cap):
    """Softmax of one query after the other over the tokens of its pages, up to its own."""
    out = np.zeros_like(q)
    shared = q.shape[2] // k.shape[1]
    for row, at, head in np.ndindex(q.shape[:3]):
        keys, values = (np.concatenate(list(x[table[row], head // shared]))[: times[row, at] + 1] for x in (k, v))
        scores = keys @ q[row, at, head]
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        out[row, at, head] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize(
    ("mesh", "heads", "cap", "is_narrow"),
    [("[[1],[fsdp]]", (4, 2), None, False), ("[[2,4],[fsdp,tp]]", (8, 2), 5.0, True)],
)
def test_the_kernel_sees_the_tokens_of_a_row(mesh, heads, cap, is_narrow):
    """Rows of 1 to 100 tokens, two queries each; on a mesh, a device has one key/value head of its four queries."""
    sizes = [f"model.num_heads={heads[0]}", f"model.num_kv_heads={heads[1]}", f"model.head_dim={DIM}"]
    cfg = compose([*SMALL, *sizes, f"model.mesh_shape={mesh}", "distributed.allow_idle_devices=true"]).config
    mesh, rng = build_mesh(cfg), np.random.default_rng(0)
    layout = build_layout(cfg, mesh).for_generation()
    q = rng.normal(size=(4, 2, heads[0], DIM)).astype(np.float32)
    k, v = (rng.normal(size=(PAGES, heads[1], PAGE, DIM)).astype(np.float32) for _ in range(2))
    table = rng.permutation(PAGES // 2)[: 2 * 7].reshape(2, 7).repeat(2, 0).astype(np.int32)  # two rows share pages
    times = np.array([[0, 1], [98, 99], [30, 31], [15, 16]], np.int32)
    with jax.set_mesh(mesh):
        batch, kv = (layout.activation(names) for names in ("BTNH", "BTKH"))
        of_pages = jax.P(kv[0], kv[2], None, None)
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        # Each data shard has pages of its own, and numbers them from 0.
        local = jax.tree.map(lambda x: put(np.tile(x[: PAGES // 2], (2, 1, 1, 1)), of_pages), (k, v))
        if is_narrow:
            codes = quantize(local)
            local = Scaled(codes[0], codes[2]), Scaled(codes[1], codes[3])
            k, v = (np.asarray(each.read(jnp.float32)) for each in local)
        rows = [put(x, jax.P(batch[0], None)) for x in (table, times)]
        options = {} if cap is None else {"cap": cap}
        found = jax.jit(lambda *arrays: attend_to_pages(*arrays, layout, options, interpret=True))
        found = found(put(q, batch), *local, *rows)
    np.testing.assert_allclose(found, expected(q, k, v, table, times, cap), atol=2e-6)


@pytest.mark.parametrize(("num_pages", "is_refused"), [(2**17, False), (2**17 + 1, True), (2**18 + 1, False)])
def test_codes_that_the_kernel_does_not_reach_are_refused(num_pages, is_refused):
    """Between 2 and 4 GiB of codes Pallas numbers them in 32 bits with a sign: later pages lay at negative places."""
    pages = Scaled(*(jax.ShapeDtypeStruct((num_pages, 8, PAGE, n), t) for n, t in ((128, jnp.int8), (1, jnp.float32))))
    q, heads = jax.ShapeDtypeStruct((4, 1, 16, 128), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)
    table, times = (jax.ShapeDtypeStruct((4, n), jnp.int32) for n in (64, 1))
    attend = partial(jax.eval_shape, lambda *arrays: _attend(*arrays, None, interpret=False))
    message = r"2,147,500,032 codes on a device, and the kernel of pages reaches 2,147,483,648; set cache=slots"
    with pytest.raises(UserError, match=message) if is_refused else nullcontext():
        assert attend(q, pages, pages, table, times, heads).shape == q.shape


def play(pool, prompts, lengths, group_size, most_rows, step, is_known=False):
    """Draw answers as the engine does; return how often a row had to wait for a page.

    `is_known`: an answer may be as long as it will be, and not as long as the longest.
    """
    held, shared, begun, waits = {}, (), 0, 0
    while begun < len(lengths) or held:
        while begun < len(lengths) and len(held) < most_rows:
            prompt = prompts[begun // group_size]
            found = pool.begin(begun, prompt, shared, prompt + lengths[begun] if is_known else None)
            if found is None:
                break
            shared, held[begun] = found, [prompts[begun // group_size], lengths[begun]]
            begun += 1
            if begun % group_size == 0:
                pool.give_back(shared)
                shared = ()
        wanted = {row: size + min(step, left) for row, (size, left) in held.items()}
        granted = pool.extend(wanted)
        assert granted, "all rows wait for one another"
        waits += len(wanted) - len(granted)
        for row in granted:
            assert len(pool.tables[row]) >= count_pages(wanted[row])
            held[row] = [wanted[row], held[row][1] - (wanted[row] - held[row][0])]
            if not held[row][1]:
                pool.release(row)
                del held[row]
        own = [page for row, table in pool.tables.items() for page in table[pool.num_shared[row] :]]
        common = {page for row, table in pool.tables.items() for page in table[: pool.num_shared[row]]} | set(shared)
        assert sorted([*own, *common, *pool.free]) == list(range(pool.num_pages))  # each page has one place
    assert not any(pool.users)
    return waits


def test_rows_end_with_few_pages():
    """No two rows wait for one another, and no page is lost, also where all answers are as long as they may be."""
    rng, waits = np.random.default_rng(0), []
    for longest in (False, True):
        for num_pages in (26, 40, 60):
            prompts = rng.integers(1, 90, 10)
            lengths = np.repeat(200 - prompts, 4) if longest else rng.integers(1, 110, 40)
            waits.append(play(PagePool(200, num_pages), prompts, lengths, 4, 12, step=20))
            play(PagePool(200, num_pages), prompts, lengths, 4, 12, step=20, is_known=True)
    assert waits[0] < waits[3]
    assert min(waits[3:]) > 0


def test_pages_are_given_as_long_as_all_rows_can_end():
    """One after the other, those that need least first; the last page counts, and shared ones only with their last row."""
    pool = PagePool(160, 20)
    assert None not in [pool.begin(*row) for row in ((0, 15, None), (1, 127, None, 144), (2, 47, None, 64))]
    pool = PagePool(160, 20)
    assert None not in [pool.begin(*row) for row in ((0, 15, None), (1, 15, None), (2, 15, None, 32))]
    assert pool.extend({0: 144, 1: 144}) == {0, 1}  # one page is left, and each row may need one more
    pool = PagePool(320, 40)
    shared = pool.begin(0, 160, (), 192)
    assert None not in [pool.begin(*row) for row in ((1, 160, shared, 304), (2, 15, None, 320), (3, 15, None, 272))]
    pool.give_back(shared)
    # Row 0 would end and leave 5 pages of its own, where row 3 would need 6; row 1 has the shared ones still.
    assert pool.extend({2: 208, 3: 176}) == {2}


def test_an_answer_that_may_be_short_waits_for_no_more_than_it_can_use():
    """26 pages are two of the longest rows, for which there always is room; and five of 5 pages with one to spare."""
    begun = {}
    for longest in (None, 76):
        pool = PagePool(200, 1)
        begun[longest] = sum(pool.begin(number, 60, None, longest) is not None for number in range(10))
    assert begun == {None: 2, 76: 5}


def test_full_pages_of_a_prompt_are_shared():
    pool = PagePool(200, 60)
    first = pool.begin(0, 40, ())
    assert (len(first), pool.begin(1, 40, first)) == (2, first)
    assert [table[:2] for table in pool.tables.values()] == [list(first)] * 2
    assert len({page for table in pool.tables.values() for page in table}) == 4  # the last page of each is its own
    pool.give_back(first)  # no answer more begins
    pool.release(0)
    assert not set(first) & set(pool.free)
    pool.release(1)
    assert len(pool.free) == 60
    assert pool.begin(2, 40, None) == ()  # an answer alone shares nothing
    assert pool.num_shared[2] == 0
