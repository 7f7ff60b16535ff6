"""Attention in tiny lanes against a dense softmax an image or a window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import relative_error
from vitbatch.attention import attend, attend_windows
from vitbatch.attention.reference import attend_reference, attend_windows_reference
from vitbatch.attention.tiny import attend_tiny
from vitbatch.config import TINY_BLOCK, room
from vitbatch.lanes import Segments
from vitstripe.platform import Platform

LENGTHS, CAPACITY = [64, 16, 36, 4, 60, 8, 52], 384
ON_CPU, ON_GPU = Platform("cpu", "", "cpu"), Platform("rocm", "gfx942", "MI300X")


def starts(lengths: list[int]) -> list[int]:
    return np.cumsum([0] + [room(n, TINY_BLOCK) for n in lengths])[:-1].tolist()


def segments_of(lengths: list[int], capacity: int = CAPACITY) -> Segments[np.ndarray]:
    first, end = np.arange(capacity // 4, dtype=np.int32), np.zeros(capacity // 4, np.int32)
    for start, length in zip(starts(lengths), lengths, strict=True):
        own = slice(start // 4, (start + length) // 4)
        first[own], end[own] = own.start, start + length
    return Segments(first, end)


def random_qkv(heads: int = 3, head_dim: int = 20) -> list[np.ndarray]:
    draw = np.random.default_rng(5)
    return [draw.normal(size=(CAPACITY, heads, head_dim)).astype(np.float32) * s for s in (2, 2, 1)]


def run(qkv, lengths: list[int], chunk: int | None, windows: np.ndarray | None = None) -> np.ndarray:
    arrays = jax.tree.map(jnp.asarray, (*qkv, segments_of(lengths), windows))
    return np.asarray(jax.jit(attend_tiny, static_argnames="chunk")(*arrays, chunk=chunk))


@pytest.mark.parametrize("chunk", [1, 5, 8, None])
def test_each_image_sees_all_of_itself_and_nothing_else(chunk):
    qkv, segments = random_qkv(), segments_of(LENGTHS)
    got = run(qkv, LENGTHS, chunk)
    assert relative_error(got, attend_reference(*qkv, segments.first, segments.end)) < 2e-6
    assert not got[starts(LENGTHS)[-1] + 52 :].any()


@pytest.mark.parametrize("chunk", [3, None])
def test_an_image_has_the_same_bits_wherever_it_lies_and_whatever_lies_beside_it(chunk):
    qkv, at = random_qkv(), starts(LENGTHS)
    got = run(qkv, LENGTHS, chunk)
    for i, length in enumerate(LENGTHS):
        alone = run([np.roll(x, -at[i], axis=0) for x in qkv], [length], chunk)
        np.testing.assert_array_equal(alone[:length], got[at[i] : at[i] + length])
        assert not alone[length:].any()
    # To the last rows of a lane, past which there is nothing to read.
    behind = [16] * 20 + [60]
    moved = run([np.roll(x, 320 - at[4], axis=0) for x in qkv], behind, chunk)
    np.testing.assert_array_equal(moved[320:380], got[at[4] : at[4] + 60])


@pytest.mark.parametrize("chunk", [2, None])
def test_a_neighbour_of_nan_changes_no_bit(chunk):
    qkv, at = random_qkv(), starts(LENGTHS)
    clean = run(qkv, LENGTHS, chunk)
    for x in qkv:
        x[: at[2]] = np.nan
        x[at[3] + 4 : at[4]] = np.nan  # the rest of the least room
        x[at[-1] + 52 :] = np.nan
    poisoned = run(qkv, LENGTHS, chunk)
    np.testing.assert_array_equal(poisoned[at[2] : at[3]], clean[at[2] : at[3]])
    np.testing.assert_array_equal(poisoned[at[3] : at[3] + 4], clean[at[3] : at[3] + 4])
    assert not poisoned[at[-1] + 52 :].any()


def test_an_empty_lane_is_zero():
    assert not run(random_qkv(), [], 8).any()
    assert not run(random_qkv(), [], None).any()


@pytest.mark.parametrize("platform", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_tiny_lanes_are_told_from_others_by_their_blocks(platform):
    """Also where other lanes take the kernel, which knows no tiny blocks."""
    q, k, v = random_qkv(2, 24)
    segments, fused = segments_of(LENGTHS), np.concatenate([q, k, v], axis=1)
    arrays = jax.tree.map(jnp.asarray, (q, k, fused, segments))
    got = jax.jit(lambda *a: attend(*a, platform=platform))(*arrays)
    assert relative_error(np.asarray(got), attend_reference(q, k, v, segments.first, segments.end)) < 2e-6
    windows = np.full(CAPACITY, -1, np.int32)
    for start, length in zip(starts(LENGTHS), LENGTHS, strict=True):
        windows[start : start + length] = start + np.arange(length) // 24
    got = jax.jit(lambda *a: attend_windows(*a, window_patches=24, platform=platform))(*arrays, jnp.asarray(windows))
    assert relative_error(np.asarray(got), attend_windows_reference(q, k, v, windows)) < 2e-6
