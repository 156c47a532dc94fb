"""Tests of streams: several choices at once, errors before and after the first event, and their latency metrics."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support import reference
from support.processes import PATIENCE, wait_until
from support.serving import served

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.config.serving import ServeConfig
from lp_runtime.errors import ReplicaError
from lp_runtime.request.generation import Delta
from lp_runtime.scheduler.job import Job
from lp_runtime.server.app import Server

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
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


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


def test_proxies_are_asked_to_pass_events_on_at_once(client):
    headers = client.completions.with_raw_response.create(**body(stream=True)).headers
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


def test_stream_of_several_choices_has_their_texts(client):
    more = {"prompt": [PROMPT, reference.PROMPTS[0]], "n": 2, "temperature": 1.0, "seed": 3}
    whole, texts = client.completions.create(**body(**more)), [""] * 4
    for chunk in client.completions.create(**body(stream=True, **more)):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


@pytest.fixture
def jobs(server) -> list[Job]:
    """Jobs of the requests that clients have sent; nothing decodes them."""
    submitted: list[Job] = []

    def submit_all(requests, timeout=None, gpus=None):
        submitted[:] = [Job(request, timeout, gpus) for request in requests]
        return submitted

    server[1].submit_all = submit_all
    return submitted


def test_stream_shows_all_choices_as_they_grow(client, server, jobs):
    """The second text does not wait for the end of the first, and an error of any ends the answer at once."""
    with client.completions.create(**body(n=2, stream=True)) as stream:
        for place in (1, 0, 1):
            jobs[place].deliver(Delta("ab", [5, 6]))
            (choice,) = next(stream).choices
            assert (choice.index, choice.text) == (place, "ab")
        jobs[1].finish(ReplicaError("it broke"))
        with pytest.raises(openai.APIError, match="it broke"):
            next(stream)
    assert all(job.is_cancelled for job in jobs)
    assert figure(server[0], "lp_first_token_seconds_count") == figure(server[0], "lp_inter_token_seconds_count") == 1


def test_error_of_any_choice_ends_a_whole_answer(client, jobs):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.completions.create, **body(n=2))
        wait_until(lambda: jobs)
        jobs[1].finish(ReplicaError("it broke"))
        with pytest.raises(openai.InternalServerError, match="it broke"):
            answer.result()
    assert all(job.is_cancelled for job in jobs)


@pytest.fixture
def waiting(server, jobs) -> list[Job]:
    """Give all jobs a deadline that does not pass during a test."""
    submit_all = server[1].submit_all
    server[1].submit_all = lambda requests, *_: submit_all(requests, time.monotonic() + 2 * PATIENCE)
    return jobs


def test_stream_with_a_deadline_begins_when_its_request_does(client, waiting):
    """A prefill that is longer than clients wait in silence must not keep the head of the answer back."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.completions.create, **body(stream=True))
        wait_until(lambda: waiting)
        assert not answer.done()
        waiting[0].begin()
        stream = answer.result()
        waiting[0].deliver(Delta("ab", [5, 6]))
        assert next(stream).choices[0].text == "ab"
        stream.close()
    wait_until(lambda: waiting[0].is_cancelled)


def test_client_that_leaves_a_waiting_stream_cancels_it(server, waiting):
    connection = http.client.HTTPConnection(server[0].removeprefix("http://"))
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body(stream=True)), headers)
    wait_until(lambda: waiting)
    connection.sock.close()
    wait_until(lambda: waiting[0].is_cancelled)


def test_client_that_leaves_while_a_send_waits_for_it_cancels_its_request(runtime, server, jobs):
    """A client that does not read fills the connection's buffers, so that the server's next send waits."""
    message = {"type": "http.request", "body": json.dumps(body(stream=True, n=2)).encode()}
    head = {"method": "POST", "path": "/v1/completions", "query_string": b"", "headers": [(b"host", b"x")]}
    head["headers"].append((b"content-type", b"application/json"))
    config = ServeConfig(model=runtime.config.model, served_name="demo", host="0.0.0.0")
    app = Server(runtime, server[1], config).app()

    async def leave() -> None:
        waits, messages = asyncio.Event(), [message]

        async def receive():
            if not messages:
                await waits.wait()
                return {"type": "http.disconnect"}
            return messages.pop()

        async def send(message):
            if message["type"] == "http.response.start":
                jobs[0].deliver(Delta("ab", [5, 6]))
            else:
                waits.set()
                await asyncio.Event().wait()

        await app({"type": "http", "asgi": {"spec_version": "2.3"}, **head}, receive, send)
        assert all(job.is_cancelled for job in jobs)

    asyncio.run(leave())
    assert len(jobs) == 2
