"""Refusals: errors in the form of the OpenAI API, and the gate that checks a request before it is read."""

from __future__ import annotations

import hmac

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lp_runtime.errors import BusyError, ConfigError, DeadlineError, LookaheadError, RequestError

STATUS = {RequestError: 400, ConfigError: 400, BusyError: 429, DeadlineError: 503}  # by class of error; others are 503
MAX_MESSAGE_CHARS = 500  # a message may quote a value as long as a request


class ApiError(Exception):
    """An error as the OpenAI API reports it.

    Args:
        status: HTTP status.
        message: what is wrong; shortened to MAX_MESSAGE_CHARS, in one line.
        kind: OpenAI's type of the error.
        code: OpenAI's code of the error; None for none.

    Attributes:
        status: see Args.
        body: the JSON body.
    """

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None):
        message = " ".join(message.encode(errors="backslashreplace").decode().split())
        message = (
            message
            if len(message) <= MAX_MESSAGE_CHARS
            else f"{message[: MAX_MESSAGE_CHARS // 2]} ... {message[-MAX_MESSAGE_CHARS // 2 :]}"
        )
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}

    @classmethod
    def of(cls, error: LookaheadError) -> ApiError:
        """Return the API's error for one of this package."""
        status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 503)
        kind = "invalid_request_error" if status == 400 else "server_error"
        return cls(status, str(error), kind, type(error).__name__)

    def response(self) -> JSONResponse:
        """Return the HTTP response; clients are asked to retry where the status is 429 or 503."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


async def invalid(_: Request, error: Exception) -> JSONResponse:
    """Answer a body that pydantic refuses, with the first finding of a RequestValidationError in one line."""
    assert isinstance(error, RequestValidationError)  # FastAPI calls a handler with its class of error alone
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    return ApiError(400, f"{where}: {first['msg']}").response()


class Gate:
    """ASGI middleware that checks the API key and the size of the body before a request is read.

    Args:
        app: the application behind the gate.
        api_key: key that clients must send; None if none is required.
        max_body_bytes: largest size of a request's body, in bytes.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int):
        self._app, self._key, self._limit = app, api_key, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or refuse it with status 401 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._key is not None and scope["path"].startswith("/v1/"):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._key.encode()):
                error = ApiError(401, "the API key is missing or wrong", "authentication_error", "invalid_api_key")
                await error.response()(scope, receive, send)
                return
        limit, size = self._limit, 0
        too_large = ApiError(413, f"the request is too large: must be at most {limit} bytes")
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > limit:
            await too_large.response()(scope, receive, send)
            return

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise HTTPException(413, f"the request is too large: must be at most {limit} bytes")
            return message

        await self._app(scope, counted, send)
