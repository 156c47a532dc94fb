"""Tests with some of the malformed requests and command lines of `benchmarks/correctness.py fuzz`."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from support import fuzz
from support.fuzz_cases import COMPLETIONS, GOOD, LIMITS, HttpCase, http_cases, request
from support.fuzz_command_lines import override_cases
from support.fuzz_fields import FIELDS_LIMITS, FIELDS_TEMPLATE, field_cases
from support.serving import served

from lp_runtime import LookaheadRuntime


@pytest.fixture(scope="module")
def runtime(small_model_that_chats):
    model = small_model_that_chats(FIELDS_TEMPLATE)
    with LookaheadRuntime(model, device="cpu", dtype="float32", lookahead=fuzz.FIXED) as runtime:
        yield runtime


@pytest.fixture
def site(runtime):
    """Yield (base URL, scheduler) of a server."""
    with served(runtime, **LIMITS) as site:
        yield site


@pytest.mark.parametrize("count", [120, pytest.param(400, marks=pytest.mark.slow)])
def test_malformed_requests_are_refused_and_the_server_continues(site, count):
    url, scheduler = site
    before = fuzz.tokens(url)
    seen, faults = fuzz.fuzz_requests(url, http_cases(count, seed=2))
    assert not faults, "\n".join(faults)
    assert sum(seen.values()) == count and len({status for _, status in seen}) > 4
    assert fuzz.answer(url, request("/health", b"", "GET"))[0] == 200
    assert fuzz.tokens(url) == before and not scheduler.num_running


@pytest.mark.parametrize("count", [72, pytest.param(358, marks=pytest.mark.slow)])  # 358: every field once
def test_fuzzed_fields_of_every_route_are_answered(runtime, count):
    cases = list(field_cases(count, seed=1))
    with served(runtime, **FIELDS_LIMITS) as (url, _):
        seen, faults = fuzz.fuzz_requests(url, cases)
    assert not faults, "\n".join(faults)
    assert seen["derived", 200] > count // 6 and seen["derived", 400] > count // 6


def test_fuzzer_reports_accepted_input_and_server_errors(site):
    good = HttpCase("good", request(COMPLETIONS, json.dumps(GOOD[COMPLETIONS]).encode()))
    assert fuzz.fuzz_requests(site[0], [good])[1][0].startswith("good: 200")
    assert fuzz.fault(good, 500, b"") and fuzz.fault(good, "hang", b"") and fuzz.fault(good, 307, b"")
    assert fuzz.fault(good, 400, b"Bad Request") and fuzz.fault(good, 400, b"")
    seen, faults = fuzz.fuzz_overrides([("lp-generate", ["prompt=x"])])
    assert seen == Counter({("lp-generate", "Accepted"): 1}) and len(faults) == 1


@pytest.mark.parametrize("count", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_malformed_command_lines_are_refused_in_one_line(count):
    seen, faults = fuzz.fuzz_overrides(override_cases(count, seed=1))
    assert not faults, "\n".join(faults)
    assert sum(seen.values()) == count
