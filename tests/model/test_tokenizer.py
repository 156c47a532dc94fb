"""Streaming text: deltas add up, characters stay whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lp_runtime.model.tokenizer import REPLACEMENT, StopStrings, TextStream

SAMPLES = ["def fib(n):\n    return n", "naïve café — 北京 🙂 ok", "🏳️‍🌈👩‍👩‍👧 x", "  two  spaces", "né"]


def byte_level() -> PreTrainedTokenizerFast:
    """Bytes and a few merges, some of which cut across characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<end>"]
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words that begin with a metaspace, and bytes to fall back on: its decoder strips the very first space."""
    words = ["▁", "▁the", "▁cat", "the", "cat", "é", "<end>"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")


TOKENIZERS = {"byte_level": byte_level(), "sentencepiece_like": sentencepiece_like()}


def whole(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream(tokenizer, ids, sizes) -> list[str]:
    """The deltas of ids that come so many at a time, the sizes over and over."""
    text, deltas, start = TextStream(tokenizer), [], 0
    while start < len(ids):
        for size in sizes:
            deltas.append(text.add(ids[start : start + size]))
            start += size
    return [*deltas, text.finish()]


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("sizes", [[1], [2], [1, 3], [50]])
def test_characters_are_never_split(sample, sizes):
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(sample)
    assert whole(tokenizer, ids) == sample
    deltas = stream(tokenizer, ids, sizes)
    assert "".join(deltas) == sample
    assert not any(REPLACEMENT in delta for delta in deltas)


def test_text_does_not_wait_longer_than_its_character():
    tokenizer = TOKENIZERS["byte_level"]
    text = TextStream(tokenizer)
    for character in "x🙂y北":
        ids = [
            tokenizer.convert_tokens_to_ids(c)
            for c in pre_tokenizers.ByteLevel(False, False).pre_tokenize_str(character)[0][0]
        ]
        assert len(ids) == len(character.encode())
        assert [text.add([i]) for i in ids] == [""] * (len(ids) - 1) + [character]
    assert text.finish() == ""


def test_an_unfinished_character_comes_at_the_end():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a") + [tokenizer.convert_tokens_to_ids("ð")]  # byte f0: a character of four begins
    text = TextStream(tokenizer)
    assert (text.add(ids), text.peek(), text.finish()) == ("", "a", "a")  # never half a character, at the end neither


def test_special_tokens_show_nothing():
    tokenizer = TOKENIZERS["byte_level"]
    ids = [*tokenizer.encode("a b"), tokenizer.eos_token_id]
    assert stream(tokenizer, ids, [1])[-2:] == ["", ""]
    assert "".join(stream(tokenizer, ids, [1])) == "a b"


def test_nothing_at_all():
    text = TextStream(TOKENIZERS["byte_level"])
    assert text.add([]) == text.finish() == ""


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_deltas_of_any_valid_text_add_up(name, data):
    tokenizer = TOKENIZERS[name]
    sample = data.draw(st.text(st.sampled_from("ab é北🙂▁thec\n"), max_size=40))
    ids = tokenizer.encode(sample, add_special_tokens=False)
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    assert "".join(stream(tokenizer, ids, sizes)) == whole(tokenizer, ids)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 299), max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_deltas_of_any_tokens_add_up_even_where_they_are_no_text(ids, sizes):
    tokenizer = TOKENIZERS["byte_level"]
    ids = [i for i in ids if i < len(tokenizer)]
    assert "".join(stream(tokenizer, ids, sizes)) == whole(tokenizer, ids).rstrip(REPLACEMENT)


def test_a_stop_string_before_half_a_character_is_found():
    tokenizer = TOKENIZERS["byte_level"]
    half = tokenizer.convert_tokens_to_ids("ð")
    stop = StopStrings(tokenizer, ["ab"])
    ids = [*tokenizer.encode("a"), *tokenizer.encode("b"), half]
    found = [stop.add(token) for token in ids]
    assert found[1] == 0
    assert found[0] is None

    # a token that ends the string and begins a character: the string counts, what is unfinished does not
    class Joined:
        def decode(self, ids, **options):
            return b"".join([b"x", b"ab\xf0"][i] for i in ids).decode(errors="replace")

    stop = StopStrings(Joined(), ["ab"])
    assert [stop.add(0), stop.add(1)] == [None, 0]


def test_where_stop_strings_end():
    class Letters:
        def decode(self, ids, **options):
            return "".join(["a", "b", "ab", "abc", "ba"][i] for i in ids)

    def ends(ids, *strings):
        stop = StopStrings(Letters(), strings)
        return [stop.add(token) for token in ids]

    assert ends([0, 1], "ab") == [None, 0]
    assert ends([0, 4], "ab") == [None, 1]
    assert ends([1, 1, 0, 1], "ab") == [None, None, None, 0]
    assert ends([0, 4, 1], "aab") == [None, None, None]
    assert ends([1, 3], "ba") == [None, 2]
    assert ends([1, 3], "bab", "ba") == [None, 2]
    assert ends([3], "abc", "zz") == [0]
    assert StopStrings(Letters(), ["bab"])([0, 1, 3, 1]) == 3
    assert StopStrings(Letters(), ["zz"])([0, 1, 3, 1]) is None


@pytest.mark.parametrize("num_before", range(8))
def test_a_stop_string_is_found_after_a_text_of_any_length(num_before):
    """Each token is one character, so every token of the string comes in a separate step."""

    class Letters:
        def decode(self, ids, **options):
            return "".join("abc"[i] for i in ids)

    stop = StopStrings(Letters(), ["abca"])
    ids = [1] * num_before + [0, 1, 2, 0]
    assert [stop([token]) for token in ids] == [None] * (len(ids) - 1) + [1]
