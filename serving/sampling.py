"""Choosing the next token on the device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from serving.models.step import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleArgs:
    """Per request [R]: temperature (0 is greedy) and top_p float32, seed uint32, index int32 (tokens generated so far).
    seed and index alone decide the draw, so that an answer does not depend on the batch it rode in."""

    temperature: Leaf
    top_p: Leaf
    seed: Leaf
    index: Leaf


def sample(logits: Float[Array, "R V"], args: SampleArgs) -> Int[Array, " R"]:
    """Token ids, -1 for a row whose logits are not all finite. Greedy rows take the largest logit, ties to the lowest
    id; the others draw from softmax(logits / temperature) cut to the smallest set of tokens whose probabilities reach
    top_p."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(_):
        scaled = logits / jnp.maximum(args.temperature, 1e-6)[:, None]
        ordered = jnp.sort(scaled, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The most likely token always stays: nothing comes before it.
        keep = jnp.sum(before < args.top_p[:, None], axis=-1)
        floor = jnp.take_along_axis(ordered, jnp.maximum(keep - 1, 0)[:, None], axis=-1)
        keys = jax.vmap(lambda s, i: jax.random.fold_in(jax.random.key(s), i))(args.seed, args.index)
        noise = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[-1:]))(keys)
        drawn = jnp.argmax(jnp.where(scaled >= floor, scaled, -jnp.inf) + noise, axis=-1).astype(jnp.int32)
        return jnp.where(args.temperature > 0, drawn, greedy)

    tokens = lax.cond(jnp.any(args.temperature > 0), draw, lambda _: greedy, None)
    return jnp.where(jnp.isfinite(logits).all(-1), tokens, -1)
