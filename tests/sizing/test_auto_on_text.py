"""lookahead=auto on recorded texts of a real model, compared with the best fixed budgets."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support.learned import NO_LIMIT
from support.recorded import RecordedText, decode_recorded, load_texts, open_recorded

from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.cost_model import interpolate
from lp_runtime.sizing.learned_costs import LearnedCosts

MICROSECOND = 1000
BUDGETS = (1, 4, 8, 16, 32, 64)
MAX_NODES = 64  # of the recorded trees
# Of the tokens per second with the best fixed budget of each text, over all texts. On the slow CPU that is mostly 1.
MIN_SHARE_PERCENT = {"CPU": 99, "slow CPU": 97, "GPU": 99}
# For the worst text: auto stops drafting for tens of steps if drafts did not pay in the previous text.
MIN_SHARE_PERCENT_OF_TEXT = {"CPU": 85, "slow CPU": 89, "GPU": 99}
CURVES = {  # microseconds of a step by its tokens
    "CPU": {1: 30_000, 2: 33_000, 4: 38_000, 8: 46_000, 16: 62_000, 32: 95_000, 64: 165_000, 128: 310_000},
    "slow CPU": {1: 30_000, 2: 40_000, 4: 55_000, 8: 80_000, 16: 130_000, 32: 240_000, 64: 460_000, 128: 900_000},
    "GPU": {1: 9_000, 64: 9_400, 128: 11_000},
}


def seconds_of(text: RecordedText, vocabulary: np.ndarray, times: np.ndarray, budget: int | LearnedCosts) -> int:
    """Return the nanoseconds that a text takes with a fixed budget, or with auto and these learned costs."""
    if isinstance(budget, int):
        return decode_recorded(
            text, open_recorded(text, budget, vocabulary, StepBudget(times[None], False, NO_LIMIT)), times
        )
    sized = StepBudget(times[None], True, NO_LIMIT, budget)
    return decode_recorded(text, open_recorded(text, MAX_NODES, vocabulary, sized), times)


def times_of(curve: str) -> np.ndarray:
    """Return the nanoseconds of a step by its tokens, [2 * MAX_NODES + 1]."""
    points = CURVES[curve]
    return interpolate(list(points), [MICROSECOND * each for each in points.values()], 2 * MAX_NODES)


@functools.cache
def best_of(curve: str) -> dict[str, int]:
    """Return the nanoseconds that each text takes with its best fixed budget."""
    texts, vocabulary = load_texts()
    times = times_of(curve)
    return {text.kind: min(seconds_of(text, vocabulary, times, each) for each in BUDGETS) for text in texts}


# Measurements that a busy machine may have made, as functions of the real times, [M + 1].
MISMEASURED = {
    "all slow": lambda times: 3 * times,
    "large steps slow": lambda times: 3 * (times[1] + 4 * (times - times[1])),
    "all but one token slow": lambda times: np.where(np.arange(len(times)) > 1, 3 * times, times),
}
# Of the best fixed budgets, over all texts.
MIN_SHARE_PERCENT_MISMEASURED = {"all slow": 97, "large steps slow": 97, "all but one token slow": 87}


@pytest.mark.parametrize("curve", ["CPU", pytest.param("slow CPU", marks=pytest.mark.slow), "GPU"])
def test_auto_is_nearly_as_fast_as_best_fixed_budget(curve):
    texts, vocabulary = load_texts()
    times, best = times_of(curve), best_of(curve)
    spent = dict.fromkeys(best, 0)
    for first in range(0, len(texts), 2):  # learned costs depend on the order of the texts
        order, learned = texts[first:] + texts[:first], LearnedCosts(1)
        for text in order:  # learn like an engine that has served some requests
            seconds_of(text, vocabulary, times, learned)
        for text in order:
            spent[text.kind] += seconds_of(text, vocabulary, times, learned)
    num_orders = -(-len(texts) // 2)
    shares = {kind: 100 * num_orders * best[kind] / spent[kind] for kind in best}
    assert min(shares.values()) >= MIN_SHARE_PERCENT_OF_TEXT[curve], shares
    of_all = 100 * num_orders * sum(best.values()) / sum(spent.values())
    assert of_all >= MIN_SHARE_PERCENT[curve], (of_all, shares)


@pytest.mark.parametrize(
    ("mistake", "curve"),
    [(mistake, "CPU") for mistake in MISMEASURED] + [("large steps slow", "slow CPU"), ("all slow", "GPU")],
)
def test_auto_recovers_from_times_measured_on_busy_machine(mistake, curve):
    texts, vocabulary = load_texts()
    times, best = times_of(curve), sum(best_of(curve).values())
    learned, spent = LearnedCosts(1), 0
    for text in texts:
        sized = StepBudget(MISMEASURED[mistake](times)[None], True, NO_LIMIT, learned)
        spent += decode_recorded(text, open_recorded(text, MAX_NODES, vocabulary, sized), times)
    assert 100 * best / spent >= MIN_SHARE_PERCENT_MISMEASURED[mistake]
