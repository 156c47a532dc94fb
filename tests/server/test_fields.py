"""Tests of request fields that vLLM's API has and OpenAI's does not."""

from __future__ import annotations

import json

import openai
import pytest
from support.serving import served

import lp_runtime.model.tokenizer
from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.server.anthropic.messages_api import Messages
from lp_runtime.server.openai.protocol import Chat, Completion
from lp_runtime.server.openai.responses_api import Responses

PROMPT = "def binary_search(items, target):\n"
TEMPLATE = (
    '{% for m in messages %}# {{ m.role }}: {{ m.content + "\\n" }}{% endfor %}'
    "{% if add_generation_prompt %}# assistant:{% if enable_thinking is not defined or enable_thinking %}<think>"
    "{% else %}<think></think>{% endif %}{% endif %}"
    "{# effort: {{ reasoning_effort }} </think> #}"
    "{% if looping %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Write a loop."}]
FIRST = "<|endoftext|>"
BEGINS_WITH_A_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": FIRST, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {FIRST: {"id": FIRST, "ids": [0], "tokens": [FIRST]}},
}


@pytest.fixture(scope="module")
def runtime(small_model_that_chats):
    folder = small_model_that_chats(TEMPLATE)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = BEGINS_WITH_A_TOKEN
    path.write_text(json.dumps(tokenizer))
    with LookaheadRuntime(
        folder, device="cpu", dtype="float32", lookahead=LookaheadConfig(7, 5, 7, draft_tables="request")
    ) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def tokenizer(runtime):
    return load_tokenizer(runtime.config.model)


@pytest.fixture(scope="module")
def client(runtime):
    with served(runtime) as (url, _):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def complete(client, prompt=PROMPT, **fields):
    options = {name: fields.pop(name) for name in ("stop", "stream", "stream_options", "suffix") if name in fields}
    return client.completions.create(
        model="demo", prompt=prompt, max_tokens=24, temperature=0, **options, extra_body=fields
    )


