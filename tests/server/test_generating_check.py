"""Tests of GET /health_generate: it generates at most one token per interval and disturbs no request."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import pytest
from scheduler.held_runtime import HeldRuntime, first_delta
from support import reference
from support.processes import PATIENCE, wait_until
from support.serving import served

from lp_runtime import LookaheadConfig, LookaheadRuntime, Scheduler
from lp_runtime.server.status import GeneratingCheck


@pytest.fixture(scope="module")
def runtime(small_demo_dir):
    lookahead = LookaheadConfig(7, 5, 7, prior="none")
    with LookaheadRuntime(small_demo_dir, device="cpu", dtype="float32", lookahead=lookahead) as runtime:
        yield runtime


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ask(url: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_health_generate_caches_its_answer_and_needs_no_key(runtime):
    with served(runtime, health_interval=3600.0, api_keys={"a-client": "secret"}) as (url, scheduler):
        for _ in range(2):  # the second call gets the answer of the first; no key is needed
            assert ask(f"{url}/health_generate") == (200, {"status": "ok", "replicas": 1})
        assert scheduler.totals.requests == {"length": 1}
        assert scheduler.totals.new_tokens == 1


def test_health_generate_is_off_by_default(runtime):
    with served(runtime) as (url, scheduler):
        assert ask(f"{url}/health_generate")[0] == 404
        assert not scheduler.totals.requests


def test_check_generates_again_after_the_interval(runtime):
    clock = Clock()
    with Scheduler(runtime) as scheduler:
        check = GeneratingCheck(scheduler, 10.0, PATIENCE, clock)
        for now, num_checks in ((0.0, 1), (9.0, 1), (10.0, 2), (19.0, 2)):
            clock.now = now
            assert asyncio.run(check.problem()) is None
            assert scheduler.totals.requests == {"length": num_checks}


def test_concurrent_callers_share_one_check(runtime):
    async def at_once(check: GeneratingCheck) -> list[str | None]:
        return await asyncio.gather(*(check.problem() for _ in range(5)))

    with Scheduler(runtime) as scheduler:
        assert asyncio.run(at_once(GeneratingCheck(scheduler, 10.0, PATIENCE))) == [None] * 5
        assert scheduler.totals.requests == {"length": 1}


def test_token_of_running_request_passes_the_check(runtime):
    with Scheduler(runtime) as scheduler:
        job = scheduler.stream(reference.PROMPTS[1], 2000, eos=False)
        first_delta(job)
        assert asyncio.run(GeneratingCheck(scheduler, 10.0, PATIENCE).problem()) is None
        assert not scheduler.totals.requests, "the check has submitted a request"
        job.cancel()


def test_check_fails_if_no_token_arrives_within_its_timeout(runtime):
    held = HeldRuntime(runtime)
    clock = Clock()
    with Scheduler(held) as scheduler:
        job = held.submit(scheduler, runtime.request(reference.PROMPTS[1], 4, eos=False))
        first_delta(job)
        check = GeneratingCheck(scheduler, 10.0, 0.1, clock)
        assert asyncio.run(check.problem()) == "no token came within 0.1 seconds"
        held.release(job)
        wait_until(lambda: scheduler.totals.requests == {"length": 1})
        assert asyncio.run(check.problem()) == "no token came within 0.1 seconds"  # the answer of the last check
        clock.now = 10.0
        assert asyncio.run(GeneratingCheck(scheduler, 10.0, PATIENCE, clock).problem()) is None


def test_check_reports_the_error_of_its_request(runtime):
    scheduler = Scheduler(runtime)
    check = GeneratingCheck(scheduler, 10.0, PATIENCE)
    scheduler.close()
    assert asyncio.run(check.problem()) == "the scheduler is closed"
