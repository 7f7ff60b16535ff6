"""Rows of scores that selections get wrong, and what is right for them."""

import jax
import jax.numpy as jnp
import numpy as np

from dsa_indexer.topk import reference
from dsa_indexer.topk.order import INT_MAX, ForcedTokens, window_order


def hard_rows(num_keys: int, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 [num_keys] rows by what is hard about them."""
    draw = np.random.default_rng(seed)
    n = num_keys
    number = np.arange(n)
    normal = lambda: draw.normal(size=n)  # noqa: E731  (a name for what most rows start from)
    every_nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    rows = {
        "normal": normal(),
        "few values": draw.integers(0, 3, n),
        "rounded": np.round(normal(), 1),
        "ascending": np.sort(normal()),
        "descending": -np.sort(normal()),
        "constant": np.full(n, 0.3),
        "both zeros": np.where(number % 2, 0.0, -0.0),
        "zeros and some above": np.maximum(normal() - 1.5, 0),
        "all -inf": np.full(n, -np.inf),
        "NaN, inf and numbers": np.where(number % 3 == 0, np.nan, np.where(number % 7 == 0, np.inf, normal())),
        "every NaN": np.where(number % 2 == 0, np.resize(every_nan, n), -np.inf),
        "subnormal": 1e-41 * draw.integers(-5, 5, n),
        "largest at the start": normal() + 100 * (number < n // 30),
        "largest at the end": normal() + 100 * (number >= n - n // 30),
        "largest in a cluster": normal() + 50 * (abs(number - n // 2) < n // 100),
        "largest where a sample looks": normal() + 30 * (number % 128 == 0),
        "largest where no sample looks": normal() + 30 * (number % 128 == 64),
        "runs of equals": np.repeat(normal()[: -(-n // 64)], 64)[:n],
        "heavy tails": draw.standard_cauchy(n),
        "many magnitudes": np.exp(5 * normal()),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


def right_selection(scores, ks, lengths, k: int, forced: ForcedTokens) -> np.ndarray:
    """What `lax.top_k` over whole rows selects: int32 [M, k], relative to ks, ascending, then -1."""

    @jax.jit
    def select(scores, ks, lengths):
        column = reference.select(window_order(scores, ks, lengths, forced), k)
        return jnp.where(column == INT_MAX, -1, column - ks[:, None])

    return np.asarray(select(*(jnp.asarray(x) for x in (scores, ks, lengths))))
