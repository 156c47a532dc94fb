"""Tests that deltas join to the text that transformers decodes, for all tokenizers and step sizes."""

from __future__ import annotations

import os
import random

import pytest
from support.text_checks import deltas_fault, smallest_fault, text_of, token_texts_fault
from support.thinned import thinned
from support.token_sequences import RandomTokens, ids_of_bytes
from support.tokenizer_kinds import BUILDERS, CORPUS, KINDS, tokenizer_of
from transformers import AutoTokenizer

from lp_runtime.errors import ModelError
from lp_runtime.text.decoding import REPLACEMENT
from lp_runtime.text.detokenizer import Detokenizer

SMALL_KINDS = [builder.__name__ for builder in BUILDERS]  # vocabularies of a few hundred tokens
NUM_SEQUENCES = {deltas_fault: 12, token_texts_fault: 8}


def ids_of(kind: str, *pieces: str) -> list[int]:
    return [tokenizer_of(kind).get_vocab()[piece] for piece in pieces]


def deltas_of(kind: str, prompt: list[int], new: list[int]) -> list[str]:
    """Return the deltas of tokens that are added one by one, then the rest."""
    detokenizer = Detokenizer(tokenizer_of(kind), prompt)
    return [*(detokenizer.add([token]) for token in new), detokenizer.finish()]


@pytest.mark.parametrize(("kind", "check"), thinned(2, KINDS, [deltas_fault, token_texts_fault]))
def test_deltas_and_token_texts_join_to_the_text(kind, check):
    tokenizer = tokenizer_of(kind)
    source = RandomTokens(tokenizer, random.Random(kind))
    for seed in range(NUM_SEQUENCES[check]):
        prompt, new = source.prompt(), source.tokens()
        try:
            assert check(tokenizer, prompt, new, seed) is None
        except (AssertionError, ModelError):
            pytest.fail(smallest_fault(check, tokenizer, prompt, new, seed))


@pytest.mark.parametrize("kind", SMALL_KINDS)
def test_text_is_held_back_only_while_it_can_change(kind):
    """Text is held back only while further tokens can change it.

    U+FFFD at the end waits for any number of tokens: a character may have four bytes, each of them a token. Text that
    is cleaned up waits while several tokens may change it: the space of " n't" is removed.
    """
    tokenizer, waiting = tokenizer_of(kind), REPLACEMENT + " 'nvr" * ("cleaned" in kind)
    source = RandomTokens(tokenizer, random.Random(kind))
    for prompt, new in [([], source.text()[:4]), (source.prompt(), source.tokens()[:4])]:
        detokenizer, shown = Detokenizer(tokenizer, prompt), ""
        for num, token in enumerate(new, 1):
            shown += detokenizer.add([token])
            texts = tokenizer.decode([[*prompt, *new[:num], other] for other in range(len(tokenizer))], True)
            text = tokenizer.decode([*prompt, *new[:num]], True)
            final = len(os.path.commonprefix([text, min(texts), max(texts)]))  # of sorted texts, first and last suffice
            unchanged = text[:final].rstrip(waiting)
            num_before = len(text) - len(text_of(tokenizer, prompt, new[:num]))
            assert len(shown) >= len(unchanged) - num_before, f"{text!r} after {prompt}, {new[:num]}"


@pytest.mark.parametrize("kind", thinned(2, SMALL_KINDS))
def test_step_does_not_decode_the_whole_text_again(kind, monkeypatch):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(CORPUS)
    detokenizer = Detokenizer(tokenizer, ids)
    decode, lengths = tokenizer.decode, []

    def counted(token_ids, **options):
        lengths.append(len(token_ids))
        return decode(token_ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    for start in range(0, len(ids), 5):
        detokenizer.add(ids[start : start + 5])
    assert max(lengths) < len(ids) / 2


def test_first_space_after_a_prompt_is_kept():
    """The decoder strips the first space of the whole text, which is the prompt's."""
    prompt, new = tokenizer_of("llama2").encode("the cat"), ids_of("llama2", "▁the")
    assert deltas_of("llama2", prompt, new) == [" the", ""]
    assert deltas_of("llama2", [], new) == ["the", ""]
    assert deltas_of("llama2", ids_of("llama2", "<s>"), new) == ["the", ""]


def test_run_of_byte_tokens_is_held_back_until_it_ends():
    """One invalid byte turns every byte of the run into U+FFFD."""
    character, letter = ids_of("llama2", "<0xC3>", "<0xA9>"), ids_of("llama2", "a")
    assert deltas_of("llama2", [], character + letter) == ["", "", "éa", ""]
    assert deltas_of("llama2", [], character) == ["", "", "é"]
    invalid = [*character, *ids_of("llama2", "<0xFF>"), *letter]
    assert deltas_of("llama2", [], invalid) == ["", "", "", REPLACEMENT * 3 + "a", ""]


@pytest.mark.parametrize("character", ["x", "é", "北", "🙂"])
def test_character_is_emitted_with_its_last_byte(character):
    tokens = ids_of_bytes(tokenizer_of("byte_level"))
    new = [tokens[byte] for byte in character.encode()]
    assert deltas_of("byte_level", [], new) == [""] * (len(new) - 1) + [character, ""]


def test_incomplete_character_ends_as_replacement_character():
    tokens = ids_of_bytes(tokenizer_of("byte_level"))
    assert deltas_of("byte_level", [], [tokens[0x61], tokens[0xF0], tokens[0x9F]]) == ["a", "", "", REPLACEMENT]


def test_character_that_begins_in_the_prompt_is_emitted():
    first, second = [ids_of_bytes(tokenizer_of("byte_level"))[byte] for byte in "é".encode()]
    assert deltas_of("byte_level", [first], [second]) == ["é", ""]


def test_special_tokens_within_a_character_are_skipped():
    first, second = [ids_of_bytes(tokenizer_of("byte_level"))[byte] for byte in "é".encode()]
    end = tokenizer_of("byte_level").eos_token_id
    assert deltas_of("byte_level", [], [first, end, second, end]) == ["", "", "é", "", ""]


def test_no_tokens_give_empty_text():
    assert deltas_of("byte_level", [], []) == [""]
    assert Detokenizer(tokenizer_of("llama2")).add([]) == ""


def test_tokenizer_with_changing_text_is_refused(monkeypatch):
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("the cat")
    detokenizer = Detokenizer(tokenizer)
    detokenizer.add(ids)
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda token_ids, **options: decode(token_ids, **options).upper())
    with pytest.raises(ModelError, match="not a function of the token ids"):
        detokenizer.add(ids)


@pytest.mark.parametrize("kind", thinned(3, SMALL_KINDS))
def test_tokenizers_are_equal_after_save_and_load(kind, tmp_path):
    """The fixtures can be saved and loaded by transformers, so they represent real kinds of tokenizers."""
    tokenizer = tokenizer_of(kind)
    tokenizer.save_pretrained(tmp_path)
    loaded, source = AutoTokenizer.from_pretrained(tmp_path), RandomTokens(tokenizer, random.Random(0))
    sequences = [source.tokens() for _ in range(20)]
    assert type(loaded) is type(tokenizer) or not KINDS[kind]().is_fast
    for skips in (True, False):
        assert loaded.decode(sequences, skips) == tokenizer.decode(sequences, skips)
    assert loaded.encode(CORPUS) == tokenizer.encode(CORPUS)
