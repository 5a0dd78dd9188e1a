"""Checks that every request of the page passes, and the headers of every response.

Without a token the server listens on loopback, and only requests to this machine's names pass, so
that no web page can reach it under another name (DNS rebinding). With a token, the first request
has it in its URL; the answer moves it into a cookie and out of the address bar.
"""

import hmac
from typing import final
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longtail.system.addresses import is_loopback_header

COOKIE = "longtail_view"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: nothing but the page's own files runs or is loaded."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@final
class ViewAccess:
    """ASGI middleware that refuses strangers and requests under another name."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it; add the headers to its response."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self._token is None:
            if is_loopback_header(headers.get("host", "localhost")):
                return None
            return PlainTextResponse("without a token this page answers to localhost only", 403)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and _equal(given, self._token):
            moved = RedirectResponse("/", 303)
            moved.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return moved
        if _equal(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""), self._token):
            return None
        return PlainTextResponse("open the page with its token: /?token=TOKEN", 401)


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())
