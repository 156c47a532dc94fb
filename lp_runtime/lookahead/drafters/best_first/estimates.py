"""Estimates of how likely a candidate comes next, learned from acceptance. Compiled by Numba.

Acceptance is counted by feature. If several features name a candidate, its estimate is the best of theirs. That is
usually too high, and more so the fewer features agree. So estimates are calibrated by their level and by how many
features agree: their sum is compared with how many of the candidates came. A text that repeats itself does so for
many tokens in a row, so the misses of recent copies correct all estimates of copies at once (`count_copies`). Finally,
the candidates of one context compete, as only one token comes: each gets a part of what better ones leave
(`share_out`).

Probabilities are fixed point, ONE is certain. Everything is integer arithmetic, so equal inputs give equal estimates on
every replica.

Letters: F features, K top-k candidates.
"""

from __future__ import annotations

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
NUM_LEVELS = 16  # of an estimate; see `LEVELS`
MAX_AGREEING = 3  # features that name one token; more count as 3
NUM_CALIBRATIONS = MAX_AGREEING * NUM_LEVELS
CALIBRATION_WEIGHT = 16  # expected tokens that each level starts with
COPY_WEIGHT = 2  # expected misses of copies that no observation counts for
COPY_MEMORY = 16  # the counts of copies are halved when their expected misses exceed this
NUM_PLACES = 4  # ranks by estimate among a context's candidates; all ranks from the fourth on count as one
NUM_SHARES = 2 * NUM_PLACES * NUM_LEVELS  # twice: at the root, and below it
LEVEL_BITS = 8  # low bits of an estimate that do not decide its level
# [ONE >> LEVEL_BITS + 1] uint8 level of an estimate by its high bits: eight above a half, one for each halving below.
LEVELS = np.array(
    [min(15, 8 + (high - 128) // 16) if high >= 128 else high.bit_length() for high in range((ONE >> LEVEL_BITS) + 1)],
    np.uint8,
)


class Rates(NamedTuple):
    """Acceptance counts of candidates by feature, and the estimates made from them.

    All probabilities and factors are fixed point of ONE.

    Attributes:
        tried: [F] int64 number of candidates with each feature.
        accepted: [F] int64 how many of them were the token that came.
        rate: [F] int64 estimated probability that such a candidate comes.
        prior: [F] int64 estimate before anything is counted, from starting_rates.py.
        start: [NUM_CALIBRATIONS] int64 observed tokens that each level starts with, fixed point, for CALIBRATION_WEIGHT
            expected ones.
        expected: [NUM_CALIBRATIONS] int64 sum of the best estimates of merged candidates, by level and by number of
            agreeing features.
        observed: [NUM_CALIBRATIONS] int64 how many of these candidates came.
        factor: [NUM_CALIBRATIONS] int64 factor that calibrates estimates.
        copies: [2] int64 expected and observed misses of recent copies: tokens that a match in the text proposes.
        calibrated: [MAX_AGREEING, F] int64 calibrated estimate.
        highest: [F] int64 highest probability that a candidate with each feature may have.
        share_start: [NUM_SHARES] int64 see `start`.
        share_expected: [NUM_SHARES] int64 sum of the calibrated estimates of candidates when no better one of their
            context came; by place of the context (root or below), rank in the context, and level.
        share_observed: [NUM_SHARES] int64 how many of these candidates came.
        share: [NUM_SHARES] int64 factor of such estimates.
        highest_share: [NUM_LEVELS] int64 largest factor of each level.
    """

    tried: np.ndarray
    accepted: np.ndarray
    rate: np.ndarray
    prior: np.ndarray
    start: np.ndarray
    expected: np.ndarray
    observed: np.ndarray
    factor: np.ndarray
    copies: np.ndarray
    calibrated: np.ndarray
    highest: np.ndarray
    share_start: np.ndarray
    share_expected: np.ndarray
    share_observed: np.ndarray
    share: np.ndarray
    highest_share: np.ndarray


def make_rates() -> Rates:
    """Return rates without counts and starting rates."""
    tried, accepted, rate, prior, highest = (np.zeros(NUM_FEATURES, np.int64) for _ in range(5))
    start, expected, observed, factor = (np.zeros(NUM_CALIBRATIONS, np.int64) for _ in range(4))
    calibrated = np.zeros((MAX_AGREEING, NUM_FEATURES), np.int64)
    share_start, share_expected, share_observed, share = (np.zeros(NUM_SHARES, np.int64) for _ in range(4))
    shares = (share_start, share_expected, share_observed, share, np.zeros(NUM_LEVELS, np.int64))
    copies = np.zeros(2, np.int64)
    return Rates(tried, accepted, rate, prior, start, expected, observed, factor, copies, calibrated, highest, *shares)


@inlined
def level_of(rate: Int) -> Int:
    """Return the level of an estimate, of NUM_LEVELS."""
    return np.int64(LEVELS[rate >> LEVEL_BITS])


@inlined
def calibration_of(rate: Int, agreeing: Int) -> Int:
    """Return the index, of NUM_CALIBRATIONS, for an estimate and the number of other agreeing features."""
    return agreeing * NUM_LEVELS + level_of(rate)


@inlined
def calibrate(rates: Rates, num_features: Int = NUM_FEATURES) -> Int:
    """Recompute all from `factor` to `highest`, and `share`; return the highest probability, of ONE.

    The first `num_features` features are in use.
    """
    rates.highest_share[:] = 0
    for cell in range(NUM_SHARES):
        share = factor_of(rates.share_expected[cell], rates.share_observed[cell], rates.share_start[cell])
        rates.share[cell] = share
        rates.highest_share[cell % NUM_LEVELS] = max(rates.highest_share[cell % NUM_LEVELS], share)
    for cell in range(NUM_CALIBRATIONS):
        rates.factor[cell] = factor_of(rates.expected[cell], rates.observed[cell], rates.start[cell])
    weight = COPY_WEIGHT * ONE
    missing = min(((rates.copies[1] + weight) << ONE_BITS) // (rates.copies[0] + weight), np.int64(ONE))
    best = np.int64(0)
    for feature in range(num_features):
        rate, highest = rates.rate[feature], np.int64(0)
        level = level_of(rate)
        for agreeing in range(MAX_AGREEING):
            factor = rates.factor[agreeing * NUM_LEVELS + level]
            calibrated = min(rate * factor >> ONE_BITS, ONE)
            if is_copy(feature):
                calibrated = ONE - ((ONE - calibrated) * missing >> ONE_BITS)
            rates.calibrated[agreeing, feature] = calibrated
            share = rates.highest_share[level_of(calibrated)]
            highest = max(highest, min(calibrated * share >> ONE_BITS, np.int64(ONE)))
        rates.highest[feature] = highest
        best = max(best, highest)
    return best


@inlined
def is_copy(feature: Int) -> bool:
    """Return whether a feature is that of a long match in the text."""
    return bool(FIRST_COPY <= feature < FIRST_SHORTER)


@inlined
def factor_of(expected: Int, observed: Int, start: Int) -> Int:
    """Return the factor, of ONE, that corrects estimates; arguments as in Rates."""
    return (((observed << ONE_BITS) + start) << ONE_BITS) // (expected + CALIBRATION_WEIGHT * ONE)


@inlined
def merge(rates: Rates, candidates: Candidates, num_rows: Int, floor: Int) -> Int:
    """Merge candidates with the same token, in the order of first collection; return how many there are.

    Tokens are left out if all their features' highest probabilities are below `floor`, of ONE. Writes `merged`, `best`,
    `agreeing` and `first`.
    """
    flat, merged, first = candidates.flat, candidates.merged, candidates.first
    num, in_order = 0, True
    for row in range(num_rows):
        for rank in range(K):
            feature, token = candidates.features[row, rank], candidates.tokens[row, rank]
            if rates.highest[feature] < floor or token < 0:  # true for most candidates
                continue
            is_known = False
            for i in range(num):
                is_known |= merged[i] == token
            if is_known:
                continue
            naming = 0
            for i in range(num_rows * K):
                naming += flat[i] == token
            merged[num], candidates.best[num], first[num] = token, feature, row * K + rank
            candidates.agreeing[num] = min(naming, MAX_AGREEING) - 1
            if naming > 1:
                choose_best(rates, candidates, num_rows, floor, num)
                in_order &= num == 0 or first[num - 1] < first[num]
            num += 1
    if not in_order:
        sort_merged(candidates, num)
    return num


@inlined
def choose_best(rates: Rates, candidates: Candidates, num_rows: Int, floor: Int, known: Int) -> None:
    """Set a merged candidate's feature with the best estimate, and where its token was first collected.

    Of features with equal estimates, those with a highest probability of at least `floor` are preferred. Writes `best`
    and `first` of the merged candidate with index `known`.
    """
    token = candidates.merged[known]
    best, best_rate, best_is_weak, first = candidates.best[known], np.int64(-1), True, -1
    for row in range(num_rows):
        for rank in range(K):
            if candidates.tokens[row, rank] != token:
                continue
            feature = candidates.features[row, rank]
            rate, is_weak = rates.rate[feature], rates.highest[feature] < floor
            if rate > best_rate or (rate == best_rate and best_is_weak and not is_weak):
                best, best_rate, best_is_weak = feature, rate, is_weak
            if first < 0:
                first = row * K + rank
    candidates.best[known], candidates.first[known] = best, first


@inlined
def sort_merged(candidates: Candidates, num: Int) -> None:
    """Sort the `num` merged candidates, which are few, by where their tokens were first collected."""
    merged, best, agreeing, first = candidates.merged, candidates.best, candidates.agreeing, candidates.first
    for i in range(1, num):
        at = i
        while at > 0 and first[at - 1] > first[at]:
            for values in (merged, best, agreeing, first):
                values[at - 1], values[at] = values[at], values[at - 1]
            at -= 1


@inlined
def rank(rates: Rates, candidates: Candidates, num: Int) -> None:
    """Write the merged candidates' calibrated `estimates`, and sort the candidates by them, best first."""
    merged, best, agreeing, estimates = candidates.merged, candidates.best, candidates.agreeing, candidates.estimates
    for i in range(num):
        estimates[i] = estimate = rates.calibrated[agreeing[i], best[i]]
        at = i
        while at > 0 and estimates[at - 1] < estimate:
            for values in (merged, best, agreeing):
                values[at - 1], values[at] = values[at], values[at - 1]
            estimates[at - 1], estimates[at] = estimates[at], estimates[at - 1]
            at -= 1


@inlined
def share_of(estimate: Int, place: Int, is_root: bool) -> Int:
    """Return the index, of NUM_SHARES, of a candidate's factor."""
    where = 0 if is_root else NUM_PLACES
    return (where + min(place, NUM_PLACES - 1)) * NUM_LEVELS + level_of(estimate)


@inlined
def share_out(rates: Rates, candidates: Candidates, num: Int, is_root: bool) -> None:
    """Sort a context's `num` merged candidates by estimate, best first, and write their `probabilities`.

    Only one token comes, so each candidate gets its part of the probability that better ones leave. `rates` must be
    calibrated; `is_root` says whether the context ends at the root.
    """
    rank(rates, candidates, num)
    left = np.int64(ONE)
    for i in range(num):
        estimate = candidates.estimates[i]
        part = min(estimate * rates.share[share_of(estimate, i, is_root)] >> ONE_BITS, ONE)
        candidates.probabilities[i] = left * part >> ONE_BITS
        left -= candidates.probabilities[i]


@inlined
def count_shares(rates: Rates, candidates: Candidates, num: Int, is_root: bool, token: Int) -> None:
    """Count a context's merged candidates, best first, up to the one that came, `token`; sorts them."""
    rank(rates, candidates, num)
    for i in range(num):
        estimate = candidates.estimates[i]
        cell = share_of(estimate, i, is_root)
        rates.share_expected[cell] += estimate
        if candidates.merged[i] == token:
            rates.share_observed[cell] += 1
            break


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
def count_levels(rates: Rates, candidates: Candidates, num: Int, token: Int) -> None:
    """Count a context's `num` merged candidates by level, and whether each was the token that came."""
    for i in range(num):
        rate = rates.rate[candidates.best[i]]
        calibration = calibration_of(rate, candidates.agreeing[i])
        rates.expected[calibration] += rate
        rates.observed[calibration] += candidates.merged[i] == token


@inlined
def count_copies(rates: Rates, candidates: Candidates, num: Int, token: Int) -> None:
    """Count whether a long match's token among `num` merged candidates was the one that came, `token`."""
    for i in range(num):
        if is_copy(candidates.best[i]):
            rate = rates.rate[candidates.best[i]]
            factor = rates.factor[calibration_of(rate, candidates.agreeing[i])]
            rates.copies[0] += ONE - min(rate * factor >> ONE_BITS, ONE)
            rates.copies[1] += ONE * (candidates.merged[i] != token)
            if rates.copies[0] > COPY_MEMORY * ONE:
                rates.copies[0] >>= 1
                rates.copies[1] >>= 1


@inlined
def estimate(rates: Rates, candidates: Candidates, num_rows: Int) -> None:
    """Recompute the estimates of all features of a context's candidates from their counts."""
    for row in range(num_rows):
        for rank in range(K):
            if candidates.tokens[row, rank] >= 0:
                feature = candidates.features[row, rank]
                tried, accepted = rates.tried[feature], rates.accepted[feature]
                rates.rate[feature] = (accepted * ONE + rates.prior[feature] * PRIOR_WEIGHT) // (tried + PRIOR_WEIGHT)
