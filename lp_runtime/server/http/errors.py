"""Errors in OpenAI's or Anthropic's format, and wording of pydantic's validation errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from lp_runtime.errors import BusyError, ConfigError, DeadlineError, LengthError, LookaheadError, RequestError

STATUS = {RequestError: 400, ConfigError: 400, BusyError: 429, DeadlineError: 503}  # by error class; others are 503
# OpenAI's codes by error class; the code of others is the name of their class.
CODES: dict[type[LookaheadError], str] = {LengthError: "context_length_exceeded"}
ANTHROPIC_PATH = "/v1/messages"  # of the routes of Anthropic's API: this one, and those below it
SETTING = re.compile(r"\bsampling\.(\w+)|\b(max_new_tokens)\b")  # in messages about settings that fields have become
MAX_MESSAGE_CHARS = 500  # a message may quote a value that is as long as the request


# Anthropic's `error.type` by HTTP status; others are invalid_request_error below 500, else api_error.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error response; callers may add to its headers.

    `kind` is OpenAI's `error.type`, and `body` is in OpenAI's format.
    """

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None):
        message = " ".join(message.encode(errors="backslashreplace").decode().split())  # one line
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[: MAX_MESSAGE_CHARS // 2]} ... {message[-MAX_MESSAGE_CHARS // 2 :]}"
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        self.headers: dict[str, str] = {"Retry-After": "1"} if status in (429, 503) else {}

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """Convert an error; of an unexpected one the details are in the log only."""
        if not isinstance(error, LookaheadError):
            message = f"{type(error).__name__}: the answer has failed; the server's log has details"
            return cls(500, message, "server_error")
        status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 503)
        kind = "invalid_request_error" if status == 400 else "server_error"
        return cls(status, str(error), kind, CODES.get(type(error), type(error).__name__))

    def response(self, path: str) -> JSONResponse:
        """Build the HTTP response to a request of a path, in the format of that path's API."""
        is_anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
        return JSONResponse(
            anthropic_error(self.status, str(self)) if is_anthropic else self.body, self.status, self.headers
        )


@contextmanager
def in_client_words(length_field: str) -> Iterator[None]:
    """Name the client's fields in errors about settings; `length_field` is its field of the number of new tokens."""
    fields = {"max_new_tokens": length_field, "min_new_tokens": "min_tokens", "bad_words_ids": "bad_words"}
    try:
        yield
    except (ConfigError, RequestError) as error:
        message = SETTING.sub(lambda match: fields.get(name := match[1] or match[2], name), str(error))
        raise type(error)(message) from error


def anthropic_error(status: int, message: str) -> dict[str, object]:
    """Return an Anthropic error body for a status, which a running stream can no longer send itself."""
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


async def handle(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that raised an error; FastAPI's handler of all exceptions."""
    if isinstance(error, RequestValidationError):  # a malformed body
        is_unread = isinstance(error.body, bytes)  # FastAPI parses the body only if it is declared as JSON
        what = "the header Content-Type must be application/json" if is_unread else in_words(error.errors())
        error = ApiError(400, what)
    elif isinstance(error, HTTPException):  # of FastAPI or the gate
        headers = error.headers or {}
        reasons = (reason for kind, reason in UNREADABLE.items() if isinstance(error.__cause__, kind))
        error = ApiError(error.status_code, next(reasons, str(error.detail)))
        error.headers.update(headers)
    elif not isinstance(error, ApiError):
        error = ApiError.of(error)
    return error.response(request.url.path)


# Reasons why a body could not be parsed, by the error of Python's json module; the first that fits counts.
UNREADABLE = {
    UnicodeDecodeError: "body: is not valid UTF-8",
    ValueError: "body: has a number of too many digits",
    RecursionError: "body: is nested too deeply",
}
# Wording of pydantic's error types for the client; pydantic's `ctx` fills the braces.
WORDS = {
    "missing": "must be given",
    "extra_forbidden": "is not a known field",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing_size": "must be an integer of fewer digits",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "is empty",
    "too_long": "must have at most {max_length} entries",
    "json_invalid": "is not valid JSON: {error}",
}
MAX_SHOWN_CHARS = 60  # a message leaves out longer values
TRIED_TYPES = ("str", "int", "float", "bool")  # pydantic's names of union branches


def in_words(errors: Sequence[Mapping]) -> str:
    """Describe the first field that pydantic rejects, with its name and value.

    A field of a union type has one error per branch, and the message joins them with "or", unless the value fits a
    branch except for a part of it.
    """
    errors = _inside(errors)
    where = _place(errors[0])
    has_value = errors[0]["type"] not in ("missing", "extra_forbidden")
    chosen = [each for each in errors if _place(each) == where][: None if has_value else 1]
    meanings = dict.fromkeys(
        WORDS[each["type"]].format(**each.get("ctx", {})) if each["type"] in WORDS else str(each["msg"])
        for each in chosen
    )
    what = " or ".join(meanings).replace(" or must be ", " or ")
    shown = _shown(errors[0].get("input")) if has_value and where != "body" else ""
    return f"{where}{shown}: {what}"


def _inside(errors: Sequence[Mapping]) -> Sequence[Mapping]:
    """Return the errors inside the first rejected value, if it is a list or an object that a union's branch allows.

    If several branches do, they are those of the branch that accepts the most items.
    """
    first = errors[0]["loc"]
    place = len(first) - 1  # in locations, of the branch's name
    if not _is_branch(first[place]):
        return errors
    begun: dict[str, list[Mapping]] = {}  # by branch
    for each in errors:
        where = each["loc"]
        if where[:place] == first[:place] and len(where) > len(first):
            begun.setdefault(where[place], []).append({**each, "loc": where[:place] + where[place + 1 :]})
    if not begun:
        return errors
    return _inside(max(begun.values(), key=lambda inner: [part for part in inner[0]["loc"] if isinstance(part, int)]))


def _shown(value: object) -> str:
    """Format a value for a message, as "=VALUE"; empty if it is long or not a scalar."""
    shown = f"={value!r}" if isinstance(value, str | int | float) else ""
    return shown if len(shown) <= MAX_SHOWN_CHARS + 1 else ""


def _is_branch(part: object) -> bool:
    """Whether a part of an error's location is pydantic's name of a union's branch, or a tag (parts.py)."""
    return "[" in str(part) or part in TRIED_TYPES


def _place(error: Mapping) -> str:
    """Return the dotted name of an error's field, as clients write it; "body" for the whole body.

    Parts that pydantic adds to the location (tags, and the union branch that it tried) are removed.
    """
    parts = [str(part) for part in error["loc"] if part != "body"]
    names = [part for part in parts if not _is_branch(part)]
    if error["type"] == "json_invalid":
        names = []
    return ".".join(names) or "body"
