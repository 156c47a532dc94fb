"""Tests of chat templates with an ambiguous tool-call format, and of those with a response template."""

from __future__ import annotations

import pytest
from support.tool_answers import parts_of, tools_of
from support.tool_formats import SAMPLES, template

from lp_runtime.chat.chat_format import ChatFormat, ToolUse
from lp_runtime.errors import ConfigError, RequestError
from lp_runtime.model.chat_template import ChatTemplate

CALLS = [("f", {"a": [1, "x"]})]
BARE = '{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", "arguments": {{ ARGS }}}{% endfor %}'
TAKES_TOOLS = "{{ tools }}"


@pytest.mark.parametrize(
    ("source", "name", "logged"),
    [
        (TAKES_TOOLS + "<tool_call>", "hermes", "tool_format=hermes"),
        (TAKES_TOOLS + "<tool_call><function=x><parameter=y>", "qwen3_coder", "tool_format=qwen3_coder"),
        (TAKES_TOOLS + "<tool_call><arg_key><arg_value>", "glm", "tool_format=glm"),
        (TAKES_TOOLS + "<|python_tag|>", "llama3", "tool_format=llama3"),
        (TAKES_TOOLS + "[TOOL_CALLS]", "mistral", "tool_format=mistral"),
        (TAKES_TOOLS + "# user", None, "set tool_format"),
        ("# user", None, ""),
        # Calls with a known marker, but in another format.
        (
            template("A:", "<tool_call>{{ (m.tool_calls or [{}])[0].function.name }} {}", "").text,
            None,
            "set tool_format",
        ),
        (
            template(
                "A:", "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}", ""
            ).text,
            "hermes",
            "",
        ),
        # Calls without the prefix of their names.
        (
            template(
                "A:",
                '{% for c in m.tool_calls or [] %}<|tool_call>{{ c.function.name }}{city:<|"|>Rome<|"|>,days:7}'
                "<tool_call|>{% endfor %}",
                "",
            ).text,
            None,
            "set tool_format",
        ),
        # Calls without the marker that the template asks the model to write.
        (
            template("A:", BARE.replace("ARGS", "c.function.arguments"), "", "{# functools[ #}").text,
            "phi4_mini",
            "phi4",
        ),
    ],
)
def test_guessed_tool_format_is_logged(source, name, logged, caplog):
    form = ChatFormat(source)
    assert form.tool_format == name and form.takes_tools == (source != "# user")
    assert logged in caplog.text if logged else not caplog.text
    if name is None:
        with pytest.raises(RequestError, match="serve with tool_format"):
            form.constraint(ToolUse(tools_of(CALLS), must_call=True), None, "")


def test_tool_format_is_recognized_from_vocabulary_tokens():
    assert ChatFormat(ChatTemplate(TAKES_TOOLS, tokens=["<|tool_call_start|>"])).tool_format == "lfm2"


def test_history_arguments_are_text_if_template_concatenates_them():
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "ß"}}}]}
    (shown,) = ChatFormat(SAMPLES["deepseek_v3"].template.text).history([message])
    assert shown["tool_calls"][0]["function"]["arguments"] == '{"a": "ß"}'
    assert ChatFormat(SAMPLES["deepseek_v31"].template.text).history([message]) == [message]


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "A:",
    "fields": {
        "thinking": {"open": "(", "close": ")", "content": "text"},
        "tool_calls": {
            "open_pattern": r"@(?P<name>\w+) ",
            "close": ";",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}


WHOLE_CALLS = {
    **RESPONSE_TEMPLATE,
    "fields": {
        "tool_calls": {"open": "@", "close": ";", "repeats": True, "content": "json"},
        "content": {"close": "<end>", "content": "text"},
    },
}


def own_parser(prompt_end="A:", response_template=RESPONSE_TEMPLATE):
    form = ChatFormat(ChatTemplate("{{ tools }}", response_template=response_template))
    assert form.tool_format is None and form.shows_special_tokens(False)
    return form.parser(tools_of(CALLS), prompt_end)


@pytest.mark.parametrize(
    ("prompt_end", "text", "parts"),
    [
        ("A:", '(hm)so @f {"a": [1, "x"]};@f {"a": [1, "x"]};', ("hm", "so ", CALLS * 2)),
        ("A:(", 'hm)@f {"a": [1, "x"]};<end>', ("hm", "", CALLS)),
        ("A:", "text", ("", "text", [])),
        ("A:", "so @f nonsense; and", ("", "so nonsense; and", [])),
        ("A:", '(hm)@f {"a": [1, "x"]};@f nonsense; and', ("hm", "nonsense; and", CALLS)),
    ],
)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_response_template_parses_answers_in_pieces_of_any_size(prompt_end, text, parts, size):
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    assert parts_of(own_parser(prompt_end), pieces) == parts


@pytest.mark.parametrize("text", ['so @f {"a": [1', "so @f "])
def test_call_that_is_cut_is_not_shown(text):
    parser = own_parser()
    pieces = [*parser.add(text), *parser.finish(is_cut=True)]
    assert "".join(piece.text for piece in pieces) == "so "


@pytest.mark.parametrize("value", ["[]", "[1]", "5", "null", r'"{\"a\": "'])
def test_arguments_of_a_response_template_that_are_no_object_are_empty(value):
    text = f'@{{"name": "f", "arguments": {value}}};'
    assert parts_of(own_parser(response_template=WHOLE_CALLS), list(text)) == ("", "", [("f", {})])


@pytest.mark.parametrize(
    "value",
    ['"hello"', "[1]", "null", '{"function": "f"}', '{"name": 5}', '[{"name": "f"}, {"name": 5}]', "[" * 3000],
    ids=range(7),
)
@pytest.mark.parametrize("size", [1, 5, 10**4])
def test_json_that_is_no_call_is_content(value, size):
    text = f"so @{value}; and"
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    assert parts_of(own_parser(response_template=WHOLE_CALLS), pieces) == ("", f"so {value}; and", [])


def test_missing_or_bad_response_template_is_refused():
    with pytest.raises(ConfigError, match="no response template"):
        ChatFormat("{{ tools }}", "response_template")
    with pytest.raises(ConfigError, match="response template: .*fields"):
        ChatFormat(ChatTemplate("{{ tools }}", response_template={"version": 1}))
