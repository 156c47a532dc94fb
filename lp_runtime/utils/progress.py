"""Start-up progress messages on stderr."""

from __future__ import annotations

import sys
import time

START_STAGES = 5  # stages of a replica's start: compiling, loading, optimizing, checking, measuring


class Progress:
    """Numbers the stages of a start and prints each with the seconds elapsed so far."""

    def __init__(self, is_shown: bool, num_stages: int = START_STAGES):
        self._is_shown, self._num_stages = is_shown, num_stages
        self._num_begun = 0
        self._started = time.monotonic()

    def begin(self, what: str) -> None:
        """Announce that the next stage, `what` in a few words, begins; ignored after the last stage."""
        if self._num_begun == self._num_stages:
            return
        self._num_begun += 1
        if self._is_shown:
            seconds = time.monotonic() - self._started
            print(
                f"starting, {self._num_begun} of {self._num_stages} ({seconds:.0f} s): {what}",
                file=sys.stderr,
                flush=True,
            )
