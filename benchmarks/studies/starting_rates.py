"""Fits the rates that estimates start from, and the constants of the model that makes estimates of rates.

They are in lp_runtime/lookahead/drafters/best_first/starting_rates.py. A feature's starting rate is the fraction of
candidates with it that came, over all counts of requests. Features that were hardly ever seen keep the rates assumed
here. Slopes, weights and biases maximize the likelihood of the tokens that came, among the candidates of their
contexts. Each model has equal weight. The rates of a context depend on the starting rates, so the study is run again
with its own result, for every model, until that does not change.

Letters: F features, P parts of sources, n contexts, C largest number of candidates of a context, m pairs of a candidate
and a feature that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lp_runtime.lookahead.drafter import Drafter, VerificationResult
from lp_runtime.lookahead.drafters.best_first import starting_rates, tables
from lp_runtime.lookahead.drafters.best_first.candidates import collect
from lp_runtime.lookahead.drafters.best_first.drafter import BestFirstDrafter
from lp_runtime.lookahead.drafters.best_first.estimates import NUM_RATES, ONE
from lp_runtime.lookahead.drafters.best_first.features import (
    FIRST_CORPUS,
    LAYOUT,
    NUM_FEATURES,
    NUM_LENGTHS,
    NUM_NOISE_BINS,
    NUM_PARTS,
    PART_OF,
    PARTS,
    make_candidates,
)
from lp_runtime.lookahead.drafters.best_first.starting_rates import UNIT, StartingRates
from lp_runtime.lookahead.drafters.best_first.tables import NUM_ORDERS
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.utils.jit import compiled

# Rates of an entry's first token by its margin, from wide to narrow; of the other tokens by their margin, from none to
# wide, and by rank; times a factor by order. The vocabulary and its pairs come after the orders, then the prompt's.
BY_MARGIN_FIRST = (0.9, 0.85, 0.75, 0.6, 0.45, 0.35, 0.3, 0.3, 0.3)
BY_MARGIN = (0.4, 0.38, 0.35, 0.3, 0.2, 0.12, 0.06, 0.02, 0.01)
BY_RANK = (1.0, 1.0, 0.7, 0.4)
BY_ORDER = (0.55, 0.7, 0.8, 0.85)
OF_VOCABULARY, OF_PAIRS = 0.2, 0.3
OF_FORKS = (0.2, 0.45, 0.85, 0.07, 0.35, 0.65)  # latest and earlier token: a shorter, an equal and a longer match
OF_ALTERNATIVES = (0.1, 0.06)  # one and two positions back
MIN_RATE = 0.003
ASSUMED_WEIGHT = 4  # weight of an assumed rate, in observations
PENALTY = 0.001  # of squared constants, in nats: those that hardly ever matter stay small
NUM_ITERATIONS = 100  # of the optimizer
LEVELS = (0.0, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99)  # lowest probability of each
LINE = 15  # numbers per line of the written file


class Contexts(NamedTuple):
    """Contexts of committed tokens, with their candidates.

    Attributes:
        named: [m, 4] int64 context, candidate within the context, a feature that names it, the feature's rate.
        came: [n] int64 the candidate that came, -1 for another token.
        is_root: [n] bool whether the context ended at the root of a tree.
    """

    named: np.ndarray
    came: np.ndarray
    is_root: np.ndarray

    def tried(self) -> np.ndarray:
        """Return [F] number of candidates with each feature."""
        return np.bincount(self.named[:, 2], minlength=NUM_FEATURES)

    def accepted(self) -> np.ndarray:
        """Return [F] how many candidates with each feature came."""
        is_right = self.came[self.named[:, 0]] == self.named[:, 1]
        return np.bincount(self.named[is_right, 2], minlength=NUM_FEATURES)


class Watcher:
    """Records the contexts of drafters while they decode."""

    def __init__(self) -> None:
        self._named: list[np.ndarray] = []
        self._came: list[int] = []
        self._is_root: list[bool] = []
        self._candidates = make_candidates()

    def watch(self, drafter: Drafter) -> None:
        """Record a drafter's contexts from now on."""
        assert isinstance(drafter, BestFirstDrafter)
        advance = drafter.advance

        def advance_watched(
            tokens: Sequence[int],
            tree: TokenTree,
            result: VerificationResult,
            committed: Sequence[int],
            path: Sequence[int],
        ) -> None:
            position = len(tokens) - len(committed)
            for place, (node, token) in enumerate(zip([tree.root, *path], committed, strict=False)):
                self._add(drafter, position + place, tree.root, node, token)
            advance(tokens, tree, result, committed, path)

        drafter.advance = advance_watched  # type: ignore[method-assign]

    def _add(self, drafter: BestFirstDrafter, position: int, root: int, node: int, token: int) -> None:
        found, rates = self._candidates, drafter.rates
        num_rows = collect_after(*drafter.arrays, position, root, node, found)
        is_named = found.tokens[:num_rows] >= 0
        features = found.features[:num_rows][is_named]
        merged, candidates = np.unique(found.tokens[:num_rows][is_named], return_inverse=True)
        context = np.full(len(features), len(self._came))
        self._named.append(np.stack([context, candidates, features, rates.rate[features]], axis=1))
        self._came.append(int(np.searchsorted(merged, token)) if token in merged else -1)
        self._is_root.append(node == root)

    def contexts(self) -> Contexts:
        """Return what was recorded."""
        return Contexts(np.concatenate(self._named), np.array(self._came), np.array(self._is_root))


