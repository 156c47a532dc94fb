"""How many tokens a step is worth, and how long each replica will take: measured curves, kept up to date as steps go.

What one replica alone knows, its time, travels in the exchange as an integer and counts from the next step on, so all
replicas decide alike. Times are in nanoseconds.

Letters: T nodes in the tree, R replicas, M tokens that a replica's time is known for at most.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.compiled import compiled, with_fresh_cache
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.parallel.partition import Share, finishing_time, largest_fit, partition_by_times

# Where nothing was measured: so many tokens cost twice what one does.
ASSUMED_FREE_TOKENS = 64
ASSUMED_NANOSECONDS = 1_000_000
SCALE_ONE = 1 << 10
EQUAL_WITHIN = 15 * SCALE_ONE // 100  # replicas whose scales differ by less are taken for equal
SMOOTHING = 8  # steps
REST_AFTER = 4  # steps in a row that were worth the root alone, before drafting rests
LONGEST_REST = 32  # steps
NUM_TIMED = 4  # steps of the root alone that are timed before the first that drafts
PROBE_AFTER = 24  # steps that drafted for little, until what the root alone takes is timed again
PROBE_STEPS = 3  # that this takes: the first after larger ones is slow
LITTLE_GAIN_PERCENT = 140  # of a step that drafts, over one that does not
REACH_BITS = 40
EXPECTED_BITS = 22
RATE_BITS = 32
MAX_EXPECTED = (1 << 31) - 1  # so that the rates have room in 64 bits
LEAST_GAIN_PERCENT = 110  # of a step that drafts, over one that does not: estimates of it are that uncertain
FIRST_WANTED = 32  # nodes a replica, of a request's first tree
PRIOR_TOKENS = 4  # that promises are taken to have been kept of, before any were made
FORGETTING = 32  # steps that promises are remembered for, about
LEAST_BELIEF = 4  # promises are believed to this fraction at least
RECOVERY = 16  # times that nothing pays, until promises are believed again
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def assumed_times(num_replicas: int, num_tokens: int) -> np.ndarray:
    """[R, num_tokens + 1] curves where nothing was measured."""
    tokens = np.arange(num_tokens + 1)
    curve = ASSUMED_NANOSECONDS * (ASSUMED_FREE_TOKENS + tokens) // (ASSUMED_FREE_TOKENS + 1)
    return np.tile(curve, (num_replicas, 1))


def interpolate(tokens: Sequence[int], nanoseconds: Sequence[int], num_tokens: int) -> np.ndarray:
    """[num_tokens + 1] a curve that does not fall, through measured points; behind the last two it goes on straight."""
    # In integers, so that all replicas have the same curves to the last bit.
    known = np.maximum.accumulate(np.asarray(nanoseconds, dtype=np.int64))
    curve = np.full(num_tokens + 1, known[0], dtype=np.int64)
    for i in range(len(tokens) - 1):
        end = tokens[i + 1] if i + 2 < len(tokens) else max(tokens[i + 1], num_tokens)
        places = np.arange(tokens[i], min(end, num_tokens) + 1)
        curve[places] = known[i] + (known[i + 1] - known[i]) * (places - tokens[i]) // (tokens[i + 1] - tokens[i])
    return curve


def shared_times(times: np.ndarray, num_together: int) -> np.ndarray:
    """[R, M + 1] what a request answers for of steps in which so many, all of as many tokens, are fed together.

    Args:
        times: [R, M + 1] of a request alone.
        num_together: how many.
    """
    places = np.arange(times.shape[1]) * num_together
    known = np.minimum(places, times.shape[1] - 1)
    slopes = times[:, -1:] - times[:, -2:-1] if times.shape[1] > 1 else 0
    return np.ascontiguousarray((times[:, known] + (places - known) * slopes) // num_together)


@dataclass
class Learned:
    """What steps have shown of replicas and of estimates; carried from one request to the next of its kind.

    Attributes:
        scales: [R] how much longer each replica takes than its curve says in steps that draft, of SCALE_ONE.
        plain_scales: [R] how much longer than that, again, in steps that do not; so a machine that slows down as a
            whole does not make either look worse.
        num_plain: steps that did not.
        overheads: nanoseconds of what else a step takes: one that drafts, one that does not; 0 while unknown.
        promised: accepted tokens that the estimates promised lately, fixed point of EXPECTED_BITS.
        kept: how many there were, in the same unit.
    """

    scales: np.ndarray
    plain_scales: np.ndarray
    num_plain: int = 0
    overheads: list[int] = field(default_factory=lambda: [0, 0])
    promised: int = PRIOR_TOKENS << EXPECTED_BITS
    kept: int = PRIOR_TOKENS << EXPECTED_BITS

    @classmethod
    def nothing(cls, num_replicas: int) -> Learned:
        return cls(*(np.full(num_replicas, SCALE_ONE, dtype=np.int64) for _ in range(2)))


class _Timed(NamedTuple):
    """A step whose times are of use: the curves that it was expected to follow, [R] tokens that each replica fed,
    whether it drafted, and whether the one before did not."""

    curves: np.ndarray
    sizes: np.ndarray
    drafted: bool
    follows_plain: bool


class StepBudget:
    """Decides, before a step, how many nodes of a tree to feed, and who feeds which.

    Args:
        times: [R, M + 1] how long each replica takes for so many tokens.
        is_auto: whether to feed what pays, else whatever the tree has.
        budget: tokens that a replica feeds at most; None for no limit.
        learned: by earlier requests; kept up to date.

    Attributes:
        limit: the budget.
        num_wanted: nodes that the next tree should have at most; None for no such wish.
    """

    def __init__(self, times: np.ndarray, is_auto: bool, budget: int | None, learned: Learned | None = None):
        self._alone = self._curves = times
        self._num_together = 1
        self._is_auto = is_auto
        self.limit = budget
        self._learned = learned or Learned.nothing(len(times))
        self._one = np.full(len(times), SCALE_ONE, dtype=np.int64)
        self._times = np.empty_like(times)
        self._places = np.arange(times.shape[1])
        self._rescale()
        self._num_plain = 0  # steps in a row that were worth the root alone
        self._rest = 0
        self._promise = 0  # of the tree that is fed
        self._fitted = False  # whether the step that is under way drafts
        self._drafted = True  # whether the last step that was observed did
        self._untimed: _Timed | None = None  # a step whose times are still to come
        self._since_plain = 0  # steps that drafted for little, since the last that did not
        self.num_wanted: int | None = FIRST_WANTED * len(times) if is_auto else None

    def share(self, num_together: int) -> None:
        """From now on a step's forward pass serves so many requests: each answers for its part of the time."""
        if num_together != self._num_together:
            self._num_together = num_together
            self._curves = shared_times(self._alone, num_together)
            self._rescale()

    @property
    def is_resting(self) -> bool:
        """Whether the next step is to feed the root alone, unasked: nothing paid lately, or it is to be timed."""
        return self._rest > 0 or (self._is_auto and self._learned.num_plain < NUM_TIMED)

    def fit(self, tree: TokenTree, reach: np.ndarray) -> int:
        """How many of a tree's first nodes to feed.

        Args:
            tree: its nodes in the order of `reach`.
            reach: [T] estimated probability that a node is on the accepted path, fixed point of REACH_BITS.
        """
        num_replicas = len(self._times)
        limit = self._times.shape[1] - 1
        limit = limit if self.limit is None else min(limit, self.limit)
        most = largest_fit(tree, num_replicas, limit)
        if not self._is_auto:
            return most
        num_pending = tree.root + 1
        kept, made = self._learned.kept >> 8, max(1, self._learned.promised >> 8)
        if num_replicas == 1:
            sizes = self._places[num_pending : most + 1]
            times = self._times[0, num_pending : most + 1]
        else:
            sizes = np.array(sorted({min(most, tree.root + step * num_replicas) for step in GRID} | {num_pending}))
            sizes = sizes[sizes >= num_pending]
            times = np.array([finishing_time(tree, size, self._times, limit) for size in sizes])
        drafting, plain = self._learned.overheads
        alone = zip(self._times[:, num_pending].tolist(), self._learned.plain_scales.tolist(), strict=True)
        plain += max(time * scale // SCALE_ONE for time, scale in alone)
        best, rate, plain_rate, promised = _best_size(reach, sizes, times, kept, made, drafting, plain)
        if rate * 100 < plain_rate * LEAST_GAIN_PERCENT:
            best, promised = 0, 0
        self._num_plain = self._num_plain + 1 if best == 0 else 0
        if best == 0:  # what is not tried keeps no promise: believe it a little more each time
            self._learned.kept += max(0, self._learned.promised - self._learned.kept) // RECOVERY
        is_little = best > 0 and rate * 100 < plain_rate * LITTLE_GAIN_PERCENT
        self._since_plain = self._since_plain + 1 if is_little else 0
        if self._since_plain >= PROBE_AFTER:
            self._since_plain, self._rest = 0, PROBE_STEPS + 1
        if self._num_plain >= REST_AFTER:
            self._rest = min(1 << (self._num_plain - REST_AFTER + 1), LONGEST_REST)
        self._fitted = True
        self._promise = int(promised)
        size = int(sizes[best])
        self.num_wanted = max(FIRST_WANTED * num_replicas, 2 * size)
        return size

    def shares(self, tree: TokenTree) -> list[Share]:
        """The tree's shares, such that the last replica is done as soon as can be."""
        return partition_by_times(tree, self._times, self.limit)

    def observe(
        self,
        shares: Sequence[Share],
        forward: Sequence[int],
        overhead: Sequence[int],
        num_accepted: int,
        is_late: bool = False,
    ) -> None:
        """Learn from a step.

        Args:
            shares: [R] the step's.
            forward: [R] nanoseconds that each replica's forward pass took; 0 where it is not known.
            overhead: [R] nanoseconds of what else the step before took; 0 where it is not known.
            num_accepted: tokens that the step committed besides the bonus token.
            is_late: whether `forward` is of the step before, too.
        """
        learned = self._learned
        drafted, follows_plain = False, not self._drafted
        if self._is_auto:
            known = max(overhead)
            which = 0 if self._drafted else 1
            if known:
                before = learned.overheads[which]
                learned.overheads[which] += (known - before) // SMOOTHING if before else known
            drafted = self._drafted = self._fitted
            self._fitted = False
            if self._promise:
                learned.promised += self._promise - learned.promised // FORGETTING
                learned.kept += (num_accepted << EXPECTED_BITS) - learned.kept // FORGETTING
                learned.kept = max(learned.kept, learned.promised // LEAST_BELIEF)
            self._promise = 0
            self._rest = max(0, self._rest - 1)
        elif len(shares) == 1:
            return
        sizes = np.array([min(len(share.nodes), self._curves.shape[1] - 1) for share in shares])
        timed: _Timed | None = _Timed(self._curves, sizes, drafted, follows_plain)
        if is_late:
            timed, self._untimed = self._untimed, timed
        if timed is not None and min(forward) > 0:
            self._learn_times(timed, np.array(forward, dtype=np.int64))

    def _learn_times(self, step: _Timed, nanoseconds: np.ndarray) -> None:
        """Learn from how long each replica's forward pass took, [R]."""
        learned = self._learned
        if not self._is_auto or step.drafted:
            _follow(learned.scales, self._one, step.curves, step.sizes, nanoseconds, SMOOTHING)
            self._rescale()
        elif step.follows_plain or learned.num_plain < NUM_TIMED:
            learned.num_plain += 1
            smoothing = min(learned.num_plain, SMOOTHING)
            _follow(learned.plain_scales, learned.scales, step.curves, step.sizes, nanoseconds, smoothing)

    def _rescale(self) -> None:
        _scale(self._curves, self._learned.scales, self._times)


@functools.cache
def compile_budget() -> None:
    """Compile, or load from where it is kept, what is compiled here. Once a process."""

    def use() -> None:
        tree = TokenTree([0, 1], max_depth=3)
        tree.add_branch([2])
        budget = StepBudget(assumed_times(1, 8), True, None, Learned.nothing(1))
        budget.fit(tree, np.full(3, 1 << REACH_BITS, dtype=np.int64))
        shares = budget.shares(tree)
        for _ in range(2):
            budget.observe(shares, [1], [1], 1)

    with_fresh_cache(use)


@compiled
def _best_size(reach, sizes, times, kept, made, drafting, plain):
    """Of some sizes of a tree the one that commits the most tokens a nanosecond, the first of equals.

    Args:
        reach: [T] see `StepBudget.fit`.
        sizes: [n] numbers of a tree's first nodes, rising; the first are the pending ones alone, at least one.
        times: [n] how long a step of each takes without what else it takes,
        drafting: which is so much; and
        plain: how long one of the first takes with it.
        kept, made: of what was promised lately so much was kept.

    Returns:
        (place in sizes, its rate, the first one's, what it promises besides the bonus token): rates in tokens a
        nanosecond, fixed point of EXPECTED_BITS + RATE_BITS, promises of EXPECTED_BITS.
    """
    best, best_rate, plain_rate, best_promise = 0, np.int64(-1), np.int64(0), np.int64(0)
    promise, node = np.int64(0), sizes[0]
    for place in range(len(sizes)):
        while node < sizes[place]:
            promise += reach[node] >> (REACH_BITS - EXPECTED_BITS)
            node += 1
        expected = min((1 << EXPECTED_BITS) + promise * kept // made, MAX_EXPECTED)
        rate = (expected << RATE_BITS) // (plain if place == 0 else times[place] + drafting)
        if place == 0:
            plain_rate = rate
        if rate > best_rate:
            best, best_rate, best_promise = place, rate, promise
    return best, best_rate, plain_rate, best_promise


@compiled
def _follow(scales, others, curves, sizes, nanoseconds, smoothing):
    """Move scales, [R], towards what a step of `sizes` tokens took, [R] nanoseconds, of curves, [R, M + 1], times other
    scales, [R]."""
    for rank in range(len(scales)):
        expected = max(curves[rank, sizes[rank]], 1)
        ratio = min(nanoseconds[rank] * SCALE_ONE // expected, SCALE_ONE << 20)
        ratio = ratio * SCALE_ONE // max(others[rank], 1)
        scales[rank] += (ratio - scales[rank]) // smoothing


@compiled
def _scale(curves, scales, times):
    """Curves times scales, [R, M + 1], into `times`; scales that are about equal are taken for equal."""
    total, least, most = np.int64(0), np.int64(1) << 62, np.int64(1)
    for rank in range(len(scales)):
        scale = max(scales[rank], 1)
        total, least, most = total + scale, min(least, scale), max(most, scale)
    is_equal = most * SCALE_ONE <= least * (SCALE_ONE + EQUAL_WITHIN)
    for rank in range(len(scales)):
        scale = total // len(scales) if is_equal else max(scales[rank], 1)
        for place in range(curves.shape[1]):
            times[rank, place] = curves[rank, place] * scale // SCALE_ONE
