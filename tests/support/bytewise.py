"""Constraints over a vocabulary of single bytes: a matcher shows which texts they allow."""

from __future__ import annotations

from collections.abc import Callable

import xgrammar

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.constraints.compiled import compile_constraint, load_compiled

EOS = 256
INFO = xgrammar.TokenizerInfo(
    [*(bytes([byte]) for byte in range(256)), b"</s>"], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[EOS]
)


def allows(constraint: ConstraintConfig) -> Callable[[str | bytes], bool]:
    """Compile a constraint; return a function that tells whether it allows a whole text."""
    grammar = load_compiled(compile_constraint(constraint, INFO), INFO)

    def is_allowed(text: str | bytes) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        content = text.encode() if isinstance(text, str) else text
        return all(matcher.accept_token(byte) for byte in content) and matcher.accept_token(EOS)

    return is_allowed
