"""The gated delta rule: the recurrence of gated delta nets (one decay a head) and of KDA (one a key channel).

A head keeps a state S [K, V], float32, zero at a request's start. Per token, with decay g <= 0 and input gate beta:

    S <- exp(g) S            d = beta (v - S^T k)            S <- S + k d^T            o = S^T q

`delta_step` is one token of many requests. `delta_chunked` takes the rows of a prefill pass in chunks of C = 64. With
G the sum of g from the chunk's start to a row, S0 the state before the chunk, and rows r and i of it:

    A[r, i] = beta_r k_r . (exp(G_r - G_i) k_i)  for i < r       P[r, i] = q_r . (exp(G_r - G_i) k_i)  for i <= r
    (I + A) U = beta (V - (K exp G) S0)                            O = (Q exp G) S0 + P U
    S after the chunk = exp(G_C) S0 + (K exp(G_C - G))^T U

so all is matrix products, and only S0 goes from chunk to chunk. Source: Yang, Wang, Zhang, Shen, Kim, "Parallelizing
Linear Transformers with the Delta Rule over Sequence Length", 2024, with decays as in "Gated Delta Networks", 2025.

What keeps it accurate in float32:
  - exponents are sums of g over the rows between, never differences of two long sums;
  - with a decay a channel exp(G_r - G_i) is split into a factor a row at a border between blocks of 16 rows, where both
    factors are at most 1, and inside a block at its middle row, where they are if the decays are bounded;
  - (I + A) is solved by substitution. Its inverse as a product of powers loses every digit where keys are alike, and
    keys of repeated tokens are.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from serving.config import STATE_CHUNK
from serving.models.layers import states_of, store_states
from serving.models.step import Step

BLOCK = 16
"""Rows whose decays are split at one row."""
_BLOCKS = STATE_CHUNK // BLOCK
_LARGEST_EXPONENT = 80.0  # exp of it, and of a sum of a thousand of it, is finite in float32
_EXACT = lax.Precision.HIGHEST

_INCLUDED = np.tril(np.ones((BLOCK, BLOCK), np.float32))  # [r, j]: j <= r
_FROM_MIDDLE = _INCLUDED - _INCLUDED[BLOCK // 2]  # the sum from the middle row to r, negative before it


def l2_normalise(x: Float[Array, "*B K"], *, eps: float = 1e-6) -> Float[Array, "*B K"]:
    """x / sqrt(sum x^2 + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + eps)


