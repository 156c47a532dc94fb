"""Timer that splits a request's steps into forward, exchange and other, on one replica."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

MAX_MICROSECONDS = (1 << 31) - 1  # what fits into half of an exchanged integer


def pack_clock(forward_seconds: float, overhead_seconds: float) -> int:
    """Pack the microseconds of a pass and of other work into one integer; `StepTimer.unpacked` reads it."""
    forward, other = (min(int(1e6 * each), MAX_MICROSECONDS) for each in (forward_seconds, overhead_seconds))
    return forward << 31 | other


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a request's steps on this replica, by part, without the prefill."""

    forward: float  # preparing inputs, forward passes and sampling; on a GPU, until the device has finished them
    # The exchange, including the wait for slower replicas; on a GPU, from the end of the pass until the results are on
    # the host.
    exchange: float
    other: float  # verifying, advancing, proposing and partitioning


class StepTimer:
    """Stopwatch that sums the time between laps in `seconds`, by part: "forward", "exchange" and "other"."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "exchange": 0.0, "other": 0.0}
        self._step = dict.fromkeys(self.seconds, 0.0)
        self._previous = self._step  # the previous step's seconds by part
        self._last = 0.0

    def start(self) -> None:
        self._last = time.perf_counter()
        self._previous, self._step = self._step, dict.fromkeys(self.seconds, 0.0)

    def lap(self, part: str, batch_size: int) -> None:
        """Add the time since the last lap, divided by the number of sequences that shared the work, to a part."""
        self._add(part, self._since_last() / batch_size)

    def lap_of_pass(self, pass_seconds: float, delivered_after: float, batch_size: int) -> None:
        """Add the time since the last lap, in which a device ran a pass of `pass_seconds` and the exchange.

        Earlier outputs were delivered in the first `delivered_after` seconds; delivery that outlasts the pass is not
        charged. `batch_size` sequences shared the pass, and each is charged an equal share.
        """
        passed = self._since_last()
        forward = min(pass_seconds, passed)
        self._add("forward", forward / batch_size)
        self._add("exchange", max(0.0, passed - max(forward, delivered_after)) / batch_size)

    def since_last_lap(self) -> float:
        return time.perf_counter() - self._last

    def _since_last(self) -> float:
        passed = self.since_last_lap()
        self._last += passed
        return passed

    def _add(self, part: str, seconds: float) -> None:
        self.seconds[part] += seconds
        self._step[part] += seconds

    def packed(self, is_late: bool) -> int:
        """Pack the microseconds of this step's pass and of the previous step's other work into one integer.

        With is_late this step's pass may still be running, so the previous step's is reported.
        """
        step = self._previous if is_late else self._step
        return pack_clock(step["forward"], self.overhead_seconds)

    @property
    def overhead_seconds(self) -> float:
        return self._previous["other"]

    @staticmethod
    def unpacked(clocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Unpack R `packed` integers into [R] nanoseconds of forward passes and [R] of other work."""
        return [1000 * (clock >> 31) for clock in clocks], [1000 * (clock & MAX_MICROSECONDS) for clock in clocks]
