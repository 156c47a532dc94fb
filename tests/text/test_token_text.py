"""Tests that the bytes of single tokens join to the text's UTF-8."""

from __future__ import annotations

import random

import pytest
from support.text_checks import bytes_fault, kinds_of, smallest_fault
from support.token_sequences import RandomTokens, ids_of_bytes
from support.tokenizer_kinds import KINDS, tokenizer_of

from lp_runtime.text.token_text import TokenTexts


@pytest.mark.parametrize("kind", kinds_of(bytes_fault, list(KINDS)))
def test_token_bytes_join_to_the_text(kind):
    tokenizer = tokenizer_of(kind)
    source = RandomTokens(tokenizer, random.Random(kind))
    for seed in range(40):
        new = source.text() if seed % 2 else source.tokens()
        if bytes_fault(tokenizer, [], new, seed) is not None:
            pytest.fail(smallest_fault(bytes_fault, tokenizer, [], new, seed))


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma", "byt5"])
def test_byte_tokens_return_their_byte(kind):
    tokenizer = tokenizer_of(kind)
    texts = TokenTexts(tokenizer)
    assert [texts.bytes_of(token) for token in ids_of_bytes(tokenizer)] == [bytes([byte]) for byte in range(256)]


def test_token_that_ends_within_a_character_returns_its_bytes():
    vocabulary, texts = tokenizer_of("byte_level").get_vocab(), TokenTexts(tokenizer_of("byte_level"))
    assert texts.bytes_of(vocabulary["aâ"]) == b"a\xe2"
    assert texts.bytes_of(vocabulary["\xa9\xc3"]) == b"\xa9\xc3"


def test_leading_space_belongs_to_its_token():
    texts = TokenTexts(tokenizer_of("llama2"))
    assert texts.bytes_of(tokenizer_of("llama2").get_vocab()["▁the"]) == b" the"
