"""Requests: their digest covers all that decides the output."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.request.request import Request
from lp_runtime.text.reasoning import Reasoning

REQUEST = Request((1, 2), PLAIN, max_new_tokens=8, stop=("end",))


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": SamplingConfig(temperature=0.5, seed=1)},
        {"sample": 1},
        {"stop": ("other",)},
        {"is_answer": True},
        {"skip_special_tokens": False},
        {"reasoning": Reasoning("<think>", "</think>")},
        {"logprobs": True},
    ],
)
def test_requests_that_may_end_differently_have_different_digests(change):
    assert replace(REQUEST, **change).sampling_key != REQUEST.sampling_key
