"""Users' logits processors that keep a state between calls, which `generate` allows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LogitsProcessor

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class EveryThird(LogitsProcessor):
    """Counts its calls; every third call forbids the likeliest token."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            scores[:, scores.argmax(-1)] = -torch.inf
        return scores


class GrewByOne(LogitsProcessor):
    """Boosts a token at every fourth call; zeroes the scores if the text has not grown by one token."""

    def __init__(self):
        self.length, self.steps = None, 0

    def __call__(self, input_ids, scores):
        length = input_ids.shape[1]
        if self.length is not None and length != self.length + 1:
            scores[:] = 0.0
        self.length, self.steps = length, self.steps + 1
        if self.steps % 4 == 0:
            scores[:, 20 + self.steps] += 50.0
        return scores


class Budget(LogitsProcessor):
    """A thinking budget: after `budget` free tokens it forces a chain of tokens, then counts again."""

    def __init__(self, budget: int, forced: tuple[int, ...]):
        self.budget, self.forced = budget, forced
        self.left, self.queue = budget, []

    def __call__(self, input_ids, scores):
        if not self.queue and self.left == 0:
            self.queue, self.left = list(self.forced), self.budget
        elif not self.queue:
            self.left -= 1
        if self.queue:
            token = self.queue.pop(0)
            scores[:] = -torch.inf
            scores[:, token] = 0.0
        return scores


class MovingAverage(LogitsProcessor):
    """Subtracts a moving average of earlier scores."""

    def __init__(self):
        self.mean = None

    def __call__(self, input_ids, scores):
        before = self.mean
        self.mean = scores.clone() if before is None else 0.7 * before + 0.3 * scores
        return scores if before is None else scores - 1.5 * before


def counting_closure() -> Processor:
    """Return a function with a counter in its closure: every other call lowers the likeliest token."""
    num_calls = 0

    def process(input_ids, scores):
        nonlocal num_calls
        num_calls += 1
        if num_calls % 2:
            scores[0, scores[0].argmax()] -= 1.0
        return scores

    return process


STATEFUL: dict[str, Callable[[], Processor]] = {
    "every third": EveryThird,
    "grew by one": GrewByOne,
    "thinking budget": lambda: Budget(5, (40, 41, 42)),
    "moving average": MovingAverage,
    "closure": counting_closure,
}
