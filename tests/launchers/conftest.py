"""Reference outputs that every launcher must reproduce."""

from __future__ import annotations

import pytest
from support import reference

from lp_runtime import LookaheadRuntime
from lp_runtime.config.lookahead import PLAIN


@pytest.fixture(scope="session")
def greedy(demo_model_dir) -> list[list[int]]:
    """Return transformers' greedy outputs for reference.PROMPTS on the demo model."""
    return reference.greedy(demo_model_dir)


@pytest.fixture(scope="session")
def sampled(demo_model_dir) -> list[int]:
    """Return new tokens of the first prompt, sampled with reference.SAMPLING.

    One replica samples one token per step.
    """
    with LookaheadRuntime(demo_model_dir, device="cpu", dtype="float32") as runtime:
        out = runtime.generate(
            reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False, sampling=reference.SAMPLING, lookahead=PLAIN
        )
    return out.token_ids
