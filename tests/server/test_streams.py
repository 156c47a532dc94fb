"""Tests of streams: several choices at once, errors before and after the first event, and their latency metrics."""

from __future__ import annotations

import time
import urllib.request

import openai
import pytest
from support import reference
from support.serving import served

from lp_runtime import LookaheadConfig, LookaheadRuntime

PROMPT = reference.PROMPTS[1]


@pytest.fixture(scope="module")
def runtime(small_model_that_chats):
    lookahead = LookaheadConfig(7, 5, 7, prior="none", draft_tables="request")
    with LookaheadRuntime(small_model_that_chats(), device="cpu", dtype="float32", lookahead=lookahead) as runtime:
        yield runtime


@pytest.fixture
def server(runtime):
    with served(runtime) as (url, scheduler):
        yield url, scheduler


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)


def body(**more) -> dict:
    return {"model": "demo", "prompt": PROMPT, "max_tokens": 16, "temperature": 0} | more


def figure(url: str, name: str) -> float:
    """Return the value of a metric."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def test_latency_metrics_count_from_the_arrival_of_a_request(client, server):
    """A prompt of 1 MiB takes a second to tokenize, and a constraint seconds to compile."""
    url, scheduler = server
    submit_all = scheduler.submit_all

    def slow(*arguments, **more):
        time.sleep(0.2)
        return submit_all(*arguments, **more)

    scheduler.submit_all = slow
    client.completions.create(**body())
    assert figure(url, "lp_first_token_seconds_sum") > 0.2 and figure(url, "lp_request_seconds_sum") > 0.2
    assert figure(url, "lp_queue_seconds_count") == 1
