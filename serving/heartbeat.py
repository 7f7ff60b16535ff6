"""Signs of life of the engine's thread, and the watchdog that reads them."""

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Literal

logger = logging.getLogger("serving.watchdog")


Pulse = Literal["running", "over", "gone"]
"""An engine's thread: it runs; it has ended, or was told to, and everybody knows; it has ended and nobody does."""


class Heartbeat:
    """A beat before and after each call of the devices, and in each turn of an idle engine: however long a step is,
    what passes between two beats is one call. Written by one thread, read by any."""

    def __init__(self):
        self._at, self.doing = time.monotonic(), ""

    def beat(self, doing: str = "") -> None:
        """doing: what begins now, for the message if it never ends."""
        self._at, self.doing = time.monotonic(), doing

    @property
    def age(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._at


class Watchdog:
    """Ends a server whose engine is dead: one device call takes longer than `limit` seconds, or its thread is gone.

    A collective that hangs cannot be cancelled from Python, so all that is left is to say where every thread is, tell
    every request, and go. pulse: how the engine's thread is. on_hang(detail): tells the requests. leave: ends the
    process, after `grace` seconds in which the answers go out.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        *,
        limit: float,
        pulse: Callable[[], Pulse],
        on_hang: Callable[[str], None],
        leave: Callable[[], None],
        grace: float = 2.0,
    ):
        self._heartbeat, self._limit, self._pulse = heartbeat, limit, pulse
        self._on_hang, self._leave, self._grace = on_hang, leave, grace
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Watches no more."""
        self._stopped.set()

    def _watch(self) -> None:
        # Four looks a limit, and two that agree: death is found at most half a limit late. When a frozen process goes
        # on, the first look may come before the engine's next beat.
        detail = ""
        while not self._stopped.wait(min(1.0, self._limit / 4)):
            before, detail = detail, self._fault()
            if before and detail and not self._stopped.is_set():
                return self._end(detail)
        return None

    def _fault(self) -> str:
        age, pulse = self._heartbeat.age, self._pulse()
        if pulse == "gone":
            return "the engine's thread is gone"
        if pulse == "over" or age <= self._limit:
            return ""
        doing = self._heartbeat.doing or "planning"
        return f"no sign of life for {age:.0f} s while {doing}; the limit of one device call is {self._limit:g} s"

    def _end(self, detail: str) -> None:
        logger.critical("watchdog: %s; stacks of all threads follow", detail)
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        self._on_hang(detail)
        self._stopped.wait(self._grace)
        self._leave()
