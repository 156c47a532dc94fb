"""Refusals: errors in the form of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from lp_runtime.errors import BusyError, ConfigError, DeadlineError, LengthError, LookaheadError, RequestError

STATUS = {RequestError: 400, ConfigError: 400, BusyError: 429, DeadlineError: 503}  # by class of error; others are 503
# OpenAI's codes by class of error; others have the name of their class.
CODES: dict[type[LookaheadError], str] = {LengthError: "context_length_exceeded"}
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
        headers: further headers of the response.
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
        self.headers: dict[str, str] = {"Retry-After": "1"} if status in (429, 503) else {}

    @classmethod
    def of(cls, error: LookaheadError) -> ApiError:
        """Return the API's error for one of this package."""
        status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 503)
        kind = "invalid_request_error" if status == 400 else "server_error"
        code = CODES.get(type(error), type(error).__name__)
        return cls(status, str(error), kind, code)

    @classmethod
    def unforeseen(cls, error: Exception) -> ApiError:
        """Return the API's error for one that nobody has thought of; the log has its traceback."""
        return cls(500, f"{type(error).__name__}: the answer has failed; the server's log says more", "server_error")

    def response(self) -> JSONResponse:
        """Return the HTTP response; clients are asked to retry where the status is 429 or 503."""
        return JSONResponse(self.body, self.status, self.headers)


# What pydantic's types of errors mean to whoever wrote the request; {} has the error's own values.
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
    "json_invalid": "is not valid JSON: {error}",
}
MAX_SHOWN_CHARS = 60  # of a value in a message


async def invalid(_: Request, error: Exception) -> JSONResponse:
    """Answer a body that is malformed, a RequestValidationError, with its first finding in one line of words."""
    assert isinstance(error, RequestValidationError)  # FastAPI calls a handler with its class of error alone
    return ApiError(400, in_words(error.errors())).response()


def in_words(errors: Sequence[Mapping]) -> str:
    """Return what is wrong with the first field that pydantic refuses, with the field's name and its value.

    A field that may be one thing or another has an error for each: all are named, but for an item of a list that says
    what it is, whose own error alone is.

    Args:
        errors: what pydantic found, at least one.
    """
    where = _place(errors[0])
    inside = [each for each in errors if _is_tagged(each) and _place(each).startswith(f"{where}.")]
    if inside:
        errors, where = inside, _place(inside[0])
    found = [each for each in errors if _place(each) == where]
    if errors[0]["type"] in ("missing", "extra_forbidden"):
        found = found[:1]
    meanings = dict.fromkeys(_meaning(each) for each in found)
    what = " or ".join(meanings).replace(" or must be ", " or ")
    value = errors[0].get("input")
    is_shown = where != "body" and errors[0]["type"] not in ("missing", "extra_forbidden")
    return f"{where}{_shown(value) if is_shown else ''}: {what}"


def _shown(value: object) -> str:
    """Return a value as messages show it; empty where it is long."""
    shown = f"={value!r}" if isinstance(value, str | int | float) else ""
    return shown if len(shown) <= MAX_SHOWN_CHARS + 1 else ""


def _meaning(error: Mapping) -> str:
    """Return what an error says, in words."""
    known = WORDS.get(error["type"])
    return str(error["msg"]) if known is None else known.format(**error.get("ctx", {}))


def _is_tagged(error: Mapping) -> bool:
    """Whether an error is inside of an item that says what it is: pydantic names the item's tag, as [message]."""
    return any(str(part).startswith("[") for part in error["loc"])


def _place(error: Mapping) -> str:
    """Return the name of the field that an error is about, as a client writes it; "body" for all of it.

    Where a value may be of several types, pydantic appends the type that it has tried.
    """
    parts = [str(part) for part in error["loc"] if part != "body"]
    names = [part for part in parts if "[" not in part and part not in TRIED_TYPES]
    if error["type"] == "json_invalid":
        names = []
    return ".".join(names) or "body"


TRIED_TYPES = ("str", "int", "float", "bool")  # as pydantic names the branches of a union