@compiled
def collect_after(drafts, noise, nodes, position, root, node, candidates):  # type: ignore[no-untyped-def]
    """Call `collect` from Python, with the arrays of a drafter first."""
    return collect(drafts, noise, position, nodes, root, node, candidates)


def save_contexts(path: Path, contexts: Mapping[str, Contexts]) -> None:
    """Write the contexts of a model, by name, GREEDY and SAMPLED; `load_contexts` reads them."""
    arrays = {f"{name}.{field}": values for name, each in contexts.items() for field, values in each._asdict().items()}
    np.savez_compressed(path, **arrays)


def load_contexts(path: Path) -> dict[str, Contexts]:
    """Return the contexts that `save_contexts` has written."""
    with np.load(path) as file:
        names = dict.fromkeys(key.partition(".")[0] for key in file)
        return {name: Contexts(*(file[f"{name}.{field}"] for field in Contexts._fields)) for name in names}


def assumed_rates() -> np.ndarray:
    """Return [F] assumed rates of features that were never seen."""
    by_margin = np.multiply.outer(BY_RANK, BY_MARGIN)
    by_margin[0] = BY_MARGIN_FIRST
    top_k = np.maximum(np.multiply.outer((*BY_ORDER, OF_VOCABULARY, OF_PAIRS, *BY_ORDER), by_margin), MIN_RATE)
    lengths = [*np.minimum(0.4 + 0.1 * np.arange(NUM_LENGTHS), 0.9), *(0.1 + 0.03 * np.arange(tables.MAX_GRAM))]
    forks = np.ravel([[each] * 3 for each in OF_FORKS])
    same_position = np.concatenate([0.15 / (1 + np.arange(K)), 0.4 / (1 + np.arange(K))])
    alternatives = np.maximum(np.multiply.outer(OF_ALTERNATIVES, by_margin), MIN_RATE)
    of_text = np.repeat([*lengths, *forks], NUM_NOISE_BINS)
    return np.concatenate([of_text, top_k.ravel(), same_position, alternatives.ravel()])


def fit_rates(models: Sequence[Contexts]) -> np.ndarray:
    """Return [FIRST_CORPUS] acceptance rates by feature; the last ones, of a corpus, are not fitted."""
    tried = np.array([contexts.tried()[:FIRST_CORPUS] for contexts in models])
    accepted = np.array([contexts.accepted()[:FIRST_CORPUS] for contexts in models])
    weights = tried.sum() / len(models) / tried.sum(axis=1)
    return (weights @ accepted + ASSUMED_WEIGHT * assumed_rates()) / (weights @ tried + ASSUMED_WEIGHT)


