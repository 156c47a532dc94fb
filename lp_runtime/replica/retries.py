"""Further attempts at requests for which memory ran out."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace

from lp_runtime.engine.batch import Arrival
from lp_runtime.errors import LookaheadError, RequestMemoryError
from lp_runtime.request.output import Event, Report
from lp_runtime.request.request import Request
from lp_runtime.sampling.processors import is_ordered


class RetriedRequest:
    """A request that is decoded again, after its committed tokens, when memory has run out.

    The next attempt may find more memory: the engine has freed slots and cached prefixes, and other requests of a batch
    may have ended. If it fails without a new token, there is no further one.
    """

    def __init__(self, request: Request):
        self.request = request
        self._started = time.monotonic()
        self._new_tokens: list[int] = []
        self._cached_tokens = 0  # that the first attempt with an output has read
        self._num_steps = 0  # of all attempts so far
        self._num_steps_before = 0  # of the attempts before the current one
        self._num_before: int | None = None  # new tokens before the current attempt; None in the first one

    @property
    def rest(self) -> Request:
        """The part of the request that the current attempt has to decode."""
        if self._num_before is None:
            return self.request
        return self.request.after(self._new_tokens, time.monotonic() - self._started)

    @property
    def is_late(self) -> bool:
        """Whether the request's time is up."""
        max_time = self.request.max_time
        return max_time is not None and time.monotonic() - self._started > max_time

    def handle(self, event: Event) -> Event:
        """Record an event's tokens; return the event, a report with the statistics of all attempts."""
        if not isinstance(event, Report):
            self._new_tokens += event.token_ids
            self._num_steps += 1
            self._cached_tokens += event.cached_tokens
        elif self._num_before is not None:
            return replace(
                event,
                num_steps=event.num_steps + self._num_steps_before,
                seconds=time.monotonic() - self._started,
                cached_tokens=max(event.cached_tokens, self._cached_tokens),
            )
        return event

    def begin_again(self) -> bool:
        """Begin the next attempt; return False if there is none.

        A processor that keeps a state has seen the tokens so far, and cannot be called for them again.
        """
        if len(self._new_tokens) == self._num_before or any(map(is_ordered, self.request.processors)):
            return False
        self._num_before, self._num_steps_before = len(self._new_tokens), self._num_steps
        return True


class RetriedBatch:
    """The requests that a replica decodes as a batch.

    A request for which memory ran out waits until another one has ended. If all wait, the first has all the memory. One
    that is cancelled, or whose time is up, waits no longer.
    """

    def __init__(self) -> None:
        self._unfinished: dict[Hashable, tuple[RetriedRequest, Callable[[], bool]]] = {}
        self._waiting: list[Hashable] = []  # unfinished requests whose next attempt has not begun
        self._ended: dict[Hashable, str] = {}  # finish reason of requests that end without a further attempt
        self._has_free_memory = False  # whether a request has ended since the last of them began again

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def arrive(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """Yield what to decode: the request that waits longest if there is room for it, then the arrivals.

        Waiting requests that have to end come first; `should_cancel` is true for these.
        """
        for key in list(self._waiting):
            retried, should_cancel = self._unfinished[key]
            if should_cancel() or retried.is_late:
                self._waiting.remove(key)
                self._ended[key] = "cancelled" if should_cancel() else "time"
                yield Arrival(key, retried.rest, should_cancel=lambda: True)
        if self._waiting and (self._has_free_memory or len(self._waiting) == len(self._unfinished)):
            self._has_free_memory = False
            key = self._waiting.pop(0)
            retried, should_cancel = self._unfinished[key]
            yield Arrival(key, retried.rest, should_cancel=should_cancel)
        for arrival in arrivals:
            self._unfinished[arrival.key] = RetriedRequest(arrival.request), arrival.should_cancel
            yield arrival

    def request(self, key: Hashable) -> Request:
        return self._unfinished[key][0].request

    def handle(self, key: Hashable, event: Event | LookaheadError) -> Event | LookaheadError | None:
        """Record a request's event; return what to report for it, None if it is decoded again."""
        retried, _ = self._unfinished[key]
        if isinstance(event, RequestMemoryError) and retried.begin_again():
            self._waiting.append(key)
            return None
        if isinstance(event, LookaheadError):
            self._end(key)
            return event
        event = retried.handle(event)
        return replace(event, finish_reason=self._end(key, event.finish_reason)) if isinstance(event, Report) else event

    def _end(self, key: Hashable, reason: str = "") -> str:
        """Forget a request; return why it has ended, `reason` if the engine has decided that."""
        del self._unfinished[key]
        self._has_free_memory |= key not in self._ended  # those held none
        return self._ended.pop(key, reason)
