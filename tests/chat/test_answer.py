"""Tests of answers whose syntax has special tokens: their messages, and constraints after the reasoning part."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import xgrammar
from support.constrained_texts import INFO
from support.tool_answers import parts_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lp_runtime.chat.answer import end_of, read_message
from lp_runtime.chat.chat_format import ChatFormat, ToolUse
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.constraints.compiled import compile_constraint, load_compiled
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.model.chat_template import ChatTemplate
from lp_runtime.request.request import Request

SPECIAL = ("</s>", "[THINK]", "[/THINK]", "<think>", "</think>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>")
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({character: token for token, character in enumerate(alphabet)}, []))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>")


def ids(text: str) -> list[int]:
    return tokenizer()(text).input_ids


def think_format() -> ChatFormat:
    """Return the format of a model whose tokenizer has the marks `<think>` and `</think>` as special tokens."""
    return ChatFormat(replace(ChatTemplate.of(tokenizer()), source="{{ messages }}</think>"))


@pytest.mark.parametrize(("prompt", "begin"), [("hi", "<think>"), ("hi<think>", "")])
def test_reasoning_between_special_tokens_is_split_off(prompt, begin):
    request = Request(tuple(ids(prompt)), LookaheadConfig(), 99, is_answer=True)
    message = read_message(think_format(), tokenizer(), request, ids(f"{begin}hm</think>5"))
    assert (message["reasoning"], message["content"]) == ("hm", "5")


@pytest.mark.parametrize(
    ("prompt", "reasoning", "content"),
    [
        ("<|start|>assistant<think>Okay, the user greets me.", "hm", "5"),
        ("<|start|>assistant<think>hm</think>", None, "hm</think>5"),
        ("<|start|>user What is <think>?<|end|><|start|>assistant", None, "hm</think>5"),
    ],
)
def test_reasoning_that_the_prompt_has_begun_goes_on(prompt, reasoning, content):
    request = Request(tuple(ids(prompt)), LookaheadConfig(), 99)
    message = read_message(think_format(), tokenizer(), request, ids("hm</think>5"))
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)


@pytest.mark.parametrize(("end", "arguments"), [("</s>", '{"a": 1}'), ("", '{"a": 1')])
def test_only_a_call_that_a_limit_cuts_is_unfinished(end, arguments):
    tools = ({"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}},)
    tokens = ids(f"<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>{end}")
    ends = frozenset({tokenizer().eos_token_id})
    request = Request(tuple(ids("hi")), LookaheadConfig(), len(tokens), ends, is_answer=True, tools=tools)
    (call,) = read_message(ChatFormat("", "qwen3_coder"), tokenizer(), request, tokens)["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize("begun", ["", "Once", "Once upon a time there was a king who had "])
def test_message_that_continues_one_of_the_prompt_is_content(begun):
    prompt = tuple(ids(f"<|start|>user<|message|>Hi<|end|>{FINAL}{begun}"))
    request = Request(prompt_ids=prompt, lookahead=LookaheadConfig(), max_new_tokens=99)
    message = read_message(ChatFormat("", "harmony"), tokenizer(), request, ids("three daughters."))
    assert message == {"role": "assistant", "content": "three daughters."}


THOUGHT = "<|channel|>analysis<|message|>a STOP<|end|><|start|>assistant"


@pytest.mark.parametrize(
    "begin",
    [
        "<|channel|>final<|message|>",
        f"{THOUGHT}<|channel|>final<|message|>",
        f"{THOUGHT}<|channel|>final json<|message|>",
        f"{THOUGHT}<|channel|>final <|constrain|>json<|message|>",
        f"{THOUGHT}<|channel|>commentary<|message|>",
        "<|channel|>commentary to=functions.f<|message|>STOP<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>commentary to=f<|message|>STOP<|end|><|start|>assistant<|channel|>final<|message|>",
    ],
)
def test_content_of_a_harmony_answer_ends_before_the_stop_string(begin):
    form, prompt = ChatFormat("", "harmony"), tuple(ids("<|start|>user<|message|>Hi<|end|><|start|>assistant"))
    marks = form.reasoning_marks(end_of(prompt, tokenizer()))
    options = {"stop": ("STOP", "\n"), "is_answer": True, "tools": ({"function": {"name": "f"}},)}
    request = Request(prompt, LookaheadConfig(), 99, reasoning=marks, **options)
    assert read_message(form, tokenizer(), request, ids(f"{begin}5 STOP 6"))["content"] == "5 "
    assert read_message(form, tokenizer(), request, ids(f"{begin}\n5"))["content"] in ("", None)


@pytest.mark.parametrize(
    ("form", "prompt", "allowed", "refused"),
    [
        (ChatFormat("", "none", "mistral"), "hi", ["[THINK]so[/THINK]5", "5"], ["so[/THINK]5", "[THINK]so"]),
        (ChatFormat("", "none", "mistral"), "hi[THINK]", ["so[/THINK]5"], ["5", "so[/THINK]a"]),
        (think_format(), "hi", ["<think>so</think>5", "5"], ["so</think>5", "<think>so"]),
        (think_format(), "hi<think>", ["so</think>5"], ["5", "so</think>a"]),
        (ChatFormat("", "harmony"), f"{FINAL}Of those ", ["5"], ["a", "<|channel|>final<|message|>5"]),
    ],
)
def test_constrained_text_may_follow_reasoning_between_special_tokens(form, prompt, allowed, refused):
    grammars = Grammars(tokenizer, len(tokenizer()), {tokenizer().eos_token_id})
    text = ConstraintConfig(json_schema={"type": "integer"})
    config = form.constraint(ToolUse(), text, end_of(ids(prompt), tokenizer()))
    info = grammars.vocabulary(config.kind == "structural_tag").info
    compiled = load_compiled(compile_constraint(config, info), info)
    for answer in allowed + refused:
        matcher = xgrammar.GrammarMatcher(compiled)
        assert all(map(matcher.accept_token, ids(answer + "</s>"))) == (answer in allowed), answer


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        (ConstraintConfig(choice=[" yes", "\n\nno", "no"]), [" yes", "\n\nno", "no"]),
        (ConstraintConfig(choice=["yes", "no"]), ["yes", "no"]),
        (ConstraintConfig(regex=r"(?:|\d{0,2})(\s| )?yes|\n{2}no"), [" yes", "yes", "\n\nno"]),
        (ConstraintConfig(regex=r"^(\S|no{1,2} )\s?$"), ["y ", "n", "no "]),
        (ConstraintConfig(regex=" " + "a" * 2000 + "|no"), ["no"]),
        (ConstraintConfig(grammar='root ::= " "? "yes" | "\\n\\n" "no"'), [" yes", "yes", "\n\nno"]),
    ],
)
@pytest.mark.parametrize("form", [think_format(), ChatFormat("", "none", "mistral"), ChatFormat("", "none", "cohere")])
def test_constrained_text_after_reasoning_is_what_the_constraint_allows(form, text, choices):
    compiled = load_compiled(compile_constraint(form.constraint(ToolUse(), text, ""), INFO), INFO)
    begin, end = form.reasoning.begin, form.reasoning.end
    for space, choice in itertools.product(("", "\n\n", " "), choices):
        for thought in ("", f"{begin}so{end}{space}"):
            matcher = xgrammar.GrammarMatcher(compiled)
            if matcher.accept_string(thought + choice) and matcher.is_completed():
                _, content, _ = parts_of(form.parser((), "", text), [thought + choice])
                assert content in choices, (thought, choice)
            else:
                assert space and thought
