"""Whether two sets of answers to the same questions differ by more than chance."""

import math


def wilson(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (E. B. Wilson, 1927)."""
    share, spread = right / asked, z * z / asked
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / asked + spread / (4 * asked))
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p of as unequal a split of the questions that changed sides (Q. McNemar, 1947): if nothing but
    chance moved them, each is as likely lost as gained."""
    moved = lost + gained
    tail = sum(math.comb(moved, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**moved)


def paired_interval(both: int, lost: int, gained: int, neither: int) -> tuple[float, float]:
    """95 % interval of (right after - right before) / asked, for answers to the same questions: the square-and-add
    interval of R. G. Newcombe (Statistics in Medicine 17, 1998, method 10), made of Wilson's for the two shares.

    both, neither: right, or wrong, before and after. lost: right before alone. gained: right after alone.
    """
    asked = both + lost + gained + neither
    before, after = both + lost, both + gained
    p, q = after / asked, before / asked
    (p_low, p_high), (q_low, q_high) = wilson(after, asked), wilson(before, asked)
    product = after * (asked - after) * before * (asked - before)
    agreement = both * neither - lost * gained
    if agreement > 0:
        agreement = max(agreement - asked / 2, 0)
    phi = agreement / math.sqrt(product) if product else 0.0
    down = (p - p_low) ** 2 - 2 * phi * (p - p_low) * (q_high - q) + (q_high - q) ** 2
    up = (p_high - p) ** 2 - 2 * phi * (p_high - p) * (q - q_low) + (q - q_low) ** 2
    return p - q - math.sqrt(max(down, 0.0)), p - q + math.sqrt(max(up, 0.0))
