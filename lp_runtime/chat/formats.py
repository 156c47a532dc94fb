"""The syntax of tool calls and reasoning in each model family, as data.

One description of a format drives three things: the parser of answers (chat_parser.py), the constraint of answers that
must be calls (tags.py), and the recognition of a chat template (recognition.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

MARK = re.compile(r"<[^<>$]*>|\[[A-Z_]+\]|\w+\[")
LONG_ID, SHORT_ID = "$LONG_ID", "$SHORT_ID"
OBJECT = '{"name": "$NAME", "arguments": $ARGS}'  # read with its keys in any order


@dataclass(frozen=True)
class ParameterStyle:
    """Syntax of arguments that are not one JSON object: `open` value `close`, repeated."""

    open: str  # $KEY stands for the argument's name, $STRING for "true" if the value is a plain text
    close: str = ""  # ends a plain value; empty if values are literals, which end by themselves
    separator: str = ""
    quote: str = ""  # of texts in literals, in addition to the double quotation mark of JSON
    schema_style: str = ""  # xgrammar's, of a JSON schema; without one tags.py has rules


QWEN_XML = ParameterStyle("<parameter=$KEY>\n", "\n</parameter>", schema_style="qwen_xml")
SEED_XML = ParameterStyle("<parameter=$KEY>", "</parameter>", schema_style="qwen_xml")
GLM_XML = ParameterStyle("<arg_key>$KEY</arg_key>\n<arg_value>", "</arg_value>", schema_style="glm_xml")
MINIMAX_XML = ParameterStyle('<parameter name="$KEY">', "</parameter>", schema_style="minimax_xml")
DEEPSEEK_XML = ParameterStyle(
    '<｜DSML｜parameter name="$KEY" string="$STRING">', "</｜DSML｜parameter>", schema_style="deepseek_xml"
)
PYTHON = ParameterStyle("$KEY=", separator=", ", quote="'")
GEMMA = ParameterStyle("$KEY:", separator=",", quote='<|"|>')
FUNCTION_GEMMA = ParameterStyle("$KEY:", separator=",", quote="<escape>")


@dataclass(frozen=True)
class CallFormat:
    """The syntax of tool calls in a model family. Parsers accept other white space, too.

    $NAME and $ARGS stand for the tool's name and arguments, $INDEX for the call's number, $ID for an id. `also` are
    other marks that may begin calls, each with the text that ends them; a mark inside `call` may come first. `loose`
    are marks that models write instead; an empty one is the beginning of the answer. After them only objects that name
    a known tool are calls, and they are not part of constraints.
    """

    call: str
    begin: str = ""  # before the first call
    separator: str | None = ""  # between two calls; None if an answer has one call only
    end: str = ""  # after the last call
    style: ParameterStyle | None = None  # of the arguments; None if they are one JSON object
    also: tuple[tuple[str, str], ...] = ()
    loose: tuple[tuple[str, str], ...] = ()
    call_id: str = LONG_ID  # LONG_ID and SHORT_ID stand for random ones

    @property
    def mark(self) -> str:
        """Beginning of `begin` or `call` that tells calls from text; empty if calls come first in an answer."""
        match = MARK.match(self.begin + self.call)
        return match.group() if match else ""

    @property
    def is_list(self) -> bool:
        """Whether calls follow each other without a mark."""
        return bool(self.begin) or not self.mark

    @property
    def is_object(self) -> bool:
        """Whether a call is a JSON object with a name and arguments."""
        return '{"name": "$NAME"' in self.call

    @property
    def head(self) -> str:
        """Text before a call's object, or before its arguments."""
        return self.call.partition('{"name": "$NAME"' if self.is_object else "$ARGS")[0]

    @property
    def tail(self) -> str:
        """Text after a call's object, or after its arguments."""
        return self.call.partition("$ARGS}" if self.is_object else "$ARGS")[2]


NO_CALLS = CallFormat("")  # of answers that are not searched for calls
INVOKE = '<｜DSML｜invoke name="$NAME">\n$ARGS</｜DSML｜invoke>\n'

