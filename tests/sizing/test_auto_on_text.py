"""lookahead=auto on recorded texts of a real model, beside the best of the fixed budgets."""

from __future__ import annotations

import numpy as np
import pytest
from support.recorded import RecordedText, decode_recorded, load_texts, open_recorded

from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.cost_model import interpolate
from lp_runtime.sizing.learned_costs import LearnedCosts

MICROSECOND = 1000
BUDGETS = (1, 4, 8, 16, 32, 64)
MAX_NODES = 64  # of the recorded trees
# Of the tokens per second of the best fixed budget, for the worst text. The aim is 97; docs/decisions/drafters.md says
# what is missing on the others. The texts know what trees of an earlier drafter asked, and nothing of other branches.
MIN_SHARE_PERCENT = {"CPU": 91, "slow CPU": 95, "GPU": 97}
CURVES = {  # microseconds of a step by its tokens
    "CPU": {1: 30_000, 2: 33_000, 4: 38_000, 8: 46_000, 16: 62_000, 32: 95_000, 64: 165_000, 128: 310_000},
    "slow CPU": {1: 30_000, 2: 40_000, 4: 55_000, 8: 80_000, 16: 130_000, 32: 240_000, 64: 460_000, 128: 900_000},
    "GPU": {1: 9_000, 64: 9_400, 128: 11_000},
}


def seconds_of(text: RecordedText, vocabulary: np.ndarray, times: np.ndarray, budget: int | LearnedCosts) -> int:
    """Return the nanoseconds that a text takes at a fixed budget, or, with what steps have shown before, at auto's."""
    if isinstance(budget, int):
        return decode_recorded(
            text, open_recorded(text, budget, vocabulary, StepBudget(times[None], False, None)), times
        )
    sized = StepBudget(times[None], True, None, budget)
    return decode_recorded(text, open_recorded(text, MAX_NODES, vocabulary, sized), times)


@pytest.mark.parametrize("curve", CURVES)
def test_auto_is_nearly_as_fast_as_the_best_fixed_budget(curve):
    texts, vocabulary = load_texts()
    points = CURVES[curve]
    times = interpolate(list(points), [MICROSECOND * each for each in points.values()], 2 * MAX_NODES)
    learned = LearnedCosts.initial(1)
    for text in texts:  # what an engine that has served some requests knows
        seconds_of(text, vocabulary, times, learned)
    shares = {}
    for text in texts:
        best = min(seconds_of(text, vocabulary, times, budget) for budget in BUDGETS)
        shares[text.kind] = 100 * best / seconds_of(text, vocabulary, times, learned)
    assert min(shares.values()) >= MIN_SHARE_PERCENT[curve], shares
