"""Tests that stop strings end the tokens where the text first has one, as StopStringCriteria does."""

from __future__ import annotations

import random

import pytest
from support.text_checks import criteria_fault, kinds_of, smallest_fault, stop_strings_fault
from support.token_sequences import RandomTokens, ids_of_bytes
from support.tokenizer_kinds import KINDS, tokenizer_of

from lp_runtime.errors import ModelError
from lp_runtime.text.stop_strings import StopStrings

NUM_SEQUENCES = {stop_strings_fault: 15, criteria_fault: 2}
CASES = [(kind, check) for check in NUM_SEQUENCES for kind in kinds_of(check, list(KINDS))]


def ids_of(kind: str, *pieces: str) -> list[int]:
    return [tokenizer_of(kind).get_vocab()[piece] for piece in pieces]


@pytest.mark.parametrize(("kind", "check"), CASES)
def test_tokens_end_at_the_first_stop_string(kind, check):
    tokenizer = tokenizer_of(kind)
    source = RandomTokens(tokenizer, random.Random(kind))
    for seed in range(NUM_SEQUENCES[check]):
        prompt, new = source.prompt(), source.tokens()
        try:
            assert check(tokenizer, prompt, new, seed) is None
        except (AssertionError, ModelError):
            pytest.fail(smallest_fault(check, tokenizer, prompt, new, seed))


def test_space_after_the_prompt_matches_a_stop_string():
    prompt, new = tokenizer_of("llama2").encode("the cat"), ids_of("llama2", "▁the")
    assert StopStrings(tokenizer_of("llama2"), [" the"], prompt)(new) == 1
    assert StopStrings(tokenizer_of("llama2"), [" the"])(new) is None  # the decoder strips it at the beginning


def test_stop_string_is_not_matched_in_or_across_the_prompt():
    tokenizer = tokenizer_of("byte_level")
    prompt, new = tokenizer.encode("st"), tokenizer.encode("op")
    assert StopStrings(tokenizer, ["st", "stop"], prompt)(new) is None
    assert StopStrings(tokenizer, ["op"], prompt)(new) == len(new)


def test_stop_string_is_matched_in_special_tokens():
    tokenizer = tokenizer_of("llama3")
    new = [*tokenizer.encode("the cat", add_special_tokens=False), tokenizer.eos_token_id]
    assert StopStrings(tokenizer, ["t<|eot"])(new) == len(new)


def test_stop_string_before_an_incomplete_character_is_matched():
    tokenizer = tokenizer_of("byte_level")
    crossing = tokenizer.get_vocab()["aâ"]  # the letter and the first byte of a character
    assert StopStrings(tokenizer, ["xa"])([*tokenizer.encode("x"), crossing, *tokenizer.encode("x")]) == 2


def test_stop_string_is_matched_before_a_later_byte_removes_it():
    """The text ends with the first token that completes the string, so the later byte is never committed."""
    new = ids_of("llama2", "<0xC3>", "<0xA9>", "<0xFF>")
    assert StopStrings(tokenizer_of("llama2"), ["é"])(new) == 2


@pytest.mark.parametrize("num_before", [0, 1, 2, 3, 5, 8, 40, 100])
def test_stop_string_is_matched_after_text_of_any_length(num_before):
    """Each token is one character, so every token of the string comes in a separate step."""
    tokens = ids_of_bytes(tokenizer_of("byte_level"))
    stop = StopStrings(tokenizer_of("byte_level"), ["abca"])
    ids = [tokens[byte] for byte in b"b" * num_before + b"abca"]
    assert [stop([token]) for token in ids] == [None] * (len(ids) - 1) + [1]
