"""The yardstick that every launcher is held to."""

from __future__ import annotations

import pytest
from support import reference

from lp_runtime import LookaheadRuntime
from lp_runtime.config.lookahead import PLAIN


@pytest.fixture(scope="session")
def greedy(demo_model_dir) -> list[list[int]]:
    """What transformers' greedy decoding makes of reference.PROMPTS on the demo model."""
    return reference.greedy(demo_model_dir)


@pytest.fixture(scope="session")
def sampled(demo_model_dir) -> list[int]:
    """New tokens of the first prompt, sampled as reference.SAMPLING says, one token a step on one replica."""
    with LookaheadRuntime(demo_model_dir, device="cpu", dtype="float32") as runtime:
        out = runtime.generate(
            reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False, sampling=reference.SAMPLING, lookahead=PLAIN
        )
    return out.token_ids
