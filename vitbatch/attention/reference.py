"""The obvious attention: one dense softmax an image, in numpy. Slow; what the implementations are tested against."""

import numpy as np
from jaxtyping import Float, Int

from vitbatch.config import ATTENTION_BLOCK


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
    for block, stop in enumerate(end):
        start = int(first[block]) * ATTENTION_BLOCK
        if stop == 0 or first[block] != block:
            continue
        own = slice(start, int(stop))
        scores = np.einsum("qhd,khd->hqk", q[own].astype(np.float64), k[own].astype(np.float64))
        scores /= np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[own] = np.einsum("hqk,khd->qhd", weights, v[own].astype(np.float64))
    return out
