"""When whoever waits for a request's tokens is told of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

GOES_INTO = 2  # times what telling took must go into a pass, to be told behind the next one's launch


class Delivery:
    """What steps have to tell, and when: where the device works on its own, once it is at the next step, unless whoever
    is told takes long; then at once, as what the pass took could not be told from what they did.

    Attributes:
        events: to be told.
        is_behind: whether to tell behind the next step's launch.
    """

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.is_behind = False
        self._seconds = 0.0  # that they took lately

    def tell(self) -> Iterator[Any]:
        """Yield them."""
        started = time.perf_counter()
        events, self.events = self.events, []
        yield from events
        if events:
            self._seconds = time.perf_counter() - started

    def choose(self, seconds: float) -> None:
        """The device was at a pass for so long."""
        self.is_behind = GOES_INTO * self._seconds < seconds
