"""From the engine's thread to the event loop."""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary


class Mailbox:
    """Calls functions on an event loop, with one wake-up for all that is posted before the loop comes to it.

    A step of the engine tells every request its token. A wake-up each would be a system call each, at which the
    engine's thread gives the interpreter away and waits for it behind the loop's work.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        # Weak, or the loop would stay as long as its mailbox, which stays as long as the loop.
        self._loop = weakref.ref(loop)
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._woken = False

    @staticmethod
    def of_running_loop() -> "Mailbox":
        """The one mailbox of the loop that runs."""
        loop = asyncio.get_running_loop()
        if loop not in _mailboxes:
            _mailboxes[loop] = Mailbox(loop)
        return _mailboxes[loop]

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """From any thread; in order for each thread."""
        self._posted.append((function, arguments))
        if not self._woken:
            self._woken = True
            loop = self._loop()
            try:
                if loop is not None:
                    loop.call_soon_threadsafe(self._empty)
            except RuntimeError:  # the loop is closed: nobody is left to read, and the engine must go on
                self._posted.clear()

    def _empty(self) -> None:
        # Before the first is taken: what is posted from here on is either seen below or wakes the loop again.
        self._woken = False
        while self._posted:
            function, arguments = self._posted.popleft()
            function(*arguments)


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()
