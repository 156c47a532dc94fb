"""A part of `benchmarks/correctness.py random_configs`: all settings of attention are random."""

import random

import pytest
from support import causal_types
from support.causal_types import outcome_of
from support.random_configs import FAMILIES, random_fields
from support.thinned import thinned


@pytest.mark.parametrize("family", thinned(2, FAMILIES))
def test_random_configuration_is_exact(family, monkeypatch):
    """One output begins before the end of the longest window, one after it."""
    monkeypatch.setattr(causal_types, "NEW_TOKENS", 12)
    rng = random.Random(f"{family} 0")
    outcome = outcome_of(family, random_fields(family, rng), prompts=(30, 70), seed=rng.randrange(1000))
    assert outcome.kind == "exact", outcome.reason
