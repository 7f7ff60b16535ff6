"""Hyper-connections (mHC, GLM-5.3-Flash): N residual streams in the place of one, mixed anew for every token.

A site stands before each mixer and each MLP of a layer, y = F(norm(x)):

    streams h [N, D]  --pre-->  x [D]  --F-->  y [D]
            |                                  |
            +---- C^T (doubly stochastic) ---- + ---- post [N] y  -->  streams [N, D]

There is no other residual path. All weights of the mixing come from the streams themselves, in float32.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from serving.models.sinkhorn import sinkhorn
from vitstripe.nn import param
from vitstripe.platform import Platform


@dataclass(frozen=True)
class HyperConfig:
    """streams N; iterations: of the Sinkhorn normalisation, the first half step included; eps: `hc_eps`, added where
    the normalisation divides and to `pre`; norm_eps: `rms_norm_eps`, of the norm over all streams."""

    streams: int
    iterations: int
    eps: float
    norm_eps: float

    def __post_init__(self):
        for name in ("streams", "iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"HyperConfig.{name} is {getattr(self, name)}; it must be at least 1")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mixing:
    """How a site's output joins the streams, float32: post [T, N], and C [T, from, to]."""

    post: Any
    streams: Any


def spread(x: Float[Array, "T D"], streams: int) -> Float[Array, "T N D"]:
    """The streams before the first layer: N copies."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], streams, x.shape[1]))


def collapse(h: Float[Array, "T N D"]) -> Float[Array, "T D"]:
    """The row after the last layer: the mean of the streams."""
    return h.astype(jnp.float32).mean(1).astype(h.dtype)


def join(h: Float[Array, "T N D"], y: Float[Array, "T D"], mixing: Mixing) -> Float[Array, "T N D"]:
    """stream j = post[j] * y + sum_i C[i, j] * h[i], in float32, rounded once to h's dtype."""
    out = mixing.post[:, :, None] * y.astype(jnp.float32)[:, None]
    # A sum of N products: as a batched product of N x N matrices this would leave a GPU idle.
    for i in range(h.shape[1]):
        out = out + mixing.streams[:, i, :, None] * h[:, i, None].astype(jnp.float32)
    return out.astype(h.dtype)


class HyperConnection(nnx.Module):
    """One site. fn [(2 + N) N, N D], base [(2 + N) N], scale [3]: N rows of pre, N of post, then C by rows. float32,
    and the same on every device."""

    def __init__(self, features: int, config: HyperConfig):
        n = config.streams
        self.fn = param(((2 + n) * n, n * features), jnp.float32)
        self.base = param(((2 + n) * n,), jnp.float32)
        self.scale = param((3,), jnp.float32)
        self.config = config

    @jax.named_scope("hyper")
    def __call__(self, h: Float[Array, "T N D"], platform: Platform | None) -> tuple[Float[Array, "T D"], Mixing]:
        """(what the site's layer reads, before its own norm; how its output joins the streams). platform: what it is
        compiled for, None for the first device."""
        c, n = self.config, self.config.streams
        flat = h.reshape(h.shape[0], -1).astype(jnp.float32)
        # HIGHEST, because the default of some GPUs multiplies float32 in a shorter format.
        maps = lax.dot_general(flat, self.fn[...], (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        maps = maps * lax.rsqrt(jnp.square(flat).mean(-1, keepdims=True) + c.norm_eps)
        scale, base = self.scale[...], self.base[...]
        pre = jax.nn.sigmoid(maps[:, :n] * scale[0] + base[:n]) + c.eps
        post = 2 * jax.nn.sigmoid(maps[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        logits = (maps[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        x = sum(pre[:, i, None] * h[:, i].astype(jnp.float32) for i in range(n))
        streams = sinkhorn(logits, iterations=c.iterations, eps=c.eps, platform=platform)
        return jnp.asarray(x).astype(h.dtype), Mixing(post, streams)
