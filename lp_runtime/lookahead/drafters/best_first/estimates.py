"""Estimates of how likely each candidate is the token that comes, learned from what came. Compiled by Numba.

Acceptance is counted by feature. The estimate of a candidate that several features name is the best one of theirs,
which is too high as a rule, and the more so the fewer features agree. So estimates are calibrated: by their level and
by how many features agree, what they add up to is counted beside how many of the candidates came. Then candidates of
one context share what is certain, as one token comes: each gets a part of what better ones leave (`share_out`).

Probabilities are fixed point, ONE is certain. Everything is integer arithmetic, so equal inputs give equal estimates on
every replica.

Letters: F features, K top-k candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.drafters.best_first.candidates import collect
from lp_runtime.lookahead.drafters.best_first.features import NUM_FEATURES, Candidates, Nodes
from lp_runtime.lookahead.drafters.best_first.tables import DraftArrays, Int, K, Noise
from lp_runtime.utils.jit import compiled, inlined

ONE_BITS = 16
ONE = 1 << ONE_BITS
PRIOR_WEIGHT = 32  # observations that a starting rate counts for
NUM_LEVELS = 16  # of an estimate
MAX_AGREEING = 3  # features that name one token; more of them count as 3
NUM_CALIBRATIONS = MAX_AGREEING * NUM_LEVELS
CALIBRATION_WEIGHT = 16  # expected tokens that each level starts with
NUM_PLACES = 4  # of a candidate among those of its context, by estimate; the fourth and later ones count as one
NUM_SHARES = 2 * NUM_PLACES * NUM_LEVELS  # at the root and below it


class Rates(NamedTuple):
    """How often candidates came, by feature, and what is estimated from that.

    Attributes:
        tried: [F] int64 how often a candidate with a feature was there.
        accepted: [F] int64 how often such a candidate was the token that came.
        rate: [F] int64 estimated probability that it comes, of ONE.
        prior: [F] int64 estimate before anything was counted, of ONE; starting_rates.py has it.
        start: [NUM_CALIBRATIONS] int64 tokens that each level starts with as observed, of ONE, beside
            CALIBRATION_WEIGHT expected ones.
        expected: [NUM_CALIBRATIONS] int64 sum of the best estimates of merged candidates, of ONE, by level and by how
            many features agreed.
        observed: [NUM_CALIBRATIONS] int64 how many of these candidates came.
        calibrated: [MAX_AGREEING, F] int64 calibrated estimate, of ONE.
        highest: [F] int64 the highest probability that a candidate with each feature may have, of ONE.
        share_start: [NUM_SHARES] int64 see `start`.
        share_expected: [NUM_SHARES] int64 sum of the calibrated estimates of candidates, of ONE, where no better one of
            their context came; by their level, their place in the context, and where the context is.
        share_observed: [NUM_SHARES] int64 how many of these candidates came.
        share: [NUM_SHARES] int64 factor of such estimates, of ONE.
    """

    tried: np.ndarray
    accepted: np.ndarray
    rate: np.ndarray
    prior: np.ndarray
    start: np.ndarray
    expected: np.ndarray
    observed: np.ndarray
    calibrated: np.ndarray
    highest: np.ndarray
    share_start: np.ndarray
    share_expected: np.ndarray
    share_observed: np.ndarray
    share: np.ndarray


def make_rates() -> Rates:
    """Return rates of which nothing was counted and nothing is assumed."""
    tried, accepted, rate, prior, highest = (np.zeros(NUM_FEATURES, np.int64) for _ in range(5))
    start, expected, observed = (np.zeros(NUM_CALIBRATIONS, np.int64) for _ in range(3))
    calibrated = np.zeros((MAX_AGREEING, NUM_FEATURES), np.int64)
    shares = (np.zeros(NUM_SHARES, np.int64) for _ in range(4))
    return Rates(tried, accepted, rate, prior, start, expected, observed, calibrated, highest, *shares)


@inlined
def level_of(rate: Int) -> Int:
    """Return which of NUM_LEVELS an estimate is in: eight above a half, and one for each halving below."""
    if 2 * rate >= ONE:
        return NUM_LEVELS // 2 + min(NUM_LEVELS // 2 - 1, (2 * rate - ONE) * (NUM_LEVELS // 2) // ONE)
    level = NUM_LEVELS // 2 - 1
    while level > 0 and 4 * rate < ONE:
        rate *= 2
        level -= 1
    return level


@inlined
def calibration_of(rate: Int, agreeing: Int) -> Int:
    """Return which of NUM_CALIBRATIONS an estimate belongs to, with so many other features that agree."""
    return agreeing * NUM_LEVELS + level_of(rate)


@compiled
def calibrate(rates: Rates) -> Int:
    """Bring `calibrated`, `share` and `highest` up to date and return the highest probability of all, of ONE."""
    for cell in range(NUM_SHARES):
        rates.share[cell] = factor_of(rates.share_expected[cell], rates.share_observed[cell], rates.share_start[cell])
    best = np.int64(0)
    for feature in range(NUM_FEATURES):
        rate, highest = rates.rate[feature], np.int64(0)
        for agreeing in range(MAX_AGREEING):
            cell = calibration_of(rate, agreeing)
            factor = factor_of(rates.expected[cell], rates.observed[cell], rates.start[cell])
            calibrated = min(rate * factor >> ONE_BITS, ONE)
            rates.calibrated[agreeing, feature] = calibrated
            level, share = level_of(calibrated), np.int64(0)
            for place in range(2 * NUM_PLACES):
                share = max(share, rates.share[place * NUM_LEVELS + level])
            highest = max(highest, min(calibrated * share >> ONE_BITS, np.int64(ONE)))
        rates.highest[feature] = highest
        best = max(best, highest)
    return best


@inlined
def factor_of(expected: Int, observed: Int, start: Int) -> Int:
    """Return the factor of estimates, of ONE, by what they added up to and how many came; arguments as in Rates."""
    return (((observed << ONE_BITS) + start) << ONE_BITS) // (expected + CALIBRATION_WEIGHT * ONE)


@compiled
def merge(rates: Rates, candidates: Candidates, num_rows: Int, floor: Int) -> Int:
    """Make one candidate of those with the same token, in the order in which the tokens were first collected.

    Args:
        rates: the estimates.
        candidates: `merged`, `best`, `agreeing` and `first` are written to.
        num_rows: collected rows.
        floor: tokens whose every feature has a highest probability below this, of ONE, are left out.

    Returns:
        How many merged candidates there are.
    """
    flat, merged, first = candidates.flat, candidates.merged, candidates.first
    num, in_order = 0, True
    for row in range(num_rows):
        for rank in range(K):
            feature, token = candidates.features[row, rank], candidates.tokens[row, rank]
            if rates.highest[feature] < floor or token < 0:  # most are
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
    """Write, for a merged candidate, its feature with the best estimate and where its token was first collected.

    Args:
        rates: the estimates.
        candidates: `best` and `first` are written to.
        num_rows: collected rows.
        floor: of features with equal estimates, one whose highest probability is this or more comes first.
        known: index of the merged candidate.
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


