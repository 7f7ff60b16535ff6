"""What requests are to be told, until the engine's thread has time to tell it."""

import logging
from collections import deque

from serving.protocol import Event, TokenEvent
from serving.sequence import Sequence

logger = logging.getLogger("serving.outbox")


class Outbox:
    """Events in order, each given to its request's receiver once.

    Whoever is told begins to work, in the same interpreter: 64 streams want it for half of a decode step. So the
    engine hands out what a step gave when the next one is on its way and it would only wait.

    The engine's thread calls both methods; the thread that stops an engine may call them, too.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[Sequence, Event]] = deque()

    def put(self, seq: Sequence, event: Event) -> None:
        """Nothing after a request's last event."""
        if not seq.closed:
            seq.closed = not isinstance(event, TokenEvent)
            self._events.append((seq, event))

    def deliver(self) -> list[Sequence]:
        """Empties the box. Requests that are not over and whose receivers raised: their fault must not reach others."""
        broken = []
        while True:
            try:
                seq, event = self._events.popleft()
            except IndexError:
                return broken
            try:
                seq.on_event(event)
            except Exception:
                logger.exception("request %s: its receiver raised", seq.request_id)
                if not seq.closed and seq not in broken:
                    broken.append(seq)
