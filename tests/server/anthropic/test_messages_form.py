"""Tests of POST /v1/messages: answers with thinking, text and tool calls, and incoming turns."""

from __future__ import annotations

import json
from types import SimpleNamespace

import anthropic
import pytest
from support.serving import answering

from lp_runtime.chat.chat_format import ChatFormat
from lp_runtime.chat.stop_trimmer import StopTrimmer
from lp_runtime.server.anthropic.messages_api import Messages
from lp_runtime.server.anthropic.messages_form import MessagesForm
from lp_runtime.server.openai.choice import Choice

CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "x"]}}</tool_call>'
TEXT = f"<think>so it is</think>\n\nI look.{CALL}{CALL}"
INPUT = {"a": [1, "x"]}
TEXTS = SimpleNamespace(bytes_of=lambda token: chr(token).encode())


def answered(text=TEXT, max_calls=None, reason="stop"):
    """Return (form, choice) of an ended answer whose text is not parsed yet; each character is a token."""
    form = MessagesForm("demo", TEXTS, 1000)
    request = SimpleNamespace(prompt_ids=[1, 2, 3], max_new_tokens=1000, prediction=None)
    job = SimpleNamespace(request=request, generation=None)
    choice = Choice(0, job, StopTrimmer(()), max_calls=max_calls, reason=reason)
    choice.text, choice.tokens = text, [ord(each) for each in text]
    choice.parser = ChatFormat("</think>", "hermes").parser(True, "")
    return form, choice


def test_answer_has_thinking_text_and_tool_use_blocks():
    form, choice = answered()
    answer = form.whole([choice])
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][0] == {"type": "thinking", "thinking": "so it is", "signature": ""}
    assert answer["content"][1] == {"type": "text", "text": "I look."}
    assert [block["input"] for block in answer["content"][2:]] == [INPUT] * 2
    assert answer["content"][2]["id"] != answer["content"][3]["id"] and answer["stop_reason"] == "tool_use"
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": len("so it is")}
    form, choice = answered(max_calls=1)
    assert len(form.whole([choice])["content"]) == 3


@pytest.mark.parametrize(
    ("num_cut", "expected"),
    [(len('"]}}</tool_call>'), {"a": [1]}), (len('1, "x"]}}</tool_call>'), {"a": []})],
)
def test_truncated_tool_call_keeps_complete_arguments(num_cut, expected):
    form, choice = answered(TEXT[: len(TEXT) - num_cut], reason="length")
    answer = form.whole([choice])
    assert answer["content"][3]["input"] == expected and answer["stop_reason"] == "max_tokens"


def test_empty_answer_has_no_content_blocks():
    form, choice = answered("")
    answer = form.whole([choice])
    assert (answer["content"], answer["stop_reason"]) == ([], "end_turn")


def test_client_assembles_stream_events_into_the_answer():
    """The anthropic client assembles the events into the whole answer."""
    form, choice = answered()
    choice.reason = None
    lines = list(form.opening([choice]))
    for place in range(0, len(TEXT), 5):
        lines += form.grown(choice, TEXT[place : place + 5], slice(0))
    choice.reason = "stop"
    lines += form.grown(choice, "", slice(0))
    lines += form.closing([choice])
    events = [line.split("\n", 1) for line in lines]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [f"event: {body['type']}" for body in bodies] == [name for name, _ in events]
    assert [body["type"] for body in bodies[:2]] == ["message_start", "ping"]
    kinds = [body["type"].removeprefix("content_block_") for body in bodies[2:-2]]
    places = [body["index"] for body in bodies[2:-2]]
    assert places == sorted(places) and [kinds.count(kind) for kind in ("start", "stop")] == [4, 4]
    for index in range(4):
        mine = [kind for kind, place in zip(kinds, places, strict=True) if place == index]
        assert mine == ["start", *["delta"] * (len(mine) - 2), "stop"]
    with answering("".join(lines)) as url:
        client = anthropic.Anthropic(base_url=url, api_key="none")
        with client.messages.stream(model="demo", max_tokens=9, messages=[{"role": "user", "content": "x"}]) as stream:
            final = stream.get_final_message()
    thinking, text, *calls = final.content
    assert (thinking.thinking, thinking.signature, text.text) == ("so it is", "", "I look.")
    assert [call.input for call in calls] == [INPUT] * 2 and final.stop_reason == "tool_use"
    assert (final.usage.input_tokens, final.usage.output_tokens) == (3, len(TEXT))


