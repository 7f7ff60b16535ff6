"""Packed attention against a dense softmax an image."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import relative_error
from vitbatch.attention import attend
from vitbatch.attention.reference import attend_reference
from vitbatch.config import align
from vitbatch.lanes import Segments


def segments_of(lengths: list[int], capacity: int) -> Segments[np.ndarray]:
    first, end = np.arange(capacity // 64, dtype=np.int32), np.zeros(capacity // 64, np.int32)
    start = 0
    for length in lengths:
        own = slice(start // 64, (start + align(length)) // 64)
        first[own], end[own] = own.start, start + length
        start += align(length)
    assert start <= capacity
    return Segments(first, end)


def random_qkv(capacity: int, heads: int, head_dim: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(capacity, heads, head_dim)).astype(np.float32) * s for s in (2, 2, 1)]


def run(qkv, segments: Segments, chunk: int) -> np.ndarray:
    q, k, v = (jnp.asarray(x) for x in qkv)
    return np.asarray(
        jax.jit(attend, static_argnames="chunk")(q, k, v, jax.tree.map(jnp.asarray, segments), chunk=chunk)
    )


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [([300, 64, 65, 4], 704), ([4], 64), ([448], 448), ([100, 100, 12], 448)],
)
def test_each_image_sees_all_of_itself_and_nothing_else(lengths, capacity, chunk):
    qkv, segments = random_qkv(capacity, 3, 20), segments_of(lengths, capacity)
    got, want = run(qkv, segments, chunk), attend_reference(*qkv, segments.first, segments.end)
    real = np.concatenate([np.arange(s, s + n) for s, n in zip(starts(lengths), lengths, strict=True)])
    assert relative_error(got[real], want[real]) < 2e-6


def starts(lengths: list[int]) -> list[int]:
    return np.cumsum([0] + [align(n) for n in lengths[:-1]]).tolist()


def test_rows_that_see_no_key_are_zero_and_not_nan():
    got = run(random_qkv(256, 2, 16), segments_of([70], 256), chunk=8)
    assert np.isfinite(got).all()
    assert not got[128:].any()
    assert not run(random_qkv(128, 2, 16), segments_of([], 128), chunk=8).any()


def test_a_neighbour_of_nan_changes_no_bit():
    lengths, capacity = [320, 100, 30], 576
    qkv, segments = random_qkv(capacity, 2, 24), segments_of(lengths, capacity)
    clean = run(qkv, segments, chunk=4)
    for x in qkv:
        x[:320] = np.nan
    poisoned = run(qkv, segments, chunk=4)
    np.testing.assert_array_equal(poisoned[320:], clean[320:])
    assert np.isnan(poisoned[:320]).all()


def test_large_scores_do_not_overflow():
    q, k, v = random_qkv(192, 2, 16)
    segments = segments_of([150], 192)
    got, want = (
        run([q * 300, k * 300, v], segments, 2),
        attend_reference(q * 300, k * 300, v, segments.first, segments.end),
    )
    # Float32 scores near 1e6 carry an error of a tenth; only the near-ties move.
    assert np.isfinite(got).all()
    assert np.quantile(np.abs(got[:150] - want[:150]), 0.9) < 1e-3


def test_no_array_grows_with_the_square_of_the_lane():
    capacity, heads, head_dim = 1024, 2, 16
    shape = jax.ShapeDtypeStruct((capacity, heads, head_dim), jnp.float32)
    blocks = jax.ShapeDtypeStruct((capacity // 64,), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda q, k, v, s: attend(q, k, v, s, chunk=4))(
        shape, shape, shape, Segments(blocks, blocks)
    )
    largest = max(
        int(np.prod(var.aval.shape)) for jaxpr in every_jaxpr(jaxpr.jaxpr) for e in jaxpr.eqns for var in e.outvars
    )
    assert largest <= capacity * heads * head_dim


def every_jaxpr(jaxpr):
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from every_jaxpr(inner)


def test_a_lane_of_partial_blocks_is_refused():
    with pytest.raises(ValueError, match="100 patches is not a multiple of 64"):
        run(random_qkv(100, 2, 16), Segments(np.zeros(2, np.int32), np.zeros(2, np.int32)), 1)
