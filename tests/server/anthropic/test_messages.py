"""Tests of POST /v1/messages and /v1/messages/count_tokens with the official anthropic client."""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import anthropic
import jsonschema
import openai
import pytest
from support.processes import PATIENCE
from support.serving import TOOLS_TEMPLATE, served

from lp_runtime import LookaheadRuntime
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig

TEMPLATE = TOOLS_TEMPLATE + "{% if thinking is defined and not thinking %}</think>{% endif %}"
MESSAGES = [{"role": "user", "content": "Write a loop."}]
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"utc": {"type": "boolean"}, "zone": {"enum": ["here", "there"]}},
    "required": ["utc", "zone"],
    "additionalProperties": False,
}
CLOCK = {"name": "clock", "description": "the time", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
ALARM = {"name": "alarm", "type": "custom", "input_schema": {"type": "object"}}
LONG = 3000  # tokens; an answer of this length does not end during a test


@pytest.fixture(scope="module")
def runtime(small_model_that_chats):
    config = RuntimeConfig(
        ModelConfig(path=str(small_model_that_chats(TEMPLATE))),
        LookaheadConfig(7, 5, 7, prior="none", draft_tables="request"),
        device="cpu",
        dtype="float32",
        prefix_cache_bytes=None,
    )
    with LookaheadRuntime.from_config(config) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def url(runtime):
    with served(runtime) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def other(url):
    """Return the openai client, for comparison."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def asked(**more) -> dict:
    return {"model": "demo", "max_tokens": 24, "messages": MESSAGES, "extra_body": {"temperature": 0}} | more


def num_input(usage) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens


def test_models_are_those_of_the_openai_api(client, other):
    (model,) = client.models.list()
    assert model == client.models.retrieve("demo")
    expected = other.models.retrieve("demo")
    assert (model.type, model.id, model.display_name) == ("model", expected.id, "demo")
    assert model.created_at.timestamp() == expected.created
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_messages_match_chat_completions(client, other):
    blocks = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": {"type": "x"}}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Write "}, {"type": "text", "text": "a loop."}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "ok"}]},
        {"role": "user", "content": "Another."},
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "Another."},
    ]
    expected = other.chat.completions.create(model="demo", messages=chat, max_tokens=24, temperature=0)
    done = client.messages.create(**asked(system=blocks, messages=turns))
    assert (done.type, done.role, done.model) == ("message", "assistant", "demo")
    (block,) = done.content
    assert (block.type, block.text) == ("text", expected.choices[0].message.content)
    assert (done.stop_reason, done.stop_sequence, done.usage.output_tokens) == ("max_tokens", None, 24)
    assert num_input(done.usage) == expected.usage.prompt_tokens
    count = client.messages.count_tokens(model="demo", system=blocks, messages=turns)
    assert count.input_tokens == expected.usage.prompt_tokens


def test_thinking_is_turned_off_by_the_switch_that_the_template_has(client, other):
    off = {"thinking": {"type": "disabled"}}
    plain, without = (
        client.messages.count_tokens(model="demo", messages=MESSAGES, **more).input_tokens for more in ({}, off)
    )
    assert without > plain
    for fields in (off, {"thinking": False}, {"enable_thinking": False}, {"chat_template_kwargs": {"thinking": False}}):
        chat = other.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1, extra_body=fields)
        assert chat.usage.prompt_tokens == without
    on = {"thinking": {"type": "enabled"}, "enable_thinking": False}
    chat = other.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1, extra_body=on)
    assert chat.usage.prompt_tokens == without, "the field of the template's variable has precedence"


def test_trailing_assistant_message_is_continued(client, other):
    turns = [*MESSAGES, {"role": "assistant", "content": "for i in"}]
    expected = other.chat.completions.create(
        model="demo", messages=turns, max_tokens=24, temperature=0, extra_body={"continue_final_message": True}
    )
    done = client.messages.create(**asked(messages=turns))
    assert done.content[0].text == expected.choices[0].message.content
    count = client.messages.count_tokens(model="demo", messages=turns)
    assert count.input_tokens == num_input(done.usage) == expected.usage.prompt_tokens


def test_calls_of_a_trailing_assistant_message_are_shown_to_the_model(client, other):
    call = {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {"utc": True}}
    turns = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]}]
    called = {"id": "toolu_1", "type": "function", "function": {"name": "clock", "arguments": '{"utc": true}'}}
    chat = [*MESSAGES, {"role": "assistant", "content": "I look.", "tool_calls": [called]}]
    expected = other.chat.completions.create(model="demo", messages=chat, max_tokens=2, temperature=0)
    count = client.messages.count_tokens(model="demo", messages=turns)
    assert count.input_tokens == expected.usage.prompt_tokens
    done = client.messages.create(**asked(messages=turns, max_tokens=2))
    assert done.content[0].text == expected.choices[0].message.content


def test_stream_events_add_up_to_the_whole_answer(client):
    whole = client.messages.create(**asked())
    events = list(client.messages.create(**asked(stream=True)))
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert [event.type for event in events] == [
        *("message_start", "content_block_start", *["content_block_delta"] * len(deltas)),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert len(deltas) > 3 and "".join(deltas) == whole.content[0].text
    assert events[0].message.content == [] and events[0].message.usage.output_tokens == 0
    with client.messages.stream(**asked()) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text and final.stop_reason == whole.stop_reason
    assert (num_input(final.usage), final.usage.output_tokens) == (num_input(whole.usage), 24)


def test_stop_sequence_is_reported_and_not_shown(client):
    text = client.messages.create(**asked()).content[0].text
    stop = text[10:14]
    asks = asked(stop_sequences=["never there", stop])
    with client.messages.stream(**asks) as stream:
        streamed = stream.get_final_message()
    for done in (client.messages.create(**asks), streamed):
        assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", stop)
        assert done.content[0].text == text[: text.index(stop)]


def test_tool_choice_forces_a_call_and_its_result_is_accepted(client, other):
    asks = asked(tools=[CLOCK, ALARM], tool_choice={"type": "tool", "name": "clock"}, max_tokens=90)
    done = client.messages.create(**asks)
    (call,) = done.content
    assert (done.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "clock")
    jsonschema.validate(call.input, SCHEMA)
    events = list(client.messages.create(**asks, stream=True))
    parts = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert len(parts) > 1 and json.loads("".join(parts)) == call.input
    assert events[1].content_block.name == "clock" and events[1].content_block.input == {}
    assert events[-2].delta.stop_reason == "tool_use"
    one = asked(tools=[CLOCK, ALARM], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=90)
    (call,) = client.messages.create(**one).content
    assert call.type == "tool_use"
    # The next turn, as messages of a chat.
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12:00"}]}
    turns = [*MESSAGES, {"role": "assistant", "content": [call.model_dump()]}, {"role": "user", "content": [result]}]
    function = {"name": call.name, "arguments": json.dumps(call.input)}
    chat = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": "12:00"},
    ]
    tool = {"name": "clock", "description": "the time", "parameters": SCHEMA}
    expected = other.chat.completions.create(
        model="demo", messages=chat, tools=[{"type": "function", "function": tool}], max_tokens=9, temperature=0
    )
    answer = client.messages.create(**asked(messages=turns, tools=[CLOCK], max_tokens=9))
    assert answer.content[0].text == expected.choices[0].message.content
    assert num_input(answer.usage) == expected.usage.prompt_tokens
    count = client.messages.count_tokens(model="demo", messages=turns, tools=[CLOCK])
    assert count.input_tokens == expected.usage.prompt_tokens


def test_output_config_format_constrains_the_text(client):
    form = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    done = client.messages.create(**asked(output_config=form, max_tokens=90))
    jsonschema.validate(json.loads(done.content[0].text), SCHEMA)
    assert done.stop_reason == "end_turn"


@pytest.mark.slow
def test_answer_that_fills_the_context_reports_its_stop_reason(client, runtime):
    """max_tokens may exceed the context, as clients ask for the most that any of their models can write."""
    context = runtime.info.context_length
    question = [{"role": "user", "content": "x " * (context - 40)}]
    num_prompt = client.messages.count_tokens(model="demo", messages=question).input_tokens
    body = {"temperature": 0, "ignore_eos": True}
    done = client.messages.create(**asked(messages=question, max_tokens=20_000, extra_body=body))
    assert done.stop_reason == "model_context_window_exceeded"
    assert done.usage.output_tokens == context - num_prompt
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**asked(messages=[{"role": "user", "content": "x " * context}]))


def test_server_max_new_tokens_limits_answers(runtime):
    with served(runtime, max_new_tokens=5) as (url, _):
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        done = client.messages.create(**asked(max_tokens=20_000, extra_body={"ignore_eos": True}))
        assert (done.stop_reason, done.usage.output_tokens) == ("max_tokens", 5)


def test_usage_counts_cached_tokens_separately(client):
    question = [{"role": "user", "content": "Write code that is short and correct. " * 12}]
    usages = [client.messages.create(**asked(messages=question)).usage for _ in range(2)]
    assert usages[0].cache_read_input_tokens < usages[1].cache_read_input_tokens
    assert num_input(usages[0]) == num_input(usages[1]) and usages[1].input_tokens > 0


WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0: a block of type 'image' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "a block of type 'document' is not"),
        ({"messages": [{"role": "user", "content": []}]}, "messages: have no text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text: must be given"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages.0.role='bot': must be 'user', 'assistant' or"),
        ({"thinking": {"type": "always"}}, "thinking.type='always': must be 'enabled', 'adaptive',"),
        ({"system": [IMAGE]}, "system: a block of type 'image' is not supported in system; must be text"),
        ({"tools": [{"name": "clock"}]}, "tool 'clock': must have an input_schema"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "tool_choice=any: there are no tools"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "nope"}}, "'nope' is not the name of any"),
        ({"tool_choice": {"type": "any"}}, "tool_choice=any: there are no tools"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences='': must be strings of at least one character"),
        ({"system": 5}, "system=5: must be a string or a list"),
        ({"extra_body": {"stop": "x"}}, "stop: is not a field of messages; give stop_sequences"),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers: is not supported"),
        ({"extra_body": {"n": 2}}, "n=2: must be 1"),
    ],
)
def test_bad_requests_are_refused_in_one_line(client, more, message):
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**asked(**more))
    error = refused.value.body["error"]
    assert error["type"] == "invalid_request_error" and message in error["message"] and "\n" not in error["message"]


def test_hosted_anthropic_features_are_ignored(client, caplog):
    more = {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}, "container": "x"}
    asked_more = asked(tools=[CLOCK, WEB_SEARCH], extra_body=more)
    assert client.messages.create(**asked_more).content == client.messages.create(**asked(tools=[CLOCK])).content
    assert "'tools[web_search_20250305]'" in caplog.text and "context_management" not in caplog.text


def test_stream_sends_pings_while_there_is_no_text(runtime):
    with served(runtime, ping_seconds=1e-4) as (url, _):
        body = {"messages": [{"role": "user", "content": "Write a loop. " * 200}], "max_tokens": 24, "stream": True}
        request = urllib.request.Request(f"{url}/v1/messages", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:  # the anthropic package does not expose pings
            events = [line.split() for line in answer.read().decode().splitlines()]
        kinds = [words[1] for words in events if words[:1] == ["event:"]]
        assert kinds[0] == "message_start" and kinds[1:4] == ["ping"] * 3 and kinds[-1] == "message_stop"
        assert "content_block_delta" in kinds


def test_unknown_model_gets_404(client):
    for ask in (client.messages.create, client.messages.count_tokens):
        options = asked(model="claude") if ask == client.messages.create else {"model": "claude", "messages": MESSAGES}
        with pytest.raises(anthropic.NotFoundError) as refused:
            ask(**options)
        assert refused.value.body == {
            "type": "error",
            "error": {"type": "not_found_error", "message": "model 'claude': must be demo"},
        }


def test_api_key_is_checked_and_unknown_fields_are_named(runtime, caplog):
    """A key in x-api-key is accepted; unknown fields are named once, or refused with strict_fields."""
    body = {"messages": MESSAGES, "max_tokens": 2, "no_such_field": {}, "thinking": {"type": "adaptive"}}
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    headers["X-Request-Id"] = "%d-%s"  # would be two arguments of a format
    with served(runtime, api_keys={"a": "secret"}) as (url, _):

        def ask(key: str) -> urllib.request.Request:
            data = json.dumps(body).encode()
            return urllib.request.Request(f"{url}/v1/messages?beta=true", data, headers | {"x-api-key": key})

        with caplog.at_level(logging.WARNING, "lp_runtime"):
            for _ in range(2):
                with urllib.request.urlopen(ask("secret")) as answer:
                    assert answer.headers["request-id"] == answer.headers["x-request-id"]
                    assert json.load(answer)["usage"]["output_tokens"] == 2
        assert sum("no_such_field" in record.message for record in caplog.records) == 1
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(ask("guess"))
        assert json.load(refused.value)["error"]["type"] == "authentication_error"
    with served(runtime, strict_fields=True) as (url, _):
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with pytest.raises(anthropic.BadRequestError, match="no_such_field: is not a known field"):
            client.messages.create(**asked(extra_body={"no_such_field": {}}))


def test_shutdown_during_a_stream_sends_an_error(runtime):
    started = threading.Event()

    def stream(url: str) -> None:
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)
        slow = {"ignore_eos": True, "lookahead": {"W": 0, "N": 2, "G": 0}}
        for event in client.messages.create(**asked(max_tokens=LONG, stream=True, extra_body=slow)):
            if event.type == "content_block_delta":
                started.set()

    with ThreadPoolExecutor(1) as pool:
        with served(runtime, shutdown_timeout=0.1) as (url, _):
            streamed = pool.submit(stream, url)
            assert started.wait(PATIENCE)
        with pytest.raises(anthropic.APIStatusError) as failed:
            streamed.result(PATIENCE)
    assert failed.value.body == {
        "type": "error",
        "error": {"type": "api_error", "message": "the server is shutting down"},
    }
