"""What one pass of a decoder is told about the batch: arrays of fixed size, planned on the host.

Rows of several requests are packed one request after another. A request's rows start at a multiple of the row tile,
so a tile belongs to one request (at a multiple of serving.config.STATE_CHUNK where the decoder keeps a state a request,
and so a whole chunk does):

    row      0 . . . . 15 | 16 . . . . 31 | 32 . . . . 47 | 48 ...
    tile     0            | 1             | 2             | 3
    request  A            | A (part pad)  | B (part pad)  | padding
"""

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import numpy as np

# Fields hold numpy arrays on the host, traced arrays in a program and ShapeDtypeStructs while it is lowered.
Leaf = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """T rows (tokens of this pass), G row tiles, R requests, W pages a request, B pages in the key gather; all int32.

    positions [3, T]: rotary positions on the axes (t, h, w); equal for text.
    slots [T]: cache slot each row's keys are written to; any value past the pool drops the write (padding).
    lengths [T]: keys a row may see, its own included; 0 for padding.
    tile_request [G]: the row of page_table each tile reads.
    page_table [R, W]: physical page of each logical page; entries past a request's length are never read as keys.
    last_rows [R]: the row each request's logits are taken from.
    key_pages [B]: pages of all requests of this pass, one after another, for the indexer; row m's request starts at
        key_starts[m] [T] in the gathered keys. Both empty where the model has no indexer or the pass is a decode.
    requests [5, R]: what is known of each request, see the properties.
    """

    positions: Leaf
    slots: Leaf
    lengths: Leaf
    tile_request: Leaf
    page_table: Leaf
    last_rows: Leaf
    key_pages: Leaf
    key_starts: Leaf
    requests: Leaf

    @property
    def tile(self) -> int:
        """Rows a tile."""
        return self.slots.shape[0] // self.tile_request.shape[0]

    @property
    def seats(self) -> Leaf:
        """[R]: its row in arrays that have one a request; past the end, where writes are dropped, for no request."""
        return self.requests[0]

    @property
    def first_rows(self) -> Leaf:
        """[R]: its first row in this pass."""
        return self.requests[1]

    @property
    def counts(self) -> Leaf:
        """[R]: its rows in this pass without padding, one after another; 0 where there is no request."""
        return self.requests[2]

    @property
    def starts(self) -> Leaf:
        """[R]: its tokens that earlier passes computed. At 0 its state is zero, whatever the array holds: replace it,
        do not multiply it (0 * NaN is NaN)."""
        return self.requests[3]

    @property
    def keeps(self) -> Leaf:
        """[R]: the seat whose last token is the one drawn after this pass; past the end where that is nobody's."""
        return self.requests[4]

    def packed(self) -> "PackedStep":
        """For arrays of the host."""
        arrays = [np.asarray(getattr(self, field.name), np.int32) for field in fields(self)]
        return PackedStep(np.concatenate([a.ravel() for a in arrays]), tuple(a.shape for a in arrays))


@partial(jax.tree_util.register_dataclass, data_fields=["flat"], meta_fields=["shapes"])
@dataclass(frozen=True)
class PackedStep:
    """A Step's arrays one after another, int32 [n], as a program takes them: an array each would be a transfer each, at
    which the host's thread gives the interpreter away and waits to get it back. shapes: theirs, in order."""

    flat: Leaf
    shapes: tuple[tuple[int, ...], ...]

    def step(self) -> Step:
        """The arrays, cut out again; in a program or on the host."""
        arrays, start = [], 0
        for shape in self.shapes:
            stop = start + math.prod(shape)
            arrays.append(self.flat[start:stop].reshape(shape))
            start = stop
        return Step(*arrays)
