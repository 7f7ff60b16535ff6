"""The obvious attention: one dense softmax an image or a window, in numpy. Slow; what the implementations are tested
against."""

import numpy as np
from jaxtyping import Float, Int

from vitbatch.attention.blocks import block_size


def attend_reference(
    q: Float[np.ndarray, "C H D"],
    k: Float[np.ndarray, "C H D"],
    v: Float[np.ndarray, "C H D"],
    first: Int[np.ndarray, "B"],
    end: Int[np.ndarray, "B"],
) -> Float[np.ndarray, "C H D"]:
    """float64 softmax(q k^T / sqrt(D)) v within each image; rows outside any image are 0. `first` and `end` as in
    `Segments`."""
    out = np.zeros(q.shape, np.float64)
    size = block_size(len(q), len(first))
    for block, stop in enumerate(end):
        start = int(first[block]) * size
        if stop == 0 or first[block] != block:
            continue
        own = slice(start, int(stop))
        out[own] = _softmax_attention(q[own], k[own], v[own])
    return out


def attend_windows_reference(
    q: Float[np.ndarray, "C H D"],
    k: Float[np.ndarray, "C H D"],
    v: Float[np.ndarray, "C H D"],
    windows: Int[np.ndarray, "C"],
) -> Float[np.ndarray, "C H D"]:
    """float64 softmax(q k^T / sqrt(D)) v among the patches of each window id; rows with id -1 are 0."""
    out = np.zeros(q.shape, np.float64)
    for window in np.unique(windows[windows >= 0]):
        own = np.flatnonzero(windows == window)
        out[own] = _softmax_attention(q[own], k[own], v[own])
    return out


def _softmax_attention(
    q: Float[np.ndarray, "N H D"], k: Float[np.ndarray, "N H D"], v: Float[np.ndarray, "N H D"]
) -> Float[np.ndarray, "N H D"]:
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k.astype(np.float64)) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v.astype(np.float64))
