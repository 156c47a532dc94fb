"""Send malformed HTTP requests and command lines, and report those that were not refused as required.

Used by tests/server/test_fuzz.py and by `benchmarks/correctness.py fuzz`.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
from collections import Counter
from collections.abc import Sequence
from unittest import mock
from urllib.parse import urlsplit

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.entrypoints import cli
from support.fuzz_cases import COMPLETIONS, GOOD, HttpCase, request

FIXED = LookaheadConfig(7, 5, 7, prior="none")
HANG_SECONDS = 60.0
INVALID_HTTP = b"Invalid HTTP request received."  # uvicorn's answer
# uvicorn refuses what is no HTTP, and may close the connection before all is read. Answers to HEAD have no body.
HTTP_KINDS = ("request line", "header", "length", "encoding", "chunks", "too large", "method")
COMMANDS = {"lp-generate": cli.main, "lp-serve": cli.serve_main}


def answer(url: str, data: bytes) -> tuple[int | str, bytes]:
    """Send bytes to a server; return (status, body). Without an answer, status is `hang` or `no answer`.

    Args:
        url: base URL of the server.
        data: the request, byte for byte.
    """
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), HANG_SECONDS) as connection:
        connection.settimeout(HANG_SECONDS)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read all
                connection.sendall(data)
            # The answer to HEAD announces a body that is not sent.
            response = http.client.HTTPResponse(connection, method=data.partition(b" ")[0].decode("latin-1"))
            response.begin()
            body = b""
            with contextlib.suppress(ConnectionResetError):  # it closes at once if it cannot read further
                body = response.read()
            return response.status, body
        except TimeoutError:
            return "hang", b""
        except (http.client.HTTPException, OSError) as error:
            return "no answer", repr(error).encode()


def fault(case: HttpCase, status: int | str, body: bytes) -> str | None:
    """Return what is wrong with the answer to a malformed request; None if it is refused as required."""
    if status == 200 and case.may_pass:
        return (
            f"an error in the stream: {body[-300:]!r}" if b'"server_error"' in body or b'"api_error"' in body else None
        )
    if not isinstance(status, int) or not 400 <= status < 500:
        return f"{status} {body[:200]!r}"
    if case.kind in HTTP_KINDS and body in (b"", INVALID_HTTP):
        return None
    if not body.startswith(b"{"):
        return f"{status} without a JSON body: {body[:200]!r}"
    message = json.loads(body)["error"]["message"]
    is_readable = message and "\n" not in message and len(message) <= 1000
    return None if is_readable else f"{status} says {message[:200]!r}"


def tokens(url: str) -> list[str]:
    """Return the texts of the 32 tokens that answer a well-formed request."""
    body = GOOD[COMPLETIONS] | {"max_tokens": 32, "logprobs": 1, "ignore_eos": True}
    status, text = answer(url, request(COMPLETIONS, json.dumps(body).encode()))
    assert status == 200, text
    return json.loads(text)["choices"][0]["logprobs"]["tokens"]


def fuzz_requests(url: str, cases: Sequence[HttpCase]) -> tuple[Counter[tuple[str, int | str]], list[str]]:
    """Send every case; return counts by (kind, status), and a line for each that was not refused."""
    seen: Counter[tuple[str, int | str]] = Counter()
    faults = []
    for case in cases:
        status, body = answer(url, case.data)
        seen[case.kind, status] += 1
        what = fault(case, status, body)
        if what:
            faults.append(f"{case.kind}: {what} to {case.data[:700]!r}")
    return seen, faults


class Accepted(Exception):
    """A command line was accepted: replicas would have been started."""


def fuzz_overrides(cases: Sequence[tuple[str, list[str]]]) -> tuple[Counter[tuple[str, int | str]], list[str]]:
    """Run command lines; return counts by (command, exit status), and a line for each one not refused."""
    seen: Counter[tuple[str, int | str]] = Counter()
    faults = []
    with mock.patch.object(LookaheadRuntime, "from_config", side_effect=Accepted):
        for command, arguments in cases:
            error, status = io.StringIO(), "returned"
            try:
                with contextlib.redirect_stderr(error):
                    COMMANDS[command](arguments)
            except SystemExit as end:
                status = end.code
            except Exception as other:
                status = type(other).__name__
            seen[command, status] += 1
            if status != 2 or error.getvalue().count("\n") != 1 or "Traceback" in error.getvalue():
                shown = [argument[:100] for argument in arguments]
                faults.append(f"{command} {shown!r}: {status} {error.getvalue()[:300]!r}")
    return seen, faults
