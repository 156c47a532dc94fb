"""What /metrics says, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Scheduler

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Figures of one server: those of its scheduler, read when asked for, and latencies, as clients see them."""

    def __init__(self, runtime: LookaheadRuntime, scheduler: Scheduler):
        self._runtime, self._scheduler = runtime, scheduler
        self._registry = CollectorRegistry()
        self.first_token = Histogram(
            "lp_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.whole = Histogram(
            "lp_request_seconds", "From a request's arrival to its end", buckets=SECONDS, registry=self._registry
        )
        self._registry.register(self)

    def text(self) -> bytes:
        """All of it, in Prometheus's format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        totals, degrees = self._scheduler.totals, self._scheduler.degrees
        for name, what, value in (
            ("lp_requests_waiting", "Requests that wait", self._scheduler.num_waiting),
            ("lp_requests_running", "Requests that are decoded", self._scheduler.num_running),
            ("lp_degree", "Replicas of a running request, mean", sum(degrees) / max(1, len(degrees))),
            ("lp_replicas", "Replicas that are there", self._runtime.num_ready),
            ("lp_replicas_wanted", "Replicas that should be there", self._runtime.num_replicas),
            ("lp_compression_ratio", "New tokens a step, over all requests", totals.new_tokens / max(1, totals.steps)),
        ):
            yield GaugeMetricFamily(name, what, value=value)
        for name, what, value in (
            ("lp_prompt_tokens", "Tokens of prompts", totals.prompt_tokens),
            ("lp_new_tokens", "Tokens generated", totals.new_tokens),
            ("lp_steps", "Forward passes, prefills included", totals.steps),
            ("lp_replica_losses", "Replicas lost while they decoded", totals.losses),
        ):
            yield CounterMetricFamily(name, what, value=value)
        for name, what, label, values in (
            ("lp_requests", "Requests that have ended", "outcome", totals.requests),
            ("lp_fed_tokens", "Tokens that were guessed", "source", totals.fed),
            ("lp_accepted_tokens", "Guesses that came true", "source", totals.accepted),
            ("lp_step_seconds", "Where the time of steps went", "part", totals.seconds),
        ):
            family = CounterMetricFamily(name, what, labels=[label])
            for key, value in dict(values).items():
                family.add_metric([key], value)
            yield family
