"""What is refused, and how: OpenAI's form of an error, and the gate that a request passes before it is read."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from lp_runtime.errors import BusyError, ConfigError, DeadlineError, LookaheadError, RequestError

STATUS = {RequestError: 400, ConfigError: 400, BusyError: 429, DeadlineError: 503}  # of ours; all others are 503
MAX_MESSAGE = 500  # characters: what it quotes may be as long as a request


class ApiError(Exception):
    """An answer in OpenAI's form of an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None):
        message = " ".join(message.encode(errors="backslashreplace").decode().split())
        message = (
            message
            if len(message) <= MAX_MESSAGE
            else f"{message[: MAX_MESSAGE // 2]} ... {message[-MAX_MESSAGE // 2 :]}"
        )
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}

    @classmethod
    def of(cls, error: LookaheadError) -> ApiError:
        status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 503)
        kind = "invalid_request_error" if status == 400 else "server_error"
        return cls(status, str(error), kind, type(error).__name__)

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    """What pydantic has found, in one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    return ApiError(400, f"{where}: {first['msg']}").response()


class Gate:
    """Before anything is read: the key, and the size of the body.

    Args:
        app: what lies behind it.
        api_key: that clients must send; None for none.
        max_body_bytes: of a request.
    """

    def __init__(self, app: Callable, api_key: str | None, max_body_bytes: int):
        self._app, self._key, self._limit = app, api_key, max_body_bytes

    async def __call__(self, scope, receive, send) -> None:
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

        async def counted() -> dict:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise HTTPException(413, f"the request is too large: must be at most {limit} bytes")
            return message

        await self._app(scope, counted, send)
