"""What /metrics reports to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Scheduler

BUCKETS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Metrics of one server: the scheduler's totals, read at each scrape, and latencies as clients see them.

    Args:
        runtime: counts its replicas.
        scheduler: counts its requests.

    Attributes:
        first_token: seconds from a request's arrival to its first token.
        whole: seconds from a request's arrival to its end.
    """

    def __init__(self, runtime: LookaheadRuntime, scheduler: Scheduler):
        self._runtime, self._scheduler = runtime, scheduler
        self._registry = CollectorRegistry()
        self.first_token = Histogram(
            "lp_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=BUCKETS_SECONDS,
            registry=self._registry,
        )
        self.whole = Histogram(
            "lp_request_seconds",
            "From a request's arrival to its end",
            buckets=BUCKETS_SECONDS,
            registry=self._registry,
        )
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read from the scheduler; the registry calls it."""
        totals, degrees = self._scheduler.totals, self._scheduler.degrees
        for name, what, value in (
            ("lp_requests_waiting", "Requests in the queue", self._scheduler.num_waiting),
            ("lp_requests_running", "Requests that are being decoded", self._scheduler.num_running),
            ("lp_degree", "LP degree of the running requests, mean", sum(degrees) / max(1, len(degrees))),
            ("lp_replicas", "Replicas that are up", self._runtime.num_ready),
            ("lp_replicas_wanted", "Replicas that the runtime was started with", self._runtime.num_replicas),
            (
                "lp_compression_ratio",
                "Compression ratio S: new tokens per step, over all requests",
                totals.new_tokens / max(1, totals.steps),
            ),
        ):
            yield GaugeMetricFamily(name, what, value=value)
        for name, what, value in (
            ("lp_prompt_tokens", "Prompt tokens of requests that have ended", totals.prompt_tokens),
            ("lp_new_tokens", "New tokens of requests that have ended", totals.new_tokens),
            ("lp_steps", "Steps of requests that have ended, prefills included", totals.steps),
            ("lp_replica_losses", "Replicas lost while they decoded", totals.losses),
        ):
            yield CounterMetricFamily(name, what, value=value)
        for name, what, label, values in (
            ("lp_requests", "Requests that have ended, by how", "outcome", totals.requests),
            ("lp_fed_tokens", "Draft tokens that were fed, by source", "source", totals.fed),
            ("lp_accepted_tokens", "Draft tokens that were accepted, by source", "source", totals.accepted),
            ("lp_step_seconds", "Seconds of steps, by part", "part", totals.seconds),
        ):
            family = CounterMetricFamily(name, what, labels=[label])
            for key, value in dict(values).items():
                family.add_metric([key], value)
            yield family
