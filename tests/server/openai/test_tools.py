"""Tests of structured output and tools of the server, with the official openai client."""

from __future__ import annotations

import functools
import json
import threading

import jsonschema
import openai
import pytest
import xgrammar
from support.serving import TOOLS_TEMPLATE, served

from lp_runtime import ConstraintConfig, LookaheadConfig, LookaheadRuntime, ModelConfig, SamplingConfig
from lp_runtime.chat.chat_format import ChatFormat
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import DEMO_MODEL
from lp_runtime.constraints.compiled import compile_constraint, load_compiled
from lp_runtime.model.loading.loader import load_tokenizer

MESSAGES = [{"role": "user", "content": "Write a loop."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "now", "parameters": SCHEMA}}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"type": "object", "properties": {"utc": {"type": "boolean"}}, "required": ["utc"]},
    },
}


STRICT_TEMPLATE = (
    "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ raise_exception('late') }}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if not loop.first and m.role == loop.previtem.role == 'user' %}"
    "{{ raise_exception('twice') }}{% endif %}{% endfor %}" + TOOLS_TEMPLATE
)  # as Qwen3.5's and Gemma's


@pytest.fixture(scope="module")
def runtime(small_model_that_chats):
    folder = small_model_that_chats(STRICT_TEMPLATE)
    lookahead = LookaheadConfig(7, 5, 7, prior="none", draft_tables="request")
    with LookaheadRuntime(folder, device="cpu", dtype="float32", lookahead=lookahead) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def client(runtime):
    with served(runtime) as (url, _):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def chat(client, **more):
    return client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=90, temperature=0, **more)


