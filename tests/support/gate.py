"""Hold a request on its replicas, so that a test can act between two steps, however fast they are."""

from __future__ import annotations

from pathlib import Path

from transformers import LogitsProcessor

from support.processes import wait_until


class Gate(LogitsProcessor):
    """Lets replicas feed `num_tokens` tokens, and holds them in the next step until `open` is called.

    Args:
        folder: gets a file when a replica is held, and another when they may continue.
        num_tokens: number of tokens, prompt included.
    """

    prefix_only = True

    def __init__(self, folder: Path, num_tokens: int):
        self._held, self._open, self._num_tokens = folder / "held", folder / "open", num_tokens

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > self._num_tokens:
            self._held.touch()
            wait_until(lambda: self._open.exists() or not self._held.exists())  # or the test has ended
        return scores

    def wait_until_held(self) -> None:
        """Return when a replica is held; fail if none ever is."""
        wait_until(self._held.exists)

    def open(self) -> None:
        """Let all replicas continue."""
        self._open.touch()
