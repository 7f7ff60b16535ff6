"""The packed attention kernel against a dense softmax an image, interpreted and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import relative_error
from vitbatch.attention import attend
from vitbatch.attention.reference import attend_reference, attend_windows_reference
from vitbatch.attention.tiles import AttentionTile, attention_tile
from vitbatch.attention.triton import attend_triton, attend_windows_triton, pieces_of
from vitbatch.config import align
from vitbatch.lanes import Segments
from vitstripe.platform import Platform, platform_of

CPU = Platform("cpu", "", "cpu")
TILES = [AttentionTile(64, 64, 4, 1), AttentionTile(128, 64, 4, 1), AttentionTile(128, 128, 4, 1)]


def segments_of(lengths: list[int], capacity: int) -> Segments[np.ndarray]:
    first, end, start = np.arange(capacity // 64, dtype=np.int32), np.zeros(capacity // 64, np.int32), 0
    for length in lengths:
        own = slice(start // 64, (start + align(length)) // 64)
        first[own], end[own] = own.start, start + length
        start += align(length)
    assert start <= capacity
    return Segments(first, end)


def windows_of(lengths: list[int], capacity: int, size: int) -> np.ndarray:
    """Windows of `size` patches side by side, each image's last one smaller."""
    windows, start, number = np.full(capacity, -1, np.int32), 0, 0
    for length in lengths:
        for at in range(0, length, size):
            windows[start + at : start + min(at + size, length)] = number
            number += 1
        start += align(length)
    return windows


def real_rows(segments: Segments[np.ndarray]) -> np.ndarray:
    """Which rows belong to an image, in blocks of 64."""
    row = np.arange(64 * len(segments.end))
    return row < np.repeat(segments.end, 64)


def random_qkv(capacity: int, heads: int, head_dim: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(capacity, heads, head_dim)).astype(np.float32) * s for s in (2, 2, 1)]


_attend = jax.jit(attend_triton, static_argnames=("platform", "tile", "interpret"))
_attend_windows = jax.jit(attend_windows_triton, static_argnames=("window_patches", "platform", "tile", "interpret"))


def run(qkv, segments, windows=None, size=0, dtype=jnp.float32, **options) -> np.ndarray:
    arrays = [*(jnp.asarray(x).astype(dtype) for x in qkv), jax.tree.map(jnp.asarray, segments)]
    if windows is None:
        out = _attend(*arrays, **options)
    else:
        out = _attend_windows(*arrays, jnp.asarray(windows), window_patches=size, **options)
    return np.asarray(out.astype(jnp.float32))


def interpreted(qkv, segments, windows=None, size=0, tile=TILES[1]) -> np.ndarray:
    return run(qkv, segments, windows, size, platform=CPU, tile=tile, interpret=True)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.queries}x{t.keys}")
@pytest.mark.parametrize("head_dim", [24, 72])
def test_each_image_sees_all_of_itself_and_nothing_else(head_dim, tile):
    segments = segments_of([200, 64, 65, 4], 576)
    qkv = random_qkv(576, 2, head_dim)
    got, want = interpreted(qkv, segments, tile=tile), attend_reference(*qkv, segments.first, segments.end)
    real = real_rows(segments)
    assert relative_error(got[real], want[real]) < 3e-6
    assert not got[~real].any()


def test_values_may_stand_behind_queries_and_keys():
    segments, qkv = segments_of([100, 30], 192), random_qkv(192, 2, 24)
    fused = [*qkv[:2], np.concatenate(qkv, axis=1)]
    np.testing.assert_array_equal(interpreted(fused, segments), interpreted(qkv, segments))


@pytest.mark.parametrize("size", [50, 64, 100])
def test_with_windows_each_window_sees_itself(size):
    lengths = [200, 64, 65, 4]
    segments, windows = segments_of(lengths, 576), windows_of(lengths, 576, size)
    qkv = random_qkv(576, 2, 24, seed=size)
    got = interpreted(qkv, segments, windows, size)
    assert relative_error(got, attend_windows_reference(*qkv, windows)) < 3e-6


def test_an_empty_lane_is_zero():
    assert not interpreted(random_qkv(128, 1, 16), segments_of([], 128)).any()


def test_a_neighbour_of_nan_and_padding_of_nan_change_no_bit():
    segments = segments_of([130, 100, 30], 448)
    qkv = random_qkv(448, 1, 24)
    clean = interpreted(qkv, segments)
    for x in qkv:
        x[:192] = np.nan  # the first image
        x[292:320] = np.nan  # padding of the second
        x[384:] = np.nan  # padding blocks
    poisoned = interpreted(qkv, segments)
    np.testing.assert_array_equal(poisoned[192:292], clean[192:292])
    np.testing.assert_array_equal(poisoned[320:], clean[320:])


def test_an_image_gives_the_same_bits_wherever_it_lies():
    qkv = random_qkv(192, 1, 24)
    alone = interpreted(qkv, segments_of([150], 192))
    other = random_qkv(64, 1, 24, seed=1)
    behind = [np.concatenate([b, a]) for a, b in zip(qkv, other, strict=True)]
    np.testing.assert_array_equal(interpreted(behind, segments_of([40, 150], 256))[64:214], alone[:150])


