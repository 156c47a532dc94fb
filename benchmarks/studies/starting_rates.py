"""Fits the rates that estimates start from (lp_runtime/lookahead/drafters/best_first/starting_rates.py).

A feature's starting rate is how often a candidate with it came, over all that requests have counted, each model's
requests with equal weight. Features that were hardly ever seen keep what is assumed here. The calibration is what was
observed beside what estimates added up to, by level and by how many features agreed. Estimates start from the rates, so
the study is run again with what it has written until that does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lp_runtime.lookahead.drafters.best_first import starting_rates, tables
from lp_runtime.lookahead.drafters.best_first.estimates import NUM_LEVELS, ONE, Rates, make_rates
from lp_runtime.lookahead.drafters.best_first.features import CORPUS_FEATURES, NUM_LENGTHS, NUM_NOISE_BINS
from lp_runtime.lookahead.drafters.best_first.starting_rates import UNIT, StartingRates
from lp_runtime.lookahead.drafters.best_first.tables import NUM_ORDERS
from lp_runtime.lookahead.top_k import K

# Of an entry's first token by its margin, from wide to narrow; of the other tokens by their margin, from none to wide,
# and by rank; times a factor by order, the vocabulary behind the orders, and then the orders of the prompt.
BY_MARGIN_FIRST = (0.9, 0.85, 0.75, 0.6, 0.45, 0.35, 0.3, 0.3, 0.3)
BY_MARGIN = (0.4, 0.38, 0.35, 0.3, 0.2, 0.12, 0.06, 0.02, 0.01)
BY_RANK = (1.0, 1.0, 0.7, 0.4)
BY_ORDER = (0.55, 0.7, 0.8, 0.85)
OF_VOCABULARY = 0.2
OF_ALTERNATIVES = (0.1, 0.06)  # one and two positions back
MIN_RATE = 0.003
ASSUMED_WEIGHT = 4  # observations that what is assumed counts for
MODEL_TOKENS = 1000.0  # expected tokens that each model's requests count for in the calibration
LINE = 15  # numbers of a line of the written file


def assumed_rates() -> np.ndarray:
    """Return [F] what is assumed of features that were never seen."""
    by_margin = np.multiply.outer(BY_RANK, BY_MARGIN)
    by_margin[0] = BY_MARGIN_FIRST
    top_k = np.maximum(np.multiply.outer((*BY_ORDER, OF_VOCABULARY, *BY_ORDER), by_margin), MIN_RATE)
    lengths = [*np.minimum(0.4 + 0.1 * np.arange(NUM_LENGTHS), 0.9), *(0.1 + 0.03 * np.arange(tables.MAX_GRAM))]
    same_position = np.concatenate([0.15 / (1 + np.arange(K)), 0.4 / (1 + np.arange(K))])
    alternatives = np.maximum(np.multiply.outer(OF_ALTERNATIVES, by_margin), MIN_RATE)
    return np.concatenate([np.repeat(lengths, NUM_NOISE_BINS), top_k.ravel(), same_position, alternatives.ravel()])


def fit_rates(models: Sequence[Sequence[Rates]]) -> np.ndarray:
    """Return [CORPUS_FEATURES] how often candidates came, by feature; those of a corpus, the last, are not fitted.

    Args:
        models: what each request of each model has counted.
    """
    tried = [np.sum([rates.tried[:CORPUS_FEATURES] for rates in requests], axis=0) for requests in models]
    accepted = [np.sum([rates.accepted[:CORPUS_FEATURES] for rates in requests], axis=0) for requests in models]
    weights = np.array([np.mean([each.sum() for each in tried]) / each.sum() for each in tried])
    all_tried, all_accepted = weights @ np.array(tried), weights @ np.array(accepted)
    return (all_accepted + ASSUMED_WEIGHT * assumed_rates()) / (all_tried + ASSUMED_WEIGHT)


def fit_factors(models: Sequence[Sequence[Rates]], prefix: str = "") -> np.ndarray:
    """Return observed over expected, by what factors depend on.

    Args:
        models: what each request of each model has counted.
        prefix: of the names of what was counted, "" for the calibration, "share_" for shares.
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
    """Return what all requests of a model have counted together; what is estimated from that is left at 0."""
    names = ("tried", "accepted", "expected", "observed", "share_expected", "share_observed")
    return make_rates()._replace(**{name: np.sum([getattr(each, name) for each in requests], axis=0) for name in names})


def save_counted(path: Path, counted: Mapping[str, Rates]) -> None:
    """Write what was counted of a model, by name, GREEDY and SAMPLED; `load_counted` reads it."""
    np.savez(
        path,
        **{f"{name}.{field}": values for name, rates in counted.items() for field, values in rates._asdict().items()},
    )


def load_counted(path: Path) -> dict[str, Rates]:
    """Return what `save_counted` has written."""
    with np.load(path) as file:
        names = dict.fromkeys(key.partition(".")[0] for key in file)
        return {name: Rates(**{field: file[f"{name}.{field}"] for field in Rates._fields}) for name in names}


def fit(models: Sequence[Sequence[Rates]]) -> StartingRates:
    """Return starting rates, rounded; arguments as in `fit_rates`."""
    fitted = (fit_rates(models), fit_factors(models), fit_factors(models, "share_"))
    return StartingRates(*(tuple(np.rint(values * UNIT).astype(int).tolist()) for values in fitted))


def source_of(fitted: Mapping[str, StartingRates], about: str) -> str:
    """Return the source of the package's file of starting rates.

    Args:
        fitted: by name, GREEDY and SAMPLED.
        about: what they were fitted on.
    """
    head = Path(starting_rates.__file__).read_text().split("# Fitted")[0]
    parts = [f"{head}# Fitted by benchmarks/studies/starting_rates.py, {about}.\n# fmt: off\n"]
    for name, rates in fitted.items():
        parts.append(f"{name} = StartingRates(\n")
        for field, values in rates._asdict().items():
            lines = [values[i : i + LINE] for i in range(0, len(values), LINE)]
            text = "\n".join("        " + " ".join(f"{value}," for value in line) for line in lines)
            parts.append(f"    {field}=(\n{text}\n    ),\n")
        parts.append(")\n")
    return "".join(parts)


def promised_and_accepted(requests: Sequence[Rates]) -> list[tuple[float, int]]:
    """Return, for each level of an estimate, what best estimates added up to, and how many of the candidates came."""
    expected = np.sum([rates.expected for rates in requests], axis=0).reshape(-1, NUM_LEVELS).sum(axis=0) / ONE
    observed = np.sum([rates.observed for rates in requests], axis=0).reshape(-1, NUM_LEVELS).sum(axis=0)
    return list(zip(expected.tolist(), observed.tolist(), strict=True))


assert len(BY_ORDER) == NUM_ORDERS
