"""The striped form against the replicated one: the same bits on every device, through one collective."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from dsa_indexer import (
    ForcedTokens,
    RowBatch,
    striped_topk_rows,
    striped_topk_rows_local,
    to_paged,
    to_ragged,
    topk_rows,
)
from dsa_indexer.stripes import deal_back, owner, place_owned, rounds, take_owned
from tests.dsa_indexer import oracle
from tests.dsa_indexer.batches import K, every_copy, mixed_batch, striping

pytestmark = [pytest.mark.multidevice, pytest.mark.usefixtures("fully_optimised")]

MERGES = ("pmax", "all_gather")
WHOLE, IN_TILES = 256 << 20, 1  # logits_bytes: all rows of a device in one chunk, or one row tile at a time
# A line a mesh: (M, S, merge, logits_bytes). Fewer rows than devices, than a stripe, ragged tails, one-row stripes.
PROGRAMS = {
    1: [(63, 3, "pmax", IN_TILES)],
    2: [(200, 64, "pmax", WHOLE), (63, 3, "all_gather", IN_TILES)],
    4: [(200, 8, "pmax", IN_TILES), (63, 16, "all_gather", WHOLE)],
    8: [(200, 3, "pmax", WHOLE), (1, 64, "pmax", WHOLE), (200, 1, "all_gather", IN_TILES)],
}
jit_topk = jax.jit(topk_rows, static_argnames=("k", "forced", "logits_bytes"))


def _striped(mesh, S: int, merge: str, k: int = K, **options):
    return jax.jit(lambda *args: striped_topk_rows(*args, k=k, mesh=mesh, stripes=striping(S, merge), **options))


def _assert_replicated_bits(mesh, tp: int, programs) -> None:
    batches = [mixed_batch(M) for M, *_ in programs]

    @jax.jit  # one program for all: compiling is what takes the time here
    def run(batches):
        return [
            striped_topk_rows(*batch, k=K, mesh=mesh, stripes=striping(S, merge), logits_bytes=logits_bytes)
            for batch, (_, S, merge, logits_bytes) in zip(batches, programs, strict=True)
        ]

    for program, batch, out in zip(programs, batches, run(batches), strict=True):
        want = np.asarray(jit_topk(*batch, k=K))
        for copy in every_copy(out, tp):
            np.testing.assert_array_equal(copy, want, err_msg=str(program))


@pytest.mark.parametrize("tp", PROGRAMS)
def test_each_device_holds_the_replicated_bits(tp, mesh_of):
    _assert_replicated_bits(mesh_of(tp), tp, PROGRAMS[tp])


@pytest.mark.slow
@pytest.mark.parametrize("S", [1, 3, 8, 16, 64, 512])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_each_device_holds_the_replicated_bits_for_every_stripe_chunk_and_merge(tp, S, mesh_of):
    programs = list(itertools.product((1, 9, 63, 200), (S,), MERGES, (WHOLE, IN_TILES)))
    _assert_replicated_bits(mesh_of(tp), tp, programs)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_both_merges_put_every_row_back_in_its_place(tp, mesh_of):
    """The merges alone, without the scores that make programs large, so that every size is covered."""
    sizes = [(M, S) for M in (1, 7, 8, 17, 513) for S in (1, 32, 64, 512)]
    rows = [np.arange(1, M + 1, dtype=np.int32) for M, _ in sizes]

    def body():
        device = lax.axis_index("tp")
        own = [take_owned(jnp.asarray(x), device, S, tp) for x, (_, S) in zip(rows, sizes, strict=True)]

        def placed(parts, fill: int):
            at = [place_owned(x, device, M, S, tp, fill=fill) for x, (M, S) in zip(parts, sizes, strict=True)]
            return jnp.concatenate(at)

        writers = lax.psum(placed([jnp.ones_like(x) for x in own], 0), "tp")
        by_max = lax.pmax(placed(own, -1), "tp")
        parts = jnp.split(lax.all_gather(jnp.concatenate(own), "tp"), np.cumsum([len(x) for x in own])[:-1], axis=1)
        by_gather = [deal_back(x, M, S, tp) for x, (M, S) in zip(parts, sizes, strict=True)]
        return writers, by_max, jnp.concatenate(by_gather)

    # An all-gather's result counts as varying.
    run = jax.shard_map(body, mesh=mesh_of(tp), in_specs=(), out_specs=PartitionSpec(), check_vma=False)
    writers, by_max, by_gather = (every_copy(x, tp) for x in jax.jit(run)())
    for device in range(tp):
        np.testing.assert_array_equal(writers[device], 1)
        np.testing.assert_array_equal(by_max[device], np.concatenate(rows))
        np.testing.assert_array_equal(by_gather[device], np.concatenate(rows))


def test_every_row_with_a_key_is_written_by_one_device(mesh_of):
    M, S, tp = 63, 3, 4
    q, gates, keys, _, rows = mixed_batch(M)

    def body(q, gates, keys, rows):
        device = lax.axis_index("tp")
        own = jax.tree.map(lambda x: take_owned(x, device, S, tp), (q, gates, rows.ks, rows.lengths))
        found = topk_rows(own[0], own[1], keys, None, RowBatch(*own[2:]), k=K)
        wrote = (found[:, :1] >= 0).astype(jnp.int32)
        return lax.psum(place_owned(wrote, device, M, S, tp, fill=0), "tp")

    counts = jax.jit(jax.shard_map(body, mesh=mesh_of(tp), in_specs=PartitionSpec(), out_specs=PartitionSpec()))
    np.testing.assert_array_equal(counts(q, gates, keys, rows)[:, 0], np.asarray(rows.lengths) > 0)


def test_devices_with_different_score_budgets_own_the_same_rows():
    M, S, tp = 63, 3, 4
    q, gates, keys, _, rows = mixed_batch(M)
    want = jit_topk(q, gates, keys, None, rows, k=K)

    @partial(jax.jit, static_argnames="budget")
    def written_by(device, budget: int):
        own = jax.tree.map(lambda x: take_owned(x, device, S, tp), (q, gates, rows.ks, rows.lengths))
        found = topk_rows(own[0], own[1], keys, None, RowBatch(*own[2:]), k=K, logits_bytes=budget)
        return place_owned(found, device, M, S, tp, fill=-1)

    budgets = (IN_TILES, WHOLE, WHOLE, IN_TILES)
    written = [written_by(jnp.int32(device), budget) for device, budget in enumerate(budgets)]
    np.testing.assert_array_equal(np.max(written, axis=0), want)


@pytest.fixture(scope="module")
def packed(mesh_of):
    """Four requests in flight with prefixes and scaled keys, one row past a stripe's edge here and there, the bucket
    padded with 6 rows; forced first and last tokens. What a device holds after the merge, and the oracle's answer."""
    new, kv, padding = (11, 1, 30, 7), (530, 19, 45, 300), 6
    rows = oracle.packed_rows(new, kv, padding)
    M, num_keys, k, forced = sum(new) + padding, sum(kv), 20, ForcedTokens(first=2, last=3)
    q, gates, keys = oracle.exact_inputs(np.random.default_rng(3), M, num_keys)
    scales = np.float32(2.0) ** np.random.default_rng(5).integers(-2, 3, num_keys)
    run = _striped(mesh_of(4), 4, "pmax", k=k, forced=forced)
    copies = every_copy(run(q, gates, keys, jnp.asarray(scales), rows), 4)
    scores = oracle.scores_of(q, gates, keys) * scales
    want = oracle.select(oracle.force(scores, rows.ks, rows.lengths, 2, 3), rows.ks, rows.lengths, k)
    return copies, want, rows


