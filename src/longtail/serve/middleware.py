"""Checks that every request passes before its route: API key, host, type and size of the body."""

import asyncio
import hmac
import time
from typing import final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longtail.serve.metrics import ServeMetrics
from longtail.serve.options import Limits, is_loopback
from longtail.serve.protocol import APIError

ROUTES = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics")


@final
class AccessMiddleware:
    """ASGI middleware that refuses requests and counts responses.

    With an API key, every route needs it. Without one the server listens on loopback only, and web
    pages must not reach it either: they cannot send another Host header (DNS rebinding), nor JSON
    without a CORS preflight request, which is never answered.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, limits: Limits, metrics: ServeMetrics
    ) -> None:
        self._app, self._limits, self._metrics = app, limits, metrics
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        counted = self._counted(scope["path"], send)
        try:
            self._check(scope)
        except APIError as error:
            answer = JSONResponse(error.body(), error.status, error.headers)
            await answer(scope, receive, counted)
            return
        await self._app(scope, self._bounded(receive), counted)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._key is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            is_key = hmac.compare_digest(given.strip(" ").encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not is_key:  # case-insensitive, RFC 9110 11.1
                raise APIError(
                    401,
                    "give the server's API key: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        elif "host" in headers and not _is_loopback_host(headers["host"]):
            raise APIError(
                403, "without an API key this server answers to localhost and 127.0.0.1 only"
            )
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise APIError(415, "give a body of Content-Type: application/json")
            length = headers.get("content-length", "0")
            # Longer numbers are cut: int() refuses more than 4300 digits.
            if length.isdecimal() and int(length[:20]) > self._limits.max_body:
                raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """Limit the size of the body and the seconds until it has arrived."""
        num_bytes, deadline, is_whole = 0, time.monotonic() + self._limits.body_s, False

        async def read() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                raise HTTPException(408, "the body did not arrive in time") from None
            num_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if num_bytes > self._limits.max_body:
                error = self._too_large()
                raise HTTPException(error.status, error.message)
            return message

        return read

    def _too_large(self) -> APIError:
        return APIError(413, f"the body is larger than {self._limits.max_body} bytes")

    def _counted(self, path: str, send: Send) -> Send:
        route = path if path in ROUTES else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_response(route, message["status"])
            await send(message)

        return counted


def _is_loopback_host(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
