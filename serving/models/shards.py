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
    mlp: the MLPs' inner width. vocab: embedding rows and logits. experts: a mixture's experts are dealt over the
    devices, each kept whole by one of them; where they are not, their inner width is cut like that of the MLPs.
    """

    axis: str
    tp: int
    heads: bool
    kv: bool
    mlp: bool
    vocab: bool
    experts: bool = False

    @staticmethod
    def of(
        tp: int,
        *,
        heads: int,
        kv_heads: int,
        widths: tuple[int, ...],
        vocab: int,
        experts: int = 0,
        expert_width: int = 0,
        axis: str = "tp",
    ) -> "Shards":
        """Cuts what divides by `tp`. widths: every inner width of the model's dense MLPs and shared experts, cut
        together or not at all, and with them expert_width, that of the `experts` of a mixture, unless those are dealt
        whole."""
        cut, dealt = tp > 1 and heads % tp == 0, tp > 1 and experts > 0 and experts % tp == 0
        if experts and not dealt:
            widths = (*widths, expert_width)
        return Shards(
            axis=axis,
            tp=tp,
            heads=cut,
            kv=cut and kv_heads % tp == 0,
            mlp=tp > 1 and all(w % tp == 0 for w in widths),
            vocab=tp > 1 and vocab % tp == 0,
            experts=dealt,
        )

    def rank(self) -> Array:
        """This device's index on the axis; only inside shard_map."""
        return lax.axis_index(self.axis) if self.tp > 1 else jnp.int32(0)

    def sum_if(self, cut: bool, x: Float[Array, "*S"]) -> Float[Array, "*S"]:
        """The sum over devices after a column-cut layer, or x itself when the layer was not cut."""
        return lax.psum(x, self.axis) if cut else x

    @jax.named_scope("mlp")
    def sum_mlp(self, cut: bool, y: Float[Array, "*S"]) -> Float[Array, "*S"]:
        """`sum_if` behind an MLP or mixture, of which it counts as a part in a profile."""
        return self.sum_if(cut, y)

    @property
    def mixture(self) -> bool:
        """Whether a device's output of a mixture of experts is a part of it, to be summed."""
        return self.experts or self.mlp

    def all_reduces(self, layers: int, mixtures: int = 0) -> int:
        """all-reduces of one pass over `layers` decoder layers, `mixtures` of them with experts: one after attention,
        one after the MLP or mixture."""
        return layers * int(self.heads) + (layers - mixtures) * int(self.mlp) + mixtures * int(self.mixture)


def local_heads(x: jax.Array, head_dim: int) -> Float[Array, "T H D"]:
    """[T, h * head_dim] -> [T, h, head_dim] with however many heads this device holds."""
    return x.reshape(x.shape[0], -1, head_dim)