class EstimateModel(torch.nn.Module):
    """The model of estimates.py, in floats: log-probabilities of the candidates of a context, and of no candidate.

    The parts of `prompt` share the constants of `top-k`. Those of the corpus are assumed, as no context has any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.ones(NUM_PARTS, dtype=torch.float64))
        self.weights = torch.nn.Parameter(torch.zeros(NUM_PARTS, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, contexts: Contexts) -> torch.Tensor:
        """Return [n, C + 1] log-probabilities; the last column is that of all other tokens."""
        context, candidate, feature, rate = torch.from_numpy(contexts.named).T
        part = torch.from_numpy(SHARED_PART[PART_OF])[feature]
        share = (rate / ONE).clamp(1 / NUM_RATES, 1 - 1 / NUM_RATES)
        num_candidates = int(candidate.max()) + 1
        cell = context * (num_candidates + 1) + candidate
        num_cells = len(contexts.came) * (num_candidates + 1)
        none = torch.full((num_cells,), -torch.inf, dtype=torch.float64)
        scores = self.slopes.clamp_min(0)[part] * torch.log(share / (1 - share))
        best = none.scatter_reduce(0, cell, scores, "amax")
        weights = torch.zeros(num_cells, dtype=torch.float64).index_add(0, cell, self.weights[part])
        log_odds = (best + weights).view(len(contexts.came), -1) + self.bias[contexts.is_root.astype(int), None]
        log_odds[:, -1] = 0
        return torch.log_softmax(log_odds, dim=1)

    def fit(self, models: Sequence[Contexts]) -> None:
        """Maximize the likelihood of the tokens that came, with equal weight for each model."""
        optimizer = torch.optim.LBFGS(self.parameters(), max_iter=NUM_ITERATIONS, line_search_fn="strong_wolfe")

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.stack([self.loss(contexts) for contexts in models]).mean()
            loss = loss + PENALTY * (((self.slopes - 1) ** 2).sum() + (self.weights**2).sum())
            loss.backward()
            return loss

        optimizer.step(step)

    def loss(self, contexts: Contexts) -> torch.Tensor:
        """Return the mean negative log-likelihood of the tokens that came."""
        return -self(contexts)[np.arange(len(contexts.came)), contexts.came].mean()


def fit(models: Sequence[Contexts]) -> StartingRates:
    """Return starting rates and constants, rounded."""
    model = EstimateModel()
    model.fit(models)
    rates = tuple(np.rint(fit_rates(models) * UNIT).astype(int).tolist())
    with torch.no_grad():
        slopes, weights = model.slopes.clamp_min(0)[SHARED_PART[:-1]], model.weights[SHARED_PART[:-1]]
        constants = [tuple(values.double().numpy().round(2).tolist()) for values in (slopes, weights, model.bias)]
    return StartingRates(rates, *constants)


def promised_and_accepted(contexts: Contexts, starting: StartingRates) -> list[tuple[float, float, int]]:
    """Return (lowest probability, sum of probabilities, how many came) of candidates, by level of the probability."""
    model = EstimateModel()
    with torch.no_grad():
        model.slopes[:-1], model.weights[:-1] = torch.tensor(starting.slopes), torch.tensor(starting.weights)
        model.bias[:] = torch.tensor(starting.bias)
        probabilities = model(contexts).exp().numpy()
    came = np.zeros(probabilities.shape, bool)
    came[np.arange(len(came)), contexts.came] = True
    candidates, came = probabilities[:, :-1], came[:, :-1]
    levels = np.digitize(candidates, LEVELS) - 1
    return [
        (lowest, float(candidates[levels == level].sum()), int(came[levels == level].sum()))
        for level, lowest in enumerate(LEVELS)
    ]


def source_of(fitted: Mapping[str, StartingRates], about: str) -> str:
    """Return the source of the package's file of starting rates.

    Args:
        fitted: by name, GREEDY and SAMPLED.
        about: the data that they were fitted on.
    """
    head = Path(starting_rates.__file__).read_text().split("# Fitted")[0]
    parts = [f"{head}# Fitted by benchmarks/studies/starting_rates.py, {about}.\n# fmt: off\n"]
    for name, (rates, slopes, weights, bias) in fitted.items():
        ends = list(accumulate(source.num_features for source in LAYOUT))
        by_source = [
            f"        # {source.name}\n{_lines(rates[end - source.num_features : end])}"
            for source, end in zip(LAYOUT, ends, strict=True)
            if source.num_features and end <= len(rates)
        ]
        parts.append(f"{name} = StartingRates(\n    rates=(\n{''.join(by_source)}    ),\n")
        parts.append(f"    slopes={slopes},\n    weights={weights},\n    bias={bias},\n)\n")
    return "".join(parts)


def _lines(values: Sequence[int]) -> str:
    lines = [values[i : i + LINE] for i in range(0, len(values), LINE)]
    return "".join("        " + " ".join(f"{value}," for value in line) + "\n" for line in lines)


def _shared_part() -> np.ndarray:
    """Return for each part the one whose constants it has: the prompt's are those of the top-k candidates of steps."""
    shared = np.arange(NUM_PARTS)
    shared[PARTS.index("prompt") :][:NUM_ORDERS] = PARTS.index("top-k 1") + np.arange(NUM_ORDERS)
    return shared


SHARED_PART = _shared_part()
assert len(BY_ORDER) == NUM_ORDERS