@pytest.mark.parametrize("head_dim", range(16, 129, 8))
def test_the_pieces_of_a_head_cover_it_once(head_dim):
    pieces = pieces_of(head_dim)
    owned = [c for start, width, overlap in pieces for c in range(start + overlap, start + width)]
    assert owned == list(range(head_dim))
    assert all(width >= 16 and width & (width - 1) == 0 for _, width, _ in pieces)


def test_head_dim_72_is_multiplied_as_64_and_16():
    assert pieces_of(72) == ((0, 64, 0), (56, 16, 8))


@pytest.mark.parametrize("head_dim", [8, 20, 136])
def test_other_head_dims_are_refused_by_name(head_dim):
    with pytest.raises(ValueError, match=f"head dimension {head_dim}"):
        pieces_of(head_dim)


def test_the_blocks_of_a_tiny_lane_are_refused():
    blocks = Segments(np.zeros(32, np.int32), np.zeros(32, np.int32))
    with pytest.raises(ValueError, match="a lane of 128 patches in 32 blocks; the kernel's have 64 patches"):
        interpreted(random_qkv(128, 1, 16), blocks)


def test_few_rows_are_cut_into_more_programs():
    hopper = Platform("cuda", "", "H200")
    assert attention_tile(hopper, 72, rows=16 * 65536).queries == 128
    assert attention_tile(hopper, 72, rows=16 * 1024).queries == 64


RELEASED = {"Qwen3-VL-8B": 72, "Qwen3-VL-4B": 64, "Qwen3.5-0.8B": 64, "Qwen2.5-VL": 80, "GLM-4.6V": 128, "GLM-OCR": 64}


@pytest.mark.parametrize("name", RELEASED)
def test_every_released_tower_gets_the_kernel_on_a_gpu(name):
    q = jax.ShapeDtypeStruct((64, 4, RELEASED[name]), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((64, 12, RELEASED[name]), jnp.bfloat16)
    block = jax.ShapeDtypeStruct((1,), jnp.int32)

    def kernels(kind: str, q: jax.ShapeDtypeStruct) -> int:
        platform = Platform(kind, "gfx950" if kind == "rocm" else "", "")
        traced = jax.make_jaxpr(lambda *x: attend(*x, platform=platform))(q, q, values, Segments(block, block))
        return str(traced).count("pallas_call[")

    assert [kernels(kind, q) for kind in ("cuda", "rocm", "cpu")] == [1, 1, 0]
    assert kernels("cuda", jax.ShapeDtypeStruct(q.shape, jnp.float32)) == 0


def test_tiles_that_cannot_run_are_refused():
    with pytest.raises(ValueError, match="queries is 96"):
        AttentionTile(96, 64, 4, 1)
    with pytest.raises(ValueError, match="3 warps"):
        AttentionTile(64, 64, 3, 1)
    with pytest.raises(ValueError, match="head dimension 256 is over 128"):
        attention_tile(CPU, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
def test_on_a_gpu_bfloat16_stays_within_a_hundredth(head_dim):
    lengths, capacity = [1000, 300, 64, 65, 4], 1664
    segments, platform = segments_of(lengths, capacity), platform_of(jax.devices()[0])
    qkv = random_qkv(capacity, 5, head_dim, seed=head_dim)
    rounded = [np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)) for x in qkv]
    want, real = attend_reference(*rounded, segments.first, segments.end), real_rows(segments)
    # Freed memory of the output's size holds NaN, so that a row nobody wrote shows.
    jnp.full((capacity, 5, head_dim), jnp.nan, jnp.bfloat16).block_until_ready().delete()
    got = run(qkv, segments, dtype=jnp.bfloat16, platform=platform)
    assert np.isfinite(got).all()
    assert np.linalg.norm(got[real] - want[real]) < 1e-2 * np.linalg.norm(want[real])
    assert not got[~real].any()
    np.testing.assert_array_equal(run(qkv, segments, dtype=jnp.bfloat16, platform=platform), got)


@pytest.mark.gpu
def test_on_a_gpu_windows_stay_within_a_hundredth():
    lengths, capacity, size = [1000, 300, 65], 1472, 64
    segments, windows = segments_of(lengths, capacity), windows_of(lengths, capacity, size)
    qkv = random_qkv(capacity, 3, 80)
    rounded = [np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)) for x in qkv]
    got = run(qkv, segments, windows, size, dtype=jnp.bfloat16, platform=platform_of(jax.devices()[0]))
    want = attend_windows_reference(*rounded, windows)
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


@pytest.mark.gpu
def test_on_a_gpu_a_neighbour_of_nan_changes_no_bit():
    segments, platform = segments_of([330, 100, 30], 576), platform_of(jax.devices()[0])
    qkv = random_qkv(576, 2, 72)
    clean = run(qkv, segments, dtype=jnp.bfloat16, platform=platform)
    for x in qkv:
        x[:384] = np.nan
    np.testing.assert_array_equal(run(qkv, segments, dtype=jnp.bfloat16, platform=platform)[384:], clean[384:])
