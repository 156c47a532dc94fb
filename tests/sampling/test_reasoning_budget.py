"""A limit on the tokens of a reasoning part whose marks are ordinary text, one token per step."""

from __future__ import annotations

import pickle

import pytest
import torch
from support.token_sequences import ids_of_bytes
from support.tokenizer_kinds import tokenizer_of

from lp_runtime.sampling.request_processors import ReasoningBudget
from lp_runtime.text.mark_spelling import spelling_of

PROMPT, BEGIN, END = [9, 9], "<think>", "</think>"


def decode(kind: str, begin: str, wanted: list[int], num_tokens: int) -> list[int]:
    """Decode with a model that writes the tokens of `wanted`, between those that are forced."""
    tokenizer = tokenizer_of(kind)
    budget = ReasoningBudget(len(PROMPT), spelling_of(tokenizer, begin, END), num_tokens)
    budget, rest = pickle.loads(pickle.dumps(budget)), list(wanted)
    new: list[int] = []
    while rest:
        scores = torch.zeros(1, len(tokenizer))
        scores[0, rest[0]] = 1
        new.append(int(budget(torch.tensor([PROMPT + new]), scores).argmax()))
        if new[-1] == rest[0]:
            rest.pop(0)
    return new


def spelled(kind: str, *parts: str) -> list[int]:
    """Return the tokens of a text that is spelled in these parts."""
    tokenizer = tokenizer_of(kind)
    return [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]


def bytewise(kind: str, text: str) -> list[int]:
    tokens = ids_of_bytes(tokenizer_of(kind))
    return [tokens[byte] for byte in text.encode()]


KINDS = ["llama3", "byte_level", "llama2"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begin", ["", BEGIN])
@pytest.mark.parametrize("after", ["\n\nthe dog. " * 9, ">> a" * 9])
@pytest.mark.parametrize("before", ["\na", "a.", "<"])
def test_budget_that_is_not_reached_changes_nothing(kind, begin, before, after):
    text = f"{begin}{before}{END}{after}"
    for wanted in (spelled(kind, text), bytewise(kind, text)):
        num = next(num for num in range(len(wanted)) if END in tokenizer_of(kind).decode(wanted[:num]))
        for num_tokens in range(num, len(wanted)):
            assert decode(kind, begin, wanted, num_tokens) == wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begin", ["", BEGIN, f"\n{BEGIN}"])
def test_exhausted_budget_forces_the_end_once(kind, begin):
    opening, thought = bytewise(kind, begin + "\n" if begin else ""), bytewise(kind, "the dog </thin> and the cat!")
    start = len(opening) - 1 if begin else 0  # the line break is a token of the part
    for num_tokens in range(len(thought)):
        actual = decode(kind, begin.strip(), [*opening, *thought], num_tokens)
        text = tokenizer_of(kind).decode(actual)
        shown = tokenizer_of(kind).decode([*opening, *thought][: start + num_tokens])
        head, end, _ = text.partition(END)
        head = head.rstrip(" ")  # Llama 2's tokenizer writes a space before the mark
        assert end and shown.startswith(head), "the text of the part is kept"
        assert END.startswith(shown.removeprefix(head).strip(" ")), "a mark is completed"
        assert text.count(END) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_answer_without_a_reasoning_part_is_unlimited(kind):
    wanted = spelled(kind, " the dog <think> and the cat")
    assert decode(kind, BEGIN, wanted, 2) == wanted


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_forced_end_mark_has_its_usual_tokens(num_tokens):
    wanted = spelled("llama3", "the dog and the cat")
    end = spelled("llama3", END)
    actual = decode("llama3", "", wanted, num_tokens)
    assert actual == [*wanted[:num_tokens], *end, *wanted[num_tokens:]]
