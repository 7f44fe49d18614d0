"""What kernels skip by is what the mask says: the first key of a query, and the queries of a key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.models.attention_mask import first_keys, first_queries, last_queries, row_mask_rule, split_chunks

LENGTH = 24
SEGMENTS = np.array([[0] * LENGTH, [4] * 7 + [7] + [2] * 9 + [0] * 7, list(range(LENGTH))], np.int32)


@pytest.mark.parametrize("window", [1, 5, 7, 100])
def test_keys_and_queries_are_those_of_the_mask(window):
    def find(segments):
        mask = row_mask_rule(segments, window).mask()[:, 0]
        return mask, first_keys(segments, window), last_queries(segments, window)

    mask, firsts, ends = map(np.asarray, jax.jit(find)(SEGMENTS))
    positions = np.arange(LENGTH)
    np.testing.assert_array_equal(firsts, np.where(mask, positions, LENGTH).min(2))
    # Behind the last query; a window may end behind the row.
    np.testing.assert_array_equal(np.minimum(ends, LENGTH), np.where(mask, positions[:, None] + 1, 0).max(1))
    for row, segments in enumerate(SEGMENTS):
        for query in positions:
            seen = {key for key in range(query + 1) if segments[key] == segments[query] and query - key < window}
            assert set(np.flatnonzero(mask[row, query])) == seen


def test_a_key_of_an_image_is_seen_from_its_first_token_on():
    ends = np.array([[1, 5, 5, 5, 5, 6, 7]], np.int32)

    def find(ends):
        rule = row_mask_rule(jnp.zeros_like(ends), 100, ends)
        rules = rule, rule.queries(jnp.int32(2), 3), rule._replace(window=2)
        return *(each.mask()[0, 0] for each in rules), first_queries(ends)

    mask, part, near, firsts = map(np.asarray, jax.jit(find)(ends))
    assert mask.sum(1).tolist() == ends[0].tolist()
    assert firsts.tolist() == [mask.argmax(0).tolist()] == [[0, 1, 1, 1, 1, 5, 6]]
    np.testing.assert_array_equal(part, mask[2:5])
    assert np.flatnonzero(near[4]).tolist() == [3, 4]  # no key before the window
    assert np.flatnonzero(near[2]).tolist() == [1, 2, 3, 4]


def test_chunks_begin_with_their_segment():
    segments = np.array([[4, 4, 4, 4, 4, 4, 4, 7, 7, 7, 7]], jnp.int32)
    assert jax.jit(split_chunks, static_argnums=1)(segments, 3).tolist() == [[0, 0, 0, 3, 3, 3, 6, 7, 7, 7, 10]]