@compiled
def rank(rates: Rates, candidates: Candidates, num: Int) -> None:
    """Sort the `num` merged candidates by calibrated estimate, the best first, and write their `estimates`."""
    merged, best, agreeing, estimates = candidates.merged, candidates.best, candidates.agreeing, candidates.estimates
    for i in range(num):
        estimates[i] = estimate = rates.calibrated[agreeing[i], best[i]]
        at = i
        while at > 0 and estimates[at - 1] < estimate:
            for values in (merged, best, agreeing):
                values[at - 1], values[at] = values[at], values[at - 1]
            estimates[at - 1], estimates[at] = estimates[at], estimates[at - 1]
            at -= 1


@compiled
def share_of(estimate: Int, place: Int, is_root: bool) -> Int:
    """Return which of NUM_SHARES a candidate's factor is."""
    where = 0 if is_root else NUM_PLACES
    return (where + min(place, NUM_PLACES - 1)) * NUM_LEVELS + level_of(estimate)


@compiled
def share_out(rates: Rates, candidates: Candidates, num: Int, is_root: bool) -> None:
    """Write the `probabilities` of the `num` merged candidates of a context, and sort them, the best estimate first.

    One token comes, so what one candidate is given no other can have: each gets its part of what better ones leave.

    Args:
        rates: the estimates, calibrated.
        candidates: `merged`, `best`, `agreeing`, `estimates` and `probabilities` are written to.
        num: merged candidates.
        is_root: whether the context ends at the root.
    """
    rank(rates, candidates, num)
    left = np.int64(ONE)
    for i in range(num):
        estimate = candidates.estimates[i]
        part = min(estimate * rates.share[share_of(estimate, i, is_root)] >> ONE_BITS, ONE)
        candidates.probabilities[i] = left * part >> ONE_BITS
        left -= candidates.probabilities[i]