@pytest.mark.parametrize(
    ("more", "variables", "budget"),
    [
        ({}, {}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, {"enable_thinking": True}, 7),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}, None),
    ],
)
def test_thinking_sets_template_variables_and_budget(more, variables, budget):
    body = Messages(messages=[{"role": "user", "content": "x"}], **more)
    assert (body.template_kwargs(), body.reasoning_budget()) == (variables, budget)


def test_unknown_fields_of_tools_and_settings_are_named():
    more = {
        "tools": [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}, "foo": 1}],
        "tool_choice": {"type": "auto", "foo": 1},
        "output_config": {"effort": "low", "foo": 1},
        "thinking": {"type": "adaptive", "foo": 1},
    }
    body = Messages(messages=[{"role": "user", "content": "x"}], **more)
    assert sorted(body.unknown_fields()) == sorted(f"{name}.foo" for name in more)
    assert set(body.tool_use().tools[0]["function"]) == {"name", "parameters"}


def test_tools_of_many_mcp_servers_are_accepted():
    tools = [{"name": f"mcp__server__{number}", "input_schema": {}} for number in range(400)]
    body = Messages(messages=[{"role": "user", "content": "x"}], tools=tools)
    assert len(body.tool_use().tools) == len(tools)


def test_turns_are_converted_to_chat_messages():
    use = {"type": "tool_use", "id": "c", "name": "f", "input": INPUT, "caller": {"type": "direct"}}
    turns = [
        {"role": "system", "content": "Then this."},
        {"role": "user", "content": "x"},
        {"role": "system", "content": [{"type": "text", "text": "Now that."}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": ""}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use, use | {"id": "d"}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is it?"},
                {"type": "tool_result", "tool_use_id": "d", "content": [{"type": "text", "text": "2"}]},
                {"type": "tool_result", "tool_use_id": "c", "is_error": True},
            ],
        },
    ]
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"}
    body = Messages(system=[header, {"type": "text", "text": "First this."}], messages=turns)
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": INPUT}} for each in ("c", "d")]
    assert body.conversation() == [
        {"role": "system", "content": "First this.\n\nThen this."},
        {"role": "user", "content": "x\n\n<system-reminder>\nNow that.\n</system-reminder>"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "so", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "d", "name": "f", "content": "2"},
        {"role": "tool", "tool_call_id": "c", "name": "f", "content": ""},
        {"role": "user", "content": "What is it?"},
    ]
    _, without_call, *_ = Messages(messages=[turns[1], turns[5]]).conversation()  # the client has cut off the beginning
    assert without_call == {"role": "tool", "tool_call_id": "d", "content": "2"}


def test_blocks_that_a_client_writes_by_itself_become_text():
    """Clients send them again with each turn: a refusal would end the conversation."""
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    found = {"type": "search_result", "source": "x", "title": "x", "content": [{"type": "text", "text": "found"}]}
    compaction, searching = {"type": "compaction", "content": "So far."}, {"type": "server_tool_use", "id": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    reference = {"type": "tool_reference", "tool_name": "g"}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [compaction, hidden, searching, use]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [image, reference, found]}],
        },
        {"role": "system", "content": [{"type": "tool_addition", "tool": reference}]},
    ]
    body = Messages(messages=turns)
    assert [each["content"] for each in body.conversation()] == [
        "x",
        "So far.[server_tool_use: not shown]",
        "[image: not shown][tool_reference: g]found",
        "<system-reminder>\n[tool_addition: not shown]\n</system-reminder>",
    ]
    kinds = ("compaction", "server_tool_use", "image", "tool_reference", "search_result", "tool_addition")
    assert body.unknown_fields() == [f"messages[{kind}]" for kind in kinds]
