"""One batch with every kind of row there is, and what the striped tests do with its results."""

import jax.numpy as jnp
import numpy as np

from dsa_indexer import RowBatch, StripeConfig

N, K = 150, 19


def mixed_batch(M: int, N: int = N):
    """q, gates, keys, None and rows: M rows in no order, of noise on keys of small integers.

    Among them padding rows, rows of fewer keys than K, of K and of K + 1, rows whose scores are all zero, and rows
    whose scores are all negative.
    """
    rng = np.random.default_rng(M)
    q, gates = rng.normal(size=(M, 3, 12)), rng.normal(size=(M, 3))
    keys = rng.integers(-2, 3, (N, 12))
    gates[::5] = 0
    gates[1::5] = -np.abs(gates[1::5])
    ks = rng.integers(0, 40, M)
    lengths = rng.choice([0, 1, K - 1, K, K + 1, 64, N - 40, *rng.integers(1, N - 40, 5)], M)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, gates, keys)]
    return (*arrays, None, RowBatch(jnp.asarray(ks, jnp.int32), jnp.asarray(lengths, jnp.int32)))


def every_copy(array, devices: int) -> list[np.ndarray]:
    """What each device holds."""
    copies = [np.asarray(shard.data) for shard in array.addressable_shards]
    assert len(copies) == devices
    return copies


def striping(S: int, merge: str) -> StripeConfig:
    return StripeConfig(rows=S, merge=merge)
