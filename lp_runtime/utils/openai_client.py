"""Client for servers with the OpenAI API: streams answers, reports errors in one line."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lp_runtime.errors import ConfigError, LaunchError, RequestError, first_line
from lp_runtime.utils.files import read_ascii

MAX_ERROR_CHARS = 300  # a server's message is cut after this
DONE = "[DONE]"
REASONING_FIELDS = ("reasoning_content", "reasoning")  # names of a delta's reasoning text; servers differ


@dataclass(frozen=True)
class Endpoint:
    """A server's address, API key and timeout."""

    url: str  # http(s)://HOST:PORT, with or without a path (/v1)
    api_key: str | None = None  # sent as a bearer token
    timeout: float = 600.0  # seconds without a byte after which the server counts as gone

    @classmethod
    def of(cls, url: str, api_key: str | None, api_key_file: str | None) -> Endpoint:
        """Return the endpoint that the settings describe; ConfigError for a bad URL or unreadable key file."""
        if not _can_be_asked(url):
            what = "with a path or without, and without a user and a query"
            raise ConfigError(f"url={url}: must be http://HOST:PORT or https://HOST:PORT, {what}")
        if api_key_file is not None:
            api_key = _read_key(api_key_file)
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key: must be printable ASCII")
        return cls(url, api_key)

    def model(self) -> str:
        """Return the name of the first model that the server lists; raises as `stream` does."""
        with self._asked("GET", "models", None) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise LaunchError(f"url={self.url}: it lists no model, so give served_name=") from error

    def stream(self, route: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """Send a request and yield the events of the streamed answer; closing the iterator ends the request.

        Raises LaunchError if the server cannot be reached, or closes the stream before [DONE] or a finish reason, and
        RequestError if it refuses the request, or fails.
        """
        is_finished = False
        with self._asked("POST", route, {**body, "stream": True}) as response:
            for line in response:
                kind, _, data = line.decode(errors="replace").strip().partition(":")
                if kind != "data":
                    continue
                if data.strip() == DONE:
                    return
                event = _parsed(data)
                if event.get("error"):  # some servers send "error": null with every event
                    raise RequestError(f"url={self.url}: {_message(event)}")
                is_finished |= any(choice.get("finish_reason") for choice in choices_of(event))
                yield event
        if not is_finished:
            raise LaunchError(f"url={self.url}: the answer ended before its end")

    @contextmanager
    def _asked(self, method: str, route: str, body: Mapping[str, object] | None) -> Iterator[http.client.HTTPResponse]:
        """Send a request; yield the response, whose status is 200."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        path = parts.path.rstrip("/") or "/v1"
        try:
            connection.request(method, f"{path}/{route}", None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                answer = response.read(1 << 16).decode(errors="replace")
                raise RequestError(f"url={self.url}: status {response.status}: {_message(_parsed(answer)) or answer}")
            yield response
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            reason = getattr(error, "strerror", None) or first_line(error) or type(error).__name__
            raise LaunchError(f"url={self.url}: cannot be reached ({reason})") from error
        finally:
            connection.close()


def choices_of(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a stream event, dropping those that are not JSON objects."""
    choices = event.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def delta_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the delta of a chat event's choice; an empty dict if there is none."""
    delta = choice.get("delta")
    return delta if isinstance(delta, dict) else {}


def _can_be_asked(url: str) -> bool:
    """Return whether a string is an HTTP(S) URL of a host name that DNS can encode and an ASCII path alone."""
    try:
        parts = urlsplit(url)
        has_host = bool((parts.hostname or "").encode("idna")) and (parts.port or 1) > 0
    except ValueError:  # includes UnicodeError: a part of the host name is empty or too long
        return False
    if "@" in parts.netloc or parts.query or parts.fragment:  # they would not be sent
        return False
    return has_host and parts.scheme in ("http", "https") and parts.path.isascii()


def _read_key(path: str) -> str:
    try:
        return read_ascii(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ConfigError(f"api_key_file={path}: cannot be read: {reason}") from error


def _parsed(text: str) -> dict[str, Any]:
    """Parse a JSON object; return an empty dict for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _message(body: Mapping[str, Any]) -> str:
    """Return the message of an OpenAI API error body on one line; empty if there is none."""
    error = body.get("error") or body.get("detail") or ""
    message = error.get("message") or error if isinstance(error, dict) else error
    return " ".join(str(message).split())[:MAX_ERROR_CHARS]