@compiled
def count_shares(rates: Rates, candidates: Candidates, num: Int, is_root: bool, token: Int) -> None:
    """Count the `num` merged candidates of a context, the best first, up to the one that came.

    Args:
        rates: written to.
        candidates: of the context; sorted.
        num: merged candidates.
        is_root: whether the context ends at the root.
        token: that came.
    """
    rank(rates, candidates, num)
    for i in range(num):
        estimate = candidates.estimates[i]
        cell = share_of(estimate, i, is_root)
        rates.share_expected[cell] += estimate
        if candidates.merged[i] == token:
            rates.share_observed[cell] += 1
            break


@compiled
def learn(
    drafts: DraftArrays,
    noise: Noise,
    position: Int,
    nodes: Nodes,
    root: Int,
    path: np.ndarray,
    committed: np.ndarray,
    rates: Rates,
    candidates: Candidates,
) -> None:
    """Count, for each feature of each candidate along committed tokens, whether it was the token that came.

    Args:
        drafts: the draft tables, as they were when the tree was proposed.
        noise: the noise of sampling.
        position: absolute position of the first committed token.
        nodes: the tree.
        root: index of the root.
        path: [m] int64 the node before each committed token, the root first.
        committed: [m] int64 committed tokens.
        rates: written to.
        candidates: scratch.
    """
    for i in range(len(committed)):
        num_rows = collect(drafts, noise, position + i, nodes, root, path[i], candidates)
        for row in range(num_rows):
            for rank in range(K):
                if candidates.tokens[row, rank] >= 0:
                    feature = candidates.features[row, rank]
                    rates.tried[feature] += 1
                    rates.accepted[feature] += candidates.tokens[row, rank] == committed[i]
        num_merged = merge(rates, candidates, num_rows, 0)
        for j in range(num_merged):
            rate = rates.rate[candidates.best[j]]
            calibration = calibration_of(rate, candidates.agreeing[j])
            rates.expected[calibration] += rate
            rates.observed[calibration] += candidates.merged[j] == committed[i]
        count_shares(rates, candidates, num_merged, path[i] == root, committed[i])
        for row in range(num_rows):
            for rank in range(K):
                if candidates.tokens[row, rank] >= 0:
                    estimate(rates, candidates.features[row, rank])


@compiled
def estimate(rates: Rates, feature: Int) -> None:
    """Bring the estimate of a feature up to what was counted."""
    tried, accepted = rates.tried[feature], rates.accepted[feature]
    rates.rate[feature] = (accepted * ONE + rates.prior[feature] * PRIOR_WEIGHT) // (tried + PRIOR_WEIGHT)
