"""Regular expressions and choices follow their syntax for characters of all Unicode planes."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from support.bytewise import allows
from support.thinned import slow

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.constraints.exact_regexes import UNESCAPED_IN_JSON, exact_regex
from lp_runtime.errors import ConstraintError


@pytest.mark.parametrize(
    ("regex", "allowed", "refused"),
    [
        (r"\xe91", "é1", "\u0e91"),
        (r"[\u00e9a]{2}", "éa", "\u0e9a\u0e9a"),
        (r"[\xe9a]+", "aé", "\u0e9a"),
        (r"[\x7fa]", "\x7f", "\u07fa"),
        (r"\u{1f600}f?", "😀", "😀ff"),
        (r"[\ud83d\ude00]f", "😀f", "f"),
        (r"[\^a]", "^", "b"),
        (r"[^\^a]", "b", "^"),
        (r"[\^-`]", "_", "a"),
        (r"[+--]", ",", "/"),
        (r"[\w-]", "-", "é"),
        ("[\n]", "\n", "n"),
        (r"\x00[\x00-\x1f]", "\0\n", "\0a"),
        (r"\cJ", "\n", "J"),
        (r"\é1", "é1", "1"),
        ("a.c", "a\u00a0c", "a\nc"),
        (r"\S", "é", "\u3000"),
        (r"[^\s]", "é", "\x85"),
        (r"[\s\S]{2}", "\x85\ufeff", "\x85"),
        (r"[^\ud800-\udfff]", "\U0010ffff", "ab"),
        (r"^\[.*]$", "[é]", "[é"),
        (r"\Aab\Z", "ab", "AabZ"),
        (r"(?:^a|b)c|d\z", "bc", "c"),
        ("(^|a)b(c|$)", "b", "a"),
        ("^$", "", "a"),
        (r"[$^]\$\^", "^$^", ""),
        (r"(?P<year>\d{4})-(?P<größe>\d\d)", "2024-05", "<year>2024-05"),
        (r"(?<year>\d{4})-\d{,2}", "2024-", "2024-{,2}"),
        (r'{"a": \d}', '{"a": 5}', '{"a": }'),
        ("^{a", "{a", "a"),
    ],
)
def test_regex_allows_and_refuses_the_right_texts(regex, allowed, refused):
    is_allowed = allows(ConstraintConfig(regex=regex))
    assert is_allowed(allowed) and not is_allowed(refused)


ATOMS = ["a", "é", r"\xe9", "[é-ü]", r"[\u00e9a]", "[^a]", r"[a\^]", r"[^\^a]", ".", r"\S", r"\s", r"\w", r"\W", "\\^"]
ATOMS += ["😀", "[😀-😂é]", "[^😀]", r"[^\x00-\x7f]", '"', r"[\n\"a]", r"\\", r"[\s\S]", r"[\w-]", r"[\x5e-\x7f]"]
ATOMS += ["{", "}", "a{", "{a,}", "{}a"]
QUANTIFIERS = ["*", "+", "?", "{2}", "{1,2}", "{0,2}", "{,2}", "{1,}", "{,}", "*?", "??", "{,1}?"]


def random_regex(rng: random.Random, depth: int = 3) -> str:
    form = rng.random() if depth else 0.0
    if form < 0.25:
        return rng.choice(ATOMS)
    first = random_regex(rng, depth - 1)
    if form < 0.5:
        return first + random_regex(rng, depth - 1)
    if form < 0.65:
        return f"(?:{first}|{random_regex(rng, depth - 1)})"
    return f"(?:{first}){rng.choice(QUANTIFIERS)}"


@pytest.mark.parametrize("seed", slow(range(40), range(20, 40)))
def test_random_regexes_match_python_re(seed):
    """Each is tested as a constraint and as a pattern of JSON strings, in automata and in grammars.

    The JSON strings have no escapes.
    """
    rng = random.Random(seed)
    regex, characters = random_regex(rng), ["a", "é", "^", "😀", '"', "{"]
    texts = ["".join(text) for length in range(4) for text in itertools.product(characters, repeat=length)]
    expected = [re.fullmatch(regex, text, re.ASCII) is not None for text in texts]
    assert [*map(allows(ConstraintConfig(regex=regex)), texts)] == expected
    pattern = rng.choice([f"^(?:{regex})$", f"^(?:{regex}|é{{200000}})$"])  # too long for an automaton
    is_plain = [is_matched and '"' not in text for is_matched, text in zip(expected, texts, strict=True)]
    try:
        is_allowed = allows(ConstraintConfig(json_schema={"type": "string", "pattern": pattern}))
    except ConstraintError:  # all texts need an escape, or one must follow some beginning
        assert '"' in regex or "\\\\" in regex or not any(is_plain)
    else:
        assert [is_allowed(f'"{text}"') for text in texts] == is_plain


def test_random_syntax_is_that_of_python_re():
    """An expression that `re` refuses is refused, and possessive repetitions and extensions of groups are, too."""
    rng, texts = random.Random(0), ["".join(text) for n in range(4) for text in itertools.product("ab{,", repeat=n)]
    counts = {True: 0, False: 0}
    for _ in range(400):
        regex = "".join(rng.choices(["a", "b", "{", "}", ",", "2", "1", "?", "*", "+", "|", "(", ")", "\\"], k=6))
        try:
            python = re.compile(regex, re.ASCII)
        except re.error:
            python = None
        try:
            is_allowed = allows(ConstraintConfig(regex=regex))
        except ConstraintError as error:
            assert python is None or re.search(r"[*+?}]\+|\(\?|\\[12ab]", regex), error
            assert repr(regex) in str(error)
        else:
            assert python is not None, regex
            assert [*map(is_allowed, texts)] == [python.fullmatch(text) is not None for text in texts], regex
        counts[python is None] += 1
    assert min(counts.values()) > 20


@pytest.mark.parametrize(
    ("constraint", "form"),
    [
        (ConstraintConfig(regex="."), "%s"),
        (ConstraintConfig(regex="[^a]"), "%s"),
        (ConstraintConfig(json_schema={"type": "string", "pattern": "^.$"}), '"%s"'),
        (ConstraintConfig(json_schema={"type": "string", "pattern": "^(?:[^a]|é{200000})$"}), '"%s"'),
        (ConstraintConfig(json_schema={"type": "string", "maxLength": 1}), '"%s"'),
        (ConstraintConfig(json_schema={"type": "string", "maxLength": 101}), '"%s"'),
    ],
)
def test_characters_must_be_valid_utf8(constraint, form):
    before, after = form.encode().split(b"%s")
    is_allowed = allows(constraint)
    for character in ("\x7f", "\x80", "\u0800", "\ud7ff", "\ue000", "\U00010000", "\U0010ffff"):
        assert is_allowed(before + character.encode() + after), character
    for content in (b"\xc0\xaf", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xff"):
        assert not is_allowed(before + content + after), content


def test_choices_support_any_character():
    texts = ["é1", "\x85f", "\0a", "\n1", '"x"', "\\x41", "😀f", "\u2028", "\x1b\x7f", "a\tb/", "\U0010ffff", " "]
    is_allowed = allows(ConstraintConfig(choice=texts))
    assert all(map(is_allowed, texts)) and not any(is_allowed(text + "1") for text in texts)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"regex": r"a[]"}, "constraint.regex: an empty character class is not supported"),
        ({"regex": "[a"}, "constraint.regex: a character class is not closed"),
        ({"regex": r"[b-a]"}, "the range b-a of a character class is not valid"),
        ({"regex": r"[\d-z]"}, r"the range \d-z of a character class is not valid"),
        ({"regex": r"[\p{L}]"}, r"\p is not supported in a character class"),
        ({"regex": "(?=a)a"}, "lookahead is not supported: '(?=a)a'"),
        ({"regex": r"\bé"}, r"constraint.regex: \b is not supported"),
        ({"regex": "(" * 3000 + "a" + ")" * 3000}, "constraint.regex: more than 100 nested groups"),
        ({"regex": r"a?+b"}, r"constraint.regex: ?+ is not supported, a repetition of a repetition: 'a?+b'"),
        ({"regex": "*a"}, "constraint.regex: * has nothing to repeat: '*a'"),
        ({"regex": "a{3,2}"}, "constraint.regex: the limits of {3,2} are not in order: 'a{3,2}'"),
        ({"regex": "a\\"}, r"constraint.regex: a backslash ends the expression: 'a\\'"),
        ({"regex": "(a"}, "constraint.regex: a parenthesis is not closed: '(a'"),
        ({"regex": "(?i:a)"}, "constraint.regex: (?i: is not supported: '(?i:a)'"),
        ({"regex": "(?P<a>x)(?P=a)"}, "constraint.regex: a backreference is not supported: '(?P<a>x)(?P=a)'"),
        ({"json_schema": {"pattern": r"^\p{Lu}"}}, r"constraint.json_schema: \p is not supported: '^\\p{Lu}'"),
        ({"regex": r"\Qé"}, r"constraint.regex: \Q is not supported"),
        ({"regex": r"a\Ab"}, r"constraint.regex: \A is supported only where a text begins or ends"),
        ({"regex": "(a|b$)c"}, "constraint.regex: $ is supported only where a text begins or ends: '(a|b$)c'"),
        ({"regex": "(^a)*"}, "constraint.regex: ^ is supported only"),
        ({"json_schema": {"pattern": "^(?!é).*$"}}, "lookahead is not supported"),
        ({"json_schema": {"type": "string", "pattern": '^é"$'}}, "no text can satisfy it"),
        ({"json_schema": {"type": "string", "pattern": '^(é|ab")$'}}, "it allows a beginning that no text can end"),
        ({"json_schema": {"const": "\ud800"}}, "a text in it is not valid Unicode"),
    ],
)
def test_unsupported_pattern_is_refused_in_one_line(constraint, reason):
    with pytest.raises(ConstraintError) as refused:
        allows(ConstraintConfig(**constraint))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_exact_regex_is_idempotent():
    rng = random.Random(0)
    for _ in range(100):
        regex = random_regex(rng)
        for allowed in ({}, {"allowed": UNESCAPED_IN_JSON}):
            once = exact_regex(regex, **allowed)
            assert exact_regex(once, **allowed) == once, json.dumps(regex)
