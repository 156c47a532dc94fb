"""Chooses the LP degree of a request that runs alone, from the speeds of requests before.

More replicas save steps, and cost an exchange. On GPUs of their own they nearly always pay; on shared cores or a slow
network they may not.
"""

from __future__ import annotations

import time

REMEMBERED_TOKENS = 1024.0  # of a degree, about: older speeds fade, so that a degree may become faster or slower
MIN_TOKENS = 96.0  # of a degree before its speed counts: fewer steps vary too much
FIRST_RETRY_REQUESTS = 16  # after which a slower degree is tried again; doubles each time, since trying costs time
MAX_RETRY_REQUESTS = 256
NUM_SKIPPED_STEPS = 2  # after a change of replicas, which are slower than those that follow


def candidate_degrees(num_replicas: int) -> list[int]:
    """Return the degrees to choose from: all replicas, and halves of that number down to 1."""
    degrees = [num_replicas]
    while degrees[-1] > 1:
        degrees.append(degrees[-1] // 2)
    return degrees


class DegreeSpeeds:
    """Tokens per second by LP degree. Not thread-safe."""

    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._num_chosen = 0
        self._retries: dict[int, tuple[int, int]] = {}  # by degree: the choice at which it is tried again, the interval

    def record(self, degree: int, num_tokens: int, seconds: float) -> None:
        """Add a measurement of a degree: new tokens and the seconds that they took."""
        before = self._tokens.get(degree, 0.0)
        kept = min(1.0, max(0.0, REMEMBERED_TOKENS - num_tokens) / before) if before else 0.0
        self._tokens[degree] = before * kept + num_tokens
        self._seconds[degree] = self._seconds.get(degree, 0.0) * kept + seconds

    def speed(self, degree: int) -> float | None:
        """Return a degree's tokens per second; None before MIN_TOKENS are recorded."""
        if self._tokens.get(degree, 0.0) < MIN_TOKENS:
            return None
        return self._tokens[degree] / max(self._seconds[degree], 1e-9)

    def fastest(self, num_replicas: int) -> int:
        """Return the fastest degree whose speed is known; all replicas while their speed is not."""
        degrees = candidate_degrees(num_replicas)
        known = {degree: speed for degree in degrees if (speed := self.speed(degree)) is not None}
        return max(known, key=known.__getitem__) if num_replicas in known else num_replicas

    def choose(self, num_replicas: int) -> int:
        """Return the degree for the next request: the fastest known one, or one to be tried, all replicas first."""
        self._num_chosen += 1
        degrees = candidate_degrees(num_replicas)
        for degree in degrees:
            if self.speed(degree) is None:
                return degree
        fastest = self.fastest(num_replicas)
        for degree in degrees:
            if degree == fastest:
                continue
            first_retry = (self._num_chosen + FIRST_RETRY_REQUESTS, FIRST_RETRY_REQUESTS)
            due, interval = self._retries.setdefault(degree, first_retry)
            if self._num_chosen >= due:
                interval = min(2 * interval, MAX_RETRY_REQUESTS)
                self._retries[degree] = (self._num_chosen + interval, interval)
                kept = min(1.0, MIN_TOKENS / 2 / self._tokens[degree])  # measurements of long ago count little
                self._tokens[degree] *= kept
                self._seconds[degree] *= kept
                return degree
        return fastest


class SpeedMeter:
    """Measures how fast a request is on its replicas while no other request runs."""

    def __init__(self, speeds: DegreeSpeeds):
        self._speeds = speeds
        self._members: frozenset[int] | None = None
        self._num_steps = 0  # since the replicas changed
        self._last = 0.0

    def record_step(self, members: frozenset[int], num_running: int, num_tokens: int) -> None:
        """Record that a step of `members` has ended just now and committed `num_tokens` tokens.

        `num_running` requests run at this moment.
        """
        now = time.monotonic()
        self._num_steps = self._num_steps + 1 if members == self._members and num_running == 1 else 0
        if self._num_steps > NUM_SKIPPED_STEPS:
            self._speeds.record(len(members), num_tokens, now - self._last)
        self._members, self._last = members, now
