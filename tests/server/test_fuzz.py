"""Tests with a few hundred malformed requests and command lines of `benchmarks/correctness.py fuzz`."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from support import fuzz
from support.fuzz_cases import COMPLETIONS, GOOD, LIMITS, HttpCase, http_cases, request
from support.fuzz_command_lines import override_cases
from support.fuzz_fields import FIELDS_LIMITS, FIELDS_TEMPLATE, field_cases
from support.serving import demo_model_that_chats, served

from lp_runtime import LookaheadRuntime


@pytest.fixture(scope="module")
def site():
    """Yield (base URL, scheduler) of a server."""
    with tempfile.TemporaryDirectory() as folder:
        model = demo_model_that_chats(Path(folder) / "model")
        with (
            LookaheadRuntime(model, device="cpu", dtype="float32", lookahead=fuzz.FIXED) as runtime,
            served(runtime, **LIMITS) as site,
        ):
            yield site


def test_malformed_requests_are_refused_and_the_server_continues(site):
    url, scheduler = site
    before = fuzz.tokens(url)
    seen, faults = fuzz.fuzz_requests(url, http_cases(400, seed=1))
    assert not faults, "\n".join(faults)
    assert sum(seen.values()) == 400 and len({status for _, status in seen}) > 4
    assert fuzz.answer(url, request("/health", b"", "GET"))[0] == 200
    assert fuzz.tokens(url) == before and not scheduler.num_running


def test_fuzzed_fields_of_every_route_are_answered():
    cases = list(field_cases(300, seed=1))
    with tempfile.TemporaryDirectory() as folder:
        model = demo_model_that_chats(Path(folder) / "model", FIELDS_TEMPLATE)
        with (
            LookaheadRuntime(model, device="cpu", dtype="float32", lookahead=fuzz.FIXED) as runtime,
            served(runtime, **FIELDS_LIMITS) as (url, _),
        ):
            seen, faults = fuzz.fuzz_requests(url, cases)
    assert not faults, "\n".join(faults)
    assert seen["derived", 200] > 50 and seen["derived", 400] > 50


def test_fuzzer_reports_accepted_input_and_server_errors(site):
    good = HttpCase("good", request(COMPLETIONS, json.dumps(GOOD[COMPLETIONS]).encode()))
    assert fuzz.fuzz_requests(site[0], [good])[1][0].startswith("good: 200")
    assert fuzz.fault(good, 500, b"") and fuzz.fault(good, "hang", b"") and fuzz.fault(good, 307, b"")
    seen, faults = fuzz.fuzz_overrides([("lp-generate", ["prompt=x"])])
    assert seen == Counter({("lp-generate", "Accepted"): 1}) and len(faults) == 1


def test_malformed_command_lines_are_refused_in_one_line():
    seen, faults = fuzz.fuzz_overrides(override_cases(30, seed=1))
    assert not faults, "\n".join(faults)
    assert sum(seen.values()) == 30
