"""Prometheus metrics of /metrics; every metric has the model's name as a label."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.job import Job, JobState
from lp_runtime.scheduler.scheduler import Scheduler

BUCKETS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SHORT_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
MODEL = "model_name"  # label of every metric


class Metrics:
    """Metrics of one server: the scheduler's totals, read at each scrape, and client-side latencies.

    `jobs` are those of unfinished answers, and `responses` counts HTTP responses by status: live views that the server
    updates.
    """

    def __init__(
        self,
        name: str,
        runtime: LookaheadRuntime,
        scheduler: Scheduler,
        jobs: Collection[Job],
        responses: Mapping[int, int],
    ):
        self._name, self._responses = name, responses
        self._runtime, self._scheduler = runtime, scheduler
        self._jobs = jobs
        self._registry = CollectorRegistry()
        self.first_token = self._histogram("lp_first_token_seconds", "From a request's arrival to its first token")
        self.inter_token = self._histogram(
            "lp_inter_token_seconds", "Between tokens of a text; a step's tokens share its time", SHORT_BUCKETS_SECONDS
        )
        self.queue = self._histogram("lp_queue_seconds", "From a request's entry into the queue to its first replica")
        self.whole = self._histogram("lp_request_seconds", "From a request's arrival to its end")
        self._registry.register(self)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...] = BUCKETS_SECONDS) -> Histogram:
        return Histogram(name, what, [MODEL], buckets=buckets, registry=self._registry).labels(self._name)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    @property
    def kv_cache_usage(self) -> float:
        """Fraction, 0 to 1, of the KV caches that running requests fill if all become as long as they may.

        It is 0 if the capacity is unknown.
        """
        capacity = self._runtime.info.capacity
        if not capacity:
            return 0.0
        running = [job.request for job in list(self._jobs) if job.state is JobState.RUNNING]
        reserved = sum(len(request.prompt_ids) + request.max_new_tokens for request in running)
        return min(1.0, reserved / (capacity * max(1, self._runtime.num_ready)))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read from the scheduler; called by the registry at each scrape."""
        totals, degrees = self._scheduler.totals, self._scheduler.degrees
        gauges = (
            ("lp_requests_waiting", "Requests in the queue", self._scheduler.num_waiting),
            ("lp_requests_running", "Requests that are being decoded", self._scheduler.num_running),
            ("lp_kv_cache_usage", "KV cache that running requests may come to fill, 0 to 1", self.kv_cache_usage),
            ("lp_degree", "LP degree of the running requests, mean", sum(degrees) / max(1, len(degrees))),
            ("lp_replicas", "Replicas that are up", self._runtime.num_ready),
            ("lp_replicas_wanted", "Replicas that the runtime was started with", self._runtime.num_replicas),
            (
                "lp_compression_ratio",
                "Compression ratio S: new tokens per step, over all requests",
                totals.new_tokens / max(1, totals.steps),
            ),
        )
        counters = (
            ("lp_prompt_tokens", "Prompt tokens of requests that have ended", totals.prompt_tokens),
            ("lp_prefix_cache_hits", "Ended requests that the prefix cache had a prefix of", totals.cache_hits),
            ("lp_prefix_cache_tokens", "Prompt tokens that came out of the prefix cache", totals.cached_tokens),
            ("lp_new_tokens", "New tokens, as they are delivered", totals.new_tokens),
            ("lp_steps", "Steps that delivered new tokens, prefills included", totals.steps),
            ("lp_replica_losses", "Replicas lost while they decoded", totals.losses),
        )
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, what, value in rows:
                metric = kind(name, what, labels=[MODEL])
                metric.add_metric([self._name], value)
                yield metric
        for name, what, label, values in (
            ("lp_requests", "Requests that have ended, by how", "outcome", totals.requests),
            ("lp_http_responses", "HTTP responses, refusals included, by status", "status", self._responses),
            ("lp_fed_tokens", "Draft tokens that were fed, by source", "source", totals.fed),
            ("lp_accepted_tokens", "Draft tokens that were accepted, by source", "source", totals.accepted),
            ("lp_step_seconds", "Seconds of steps, by part", "part", totals.seconds),
        ):
            family = CounterMetricFamily(name, what, labels=[MODEL, label])
            for key, value in dict(values).items():
                family.add_metric([self._name, str(key)], value)
            yield family
