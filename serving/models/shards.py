"""How a decoder is cut over the tensor-parallel mesh axis: one object decides, everything else asks it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@dataclass(frozen=True)
class Shards:
    """What is cut over the `tp` devices of mesh axis `axis`. A part that does not divide is replicated: the same
    result, computed on every device.

    heads: query heads and o_proj. kv: key and value heads with their cache (fewer key heads than devices: replicated).
    mlp: the MLPs' inner width. vocab: embedding rows and logits.
    """

    axis: str
    tp: int
    heads: bool
    kv: bool
    mlp: bool
    vocab: bool

    @staticmethod
    def of(tp: int, *, heads: int, kv_heads: int, widths: tuple[int, ...], vocab: int, axis: str = "tp") -> "Shards":
        """Cuts what divides by `tp`. widths: every MLP inner width of the model, cut together or not at all."""
        cut = tp > 1 and heads % tp == 0
        return Shards(
            axis=axis,
            tp=tp,
            heads=cut,
            kv=cut and kv_heads % tp == 0,
            mlp=tp > 1 and all(w % tp == 0 for w in widths),
            vocab=tp > 1 and vocab % tp == 0,
        )

    def rank(self) -> Array:
        """This device's index on the axis; only inside shard_map."""
        return lax.axis_index(self.axis) if self.tp > 1 else jnp.int32(0)

    def sum_if(self, cut: bool, x: Float[Array, "*S"]) -> Float[Array, "*S"]:
        """The sum over devices after a column-cut layer, or x itself when the layer was not cut."""
        return lax.psum(x, self.axis) if cut else x

    def all_reduces(self, layers: int) -> int:
        """all-reduces of one pass over `layers` decoder layers: one after attention, one after the MLP."""
        return layers * (int(self.heads) + int(self.mlp))


def local_heads(x: jax.Array, head_dim: int) -> Float[Array, "T H D"]:
    """[T, h * head_dim] -> [T, h, head_dim] with however many heads this device holds."""
    return x.reshape(x.shape[0], -1, head_dim)
