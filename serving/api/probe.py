"""A deep health probe: one token, made by the engine on the way that every request takes."""

import asyncio
import time
import uuid
from contextlib import suppress

from serving.api.errors import ApiError, internal, overloaded, unavailable
from serving.api.limits import Limits
from serving.protocol import EngineClient, ErrorEvent, Event, InvalidRequest, Overloaded, SamplingParams, Submission

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Probe:
    """Asks the engine for one token; probes that come while one is under way share it."""

    def __init__(self, engine: EngineClient, prompt_ids: list[int], limits: Limits):
        self._engine, self._prompt_ids, self._limits = engine, prompt_ids, limits
        self._running: asyncio.Task[float] | None = None

    async def run(self) -> float:
        """Seconds that the token took.

        Raises:
            ApiError: 429 or 503: the engine refused it or failed on it, or the token did not come within
                `limits.probe_seconds`.
        """
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._running)

    async def _ask(self) -> float:
        began, name = time.perf_counter(), f"probe-{uuid.uuid4().hex}"
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            self._engine.submit(Submission(name, list(self._prompt_ids), (), _ONE_TOKEN), deliver)
            async with asyncio.timeout(self._limits.probe_seconds):
                event = await events.get()
        except InvalidRequest:
            raise internal(name) from None
        except Overloaded as error:
            raise overloaded(error) from None
        except TimeoutError:
            self._engine.abort(name)
            health = self._engine.health()
            raise unavailable(
                f"no token within {self._limits.probe_seconds:g} s; the engine is {health.state}, its last sign of "
                f"life {health.heartbeat_age:.1f} s ago"
            ) from None
        if isinstance(event, ErrorEvent):
            raise ApiError(
                503, "the engine failed on a request of one token", type="internal_error", code="probe_failed"
            )
        return time.perf_counter() - began
