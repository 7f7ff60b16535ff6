"""Around every request: an id, one log line, a count, and a fixed answer when our own code fails."""

import json
import logging
import re
import time
import uuid
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.errors import CLIENT_CLOSED, Disconnected, internal
from serving.metrics import Metrics

logger = logging.getLogger("serving.http")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"})


class Observer:
    """ASGI middleware. Endpoints add to the log line through `log_fields`; payloads never go there.

    probes: routes that are asked every second by whoever watches the server. Their lines are of level DEBUG, and to say
    that the server is not ready counts as no rejection.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Collection[str], probes: Collection[str]):
        self._app = app
        self._metrics = metrics
        self._routes, self._probes = frozenset(routes), frozenset(probes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        trace_id = _trace_id(Headers(scope=scope).get("x-request-id"))
        fields: dict[str, Any] = {}
        scope["state"] = {**scope.get("state", {}), "trace_id": trace_id, "log": fields}
        status = 0  # of the response, once it has begun

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = trace_id
            await send(message)

        code = 0
        try:
            await self._app(scope, receive, observed)
            code = status
        except (Disconnected, ClientDisconnect):
            code = CLIENT_CLOSED
        except Exception:
            logger.exception("request %s failed", trace_id)
            code = 500
            if not status:
                await internal(trace_id).response()(scope, receive, observed)
        finally:
            code = code or CLIENT_CLOSED
            route = self._route(scope["path"])
            self._metrics.http_response(route, code)
            is_probe = route in self._probes
            if "error" in fields and not is_probe:
                self._metrics.rejected(fields["error"])
            method = scope["method"] if scope["method"] in _METHODS else "other"  # a client may send any word
            line = {"request_id": trace_id, "method": method, "route": route, "status": code}
            seconds = round(time.perf_counter() - started, 4)
            line = line | fields | {"seconds": seconds}
            logger.log(logging.DEBUG if is_probe else logging.INFO, "%s", json.dumps(line), extra={"fields": line})

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


def trace_id(request: Request) -> str:
    """The id that the client sent in X-Request-Id, if it is a plain word, or else one made here."""
    return request.state.trace_id


def log_fields(request: Request) -> dict[str, Any]:
    """What the request's log line holds besides; only ids and numbers belong there."""
    return request.state.log


def _trace_id(sent: str | None) -> str:
    return sent if sent is not None and _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
