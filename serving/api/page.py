"""A page to ask the model from a browser; served only where the server was told to (--page).

It is one file that loads nothing. The policy that it is sent with names its script and its style by their hashes, so
that nothing else runs in it, and lets it speak to this server alone. The page itself is open to everybody; what it
asks needs the same key as anybody else's request.
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE_PATH = "/"
PAGE_FILE = Path(__file__).parents[1] / "assets" / "page.html"


def policy_of(html: str) -> str:
    """A Content-Security-Policy that lets the page's own inline script and style run and nothing else."""

    def sources(tag: str) -> str:
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {sources('script')}",
            f"style-src {sources('style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def page_route() -> Route:
    """The page at PAGE_PATH. Read once: a file that is exchanged later changes nothing."""
    html = PAGE_FILE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy_of(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def page(request: Request) -> Response:
        return Response(html, media_type="text/html", headers=headers)

    return Route(PAGE_PATH, page, methods=["GET"])
