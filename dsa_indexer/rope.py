"""Rotary frequencies of index heads, plain and YaRN.

The indexer takes cos and sin, so whoever has tables of their own needs nothing of this.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int


@dataclass(frozen=True)
class Yarn:
    """YaRN's stretching of the rotary frequencies (arXiv 2309.00071), with the field names of Hugging Face.

    factor: how much longer than original_max_position_embeddings the context became. Frequencies that turn more than
    beta_fast times within the original context stay, those that turn less than beta_slow times are divided by factor,
    and a linear ramp lies in between. attention_factor, or else mscale and mscale_all_dim, set `amplitude`.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    def __post_init__(self):
        if not self.factor >= 1:
            raise ValueError(f"Yarn.factor is {self.factor!r}; it must be at least 1")
        if self.original_max_position_embeddings < 1:
            raise ValueError(
                f"Yarn.original_max_position_embeddings is {self.original_max_position_embeddings}; it must be positive"
            )
        if not self.beta_fast >= self.beta_slow > 0:
            raise ValueError(
                f"Yarn.beta_fast is {self.beta_fast} and beta_slow {self.beta_slow}; need beta_fast >= beta_slow > 0"
            )

    @property
    def amplitude(self) -> float:
        """The factor on cos and sin: attention_factor where given; else the quotient of the magnitudes of mscale and
        mscale_all_dim where both are given (1 for DeepSeek-V3.2); else the magnitude 0.1 ln(factor) + 1."""
        if self.attention_factor is not None:
            return self.attention_factor

        def magnitude(mscale: float) -> float:
            return 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return magnitude(self.mscale) / magnitude(self.mscale_all_dim)
        return magnitude(1.0)

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], max_position_embeddings: int | None = None) -> "Yarn":
        """Reads rope_parameters or rope_scaling. original_max_position_embeddings falls back to the model's
        max_position_embeddings. Raises ValueError for a missing factor or original length."""
        original = rope.get("original_max_position_embeddings") or max_position_embeddings
        if rope.get("factor") is None or original is None:
            raise ValueError("config.json has a YaRN rope without factor or original_max_position_embeddings")
        optional = {name: rope.get(name) for name in ("mscale", "mscale_all_dim", "attention_factor")}
        return cls(
            factor=float(rope["factor"]),
            original_max_position_embeddings=int(original),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            **{name: None if value is None else float(value) for name, value in optional.items()},
        )


def inverse_frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> np.ndarray:
    """float32 [dim / 2]: the angle a pair of the `dim` rotated dimensions turns from one position to the next.

    Plain: theta^(-2j / dim) for pair j.
    """
    base = theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if yarn is None:
        return (1 / base).astype(np.float32)

    def pair_that_turns(times: float) -> float:
        original = yarn.original_max_position_embeddings
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
    # The reference avoids a division by zero with this very number.
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return (ramp / (yarn.factor * base) + (1 - ramp) / base).astype(np.float32)


def rope_tables(
    positions: Int[Array, "*B"], inverse: Float32[np.ndarray, "r"], amplitude: float = 1.0
) -> tuple[Float32[Array, "*B r"], Float32[Array, "*B r"]]:
    """cos and sin of every position's angles, times `amplitude` (`Yarn.amplitude`, for implementations that share one
    table between attention and indexer, as transformers does; the serving engines leave the indexer at 1)."""
    angles = positions.astype(jnp.float32)[..., None] * inverse
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude
