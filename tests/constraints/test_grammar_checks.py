"""Grammars in which a text can reach a dead end are refused, whatever their source; others are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar
from support.constrained import compile_for_test

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.constraints.grammar_checks import GrammarParts
from lp_runtime.errors import ConstraintError

NOTHING, LOOP = r"[^\s\S]", {"type": "grammar", "grammar": 'root ::= "a" loop\nloop ::= "b" loop'}
BYTES = [bytes([byte]) for byte in range(256)]
CASES: list[tuple[dict[str, Any], str]] = [
    ({"regex": f"a{NOTHING}"}, "no text can satisfy it: the rule root has a position where no character is allowed"),
    ({"grammar": 'root ::= "a" []'}, "no text can satisfy it: the rule root"),
    ({"grammar": r'root ::= "a" [^\u0000-\U0010ffff]'}, "no text can satisfy it: the rule root"),
    ({"grammar": r'root ::= "a" [^\u0080-\U0010ffff\u0000-\u007f]'}, "no text can satisfy it: the rule root"),
    ({"grammar": r'root ::= "a" [\U00110000-\U00110001]'}, "no text can satisfy it: the rule root"),
    ({"grammar": 'root ::= "a" word\nword ::= [a-z] []'}, "no text can satisfy it: the rule word"),
    ({"grammar": 'root ::= "a" ("b" | "x" [])'}, "it allows a beginning that no text can end: the rule root_1"),
    ({"grammar": 'root ::= "b" | "x"? []'}, "it allows a beginning that no text can end: the rule root"),
    ({"grammar": 'root ::= "a" ("b" []){0,3}'}, "it allows a beginning that no text can end"),
    ({"grammar": 'root ::= "b" | "a" loop\nloop ::= "a" loop'}, "that no text can end: the rule loop never ends"),
    ({"grammar": r'root ::= "c" Regex("b|a[^\\s\\S]")'}, "it allows a beginning that no text can end"),
    ({"json_schema": {"type": "string", "pattern": f"^a{NOTHING}$"}}, "no text can satisfy it"),
    ({"json_schema": {"type": "string", "pattern": f"^(b|a{NOTHING})$"}}, "it allows a beginning that no text can end"),
    ({"json_schema": {"type": "string", "pattern": '^(b|a")$'}}, "it allows a beginning that no text can end"),
    ({"json_schema": {"type": "string", "pattern": r'^(b|a["\\\n])$'}}, "it allows a beginning that no text can end"),
    (
        {"json_schema": {"type": "object", "properties": {"a": {"type": "string", "pattern": f"a{NOTHING}"}}}},
        "it allows a beginning that no text can end",
    ),
    ({"structural_tag": {"type": "tag", "begin": "<f>", "content": LOOP, "end": "</f>"}}, "the rule loop never ends"),
    (
        {
            "structural_tag": {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": [{"type": "tag", "begin": "<f>", "content": LOOP, "end": "</f>"}],
            }
        },
        "it allows a beginning that no text can end: the rule loop never ends",
    ),
    (
        {
            "structural_tag": {
                "type": "token_triggered_tags",
                "trigger_tokens": [1],
                "tags": [
                    {"type": "tag", "begin": {"type": "token", "token": 1}, "content": LOOP, "end": "</f>"},
                ],
            }
        },
        "it allows a beginning that no text can end: the rule loop never ends",
    ),
]


@pytest.mark.parametrize(("settings", "reason"), CASES)
def test_grammar_with_a_dead_end_is_refused(settings, reason):
    if tag := settings.get("structural_tag"):
        settings = {"structural_tag": {"type": "structural_tag", "format": tag}}
    with pytest.raises(ConstraintError) as refused:
        compile_for_test(ConstraintConfig(**settings))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def can_end_from_everywhere(grammar: xgrammar.Grammar, max_length: int = 4) -> bool:
    """Return whether each text of up to `max_length` bytes that the matcher accepts can continue or end."""
    info = xgrammar.TokenizerInfo([*BYTES, b"</s>"], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_grammar(grammar)
    mask, todo = xgrammar.allocate_token_bitmask(1, 257), [b""]
    while todo:
        text = todo.pop()
        matcher = xgrammar.GrammarMatcher(compiled)
        assert all(matcher.accept_token(byte) for byte in text)
        matcher.fill_next_token_bitmask(mask)
        if not mask.any():
            return False
        allowed = [byte for byte in range(256) if mask[0, byte // 32] >> (byte % 32) & 1]
        if len(text) < max_length:
            todo += [text + bytes([byte]) for byte in allowed[:3]]
    return True


@pytest.mark.parametrize(
    "source",
    [
        'root ::= "a" ("b" | [])',
        'root ::= "a" []* "b"',
        'root ::= "a" ([]){0,3} "b"',
        'root ::= "a" ("x" []){0} "b"',
        r'root ::= "a" [^\u0000-\u00fe\u0100-\U0010ffff]',
        r'root ::= "a" [^\u0001-\U0010ffff] | never | "b" never?' + "\nnever ::= never",
        'root ::= Regex("(?i)a|b")',
        'root ::= Substring("ab", "c") "b"',
        {"type": "string", "pattern": '^(b|")$'},
        {"type": "string", "pattern": r'^[^a-z"]\s*é$'},
    ],
)
def test_unreachable_dead_end_is_accepted(source):
    if isinstance(source, str):
        grammar = xgrammar.Grammar.from_ebnf(source)
    else:
        grammar = xgrammar.Grammar.from_json_schema(json.dumps(source))
    assert GrammarParts(grammar).dead_end() is None
    assert can_end_from_everywhere(grammar)
