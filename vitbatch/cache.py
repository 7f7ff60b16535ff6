"""Who owns which row of the device pool: a least-recently-used cache of image embeddings over a fixed set of slots.

An entry is a list of slots; the rows themselves never move. A pinned entry is in use by a request and stays; the others
are kept for the next request with the same image until their slots are needed. Not thread-safe: it belongs to the one
thread that drives the devices.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


class PoolFull(RuntimeError):  # noqa: N818  (a state to wait out, not a fault)
    """Pinned rows leave too little room; release some and try again."""


@dataclass
class _Entry:
    slots: Int[np.ndarray, "T"]
    pins: int = 0


class EmbeddingCache:
    """Slots of `capacity` rows, keyed by image content.

    hits, misses, evictions: running counts of images. tokens_used: slots held by entries, pinned or not.
    tokens_pinned: slots of pinned entries.
    """

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"the pool has {capacity} rows; it needs at least 1")
        self.capacity = capacity
        self.hits = self.misses = self.evictions = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._free = np.arange(capacity, dtype=np.int32)
        self._pinned = 0

    @property
    def tokens_used(self) -> int:
        return self.capacity - len(self._free)

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
            self._drop(next(k for k, entry in self._entries.items() if not entry.pins))
            self.evictions += 1
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

    def discard(self, key: bytes) -> None:
        """Forgets an entry whose rows were never written. Raises ValueError if it is in use."""
        if self._entries[key].pins:
            raise ValueError(f"image key {key.hex()[:16]} is in use")
        self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._free = np.concatenate([self._free, self._entries.pop(key).slots])
