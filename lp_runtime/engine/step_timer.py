"""Where the time of a request's steps goes, on one replica."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

MAX_MICROSECONDS = (1 << 31) - 1


@dataclass(frozen=True)
class StepTimes:
    """Where the time of a request's steps went on this replica, in seconds, the prefill's step excluded.

    Attributes:
        forward: making inputs, forward passes, drawing successors (on a GPU, until the device has finished them).
        exchange: the collective, waiting for slower replicas included (on a GPU, what comes behind the pass until its
            results are here).
        other: unpacking what was found, advancing, proposing, partitioning.
    """

    forward: float
    exchange: float
    other: float


class StepTimer:
    """Adds up the time between laps by what was done in it."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "exchange": 0.0, "other": 0.0}
        self._step = dict.fromkeys(self.seconds, 0.0)
        self._before = self._step  # the step before
        self._last = 0.0

    def start(self) -> None:
        """A step begins."""
        self._last = time.perf_counter()
        self._before, self._step = self._step, dict.fromkeys(self.seconds, 0.0)

    def lap(self, what: str, batch_size: int = 1) -> None:
        """What has been done since the last lap, for so many requests; a share of the time is this one's."""
        self._add(what, self._since_last() / batch_size)

    def lap_of_pass(self, seconds: float, told: float, batch_size: int = 1) -> None:
        """Since the last lap a device was at a forward pass, and then at the exchange; shares as above.

        Args:
            seconds: that it was at the pass.
            told: seconds after the last lap at which whoever is told of tokens had been told. What that took beyond the
                pass is nobody's.
        """
        passed = self._since_last()
        forward = min(seconds, passed)
        self._add("forward", forward / batch_size)
        self._add("exchange", max(0.0, passed - max(forward, told)) / batch_size)

    def since_last_lap(self) -> float:
        """Seconds."""
        return time.perf_counter() - self._last

    def _since_last(self) -> float:
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        return passed

    def _add(self, what: str, seconds: float) -> None:
        self.seconds[what] += seconds
        self._step[what] += seconds

    def packed(self, is_late: bool = False) -> int:
        """Microseconds of a forward pass and of the step before's other work, for the exchange.

        Args:
            is_late: whether this step's forward pass is not over yet; it is the one before's then.
        """
        step = self._before if is_late else self._step
        forward, other = (min(int(1e6 * each), MAX_MICROSECONDS) for each in (step["forward"], self._before["other"]))
        return forward << 31 | other

    @staticmethod
    def unpacked(clocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Nanoseconds of forward passes and of other work, by replica."""
        return [1000 * (clock >> 31) for clock in clocks], [1000 * (clock & MAX_MICROSECONDS) for clock in clocks]
