"""A request that waits on its replicas: what a test does meanwhile falls between two steps, however fast they are."""

from __future__ import annotations

from pathlib import Path

from transformers import LogitsProcessor

from support.processes import wait_until


class Gate(LogitsProcessor):
    """Lets replicas feed so many tokens, and holds them in the next step until they may go on.

    Args:
        folder: gets a file when a replica is held, and one when they may go on.
        num_tokens: those tokens, the prompt's and new ones.
    """

    prefix_only = True

    def __init__(self, folder: Path, num_tokens: int):
        self._held, self._open, self._num_tokens = folder / "held", folder / "open", num_tokens

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > self._num_tokens:
            self._held.touch()
            wait_until(self._open.exists)
        return scores

    def wait_until_held(self) -> None:
        """Return when a replica is held; fail if none ever is."""
        wait_until(self._held.exists)

    def open(self) -> None:
        """Let all replicas go on."""
        self._open.touch()
