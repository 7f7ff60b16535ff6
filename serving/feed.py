"""The last token of every seat, kept on the devices: a decode pass is dispatched before the host has seen the tokens of
the pass before it.

```
  host     plan 1 | dispatch 1 | plan 2 | dispatch 2 | tokens of 1 | plan 3 | dispatch 3 | tokens of 2 ...
  devices                      | pass 1 .............| pass 2 ...................| pass 3 ........
                                     keep |  ^ feed
```
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from vitstripe.program import Program


def feed_programs(mesh: Mesh | AbstractMesh, num_seats: int, sizes: tuple[int, ...]) -> list[Program]:
    """feed/R and keep/R of every number of requests R a pass may have."""
    whole = NamedSharding(mesh, PartitionSpec())

    def array(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)

    def feed(latest: jax.Array, seats: jax.Array) -> jax.Array:
        # A token of -1 says that the logits were not finite; its request ends, but the pass needs some id.
        return jnp.maximum(jnp.take(latest, seats, mode="clip"), 0)

    def keep(latest: jax.Array, seats: jax.Array, tokens: jax.Array) -> jax.Array:
        return latest.at[seats].set(tokens, mode="drop")

    def both(size: int) -> list[Program]:
        latest, row = array(num_seats), array(size)
        reads = jax.jit(feed, out_shardings=whole)
        writes = jax.jit(keep, donate_argnums=0, out_shardings=whole)
        return [Program(f"feed/{size}", reads, (latest, row)), Program(f"keep/{size}", writes, (latest, row, row))]

    return [program for size in sizes for program in both(size)]


class TokenFeed:
    """latest int32 [seats]: the last token each seat sampled. Programs are compiled by the caller and set with
    `use`."""

    def __init__(self, mesh: Mesh, seats: int):
        self._whole = NamedSharding(mesh, PartitionSpec())
        self.seats = seats
        self.latest = jax.device_put(np.zeros(seats, np.int32), self._whole)
        self._compiled: dict[str, jax.stages.Compiled] = {}

    def programs(self, sizes: tuple[int, ...]) -> list[Program]:
        """See `feed_programs`."""
        return feed_programs(self._whole.mesh, self.seats, sizes)

    def use(self, compiled: dict[str, jax.stages.Compiled]) -> None:
        self._compiled = compiled

    def ids(self, seats: np.ndarray) -> jax.Array:
        """The last token of each of these seats, int32 [R], on the devices."""
        return self._compiled[f"feed/{len(seats)}"](self.latest, seats)

    def keep(self, seats: np.ndarray, tokens: jax.Array) -> None:
        """Remembers tokens [R] as the last of their seats; a seat past the last drops its token."""
        self.latest = self._compiled[f"keep/{len(seats)}"](self.latest, seats, tokens)
