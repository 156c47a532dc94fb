"""Presence and frequency penalties count the new text, from its first token to its last."""

import torch

from lp_runtime.sampling.request_processors import NewTextPenalty

PROMPT = [0, 1]


def test_penalties_count_every_new_token_and_no_prompt_token():
    texts = torch.tensor([[*PROMPT, 2, 3, 4], [*PROMPT, 1, 4, 4]])
    scores = NewTextPenalty(presence=0.5, frequency=2.0, prompt_length=len(PROMPT))(texts, torch.zeros(2, 6))
    once, twice = -2.5, -4.5
    assert scores.tolist() == [[0, 0, once, once, once, 0], [0, once, 0, 0, twice, 0]]


def test_text_without_new_tokens_is_not_penalized():
    scores = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(NewTextPenalty(0.5, 2.0, len(PROMPT))(torch.tensor([PROMPT]), scores), scores)
