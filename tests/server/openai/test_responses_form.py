"""Tests of POST /v1/responses: answers with reasoning, text and tool calls, and incoming items."""

from __future__ import annotations

import json
from types import SimpleNamespace

import openai
import pytest
from pydantic import ValidationError
from support.serving import answering

from lp_runtime.chat.chat_format import ChatFormat
from lp_runtime.chat.stop_trimmer import StopTrimmer
from lp_runtime.server.openai.choice import Choice
from lp_runtime.server.openai.protocol import Chat
from lp_runtime.server.openai.responses_api import Responses
from lp_runtime.server.openai.responses_form import ResponsesForm

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXT = f"<think>so it is</think>\n\nI look.{CALL}{CALL}"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TEXTS = SimpleNamespace(bytes_of=lambda token: chr(token).encode())


def answered(max_calls=None, reason="stop"):
    """Return (form, choice) of an ended answer whose text is still to be set; each character is a token."""
    form = ResponsesForm("demo", TEXTS, Responses(input="x", tools=[TOOL]))
    job = SimpleNamespace(request=SimpleNamespace(prompt_ids=[1, 2, 3], prediction=None), generation=None)
    choice = Choice(0, job, StopTrimmer(()), max_calls=max_calls, tokens=[ord(each) for each in TEXT], reason=reason)
    choice.parser = ChatFormat("</think>", "hermes").parser(True, "")
    return form, choice


def test_answer_has_reasoning_message_and_call_items():
    form, choice = answered()
    choice.text = TEXT
    answer = form.whole([choice])
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "so it is"}]
    assert answer["output"][1]["content"][0]["text"] == "I look."
    assert [item["arguments"] for item in answer["output"][2:]] == ['{"a": 1}'] * 2
    assert all(item["status"] == "completed" for item in answer["output"])
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len("so it is")}
    form, choice = answered(max_calls=1)
    choice.text = TEXT
    assert len(form.whole([choice])["output"]) == 3


@pytest.mark.parametrize(
    ("num_cut", "last"),
    [
        (0, ("function_call", "completed")),
        (len("</tool_call>"), ("function_call", "completed")),
        (len("}}</tool_call>"), ("function_call", "incomplete")),
        (len(CALL), ("function_call", "completed")),
        (2 * len(CALL), ("message", "incomplete")),
        (len("I look.") + 2 * len(CALL), ("reasoning", "incomplete")),
    ],
)
def test_item_at_the_limit_is_incomplete_unless_it_is_a_whole_call(num_cut, last):
    """OpenAI's API does the same: the answer is incomplete, its whole calls are not."""
    form, choice = answered(reason="length")
    choice.text = TEXT[: len(TEXT) - num_cut]
    answer = form.whole([choice])
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    *others, item = answer["output"]
    assert (item["type"], item["status"]) == last and all(other["status"] == "completed" for other in others)
    form, choice = answered(reason="length")
    lines = [*form.grown(choice, TEXT[: len(TEXT) - num_cut], slice(0)), *form.closing([choice])]
    *_, done, ended = [json.loads(line.split("data: ", 1)[1]) for line in lines]
    assert (done["item"]["type"], done["item"]["status"]) == last and ended["type"] == "response.incomplete"
    assert ended["response"]["output"][-1] == done["item"]


def test_functions_of_equal_names_are_told_apart():
    """The model sees a different name of each, and its calls come back with their namespace and name."""
    tool = {"type": "function", "name": "f"}
    spaces = ["x", "x_", "y"]
    tools = [{"type": "namespace", "name": name, "tools": [tool]} for name in spaces]
    tools += [{"type": "function", "name": name} for name in ("x__f", "f")]
    body = Responses(input="x", tools=tools)
    names = [each["function"]["name"] for each in body.tool_use().tools]
    assert names == ["x__f_2", "x__f_3", "y__f", "x__f", "f"]
    form, choice = ResponsesForm("demo", TEXTS, body), answered()[1]
    choice.text = "".join(CALL.replace('"f"', f'"{name}"') for name in names)
    choice.parser = ChatFormat("", "hermes").parser(True, "")
    calls = [(item.get("namespace"), item["name"]) for item in form.whole([choice])["output"]]
    assert calls == [*((space, "f") for space in spaces), (None, "x__f"), (None, "f")]


