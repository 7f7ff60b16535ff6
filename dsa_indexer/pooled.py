"""Pooled index keys (GLM-5.3): one key for every P consecutive tokens of a request.

With P = 4 and 11 tokens, counted from the request's first:

    token    0  1  2  3 | 4  5  6  7 | 8  9 10 .
    pool         0      |     1      |   open           2 closed pools are scored, tokens 8 to 10 are always attended to

A row that sees n tokens scores the first n // P pools, takes the best K / P and expands them to their tokens. Only pool
numbers need to travel between devices: expand after the merge.

The raw keys and compression scores of an open pool wait in a ring a request until the pool closes. Chunks of a prompt
may end anywhere; the pooled keys come out the same.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from dsa_indexer.config import IndexerConfig
from dsa_indexer.indexer import IndexProjections
from dsa_indexer.rows import pad_rows
from vitstripe.nn import linear, param

POOL_TILE = 128
"""Pools compressed at once."""


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "scores"], meta_fields=[])
@dataclass(frozen=True)
class PoolTail:
    """The newest tokens of R requests: raw keys and compression scores, both [R, W, D], token t at entry t mod W.

    W is at least P. After w tokens were written and the last w - n of them are taken back (rejected drafts of
    speculative decoding), the open pool is still there if w - n <= W - P + 1.
    """

    # Any, because a pytree's leaves are not always arrays: shardings and shape structs pass through here.
    keys: Any
    scores: Any

    @staticmethod
    def empty(requests: int, entries: int, dim: int, dtype) -> "PoolTail":
        """A tail for `requests` requests. A place needs no clearing between requests: a pool's tokens are written
        before they are read."""
        return PoolTail(jnp.zeros((requests, entries, dim), dtype), jnp.zeros((requests, entries, dim), dtype))


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "token"], meta_fields=[])
@dataclass(frozen=True)
class ClosedPools:
    """The pools a pass closed: keys [C, D] and token [C] int32, the row of the pass whose token closed the pool, in
    order; T (one past the last row) where there is none, with keys of no meaning.

    Of a token at position p of its request the pool's number is p // P.
    """

    keys: Any
    token: Any

    def slots(self, slots: Int32[Array, "T"]) -> Int32[Array, "C"]:
        """The slot of each pool, from one slot a token; -1 where there is no pool."""
        return slots.at[self.token].get(mode="fill", fill_value=-1)


def _compress_tile(
    keys: Float[Array, "c P D"], scores: Float[Array, "c P D"], ape: Float32[Array, "P D"]
) -> Float[Array, "c D"]:
    # Barriers keep this apart from its surroundings, and the sums have one order.
    keys, scores, ape = lax.optimization_barrier((keys, scores, ape))
    logits = scores.astype(jnp.float32) + ape
    weights = jnp.exp(logits - jnp.max(logits, 1, keepdims=True))
    total, pooled = weights[:, 0], weights[:, 0] * keys[:, 0].astype(jnp.float32)
    for i in range(1, keys.shape[1]):
        total = total + weights[:, i]
        pooled = pooled + weights[:, i] * keys[:, i].astype(jnp.float32)
    return lax.optimization_barrier((pooled / total).astype(keys.dtype))


def compress(
    keys: Float[Array, "C P D"], scores: Float[Array, "C P D"], ape: Float32[Array, "P D"]
) -> Float[Array, "C D"]:
    """One key a pool: sum_i softmax_i(scores + ape) * keys, a softmax over the P tokens for every channel.

    float32 inside, in keys' dtype. ape: `index_kpool_compress_ape`. Under jit the bits of a pool depend on its tokens
    alone, not on how many pools there are: it is always computed in tiles of one shape.
    """
    count, dim = keys.shape[0], keys.shape[2]
    tiles = -(-count // POOL_TILE)
    keys, scores = (pad_rows(x, tiles * POOL_TILE).reshape(tiles, POOL_TILE, *x.shape[1:]) for x in (keys, scores))
    out = lax.map(lambda tile: _compress_tile(tile[0], tile[1], ape), (keys, scores))
    return out.reshape(tiles * POOL_TILE, dim)[:count]


def expand_pools(pools: Int32[Array, "*B k"], lengths: Int32[Array, "*B"], pool: int) -> Int32[Array, "*B width"]:
    """Selected pools -> positions of tokens, relative to the request: width = k * pool + pool - 1.

    pools: ascending, -1 after the last, as the selection functions return them for lengths // pool pools a row.
    lengths: tokens each row sees. The tokens of the open pool are added. Ascending, -1 after the last.
    """
    width = pools.shape[-1] * pool + pool - 1
    column = jnp.arange(width, dtype=jnp.int32)
    closed = jnp.sum(pools >= 0, -1, dtype=jnp.int32)[..., None] * pool
    lengths = jnp.maximum(lengths, 0)[..., None]
    chosen = jnp.repeat(pools, pool, -1)
    chosen = jnp.pad(chosen, [(0, 0)] * (chosen.ndim - 1) + [(0, pool - 1)]) * pool + column % pool
    tail = column - closed
    tail_token = lengths // pool * pool + tail
    tail_token = jnp.where(tail_token < lengths, tail_token, -1)
    return jnp.where(tail < 0, chosen, tail_token)


def _most_pools(num_tokens: int, requests: int, pool: int) -> int:
    """Pools that num_tokens tokens can close at most: each request may bring pool - 1 tokens of its own."""
    return min(num_tokens, (num_tokens + requests * (pool - 1)) // pool)


def close_pools(
    tail: PoolTail,
    keys: Float[Array, "T D"],
    scores: Float[Array, "T D"],
    request: Int32[Array, "T"],
    positions: Int32[Array, "T"],
    ape: Float32[Array, "P D"],
) -> tuple[ClosedPools, PoolTail]:
    """Adds T tokens of several requests: the pools they close, and the tail after them. Fixed shapes; P = len(ape).

    request: the place of each token's request in the tail, -1 (or R and above) for padding. The tokens of one request
    stand together, in order, with consecutive positions. positions: from the request's first token.
    At most min(T, (T + R (P - 1)) // P) pools are returned, which is as many as can close.
    Raises ValueError if the tail has fewer than P entries.
    """
    pool, num_tokens = ape.shape[0], keys.shape[0]
    requests, entries, dim = tail.keys.shape
    if entries < pool:
        raise ValueError(f"the tail has {entries} entries a request; a pool of {pool} tokens needs at least as many")
    most = _most_pools(num_tokens, requests, pool)
    real = (request >= 0) & (request < requests)
    closes = real & (positions % pool == pool - 1)
    (token,) = jnp.nonzero(closes, size=most, fill_value=num_tokens)
    token = token.astype(jnp.int32)
    back = jnp.arange(pool - 1, -1, -1, dtype=jnp.int32)
    row = token[:, None] - back
    owner = request.at[token].get(mode="fill", fill_value=0)[:, None]
    position = positions.at[token].get(mode="fill", fill_value=0)[:, None] - back
    # A member is a row of this pass if that row is of the same request, else it waits in the tail.
    here = (row >= 0) & (request.at[jnp.maximum(row, 0)].get(mode="fill", fill_value=-1) == owner)
    source = jnp.where(here, requests * entries + row, owner * entries + position % entries)

    def members(waiting: Array, new: Array) -> Array:
        rows = jnp.concatenate([waiting.reshape(-1, dim), new.astype(waiting.dtype)])
        return rows.at[source].get(mode="fill", fill_value=0)

    pooled = compress(members(tail.keys, keys), members(tail.scores, scores), ape)

    # A later token of the same request overwrites an entry; two writers of one entry would race.
    later = jnp.pad(request, (0, entries), constant_values=-1)[entries:]
    kept = real & (later != request)
    entry = jnp.where(kept, request * entries + positions % entries, requests * entries)

    def write(waiting: Array, new: Array) -> Array:
        flat = waiting.reshape(-1, dim).at[entry].set(new.astype(waiting.dtype), mode="drop")
        return flat.reshape(waiting.shape)

    return ClosedPools(pooled, token), PoolTail(write(tail.keys, keys), write(tail.scores, scores))


class PooledIndexer(IndexProjections):
    """The indexer of one full layer with a key for every `config.pool` tokens (glm5_next, GLM-5.3-Flash).

    score(m, p) = sum_h gates[m, h] * relu(queries[m, h] . pooled[p]) for the pools p that are closed where m stands.
    Raises ValueError for a config without a pool.
    """

    def __init__(self, config: IndexerConfig, dtype):
        if config.pool is None:
            raise ValueError("the config has no pool; use Indexer")
        super().__init__(config, dtype)
        self.index_kpool_compress_gate = param((config.head_dim, config.hidden_size), dtype)
        self.index_kpool_compress_ape = param((config.pool, config.head_dim), jnp.float32)

    @jax.named_scope("project")
    def token_keys(
        self,
        x: Float[Array, "T hidden"],
        cos: Float[Array, "T r"] | None = None,
        sin: Float[Array, "T r"] | None = None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """Raw keys and compression scores, one a token, in x's dtype: what `close` and the tail work on.

        x: input of the attention block (after input_layernorm).
        """
        return self._token_keys(x, cos, sin), linear(x, self.index_kpool_compress_gate[...])

    def pool_keys(self, keys: Float[Array, "T D"], scores: Float[Array, "T D"]) -> Float[Array, "n D"]:
        """The keys of all T // P closed pools of one whole request, from its first token on."""
        pool = self.index_kpool_compress_ape.shape[0]
        count = keys.shape[0] // pool
        keys, scores = (x[: count * pool].reshape(count, pool, x.shape[1]) for x in (keys, scores))
        return self._spread(compress(keys, scores, self.index_kpool_compress_ape[...]))

    def close(
        self,
        tail: PoolTail,
        keys: Float[Array, "T D"],
        scores: Float[Array, "T D"],
        request: Int32[Array, "T"],
        positions: Int32[Array, "T"],
    ) -> tuple[ClosedPools, PoolTail]:
        """`close_pools` with this layer's parameters, the pooled keys rotated where the config says so."""
        closed, tail = close_pools(tail, keys, scores, request, positions, self.index_kpool_compress_ape[...])
        return ClosedPools(self._spread(closed.keys), closed.token), tail
