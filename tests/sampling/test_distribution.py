"""Sampled tokens follow the model's distribution, and the test detects samplers that do not.

This is a small benchmark.
"""

import pytest
import torch
from support.distribution import SETTINGS, chi_square, chi_square_rows


@pytest.mark.slow
def test_sampled_tokens_follow_the_models_probabilities():
    rows = chi_square_rows(500, settings=SETTINGS[1:2])
    p_values = {(row.token.split()[0], row.sampler): row.p_value for row in rows}
    assert p_values["first", "right"] > 0.01
    assert p_values["third", "right"] > 0.01
    assert p_values["third", "frozen"] < 1e-4


def test_chi_square_accepts_fair_and_rejects_biased_counts():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    generator = torch.Generator().manual_seed(0)
    fair = [torch.multinomial(probabilities, 2000, True, generator=generator).bincount(minlength=5) for _ in range(200)]
    p_values = torch.tensor([chi_square(counts, probabilities) for counts in fair])
    assert p_values.mean().item() == pytest.approx(0.5, abs=0.07)  # uniform under the hypothesis
    assert chi_square(torch.tensor([1100, 560, 260, 80, 0]), probabilities) < 1e-3
    with pytest.raises(AssertionError, match="no probability"):
        chi_square(torch.tensor([999, 600, 300, 100, 1]), probabilities)
