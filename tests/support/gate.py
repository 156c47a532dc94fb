"""A request that waits on its replicas: what a test does meanwhile falls between two steps, however fast they are."""

from __future__ import annotations

from pathlib import Path

from transformers import LogitsProcessor

from support.processes import wait_until


class Gate(LogitsProcessor):
    """Lets replicas commit the token behind the prompt, and holds them in the next step until a file is there.

    Args:
        path: the file; whoever made the gate makes it, to go on.
        num_prompt: tokens of the prompt.
    """

    prefix_only = True

    def __init__(self, path: Path, num_prompt: int):
        self.path, self.num_prompt = path, num_prompt

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > self.num_prompt:
            wait_until(self.path.exists)
        return scores
