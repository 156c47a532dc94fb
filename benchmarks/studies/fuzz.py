"""Sends malformed HTTP requests and command lines: is each refused, and does the server keep running?

    python benchmarks/correctness.py fuzz --requests 2200 --fields 1000 --overrides 1000

Every request goes to a server of the demo model in this process, byte for byte over a socket. It must be answered with
a 4xx within a minute. Requests of the kinds `extreme value`, `random` and `derived` may be well-formed and get a 200.
Those of the kind `derived` cover every field of every route, by the classes of the bodies; chats of their server take
tools, and reason.

Every command line goes to the command's main function: it must end with status 2 and one line on stderr. Afterwards
/health must return 200, nothing may be left running, and a good request must get the same tokens as before. The tables
count answers by kind and status; anything wrong goes to stderr, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

from common import Results
from support.fuzz import FIXED, answer, fuzz_overrides, fuzz_requests, tokens
from support.fuzz_cases import LIMITS, http_cases, request
from support.fuzz_command_lines import override_cases
from support.fuzz_fields import FIELDS_LIMITS, FIELDS_TEMPLATE, field_cases
from support.serving import TEMPLATE, demo_model_that_chats, served

from lp_runtime import LookaheadRuntime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--requests", type=int, default=2200)
    parser.add_argument("--fields", type=int, default=1000)
    parser.add_argument("--overrides", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)


def write(name: str, output: Path | None, seen: Counter[tuple[str, int | str]], about: str) -> None:
    """Write a table of answers by kind and status.

    Args:
        name: name of the table.
        output: folder; None to print only.
        seen: number of answers by (kind, status).
        about: text above the table.
    """
    results = Results(name, output)
    statuses = sorted({status for _, status in seen}, key=str)
    kinds = sorted({kind for kind, _ in seen})
    for kind in kinds:
        results.add({"": kind} | {str(status): seen[kind, status] or None for status in statuses})
    results.add({"": "all"} | {str(status): sum(seen[kind, status] for kind in kinds) for status in statuses})
    results.finish(about)


def run(args: argparse.Namespace) -> int:
    """Send everything; return 1 if anything is not refused, or the server does not keep running."""
    faults, is_well = [], True
    every = {
        "fuzz_requests": (TEMPLATE, http_cases(args.requests, args.seed), LIMITS),
        "fuzz_fields": (FIELDS_TEMPLATE, list(field_cases(args.fields, args.seed)), FIELDS_LIMITS),
    }
    for name, (template, cases, settings) in every.items():
        with tempfile.TemporaryDirectory() as folder:
            model = demo_model_that_chats(Path(folder) / "model", template)
            with (
                LookaheadRuntime(model, device="cpu", dtype="float32", lookahead=FIXED) as runtime,
                served(runtime, **cast(dict[str, Any], settings)) as (url, scheduler),
            ):
                expected, started = tokens(url), time.perf_counter()
                seen, new = fuzz_requests(url, cases)
                seconds = time.perf_counter() - started
                health, _ = answer(url, request("/health", b"", "GET"))
                is_same, num_left = tokens(url) == expected, scheduler.num_running + scheduler.num_waiting
        faults += new
        is_well &= health == 200 and is_same and not num_left
        compared = "unchanged" if is_same else "CHANGED"
        after = f"afterwards /health {health}, a good request's tokens {compared}, {num_left} requests left"
        write(name, args.output, seen, f"{len(cases)} requests in {seconds:.0f} s, seed {args.seed}; {after}")
    seen, command_faults = fuzz_overrides(override_cases(args.overrides, args.seed))
    write("fuzz_command_lines", args.output, seen, f"{args.overrides} command lines, by exit status, seed {args.seed}")
    for line in faults + command_faults:
        print(line, file=sys.stderr)
    return 0 if is_well and not faults and not command_faults else 1
