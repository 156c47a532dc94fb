"""Tests of the OpenTelemetry spans of requests, with an in-memory exporter."""

from __future__ import annotations

import gzip
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.processes import wait_until
from support.serving import served

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.config.serving import ServeConfig
from lp_runtime.errors import LaunchError, ReplicaError
from lp_runtime.server.http.settings import check_serve
from lp_runtime.server.tracing import Tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def runtime(small_model_that_chats):
    lookahead = LookaheadConfig(7, 5, 7, prior="none")
    with LookaheadRuntime(small_model_that_chats(), device="cpu", dtype="float32", lookahead=lookahead) as runtime:
        yield runtime


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider, "demo")


def post(url: str, path: str, body: dict, **headers: str) -> bytes:
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    with urllib.request.urlopen(urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)) as answer:
        return answer.read()


def ended(exporter, number: int) -> list:
    """Wait until `number` spans have ended, and return all that have."""
    wait_until(lambda: len(exporter.get_finished_spans()) >= number)
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_request_span_has_queue_prefill_and_decode_children(runtime, exporter, tracing, stream):
    limit = "max_completion_tokens" if stream else "max_tokens"
    body = {"messages": [{"role": "user", "content": "Hi"}], limit: 9, "temperature": 0, "stream": stream}
    with served(runtime, tracing=tracing) as (url, scheduler):
        submitted, submit_all = [], scheduler.submit_all

        def noting(*arguments, **more):
            submitted.append(time.time_ns())
            return submit_all(*arguments, **more)

        scheduler.submit_all = noting
        post(url, "/v1/chat/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01", X_Request_Id="mine")
        *parts, whole = ended(exporter, 4)
        assert [each.name for each in parts] == ["queue", "prefill", "decode"] and whole.name == "chat demo"
        assert f"{whole.context.trace_id:032x}" == TRACE and f"{whole.parent.span_id:016x}" == PARENT
        assert whole.start_time < submitted[0] <= parts[0].start_time, "tokenizing the prompt comes before the queue"
        assert all(each.parent.span_id == whole.context.span_id for each in parts)
        assert all(each.end_time == later.start_time for each, later in zip(parts, parts[1:], strict=False))
        attributes = dict(whole.attributes)
        assert attributes["gen_ai.operation.name"] == "chat" and attributes["lp.request_id"] == "mine"
        assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "demo"
        assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == (9, 0)
        assert attributes["gen_ai.usage.input_tokens"] == scheduler.totals.prompt_tokens
        assert attributes["gen_ai.usage.output_tokens"] == 9
        assert attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert dict(parts[2].attributes)["lp.steps"] == scheduler.totals.steps


def test_spans_are_recorded_per_choice_and_report_errors(runtime, exporter, tracing):
    with served(runtime, tracing=tracing) as (url, scheduler):
        post(url, "/v1/completions", {"prompt": "def f(", "max_tokens": 4, "temperature": 1, "n": 2})
        *parts, whole = ended(exporter, 7)
        assert [each.name for each in parts] == ["queue", "prefill", "decode"] * 2
        assert whole.name == "text_completion demo" and whole.attributes["gen_ai.request.choice.count"] == 2
        exporter.clear()
        job_of = scheduler.submit_all

        def failing(*arguments, **more):
            jobs = job_of(*arguments, **more)
            jobs[0].abort(ReplicaError("it broke"))
            return jobs

        scheduler.submit_all = failing
        with pytest.raises(urllib.error.HTTPError, match="503"):
            post(url, "/v1/completions", {"prompt": "def f(", "max_tokens": 4})
        failed = ended(exporter, 1)[-1]
        assert failed.attributes["error.type"] == "ReplicaError" and failed.status.description == "it broke"
        assert "gen_ai.response.finish_reasons" not in failed.attributes


def test_spans_are_sent_to_a_collector(runtime):
    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        tracing = Tracing.to(f"http://127.0.0.1:{collector.server_port}/v1/traces", "demo")
        with served(runtime, tracing=tracing) as (url, _):
            post(url, "/v1/completions", {"prompt": "def f(", "max_tokens": 4})
        tracing.close()
        collector.shutdown()
    assert [path for path, _ in bodies] == ["/v1/traces"]
    sent = gzip.decompress(bodies[0][1]) if bodies[0][1][:2] == b"\x1f\x8b" else bodies[0][1]
    assert all(name in sent for name in (b"text_completion demo", b"queue", b"prefill", b"decode"))


def test_missing_opentelemetry_package_is_named(runtime, monkeypatch):
    config = ServeConfig(model=runtime.config.model, otlp_endpoint="http://127.0.0.1:1/v1/traces")
    check_serve(config)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(LaunchError, match="otlp_endpoint: opentelemetry.sdk.trace is not installed"):
        check_serve(config)
