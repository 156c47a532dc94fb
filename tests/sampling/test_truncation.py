"""Processors that kernels apply as three numbers: temperature, top_k and top_p; all others are refused."""

import pytest
from transformers.generation import logits_process as library

from lp_runtime.sampling.truncation import Truncation, truncation_of

TEMPERATURE, TOP_K, TOP_P = (
    library.TemperatureLogitsWarper(0.5),
    library.TopKLogitsWarper(5),
    library.TopPLogitsWarper(0.9),
)


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        ([], Truncation()),
        ([TEMPERATURE, TOP_K, TOP_P], Truncation(0.5, 5, 0.9)),
        ([TOP_P], Truncation(1.0, None, 0.9)),
        ([TOP_K, TEMPERATURE], None),  # in another order the result may differ
        ([TEMPERATURE, TEMPERATURE], None),
        ([library.RepetitionPenaltyLogitsProcessor(1.2)], None),
        ([library.TopPLogitsWarper(0.9, min_tokens_to_keep=2)], None),
        ([library.TopPLogitsWarper(0.9, filter_value=-100.0)], None),
        ([library.TopKLogitsWarper(5, filter_value=-100.0)], None),
    ],
)
def test_only_plain_temperature_top_k_and_top_p_become_numbers(processors, expected):
    assert truncation_of(processors) == expected
