"""Tests of hosts, origins, keys, request ids, the access log, and the error for a slow body."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter

import pytest

from lp_runtime.config.serving import ServeConfig
from lp_runtime.server.http.gate import PROBES, Gate

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "client": ("127.0.0.1", 1)}


class Recorder:
    """A client of the gate, and the gate's application, which reads the body and answers 200."""

    def __init__(self, api_keys: dict[str, str] | None = None, **settings):
        self.responses: Counter[int] = Counter()
        self._gate = Gate(self._app, ServeConfig(host="0.0.0.0", **settings), api_keys or {}, self.responses)
        self.sent: list[dict] = []
        self.request_id = None

    async def _app(self, scope, receive, send):
        self.request_id = scope["state"]["request_id"]
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    def ask(self, receive=None, *, method="POST", path="/v1/completions", **headers: str) -> tuple[int, dict[str, str]]:
        """Send a request and return (status, headers) of the answer."""
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

        async def whole():
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message):
            self.sent.append(message)

        self.sent = []
        scope = SCOPE | {"method": method, "path": path, "headers": pairs}
        asyncio.run(self._gate(scope, receive or whole, send))
        start = self.sent[0]
        return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("a.example.org", 200),
        ("example.org", 400),
        ("evil.com", 400),
        ("localhost.evil.com:8000", 400),
        ("evilexample.org", 400),
        ("", 400),
    ],
)
def test_host_header_must_be_an_allowed_host(host, status):
    hosts = ["localhost", "127.0.0.1", "[::1]", "*.example.org"]
    assert Recorder(allowed_hosts=hosts).ask(host=host)[0] == status
    assert Recorder().ask(host=host)[0] == 200
    for path in PROBES:  # probes use the address as the host
        assert Recorder(allowed_hosts=hosts).ask(host=host, path=path)[0] == 200


@pytest.mark.parametrize(
    ("origin", "more", "status"),
    [
        (None, {}, 200),
        ("http://localhost:8000", {}, 200),
        ("http://localhost:9", {}, 403),
        ("https://evil.com", {}, 403),
        ("null", {}, 403),
        ("https://evil.com", {"sec_fetch_site": "cross-site"}, 403),
        ("https://public.name", {"sec_fetch_site": "same-origin"}, 200),  # a proxy has changed Host
        ("https://friend.org", {}, 200),
    ],
)
def test_requests_from_other_origins_are_refused(origin, more, status):
    headers = more if origin is None else more | {"origin": origin}
    recorder = Recorder(cors_origins=["https://friend.org"])
    assert recorder.ask(host="localhost:8000", **headers)[0] == status


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer alpha", 200),
        ("bearer alpha", 200),
        ("BEARER  beta", 200),
        ("Basic alpha", 401),
        ("Bearer", 401),
        ("Bearer alphabeta", 401),
        ("alpha", 401),
        ("", 401),
    ],
)
def test_api_key_is_required_except_for_probes_and_metrics(authorization, status):
    recorder = Recorder({"first": "alpha", "second": "beta"})
    answer, headers = recorder.ask(authorization=authorization)
    assert answer == status
    assert (headers.get("www-authenticate") == "Bearer") == (status == 401)
    for key, expected in (("beta", 200), ("gamma", 401)):  # the header of Anthropic's clients, next to Authorization
        assert recorder.ask(authorization="", x_api_key=key)[0] == expected
    for path, expected in (("/health", 200), ("/ready", 200), ("/live", 200), ("/metrics", 200), ("/tokenize", status)):
        assert recorder.ask(path=path, authorization=authorization)[0] == expected


def test_request_id_is_returned_and_logged(caplog):
    recorder = Recorder({"first": "alpha"}, access_log=True)
    with caplog.at_level(logging.INFO, "lp_runtime.access"):
        _, headers = recorder.ask(authorization="Bearer alpha", x_request_id="my-id.7")
        assert headers["x-request-id"] == recorder.request_id == "my-id.7"
        _, headers = recorder.ask(authorization="Bearer wrong", x_request_id="two words")
    assert len(headers["x-request-id"]) == 32
    first, second = (json.loads(record.message) for record in caplog.records)
    assert (first["request_id"], first["client"], first["status"]) == ("my-id.7", "first", 200)
    assert (first["method"], first["path"], first["address"]) == ("POST", "/v1/completions", "127.0.0.1")
    assert (second["client"], second["status"]) == (None, 401) and "alpha" not in caplog.text


def test_responses_are_counted_by_status_except_those_to_probes():
    recorder = Recorder({"first": "alpha"})
    for key in ("alpha", "beta", "beta"):
        recorder.ask(authorization=f"Bearer {key}")
    recorder.ask(method="GET", path="/health")
    assert recorder.responses == {200: 1, 401: 2}


def test_answers_forbid_framing():
    _, headers = Recorder().ask(method="GET", path="/")
    assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_body_that_does_not_arrive_gets_408():
    async def nothing():
        await asyncio.Event().wait()

    recorder = Recorder(body_timeout=0.01)
    with pytest.raises(Exception, match="did not arrive within 0.01 seconds") as caught:
        recorder.ask(nothing)
    assert caught.value.status_code == 408


def test_body_timeout_does_not_apply_after_the_body():
    """After the body, `receive` waits for the client to disconnect, for as long as an answer takes."""
    messages = iter([{"type": "http.request", "body": b"x", "more_body": False}])

    async def receive():
        message = next(messages, None)
        if message is None:
            await asyncio.sleep(0.05)  # longer than body_timeout
            return {"type": "http.disconnect"}
        return message

    async def app(scope, receive, send):
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(
        Gate(app, ServeConfig(host="0.0.0.0", body_timeout=0.01), {}, Counter())(SCOPE | {"headers": []}, receive, send)
    )
    assert sent[0]["status"] == 200
