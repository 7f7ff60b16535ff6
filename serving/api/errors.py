"""Error bodies: one nested object on every route, `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from serving.protocol import Overloaded

INVALID = "invalid_request_error"
OVERLOADED = "overloaded_error"
INTERNAL = "internal_error"
CLIENT_CLOSED = 499  # as nginx calls it; only logs and metrics see it


@dataclass
class ApiError(Exception):
    """A failure with the status and the text that the client gets.

    `param` names the field at fault; `code` is a word that programs can test.
    """

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=dict(self.headers))


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    return invalid(message, param=param, code="unsupported_value")


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    """503: busy, starting or draining. Retry-After is in whole seconds, at least one."""
    seconds = max(1, round(retry_after))
    return ApiError(503, message, type=OVERLOADED, code="overloaded", headers={"Retry-After": str(seconds)})


def overloaded(error: Overloaded) -> ApiError:
    """429 when the queue is full: others are served, try again. 503 when nobody is."""
    refusal = unavailable(str(error), error.retry_after)
    return replace(refusal, status=429, code="queue_full") if error.reason == "queue_full" else refusal


def internal(request_id: str) -> ApiError:
    """500 with a fixed text: details of our own faults stay in the log."""
    return ApiError(500, f"internal error; quote request id {request_id} when you report it", type=INTERNAL)


class Disconnected(Exception):  # noqa: N818 -- not an error: the client went away
    """The client closed the connection."""


async def on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    request.state.log["error"] = error.code or error.type
    return error.response()
