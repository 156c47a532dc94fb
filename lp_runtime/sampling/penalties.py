"""Presence and frequency penalty, with the meaning of the OpenAI API: of the new text alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lp_runtime.config.sampling import SamplingConfig


class NewTextPenalty:
    """A logits processor that makes tokens less likely that the new text has already.

    Its rows are independent of one another, so that every node of a token tree is processed as if alone.

    Args:
        presence: subtracted once from the logit of each token that the new text has.
        frequency: subtracted for each time that the new text has the token.
        prompt_length: tokens of the prompt, which do not count.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int):
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the penalised scores.

        Args:
            input_ids: [b, l] int64 prompt and new text of each row.
            scores: [b, V] float32, not changed.

        Returns:
            [b, V] float32.
        """
        new = input_ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def penalties_of(sampling: SamplingConfig, prompt_length: int) -> Sequence[NewTextPenalty]:
    """Return the processor of a request's presence and frequency penalty; none where both are off.

    Args:
        sampling: the request's settings.
        prompt_length: tokens of the request's prompt.
    """
    presence, frequency = sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
    return [NewTextPenalty(presence, frequency, prompt_length)] if presence or frequency else []
