"""Pooled keys against the reference checkpoint and against numpy: whole prompts, chunks, decode steps, packs."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dsa_indexer import (
    Indexer,
    PooledIndexer,
    PoolTail,
    RowBatch,
    StripeConfig,
    expand_pools,
    gather_keys,
    store_keys,
    striped_topk_rows,
    to_paged,
    topk_paged,
    topk_rows,
)
from dsa_indexer.pooled import close_pools, compress
from dsa_indexer.scores import row_scores
from tests.dsa_indexer.layer import TOLERANCE, Layer
from tests.dsa_indexer.oracle import bits, scores_of
from tests.helpers import det, relative_error

P = 4
jit_topk = jax.jit(topk_rows, static_argnames="k")
jit_close = jax.jit(close_pools)
jit_compress = jax.jit(compress)
jit_expand = jax.jit(expand_pools, static_argnames="pool")


@pytest.fixture(scope="module")
def layer():
    return Layer("glm5_next")


def _ints(x) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def _pools_of(keys, scores, ape) -> np.ndarray:
    """The closed pools of one request in float64."""
    keys, scores, ape = (np.asarray(x, np.float64) for x in (keys, scores, ape))
    pool, count = len(ape), len(keys) // len(ape)
    logits = scores[: count * pool].reshape(count, pool, -1) + ape
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return (weights * keys[: count * pool].reshape(count, pool, -1)).sum(1)


def _tokens_of(pools: np.ndarray, length: int, pool: int) -> list[int]:
    chosen = [p * pool + i for p in pools if p >= 0 for i in range(pool)]
    return chosen + list(range(max(length, 0) // pool * pool, length))


ROWS = 80  # every prompt is padded to as many rows, so that all share their programs


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, [(0, ROWS - len(x))] + [(0, 0)] * (x.ndim - 1))


@pytest.mark.parity
@pytest.mark.parametrize("name", ["s48", "s77", "s10_lt_topk"])
def test_pool_keys_scores_selection_and_attention_equal_the_reference(name, layer):
    golden, x, length = layer.golden, _padded(layer.hidden(name)), len(layer.hidden(name))
    q, gates, (keys, scores) = layer.index(x, jnp.arange(ROWS))
    pooled = layer.pool_keys(keys, scores)
    closed = length // P
    assert relative_error(pooled[:closed], golden[f"{name}.pool_keys"][0]) < TOLERANCE

    every = _ints(np.full(ROWS, closed))
    found = jax.jit(row_scores)(q, gates, pooled, None, 0 * every, every)[:length, :closed]
    assert relative_error(found, golden[f"{name}.pool_scores_unmasked"][0]) < TOLERANCE

    lengths = _padded(_ints(np.arange(1, length + 1)))
    pools = jit_topk(q, gates, pooled, None, RowBatch(0 * lengths, lengths // P), k=layer.config.selected)
    idx = jit_expand(pools, lengths, pool=P)
    np.testing.assert_array_equal(idx[:length], golden[f"{name}.topk_sorted"][0])
    assert idx.shape[1] == layer.config.width == 19
    attended = layer.attend(x, jnp.arange(ROWS), idx)[:length]
    assert relative_error(attended, golden[f"{name}.attn_out"][0]) < TOLERANCE


@pytest.fixture(scope="module")
def step(layer):
    """A pass of at most 32 tokens of request 1, over a paged cache of pools: selections by rows and by decode."""
    table, k = _ints([[5, 0, 3, 6, 1, 4, 2]]), layer.config.selected

    @jax.jit
    def run(tail, pages, keys, scores, q, gates, positions):
        request = jnp.where(positions >= 0, 1, -1)
        closed, tail = layer.indexer().close(tail, keys, scores, request, positions)
        slot = to_paged(positions[:, None] // P, jnp.zeros_like(positions), table, pages.shape[1])[:, 0]
        pages = store_keys(pages, closed.keys, closed.slots(slot))
        lengths = positions + 1
        rows = RowBatch(jnp.zeros_like(positions), lengths // P)
        pools = topk_rows(q, gates, gather_keys(pages, table[0]), None, rows, k=k)
        decoded = topk_paged(q[:1, None], gates[:1, None], pages, page_table=table, lengths=rows.lengths[:1, None], k=k)
        return tail, pages, expand_pools(pools, lengths, P), decoded[0, 0], pools[0]

    return run


@pytest.mark.parity
@pytest.mark.parametrize("cuts", [[1] * 9 + [5] * 13 + [3], [3, 6, 1, 2, 9, 30, 26]], ids=["decode", "chunks"])
def test_chunks_and_decode_steps_through_the_tail_select_what_the_whole_prompt_does(cuts, layer, step):
    # numpy on the host: slices of device arrays would compile once a length.
    q, gates, (keys, scores) = jax.tree.map(np.asarray, layer.index(_padded(layer.hidden("s77")), jnp.arange(ROWS)))
    dim = layer.config.head_dim
    tail, pages = PoolTail.empty(3, P, dim, keys.dtype), jnp.full((7, 3, dim), jnp.nan)
    start, out = 0, []
    for count in cuts:
        rows = np.r_[start : start + count]
        take = [np.pad(a[rows], [(0, 32 - count)] + [(0, 0)] * (a.ndim - 1)) for a in (keys, scores, q, gates)]
        positions = _ints(np.r_[rows, np.full(32 - count, -1)])
        tail, pages, idx, decoded, first = step(tail, pages, *take, positions)
        np.testing.assert_array_equal(decoded, first)
        out.append(np.asarray(idx)[:count])
        start += count
    np.testing.assert_array_equal(np.concatenate(out), layer.golden["s77.topk_sorted"][0])


@pytest.mark.parametrize(("pool", "entries"), [(1, 1), (4, 6), (7, 7)])
def test_pooled_keys_have_the_same_bits_however_the_tokens_arrive(pool, entries):
    """Three requests in turns and in packs, against the whole of each at once."""
    rng = np.random.default_rng(pool)
    lengths, dim, T = np.array([29, 16, 41]), 12, 40
    whole = [tuple(rng.normal(size=(n, dim)).astype(np.float32) for _ in range(2)) for n in lengths]
    ape = jnp.asarray(rng.normal(size=(pool, dim)), jnp.float32)
    tail = PoolTail.empty(4, entries, dim, jnp.float32)
    # A row of this table is a pass: how many tokens of each request.
    passes = [(1, 0, 2), (0, 5, 0), (9, 3, 20), (0, 0, 1), (19, 8, 11), (0, 0, 7)]
    done, got = np.zeros(3, int), [np.zeros((0, dim), np.float32) for _ in range(3)]
    for counts in passes:
        request = np.repeat([2, 0, 1], counts)
        positions = np.concatenate([np.r_[d : d + c] for d, c in zip(done, counts, strict=True)])
        pack = [
            np.concatenate([w[i][d : d + c] for w, d, c in zip(whole, done, counts, strict=True)]) for i in range(2)
        ]
        blank = T - len(request)
        keys, scores = (np.pad(x, [(0, blank), (0, 0)], constant_values=np.nan) for x in pack)
        request, positions = (np.pad(x, (0, blank), constant_values=-1) for x in (request, positions))
        closed, tail = jit_close(tail, keys, scores, _ints(request), _ints(positions), ape)
        tokens = np.asarray(closed.token)
        assert len(tokens) == min(T, (T + 4 * (pool - 1)) // pool)
        for row, key in zip(tokens[tokens < T], np.asarray(closed.keys), strict=False):
            r = [2, 0, 1].index(request[row])
            assert positions[row] // pool == len(got[r])
            got[r] = np.concatenate([got[r], key[None]])
        done += counts
    assert (done == [29, 16, 41]).all()
    for (keys, scores), out in zip(whole, got, strict=True):
        count = len(keys) // pool
        at_once = jit_compress(*(x[: count * pool].reshape(count, pool, dim) for x in (keys, scores)), ape)
        np.testing.assert_array_equal(bits(out), bits(at_once))
        assert relative_error(out, _pools_of(keys, scores, ape)) < 1e-6


def test_a_pool_of_one_token_is_its_key():
    keys, scores = (jnp.asarray(det((9, 6), seed)) for seed in (1, 2))
    np.testing.assert_array_equal(compress(keys[:, None], scores[:, None], jnp.ones((1, 6))), keys)
    np.testing.assert_array_equal(expand_pools(_ints([[0, 3, -1]]), _ints([5]), 1), [[0, 3, -1]])


def test_rejected_drafts_leave_the_open_pool_intact_while_the_tail_is_long_enough():
    """12 tokens are written, the last 3 taken back, others take their place: W = P + 2 entries allow for 3."""
    rng = np.random.default_rng(0)
    keys, scores = (jnp.asarray(rng.normal(size=(12, 5)), jnp.float32) for _ in range(2))
    ape, place = jnp.asarray(rng.normal(size=(P, 5)), jnp.float32), _ints(np.zeros(12))
    drafts = [x.at[9:].multiply(-3.0) for x in (keys, scores)]
    _, tail = jit_close(PoolTail.empty(1, P + 2, 5, jnp.float32), *drafts, place, _ints(np.arange(12)), ape)
    closed, _ = jit_close(tail, keys[9:], scores[9:], place[9:], _ints([9, 10, 11]), ape)
    np.testing.assert_array_equal(closed.token, [2])
    want = jit_compress(keys[None, 8:], scores[None, 8:], ape)
    np.testing.assert_array_equal(bits(closed.keys[0]), bits(want[0]))


def test_padding_and_unknown_requests_neither_close_a_pool_nor_enter_the_tail():
    tail = PoolTail(jnp.ones((2, 4, 3)), jnp.ones((2, 4, 3)))
    keys = jnp.full((8, 3), 7.0)
    closed, after = jit_close(
        tail, keys, keys, _ints([-1, -1, -1, -1, 2, 2, 2, 2]), _ints([0, 1, 2, 3] * 2), jnp.ones((4, 3))
    )
    assert (np.asarray(closed.token) == 8).all()
    np.testing.assert_array_equal(closed.slots(_ints(np.arange(8))), np.full(closed.token.shape, -1))
    jax.tree.map(np.testing.assert_array_equal, after, tail)


def test_a_pass_without_tokens_closes_nothing():
    tail = PoolTail.empty(2, 4, 3, jnp.float32)
    none = jnp.zeros((0, 3))
    closed, after = close_pools(tail, none, none, _ints([]), _ints([]), jnp.ones((4, 3)))
    assert closed.keys.shape == (0, 3)
    assert after.keys.shape == (2, 4, 3)


def test_a_tail_shorter_than_a_pool_is_refused():
    with pytest.raises(ValueError, match="3 entries a request; a pool of 4"):
        close_pools(
            PoolTail.empty(1, 3, 2, jnp.float32),
            jnp.ones((5, 2)),
            jnp.ones((5, 2)),
            *[_ints([0] * 5)] * 2,
            jnp.ones((4, 2)),
        )


@pytest.mark.parametrize("pool", [1, 3, 4])
def test_pools_expand_to_their_tokens_and_the_open_pool_follows(pool):
    rng = np.random.default_rng(pool)
    lengths = np.r_[np.arange(-1, 3 * pool + 2), 50, 51, 52]
    pools = np.full((len(lengths), 5), -1)
    for row, length in zip(pools, lengths, strict=True):
        count = min(max(length, 0) // pool, rng.integers(2, 6))
        row[:count] = np.sort(rng.choice(max(length, 0) // pool, count, replace=False))
    out = np.asarray(expand_pools(_ints(pools)[:, None], _ints(lengths)[:, None], pool))[:, 0]
    assert out.shape[1] == 5 * pool + pool - 1
    for row, found, length in zip(out, pools, lengths, strict=True):
        want = _tokens_of(found, length, pool)
        np.testing.assert_array_equal(row, want + [-1] * (out.shape[1] - len(want)))


@pytest.mark.multidevice
def test_only_pool_numbers_travel_between_devices(mesh_of):
    """Two packed requests, striped: the merge moves K / P numbers a row, and the tokens are those of numpy."""
    rng = np.random.default_rng(3)
    tokens, dim, k = np.array([50, 37]), 8, 6
    # Halves of small integers: every score is exact, so any order of the sums selects the same pools.
    pooled = jnp.asarray(rng.integers(-2, 3, (sum(tokens // P), dim)), jnp.float32)
    q = jnp.asarray(rng.integers(-2, 3, (87, 2, dim)), jnp.float32)
    gates = jnp.asarray(rng.integers(-3, 4, (87, 2)), jnp.float32) / 2
    lengths = np.concatenate([np.r_[1 : n + 1] for n in tokens])
    ks = np.repeat([0, tokens[0] // P], tokens)
    rows = RowBatch(_ints(ks), _ints(lengths // P))
    mesh = mesh_of(4)

    @jax.jit
    def select(q, gates, pooled, rows, lengths):
        pools = striped_topk_rows(q, gates, pooled, None, rows, k=k, mesh=mesh, stripes=StripeConfig(rows=8))
        return expand_pools(pools, lengths, P)

    args = jax.device_put((q, gates, pooled, rows, _ints(lengths)), NamedSharding(mesh, PartitionSpec()))
    out = select(*args)
    exact = scores_of(q, gates, pooled)
    for shard in out.addressable_shards:
        for m, row in enumerate(np.asarray(shard.data)):
            window = exact[m, ks[m] : ks[m] + lengths[m] // P]
            best = np.sort(np.argsort(-window, kind="stable")[:k])
            assert row[row >= 0].tolist() == _tokens_of(best, lengths[m], P)
    text = select.lower(*args).as_text()
    (merged,) = re.findall(r'"stablehlo.all_reduce".*?\}\) : \(tensor<(\d+x\d+)xi32>\)', text, re.DOTALL)
    assert merged.endswith(f"x{k}")


def test_an_indexer_and_its_config_must_agree_about_pools(layer):
    with pytest.raises(ValueError, match="pools 4 tokens into a key; use PooledIndexer"):
        Indexer(layer.config, jnp.float32)
    with pytest.raises(ValueError, match="no pool; use Indexer"):
        PooledIndexer(replace(layer.config, pool=None), jnp.float32)


def test_the_parameters_carry_the_names_and_dtypes_of_the_checkpoint(layer):
    _, state = nnx.split(nnx.eval_shape(lambda: PooledIndexer(layer.config, jnp.bfloat16)))
    found = {
        ".".join(map(str, path)): (leaf.get_value().shape, leaf.get_value().dtype)
        for path, leaf in nnx.to_flat_state(state)
        if "kpool" in str(path)
    }
    assert found == {
        "index_kpool_compress_gate": ((16, 64), jnp.bfloat16),
        "index_kpool_compress_ape": ((4, 16), jnp.float32),
    }


def test_hadamard_rotates_pooled_keys_after_pooling_and_queries_alike(layer):
    rotated = Layer("glm5_next", hadamard=True)
    x = layer.hidden("s48")
    q, _, (keys, scores) = layer.index(x, jnp.arange(48))
    q_rotated, _, raw = rotated.index(x, jnp.arange(48))
    np.testing.assert_array_equal(raw[0], keys)
    pooled, pooled_rotated = (a.pool_keys(keys, scores) for a in (layer, rotated))
    assert relative_error(pooled_rotated, pooled) > 0.1
    dots = jnp.einsum("mhd,nd->mhn", q, pooled)
    assert relative_error(jnp.einsum("mhd,nd->mhn", q_rotated, pooled_rotated), dots) < 1e-6
