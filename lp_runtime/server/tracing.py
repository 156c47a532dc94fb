"""OpenTelemetry spans: one per answer, with child spans for queue, prefill and decoding.

Names and attributes follow OpenTelemetry's semantic conventions for generative AI. A client's trace is continued if it
sends the header traceparent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request

from lp_runtime.errors import LookaheadError
from lp_runtime.server.openai.choice import Choice, usage_of
from lp_runtime.server.openai.common import Common

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

NANOSECONDS = 1_000_000_000
OPERATIONS = {"/v1/completions": "text_completion"}  # gen_ai.operation.name by path; "chat" for all others


class Tracing:
    """Creates the spans of one server's requests."""

    def __init__(self, provider: TracerProvider, model: str):
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("lp_runtime")

    @classmethod
    def to(cls, endpoint: str, model: str) -> Tracing:
        """Export by OTLP over HTTP to a collector, such as http://HOST:4318/v1/traces."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": "lp_runtime"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        return cls(provider, model)

    def close(self) -> None:
        self._provider.shutdown()

    async def traced(
        self,
        texts: AsyncGenerator[tuple[Choice, str], None],
        request: Request,
        body: Common,
        choices: Sequence[Choice],
    ) -> AsyncGenerator[tuple[Choice, str], None]:
        """Yield from `texts`, and create the answer's spans when it ends, fails or is abandoned."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = OPERATIONS.get(request.url.path, "chat")
        began = time.time_ns()
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            TraceContextTextMapPropagator().extract(request.headers),
            SpanKind.SERVER,
            {**self._asked(body), "gen_ai.operation.name": operation, "lp.request_id": request.state.request_id},
            start_time=began - int((time.perf_counter() - request.state.arrived) * NANOSECONDS),
        )
        try:
            async with contextlib.aclosing(texts):
                async for each in texts:
                    yield each
        except LookaheadError as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR, str(error))
            raise
        finally:
            self._add_parts(span, choices, began)
            span.end()

    def _asked(self, body: Common) -> dict[str, Any]:
        """Return the attributes that describe the client's request; fields that it leaves out have none."""
        asked = {
            "model": self._model,
            "max_tokens": body.length(),
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "seed": body.seed,
            "choice.count": body.n if body.n > 1 else None,
            "stop_sequences": body.stops(),
        }
        attributes = {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}
        return {**attributes, "gen_ai.provider.name": "lp_runtime"}

    def _add_parts(self, span: Any, choices: Sequence[Choice], began: int) -> None:
        """Add the answer's results and child spans per choice; `began`: entry into the queue, in ns since 1970."""
        ended = [choice for choice in choices if choice.job.generation is not None]
        if len(ended) == len(choices):
            span.set_attribute("gen_ai.response.finish_reasons", [str(choice.reason) for choice in ended])
        usage = usage_of(list(choices))
        span.set_attribute("gen_ai.response.model", self._model)
        span.set_attribute("gen_ai.usage.input_tokens", usage["prompt_tokens"])
        span.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
        for choice in choices:
            if choice.job.queue_seconds is None:
                continue
            start = self._part(span, "queue", began, choice.job.queue_seconds, {})
            if (generation := choice.job.generation) is not None:
                cached = {"gen_ai.usage.cache_read.input_tokens": generation.cached_tokens}
                start = self._part(span, "prefill", start, generation.prefill_seconds, cached)
                steps = {"lp.steps": generation.steps, "lp.compression_ratio": generation.compression_ratio}
                self._part(span, "decode", start, generation.seconds - generation.prefill_seconds, steps)

    def _part(self, parent: Any, name: str, start: int, seconds: float, attributes: Mapping[str, Any]) -> int:
        """Add a child span; return its end, in nanoseconds since 1970."""
        from opentelemetry.trace import set_span_in_context

        end = start + int(max(0.0, seconds) * NANOSECONDS)
        self._tracer.start_span(name, set_span_in_context(parent), attributes=attributes, start_time=start).end(end)
        return end
