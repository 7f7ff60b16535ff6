"""Selection stated in numpy, and inputs whose scores are exact in float32."""

import jax.numpy as jnp
import numpy as np

from dsa_indexer import RowBatch


def select(scores: np.ndarray, ks: np.ndarray, lengths: np.ndarray, k: int) -> np.ndarray:
    """The k largest of each row's window by a stable sort; NaN as -inf, -0 as 0; ascending, then -1."""
    out = np.full((len(ks), k), -1, np.int32)
    for m, (start, length) in enumerate(zip(ks, lengths, strict=True)):
        window = scores[m, start : start + max(length, 0)]
        window = np.where(np.isnan(window), -np.inf, window) + 0.0
        best = np.sort(np.argsort(-window, kind="stable")[:k])
        out[m, : len(best)] = best
    return out


def scores_of(q, gates, keys) -> np.ndarray:
    """sum_h gates[m, h] * relu(q[m, h] . keys[n]) in float64."""
    q, gates, keys = (np.asarray(x, np.float64) for x in (q, gates, keys))
    return np.einsum("mh,mhn->mn", gates, np.maximum(np.einsum("mhd,nd->mhn", q, keys), 0))


def exact_inputs(rng, M: int, N: int, H: int = 3, D: int = 10):
    """q, gates, keys of small multiples of 1/2: every score is exact, and many scores are equal, zero or negative."""
    q = rng.integers(-2, 3, (M, H, D)).astype(np.float32)
    gates = rng.integers(-3, 4, (M, H)).astype(np.float32) / 2
    keys = rng.integers(-2, 3, (N, D)).astype(np.float32)
    return jnp.asarray(q), jnp.asarray(gates), jnp.asarray(keys)


def packed_rows(new_tokens, kv_lengths, padding: int = 0) -> RowBatch:
    """Causal rows of several requests, packed, then `padding` rows of length 0."""
    starts = np.cumsum([0, *kv_lengths[:-1]])
    ks = np.repeat(starts, new_tokens)
    lengths = np.concatenate([np.arange(kv - new + 1, kv + 1) for new, kv in zip(new_tokens, kv_lengths, strict=True)])
    request = np.repeat(np.arange(len(new_tokens)), new_tokens)
    return RowBatch(*(jnp.asarray(np.pad(x, (0, padding)), jnp.int32) for x in (ks, lengths, request)))


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view({2: np.int16, 4: np.int32}[x.dtype.itemsize])


def force(scores, ks, lengths, first: int, last: int) -> np.ndarray:
    """Finite scores with infinity at the first and last few columns of each row's window."""
    out = np.array(scores)
    for m, (start, length) in enumerate(zip(np.asarray(ks), np.asarray(lengths), strict=True)):
        window = out[m, start : start + length]
        window[:first] = window[max(length - last, 0) :] = np.inf
    return out