def chat(client, messages=MESSAGES, max_tokens=24, **fields):
    options = {"model": "demo", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return client.chat.completions.create(**options, extra_body=fields).choices[0]


@pytest.fixture(scope="module")
def plain(runtime):
    return runtime.generate(PROMPT, 24)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_token_ends_the_text(client, tokenizer, plain, ignore_eos):
    token = plain.token_ids[5]
    num = plain.token_ids.index(token) + 1
    done = complete(client, stop_token_ids=[token], ignore_eos=ignore_eos)
    assert (done.usage.completion_tokens, done.choices[0].finish_reason) == (num, "stop")
    assert done.choices[0].text == tokenizer.decode(plain.token_ids[:num])


def test_include_stop_str_in_output_shows_the_stop_string(client, plain):
    stop = plain.text[20:24]
    end = plain.text.index(stop) + len(stop)
    assert complete(client, stop=[stop], include_stop_str_in_output=True).choices[0].text == plain.text[:end]
    chunks = complete(client, stop=[stop], include_stop_str_in_output=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.text[:end]


def test_allowed_token_ids_restrict_the_text(client, tokenizer, plain):
    allowed = [token for token in tokenizer(PROMPT).input_ids if token not in plain.token_ids]
    choice = complete(client, allowed_token_ids=allowed, logprobs=0).choices[0]
    assert len(choice.logprobs.tokens) == 24 and choice.text == "".join(choice.logprobs.tokens)
    assert set(choice.logprobs.tokens) <= {tokenizer.decode([token]) for token in allowed}


def test_bad_words_do_not_occur(client, plain):
    word = next(word for word in plain.text.split() if word.isalpha())
    text = complete(client, bad_words=[word]).choices[0].text
    assert text != plain.text and word not in text.split()


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("num", [3, 1000])
def test_truncate_prompt_tokens_keeps_the_last_or_first_tokens(client, tokenizer, num, side):
    ids = tokenizer(PROMPT).input_ids
    ids = ids[:num] if side == "right" else ids[-num:]
    cut = complete(client, truncate_prompt_tokens=num, truncation_side=side)
    assert cut.choices[0].text == complete(client, prompt=ids).choices[0].text
    assert cut.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("adds", [True, False])
def test_add_special_tokens_decides_whether_a_prompt_begins_with_one(client, tokenizer, adds):
    ids = tokenizer(PROMPT, add_special_tokens=adds).input_ids
    assert (tokenizer.decode(ids[:1]) == FIRST) == adds
    asked, expected = complete(client, add_special_tokens=adds), complete(client, prompt=ids)
    assert asked.usage.prompt_tokens == len(ids) and asked.choices[0].text == expected.choices[0].text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_usage_is_null_in_all_chunks_but_the_last(client, path):
    create = client.chat.completions.create if path.startswith("chat") else client.completions.create
    asked = {"messages": [{"role": "user", "content": "hi"}]} if path.startswith("chat") else {"prompt": PROMPT}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = [chunk.to_dict() for chunk in create(model="demo", max_tokens=4, **asked, **options)]
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    chunks = [chunk.to_dict() for chunk in create(model="demo", max_tokens=4, stream=True, **asked)]
    assert not any("usage" in chunk for chunk in chunks)


def test_continuous_usage_stats_count_tokens_in_each_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete(client, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts[0] < counts[-1] == last.usage.completion_tokens and counts == sorted(counts)
    for chunk, before in zip(chunks, [0, *counts], strict=False):  # a token's text may come with a later one
        assert chunk.usage.completion_tokens > before or not chunk.choices[0].text


def test_thinking_can_be_turned_off(client, caplog):
    answers = [
        chat(client, max_tokens=12, **fields)
        for fields in (
            {"enable_thinking": False},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none"},
        )
    ]
    assert len({answer.message.content for answer in answers}) == 1 and answers[0].message.content
    assert not hasattr(answers[0].message, "reasoning_content")
    thinking = chat(client, max_tokens=12).message
    assert thinking.reasoning_content and thinking.reasoning == thinking.reasoning_content
    for _ in range(2):
        message = chat(client, max_tokens=12, chat_template_kwargs={"no_such_variable": 1}).message
        assert message.reasoning == thinking.reasoning
    assert caplog.text.count("no_such_variable") == 1, "named once"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools"])
def test_client_cannot_replace_the_chat_template(client, name):
    with pytest.raises(openai.BadRequestError, match=f"chat_template_kwargs: '{name}' is no variable"):
        chat(client, chat_template_kwargs={name: "{{ messages }}"})


def test_looping_chat_template_is_interrupted(client, monkeypatch):
    expected = chat(client).message
    monkeypatch.setattr(lp_runtime.model.tokenizer, "TEMPLATE_SECONDS", 0.2)
    with pytest.raises(openai.BadRequestError, match="messages: the model's chat template takes longer than 0.2 s"):
        chat(client, chat_template_kwargs={"looping": True})
    monkeypatch.undo()
    assert chat(client).message == expected, "the thread that renders goes on"


def test_thinking_token_budget_limits_reasoning(client, runtime, tokenizer):
    plain = chat(client, max_tokens=20).message.reasoning
    assert chat(client, max_tokens=20, thinking_token_budget=-1).message.reasoning == plain
    for num in (0, 1, 7):
        message = chat(client, max_tokens=20, thinking_token_budget=num).message
        reasoning = getattr(message, "reasoning", "")
        assert message.content and plain.startswith(reasoning)
        assert len(tokenizer(reasoning, add_special_tokens=False).input_ids) <= num


def test_stop_strings_do_not_apply_to_reasoning(client):
    whole = chat(client, max_tokens=32, thinking_token_budget=12).message
    stop = whole.reasoning[:2]
    message = chat(client, max_tokens=32, thinking_token_budget=12, stop=[stop]).message
    assert message.reasoning == whole.reasoning
    assert message.content == whole.content.partition(stop)[0]


def test_stop_strings_apply_to_white_space_that_begins_a_constrained_text(client):
    asked = {"max_tokens": 32, "thinking_token_budget": 4, "structured_outputs": {"regex": " \n+ab"}}
    assert chat(client, **asked).message.content.strip() == "ab"
    stopped = chat(client, **asked, stop=["\n"])
    assert (stopped.message.content, stopped.finish_reason) == (" ", "stop")


def test_continue_final_message_continues_the_last_message(client, tokenizer):
    messages = [*MESSAGES, {"role": "assistant", "content": "for i in"}]
    fields = {"continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    answer = chat(client, messages, **fields)
    text = "# user: Write a loop.\n# assistant: for i in"
    assert answer.message.content == complete(client, prompt=text, add_special_tokens=False).choices[0].text
    with pytest.raises(openai.BadRequestError, match="continue_final_message: not with add_generation_prompt=true"):
        chat(client, messages, continue_final_message=True, add_generation_prompt=True)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(openai.BadRequestError, match="messages: the last one has tool calls and cannot be"):
        chat(client, [*MESSAGES, {"role": "assistant", "content": "x", "tool_calls": [call]}], **fields)


def test_prediction_reduces_steps_and_keeps_the_text(client):
    """The text is the same, in fewer steps than without the prediction; it repeats too little to be drafted from."""
    varied = {"repetition_penalty": 1.3}
    alone = complete(client, **varied)
    text = alone.choices[0].text
    guessed = complete(client, prediction={"type": "content", "content": text}, **varied)
    assert guessed.choices[0].text == text
    steps = [each.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] for each in (guessed, alone)]
    assert steps[0] < steps[1]
    details = guessed.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
    ],
)
def test_tokenize_counts_a_conversation_as_a_chat_does(client, fields):
    body = {"model": "demo", "messages": MESSAGES, **fields}
    chat_body = {"model": "demo", "messages": MESSAGES, "max_tokens": 1}
    used = client.chat.completions.create(**chat_body, extra_body=fields).usage.prompt_tokens
    assert client.post("/../tokenize", cast_to=dict, body=body)["count"] == used


def test_penalties_of_the_server_count_if_a_request_has_none():
    own = SamplingConfig(presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.1)
    for fields in ({}, {"presence_penalty": None}):
        assert Completion.model_validate({"prompt": "x", **fields}).options(own, {})["sampling"] == own
    given = Completion.model_validate({"prompt": "x", "presence_penalty": 0.0}).options(own, {})["sampling"]
    assert (given.presence_penalty, given.frequency_penalty) == (0.0, 1.0)


def test_top_k_of_minus_one_is_off():
    sampling = Completion.model_validate({"prompt": "x", "top_k": -1, "temperature": 1.0})
    assert sampling.options(SamplingConfig(top_k=5), {"do_sample": True})["sampling"].top_k == 0


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Completion, {"prompt": "x", "max_tokens": 5.0, "seed": 3.0, "n": 2.0, "lookahead": {"W": 7.0}}),
        (Chat, {"messages": MESSAGES, "max_completion_tokens": 5.0, "top_logprobs": 1.0}),
        (Responses, {"input": "x", "max_output_tokens": 5.0}),
        (Messages, {"messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 5.0}}),
    ],
)
def test_numbers_without_a_fraction_are_integers(kind, fields):
    body = kind.model_validate(fields).model_dump_json(include=fields.keys())
    assert ".0" not in body and kind.model_validate_json(body) == kind.model_validate(fields)
