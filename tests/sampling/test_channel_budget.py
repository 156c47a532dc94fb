"""A limit on the tokens of a channel, in masked decoding of one token per step."""

import itertools

import pytest
import torch

from lp_runtime.sampling.request_processors import ChannelBudget

PROMPT = [9, 9]
START, CHANNEL, MESSAGE, END, ANALYSIS, FINAL, WORD, OTHER = range(8)
THOUGHT = [CHANNEL, ANALYSIS, MESSAGE]


def decode(wanted: list[int], num_tokens: int, end: list[int]) -> list[int]:
    """Decode with a model whose first choices are the tokens of `wanted`, and its second choice FINAL."""
    budget = ChannelBudget(len(PROMPT), [CHANNEL, ANALYSIS], [MESSAGE], end, num_tokens)
    new: list[int] = []
    for token in wanted:
        scores = torch.zeros(1, 10)
        scores[0, FINAL], scores[0, token] = 1, 2
        new.append(int(budget(torch.tensor([PROMPT + new]), scores).argmax()))
    return new


@pytest.mark.parametrize("end", [[END], [END, START]])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_exhausted_budget_forces_the_end_and_blocks_the_channel(num_tokens, end):
    wanted = [*THOUGHT, *[WORD] * (num_tokens + len(end)), CHANNEL, ANALYSIS, MESSAGE, WORD, WORD]
    actual = decode(wanted, num_tokens, end)
    assert actual == [*THOUGHT, *[WORD] * num_tokens, *end, CHANNEL, FINAL, MESSAGE, WORD, WORD]


def test_zero_budget_blocks_the_channel():
    assert decode([*THOUGHT, WORD], 0, [END]) == [CHANNEL, FINAL, MESSAGE, WORD]


def test_budget_is_shared_by_all_texts_of_the_channel():
    wanted = [*THOUGHT, WORD, END, *THOUGHT, *[WORD] * 3]
    assert decode(wanted, 3, [END]) == [*THOUGHT, WORD, END, *THOUGHT, WORD, WORD, END]


def test_other_channels_are_unlimited():
    wanted = list(itertools.chain([CHANNEL, FINAL, MESSAGE], [WORD] * 9, [END, CHANNEL, OTHER, MESSAGE], [WORD] * 9))
    assert decode(wanted, 2, [END]) == wanted
