"""Packed attention against a dense softmax an image or a window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers import relative_error
from vitbatch.attention.blockwise import attend_blockwise
from vitbatch.attention.reference import attend_reference, attend_windows_reference
from vitbatch.attention.windowed import attend_windowed
from vitbatch.config import align
from vitbatch.lanes import Segments
from vitbatch.windows import add_windows, no_windows, window_order


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
        jax.jit(attend_blockwise, static_argnames="chunk")(q, k, v, jax.tree.map(jnp.asarray, segments), chunk=chunk)
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
    jaxpr = jax.make_jaxpr(lambda q, k, v, s: attend_blockwise(q, k, v, s, chunk=4))(
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
    with pytest.raises(ValueError, match="100 patches in 2 blocks: a block has 64 patches, or 4"):
        run(random_qkv(100, 2, 16), Segments(np.zeros(2, np.int32), np.zeros(2, np.int32)), 1)


def windows_of(grids: list[tuple[int, int]], side: int, capacity: int) -> np.ndarray:
    """The window id of each patch of a lane of images, their merged cells (of 2x2 patches) given as rows x columns."""
    windows, start = no_windows(1, capacity // 4), 0
    for rows, columns in grids:
        add_windows(windows, 0, start, rows, columns, side)
        start += align(4 * rows * columns) // 4
    return np.repeat(windows.window[0], 4)


def run_windows(qkv, grids: list[tuple[int, int]], side: int, capacity: int, chunk: int) -> np.ndarray:
    segments = segments_of([4 * rows * columns for rows, columns in grids], capacity)
    arguments = (*qkv, segments, windows_of(grids, side, capacity))
    jitted = jax.jit(attend_windowed, static_argnames=("window_patches", "chunk"))
    return np.asarray(jitted(*jax.tree.map(jnp.asarray, arguments), window_patches=4 * side**2, chunk=chunk))


RAGGED = [(9, 7), (5, 6), (4, 4), (3, 1), (1, 17)]


@pytest.mark.parametrize(("side", "chunk"), [(2, 1), (4, 5), (4, 64), (6, 3)])
def test_each_window_sees_all_of_itself_and_nothing_else(side, chunk):
    capacity = 704
    qkv, windows = random_qkv(capacity, 3, 20), windows_of(RAGGED, side, capacity)
    # What makes this a test: windows that lie across the edge of a block.
    assert any(windows[edge - 1] == windows[edge] >= 0 for edge in range(64, capacity, 64))
    got, want = run_windows(qkv, RAGGED, side, capacity, chunk), attend_windows_reference(*qkv, windows)
    assert relative_error(got, want) < 2e-6
    assert not got[windows < 0].any()


def test_windows_as_large_as_their_images_are_plain_attention():
    qkv, grids, capacity = random_qkv(320, 2, 16), [(5, 9), (2, 3)], 320
    segments = segments_of([180, 24], capacity)
    want = attend_reference(*qkv, segments.first, segments.end)
    assert relative_error(run_windows(qkv, grids, 9, capacity, 2), want) < 2e-6


def test_a_neighbour_of_nan_changes_no_bit_of_a_window():
    grids, capacity = [(9, 9), (7, 5), (6, 6)], 768
    qkv, own = random_qkv(capacity, 2, 24), slice(384, 384 + 140)
    clean = run_windows(qkv, grids, 4, capacity, chunk=4)
    for x in qkv:
        x[:384] = np.nan
        x[576:] = np.nan
    poisoned = run_windows(qkv, grids, 4, capacity, chunk=4)
    np.testing.assert_array_equal(poisoned[own], clean[own])


def test_a_window_has_the_same_bits_wherever_its_image_lies():
    qkv = random_qkv(192, 2, 24)
    shifted = [np.concatenate([x[:0], np.ones((256, *x.shape[1:]), np.float32), x]) for x in qkv]
    alone = run_windows(qkv, [(7, 6)], 4, 192, chunk=8)
    behind = run_windows(shifted, [(8, 8), (7, 6)], 4, 448, chunk=2)
    np.testing.assert_array_equal(behind[256 : 256 + 168], alone[:168])


def test_cells_stand_window_by_window_and_find_back():
    windows = no_windows(2, 48)
    add_windows(windows, 1, 16, 3, 5, 2)
    order = [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    np.testing.assert_array_equal(windows.order[1, 16:31] - 16, order)
    begin = [0] * 4 + [4] * 4 + [8] * 2 + [10] * 2 + [12] * 2 + [14]
    np.testing.assert_array_equal(windows.window[1, 16:31] - 16, begin)
    np.testing.assert_array_equal(windows.order[1][windows.place[1]], np.arange(48))
    # Padding and other lanes stay where they are, in no window.
    np.testing.assert_array_equal(windows.order[0], np.arange(48))
    assert (windows.window[0] == -1).all()
    assert (np.delete(windows.window[1], np.s_[16:31]) == -1).all()


@pytest.mark.parity
@pytest.mark.parametrize("name", ["b_1x6x10", "d_mixed", "e_big_1x12x20"])
def test_windows_are_those_of_the_reference(goldens, name):
    golden = load_file(goldens / "qwen2_5_vl" / "golden_vision.safetensors")
    side = 56 // 28
    grids = [(gh // 2, gw // 2) for t, gh, gw in golden[f"{name}.grid_thw"].tolist() for _ in range(t)]
    order, ends, base = [], [0], 0
    for rows, columns in grids:
        cells, begin = window_order(rows, columns, side)
        order += (cells + base).tolist()
        base += rows * columns
        ends += [4 * (base - rows * columns + b) for b in np.unique(begin)[1:]] + [4 * base]
    assert order == golden[f"{name}.window_index"].tolist()
    assert ends == golden[f"{name}.cu_window_seqlens"].tolist()
