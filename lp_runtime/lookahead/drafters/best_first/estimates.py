"""Estimates of how likely a candidate comes next, learned from acceptance. Compiled by Numba.

Acceptance is counted by feature, which gives the rate of a feature: how often such a candidate comes. The estimates of
one context are a conditional logit model (multinomial logistic regression). A candidate's log-odds against all tokens
that no source names are

    bias + max over the features that name it (slope * log-odds of the rate) + sum over these features (weight)

so that sources which agree add up. As only one token comes, the candidates of a context compete: their odds are divided
by the sum of all odds. Slopes, weights and biases are constants, by source (starting_rates.py).

A text that repeats itself does so for many tokens in a row, so the misses of recent copies correct the rates of all
copies at once (`count_copies`).

Probabilities are fixed point, ONE is certain; log-odds are in OCTAVE-ths of a doubling. Everything is integer
arithmetic, so equal inputs give equal estimates on every replica.

Letters: F features, K top-k candidates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.drafters.best_first.features import (
    FIRST_COPY,
    FIRST_SHORTER,
    NUM_FEATURES,
    Candidates,
)
from lp_runtime.lookahead.top_k import K
from lp_runtime.utils.jit import Int, inlined

ONE_BITS = 16
ONE = 1 << ONE_BITS
PRIOR_WEIGHT = 32  # observations that a starting rate counts for
COPY_WEIGHT = 2  # expected misses of copies that no observation counts for
COPY_MEMORY = 16  # the counts of copies are halved when their expected misses exceed this
OCTAVE_BITS = 8
OCTAVE = 1 << OCTAVE_BITS  # of log-odds: twice the odds
MAX_LOG_ODDS = 16 * OCTAVE  # larger ones count as this
ODDS_BITS = 20  # fixed point of odds
SLOPE_BITS = 8  # fixed point of slopes
DROPPED_BITS = 4  # low bits of a rate that its log-odds do not depend on
NUM_RATES = ONE >> DROPPED_BITS
# [NUM_RATES + 1] int64 log-odds of a rate by its high bits; those of 0 and ONE are the ones next to them.
LOG_ODDS = np.array(
    [round(OCTAVE * math.log2(n / (NUM_RATES - n))) for n in np.arange(NUM_RATES + 1).clip(1, NUM_RATES - 1).tolist()],
    np.int64,
)
# [OCTAVE] int64 odds, fixed point of ODDS_BITS, by their log-odds between 0 and OCTAVE.
ODDS = np.array([round(2 ** (each / OCTAVE + ODDS_BITS)) for each in range(OCTAVE)], np.int64)


class Rates(NamedTuple):
    """Acceptance counts of candidates by feature, and the estimates made from them.

    Attributes:
        tried: [F] int64 number of candidates with each feature.
        accepted: [F] int64 how many of them were the token that came.
        rate: [F] int64 estimated probability that such a candidate comes, fixed point of ONE.
        prior: [F] int64 the same before anything is counted, from starting_rates.py.
        slope: [F] int64 factor of the rate's log-odds, fixed point of SLOPE_BITS.
        weight: [F] int64 log-odds that each feature adds to those of the tokens it names.
        bias: [2] int64 log-odds of all tokens below the root, and at the root.
        score: [F] int64 log-odds of the rate times the slope.
        copies: [2] int64 expected and observed misses of recent copies: tokens that a match in the text proposes.
    """

    tried: np.ndarray
    accepted: np.ndarray
    rate: np.ndarray
    prior: np.ndarray
    slope: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    score: np.ndarray
    copies: np.ndarray


def make_rates() -> Rates:
    """Return rates of zeros; `DraftTables.start` sets starting rates and constants."""
    tried, accepted, rate, prior, slope, weight, score = (np.zeros(NUM_FEATURES, np.int64) for _ in range(7))
    bias, copies = np.zeros(2, np.int64), np.zeros(2, np.int64)
    return Rates(tried, accepted, rate, prior, slope, weight, bias, score, copies)


@inlined
def score_features(rates: Rates, missing: Int, num_features: Int = NUM_FEATURES) -> None:
    """Compute the scores of the first `num_features` features, which are those in use.

    The misses of copies are multiplied by `missing`, fixed point of ONE; see `missing_copies`.
    """
    for feature in range(num_features):
        rate = np.int64(rates.rate[feature])
        if is_copy(feature):
            rate = np.int64(ONE) - ((ONE - rate) * missing >> ONE_BITS)
        rates.score[feature] = rates.slope[feature] * LOG_ODDS[rate >> DROPPED_BITS] >> SLOPE_BITS


@inlined
def is_copy(feature: Int) -> bool:
    """Return whether a feature is that of a long match in the text."""
    return bool(FIRST_COPY <= feature < FIRST_SHORTER)


@inlined
def missing_copies(rates: Rates) -> Int:
    """Return the observed misses of recent copies over the expected ones, at most 1, fixed point of ONE."""
    weight = COPY_WEIGHT * ONE
    return min(((rates.copies[1] + weight) << ONE_BITS) // (rates.copies[0] + weight), np.int64(ONE))


@inlined
def merge(rates: Rates, candidates: Candidates, num_rows: Int) -> Int:
    """Merge candidates with the same token, in the order of first collection; return how many there are.

    Writes `merged`, `best`, `scores` and `weights`.
    """
    merged, best, scores, weights = candidates.merged, candidates.best, candidates.scores, candidates.weights
    buckets = candidates.buckets
    last = len(buckets) - 1  # mask: the length is a power of two
    buckets[:] = -1
    num = 0
    for row in range(num_rows):
        for rank in range(K):
            token = candidates.tokens[row, rank]
            if token < 0:
                continue
            feature = np.int64(candidates.features[row, rank])
            bucket = token & last
            while buckets[bucket] >= 0 and merged[buckets[bucket]] != token:
                bucket = (bucket + 1) & last
            index = np.int64(buckets[bucket])
            if index < 0:
                index = np.int64(num)
                buckets[bucket] = index
                merged[num], best[num], scores[num], weights[num] = token, feature, rates.score[feature], 0
                num += 1
            elif rates.score[feature] > scores[index]:
                best[index], scores[index] = feature, rates.score[feature]
            weights[index] += rates.weight[feature]
    return num


@inlined
def odds_of(log_odds: Int) -> Int:
    """Return odds, fixed point of ODDS_BITS, from log-odds."""
    log_odds = min(log_odds, np.int64(MAX_LOG_ODDS))
    odds, octaves = ODDS[log_odds & (OCTAVE - 1)], log_odds >> OCTAVE_BITS
    return odds << octaves if octaves >= 0 else odds >> min(-octaves, np.int64(63))


@inlined
def compete(rates: Rates, candidates: Candidates, num: Int, is_root: bool, floor: Int) -> None:
    """Write the `probabilities` of a context's `num` merged candidates; 0 for those below `floor`, of ONE.

    `is_root` is whether the context ends at the root.
    """
    odds, bias = candidates.probabilities, rates.bias[1 if is_root else 0]  # probabilities replace odds in place
    total = np.int64(1) << ODDS_BITS
    for i in range(num):
        odds[i] = odds_of(bias + candidates.scores[i] + candidates.weights[i])
        total += odds[i]
    least = floor * total  # divisions are slow, and most candidates are below the floor
    for i in range(num):
        share = odds[i] << ONE_BITS
        candidates.probabilities[i] = share // total if share >= least else 0


@inlined
def count_features(rates: Rates, candidates: Candidates, num_rows: Int, token: Int) -> None:
    """Count a context's candidates by feature, and those that name the token that came, `token`."""
    for row in range(num_rows):
        for rank in range(K):
            if candidates.tokens[row, rank] >= 0:
                feature = candidates.features[row, rank]
                rates.tried[feature] += 1
                rates.accepted[feature] += candidates.tokens[row, rank] == token


@inlined
def count_copies(rates: Rates, candidates: Candidates, num: Int, token: Int) -> None:
    """Count whether a long match's token among `num` candidates was the one that came, `token`.

    Their probabilities must be of scores that no misses of copies have corrected.
    """
    for i in range(num):
        if is_copy(candidates.best[i]):
            rates.copies[0] += ONE - candidates.probabilities[i]
            rates.copies[1] += ONE * (candidates.merged[i] != token)
            if rates.copies[0] > COPY_MEMORY * ONE:
                rates.copies[0] >>= 1
                rates.copies[1] >>= 1


@inlined
def estimate(rates: Rates, candidates: Candidates, num_rows: Int) -> None:
    """Recompute the rates of all features of a context's candidates from their counts."""
    for row in range(num_rows):
        for rank in range(K):
            if candidates.tokens[row, rank] >= 0:
                feature = candidates.features[row, rank]
                tried, accepted = rates.tried[feature], rates.accepted[feature]
                rates.rate[feature] = (accepted * ONE + rates.prior[feature] * PRIOR_WEIGHT) // (tried + PRIOR_WEIGHT)
