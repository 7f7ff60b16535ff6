"""Who may ask: API keys for the model, another key for the routes that control the server.

What is not declared open needs the API key, whatever route it is, so that a route added later is not open by accident.
"""

import hashlib
import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api.errors import ApiError

_LONGEST = 512


@dataclass(frozen=True)
class Keys:
    """Keys that clients send as `Authorization: Bearer KEY`.

    Args:
        api: keys of clients, any of which will do; none leaves the model open to whoever reaches the port.
        admin: the key of control routes, which is never one of `api`; without one they are closed.

    Raises:
        ValueError: a key that a header cannot carry, or one that is used for both.
    """

    api: frozenset[str] = field(default_factory=frozenset, repr=False)
    admin: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for key in (*self.api, *([] if self.admin is None else [self.admin])):
            if not (0 < len(key) <= _LONGEST and key.isascii() and key.isprintable() and " " not in key):
                raise ValueError(
                    f"a key of {len(key)} characters: it must be 1 to {_LONGEST} visible ASCII characters and no blank"
                )
        if self.admin in self.api:
            raise ValueError("the admin key is also an API key; give the control routes a key of their own")

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str],
        *,
        api: str | None = None,
        api_file: str | None = None,
        admin: str | None = None,
        admin_file: str | None = None,
    ) -> "Keys":
        """Keys from flags, files and VITSTRIPE_API_KEY and VITSTRIPE_ADMIN_KEY, the first of which counts.

        Raises:
            ValueError: a key or a file cannot be used.
        """
        api_keys = _lines(api, api_file, environ.get("VITSTRIPE_API_KEY"))
        admin_keys = _lines(admin, admin_file, environ.get("VITSTRIPE_ADMIN_KEY"))
        if len(admin_keys) > 1:
            raise ValueError(f"{admin_file} holds {len(admin_keys)} keys; the admin key is one")
        return cls(frozenset(api_keys), admin_keys[0] if admin_keys else None)


def _lines(key: str | None, file: str | None, variable: str | None) -> list[str]:
    if key is not None:
        return [key]
    if file is None:
        return [variable] if variable else []
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{file}: the key cannot be read ({type(error).__name__})") from None
    if not lines:
        raise ValueError(f"{file} is empty; write one key a line into it")
    return lines


class Gate:
    """ASGI middleware that lets a request pass, or answers 401, 403 or 404 before anything of its body is read.

    Args:
        open_paths: exact paths that anybody may ask.
        control_paths: exact paths that need the admin key.
    """

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: Collection[str], control_paths: Collection[str]):
        self._app = app
        self._api = [_digest(key) for key in keys.api]
        self._admin = None if keys.admin is None else [_digest(keys.admin)]
        self._open, self._control = frozenset(open_paths), frozenset(control_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        scope["state"]["log"]["error"] = refusal.code
        await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path = scope["path"]
        if not path.isprintable():
            # A route's pattern also fits its path with a line break behind it, which none of the sets below holds.
            return ApiError(404, "there is no such route", code="not_found")
        if path in self._open:
            return None
        if path in self._control:
            if self._admin is None:
                return ApiError(
                    403,
                    f"{path} is closed: this server was started without an admin key (--admin-key-file)",
                    code="admin_key_not_set",
                )
            accepted = self._admin
        elif self._api:
            accepted = self._api
        else:
            return None
        sent = _digest(_bearer(Headers(scope=scope)))
        # Every key is compared, each in constant time: how long it takes tells nothing.
        if sum(hmac.compare_digest(sent, key) for key in accepted):
            return None
        which = "admin key" if path in self._control else "API key"
        return ApiError(
            401,
            f"this route needs the {which}: send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _bearer(headers: Headers) -> str:
    """The key that was sent; the empty string, which is no key, when there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    """Of one length for all keys, so that not even a key's length can be measured."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
