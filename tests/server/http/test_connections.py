"""Tests of slow, idle and too many connections, and of what clients read when the server ends."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlsplit

import openai
import pytest
from support import reference
from support.processes import PATIENCE, wait_until
from support.serving import served

import lp_runtime.server.http.connections
from lp_runtime import LookaheadConfig, LookaheadRuntime

PROMPT = reference.PROMPTS[1]
SLOW = {"ignore_eos": True, "lookahead": {"W": 0, "N": 2, "G": 0}}
NEVER = 10 * PATIENCE
LONG = 3000  # tokens; a request of this length does not end during a test


@pytest.fixture(scope="module")
def runtime(small_demo_dir):
    lookahead = LookaheadConfig(7, 5, 7, prior="none")
    with LookaheadRuntime(small_demo_dir, device="cpu", dtype="float32", lookahead=lookahead) as runtime:
        yield runtime


def connect(url: str) -> socket.socket:
    place = urlsplit(url)
    connection = socket.create_connection((place.hostname, place.port), PATIENCE)
    connection.settimeout(PATIENCE)
    return connection


def is_healthy(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE) as answer:
        return answer.status == 200


def test_slow_headers_and_idle_connections_are_closed(runtime):
    with served(runtime, header_timeout=0.2, keep_alive_timeout=0.2) as (url, _):
        silent, slow, idle, second = (connect(url) for _ in range(4))
        slow.sendall(b"GET /health HTTP/1.1\r\nHost:")
        idle.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(100).startswith(b"HTTP/1.1 200")
        second.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert second.recv(1 << 16).startswith(b"HTTP/1.1 200")
        second.sendall(b"GET /live HTTP")  # the head of the next request never ends
        for connection in (silent, slow, idle, second):
            while connection.recv(1 << 16):  # b"" once the server has closed; a timeout fails the test
                pass
            connection.close()
        assert is_healthy(url)


def test_slow_body_gets_408(runtime):
    with served(runtime, body_timeout=0.2) as (url, _), connect(url) as connection:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
        )
        connection.sendall(head + b"{")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 408 and "did not arrive within 0.2 seconds" in json.load(answer)["error"]["message"]
        assert connection.recv(100) == b"", "and closed"


def test_stream_sends_comments_while_there_is_no_text(runtime):
    options = {"model": "demo", "prompt": PROMPT * 5, "max_tokens": 8, "temperature": 0}
    with served(runtime, ping_seconds=1e-4) as (url, _):
        body = json.dumps({**options, "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            lines = answer.read().decode().splitlines()
        assert any(line.startswith(":") for line in lines)
        assert all(not line or line.startswith((":", "data: ")) for line in lines)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            text = "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **options))
            assert text == client.completions.create(**options).choices[0].text


GET = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


def test_connections_that_wait_longest_end_at_the_limit(runtime, caplog, monkeypatch):
    """One that has been answered is closed; one that has not sent a request yet gets an answer first."""
    monkeypatch.setattr(lp_runtime.server.http.connections, "REFUSAL_SECONDS", NEVER)
    with served(runtime, max_connections=4, header_timeout=NEVER, keep_alive_timeout=NEVER) as (url, _):
        silent, answered = connect(url), connect(url)
        answered.sendall(GET)
        assert answered.recv(1 << 16).startswith(b"HTTP/1.1 200")
        others = [connect(url) for _ in range(6)]
        assert answered.recv(1) == b""
        for connection in (silent, *others[:2]):
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 503")
            connection.close()
        for connection in others[2:]:
            connection.sendall(GET)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            connection.close()
        assert is_healthy(url)
    assert caplog.text.count("too many connections: 4 are open") == 1


def test_connections_beyond_the_limit_get_503(runtime):
    with served(runtime, max_connections=2) as (url, scheduler):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        asked = {"model": "demo", "prompt": PROMPT, "max_tokens": LONG, "stream": True, "extra_body": SLOW}
        streams = [client.completions.create(**asked) for _ in range(2)]  # one is decoded, and one waits
        next(iter(streams[0]))
        with pytest.raises(urllib.error.HTTPError) as caught:
            is_healthy(url)
        assert caught.value.code == 503 and caught.value.headers["Retry-After"] == "1"
        body = json.load(caught.value)  # an error of both APIs, as the path is not known
        assert "too many connections: 2" in body["error"]["message"] and body["type"] == "error"
        assert body["error"]["type"] == "overloaded_error"
        for stream in streams:
            stream.close()
        wait_until(lambda: not scheduler.num_running)
        assert is_healthy(url)


def test_clients_get_an_error_when_the_server_shuts_down(runtime):
    """One client streams, one waits for a whole answer, and one is queued.

    The answers are long, as a short one could end in time.
    """
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": LONG, "extra_body": SLOW}
    events: list[str] = []
    started = threading.Event()

    def stream(url: str) -> None:
        asked = {"prompt": PROMPT, "max_tokens": LONG, "stream": True, **SLOW}
        data = json.dumps(asked).encode()
        question = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(question, timeout=PATIENCE) as answer:
            for line in answer:
                events.append(line.decode())
                started.set()

    with ThreadPoolExecutor(3) as pool:
        with served(runtime, shutdown_timeout=0.1) as (url, scheduler):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
            streamed = pool.submit(stream, url)
            started.wait(PATIENCE)
            whole = [pool.submit(client.completions.create, **body) for _ in range(2)]
            wait_until(lambda: scheduler.num_waiting + scheduler.num_running == 3)
        streamed.result(PATIENCE)
        for each in whole:
            with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
                each.result(PATIENCE)
    data = [line[6:] for line in events if line.startswith("data: ")]
    assert data[-1].strip() == "[DONE]"
    assert json.loads(data[-2])["error"]["message"] == "the server is shutting down"
    assert "choices" in json.loads(data[0])


def test_shutdown_waits_for_running_answer(runtime):
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 64, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        with served(runtime, shutdown_timeout=PATIENCE) as (url, scheduler):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            answer = pool.submit(client.completions.create, **asked)
            wait_until(lambda: scheduler.num_running or answer.done())
        assert answer.result(PATIENCE).usage.completion_tokens == 64


def test_new_requests_get_503_while_shutdown_waits_for_answers(runtime):
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": LONG, "extra_body": SLOW}
    with ExitStack() as stack:
        url, _ = stack.enter_context(served(runtime, shutdown_timeout=NEVER))
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        stream = client.completions.create(**asked, stream=True)
        assert next(iter(stream)).choices[0].text
        ending = threading.Thread(target=stack.pop_all().close)
        ending.start()
        wait_until(lambda: status_of(url, "/ready") == 503)
        assert status_of(url, "/live") == 200
        with pytest.raises(openai.InternalServerError, match="503.*the server is shutting down"):
            client.completions.create(model="demo", prompt=PROMPT, max_tokens=1)
        assert next(iter(stream)).choices[0].text
        stream.close()
        ending.join(PATIENCE)
    with pytest.raises(ConnectionRefusedError):
        connect(url)


def status_of(url: str, path: str) -> int:
    try:
        with urllib.request.urlopen(url + path, timeout=PATIENCE) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
