"""Random texts that a constraint allows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import xgrammar

from lp_runtime import ConstraintConfig
from lp_runtime.constraints.compiled import compile_constraint, load_compiled

# Token texts: characters, and texts that end an argument, so that random arguments end.
CHARACTERS = [chr(each) for each in range(32, 127)] + list("\n｜▁")
ENDS = ["</parameter>", "\n</parameter>", "</arg_value>", "</｜DSML｜parameter>", '<|"|>', "<escape>", "<|end|>"]
TEXTS = [*CHARACTERS, *ENDS, "</s>"]
CLOSING = [TEXTS.index(each) for each in ('"', "}", "]", ")", *ENDS, "</s>")]
INFO = xgrammar.TokenizerInfo(TEXTS, stop_token_ids=[len(TEXTS) - 1])
MAX_FREE_TOKENS = 100  # after these, everything that can be closed is closed


def texts_of(constraint: ConstraintConfig, num: int, seed: int = 1) -> Iterator[str]:
    """Yield random texts under a constraint."""
    yield from texts_of_grammar(load_compiled(compile_constraint(constraint, INFO), INFO), num, seed)


def texts_of_grammar(grammar: Any, num: int, seed: int = 1) -> Iterator[str]:
    """Yield random texts of a compiled grammar."""
    rng = random.Random(seed)
    mask = xgrammar.allocate_token_bitmask(1, len(TEXTS))
    for _ in range(num):
        matcher, tokens = xgrammar.GrammarMatcher(grammar), list[int]()
        while not tokens or tokens[-1] != len(TEXTS) - 1:
            matcher.fill_next_token_bitmask(mask)
            bits = numpy.unpackbits(mask[0].numpy().view(numpy.uint8), count=len(TEXTS), bitorder="little")
            closing = [token for token in CLOSING if bits[token]]
            is_closing = closing and (len(tokens) > MAX_FREE_TOKENS or rng.random() < 0.2)
            tokens.append(rng.choice(closing) if is_closing else int(rng.choice(bits.nonzero()[0])))
            assert matcher.accept_token(tokens[-1])
        yield "".join(TEXTS[token] for token in tokens[:-1])
