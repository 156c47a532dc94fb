"""Tool formats for tests: for each, a chat template that writes calls, and a recorded answer.

The answers are from the formats' documentation, and the templates follow it.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

JSON_CALL = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'


class Template(NamedTuple):
    """A chat template, and the text that it writes before an assistant's message."""

    text: str
    begin: str


class Sample(NamedTuple):
    """A tool format, with a recorded answer.

    Attributes:
        template: chat template of a model that uses the format.
        answer: an answer of the model.
        parts: the answer's reasoning, text, and (name, arguments) of its calls.
        prompt_end: end of the prompt.
    """

    template: Template
    answer: str
    parts: tuple[str, str, list[tuple[str, dict[str, Any]]]]
    prompt_end: str = ""


def template(begin: str, calls: str, end: str, more: str = "", prompt_end: str | None = None) -> Template:
    """Return a chat template.

    Args:
        begin, end: texts around an assistant's message.
        calls: template of a message's calls, with the message as `m`.
        more: macros, and marks that the template mentions.
        prompt_end: text after which the model answers; if not given, `begin`.
    """
    text = (
        more + "{% if tools %}[{{ tools | tojson }}]\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}" + begin + "{{ m.content }}" + calls + end + "{% else %}"
        "({{ m.role }}: {{ m.content }})\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + (begin if prompt_end is None else prompt_end) + "{% endif %}"
    )
    return Template(text, begin)


def each(call: str, separator: str = "", before: str = "", after: str = "") -> str:
    """Return the template of a message's calls, given that of one call with its function as `f`."""
    call = "{% for c in m.tool_calls %}{% set f = c.function %}" + call
    separator = "{{ '' if loop.last else " + json.dumps(separator) + " }}{% endfor %}"
    return "{% if m.tool_calls %}" + before + call + separator + after + "{% endif %}"


def keyed(argument: str) -> str:
    """Return the template of a call's arguments, given that of one: `k`, `v`, and the value as `text`."""
    begin = "{% for k, v in f.arguments.items() %}{% set text = v if v is string else v | tojson %}"
    return begin + argument + "{% endfor %}"


def gemma(quote: str) -> str:
    """Return a macro that writes a literal in Gemma's syntax."""
    comma = "{{ '' if loop.first else ',' }}"
    return (
        "{% macro literal(v) %}{% if v is string %}" + quote + "{{ v }}" + quote + "{% elif v is mapping %}{{ '{' }}"
        "{% for k, w in v.items() %}" + comma + "{{ k }}:{{ literal(w) }}{% endfor %}{{ '}' }}{% elif v is sequence %}["
        "{% for w in v %}" + comma + "{{ literal(w) }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    )


MEMBERS = "{% for k, v in f.arguments.items() %}{{ '' if loop.first else ',' }}{{ k }}:{{ literal(v) }}{% endfor %}"
PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ '' if loop.first else ', ' }}{{ k }}={{ v | tojson }}"
    "{% endfor %})"
)
DSML = (
    '<｜DSML｜invoke name="{{ f.name }}">\n'
    + keyed(
        "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">{{ text }}"
        "</｜DSML｜parameter>\n"
    )
    + "</｜DSML｜invoke>\n"
)
DSML_ANSWER = """I will look.</think>

<｜DSML｜%s>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="location" string="true">Hangzhou</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="location" string="true">Beijing</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜%s>"""
DSML_CALLS = [("get_weather", {"location": city, "days": 3}) for city in ("Hangzhou", "Beijing")]
CHATML = ("<|im_start|>assistant\n", "<|im_end|>\n")
DEEPSEEK = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")
HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"