# Of two formats that read a call of a template equally well, the first is taken.
FORMATS = {
    # Qwen2.5-Coder is asked for the first form, and mostly writes one of the others.
    "hermes": CallFormat(
        f"<tool_call>\n{OBJECT}\n</tool_call>",
        separator="\n",
        loose=(("", ""), ("<tools>", "</tools>"), ("```json", "```")),
    ),
    "qwen3_coder": CallFormat(
        "<tool_call>\n<function=$NAME>\n$ARGS</function>\n</tool_call>",
        separator="\n",
        style=QWEN_XML,
        also=(("<function=", ""),),
    ),
    "seed_oss": CallFormat(
        "<seed:tool_call>\n<function=$NAME>\n$ARGS</function>\n</seed:tool_call>", separator="\n", style=SEED_XML
    ),
    "glm": CallFormat("<tool_call>$NAME$ARGS</tool_call>", separator="\n", style=GLM_XML),
    "deepseek_v3": CallFormat(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$NAME\n```json\n$ARGS\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        separator="\n",
        end="<｜tool▁calls▁end｜>",
        also=(("<｜tool▁call▁begin｜>", ""),),
    ),
    "deepseek_v31": CallFormat(
        "<｜tool▁call▁begin｜>$NAME<｜tool▁sep｜>$ARGS<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        also=(("<｜tool▁call▁begin｜>", ""),),
    ),
    "deepseek_v32": CallFormat(
        INVOKE, begin="<｜DSML｜function_calls>\n", end="</｜DSML｜function_calls>", style=DEEPSEEK_XML
    ),
    "deepseek_v4": CallFormat(INVOKE, begin="<｜DSML｜tool_calls>\n", end="</｜DSML｜tool_calls>", style=DEEPSEEK_XML),
    "kimi_k2": CallFormat(
        "<|tool_call_begin|>functions.$NAME:$INDEX<|tool_call_argument_begin|>$ARGS<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        also=(("<|tool_call_section_begin|>", "<|tool_call_section_end|>"), ("<|tool_call_begin|>", "")),
        call_id="functions.$NAME:$INDEX",
    ),
    "minimax_m2": CallFormat(
        '<invoke name="$NAME">\n$ARGS</invoke>\n',
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        style=MINIMAX_XML,
    ),
    "mistral": CallFormat(OBJECT, begin="[TOOL_CALLS][", separator=", ", end="]", call_id=SHORT_ID),
    "mistral_args": CallFormat("[TOOL_CALLS]$NAME[ARGS]$ARGS", call_id=SHORT_ID),
    "mistral_id": CallFormat("[TOOL_CALLS]$NAME[CALL_ID]$ID[ARGS]$ARGS", call_id="$ID"),
    "harmony": CallFormat("<|channel|>commentary to=functions.$NAME <|constrain|>json<|message|>$ARGS", separator=None),
    "granite": CallFormat(
        OBJECT,
        begin="<|tool_call|>[",
        separator=", ",
        end="]",
        also=(("<tool_call>", "</tool_call>"),),
        loose=(("", ""),),
    ),
    "phi4_mini": CallFormat(
        OBJECT, begin="functools[", separator=", ", end="]", also=(("<|tool_call|>", "<|/tool_call|>"),)
    ),
    "nemotron": CallFormat(OBJECT, begin="<TOOLCALL>[", separator=", ", end="]</TOOLCALL>"),
    "gemma": CallFormat("<|tool_call>call:$NAME{$ARGS}<tool_call|>", style=GEMMA),
    "functiongemma": CallFormat("<start_function_call>call:$NAME{$ARGS}<end_function_call>", style=FUNCTION_GEMMA),
    "lfm2": CallFormat(
        "$NAME($ARGS)", begin="<|tool_call_start|>[", separator=", ", end="]<|tool_call_end|>", style=PYTHON
    ),
    "llama3": CallFormat(
        '{"name": "$NAME", "parameters": $ARGS}',
        separator="; ",
        also=(("<|python_tag|>", ""), ("<|python_start|>", "<|python_end|>")),
        loose=(("", ""), ("```json", "```")),
    ),
    "pythonic": CallFormat(
        "$NAME($ARGS)", begin="[", separator=", ", end="]", style=PYTHON, also=(("<|python_start|>", "<|python_end|>"),)
    ),
}


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts around the reasoning part of an answer."""

    begin: str
    end: str
    is_special: bool = False  # whether they are special tokens, which a text shows only if it is asked to
    content: tuple[tuple[str, str], ...] = ()  # marks that may begin and end the content, which are not shown
    hides_space: bool = True  # whether white space after the part is not shown

    def is_opened_by(self, prompt: str, tokens: Iterable[str] = ()) -> bool:
        """Whether a prompt ends inside the part; `tokens` are the vocabulary's added ones, which messages end with."""
        _, begin, rest = prompt.rpartition(self.begin.strip())
        return bool(begin) and self.end not in rest and not any(each in rest for each in others_than_reasoning(tokens))


# The last is also what templates mention whose models reason between other marks.
REASONINGS = {
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", True),
    "gemma": ReasoningFormat("<|channel>thought\n", "<channel|>", True),
    "cohere": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        True,
        content=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
    ),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "apriel": ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "think": ReasoningFormat("<think>", "</think>"),
}


def others_than_reasoning(tokens: Iterable[str]) -> list[str]:
    """Return the tokens that are neither white space nor in a mark of reasoning; one of them ends each message."""
    marks = [mark for each in REASONINGS.values() for mark in (each.begin, each.end, *itertools.chain(*each.content))]
    return [token for token in tokens if not token.isspace() and not any(token in mark for mark in marks)]
