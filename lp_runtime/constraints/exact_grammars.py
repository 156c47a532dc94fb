"""EBNF grammars in llama.cpp's GBNF format, rewritten so that xgrammar reads what their writers mean."""

from __future__ import annotations

import re

from lp_runtime.constraints.exact_regexes import UNICODE, exact_regex

TOKEN = re.compile(
    r'(?P<string>"(?:\\.|[^"\\])*")|(?P<class>\[(?:\\.|[^\]\\])*\])|(?P<blank>\s+|#[^\n]*)'
    r"|(?P<rule>[\w-][\w.-]*\s*::=)|[\w-][\w.-]*|(?P<any>\.)|=\(|\(=|.",
    re.DOTALL,
)
ESCAPE = re.compile(r"\\(?:x(?P<byte>[0-9a-fA-F]{2})|.)", re.DOTALL)
EMPTY = '""'


def exact_ebnf(grammar: str) -> str:
    r"""Write empty alternatives as `""`, `.` as a class, and escapes that xgrammar reads otherwise as others.

    It takes more than two digits of `\xHH`.
    """
    written, before = [""], 0  # place of the last token that is not blank
    for token in TOKEN.finditer(grammar):
        text = token[0]
        if not token["blank"]:
            if (text in "|)" or token["rule"]) and _begins_alternative(written[before]):
                written[before] += EMPTY
            before = len(written)
        written.append(_rewritten(token))
    if _begins_alternative(written[before]):
        written[before] += EMPTY
    return "".join(written)


def _begins_alternative(text: str) -> bool:
    return text in ("|", "(") or text.endswith("::=")


def _rewritten(token: re.Match[str]) -> str:
    if token["any"]:
        return exact_regex(r"[\s\S]", UNICODE)
    if not (token["string"] or token["class"]):
        return token[0]

    def escape(each: re.Match[str]) -> str:
        if each["byte"]:
            return rf"\u00{each['byte']}"
        return each[0][1] if token["string"] and each[0] in (r"\[", r"\]") else each[0]

    return ESCAPE.sub(escape, token[0])
