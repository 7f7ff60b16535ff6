"""Relative positions, physical slots and ragged columns."""

import jax
import jax.numpy as jnp
import numpy as np

from dsa_indexer import RowBatch, to_paged, to_ragged
from tests.dsa_indexer.oracle import packed_rows

jit_paged, jit_ragged = jax.jit(to_paged, static_argnums=3), jax.jit(to_ragged)
IDX = jnp.array([[0, 5, 6, -1], [2, -1, -1, -1], [0, 1, 13, 14], [-1, -1, -1, -1]], jnp.int32)


def test_the_rows_of_packed_requests_see_their_own_keys():
    rows = packed_rows([3, 2], [10, 4], padding=1)
    np.testing.assert_array_equal(rows.ks, [0, 0, 0, 10, 10, 0])
    np.testing.assert_array_equal(rows.lengths, [8, 9, 10, 3, 4, 0])
    np.testing.assert_array_equal(rows.request, [0, 0, 0, 1, 1, 0])


def test_a_row_batch_is_a_pytree_with_an_optional_request():
    rows = RowBatch(jnp.arange(3), jnp.arange(3) + 1)
    doubled = jax.tree.map(lambda x: x * 2, rows)
    assert doubled.request is None
    np.testing.assert_array_equal(doubled.lengths, [2, 4, 6])
    shapes = jax.eval_shape(lambda r: r, RowBatch(rows.ks, rows.lengths, rows.ks))
    assert shapes.request.shape == (3,)


def test_positions_become_slots_through_the_rows_own_request():
    table = jnp.array([[9, 4, 7], [2, 3, 11]], jnp.int32)
    slots = jit_paged(IDX, jnp.array([0, 1, 1, 0], jnp.int32), table, 6)
    want = [[54, 59, 24, -1], [14, -1, -1, -1], [12, 13, 67, 68], [-1, -1, -1, -1]]
    np.testing.assert_array_equal(slots, want)


def test_a_padding_row_of_no_request_stays_minus_one():
    table = jnp.array([[9, 4, 7]], jnp.int32)
    slots = jit_paged(jnp.full((2, 3), -1, jnp.int32), jnp.array([-1, 5], jnp.int32), table, 6)
    assert (np.asarray(slots) == -1).all()


def test_a_position_without_a_page_is_no_slot():
    table = jnp.array([[9, -1]], jnp.int32)
    slots = jit_paged(jnp.array([[5, 6, 12]], jnp.int32), jnp.zeros(1, jnp.int32), table, 6)
    np.testing.assert_array_equal(slots, [[59, -1, -1]])


def test_offsets_are_added_to_positions_and_never_to_minus_one():
    out = jit_ragged(IDX, jnp.array([0, 40, 40, 40], jnp.int32))
    want = [[0, 5, 6, -1], [42, -1, -1, -1], [40, 41, 53, 54], [-1, -1, -1, -1]]
    np.testing.assert_array_equal(out, want)
