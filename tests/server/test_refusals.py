"""Tests of the lines that refuse a request: each names the field, the value and the remedy."""

from __future__ import annotations

import json
import re
import resource
import urllib.error
import urllib.request

import pytest
from support.serving import served

from lp_runtime import ConfigError, LookaheadConfig, LookaheadRuntime
from lp_runtime.config.serving import ServeConfig
from lp_runtime.server.http.settings import check_serve, max_connections

CHAT = {"messages": [{"role": "user", "content": "Write a loop."}], "max_tokens": 4}


@pytest.fixture(scope="module")
def runtime(small_model_that_chats):
    lookahead = LookaheadConfig(7, 5, 7, prior="none")
    with LookaheadRuntime(small_model_that_chats(), device="cpu", dtype="float32", lookahead=lookahead) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def url(runtime):
    with served(runtime) as (url, _):
        yield url


def refusal(url: str, path: str, body: object, content_type: str = "application/json") -> str:
    """Return the message of the status 400 that a request gets; `body` is sent as JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url + path, data, {"Content-Type": content_type}))
    assert caught.value.code == 400
    return json.load(caught.value)["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message"])
def test_arguments_of_rendering_are_fields_and_no_variables(url, path, name):
    expected = (
        f"chat_template_kwargs: '{name}' is no variable of the chat template; give the request's field of this name"
    )
    assert refusal(url, path, CHAT | {"chat_template_kwargs": {name: False}}) == expected


@pytest.mark.parametrize("name", ["add_generation_prompt", "tokenize"])
def test_setting_of_a_template_variable_that_is_none_is_refused_at_the_start(runtime, name):
    config = ServeConfig(model=runtime.config.model, chat_template_kwargs={name: False})
    with pytest.raises(ConfigError, match=f"chat_template_kwargs: '{name}' is no variable of the chat template"):
        check_serve(config)


@pytest.mark.parametrize(
    ("max_files", "num"), [(resource.RLIM_INFINITY, 1024), (8192, 1024), (1024, 480), (128, 32), (40, 8)]
)
def test_limit_of_open_files_bounds_connections(monkeypatch, max_files, num):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (max_files, max_files))
    assert max_connections(ServeConfig()) == num


IMAGE = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "https://x.org/x.png"}}]
KINDS = "must be 'text', 'input_text', 'output_text' or 'refusal'"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": IMAGE}]}, f"1.type='image_url': {KINDS}"),
        ("chat/completions", {"messages": [{"role": "user", "content": [5]}]}, "content.0=5: must be an object"),
        (
            "chat/completions",
            CHAT | {"prediction": {"content": IMAGE}},
            f"prediction.content.1.type='image_url': {KINDS}",
        ),
        ("chat/completions", CHAT | {"stop": ["a", 5]}, "stop.1=5: must be a string"),
        ("chat/completions", CHAT | {"tool_choice": {"type": "function"}}, "tool_choice.function: must be given"),
        (
            "chat/completions",
            CHAT | {"tool_choice": "x"},
            "tool_choice='x': must be 'none', 'auto', 'required' or 'any'",
        ),
        ("responses", {"input": [{"role": "user", "content": IMAGE}]}, f"input.0.content.1.type='image_url': {KINDS}"),
        ("completions", {"prompt": ["a", 5]}, "prompt.1=5: must be a string"),
        ("completions", {"prompt": [[1], [2, "a"]]}, "prompt.1.1='a': must be an integer"),
    ],
)
def test_refusal_names_the_part_of_a_list_or_object_that_is_wrong(url, path, body, message):
    assert refusal(url, f"/v1/{path}", body).endswith(message)


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain"])
def test_refusal_names_a_content_type_that_is_not_json(url, content_type):
    """`curl -d` without a header sends the first."""
    message = refusal(url, "/v1/chat/completions", CHAT, content_type)
    assert message == "the header Content-Type must be application/json"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "\xff"}', "body: is not valid UTF-8"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "body: has a number of too many digits"),
        (b'{"metadata": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "body: is nested too deeply"),
        (b'{"prompt": ', "body: is not valid JSON: Expecting value"),
    ],
    ids=["encoding", "digits", "nesting", "syntax"],
)
def test_refusal_says_why_a_body_cannot_be_read(url, body, message):
    assert refusal(url, "/v1/completions", body) == message


@pytest.mark.parametrize(
    ("path", "fields", "what"),
    [
        ("completions", {"prompt": "a\ud800"}, "the prompt"),
        ("completions", {"prompt": "x", "bad_words": ["a\ud800"]}, "a text of bad_words"),
        ("completions", {"prompt": "x", "prediction": {"content": "a\ud800"}}, "the prediction"),
        ("chat/completions", CHAT | {"messages": [{"role": "user", "content": "\ud800"}]}, "the conversation with .*"),
    ],
)
def test_refusal_names_the_text_that_is_not_valid_unicode(url, path, fields, what):
    message = refusal(url, f"/v1/{path}", fields)
    assert re.fullmatch(rf"{what} is not valid Unicode at character \d+: surrogates not allowed", message)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("completions", {"prompt": "x", "max_tokens": -1}, "max_tokens=-1: must be an integer >= 1"),
        ("completions", {"prompt": "x", "max_tokens": 5.5}, "max_tokens=5.5: must be an integer"),
        ("chat/completions", CHAT | {"max_completion_tokens": 0}, "max_completion_tokens=0: must be an integer >= 1"),
        ("responses", {"input": "x", "max_output_tokens": -1}, "max_output_tokens=-1: must be an integer >= 1"),
        ("messages", CHAT | {"max_tokens": 0}, "max_tokens=0: must be an integer >= 1"),
        ("messages", CHAT | {"top_k": -2}, "top_k=-2: must be an integer >= 0"),
        ("responses", {"input": "x", "max_output_tokens": 4, "min_tokens": 5},
         "min_tokens=5: must not be above max_output_tokens=4"),
    ],
)  # fmt: skip
def test_refusal_names_the_field_that_the_client_sent(url, path, fields, message):
    assert refusal(url, f"/v1/{path}", fields) == message


STORED = "is not supported, responses are not stored; send the whole conversation"
LEAVE = "is not supported; leave it out or give"
USE = "is not supported; use structured_outputs="
TEXT = "response_format: a schema has no effect with type=text; give type=json_schema"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/completions", {"json_schema": {}}, f'json_schema: {USE}{{"json": ...}}'),
        ("chat/completions", {"format": "json"}, f'format: {USE}{{"json": ...}} or {{"json_object": true}}'),
        ("completions", {"grammar": "x"}, f'grammar: {USE}{{"grammar": ...}}'),
        ("completions", {"ebnf": "x"}, f'ebnf: {USE}{{"grammar": ...}}'),
        ("messages", {"regex": "x"}, f'regex: {USE}{{"regex": ...}}'),
        ("completions", {"n_predict": 5}, "n_predict: is not supported; use max_tokens"),
        ("completions", {"max_completion_tokens": 5}, "max_completion_tokens: is not supported; use max_tokens"),
        ("responses", {"max_completion_tokens": 5}, "max_completion_tokens: is not supported; use max_output_tokens"),
        (
            "completions",
            {"thinking_token_budget": 1},
            "thinking_token_budget: is not supported; leave it out or give -1",
        ),
        ("completions", {"add_special_tokens": "x"}, "add_special_tokens='x': must be true or false"),
        ("chat/completions", {"add_special_tokens": True}, f"add_special_tokens: {LEAVE} false"),
        ("chat/completions", {"echo": True}, f"echo: {LEAVE} false"),
        ("chat/completions", {"include_reasoning": False}, f"include_reasoning: {LEAVE} true"),
        ("chat/completions", {"system": "Rhyme."}, 'system: is not supported; use a message with role "system"'),
        ("chat/completions", {"stop_sequences": ["x"]}, "stop_sequences: is not supported; use stop"),
        ("completions", {"stop_regex": "x+"}, f'stop_regex: {LEAVE} "" or []'),
        ("completions", {"repetition_detection": {}}, "repetition_detection: is not supported"),
        ("completions", {"lora_path": "x"}, "lora_path: is not supported"),
        ("completions", {"mirostat": 2}, f"mirostat: {LEAVE} 0"),
        ("completions", {"truncation_side": "x"}, "truncation_side='x': must be 'left' or 'right'"),
        (
            "completions",
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties=true: is not supported; give additionalProperties in the"
            " schema",
        ),
        ("completions", {"prompt_logprobs": 1}, "prompt_logprobs: is not supported; use echo=true with logprobs"),
        ("responses", {"conversation": "conv_1"}, f"conversation: {STORED}"),
        ("responses/input_tokens", {"conversation": {"id": "conv_1"}}, f"conversation: {STORED}"),
        ("responses", {"prompt": {"id": "p"}}, "prompt: is not supported; send its text as instructions and input"),
        ("chat/completions", {"response_format": {"type": "text", "schema": {}}}, TEXT),
        ("responses", {"text": {"format": {"type": "text", "json_schema": {"schema": {}}}}}, TEXT),
    ],
)
def test_fields_of_other_servers_are_refused_by_name(url, path, fields, message):
    own = {"completions": {"prompt": "x"}, "chat/completions": CHAT, "messages": CHAT}
    assert refusal(url, f"/v1/{path}", own.get(path, {"input": "x"}) | fields) == message
