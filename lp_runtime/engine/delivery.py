"""When committed tokens are handed to whoever waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Generic, TypeVar

MIN_PASS_MULTIPLE = 2  # a pass must take this multiple of the last delivery's time for delivery to be hidden behind it

T = TypeVar("T")


class Delivery(Generic[T]):
    """Decides when committed tokens are delivered to the caller: at once, or while the GPU runs the next step.

    Delivery is hidden behind a forward pass only where the caller is quick: else the duration of the pass could not be
    told from the caller's.

    Attributes:
        is_deferred: whether outputs are delivered after the next step's launch.
    """

    def __init__(self) -> None:
        self.is_deferred = False
        self._queue: list[T] = []
        self._seconds = 0.0  # that the caller held on to the latest outputs

    def add(self, output: T) -> None:
        """Queue an output."""
        self._queue.append(output)

    def deliver(self) -> Iterator[T]:
        """Yield the queued outputs and measure how long the caller held on to them."""
        started = time.perf_counter()
        outputs, self._queue = self._queue, []
        yield from outputs
        if outputs:
            self._seconds = time.perf_counter() - started

    def plan(self, pass_seconds: float) -> None:
        """Decide whether the next delivery fits behind a forward pass.

        Args:
            pass_seconds: duration of the latest pass.
        """
        self.is_deferred = MIN_PASS_MULTIPLE * self._seconds < pass_seconds
