"""Tests of all text fields of answers, with a tokenizer that strips the first space of a text."""

from __future__ import annotations

import openai
import pytest
import torch
from support.serving import served
from support.tokenizer_kinds import tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM

from lp_runtime import LookaheadRuntime

PROMPT = "the answer is"
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("llama2")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("llama2") / "model"
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with LookaheadRuntime(folder, device="cpu", dtype="float32") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def client(runtime):
    with served(runtime) as (url, _):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def biased(tokenizer, *pieces: str) -> dict[str, float]:
    """Return a logit_bias that always selects the first piece; the others follow in this order."""
    return {str(tokenizer.convert_tokens_to_ids(piece)): 100.0 - place for place, piece in enumerate(pieces)}


def completion(client, **options):
    return client.completions.create(model="demo", prompt=PROMPT, temperature=0, **options).choices[0]


def chat(client, **options):
    messages = [{"role": "user", "content": PROMPT}]
    return client.chat.completions.create(model="demo", messages=messages, temperature=0, **options).choices[0]


def word_of(tokenizer) -> str:
    """Return a piece that begins with a space and that is another piece without it."""
    vocabulary = tokenizer.get_vocab()
    return next(
        piece for piece in sorted(vocabulary) if piece[0] == "▁" and piece[1:].isalpha() and piece[1:] in vocabulary
    )


def test_completion_keeps_leading_space_and_chat_strips_it(client, tokenizer):
    word = word_of(tokenizer)
    text = " " + word[1:]
    asked = {"max_tokens": 3, "logit_bias": biased(tokenizer, word)}
    choice = completion(client, **asked, logprobs=5)
    assert choice.text == text * 3 == "".join(choice.logprobs.tokens)
    assert choice.logprobs.text_offset == [0, len(text), 2 * len(text)]
    assert {len(top) for top in choice.logprobs.top_logprobs} == {6}, "the biased token is not among the likeliest"
    content = chat(client, **asked, logprobs=True)
    assert content.message.content == (text * 3)[1:] == "".join(each.token for each in content.logprobs.content)
    assert b"".join(bytes(each.bytes) for each in content.logprobs.content).decode() == (text * 3)[1:]


def test_bytes_of_a_continued_message_are_those_of_its_text(client, tokenizer):
    word = word_of(tokenizer)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    choice = client.chat.completions.create(
        model="demo",
        messages=messages,
        temperature=0,
        max_tokens=2,
        logit_bias=biased(tokenizer, word),
        logprobs=True,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    ).choices[0]
    assert choice.message.content == 2 * (" " + word[1:])
    assert b"".join(bytes(each.bytes) for each in choice.logprobs.content).decode() == choice.message.content


def test_echo_returns_prompt_and_new_text(client, tokenizer):
    asked = {"max_tokens": 2, "logit_bias": biased(tokenizer, word_of(tokenizer)), "echo": True}
    choice = completion(client, **asked, logprobs=0)
    assert choice.text == PROMPT + 2 * (" " + word_of(tokenizer)[1:]) == "".join(choice.logprobs.tokens)
    assert all(
        choice.text[offset:].startswith(token)
        for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
    )


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_matches_at_first_new_character(client, tokenizer, stream):
    word = word_of(tokenizer)
    asked = {"max_tokens": 9, "logit_bias": biased(tokenizer, word), "stop": [" " + word[1:]]}
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.completions.create(model="demo", prompt=PROMPT, temperature=0, **asked, **options))
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == ""
        assert chunks[-1].usage.completion_tokens == 1
    else:
        choice = completion(client, **asked, logprobs=0)
        assert (choice.text, choice.finish_reason, len(choice.logprobs.tokens)) == ("", "stop", 1)


@pytest.mark.parametrize("choices", [[" yes", " no"], ["yes", "no"], ["  yes"], [" \u00e9\U0001f600", "\u00e91"]])
def test_choice_constraint_returns_one_of_the_choices(client, choices):
    """Leading spaces are kept, in completions and in chats."""
    asked = {"max_tokens": 30, "extra_body": {"structured_outputs": {"choice": choices}}}
    assert completion(client, **asked).text in choices
    assert chat(client, **asked).message.content in choices
