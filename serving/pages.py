"""The page allocator of the paged caches. Host only; the engine thread owns it."""


class PageAllocator:
    """Hands out page numbers 0 .. pages-1. A page freed twice, or one never handed out, is a fault and raises."""

    def __init__(self, pages: int):
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None (and none taken) when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            if page not in self._used:
                raise RuntimeError(f"page {page} was freed but is not in use")
            self._used.remove(page)
            self._free.append(page)
