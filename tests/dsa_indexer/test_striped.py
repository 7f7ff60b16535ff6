"""The striped form against the replicated one: the same bits on every device, through one collective."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from dsa_indexer import RowBatch, StripeConfig, striped_topk_rows, striped_topk_rows_local, topk_rows
from dsa_indexer.stripes import place_owned, rounds

pytestmark = pytest.mark.multidevice

N, K = 150, 19
# (M, S): fewer rows than devices, than a stripe, ragged tails, one-row stripes.
SHAPES = [(1, 64), (7, 2), (9, 1), (17, 16), (63, 3), (200, 8), (200, 64)]
jit_topk = jax.jit(topk_rows, static_argnames=("k", "logits_bytes"))


def _inputs(M: int):
    rng = np.random.default_rng(M)
    q, gates, keys = rng.normal(size=(M, 3, 12)), rng.normal(size=(M, 3)), rng.normal(size=(N, 12))
    ks = rng.integers(0, 40, M)
    # Short rows, padding rows and rows longer than K, in no order.
    lengths = np.where(rng.random(M) < 0.2, 0, rng.integers(1, N - 40, M))
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, gates, keys)]
    return (*arrays, None, RowBatch(jnp.asarray(ks, jnp.int32), jnp.asarray(lengths, jnp.int32)))


def _striped(mesh, S: int, merge: str, **options):
    stripes = StripeConfig(rows=S, merge=merge)
    return jax.jit(lambda *args: striped_topk_rows(*args, k=K, mesh=mesh, stripes=stripes, **options))


def _every_copy(array, devices: int) -> list[np.ndarray]:
    copies = [np.asarray(shard.data) for shard in array.addressable_shards]
    assert len(copies) == devices
    return copies


@pytest.mark.parametrize("merge", ["pmax", "all_gather"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_each_device_holds_the_replicated_bits(tp, merge, mesh_of):
    batches = [_inputs(M) for M, _ in SHAPES]
    mesh = mesh_of(tp)

    @jax.jit  # one program for all shapes: compiling is what takes the time here
    def all_shapes(batches):
        return [
            striped_topk_rows(*batch, k=K, mesh=mesh, stripes=StripeConfig(rows=S, merge=merge))
            for batch, (_, S) in zip(batches, SHAPES, strict=True)
        ]

    for (M, S), batch, out in zip(SHAPES, batches, all_shapes(batches), strict=True):
        want = np.asarray(jit_topk(*batch, k=K))
        for copy in _every_copy(out, tp):
            np.testing.assert_array_equal(copy, want, err_msg=f"M = {M}, S = {S}")


@pytest.mark.parametrize("merge", ["pmax", "all_gather"])
def test_a_small_score_budget_changes_no_bit_and_no_owner(merge, mesh_of):
    args = _inputs(63)
    want = np.asarray(jit_topk(*args, k=K))
    for copy in _every_copy(_striped(mesh_of(2), 3, merge, logits_bytes=1)(*args), 2):
        np.testing.assert_array_equal(copy, want)


@pytest.mark.parametrize("merge", ["pmax", "all_gather"])
def test_key_scales_and_more_winners_than_keys_pass_through_the_merge(merge, mesh_of):
    q, gates, keys, _, rows = _inputs(17)
    scales = jnp.linspace(0.5, 2, N)
    want = np.asarray(jit_topk(q, gates, keys, scales, rows, k=200))
    run = jax.jit(
        lambda *args: striped_topk_rows(*args, k=200, mesh=mesh_of(4), stripes=StripeConfig(rows=2, merge=merge))
    )
    for copy in _every_copy(run(q, gates, keys, scales, rows), 4):
        np.testing.assert_array_equal(copy, want)


@pytest.mark.parametrize("merge", ["pmax", "all_gather"])
def test_zero_rows_give_an_empty_selection_without_a_collective(merge, mesh_of):
    run = _striped(mesh_of(4), 8, merge)
    args = _inputs(0)
    out = run(*args)
    assert out.shape == (0, K)
    assert not _collectives(run.lower(*args).as_text())


def _collectives(text: str) -> list[str]:
    return re.findall(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)\b", text)


def test_the_pmax_merge_lowers_to_one_all_reduce_of_a_maximum(mesh_of):
    text = _striped(mesh_of(8), 4, "pmax").lower(*_inputs(200)).as_text()
    assert _collectives(text) == ["all_reduce"]
    body = text[text.index("stablehlo.all_reduce") :]
    assert "stablehlo.maximum" in body[: body.index("}) :")]


def test_the_all_gather_merge_lowers_to_one_all_gather(mesh_of):
    text = _striped(mesh_of(8), 4, "all_gather").lower(*_inputs(200)).as_text()
    assert _collectives(text) == ["all_gather"]


@pytest.mark.parametrize("merge", ["pmax", "all_gather"])
def test_the_compiled_program_keeps_the_one_collective(merge, mesh_of):
    text = _striped(mesh_of(4), 4, merge).lower(*_inputs(63)).compile().as_text()
    started = re.findall(
        r"= \S+ (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text
    )
    assert started == ["all-reduce" if merge == "pmax" else "all-gather"]


@pytest.mark.parametrize(("M", "S", "tp"), [(1, 4, 8), (17, 2, 8), (63, 3, 4), (64, 16, 4)])
def test_every_row_has_one_writer(M, S, tp, mesh_of):
    def body():
        device = lax.axis_index("tp")
        own = jnp.ones_like(device, shape=(rounds(M, S, tp) * S, 1))
        return lax.psum(place_owned(own, device, M, S, tp, fill=0), "tp")

    counts = jax.jit(jax.shard_map(body, mesh=mesh_of(tp), in_specs=(), out_specs=PartitionSpec()))()
    np.testing.assert_array_equal(counts, np.ones((M, 1)))


@pytest.mark.parametrize("merge", ["pmax", "all_gather"])
def test_the_body_runs_inside_a_shard_map_of_the_caller(merge, mesh_of):
    q, gates, keys, _, rows = _inputs(63)
    want = np.asarray(jit_topk(q, gates, keys, None, rows, k=K))

    def program(q, gates, keys, rows, sharded):
        idx = striped_topk_rows_local(
            q, gates, keys, None, rows, k=K, axis="tp", tp=4, stripes=StripeConfig(rows=8, merge=merge)
        )
        return idx, sharded + idx[:1, :1]

    everywhere, cut = PartitionSpec(), PartitionSpec("tp")
    run = jax.shard_map(
        program,
        mesh=mesh_of(4),
        in_specs=(everywhere, everywhere, everywhere, everywhere, cut),
        out_specs=(everywhere, cut),
        check_vma=merge == "pmax",
    )
    idx, _ = jax.jit(run)(q, gates, keys, rows, jnp.zeros((4, 1), jnp.int32))
    for copy in _every_copy(idx, 4):
        np.testing.assert_array_equal(copy, want)


def test_a_new_batch_of_the_same_shape_compiles_nothing(mesh_of, compile_counter):
    run = _striped(mesh_of(2), 8, "pmax")
    first = _inputs(63)
    jax.block_until_ready(run(*first))
    other = jax.block_until_ready(jax.tree.map(lambda x: x[::-1], first))
    with compile_counter() as compiles:
        jax.block_until_ready(run(*other))
    assert compiles.count == 0


def test_the_needle_just_past_a_stripe_edge_is_kept_on_every_device(mesh_of):
    num_keys = 601
    keys = jnp.full((num_keys, 12), -1.0).at[0].set(1.0)
    q, gates = jnp.ones((33, 3, 12)), jnp.ones((33, 3))
    rows = RowBatch(jnp.zeros(33, jnp.int32), jnp.arange(num_keys - 32, num_keys + 1, dtype=jnp.int32))
    run = _striped(mesh_of(4), 4, "pmax")
    for copy in _every_copy(run(q, gates, keys, None, rows), 4):
        np.testing.assert_array_equal(copy, np.tile(np.arange(K), (33, 1)))
    for copy in _every_copy(run(q, gates, keys[::-1], None, rows), 4):
        np.testing.assert_array_equal(copy[-1], [*range(K - 1), num_keys - 1])


def test_an_explicit_or_absent_axis_is_refused():
    explicit = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
    args = _inputs(9)
    with pytest.raises(ValueError, match="is Explicit"):
        striped_topk_rows(*args, k=K, mesh=explicit)
    with pytest.raises(ValueError, match="none is named 'rows'"):
        striped_topk_rows(*args, k=K, mesh=explicit, axis="rows")
