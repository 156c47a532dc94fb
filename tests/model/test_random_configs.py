"""A part of `benchmarks/correctness.py random_configs`: all settings of attention are random."""

import random

import pytest
from support.causal_types import outcome_of
from support.random_configs import FAMILIES, random_fields
from support.thinned import thinned


@pytest.mark.parametrize("family", thinned(2, FAMILIES))
def test_random_configuration_is_exact(family):
    rng = random.Random(f"{family} 0")
    outcome = outcome_of(family, random_fields(family, rng), prompts=(12, 70), seed=rng.randrange(1000))
    assert outcome.kind == "exact", outcome.reason
