"""The short causal convolution in front of a delta rule: each channel's last few rows, weighted."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from serving.config import STATE_CHUNK
from serving.models.layers import states_of, store_states
from serving.models.step import Step


@jax.named_scope("short_conv")
def short_conv(
    x: Float[Array, "T F"], weight: Float[Array, "F L"], carried: Float[Array, "S l F"], step: Step
) -> tuple[Float[Array, "T F"], Float[Array, "S l F"]]:
    """silu(sum_j weight[:, j] x[t - L + 1 + j]) over the rows of a request, and the carried rows after the pass.

    The last tap weighs the row itself. carried: the l = L - 1 rows before this pass of each request, a row a seat, as
    they came in; a request begins behind rows of zeros. float32 inside, in x's dtype.
    """
    context = weight.shape[1] - 1
    before = states_of(carried, step)
    if step.tile == 1:
        rows = jnp.concatenate([before.astype(x.dtype), x[:, None]], 1)
        return _weigh(rows, weight)[:, 0], store_states(carried, rows[:, 1:], step)

    # Requests start at whole chunks, so only a chunk's first rows look beyond it.
    blocks = jnp.pad(x, [(0, -x.shape[0] % STATE_CHUNK), (0, 0)]).reshape(-1, STATE_CHUNK, x.shape[1])
    request = step.tile_request[:: STATE_CHUNK // step.tile]
    is_first = jnp.arange(blocks.shape[0]) * STATE_CHUNK == step.first_rows[request]
    chunk_before = jnp.roll(blocks[:, STATE_CHUNK - context :], 1, axis=0)
    left = jnp.where(is_first[:, None, None], before.astype(x.dtype)[request], chunk_before)
    out = _weigh(jnp.concatenate([left, blocks], 1), weight).reshape(-1, x.shape[1])[: x.shape[0]]

    # The last rows of what it carried and its new ones together: a chunk shorter than that keeps some of the old.
    at = step.counts[:, None] + jnp.arange(-context, 0)
    new = x[step.first_rows[:, None] + jnp.maximum(at, 0)]
    old = jnp.take_along_axis(before, jnp.clip(at + context, 0, context - 1)[..., None], axis=1)
    return out, store_states(carried, jnp.where((at >= 0)[..., None], new, old.astype(x.dtype)), step)


def _weigh(rows: Float[Array, "N R F"], weight: Float[Array, "F L"]) -> Float[Array, "N r F"]:
    """silu of the weighted rows, r = R - L + 1."""
    taps, length = weight.astype(jnp.float32), rows.shape[1] - weight.shape[1] + 1
    total = sum(rows[:, j : j + length].astype(jnp.float32) * taps[:, j] for j in range(weight.shape[1]))
    return jax.nn.silu(total).astype(rows.dtype)
