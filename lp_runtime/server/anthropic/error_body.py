"""Errors in Anthropic's format."""

from __future__ import annotations

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}  # Anthropic's `error.type` by HTTP status; others are invalid_request_error below 500, else api_error


def error_body(status: int, message: str) -> dict[str, object]:
    """Return an error body; during a stream, `status` is the one that the error would have had before it."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
