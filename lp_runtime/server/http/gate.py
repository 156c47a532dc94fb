"""Access checks before the routes: API keys, hosts, origins, body limits; request ids, access log."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lp_runtime.config.serving import ServeConfig
from lp_runtime.server.http.errors import ApiError
from lp_runtime.server.http.settings import allowed_hosts

access_log = logging.getLogger("lp_runtime.access")

# Probes use the address, so their Host header is not checked.
PROBES = ("/health", "/health_generate", "/live", "/ready", "/metrics")
OPEN_PATHS = ("/", *PROBES)  # served without an API key, to probes and browsers
REQUEST_ID_HEADERS = (b"x-request-id", b"request-id")  # of answers: OpenAI's and Anthropic's
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")  # a client's X-Request-Id that matches is used as the request's id
# No framing, no content-type guessing, no referrer; the page loads nothing from other hosts.
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
        b" frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
)


class Gate:
    """ASGI middleware that checks a request before its body is read, and gives it an id and its time of arrival.

    Args:
        app: serves what is accepted.
        config: settings of the server.
        api_keys: accepted keys by the client's name; empty if none is required.
        responses: counts responses by status, those to probes excluded.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, api_keys: Mapping[str, str], responses: Counter[int]):
        self._app, self._config = app, config
        self._responses = responses
        self._keys = {name: key.encode() for name, key in api_keys.items()}
        self._hosts = [host.lower() for host in allowed_hosts(config)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it with status 400, 401, 403, 408 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        client = self._client(headers)
        scope["state"]["client"] = client or ""
        scope["state"]["arrived"] = arrived = time.perf_counter()
        status = 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [(name, request_id.encode()) for name in REQUEST_ID_HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *more, *SECURITY_HEADERS]}
            await send(message)

        try:
            refusal = self._refusal(scope, headers, client)
            if refusal is not None:
                await refusal.response(scope["path"])(scope, receive, named)
            else:
                await self._app(scope, self._bounded(receive), named)
        finally:
            if status and scope["path"] not in PROBES:
                self._responses[status] += 1
            if self._config.access_log:
                _log(scope, request_id, client, status, time.perf_counter() - arrived)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes], client: str | None) -> ApiError | None:
        """Return the error for a request that is refused before its body is read; None if it is accepted."""
        host = headers.get(b"host", b"").decode("latin-1")
        if scope["path"] not in PROBES and not self._is_host_allowed(host):
            return ApiError(400, f"host {host!r}: is not allowed (see allowed_hosts)", code="host_not_allowed")
        if scope["method"] == "POST" and not self._is_origin_allowed(headers, host):
            origin = headers[b"origin"].decode("latin-1")
            return ApiError(403, f"origin {origin!r}: is not allowed (see cors_origins)", "permission_error")
        if client is None and scope["path"] not in OPEN_PATHS:
            error = ApiError(401, "the API key is missing or wrong", "authentication_error", "invalid_api_key")
            error.headers["WWW-Authenticate"] = "Bearer"
            return error
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > self._config.max_body_bytes:
            return ApiError(413, self._too_large())
        return None

    def _is_host_allowed(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host).lower()
        is_known = any(name == each or (each.startswith("*.") and name.endswith(each[1:])) for each in self._hosts)
        return is_known or not self._hosts

    def _is_origin_allowed(self, headers: Mapping[bytes, bytes], host: str) -> bool:
        """Whether a request comes from an allowed web page, from this server's own page, or from no page."""
        if b"origin" not in headers or headers.get(b"sec-fetch-site") in (b"same-origin", b"none"):
            return True
        origin = headers[b"origin"].decode("latin-1")
        own = origin.partition("://")[2] == host and bool(host)
        return own or "*" in self._config.cors_origins or origin in self._config.cors_origins

    def _client(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the client whose key a request has; "" if no key is required, None if it is wrong.

        The key is a bearer token, as OpenAI's clients send it, or in the header x-api-key, as Anthropic's do.
        """
        if not self._keys:
            return ""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = (token.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip())
        # Compare all keys, in constant time, so that response times leak nothing about them.
        matches = [name for key in given for name, each in self._keys.items() if hmac.compare_digest(key, each)]
        return matches[0] if matches else None

    def _too_large(self) -> str:
        return f"the request is too large: must be at most {self._config.max_body_bytes} bytes"

    def _bounded(self, receive: Receive) -> Receive:
        """Wrap `receive` to raise an HTTPException if the body is too large or arrives too slowly."""
        deadline = time.monotonic() + self._config.body_timeout
        size, is_whole = 0, False

        async def bounded() -> Message:
            nonlocal size, is_whole
            if is_whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                what = f"the request's body did not arrive within {self._config.body_timeout:g} seconds"
                raise HTTPException(408, what, {"Connection": "close"}) from None
            size += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if size > self._config.max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return bounded


def _log(scope: Scope, request_id: str, client: str | None, status: int, seconds: float) -> None:
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request_id": request_id,
        "client": client or None,
        "address": scope["client"][0] if scope.get("client") else None,
        "method": scope["method"],
        "path": scope["path"] if scope["path"].startswith("/") else urlsplit(scope["path"]).path,
        "status": status,
        "seconds": round(seconds, 4),
    }
    access_log.info(json.dumps(line))
