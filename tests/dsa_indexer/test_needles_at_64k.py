"""A fact at the very start of four 64k prompts in flight is still selected, by every device, striped as replicated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import RowBatch, StripeConfig, striped_topk_rows, topk_rows

REQUESTS, KEYS, ROWS, HEADS, DIM, K, STRIPE = 4, 65_537, 23, 2, 16, 96, 16


@pytest.fixture(scope="module")
def batch():
    """Four requests of 65537 keys, each with its last 23 rows in this pass. Key 0 of each is the best key of all its
    rows; most other keys score exactly 0, and a few hundred score a little."""
    rng = np.random.default_rng(64)
    keys = np.zeros((REQUESTS * KEYS, DIM), np.float32)
    keys[:, 0] = -1.0  # against a query of positive weight there: below zero, so the ReLU makes it an exact tie at 0
    some = rng.choice(REQUESTS * KEYS, 300 * REQUESTS, replace=False)
    keys[some] = rng.uniform(0.1, 0.4, (some.size, DIM))
    starts = np.arange(REQUESTS) * KEYS
    keys[starts] = 2.0
    q = rng.uniform(0.5, 1.0, (REQUESTS * ROWS, HEADS, DIM)).astype(np.float32)
    gates = rng.uniform(0.2, 1.0, (REQUESTS * ROWS, HEADS)).astype(np.float32)
    lengths = np.tile(np.arange(KEYS - ROWS + 1, KEYS + 1, dtype=np.int32), REQUESTS)
    rows = RowBatch(ks=jnp.asarray(np.repeat(starts, ROWS).astype(np.int32)), lengths=jnp.asarray(lengths))
    return jnp.asarray(q), jnp.asarray(gates), jnp.asarray(keys), None, rows


@pytest.fixture(scope="module")
def replicated(batch):
    return np.asarray(jax.jit(lambda *a: topk_rows(*a, k=K))(*batch))


def test_the_needle_is_selected_in_every_row(batch, replicated):
    assert (replicated[:, 0] == 0).all()
    assert (replicated >= 0).all()
    assert (replicated < np.asarray(batch[4].lengths)[:, None]).all()
    assert (np.diff(replicated, axis=1) > 0).all(), "ascending, no key twice"


@pytest.mark.parametrize(("tp", "merge"), [(2, "all_gather"), (8, "pmax")])
def test_every_device_holds_the_replicated_bits(batch, replicated, mesh_of, tp, merge):
    stripes = StripeConfig(rows=STRIPE, merge=merge)
    striped = jax.jit(lambda *a: striped_topk_rows(*a, k=K, mesh=mesh_of(tp), stripes=stripes))(*batch)
    for shard in striped.addressable_shards:
        # Rows just past a stripe's edge are where a wrong owner shows first.
        np.testing.assert_array_equal(np.asarray(shard.data), replicated)
