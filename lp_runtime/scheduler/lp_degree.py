"""Which LP degree is the fastest for a request that is alone: found out by what requests have shown.

More replicas save steps, and cost an exchange; on GPUs of their own they nearly always pay, on shared cores or a slow
network they may not.
"""

from __future__ import annotations

MEMORY = 1024.0  # tokens of a degree that are remembered, about
TRUSTED = 96.0  # tokens after which a degree's speed is known
FIRST_RETRY = 16  # requests after which one that was slower is tried again; twice as many each time
LAST_RETRY = 256
STEPS_SKIPPED = 2  # after a change, which are not like those that follow


def candidates(most: int) -> list[int]:
    """Degrees to choose from: all replicas, and halves of them down to one."""
    found = [most]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


class DegreeSpeeds:
    """Tokens per second by LP degree. Not for several threads at once."""

    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._num_chosen = 0
        self._retries: dict[int, tuple[int, int]] = {}  # when each is tried again, and how long it waits after that

    def note(self, degree: int, num_tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        before = self._tokens.get(degree, 0.0)
        kept = min(1.0, max(0.0, MEMORY - num_tokens) / before) if before else 0.0
        self._tokens[degree] = before * kept + num_tokens
        self._seconds[degree] = self._seconds.get(degree, 0.0) * kept + seconds

    def speed(self, degree: int) -> float | None:
        """Tokens per second; None while too little is known."""
        if self._tokens.get(degree, 0.0) < TRUSTED:
            return None
        return self._tokens[degree] / max(self._seconds[degree], 1e-9)

    def best(self, most: int) -> int:
        """The fastest degree as far as is known; all replicas while their speed is not."""
        known = [degree for degree in candidates(most) if self.speed(degree) is not None]
        return max(known, key=self.speed) if most in known else most

    def choose(self, most: int) -> int:
        """The degree for the next request: the fastest that is known, or one that must be tried, all replicas first.

        Args:
            most: replicas that there are.
        """
        self._num_chosen += 1
        degrees = candidates(most)
        for degree in degrees:
            if self.speed(degree) is None:
                return degree
        best = self.best(most)
        for degree in degrees:
            if degree == best:
                continue
            due, wait = self._retries.setdefault(degree, (self._num_chosen + FIRST_RETRY, FIRST_RETRY))
            if self._num_chosen >= due:
                wait = min(2 * wait, LAST_RETRY)
                self._retries[degree] = (self._num_chosen + wait, wait)
                kept = min(1.0, TRUSTED / 2 / self._tokens[degree])  # what it was long ago counts little
                self._tokens[degree] *= kept
                self._seconds[degree] *= kept
                return degree
        return best
