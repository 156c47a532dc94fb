"""Fits the rates that estimates start from.

They are in lp_runtime/lookahead/drafters/best_first/starting_rates.py. A feature's starting rate is the fraction of
candidates with it that came, over all counts of requests; each model's requests have equal weight. Features that were
hardly ever seen keep the rates assumed here. The calibration is the observed number of candidates that came over the
sum of their estimates, by level and by how many features agreed. Estimates start from the rates, so the study is run
again with its own result until the rates do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from lp_runtime.lookahead.drafters.best_first import starting_rates, tables
from lp_runtime.lookahead.drafters.best_first.estimates import NUM_LEVELS, ONE, Rates, make_rates
from lp_runtime.lookahead.drafters.best_first.features import FIRST_CORPUS, LAYOUT, NUM_LENGTHS, NUM_NOISE_BINS
from lp_runtime.lookahead.drafters.best_first.starting_rates import UNIT, StartingRates
from lp_runtime.lookahead.drafters.best_first.tables import NUM_ORDERS
from lp_runtime.lookahead.top_k import K

# Rates of an entry's first token by its margin, from wide to narrow; of the other tokens by their margin, from none to
# wide, and by rank; times a factor by order. The vocabulary comes after the orders, then the orders of the prompt.
BY_MARGIN_FIRST = (0.9, 0.85, 0.75, 0.6, 0.45, 0.35, 0.3, 0.3, 0.3)
BY_MARGIN = (0.4, 0.38, 0.35, 0.3, 0.2, 0.12, 0.06, 0.02, 0.01)
BY_RANK = (1.0, 1.0, 0.7, 0.4)
BY_ORDER = (0.55, 0.7, 0.8, 0.85)
OF_VOCABULARY = 0.2
OF_FORKS = (0.2, 0.45, 0.85, 0.07, 0.35, 0.65)  # latest and earlier token: a shorter, an equal and a longer match
OF_ALTERNATIVES = (0.1, 0.06)  # one and two positions back
MIN_RATE = 0.003
ASSUMED_WEIGHT = 4  # weight of an assumed rate, in observations
MODEL_TOKENS = 1000.0  # weight of each model's requests in the calibration, in expected tokens
LINE = 15  # numbers per line of the written file


def assumed_rates() -> np.ndarray:
    """Return [F] assumed rates of features that were never seen."""
    by_margin = np.multiply.outer(BY_RANK, BY_MARGIN)
    by_margin[0] = BY_MARGIN_FIRST
    top_k = np.maximum(np.multiply.outer((*BY_ORDER, OF_VOCABULARY, *BY_ORDER), by_margin), MIN_RATE)
    lengths = [*np.minimum(0.4 + 0.1 * np.arange(NUM_LENGTHS), 0.9), *(0.1 + 0.03 * np.arange(tables.MAX_GRAM))]
    forks = np.ravel([[each] * 3 for each in OF_FORKS])
    same_position = np.concatenate([0.15 / (1 + np.arange(K)), 0.4 / (1 + np.arange(K))])
    alternatives = np.maximum(np.multiply.outer(OF_ALTERNATIVES, by_margin), MIN_RATE)
    of_text = np.repeat([*lengths, *forks], NUM_NOISE_BINS)
    return np.concatenate([of_text, top_k.ravel(), same_position, alternatives.ravel()])


def fit_rates(models: Sequence[Sequence[Rates]]) -> np.ndarray:
    """Return [FIRST_CORPUS] acceptance rates by feature; the last ones, of a corpus, are not fitted.

    Args:
        models: counts of each request of each model.
    """
    tried = [np.sum([rates.tried[:FIRST_CORPUS] for rates in requests], axis=0) for requests in models]
    accepted = [np.sum([rates.accepted[:FIRST_CORPUS] for rates in requests], axis=0) for requests in models]
    weights = np.array([np.mean([each.sum() for each in tried]) / each.sum() for each in tried])
    all_tried, all_accepted = weights @ np.array(tried), weights @ np.array(accepted)
    return (all_accepted + ASSUMED_WEIGHT * assumed_rates()) / (all_tried + ASSUMED_WEIGHT)


def fit_factors(models: Sequence[Sequence[Rates]], prefix: str = "") -> np.ndarray:
    """Return observed over expected, by the cells that factors depend on.

    Args:
        models: counts of each request of each model.
        prefix: prefix of the counts' names: "" for the calibration, "share_" for shares.
    """
    num_cells = len(getattr(models[0][0], f"{prefix}expected"))
    expected, observed = (np.full(num_cells, float(ASSUMED_WEIGHT)) for _ in range(2))
    for requests in models:
        of_model = np.sum([getattr(rates, f"{prefix}expected") for rates in requests], axis=0) / ONE
        scale = MODEL_TOKENS / max(1.0, of_model.sum())
        expected += scale * of_model
        observed += scale * np.sum([getattr(rates, f"{prefix}observed") for rates in requests], axis=0)
    return observed / expected


def summed(requests: Sequence[Rates]) -> Rates:
    """Return the summed counts of all requests of a model; estimates derived from counts stay 0."""
    names = ("tried", "accepted", "expected", "observed", "share_expected", "share_observed")
    return make_rates()._replace(**{name: np.sum([getattr(each, name) for each in requests], axis=0) for name in names})


def save_counted(path: Path, counted: Mapping[str, Rates]) -> None:
    """Write the counts of a model, by name, GREEDY and SAMPLED; `load_counted` reads them."""
    np.savez(
        path,
        **{f"{name}.{field}": values for name, rates in counted.items() for field, values in rates._asdict().items()},
    )


def load_counted(path: Path) -> dict[str, Rates]:
    """Return the counts that `save_counted` has written."""
    with np.load(path) as file:
        names = dict.fromkeys(key.partition(".")[0] for key in file)
        return {name: Rates(**{field: file[f"{name}.{field}"] for field in Rates._fields}) for name in names}


def fit(models: Sequence[Sequence[Rates]]) -> StartingRates:
    """Return starting rates, rounded; arguments are those of `fit_rates`."""
    fitted = (fit_rates(models), fit_factors(models), fit_factors(models, "share_"))
    return StartingRates(*(tuple(np.rint(values * UNIT).astype(int).tolist()) for values in fitted))


def source_of(fitted: Mapping[str, StartingRates], about: str) -> str:
    """Return the source of the package's file of starting rates.

    Args:
        fitted: by name, GREEDY and SAMPLED.
        about: the data that they were fitted on.
    """
    head = Path(starting_rates.__file__).read_text().split("# Fitted")[0]
    parts = [f"{head}# Fitted by benchmarks/studies/starting_rates.py, {about}.\n# fmt: off\n"]
    for name, (rates, calibration, shares) in fitted.items():
        ends = list(accumulate(source.num_features for source in LAYOUT))
        by_source = [
            f"        # {source.name}\n{_lines(rates[end - source.num_features : end])}"
            for source, end in zip(LAYOUT, ends, strict=True)
            if source.num_features and end <= len(rates)
        ]
        parts.append(f"{name} = StartingRates(\n    rates=(\n{''.join(by_source)}    ),\n")
        parts.append(f"    calibration=(\n{_lines(calibration)}    ),\n    shares=(\n{_lines(shares)}    ),\n)\n")
    return "".join(parts)


def _lines(values: Sequence[int]) -> str:
    lines = [values[i : i + LINE] for i in range(0, len(values), LINE)]
    return "".join("        " + " ".join(f"{value}," for value in line) + "\n" for line in lines)


def promised_and_accepted(requests: Sequence[Rates]) -> list[tuple[float, int]]:
    """Return for each level of estimates the sum of the best estimates, and how many candidates came."""
    expected = np.sum([rates.expected for rates in requests], axis=0).reshape(-1, NUM_LEVELS).sum(axis=0) / ONE
    observed = np.sum([rates.observed for rates in requests], axis=0).reshape(-1, NUM_LEVELS).sum(axis=0)
    return list(zip(expected.tolist(), observed.tolist(), strict=True))


assert len(BY_ORDER) == NUM_ORDERS