def test_json_schema_response_format_constrains_the_text(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    choice = chat(client, response_format=form).choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    streamed = "".join(part.choices[0].delta.content or "" for part in chat(client, response_format=form, stream=True))
    assert streamed == choice.message.content
    responded = client.responses.create(
        model="demo", input=MESSAGES, max_output_tokens=90, temperature=0,
        text={"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}},
    )  # fmt: skip
    assert responded.output_text == choice.message.content
    for given in ({"schema": SCHEMA}, {"json_schema": {"schema": SCHEMA}}):  # as llama.cpp takes it
        answer = chat(client, response_format={"type": "json_object", **given}).choices[0].message
        assert answer.content == choice.message.content


def test_structured_outputs_constrain_the_text(client):
    for given, allowed in (({"choice": ["red", "blue"]}, {"red", "blue"}), ({"regex": "(ab|cd)x"}, {"abx", "cdx"})):
        assert chat(client, extra_body={"structured_outputs": given}).choices[0].message.content in allowed
        made = client.completions.create(
            model="demo", prompt="a", max_tokens=9, extra_body={"structured_outputs": given}
        )
        assert made.choices[0].text in allowed
    answer = chat(client, response_format={"type": "json_object"}, extra_body=steered('{"a": 1}')).choices[0]
    assert answer.finish_reason == "stop" and isinstance(json.loads(answer.message.content), dict)


def test_required_and_named_tools_are_called(client):
    message = chat(client, tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "clock"}})
    (call,) = message.choices[0].message.tool_calls
    assert message.choices[0].finish_reason == "tool_calls" and message.choices[0].message.content is None
    assert call.function.name == "clock" and isinstance(json.loads(call.function.arguments)["utc"], bool)
    answer = chat(client, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name in ("get_weather", "clock")
    parts = list(chat(client, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False, stream=True))
    deltas = [each for part in parts for each in part.choices[0].delta.tool_calls or []]
    assert len(deltas) > 1 and [each.id for each in deltas if each.id] and deltas[0].function.name == call.function.name
    assert "".join(each.function.arguments for each in deltas) == call.function.arguments
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_allowed_tools_are_those_that_an_answer_may_or_must_call(client):
    """The model sees the allowed tools only, so an answer is the same as with these alone."""
    named = {"type": "function", "function": {"name": "clock"}}
    asked = {"tools": [WEATHER, CLOCK], "parallel_tool_calls": False}
    for mode in ("required", "auto"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        allowed, alone = (chat(client, **asked | each) for each in ({"tool_choice": choice}, {"tools": [CLOCK]}))
        assert allowed.usage.prompt_tokens == alone.usage.prompt_tokens
        if mode == "auto":
            assert allowed.choices[0].message == alone.choices[0].message
            continue
        (call,) = allowed.choices[0].message.tool_calls
        assert call.function.name == "clock" and allowed.choices[0].finish_reason == "tool_calls"
        tools = [{"type": "mcp", "server_label": "x"}, {"type": "function", "name": "clock"}]
        choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
        done = respond(client, tools=[FLAT_CLOCK, WEATHER["function"] | {"type": "function"}], tool_choice=choice)
        assert done.output[0].name == "clock" and done.tool_choice.mode == mode


def test_tool_choice_any_of_mistral_requires_a_call(client):
    asked = {"tools": [CLOCK], "parallel_tool_calls": False}
    one, other = (chat(client, **asked, tool_choice=each).choices[0].message for each in ("any", "required"))
    assert one.tool_calls[0].function == other.tool_calls[0].function


def test_stop_string_inside_a_call_ends_no_call(client):
    """A client runs the calls of an answer that ends with `tool_calls`; only whole ones may end with it."""
    named = {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}}
    for stop, reason in (("}", "stop"), ("</tool_call>", "tool_calls")):
        answer = chat(client, **named, stop=[stop]).choices[0]
        parts = [part.choices[0] for part in chat(client, **named, stop=[stop], stream=True)]
        assert answer.finish_reason == parts[-1].finish_reason == reason
        arguments = answer.message.tool_calls[0].function.arguments
        assert arguments.startswith('{"utc": ') and arguments.endswith("}") == (reason == "tool_calls")
    done = respond(
        client, tools=[FLAT_CLOCK], tool_choice={"type": "function", "name": "clock"}, extra_body={"stop": "}"}
    )
    assert done.output[-1].status == "incomplete"


def test_unknown_fields_of_tools_and_parts_have_no_effect_and_are_named(client, runtime, caplog):
    """Clients add fields to tools and send back fields of answers, which OpenAI's API accepts."""
    content = [{"type": "text", "text": "Write a loop.", "id": "x"}]
    tool = {"type": "function", "function": CLOCK["function"] | {"returns": {"type": "string"}}, "defer_loading": True}
    choice = {"type": "function", "function": {"name": "clock", "description": "x"}}
    more = {"tools": [tool], "tool_choice": choice, "messages": [{"role": "user", "content": content}]}
    asked = {"model": "demo", "max_tokens": 90, "temperature": 0}
    plain = {"tools": [CLOCK], "tool_choice": choice, "messages": MESSAGES}
    one, other = (client.chat.completions.create(**asked, **each).choices[0].message for each in (more, plain))
    assert one.tool_calls[0].function == other.tool_calls[0].function
    flat = FLAT_CLOCK | {"defer_loading": True}
    assert respond(client, tools=[flat]).output_text == respond(client, tools=[FLAT_CLOCK]).output_text
    names = ("tools.defer_loading", "tools.function.returns", "tool_choice.function.description")
    names += ("messages.content.id",)
    for name in names:
        assert caplog.text.count(f"'{name}'") == 1
    with served(runtime, strict_fields=True) as (url, _):
        strict = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="messages.content.id: is not a known field"):
            strict.chat.completions.create(**asked, **more)
    with pytest.raises(openai.BadRequestError, match="structured_outputs.whitespace_pattern: is not a known field"):
        chat(client, extra_body={"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "x"}})
    unset = {"structured_outputs": {"choice": ["a"], "whitespace_pattern": None}}
    assert chat(client, extra_body=unset).choices[0].message.content == "a"


@functools.cache
def demo_tokenizer():
    return load_tokenizer(ModelConfig(str(DEMO_MODEL)))


def steered(*texts):
    """Return request fields that make the tokens of some texts far likelier than others."""
    return {"logit_bias": {str(token): 60 for text in texts for token in demo_tokenizer()(text).input_ids}}


def test_tools_combine_with_response_format(client):
    """An answer is a call or follows the format, as the model prefers, unless a call is required."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    kinds = set()
    for bias in (steered("<tool_call>"), steered('{"name": "')):
        asked = {"tools": [CLOCK], "response_format": form, "parallel_tool_calls": False, **bias}
        answer = chat(client, **asked).choices[0]
        parts = [part.choices[0] for part in chat(client, **asked, stream=True)]
        calls = answer.message.tool_calls or []
        kinds.add(bool(calls))
        streamed = "".join(part.delta.content or "" for part in parts)
        if calls:
            assert answer.finish_reason == "tool_calls" and answer.message.content is None and not streamed
            assert isinstance(json.loads(calls[0].function.arguments)["utc"], bool)
        else:
            assert streamed == answer.message.content and answer.finish_reason == "stop"
            jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    assert kinds == {True, False}
    answer = chat(client, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False, response_format=form)
    assert answer.choices[0].message.tool_calls[0].function.name == "clock"
    answer = chat(client, tools=[CLOCK], tool_choice="none", response_format=form).choices[0]
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)


def respond(client, **more):
    return client.responses.create(
        **{"model": "demo", "input": MESSAGES, "max_output_tokens": 90, "temperature": 0} | more
    )


FLAT_CLOCK = {"type": "function", "strict": True, **CLOCK["function"]}


def test_responses_api_returns_and_streams_a_tool_call(client):
    asked = {"tools": [FLAT_CLOCK], "tool_choice": {"type": "function", "name": "clock"}}
    done = respond(client, **asked)
    (call,) = done.output
    assert (done.status, call.type, call.name, call.status) == ("completed", "function_call", "clock", "completed")
    assert isinstance(json.loads(call.arguments)["utc"], bool) and done.output_text == ""
    assert done.tools[0].name == "clock" and done.tool_choice.name == "clock" and done.parallel_tool_calls
    count = client.responses.input_tokens.count(model="demo", input=MESSAGES, **asked)
    assert (count.object, count.input_tokens) == ("response.input_tokens", done.usage.input_tokens)
    events = list(respond(client, **asked, stream=True))
    kinds = [each.type.removeprefix("response.") for each in events]
    deltas = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", *["function_call_arguments.delta"] * len(deltas)),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert len(deltas) > 1 and "".join(deltas) == call.arguments == events[-3].arguments
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert events[2].item.call_id == events[-2].item.call_id == events[-1].response.output[0].call_id
    with client.responses.stream(model="demo", input=MESSAGES, max_output_tokens=90, temperature=0, **asked) as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments
    limits = range(done.usage.output_tokens - 3, 9, -4)
    cuts = [respond(client, **asked, max_output_tokens=limit) for limit in limits]
    assert {each.status for each in cuts} == {"incomplete"} and cuts[0].output[0].status == "completed"
    cut = next(each.output[0] for each in cuts if each.output[0].status == "incomplete")
    assert cut.type == "function_call" and call.arguments.startswith(cut.arguments) and cut.arguments != call.arguments
    # The next turn: the call as received, and its output.
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    items = [*MESSAGES, call.model_dump(exclude_unset=True), output]
    in_chat = [
        {"role": "assistant", "tool_calls": [
            {"id": call.call_id, "type": "function", "function": {"name": "clock", "arguments": call.arguments}}
        ]},
        {"role": "tool", "tool_call_id": call.call_id, "name": "clock", "content": "12:00"},
    ]  # fmt: skip
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES + in_chat, max_tokens=9, temperature=0, tools=[CLOCK]
    )
    responded = respond(client, input=items, tools=[FLAT_CLOCK], max_output_tokens=9)
    assert responded.output_text == answer.choices[0].message.content
    assert responded.usage.input_tokens == answer.usage.prompt_tokens


def test_conversation_that_a_strict_template_refuses_is_put_in_order(client):
    """Codex sends instructions, a message of the developer and two of the user."""
    turns = [("developer", "b"), ("user", "c"), ("user", "d"), ("assistant", "e"), ("system", "f"), ("user", "g")]
    items = [{"role": role, "content": text} for role, text in turns]
    done = respond(client, instructions="a", input=items, max_output_tokens=9)
    reminder = "<system-reminder>\nf\n</system-reminder>\n\ng"
    turns = [("system", "a\n\nb"), ("user", "c\n\nd"), ("assistant", "e"), ("user", reminder)]
    messages = [{"role": role, "content": text} for role, text in turns]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=9, temperature=0)
    assert done.output_text == answer.choices[0].message.content
    assert done.usage.input_tokens == answer.usage.prompt_tokens


def test_functions_of_a_namespace_are_called_by_namespace_and_name(client):
    """Codex sends the functions of an MCP server so, and finds the function of a call so."""
    tool = {"type": "namespace", "name": "mcp__x", "description": "x", "tools": [FLAT_CLOCK]}
    named = {"type": "function", "name": "clock", "namespace": "mcp__x"}
    (call,) = respond(client, tools=[tool], tool_choice=named).output
    assert (call.name, call.namespace) == ("clock", "mcp__x")
    events = list(respond(client, tools=[tool], tool_choice=named, stream=True))
    items = [each.item for each in events if each.type in ("response.output_item.added", "response.output_item.done")]
    assert [(each.name, each.namespace) for each in items] == [("clock", "mcp__x")] * 2
    alone = respond(client, tools=[FLAT_CLOCK], tool_choice={"type": "function", "name": "clock"}).output[0]
    assert call.arguments == alone.arguments == items[-1].arguments and alone.namespace is None
    items = [*MESSAGES, call.model_dump(exclude_unset=True)]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}]
    one, other = (respond(client, input=items, tools=tools, max_output_tokens=9) for tools in ([tool], [FLAT_CLOCK]))
    assert (one.output_text, one.usage.input_tokens) == (other.output_text, other.usage.input_tokens)


def test_responses_api_returns_parallel_tool_calls(client):
    flat = [{"type": "function", **each["function"]} for each in (WEATHER, CLOCK)]
    bias = steered("\n<tool_call>")
    done = respond(client, tools=flat, tool_choice="required", extra_body=bias, max_output_tokens=120)
    calls = [item for item in done.output if item.type == "function_call"]
    assert len(calls) > 1 and len({each.call_id for each in calls}) == len(calls)
    one = respond(client, tools=flat, tool_choice="required", extra_body=bias, parallel_tool_calls=False)
    (call,) = one.output
    assert (call.name, call.arguments) == (calls[0].name, calls[0].arguments)
    form = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
    text = respond(client, tools=flat, text=form, extra_body=steered('{"name": "')).output_text
    jsonschema.validate(json.loads(text), SCHEMA)


def test_tool_results_in_history_are_accepted(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"utc": true}'}}
    more = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    answer = client.chat.completions.create(model="demo", messages=MESSAGES + more, max_tokens=5, tools=[CLOCK])
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_calls_in_history_are_read_outside_of_the_event_loop(client, monkeypatch):
    """Clients send arguments of up to `max_body_bytes`; other requests go on meanwhile."""
    threads, history = [], ChatFormat.history

    def recorded(self, messages):
        threads.append(threading.current_thread().name)
        return history(self, messages)

    monkeypatch.setattr(ChatFormat, "history", recorded)
    assert chat(client).choices
    assert threads and all(name.startswith("tokenizer") for name in threads)


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"tools": [{"type": "function", "function": {"description": "x"}}]}, "name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name='a b': must match ^["),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "nope"),
        ({"tools": [CLOCK] * 1025}, "tools: must have at most 1024 entries"),
        ({"tool_choice": "required"}, "there are no tools"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "all", "tools": []}}},
            "tool_choice.allowed_tools.mode='all': must be 'auto' or 'required'",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type='custom': must be 'function'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objct"}}}},
            "objct",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "(("}}}, "constraint.regex"),
        ({"extra_body": {"structured_outputs": {"grammar": 'root ::= "a" root'}}}, "never ends"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, "give one"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}, "ignore_eos": True}}, "eos"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}, "use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"guided_regex": "a"}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"json": {"allOf": [{}, {}]}}}}, "#/allOf"),
    ],
)
def test_bad_tools_and_constraints_are_refused_in_one_line(client, more, place):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **more)
    message = refused.value.body["message"]
    assert place in message and "\n" not in message


COMMAND, COMMAND_TEXT = ChatFormat("<|END_THINKING|>"), "<|START_RESPONSE|>ab<|END_RESPONSE|>"


def test_constrained_sampling_does_not_depend_on_lookahead(runtime):
    options = {"constraint": ConstraintConfig(json_schema=SCHEMA), "sampling": SamplingConfig(temperature=1.0, seed=3)}
    texts = [
        runtime.generate("a", 40, lookahead=each, **options).token_ids
        for each in (None, PLAIN, LookaheadConfig(drafter="recycling"))
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("form", "end", "text", "allowed"),
    [
        (ChatFormat("</think>"), "assistant:", "<think>so</think>\n\nab", True),
        (ChatFormat("</think>"), "assistant:", "ab", True),
        (ChatFormat("</think>"), "assistant:<think>\n", "so</think>ab", True),
        (ChatFormat("</think>"), "assistant:<think>\n", "so</think>cd", False),
        (ChatFormat(""), "assistant:", "<think>so</think>ab", False),
        (
            ChatFormat("", "harmony"),
            "assistant",
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>ab",
            True,
        ),
        (ChatFormat("", "harmony"), "assistant", "<|channel|>final<|message|>cd", False),
        (COMMAND, "", f"<|START_THINKING|>so<|END_THINKING|>{COMMAND_TEXT}", True),
        (COMMAND, "", COMMAND_TEXT, True),
        (COMMAND, "<|START_RESPONSE|>", "ab", True),
        (COMMAND, "", "<|START_RESPONSE|>cd", False),
    ],
)
def test_constraint_applies_after_reasoning(form, end, text, allowed):
    config = form.after_reasoning(ConstraintConfig(choice=["ab"]), end)
    texts = [chr(each) for each in range(32, 127)] + ["\n", "</s>"]
    info = xgrammar.TokenizerInfo(texts, stop_token_ids=[len(texts) - 1])
    matcher = xgrammar.GrammarMatcher(load_compiled(compile_constraint(config, info), info))
    assert (matcher.accept_string(text) and matcher.is_completed()) == allowed