SAMPLES = {
    "hermes": Sample(
        template(CHATML[0], each("<tool_call>\n" + JSON_CALL + "\n</tool_call>", "\n"), CHATML[1], "{# </think> #}"),
        """<think>
Two temperatures.
</think>

<tool_call>
{"name": "get_current_temperature", "arguments": {"location": "San Francisco, CA, USA"}}
</tool_call>
<tool_call>
{"name": "get_temperature_date", "arguments": {"location": "San Francisco, CA, USA", "date": "2024-10-01"}}
</tool_call>""",
        (
            "\nTwo temperatures.\n",
            "",
            [
                ("get_current_temperature", {"location": "San Francisco, CA, USA"}),
                ("get_temperature_date", {"location": "San Francisco, CA, USA", "date": "2024-10-01"}),
            ],
        ),
    ),
    "qwen3_coder": Sample(
        template(
            CHATML[0],
            each(
                "<tool_call>\n<function={{ f.name }}>\n"
                + keyed("<parameter={{ k }}>\n{{ text }}\n</parameter>\n")
                + "</function>\n</tool_call>",
                "\n",
            ),
            CHATML[1],
            "{# </think> #}",
            CHATML[0] + "<think>\n",
        ),
        """The user wants a file.
</think>

I write it.

<tool_call>
<function=write_file>
<parameter=path>
src/a.py
</parameter>
<parameter=text>
def f(x):
    return f"<{x}>"

</parameter>
<parameter=mode>
420
</parameter>
<parameter=options>
{"atomic": true}
</parameter>
</function>
</tool_call>""",
        (
            "The user wants a file.\n",
            "I write it.\n\n",
            [
                (
                    "write_file",
                    {
                        "path": "src/a.py",
                        "text": 'def f(x):\n    return f"<{x}>"\n',
                        "mode": 420,
                        "options": {"atomic": True},
                    },
                )
            ],
        ),
        "<think>\n",
    ),
    "seed_oss": Sample(
        template(
            "<seed:bos>assistant\n",
            each(
                "<seed:tool_call>\n<function={{ f.name }}>\n"
                + keyed("<parameter={{ k }}>{{ text }}</parameter>\n")
                + "</function>\n</seed:tool_call>",
                "\n",
            ),
            "<seed:eos>",
            "{# </seed:think> #}",
        ),
        """<seed:think>
The weather in Barcelona.
</seed:think>
<seed:tool_call>
<function=get_weather>
<parameter=location>Barcelona, Spain</parameter>
<parameter=unit>celsius</parameter>
</function>
</seed:tool_call>""",
        (
            "\nThe weather in Barcelona.\n",
            "",
            [("get_weather", {"location": "Barcelona, Spain", "unit": "celsius"})],
        ),
    ),
    "glm": Sample(
        template(
            "<|assistant|>\n<think></think>",
            each(
                "\n<tool_call>{{ f.name }}\n"
                + keyed("<arg_key>{{ k }}</arg_key>\n<arg_value>{{ text }}</arg_value>\n")
                + "</tool_call>"
            ),
            "",
            "",
            "<|assistant|>",
        ),
        """
<think>Weather, then.</think>
Let me look.
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>北京</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>上海</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>""",
        (
            "Weather, then.",
            "Let me look.\n",
            [("get_weather", {"city": "北京", "days": 3}), ("get_weather", {"city": "上海", "days": 3})],
        ),
    ),
    "deepseek_v3": Sample(
        template(
            DEEPSEEK[0],
            each(
                "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' + f.arguments + '\\n```"
                "<｜tool▁call▁end｜>' }}",
                "\n",
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
            ),
            DEEPSEEK[1],
            "{# </think> #}",
            DEEPSEEK[0] + "<think>\n",
        ),
        """Both cities.
</think>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_current_weather
```json
{"city": "Tokyo"}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_current_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
        (
            "Both cities.\n",
            "",
            [("get_current_weather", {"city": "Tokyo"}), ("get_current_weather", {"city": "Paris"})],
        ),
        "<think>\n",
    ),
    "deepseek_v31": Sample(
        template(
            DEEPSEEK[0] + "</think>",
            each(
                "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
                "",
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
            ),
            DEEPSEEK[1],
        ),
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"location": "Beijing"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>'
        '{"location": "Shanghai"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("", "I look.", [("get_weather", {"location": "Beijing"}), ("get_weather", {"location": "Shanghai"})]),
        "</think>",
    ),
    "deepseek_v32": Sample(
        template(
            DEEPSEEK[0] + "</think>",
            each(DSML, "", "\n\n<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
            DEEPSEEK[1],
            prompt_end=DEEPSEEK[0] + "<think>",
        ),
        DSML_ANSWER % ("function_calls", "function_calls"),
        ("I will look.", "", DSML_CALLS),
        "<think>",
    ),
    "deepseek_v4": Sample(
        template(
            DEEPSEEK[0] + "</think>",
            each(DSML, "", "\n\n<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
            DEEPSEEK[1],
            prompt_end=DEEPSEEK[0] + "<think>",
        ),
        DSML_ANSWER % ("tool_calls", "tool_calls"),
        ("I will look.", "", DSML_CALLS),
        "<think>",
    ),
    "kimi_k2": Sample(
        template(
            "<|im_assistant|>assistant<|im_middle|>",
            each(
                "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
                "",
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
            ),
            "<|im_end|>",
        ),
        "I'll check.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Beijing"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1'
        '<|tool_call_argument_begin|>{"zone": "Asia/Shanghai"}<|tool_call_end|><|tool_calls_section_end|>',
        ("", "I'll check.", [("get_weather", {"city": "Beijing"}), ("get_time", {"zone": "Asia/Shanghai"})]),
    ),
    "minimax_m2": Sample(
        template(
            "]~b]ai\n",
            each(
                '<invoke name="{{ f.name }}">\n'
                + keyed('<parameter name="{{ k }}">{{ text }}</parameter>\n')
                + "</invoke>\n",
                "",
                "\n<minimax:tool_call>\n",
                "</minimax:tool_call>",
            ),
            "[e~[\n",
            "{# </think> #}",
            "]~b]ai\n<think>\n",
        ),
        """Two searches.
</think>

<minimax:tool_call>
<invoke name="search_web">
<parameter name="query_tag">["technology", "events"]</parameter>
<parameter name="query">"OpenAI" latest</parameter>
</invoke>
<invoke name="search_web">
<parameter name="query_tag">[]</parameter>
<parameter name="query">Gemini</parameter>
</invoke>
</minimax:tool_call>""",
        (
            "Two searches.\n",
            "",
            [
                ("search_web", {"query_tag": ["technology", "events"], "query": '"OpenAI" latest'}),
                ("search_web", {"query_tag": [], "query": "Gemini"}),
            ],
        ),
        "<think>\n",
    ),
    "mistral": Sample(
        template(
            "[/INST]",
            each(
                '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}',
                ", ",
                "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('length 9') }}{% endif %}"
                "{% endfor %}[TOOL_CALLS][",
                "]",
            ),
            "</s>",
        ),
        '[TOOL_CALLS] [{"name": "get_current_weather", "arguments": {"location": "Paris, France", "format": "celsius"}}'
        ', {"name": "get_current_weather", "arguments": {"location": "Rome, Italy", "format": "celsius"}}]',
        (
            "",
            "",
            [
                ("get_current_weather", {"location": city, "format": "celsius"})
                for city in ("Paris, France", "Rome, Italy")
            ],
        ),
    ),
    "mistral_args": Sample(
        template(
            "[/INST]",
            each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
            "</s>",
            "{# [THINK][/THINK] #}",
        ),
        '[THINK]Add them.[/THINK]I add.[TOOL_CALLS]add[ARGS]{"a": 3, "b": 4}[TOOL_CALLS]add[ARGS]{"a": 5, "b": 6}',
        ("Add them.", "I add.", [("add", {"a": 3, "b": 4}), ("add", {"a": 5, "b": 6})]),
    ),
    "mistral_id": Sample(
        template(
            "[/INST]",
            each("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"),
            "</s>",
        ),
        '[TOOL_CALLS]add[CALL_ID]D681PevKs[ARGS]{"a": 3, "b": 4}',
        ("", "", [("add", {"a": 3, "b": 4})]),
    ),
    "harmony": Sample(
        template(
            "<|start|>assistant",
            each(
                " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>",
                "<|start|>assistant",
            ),
            "",
            "{# <|channel|> #}",
        ),
        "<|channel|>analysis<|message|>Need to use function get_current_weather.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_current_weather <|constrain|>json<|message|>"
        '{"location":"San Francisco"}<|call|>',
        (
            "Need to use function get_current_weather.",
            "I look.",
            [("get_current_weather", {"location": "San Francisco"})],
        ),
        "<|start|>assistant",
    ),
    "granite": Sample(
        template(
            "<|start_of_role|>assistant<|end_of_role|>",
            each(JSON_CALL, ", ", "<|tool_call|>[", "]"),
            "<|end_of_text|>\n",
            "{# Here is my response: #}",
        ),
        "Here is my thought process:\nBoston.\n\nHere is my response:\n\n"
        '<|tool_call|> [{"arguments": {"location": "Boston"}, "name": "get_current_weather"}]',
        ("\nBoston.\n\n", "", [("get_current_weather", {"location": "Boston"})]),
    ),
    "phi4_mini": Sample(
        template("<|assistant|>\n", each(JSON_CALL, ",", " functools[", "]"), "<|end|>\n"),
        'functools[\n  {"name": "get_weather", "arguments": {"city": "Tokyo"}},\n'
        '  {"name": "get_time", "arguments": {"timezone": "Asia/Tokyo"}}\n]',
        ("", "", [("get_weather", {"city": "Tokyo"}), ("get_time", {"timezone": "Asia/Tokyo"})]),
    ),
    "nemotron": Sample(
        template(
            "<SPECIAL_11>Assistant\n",
            each(JSON_CALL, ", ", "<TOOLCALL>[", "]</TOOLCALL>"),
            "\n<SPECIAL_12>\n",
            "{# </think> #}",
            "<SPECIAL_11>Assistant\n<think>\n",
        ),
        'A tip, so.\n</think>\n\n<TOOLCALL>[{"name": "calculate_tip", "arguments": {"bill_total": 100, '
        '"tip_percentage": 18}}]</TOOLCALL>',
        ("A tip, so.\n", "", [("calculate_tip", {"bill_total": 100, "tip_percentage": 18})]),
        "<think>\n",
    ),
    "gemma": Sample(
        template(
            "<|turn>model\n",
            each("<|tool_call>call:{{ f.name + '{' }}" + MEMBERS + "{{ '}' }}<tool_call|>"),
            "<|tool_response>",
            "{# <|channel>thought\n<channel|> #}" + gemma('<|"|>'),
        ),
        "<|channel>thought\nLondon.<channel|><|tool_call>call:get_current_temperature{location:<|\"|>London<|\"|>,"
        'days:3,tags:[<|"|>a "b"<|"|>],more:{x:null}}<tool_call|>',
        (
            "London.",
            "",
            [
                (
                    "get_current_temperature",
                    {"location": "London", "days": 3, "tags": ['a "b"'], "more": {"x": None}},
                )
            ],
        ),
    ),
    "functiongemma": Sample(
        template(
            "<start_of_turn>model\n",
            each("<start_function_call>call:{{ f.name + '{' }}" + MEMBERS + "{{ '}' }}<end_function_call>"),
            "<start_function_response>",
            gemma("<escape>"),
        ),
        "<start_function_call>call:get_current_temperature{location:<escape>London<escape>}<end_function_call>",
        ("", "", [("get_current_temperature", {"location": "London"})]),
    ),
    "lfm2": Sample(
        template(CHATML[0], each(PYTHON, ", ", "<|tool_call_start|>[", "]<|tool_call_end|>"), CHATML[1]),
        '<|tool_call_start|>[get_candidate_status(candidate_id="12345")]<|tool_call_end|>Checking the status.',
        ("", "Checking the status.", [("get_candidate_status", {"candidate_id": "12345"})]),
    ),
    "llama3": Sample(
        template(HEADER, each(JSON_CALL.replace("arguments", "parameters", 1), "; "), "<|eot_id|>"),
        '{"name": "get_current_conditions", "parameters": {"location": "San Francisco, CA", "unit": "Fahrenheit"}}',
        ("", "", [("get_current_conditions", {"location": "San Francisco, CA", "unit": "Fahrenheit"})]),
    ),
    "pythonic": Sample(
        template("<|header_start|>assistant<|header_end|>\n\n", each(PYTHON, ", ", "[", "]"), "<|eot|>"),
        "[register_user(name='Doe\\'s', age=9, address={'city': 'LA', 'state': 'CA'}, role=None, passed=True, "
        "aliases=['John', 'Johnny']), get_user_info(user_id=7890, special='black')]",
        (
            "",
            "",
            [
                (
                    "register_user",
                    {
                        "name": "Doe's",
                        "age": 9,
                        "address": {"city": "LA", "state": "CA"},
                        "role": None,
                        "passed": True,
                        "aliases": ["John", "Johnny"],
                    },
                ),
                ("get_user_info", {"user_id": 7890, "special": "black"}),
            ],
        ),
    ),
}  # fmt: skip
