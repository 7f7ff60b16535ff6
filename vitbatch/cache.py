"""Who owns which row of the device pool: a least-recently-used cache of image embeddings over a fixed set of slots.

An entry is a list of slots; the rows themselves never move. A pinned entry is in use by a request and stays; the others
are kept for the next request with the same image until their slots are needed. Not thread-safe: it belongs to the one
thread that drives the devices.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


class PoolFull(RuntimeError):  # noqa: N818  (a state to wait out, not a fault)
    """Pinned rows leave too little room; release some and try again."""


# Keys of evicted images that are remembered, to tell a second encoding from a first.
_REMEMBERED = 65_536


@dataclass
class _Entry:
    slots: Int[np.ndarray, "T"]
    pins: int = 0


class EmbeddingCache:
    """Slots of `capacity` rows, keyed by image content.

    hits, misses, evictions, re_encodes: running counts of images. A re-encode is a miss of an image that was here and
    was evicted: many of them mean that the pool is too small. tokens_used: slots held by entries, pinned or not.
    tokens_pinned: slots of pinned entries. bytes_per_token: of a row, 0 if unknown.
    """

    def __init__(self, capacity: int, bytes_per_token: int = 0):
        if capacity < 1:
            raise ValueError(f"the pool has {capacity} rows; it needs at least 1")
        self.capacity, self.bytes_per_token = capacity, bytes_per_token
        self.hits = self.misses = self.evictions = self.re_encodes = 0
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # oldest eviction first
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._free = np.arange(capacity, dtype=np.int32)
        self._pinned = 0

    @property
    def tokens_used(self) -> int:
        return self.capacity - len(self._free)

    @property
    def bytes_used(self) -> int:
        """Of the entries, pinned or not, on each device."""
        return self.tokens_used * self.bytes_per_token

    @property
    def tokens_pinned(self) -> int:
        return self._pinned

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: bytes, tokens: int) -> Int[np.ndarray, "T"] | None:
        """The slots of an entry, made the most recent, or None. Counts nothing.

        An entry of another token count is not this image, whatever its key says: it is dropped, or if it is in use,
        ValueError.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        if len(entry.slots) != tokens:
            if entry.pins:
                raise ValueError(
                    f"image key {key.hex()[:16]} names {len(entry.slots)} rows in use but {tokens} were asked for; "
                    f"keys must differ when contents do"
                )
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry.slots

    def room(self) -> int:
        """Slots that are free or can be freed."""
        return self.capacity - self.tokens_pinned

    def insert(self, key: bytes, tokens: int) -> Int[np.ndarray, "T"]:
        """Slots for a new entry, evicting the least recently used unpinned ones. Raises PoolFull, with nothing
        evicted, when they would not be enough."""
        if key in self._entries:
            raise ValueError(f"image key {key.hex()[:16]} is in the pool already")
        if tokens > self.room():
            raise PoolFull(
                f"{tokens} rows wanted, but {self.tokens_pinned} of the pool's {self.capacity} are in use; release "
                f"images, send fewer at once or raise pool_tokens"
            )
        while len(self._free) < tokens:
            evicted = next(k for k, entry in self._entries.items() if not entry.pins)
            self._drop(evicted)
            self.evictions += 1
            self._evicted[evicted] = None
            self._evicted.move_to_end(evicted)
            if len(self._evicted) > _REMEMBERED:
                self._evicted.popitem(last=False)
        slots, self._free = self._free[:tokens], self._free[tokens:]
        self._entries[key] = _Entry(slots)
        return slots

    def pin(self, key: bytes) -> None:
        """One more user of an entry."""
        entry = self._entries[key]
        entry.pins += 1
        if entry.pins == 1:
            self._pinned += len(entry.slots)

    def release(self, key: bytes) -> None:
        """One user less. Raises ValueError when there is none: a second release would free rows in use."""
        entry = self._entries.get(key)
        if entry is None or not entry.pins:
            raise ValueError(f"image key {key.hex()[:16]} is released more often than it was handed out")
        entry.pins -= 1
        if not entry.pins:
            self._pinned -= len(entry.slots)

    def count(self, hits: int, missed: Iterable[bytes]) -> None:
        """Adds to the statistics: `hits` images that were found, and the keys of those that had to be encoded."""
        self.hits += hits
        for key in missed:
            self.misses += 1
            if key in self._evicted:
                del self._evicted[key]
                self.re_encodes += 1

    def discard(self, key: bytes) -> None:
        """Forgets an entry whose rows were never written. Raises ValueError if it is in use."""
        if self._entries[key].pins:
            raise ValueError(f"image key {key.hex()[:16]} is in use")
        self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._free = np.concatenate([self._free, self._entries.pop(key).slots])
