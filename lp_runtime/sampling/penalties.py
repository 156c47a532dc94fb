"""Presence and frequency penalties as in the OpenAI API, which apply to the new text only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lp_runtime.config.sampling import SamplingConfig


class NewTextPenalty:
    """A logits processor that lowers the logits of tokens that already occur in the new text.

    Rows are processed independently, so the nodes of a token tree can be processed as one batch.

    Args:
        presence: subtracted once from the logit of each token that occurs in the new text.
        frequency: subtracted for each occurrence of the token in the new text.
        prompt_length: tokens of the prompt, which do not count.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int):
        self._presence = presence
        self._frequency = frequency
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return penalized copies of `scores`, [b, V] float32, for prompts and new texts `input_ids`, [b, l]."""
        new = input_ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def penalties_of(sampling: SamplingConfig, prompt_length: int) -> Sequence[NewTextPenalty]:
    """Return the processor of a request's presence and frequency penalties; empty if both are off."""
    presence, frequency = sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
    return [NewTextPenalty(presence, frequency, prompt_length)] if presence or frequency else []