def test_client_assembles_stream_events_into_the_answer():
    """The openai client assembles the events into the whole answer."""
    form, choice = answered()
    choice.reason = None
    lines = list(form.opening([choice]))
    for place in range(0, len(TEXT), 5):
        lines += form.grown(choice, TEXT[place : place + 5], slice(0))
    choice.reason = "stop"
    lines += form.grown(choice, "", slice(0))
    lines += form.closing([choice])
    bodies = [json.loads(line.split("data: ", 1)[1]) for line in lines]
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    with answering("".join(lines)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        with client.responses.stream(model="demo", input="x") as stream:
            seen = [event.type for event in stream]
            final = stream.get_final_response()
    assert seen[-1] == "response.completed" and seen.count("response.output_item.done") == 4
    assert final.output_text == "I look." and final.output[3].arguments == '{"a": 1}'
    done = bodies[-1]["response"]["output"]
    added = [body["item"] for body in bodies if body["type"] == "response.output_item.done"]
    assert done == added
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        deltas = "".join(body["delta"] for body in bodies if body["type"] == f"response.{kind}.delta")
        texts = [body.get("text", body.get("arguments")) for body in bodies if body["type"] == f"response.{kind}.done"]
        assert deltas == "".join(texts) != ""


def test_empty_answer_has_an_empty_message():
    form, choice = answered()
    choice.tokens = []
    (item,) = form.whole([choice])["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == ""


def test_input_items_are_converted_to_chat_messages():
    call = {
        "type": "function_call",
        "call_id": "c",
        "name": "f",
        "arguments": '{"a": 1}',
        "id": "fc",
        "status": "completed",
    }
    reasoning = {"type": "reasoning", "id": "rs", "summary": []}
    text = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
    items = [
        {"role": "user", "content": "x"},
        reasoning | {"content": [{"type": "reasoning_text", "text": "so"}]},
        text | {"content": [{"type": "output_text", "text": "I look."}]},
        call,
        call | {"call_id": "d"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        reasoning,
        {"type": "function_call_output", "name": "goal", "output": "set"},
        {"role": "user", "content": "y"},
    ]
    calls = [
        {"id": each, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}} for each in ("c", "d")
    ]
    user, answer, *outputs, own, last = Responses(input=items).conversation()
    assert user == {"role": "user", "content": "x"} and last["content"] == "y"
    assert own == {"role": "user", "content": "goal: set"}  # not the result of a call
    assert answer == {"role": "assistant", "content": "I look.", "reasoning_content": "so", "tool_calls": calls}
    assert [(each["tool_call_id"], each["content"], each["name"]) for each in outputs[:2]] == [
        ("d", "2", "f"),
        ("c", "1", "f"),
    ]
    *_, without_call, _, _, _ = Responses(input=items[:3] + items[5:]).conversation()  # the client has cut it off
    assert without_call == {"role": "tool", "tool_call_id": "d", "content": "2"}


def test_functions_of_one_name_are_shown_with_their_namespaces():
    spaces = [{"type": "namespace", "name": name, "tools": [TOOL]} for name in ("mcp__x__", "mcp__y")]
    call = {"type": "function_call", "call_id": "c", "name": "f", "namespace": "mcp__y", "arguments": "{}"}
    choice = {"type": "function", "name": "f", "namespace": "mcp__x__"}
    body = Responses(
        input=[call], tools=[TOOL, *spaces, {"type": "namespace", "name": "z", "tools": [TOOL | {"name": "g"}]}]
    )
    shown = [tool["function"]["name"] for tool in body.tool_use().tools]
    assert shown == ["f", "mcp__x__f", "mcp__y__f", "g"]
    assert body.conversation()[0]["tool_calls"][0]["function"]["name"] == "mcp__y__f"
    named = Responses(input="x", tools=spaces, tool_choice=choice).tool_use()
    assert [tool["function"]["name"] for tool in named.tools] == ["mcp__x__f"]
    form, choice = answered()
    form = ResponsesForm("demo", TEXTS, body)
    choice.text = CALL.replace('"f"', '"mcp__x__f"') + CALL
    first, second = form.whole([choice])["output"]
    assert (first["namespace"], first["name"], second["name"]) == ("mcp__x__", "f", "f") and "namespace" not in second


def test_notes_stand_for_what_a_client_sends_back_and_the_model_cannot_see():
    image = {"type": "input_image", "image_url": "data:image/png;base64,"}
    items = [
        {"role": "user", "content": "x"},
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [image, {"type": "input_text", "text": "ok"}]},
    ]
    body = Responses(input=items)
    _, answer, result = body.conversation()
    assert answer["content"] == "[web_search_call: not shown]\n\nI will not."
    assert answer["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": '{"input": "*** Begin"}'}
    assert (result["name"], result["content"]) == ("apply_patch", "[input_image: not shown]ok")
    assert body.unknown_fields() == ["input.output.input_image", "input[web_search_call]"]


def test_notes_stand_for_images_in_results_of_a_chat():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    turns = [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None, "refusal": "never"},
        {"role": "tool", "tool_call_id": "c", "content": [image]},
    ]
    body = Chat(messages=turns)
    assert [each["content"] for each in body.conversation()] == ["no", "never", "[image_url: not shown]"]
    assert body.unknown_fields() == ["messages.content.image_url"]
    with pytest.raises(ValidationError, match="image_url"):
        Chat(messages=[{"role": "user", "content": [image]}])
