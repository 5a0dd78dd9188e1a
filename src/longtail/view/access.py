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
from longtail.system.http_server import answer_head

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
    """ASGI middleware that refuses writes, strangers and requests under another name."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it; add the headers to its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = self._refusal(scope) or self._app
        if scope["method"] == "HEAD":
            await answer_head(answer, scope, receive, guarded)
        else:
            await answer(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page only reads", 405, {"Allow": "GET, HEAD"})
        if self._token is None:
            if is_loopback_header(headers.get("host", "localhost")):
                return None
            return PlainTextResponse("without a token this page answers to localhost only", 403)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if given and scope["path"] == "/" and self._is_token(given):
            moved = RedirectResponse("/", 303)
            moved.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return moved
        kept = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if self._is_token(kept) or (scheme.lower() == "bearer" and self._is_token(bearer.strip())):
            return None
        return PlainTextResponse("open the page with its token: /?token=TOKEN", 401)

    def _is_token(self, given: str) -> bool:
        expected = (self._token or "").encode()
        return hmac.compare_digest(given.encode(errors="replace"), expected)
