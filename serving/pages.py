"""The pages of the paged caches: who holds which, and which contents are known. Host only; the engine thread owns it.

```
  free  --take-->  held by one request  --share-->  held by several
   ^                    |  publish: its content has a key now
   |                    v
   +---- give_back ---- (no holder left) ---- with a key ---->  kept  --share-->  held
   ^                                                             |
   +--------------------- take, least recently used first -------+
```
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class PagePool:
    """Pages 0 .. pages-1. A page freed twice, or one never handed out, is a fault and raises RuntimeError.

    A key names a content and everything before it (serving.prefix). A page whose content has a key is never written
    again while the key stands, so it may be shared.
    """

    def __init__(self, pages: int):
        self.total = pages
        self.evictions = 0
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        self._kept: OrderedDict[int, None] = OrderedDict()  # known and held by nobody, least recently used first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Pages that can be taken, those of kept contents included."""
        return len(self._free) + len(self._kept)

    @property
    def used(self) -> int:
        """Pages that requests hold; a shared page counts once."""
        return self.total - self.free

    @property
    def kept(self) -> int:
        """Pages that nobody holds and whose content may still be found."""
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        return key in self._page_of

    def take(self, count: int) -> list[int] | None:
        """`count` pages to write to, or None (and none taken) when fewer can be had."""
        if count > self.free:
            return None
        taken = []
        for _ in range(count):
            if not self._free:
                page, _ = self._kept.popitem(last=False)
                self._forget(page)
                self._free.append(page)
                self.evictions += 1
            taken.append(self._free.pop())
            self._holders[taken[-1]] = 1
        return taken

    def share(self, key: bytes) -> int | None:
        """The page with this content, held once more, or None when there is none."""
        page = self._page_of.get(key)
        if page is not None:
            self._holders[page] += 1
            self._kept.pop(page, None)
        return page

    def publish(self, page: int, key: bytes) -> None:
        """From now on the page may be found by its content. Where another page has it already, that one stays."""
        if not self._holders[page]:
            raise RuntimeError(f"page {page} was published but is not in use")
        if self._key_of.get(page, key) != key:
            raise RuntimeError(f"page {page} has another content already; a shared page must not be written")
        if self._page_of.setdefault(key, page) == page:
            self._key_of[page] = key

    def forget(self, pages: Iterable[int]) -> None:
        """The contents of these pages are not to be found again."""
        for page in pages:
            self._forget(page)
            if page in self._kept:
                del self._kept[page]
                self._free.append(page)

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder less for each. Of contents that are kept, the last of `pages` is evicted first: a prefix without
        its end is of use, an end without its prefix is not."""
        for page in reversed(pages):
            if not self._holders[page]:
                raise RuntimeError(f"page {page} was freed but is not in use")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError unless `held`, the pages of every request, is exactly what is held, and every other page
        is free or kept, once."""
        counts = Counter(page for pages in held for page in pages)
        wrong = [p for p in range(self.total) if self._holders[p] != counts[p]]
        if wrong:
            lines = ", ".join(f"page {p}: {self._holders[p]} counted, {counts[p]} real" for p in wrong[:5])
            raise RuntimeError(f"{len(wrong)} pages have holders that do not exist, or lack some: {lines}")
        idle = Counter([*self._free, *self._kept])
        expected = {p: 1 for p in range(self.total) if not self._holders[p]}
        if idle != expected:
            raise RuntimeError(f"free and kept pages {sorted(idle.elements())} are not the unheld ones")
        if {p: k for k, p in self._page_of.items()} != self._key_of or not self._kept.keys() <= self._key_of.keys():
            raise RuntimeError("the keys of known pages do not agree")
