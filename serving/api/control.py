"""Routes that control the server: traces of what it does. They need the admin key (serving.api.keys)."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serving.api.errors import ApiError, invalid
from serving.profiling import Profiler, ProfilerBusy, Trace

T = TypeVar("T")

START, STOP, STATUS = "/start_profile", "/stop_profile", "/profile_status"
CONTROL_PATHS = (START, STOP, STATUS)
_MAX_BODY = 1 << 20
_NOT_THE_CLIENTS = ("output_dir", "num_steps", "activities", "profile_by_stage", "host_tracer_level")


class Control:
    """Endpoints around a profiler; None for a server without a folder for traces."""

    def __init__(self, profiler: Profiler | None):
        self._profiler = profiler

    def routes(self) -> list[Route]:
        return [
            Route(START, self.start, methods=["POST"]),
            Route(STOP, self.stop, methods=["POST"]),
            Route(STATUS, self.status, methods=["GET"]),
        ]

    async def start(self, request: Request) -> Response:
        profiler = self._present()
        await _check_body(request)
        return JSONResponse({"status": "started", "trace": await _told(profiler.start)})

    async def stop(self, request: Request) -> Response:
        trace = await _told(self._present().stop)
        return JSONResponse({"status": "stopped", **_body(trace)})

    async def status(self, request: Request) -> Response:
        return JSONResponse({"running": self._present().running})

    def _present(self) -> Profiler:
        if self._profiler is None:
            raise ApiError(
                404,
                "this server makes no traces: it was started without a folder for them (--profile-dir)",
                code="profiling_off",
            )
        return self._profiler


def _body(trace: Trace) -> dict[str, Any]:
    files = [{"path": file.path, "bytes": file.bytes} for file in trace.files]
    body = {"trace": trace.name, "seconds": round(trace.seconds, 3), "files": files, "device_events": trace.events}
    if not any(trace.events.values()):
        body["note"] = (
            "no device recorded events of its own; on a CPU that is normal, on a GPU its tracer does not work"
        )
    return body


async def _told(work: Callable[[], T]) -> T:
    """jax takes its time over both ends of a trace: the event loop must not."""
    try:
        return await asyncio.to_thread(work)
    except ProfilerBusy as error:
        raise ApiError(409, str(error), code="profiler_busy") from None


async def _check_body(request: Request) -> None:
    """Benchmark clients send the body of a generation along, which means nothing here. One that asks for what is not
    the client's to choose, above all where files are written, is refused."""
    raw = b""
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > _MAX_BODY:
            raise ApiError(413, f"body of more than {_MAX_BODY} bytes; send none", code="body_too_large")
    try:
        asked = json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        asked = None
    named = set(asked) if isinstance(asked, dict) else set()
    for name in _NOT_THE_CLIENTS:
        if name in named:
            raise invalid(f"{name} is not for a client to choose; the server's flags say where traces go", name)
