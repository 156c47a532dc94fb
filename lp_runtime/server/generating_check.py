"""Health check that decodes: a token must come through scheduler, driver, replicas and exchange."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.errors import LookaheadError
from lp_runtime.request.request import Request
from lp_runtime.scheduler.scheduler import Scheduler

POLL_SECONDS = 0.02  # between looks whether a token has been delivered


class GeneratingCheck:
    """Reports whether a token is delivered in time. Checks are limited in rate; calls between two share an answer.

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
        before = scheduler.totals.delivered
        try:
            async with asyncio.timeout(self._timeout):
                while scheduler.totals.delivered == before:
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
