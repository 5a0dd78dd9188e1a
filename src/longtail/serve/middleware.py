"""Checks that every request passes before its route: API key, host, type and size of the body."""

import asyncio
import hmac
import time
from dataclasses import dataclass
from typing import final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longtail.serve.metrics import ServeMetrics
from longtail.serve.options import Limits
from longtail.serve.protocol import APIError
from longtail.system.addresses import is_loopback_header
from longtail.system.http_server import answer_head

CONTROL_ROUTES = (
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_drafter",
)
"""Routes that change the service; trainers call them."""
ROUTES = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/health",
    "/metrics",
    "/server_info",
    "/get_world_size",
    "/is_paused",
    "/weight_info",
    "/reset_prefix_cache",
    *CONTROL_ROUTES,
)
_WITHOUT_BODY = ("/pause", "/resume", "/reset_prefix_cache", "/finish_weight_update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Secrets and limits of the callers.

    Example: Access(limits=Limits(), api_key=None, admin_token=None)
    """

    limits: Limits
    api_key: str | None = None
    """None: every client that reaches the port is served."""
    admin_token: str | None = None
    """None: routes that change the service need what the others need."""


@final
class AccessMiddleware:
    """ASGI middleware that refuses requests and counts responses.

    With an API key, every route needs it. Without one the server listens on loopback only, and web
    pages must not reach it either: they cannot send another Host header (DNS rebinding), nor JSON
    without a CORS preflight request, which is never answered, nor a POST without an Origin. Routes
    that change the service need the admin token instead, if there is one.
    """

    def __init__(self, app: ASGIApp, *, access: Access, metrics: ServeMetrics) -> None:
        self._app, self._limits, self._metrics = app, access.limits, metrics
        self._key, self._admin = access.api_key, access.admin_token

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
        if scope["method"] == "HEAD":
            await answer_head(self._app, scope, self._bounded(receive), counted)
        else:
            await self._app(scope, self._bounded(receive), counted)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._admin is not None and scope["path"] in CONTROL_ROUTES:
            _require_bearer(headers, self._admin, "the server's admin token")
        elif self._key is not None:
            _require_bearer(headers, self._key, "the server's API key")
        if self._key is None and "host" in headers and not is_loopback_header(headers["host"]):
            raise APIError(
                403, "without an API key this server answers to localhost and 127.0.0.1 only"
            )
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            # A web page cannot leave out the Origin of a POST.
            has_body = scope["path"] not in _WITHOUT_BODY or "origin" in headers
            if has_body and kind != "application/json":
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


def _require_bearer(headers: Headers, secret: str, what: str) -> None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip(" ").encode("latin-1"), secret.encode())
    if scheme.lower() != "bearer" or not is_right:  # case-insensitive, RFC 9110 11.1
        raise APIError(
            401,
            f"give {what}: Authorization: Bearer {'TOKEN' if 'token' in what else 'KEY'}",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
