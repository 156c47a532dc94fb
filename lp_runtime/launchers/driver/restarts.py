"""Limit on the restarts of a pool's replicas."""

from __future__ import annotations

from collections.abc import Callable

PERIOD_SECONDS = 3600.0  # in which a replica is restarted at most failure.restarts times; then it may be again


class RestartAllowance:
    """Counts restarts. Guarded by the pool's condition.

    Args:
        most: restarts of a replica within PERIOD_SECONDS.
        clock: returns seconds.
    """

    def __init__(self, num_replicas: int, most: int, clock: Callable[[], float]):
        self._most, self._clock = most, clock
        self._times: dict[int, list[float]] = {index: [] for index in range(num_replicas)}  # of each one's restarts
        self._given_up: set[int] = set()  # lost when they could not be restarted

    def counts(self) -> dict[int, int]:
        """Return how often each replica was restarted within the last PERIOD_SECONDS, by index."""
        since = self._clock() - PERIOD_SECONDS
        return {index: sum(each > since for each in times) for index, times in self._times.items()}

    def use(self, index: int) -> bool:
        """Count a restart of a lost replica and return True; return False if it has no restarts left."""
        if self.counts()[index] >= self._most:
            self._given_up.add(index)
            return False
        self._given_up.discard(index)
        self._times[index].append(self._clock())
        return True

    def due(self) -> list[int]:
        """Return the indices of given-up replicas that may be restarted now."""
        counts = self.counts() if self._given_up else {}
        return sorted(index for index in self._given_up if counts[index] < self._most)
