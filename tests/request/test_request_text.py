"""The text of a request as its tokens arrive: special tokens, the end of the text, texts of tokens."""

from __future__ import annotations

import pytest
from support.tokenizer_kinds import tokenizer_of

from lp_runtime.config.lookahead import PLAIN
from lp_runtime.request.request import Request
from lp_runtime.request.request_text import RequestText
from lp_runtime.text.reasoning import Reasoning


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("llama3")


def text_of(tokenizer, steps, **fields):
    """Add tokens in steps, up to a stop; return (deltas, texts of tokens, the RequestText)."""
    fields = {"eos_token_ids": frozenset({tokenizer.eos_token_id}), "logprobs": True, **fields}
    request = Request(tuple(tokenizer("the answer is").input_ids), PLAIN, 99, **fields)
    text = RequestText(request, tokenizer)
    added = []
    for step in steps:
        added.append(text.add(step))
        if text.stop is not None:
            break
    added.append(text.finish())
    return [delta for delta, _ in added], [each for _, texts in added for each in texts], text


def test_special_tokens_are_shown_on_request_except_final_eos(tokenizer):
    special = next(
        token
        for token in tokenizer.added_tokens_decoder
        if token not in (tokenizer.eos_token_id, tokenizer.bos_token_id)
    )
    word = tokenizer.encode(" dog", add_special_tokens=False)
    steps = [word, [special], [*word, tokenizer.eos_token_id]]
    shown = tokenizer.decode([special])
    for skips, expected in ((True, " dog dog"), (False, f" dog{shown} dog")):
        deltas, texts, _ = text_of(tokenizer, steps, skip_special_tokens=skips)
        assert "".join(deltas) == "".join(texts) == expected
        assert len(texts) == 2 * len(word) + 2


def test_ordinary_stop_token_is_shown_with_and_without_special_tokens(tokenizer):
    word = tokenizer.encode(" dog", add_special_tokens=False)
    for skips in (True, False):
        deltas, texts, _ = text_of(
            tokenizer, [word], skip_special_tokens=skips, eos_token_ids=frozenset([word[-1], tokenizer.eos_token_id])
        )
        assert "".join(deltas) == "".join(texts) == " dog"


@pytest.mark.parametrize("cuts_steps", [False, True])
def test_text_is_cut_after_stop_string_inside_last_token(tokenizer, cuts_steps):
    ids = tokenizer.encode(" the dog, the house; the man", add_special_tokens=False)
    num = next(num for num in range(1, len(ids)) if "hous" in tokenizer.decode(ids[:num]))
    steps = [[token] for token in ids[:num]] if cuts_steps else [ids[:num]]
    deltas, texts, text = text_of(tokenizer, steps, stop=("never", "hous", "us"))
    assert text.stop == "hous" and "".join(deltas) == " the dog, the hous"
    assert "".join(texts) == tokenizer.decode(ids[:num]), "tokens are shown whole"


@pytest.mark.parametrize("size", [1, 2, 99])
@pytest.mark.parametrize(("num_skipped", "expected"), [(0, "the cat"), (1, "the cat"), (2, "the cat\nthe cat")])
def test_no_stop_string_ends_in_the_first_tokens(tokenizer, num_skipped, expected, size):
    """A string that begins in these tokens counts if it ends after them."""
    ids = tokenizer.encode("the cat\nthe cat\nthe cat", add_special_tokens=False)
    steps = [ids[start : start + size] for start in range(0, len(ids), size)]
    num = num_skipped and len(tokenizer.encode("the cat", add_special_tokens=False)) + num_skipped - 2
    for stops in (("cat", "e cat"), ("zz", "cat"), ("at",)):
        deltas, _, text = text_of(tokenizer, steps, stop=stops, stop_after=num, is_answer=True)
        assert "".join(deltas) == expected and text.stop in stops


