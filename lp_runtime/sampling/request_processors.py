"""Logits processors of requests that transformers has none for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.text.mark_spelling import MarkSpelling


@dataclass
class NewTextPenalty:
    """Lowers the logits of tokens that already occur in the new text, as in the OpenAI API.

    Rows are processed independently, so the nodes of a token tree can be processed as one batch.
    """

    presence: float  # subtracted once for each such token
    frequency: float  # subtracted for each of its occurrences
    prompt_length: int

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return penalized copies of `scores`, [b, V] float32, for prompts and new texts `input_ids`, [b, l]."""
        new = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


def penalties_of(sampling: SamplingConfig, prompt_length: int) -> Sequence[NewTextPenalty]:
    presence, frequency = sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
    return [NewTextPenalty(presence, frequency, prompt_length)] if presence or frequency else []


class AllowedTokens:
    """Forbids all tokens but some, in every position."""

    prefix_only = True

    def __init__(self, token_ids: Sequence[int]):
        self._token_ids = sorted(set(token_ids))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        processed = torch.full_like(scores, -torch.inf)
        processed[:, self._token_ids] = scores[:, self._token_ids]
        return processed


class ReasoningBudget:
    """Ends the reasoning part of an answer after `num_tokens` tokens, by allowing its end mark only.

    The marks are looked for in the text, because models spell them with other tokens than the tokenizer, for example
    if white space follows.
    """

    prefix_only = True

    def __init__(self, num_prompt: int, marks: MarkSpelling, num_tokens: int):
        self._num_prompt, self._num_tokens = num_prompt, num_tokens
        self._marks = marks

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores`, [1, V], with all but the end mark's next token at -inf once that is due."""
        if input_ids.shape[1] - self._num_prompt < self._num_tokens:
            return scores
        new = input_ids[0, self._num_prompt :].tolist()
        start = self._marks.part_start(new)
        # Each token adds a byte of the mark, so the part has ended after that many.
        if start is None or not 0 <= len(new) - start - self._num_tokens < len(self._marks.end):
            return scores
        token = self._marks.next_token(new[start:])
        return scores if token is None else only(token, scores)


class ChannelBudget:
    """Ends messages on a channel once they have `num_tokens` tokens together; then allows no more of them.

    The channel of analysis is the reasoning of models that write harmony. `channel` has the tokens of its mark and
    name, `message` those that begin a message's text, and `end` those that end it.
    """

    prefix_only = True

    def __init__(
        self, num_prompt: int, channel: Sequence[int], message: Sequence[int], end: Sequence[int], num_tokens: int
    ):
        self._num_prompt, self._num_tokens = num_prompt, num_tokens
        self._channel = list(channel)
        self._message, self._end = list(message), list(end)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores`, [1, V]: all but the end at -inf once it is due; later the channel's name at -inf."""
        new = input_ids[0, self._num_prompt :].tolist()
        num_left, start = self._num_tokens, 0
        while (begin := _find(new, self._channel, start)) >= 0:
            text = _find(new, self._message, begin + len(self._channel))
            if text < 0:
                return scores  # the message has no text yet
            text += len(self._message)
            end = _find(new, self._end, text)
            if end < 0:
                num_forced = len(new) - text - max(num_left, 0)
                return only(self._end[num_forced], scores) if 0 <= num_forced < len(self._end) else scores
            num_left -= end - text
            start = end + len(self._end)
        *mark, name = self._channel
        if num_left > 0 or new[len(new) - len(mark) :] != mark:
            return scores
        processed = scores.clone()
        processed[:, name] = -torch.inf
        return processed


def only(token: int, scores: torch.Tensor) -> torch.Tensor:
    """Return `scores` with those of all other tokens at -inf."""
    processed = torch.full_like(scores, -torch.inf)
    processed[:, token] = scores[:, token]
    return processed


def _find(tokens: list[int], part: list[int], start: int) -> int:
    """Return the first place from `start` on at which tokens have a part; -1 if there is none."""
    try:
        while True:
            start = tokens.index(part[0], start)
            if tokens[start : start + len(part)] == part:
                return start
            start += 1
    except ValueError:
        return -1