def test_packed_requests_with_prefixes_select_what_numpy_does(packed):
    copies, want, rows = packed
    for copy in copies:
        np.testing.assert_array_equal(copy, want)
    assert (copies[0][-6:] == -1).all()
    assert sorted(set(np.minimum(rows.lengths, 21))) == [0, 16, 17, 18, 19, 20, 21]


def test_merged_positions_become_columns_and_slots_and_padding_stays_minus_one(packed):
    copies, want, rows = packed
    page = 16
    table = np.random.default_rng(2).permutation(4 * 40).reshape(4, 40).astype(np.int32)
    columns = np.asarray(to_ragged(jnp.asarray(copies[1]), rows.ks))
    slots = np.asarray(to_paged(jnp.asarray(copies[1]), rows.request, jnp.asarray(table), page))
    for m, row in enumerate(want):
        chosen = row[row >= 0]
        np.testing.assert_array_equal(columns[m][: len(chosen)], chosen + rows.ks[m])
        by_table = table[rows.request[m], chosen // page] * page + chosen % page
        np.testing.assert_array_equal(slots[m][: len(chosen)], by_table)
        assert (columns[m][len(chosen) :] == -1).all()
        assert (slots[m][len(chosen) :] == -1).all()


def test_needles_of_several_requests_are_found_by_the_rows_past_every_stripe_edge(mesh_of):
    """In each request one key at the very start is the only one with a positive score; all others score exactly 0."""
    new, kv, S, k = (13, 8, 12), (1103, 900, 1400), 4, 32
    rows = oracle.packed_rows(new, kv)
    starts = np.cumsum([0, *kv[:-1]])
    keys = np.full((sum(kv), 12), -1, np.float32)
    last_needles = starts + np.asarray(kv) - max(new) - 1  # far from the start, and seen by every row of its request
    keys[last_needles] = 1
    q, gates = jnp.ones((sum(new), 3, 12)), jnp.ones((sum(new), 3))
    run = _striped(mesh_of(8), S, "all_gather", k=k)
    late = every_copy(run(q, gates, jnp.asarray(keys), None, rows), 8)
    keys[last_needles], keys[starts] = -1, 1
    early = every_copy(run(q, gates, jnp.asarray(keys), None, rows), 8)
    for m, request in enumerate(np.asarray(rows.request)):
        for device in range(8):
            np.testing.assert_array_equal(early[device][m], np.arange(k))
            needle = last_needles[request] - starts[request]
            np.testing.assert_array_equal(late[device][m], [*range(k - 1), needle])


def test_more_winners_than_keys_pass_through_the_merge(mesh_of):
    q, gates, keys, _, rows = mixed_batch(17)
    want = np.where(np.arange(200) < rows.lengths[:, None], np.arange(200), -1)
    for copy in every_copy(_striped(mesh_of(2), 2, "pmax", k=200)(q, gates, keys, None, rows), 2):
        np.testing.assert_array_equal(copy, want)


def test_the_body_runs_inside_a_shard_map_of_the_caller_and_a_second_batch_compiles_nothing(mesh_of, compile_counter):
    first = mixed_batch(63)

    def program(q, gates, keys, rows, sharded):
        idx = striped_topk_rows_local(q, gates, keys, None, rows, k=K, axis="tp", tp=4, stripes=striping(8, "pmax"))
        return idx, sharded + idx[:1, :1]

    everywhere, cut = PartitionSpec(), PartitionSpec("tp")
    run = jax.jit(
        jax.shard_map(
            program,
            mesh=mesh_of(4),
            in_specs=(everywhere, everywhere, everywhere, everywhere, cut),
            out_specs=(everywhere, cut),
        )
    )
    second = jax.tree.map(lambda x: x[::-1], first)
    for batch in (first, second):
        q, gates, keys, _, rows = batch
        want = np.asarray(jit_topk(q, gates, keys, None, rows, k=K))
        more = jnp.zeros((4, 1), jnp.int32)
        with compile_counter() as compiles:
            idx, _ = jax.block_until_ready(run(q, gates, keys, rows, more))
        assert batch is first or compiles.count == 0
        for copy in every_copy(idx, 4):
            np.testing.assert_array_equal(copy, want)


def test_an_explicit_or_absent_axis_is_refused():
    explicit = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
    args = mixed_batch(9)
    with pytest.raises(ValueError, match="is Explicit"):
        striped_topk_rows(*args, k=K, mesh=explicit)
    with pytest.raises(ValueError, match="none is named 'rows'"):
        striped_topk_rows(*args, k=K, mesh=explicit, axis="rows")


@pytest.mark.parametrize("tp", [2, 8])
def test_ownership_is_the_same_arithmetic_on_the_host_and_in_a_program(tp):
    rows = np.arange(513)
    np.testing.assert_array_equal(jax.jit(partial(owner, stripe=32, tp=tp))(rows), owner(rows, 32, tp))
    assert rounds(513, 32, tp) == -(-17 // tp)
