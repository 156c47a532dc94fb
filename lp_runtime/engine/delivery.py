"""Timing of the delivery of committed tokens to the caller."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Generic, TypeVar

MIN_PASS_MULTIPLE = 2  # delivery overlaps a pass only if the pass takes this multiple of the last delivery's time

T = TypeVar("T")


class Delivery(Generic[T]):
    """Queue of outputs, delivered at once or, if `is_deferred`, while the GPU runs the next step.

    Delivery overlaps a forward pass only if the caller is quick. Otherwise the measured duration of the pass would
    include the caller's time.
    """

    def __init__(self) -> None:
        self.is_deferred = False
        self._queue: list[T] = []
        self._seconds = 0.0  # that the caller took for the latest outputs

    def add(self, output: T) -> None:
        self._queue.append(output)

    def deliver(self) -> Iterator[T]:
        """Yield the queued outputs and measure how long the caller takes for them."""
        started = time.perf_counter()
        outputs, self._queue = self._queue, []
        yield from outputs
        if outputs:
            self._seconds = time.perf_counter() - started

    def plan(self, pass_seconds: float) -> None:
        """Decide whether the next delivery overlaps a forward pass, from the duration of the latest pass."""
        self.is_deferred = MIN_PASS_MULTIPLE * self._seconds < pass_seconds
