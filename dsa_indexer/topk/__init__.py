"""Selection: from scores to indices."""

from jaxtyping import Array, Float32, Int32

from dsa_indexer.topk import reference

__all__ = ["require_k", "select_topk"]


def require_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k is {k}; at least 1 key must be selected a row")


def select_topk(
    scores: Float32[Array, "M N"], ks: Int32[Array, "M"], lengths: Int32[Array, "M"], *, k: int
) -> Int32[Array, "M k"]:
    """The k largest of scores[m, ks[m] : ks[m] + lengths[m]], as positions relative to ks, ascending, then -1.

    Exact, and the same on every device and in every launch: ties go to the smallest index, -0 equals 0, NaN and -inf
    rank last but are keys like any other when fewer than k are better. Columns outside the window are never read as
    scores. A length of 0 or below gives -1 alone.
    """
    return reference.select(scores, ks, lengths, k)