@jax.named_scope("delta_rule")
def delta_rule(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    g: Float[Array, "T H D"],
    beta: Float[Array, "T H"],
    states: Float[Array, "S H K V"],
    step: Step,
    *,
    gate_floor: float | None = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "S H K V"]]:
    """The rule over the rows of a pass and the requests' states, a row of `states` a seat: (o float32, new states).

    q: scaled and normalised. k: normalised. g: log of the decay, at most 0; D is K, or 1 for one a head. gate_floor: a
    bound that g is never below, None for no bound; it chooses the faster form of a decay a channel. Padding rows change
    nothing.
    """
    real = step.lengths > 0
    g, beta = jnp.where(real[:, None, None], g, 0), jnp.where(real[:, None], beta, 0)
    if step.tile == 1:
        return _one_token_each(q, k, v, g, beta, states, step)
    at = jnp.arange(0, q.shape[0], STATE_CHUNK)
    request = step.tile_request[:: STATE_CHUNK // step.tile]
    first, count = step.first_rows[request], step.counts[request]
    seats = jnp.where((first <= at) & (at < first + count), step.seats[request], states.shape[0])
    fresh = (at == first) & (step.starts[request] == 0)
    return delta_chunked(q, k, v, g, beta, states, seats, fresh, gate_floor=gate_floor)


def _one_token_each(q, k, v, g, beta, states: Float[Array, "S H K V"], step: Step):
    """`delta_rule` of a decode pass. Where most seats take part the rows go to the seats, not the states to the rows:
    states are megabytes, and so they are read and written where they lie. The other seats get g = beta = 0."""
    seats, count = step.seats, states.shape[0]
    if 2 * seats.shape[0] <= count:
        o, new = delta_step(q, k, v, g, beta, states_of(states, step))
        return o, store_states(states, new, step)

    nobody = seats.shape[0]
    row_of = jnp.full(count, nobody).at[seats].set(jnp.arange(nobody), mode="drop")

    def seated(x: Array) -> Array:
        return x.at[row_of].get(mode="fill", fill_value=0)

    fresh = seated(step.starts == 0)[:, None, None, None]
    q, k, v, g, beta = (seated(x) for x in (q, k, v, g, beta))
    o, new = delta_step(q, k, v, g, beta, jnp.where(fresh, 0, states))
    return o[jnp.minimum(seats, count - 1)], new


def delta_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H D"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """One token of B requests: (o, new state), float32."""
    q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
    decayed = state * jnp.exp(g)[..., None]
    # The state is read once for both products and once to be written: o is that of the old one and what d adds to it.
    of_k, of_q = (decayed * k[..., None]).sum(-2), (decayed * q[..., None]).sum(-2)
    d = beta[..., None] * (v - of_k)
    o = of_q + (q * k).sum(-1, keepdims=True) * d
    return o, decayed + k[..., None] * d[..., None, :]


def delta_recurrent(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    g: Float[Array, "T H D"],
    beta: Float[Array, "T H"],
    state: Float[Array, "H K V"],
) -> tuple[Float[Array, "T H V"], Float[Array, "H K V"]]:
    """The recurrence over the tokens of one request, one after another: what `delta_chunked` must equal."""

    def token(state, row):
        o, state = delta_step(*[x[None] for x in (*row, state)])
        return state[0], o[0]

    state, o = lax.scan(token, state, (q, k, v, g, beta))
    return o, state


def delta_chunked(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    g: Float[Array, "T H D"],
    beta: Float[Array, "T H"],
    states: Float[Array, "S H K V"],
    seats: Int[Array, " N"],
    fresh: Bool[Array, " N"],
    *,
    gate_floor: float | None = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "S H K V"]]:
    """The rule over N = ceil(T / 64) chunks: (o float32, states with those of `seats` as they are after their last).

    seats: the row of `states` each chunk goes on with; chunks of one seat follow one another, and one past the end is
    not kept. fresh: the chunk begins from zero. g = beta = 0 makes a row change nothing.
    """
    rows, chunks = q.shape[0], seats.shape[0]

    def split(x: Array) -> Array:
        """[T, H, F] -> float32 [N, H, C, F]"""
        x = jnp.pad(x.astype(jnp.float32), [(0, chunks * STATE_CHUNK - rows), (0, 0), (0, 0)])
        return jnp.swapaxes(x.reshape(chunks, STATE_CHUNK, *x.shape[1:]), 1, 2)

    q, k, v, g, beta = (split(x) for x in (q, k, v, g, beta[..., None]))
    inside, outside = _sums(g)
    before, after = _whole(inside, inside[..., -1, :], 0), _whole(outside, inside[..., -1, :], 1)
    products = _products(jnp.stack([k, q]), k, g, inside, outside, gate_floor)
    lower = jnp.tril(beta * products[0], -1)
    # What a chunk adds by itself, and what it takes back of the state before it.
    solved = _solve(lower, beta * jnp.concatenate([v, k * jnp.exp(before)], -1))
    own, taken = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    reads = jnp.concatenate([taken, q * jnp.exp(before)], -2)
    writes = jnp.concatenate([products[1], jnp.swapaxes(k * jnp.exp(after), -1, -2)], -2)
    decay = jnp.exp(inside[..., -1, :].sum(-2))[..., None]

    def chunk(states, args):
        own, reads, writes, decay, seat, is_fresh = args
        old = lax.dynamic_index_in_dim(states, seat, 0, keepdims=False)
        state = jnp.where(is_fresh, 0, old)
        read = _matmul(reads, state)
        new_values = own - read[:, :STATE_CHUNK]
        written = _matmul(writes, new_values)
        o = read[:, STATE_CHUNK:] + written[:, :STATE_CHUNK]
        new = jnp.where(seat < states.shape[0], decay * state + written[:, STATE_CHUNK:], old)
        return lax.dynamic_update_index_in_dim(states, new, seat, 0), o

    states, o = lax.scan(chunk, states, (own, reads, writes, decay, seats, fresh))
    return jnp.swapaxes(o, 1, 2).reshape(chunks * STATE_CHUNK, *o.shape[1:2], -1)[:rows], states


def _matmul(a: Float[Array | np.ndarray, "*A M N"], b: Float[Array, "*B N P"]) -> Float[Array, "*C M P"]:
    return jnp.matmul(a, b, precision=_EXACT, preferred_element_type=jnp.float32)


def _blocks(x: Float[Array, "*B C D"]) -> Float[Array, "*B J b D"]:
    return x.reshape(*x.shape[:-2], _BLOCKS, BLOCK, x.shape[-1])


def _sums(g: Float[Array, "*B C D"]) -> tuple[Float[Array, "*B J b D"], Float[Array, "*B J b D"]]:
    """Of each row, the sum of g from its block's start to it, itself included, and that from behind it to the end."""
    blocks = _blocks(g)
    return _matmul(_INCLUDED, blocks), _matmul(1 - _INCLUDED, blocks)


def _whole(within: Float[Array, "*B J b D"], totals: Float[Array, "*B J D"], behind: int) -> Float[Array, "*B C D"]:
    """Sums within a block to sums within the chunk: with the totals of all blocks before it, or (1) behind it."""
    order = np.arange(_BLOCKS)
    others = order[:, None] < order if behind else order[:, None] > order
    more = _matmul(others.astype(np.float32), totals)
    return (within + more[..., None, :]).reshape(*within.shape[:-3], STATE_CHUNK, within.shape[-1])


def _products(
    rows: Float[Array, "X *B C K"],
    keys: Float[Array, "*B C K"],
    g: Float[Array, "*B C D"],
    inside: Float[Array, "*B J b D"],
    outside: Float[Array, "*B J b D"],
    gate_floor: float | None,
) -> Float[Array, "X *B C C"]:
    """[r, i] = rows_r . (exp(G_r - G_i) keys_i) for i <= r, 0 elsewhere, of each of X kinds of rows."""
    order = np.arange(STATE_CHUNK)
    if g.shape[-1] == 1:
        # [r, i]: the sum of g over rows j with i < j <= r.
        between = _matmul((order[:, None] >= order).astype(np.float32), jnp.where(order[:, None] > order, g, 0))
        decay = jnp.exp(jnp.where(order[:, None] >= order, between, -jnp.inf))
        return _matmul(rows, jnp.swapaxes(keys, -1, -2)) * decay

    row_blocks, key_blocks, g_blocks = _blocks(rows), _blocks(keys), _blocks(g)
    if gate_floor is not None and -gate_floor * BLOCK <= _LARGEST_EXPONENT:
        middle = _matmul(_FROM_MIDDLE, g_blocks)
        diagonal = _matmul(row_blocks * jnp.exp(middle), jnp.swapaxes(key_blocks * jnp.exp(-middle), -1, -2))
    else:
        j = np.arange(BLOCK)
        span = (j[:, None, None] >= j) & (j > j[:, None])  # [r, i, j]: i < j <= r
        between = jnp.einsum("rij,...jk->...rik", span.astype(np.float32), g_blocks, precision=_EXACT)
        pairs = jnp.exp(between) * key_blocks[..., None, :, :]
        diagonal = (row_blocks[..., None, :] * pairs).sum(-1)
    diagonal = jnp.where(_INCLUDED > 0, diagonal, 0)

    reduced = row_blocks * jnp.exp(inside)  # to the border before the row's block
    lines, carried = [], jnp.zeros_like(outside[..., :0, :, :])
    for block in range(_BLOCKS):
        # carried: the sum of g from behind each earlier row to the border before this block.
        earlier = (key_blocks[..., :block, :, :] * jnp.exp(carried)).reshape(*keys.shape[:-2], -1, keys.shape[-1])
        left = _matmul(reduced[..., block, :, :], jnp.swapaxes(earlier, -1, -2))
        right = jnp.zeros((*left.shape[:-1], STATE_CHUNK - (block + 1) * BLOCK), left.dtype)
        lines.append(jnp.concatenate([left, diagonal[..., block, :, :], right], -1))
        total = inside[..., block, -1:, :]
        carried = jnp.concatenate([carried + total[..., None, :, :], outside[..., block : block + 1, :, :]], -3)
    return jnp.concatenate(lines, -2)


def _solve(lower: Float[Array, "*B C C"], right: Float[Array, "*B C F"]) -> Float[Array, "*B C F"]:
    """(I + lower)^-1 right for a strictly lower triangular matrix: by substitution inside blocks, then over blocks."""
    eye = jnp.eye(BLOCK)
    corners = [slice(at, at + BLOCK) for at in range(0, STATE_CHUNK, BLOCK)]
    diagonal = jnp.stack([lower[..., c, c] for c in corners], -3)

    def substitute(r, inverse):
        line = lax.dynamic_index_in_dim(diagonal, r, -2, keepdims=False)
        # A sum of products, not a matrix product: these are thousands of single rows of 16.
        row = eye[r] - (line[..., None] * inverse).sum(-2)
        return lax.dynamic_update_index_in_dim(inverse, row, r, inverse.ndim - 2)

    inverse = lax.fori_loop(1, BLOCK, substitute, jnp.broadcast_to(eye, diagonal.shape))
    solved = right[..., :0, :]
    for block, rows in enumerate(corners):
        rest = right[..., rows, :] - _matmul(lower[..., rows, : rows.start], solved)
        solved = jnp.concatenate([solved, _matmul(inverse[..., block, :, :], rest)], -2)
    return solved