def test_no_stop_string_ends_in_the_first_tokens_of_an_answer_that_may_reason(tokenizer):
    ids = [each for text in ("\n", "\n", "the", "\n") for each in tokenizer.encode(text, add_special_tokens=False)]
    fields = {"stop": ("\n",), "reasoning": Reasoning("<think>", "</think>"), "is_answer": True}
    for num, expected in ((0, "\n"), (1, "\n\n"), (2, "\n\nthe\n"), (9, "\n\nthe\n")):
        for steps in ([ids], [[token] for token in ids]):
            deltas, _, text = text_of(tokenizer, steps, stop_after=num, **fields)
            assert "".join(deltas) == expected and text.stop == (None if num == 9 else "\n")


@pytest.mark.parametrize("begin", [None, "<think>"])
def test_stop_strings_do_not_match_before_content(tokenizer, begin):
    """Stop strings match neither in the reasoning part nor in the white space after it."""
    ids = tokenizer.encode(f"{begin or ''}the dog\n\n</think>\n\nthe man\n\nthe cat", add_special_tokens=False)
    deltas, _, text = text_of(
        tokenizer, [[token] for token in ids], stop=("\n\n",), reasoning=Reasoning(begin, "</think>"), is_answer=True
    )
    assert "".join(deltas).endswith("</think>\n\nthe man\n\n") and text.stop == "\n\n"
    ids = tokenizer.encode("the dog\n\nthe man", add_special_tokens=False)
    deltas, _, text = text_of(
        tokenizer, [[token] for token in ids], stop=("\n\n",), reasoning=Reasoning(begin, "</think>"), is_answer=True
    )
    assert text.stop == (None if begin is None else "\n\n"), "an answer need not reason"


MARKED = Reasoning("<think>", "</think>", ("<answer>", "<text>"))
GRANITE = Reasoning("Here is my thought process:", "Here is my response:")


@pytest.mark.parametrize("in_one_step", [False, True])
@pytest.mark.parametrize(
    ("answer", "reasoning", "stop", "expected"),
    [
        ("\n\nHello world", Reasoning("<think>", "</think>"), "\n", ""),
        ("  \n  foo", Reasoning("<think>", "</think>"), "\n", "  "),
        ("<b>the dog", Reasoning("<think>", "</think>"), "<", ""),
        ("\n \n", Reasoning("<think>", "</think>"), "\n", ""),  # the answer ends before it is decided
        ("\n<think>\n</think>\n\nthe dog\n", Reasoning("<think>", "</think>"), "\n", "\n<think>\n</think>\n\nthe dog"),
        ("<answer>the dog", MARKED, "w", "<answer>the dog"),
        ("\n<answer>\nthe dog", MARKED, "\n", "\n<answer>"),
        ("<ant", MARKED, "<", ""),
        ("<think>a</think>\n<text>at <b>", MARKED, "<", "<think>a</think>\n<text>at "),
        ("<think>a</think>\n<ant", MARKED, "<", "<think>a</think>\n"),
        ("Here is my dog", GRANITE, " my", "Here is"),
        ("Here is my thought process: my dog", GRANITE, " my", "Here is my thought process: my dog"),
    ],
)
def test_stop_string_where_reasoning_might_begin_is_cut(tokenizer, answer, reasoning, stop, expected, in_one_step):
    ids = tokenizer.encode(answer, add_special_tokens=False)
    steps = [ids] if in_one_step else [[token] for token in ids]
    deltas, texts, text = text_of(tokenizer, steps, stop=(stop,), reasoning=reasoning, is_answer=True)
    assert "".join(deltas) == expected + (text.stop or ""), "the text ends with the stop string"
    assert text.stop == (stop if answer != expected else None)
    assert answer.startswith("".join(texts)) and len(texts) <= len(ids)


def test_text_before_a_stop_string_inside_a_final_hidden_token_is_whole(tokenizer):
    ids = [*tokenizer.encode("the cat", add_special_tokens=False), tokenizer.eos_token_id]
    deltas, _, text = text_of(tokenizer, [ids], stop=("t<|eot",), skip_special_tokens=False, is_answer=True)
    assert "".join(deltas) == "the cat" and text.stop == "t<|eot"
