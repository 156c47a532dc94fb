"""Logits processors of requests that transformers has none for."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class AllowedTokens:
    """Forbids all tokens but some, in every position."""

    prefix_only = True

    def __init__(self, token_ids: Sequence[int]):
        self._token_ids = sorted(set(token_ids))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores`, [1, V], with those of other tokens at -inf."""
        processed = torch.full_like(scores, -torch.inf)
        processed[:, self._token_ids] = scores[:, self._token_ids]
        return processed


class ReasoningBudget:
    """Ends the reasoning part of an answer after some tokens, by allowing its end mark only.

    Args:
        num_prompt: tokens of the prompt.
        begin: tokens that begin the part; empty if the prompt has begun it.
        end: tokens of its end mark, at least one.
        num_tokens: largest number of tokens between the two, >= 0.
    """

    prefix_only = True

    def __init__(self, num_prompt: int, begin: Sequence[int], end: Sequence[int], num_tokens: int):
        self._num_prompt, self._num_tokens = num_prompt, num_tokens
        self._begin, self._end = list(begin), list(end)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores`, [1, V], with those of all tokens but the end mark's next one at -inf once that is due."""
        new = input_ids[0, self._num_prompt :].tolist()
        if new[: len(self._begin)] != self._begin:
            return scores
        part = new[len(self._begin) :]
        num_forced = len(part) - self._num_tokens
        if not 0 <= num_forced < len(self._end) or self._has_ended(part[: self._num_tokens]):
            return scores
        token = self._end[num_forced]
        processed = torch.full_like(scores, -torch.inf)
        processed[:, token] = scores[:, token]
        return processed

    def _has_ended(self, part: Sequence[int]) -> bool:
        size = len(self._end)
        return any(part[place : place + size] == self._end for place in range(len(part) - size + 1))
