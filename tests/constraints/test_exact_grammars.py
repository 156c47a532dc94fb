"""Grammars in llama.cpp's format allow the texts that their writers mean."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from support.bytewise import allows
from support.thinned import slow

from lp_runtime.config.constraint import ConstraintConfig


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        (r'root ::= "\xe91" [\xdfa] "\\xe9" "\u00e9f"', [r"é1ß\xe9éf", r"é1a\xe9éf"], [r"é1\u0dfa\xe9éf"]),
        (r'root ::= "\[\"\]" [\[\]\x41]', ['["][', '["]]', '["]A'], ['["]B']),
        (
            'root ::= "[" space "]"\nspace ::= | " " | "\\n" [ \\t]{0,20}',
            ["[]", "[ ]", "[\n]", "[\n\t ]"],
            ["[\t]", "[", "[  ]"],
        ),
        ('root ::= "a" |', ["a", ""], ["aa"]),
        ('root ::= "a" | # the rest "\n', ["a", ""], ["aa"]),
        ('root ::= ("a" | ) end\nend ::= |\n"." | # |\nunused ::= ()', ["a", "", "a.", "."], ["ab"]),
        ('root ::= "a" | | "b"', ["a", "", "b"], ["ab"]),
        ('root ::= . "x"', ["éx", "\nx", "\0x", "😀x"], ["x", "ax."]),
        ('root ::= ".|" | "(" [.|)] # .|', [".|", "(.", "(|", "()"], ["a|", "(", "(a", ""]),
        ('root ::= TagDispatch(("a", b.c), excludes=())\nb.c ::= "x" |', ["hax", "h"], []),
    ],
)
def test_grammar_allows_and_refuses_the_right_texts(grammar, allowed, refused):
    is_allowed = allows(ConstraintConfig(grammar=grammar))
    assert [*map(is_allowed, allowed)] == [True] * len(allowed)
    assert [*map(is_allowed, refused)] == [False] * len(refused)


PARTS = [("a", '"a"'), ("é", '"é"'), (".", "."), (r"\.", '"."'), (r"[^a.]", "[^a.]"), (r"\|", '"|"')]


def random_parts(rng: random.Random, depth: int = 3) -> tuple[str, str]:
    """Return a regular expression and a grammar of the same texts."""
    if depth == 0 or rng.random() < 0.25:
        return rng.choice(PARTS)
    alternatives = [
        [random_parts(rng, depth - 1) for _ in range(rng.choice([0, 1, 1, 2]))] for _ in range(rng.choice([1, 2, 3]))
    ]
    regex, grammar = (
        "|".join(end.join(each[kind] for each in one) for one in alternatives) for kind, end in ((0, ""), (1, " "))
    )
    times = rng.choice(["", "", "*", "+", "?", "{2}", "{1,2}"])
    return f"(?:{regex}){times}", f"({grammar}){times}"


@pytest.mark.parametrize("seed", slow(range(40), range(20, 40)))
def test_random_grammars_match_python_re(seed):
    regex, grammar = random_parts(random.Random(seed))
    is_allowed = allows(ConstraintConfig(grammar=f"root ::= {grammar}"))
    for text in map("".join, itertools.chain(*(itertools.product("aé.|\n", repeat=length) for length in range(4)))):
        assert is_allowed(text) == (re.fullmatch(regex, text, re.DOTALL) is not None), (grammar, text)
