"""Thousands of malformed HTTP requests and command lines: is each refused, and does the server go on?

    python benchmarks/fuzz.py --requests 2200 --overrides 1000

Every request goes to a server of the demo model in this process, byte for byte over a socket. It must be answered by a
4xx within a minute; requests of the kinds `extreme value` and `random` may be well-formed after all, and get a 200.
Every command line goes to the command's main function: it must end with status 2 and one line on stderr. Afterwards
/health must say 200, nothing may be left running, and a good request must get the tokens that it got before. Prints
the answers by kind and status, and what was wrong on stderr; the exit status is 1 if anything was.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

from common import machine, markdown

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.entrypoints import cli
from support.fuzz_cases import COMPLETIONS, GOOD, LIMITS, HttpCase, http_cases, request
from support.fuzz_command_lines import override_cases
from support.serving import demo_model_that_chats, served

FIXED = LookaheadConfig(7, 5, 7, prior="none")
HANG_SECONDS = 60.0
COMMANDS = {"lp-generate": cli.main, "lp-serve": cli.serve_main}


def answer(url: str, data: bytes) -> tuple[int | str, bytes]:
    """(status, body) of the answer to what is sent; instead of a status, `hang` or `no answer`."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), HANG_SECONDS) as connection:
        connection.settimeout(HANG_SECONDS)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have answered before the end
                connection.sendall(data)
            # What a HEAD's answer announces does not come.
            response = http.client.HTTPResponse(connection, method=data.partition(b" ")[0].decode("latin-1"))
            response.begin()
            body = b""
            with contextlib.suppress(ConnectionResetError):  # it closes at once where it can read no further
                body = response.read()
            return response.status, body
        except TimeoutError:
            return "hang", b""
        except (http.client.HTTPException, OSError) as error:
            return "no answer", repr(error).encode()


def fault(case: HttpCase, status: int | str, body: bytes) -> str | None:
    """What is wrong with an answer, if anything."""
    if status == 200 and case.may_pass:
        return None
    if not isinstance(status, int) or not 400 <= status < 500:
        return f"{status} {body[:200]!r}"
    if body.startswith(b"{"):
        message = json.loads(body)["error"]["message"]
        if not message or "\n" in message or len(message) > 1000:
            return f"{status} says {message[:200]!r}"
    return None


def tokens(url: str) -> list[str]:
    """The tokens of a good request, and their log-probabilities."""
    body = GOOD[COMPLETIONS] | {"max_tokens": 32, "logprobs": 1, "ignore_eos": True}
    status, text = answer(url, request(COMPLETIONS, json.dumps(body).encode()))
    assert status == 200, text
    return json.loads(text)["choices"][0]["logprobs"]["tokens"]


def fuzz_requests(url: str, cases: Sequence[HttpCase]) -> tuple[Counter, list[str]]:
    """(answers by (kind, status), what was wrong)."""
    seen, faults = Counter(), []
    for case in cases:
        status, body = answer(url, case.data)
        seen[case.kind, status] += 1
        what = fault(case, status, body)
        if what:
            faults.append(f"{case.kind}: {what} to {case.data[:700]!r}")
    return seen, faults


class Accepted(Exception):
    """Replicas would have been started."""


def fuzz_overrides(cases: Sequence[tuple[str, list[str]]]) -> tuple[Counter, list[str]]:
    """The same of command lines."""
    seen, faults = Counter(), []
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


def table(seen: Counter) -> str:
    """Answers by kind and status."""
    statuses = sorted({status for _, status in seen}, key=str)
    kinds = sorted({kind for kind, _ in seen})
    rows = [[kind, *(seen[kind, status] or "" for status in statuses)] for kind in kinds]
    rows.append(["all", *(sum(seen[kind, status] for kind in kinds) for status in statuses)])
    return markdown(["", *map(str, statuses)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2200)
    parser.add_argument("--overrides", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = demo_model_that_chats(Path(folder) / "model")
        with (
            LookaheadRuntime(model, device="cpu", dtype="float32", lookahead=FIXED) as runtime,
            served(runtime, **LIMITS) as (url, scheduler),
        ):
            expected, started = tokens(url), time.perf_counter()
            seen, faults = fuzz_requests(url, http_cases(args.requests, args.seed))
            seconds = time.perf_counter() - started
            health, _ = answer(url, request("/health", b"", "GET"))
            is_same, num_left = tokens(url) == expected, scheduler.num_running + scheduler.num_waiting
    print(f"{machine()}; {args.requests} requests in {seconds:.0f} s, seed {args.seed}\n")
    print(table(seen))
    compared = "the same" if is_same else "OTHERS"
    print(f"\nafterwards: /health {health}, a good request's tokens {compared}, {num_left} requests left")
    command_seen, command_faults = fuzz_overrides(override_cases(args.overrides, args.seed))
    print(f"\n{args.overrides} command lines, by exit status\n\n{table(command_seen)}")
    for line in faults + command_faults:
        print(line, file=sys.stderr)
    sys.exit(0 if health == 200 and is_same and not num_left and not faults and not command_faults else 1)


if __name__ == "__main__":
    main()
