"""Routes that report the server's state: the demo page, probes, metrics, the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.serving import ServeConfig
from lp_runtime.errors import LookaheadError
from lp_runtime.request.request import Request
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.server.http.errors import ApiError
from lp_runtime.server.http.settings import served_name
from lp_runtime.server.metrics import Metrics

PAGE = Path(__file__).with_name("page.html")
POLL_SECONDS = 0.02  # between looks whether a token has been delivered


class StatusRoutes:
    """Routes that report the server's state. Of them only /health_generate decodes."""

    def __init__(self, config: ServeConfig, runtime: LookaheadRuntime, scheduler: Scheduler, metrics: Metrics):
        self.is_draining = False
        self._name = served_name(config)
        self._runtime, self._scheduler = runtime, scheduler
        self._metrics = metrics
        self._check: GeneratingCheck | None = None
        if config.health_interval is not None:
            self._check = GeneratingCheck(scheduler, config.health_interval, config.health_timeout)
        self._started = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        app.api_route("/", methods=["GET", "HEAD"])(self.page)
        app.get("/health")(self.health)
        app.get("/ready")(self.ready)
        app.get("/live")(self.live)
        if self._check is not None:
            app.get("/health_generate")(self.health_generate)
        app.get("/metrics")(self.show_metrics)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)

    async def page(self) -> Response:
        """Show a page that streams a generation."""
        return Response(PAGE.read_text(), media_type="text/html; charset=utf-8")

    async def health(self) -> JSONResponse:
        """Answer with status 200 if any replica is up, else 503."""
        is_healthy = self._scheduler.is_healthy
        status = {"status": "ok" if is_healthy else "no replica is up", "replicas": self._runtime.num_ready}
        if reason := self._runtime.info.not_captured:
            status["not_captured"] = reason
        return JSONResponse(status, 200 if is_healthy else 503)

    async def ready(self) -> JSONResponse:
        """Answer with status 200 if new requests are accepted; 503 without replicas or in shutdown."""
        return self._refusal() or await self.health()

    async def live(self) -> JSONResponse:
        """Answer with status 200, but 503 if all replicas are lost for good, which ends this process."""
        has_replicas = self._scheduler.has_replicas
        return JSONResponse({"status": "ok" if has_replicas else "no replica is left"}, 200 if has_replicas else 503)

    async def health_generate(self) -> JSONResponse:
        """Answer with status 200 if a token is generated in time, else 503."""
        assert self._check is not None
        if (refusal := self._refusal()) is not None:
            return refusal
        problem = await self._check.problem()
        return JSONResponse({"status": problem or "ok", "replicas": self._runtime.num_ready}, 503 if problem else 200)

    def _refusal(self) -> JSONResponse | None:
        status = {"status": "the server is shutting down", "replicas": self._runtime.num_ready}
        return JSONResponse(status, 503) if self.is_draining else None

    async def show_metrics(self) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> dict[str, object]:
        """Return the one model in a list of the OpenAI API and of Anthropic's at once."""
        ends = {"first_id": self._name, "last_id": self._name}
        return {"object": "list", "data": [self._model()], "has_more": False, **ends}

    async def model(self, name: str) -> dict[str, object]:
        self.check_model(name)
        return self._model()

    def _model(self) -> dict[str, object]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._started,
            "owned_by": "lp_runtime",
            "max_model_len": self._runtime.info.context_length,
            # of Anthropic's API
            "type": "model",
            "display_name": self._name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            "lifecycle": "active",
            "max_input_tokens": self._runtime.info.context_length,
        }

    def check_model(self, name: str | None) -> None:
        """Refuse a request that names another model, with status 404; None names no model and is accepted."""
        if name not in (None, self._name):
            raise ApiError(404, f"model {name!r}: must be {self._name}", code="model_not_found")


class GeneratingCheck:
    """Reports whether a token comes in time. Checks are limited in rate; calls between two share a result.

    While requests run, their next token answers the check, so that they keep their replicas. Otherwise a request of one
    token is submitted, which gets all replicas that the policy allows.

    `interval` is in seconds between two checks, `timeout` in seconds until a token must come.
    """

    def __init__(
        self, scheduler: Scheduler, interval: float, timeout: float, clock: Callable[[], float] = time.monotonic
    ):
        self._scheduler = scheduler
        self._request = Request((0,), PLAIN, 1, sampling=SamplingConfig(temperature=0.0))
        self._interval, self._timeout = interval, timeout
        self._clock = clock
        self._next_at = float("-inf")
        self._problem: str | None = None
        self._lock = asyncio.Lock()

    async def problem(self) -> str | None:
        """Return why no token can be generated, in one line; None if one came within the timeout."""
        async with self._lock:  # later callers wait for the check that runs, and then have its answer
            if self._clock() >= self._next_at:
                self._problem = await self._check()
                self._next_at = self._clock() + self._interval
            return self._problem

    async def _check(self) -> str | None:
        scheduler = self._scheduler
        before = scheduler.totals.new_tokens
        try:
            async with asyncio.timeout(self._timeout):
                while scheduler.totals.new_tokens == before:
                    if not (scheduler.num_running or scheduler.num_waiting):
                        async for _ in scheduler.submit(self._request, self._timeout).deltas():
                            pass
                        break
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            return f"no token came within {self._timeout:g} seconds"
        except LookaheadError as error:
            return " ".join(str(error).split())
        return None
