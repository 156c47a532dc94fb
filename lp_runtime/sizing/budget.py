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

from lp_runtime.distributed.partition import Shares, largest_fit, partition_by_times
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.sizing.cost_model import UNIT, finishing_times, shared_times
from lp_runtime.sizing.host_cost import HostCost
from lp_runtime.utils.jit import compiled, with_fresh_cache

EQUAL_WITHIN = 15 * UNIT // 100  # replicas whose scales differ by less are taken for equal
SMOOTHING = 8  # steps
REST_AFTER = 4  # steps in a row that were worth the root alone, before drafting rests
LONGEST_REST = 32  # steps
NUM_TIMED = 4  # steps of the root alone that are timed before the first that drafts
PROBE_AFTER = 24  # steps that drafted for little, until what the root alone takes is timed again
PROBE_STEPS = 3  # that this takes: the first after larger ones is slow
LITTLE_GAIN_PERCENT = 140  # of a step that drafts, over one that does not
PATH_PROBABILITY_BITS = 40
EXPECTED_BITS = 22
RATE_BITS = 32
MAX_EXPECTED = (1 << 31) - 1  # so that the rates have room in 64 bits
LEAST_GAIN_PERCENT = 110  # of a step that drafts, over one that does not: estimates of it are that uncertain
FIRST_WANTED = 32  # nodes a replica, of a request's first tree
ASSUMED_REPEATED = 9 * UNIT // 8  # tokens that replicas feed for each node of a tree, where nothing is known
PRIOR_TOKENS = 4  # that promises are taken to have been kept of, before any were made
FORGETTING = 32  # steps that promises are remembered for, about
LEAST_BELIEF = 4  # promises are believed to this fraction at least
RECOVERY = 16  # times that nothing pays, until promises are believed again


@dataclass
class LearnedCosts:
    """What steps have shown of replicas and of estimates; carried from one request to the next of its kind.

    Attributes:
        scales: [R] how much longer each replica takes than its curve says in steps that draft, of UNIT.
        plain_scales: [R] how much longer than that, again, in steps that do not; so a machine that slows down as a
            whole does not make either look worse.
        num_plain: steps that did not.
        host: what else a step takes.
        repeated: tokens that all replicas together feed for each node below the root, of UNIT: several feed the
            same.
        promised: accepted tokens that the estimates promised lately, fixed point of EXPECTED_BITS.
        kept: how many there were, in the same unit.
    """

    scales: np.ndarray
    plain_scales: np.ndarray
    num_plain: int = 0
    host: HostCost = field(default_factory=HostCost)
    repeated: int = ASSUMED_REPEATED
    promised: int = PRIOR_TOKENS << EXPECTED_BITS
    kept: int = PRIOR_TOKENS << EXPECTED_BITS

    @classmethod
    def nothing(cls, num_replicas: int) -> LearnedCosts:
        return cls(*(np.full(num_replicas, UNIT, dtype=np.int64) for _ in range(2)))


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
        tree_size_hint: nodes that the next tree should have at most; None for no such wish.
    """

    def __init__(self, times: np.ndarray, is_auto: bool, budget: int | None, learned: LearnedCosts | None = None):
        self._alone = self._curves = times
        self._num_together = 1
        self._is_auto = is_auto
        self.limit = budget
        self._learned = learned or LearnedCosts.nothing(len(times))
        self._one = np.full(len(times), UNIT, dtype=np.int64)
        self._times = np.empty_like(times)
        self._finishing = np.zeros(0, np.int64)
        self._cut: tuple[TokenTree | None, Shares | None] = None, None  # a tree that was fitted, and its shares then
        self._rescale()
        self._num_plain = 0  # steps in a row that were worth the root alone
        self._rest = 0
        self._promise = 0  # of the tree that is fed
        self._fitted = False  # whether the step that is under way drafts
        self._drafted = True  # whether the last step that was observed did
        self._num_guessed = 0  # nodes below its root
        self._untimed: _Timed | None = None  # a step whose times are still to come
        self._since_plain = 0  # steps that drafted for little, since the last that did not
        self.tree_size_hint: int | None = FIRST_WANTED * len(times) if is_auto else None

    def share(self, batch_size: int) -> None:
        """From now on a step's forward pass serves so many requests: each answers for its part of the time."""
        if batch_size != self._num_together:
            self._num_together = batch_size
            self._curves = shared_times(self._alone, batch_size)
            self._rescale()

    @property
    def is_resting(self) -> bool:
        """Whether the next step is to feed the root alone, unasked: nothing paid lately, or it is to be timed."""
        return self._rest > 0 or (self._is_auto and self._learned.num_plain < NUM_TIMED)

    def fit(self, tree: TokenTree, path_probabilities: np.ndarray) -> int:
        """How many of a tree's first nodes to feed.

        Args:
            tree: its nodes in the order of `path_probabilities`.
            path_probabilities: [T] estimated probability that a node is on the accepted path, fixed point of PATH_PROBABILITY_BITS.
        """
        num_replicas, num_known = self._times.shape[0], self._times.shape[1] - 1
        limit = num_known if self.limit is None else min(num_known, self.limit)
        if not self._is_auto:
            return largest_fit(tree, num_replicas, limit)
        learned, num_pending = self._learned, tree.root + 1
        kept, made = learned.kept >> 8, max(1, learned.promised >> 8)
        times = self._times_of(num_pending, len(tree), limit)
        alone = zip(self._times[:, num_pending].tolist(), learned.plain_scales.tolist(), strict=True)
        plain = learned.host.plain + max(time * scale // UNIT for time, scale in alone)
        size, rate, plain_rate, promised = _best_size(
            path_probabilities, num_pending, len(tree), times, kept, made, plain
        )
        if rate * 100 < plain_rate * LEAST_GAIN_PERCENT:
            size, promised = num_pending, 0
        elif num_replicas > 1:
            self._cut = tree, partition_by_times(tree, self._times, self.limit, size)
            if max(self._cut[1].sizes) > limit:
                size = largest_fit(tree, num_replicas, limit, size)
                promised = path_probabilities[num_pending:size].sum() >> (PATH_PROBABILITY_BITS - EXPECTED_BITS)
        guesses = size > num_pending
        self._num_plain = 0 if guesses else self._num_plain + 1
        if not guesses:  # what is not tried keeps no promise: believe it a little more each time
            learned.kept += max(0, learned.promised - learned.kept) // RECOVERY
        is_little = guesses and rate * 100 < plain_rate * LITTLE_GAIN_PERCENT
        self._since_plain = self._since_plain + 1 if is_little else 0
        if self._since_plain >= PROBE_AFTER:
            self._since_plain, self._rest = 0, PROBE_STEPS + 1
        if self._num_plain >= REST_AFTER:
            self._rest = min(1 << (self._num_plain - REST_AFTER + 1), LONGEST_REST)
        self._fitted = True
        self._promise = int(promised)
        self.tree_size_hint = max(FIRST_WANTED * num_replicas, 4 * size // 3)
        return int(size)

    def _times_of(self, num_pending: int, num_nodes: int, limit: int) -> np.ndarray:
        """[n] how long steps take that draft: of the pending tokens alone, of those and one node, and so on, up to
        what a tree has, as far as replicas may feed them."""
        num_replicas, learned = len(self._times), self._learned
        most = min(num_pending + num_replicas * max(0, limit - num_pending), num_nodes)
        num = max(1, most - num_pending + 1)
        if len(self._finishing) < num:
            self._finishing = np.zeros(2 * num, np.int64)
        times = self._finishing[:num]
        host = learned.host
        repeated = learned.repeated if num_replicas > 1 else UNIT
        finishing_times(self._times, num_pending, limit, repeated, host.drafting, host.per_node, times)
        return times

    def shares(self, tree: TokenTree) -> Shares:
        """The tree's shares, such that the last replica is done as soon as can be."""
        fitted, shares = self._cut
        self._cut = None, None
        if shares is not None and fitted is tree and len(shares.owner) == len(tree):
            return shares
        return partition_by_times(tree, self._times, self.limit)

    def observe(
        self,
        shares: Shares,
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
            if known and self._drafted:
                learned.host.observe(self._num_guessed, known)
            elif known:
                learned.host.observe_plain(known)
            drafted = self._drafted = self._fitted
            self._fitted = False
            if self._promise:
                learned.promised += self._promise - learned.promised // FORGETTING
                learned.kept += (num_accepted << EXPECTED_BITS) - learned.kept // FORGETTING
                learned.kept = max(learned.kept, learned.promised // LEAST_BELIEF)
            self._promise = 0
            self._rest = max(0, self._rest - 1)
            self._count(shares)
        elif len(shares) == 1:
            return
        most = self._curves.shape[1] - 1
        sizes = np.array([min(size, most) for size in shares.sizes])
        timed: _Timed | None = _Timed(self._curves, sizes, drafted, follows_plain)
        if is_late:
            timed, self._untimed = self._untimed, timed
        if timed is not None and min(forward) > 0:
            self._learn_times(timed, np.array(forward, dtype=np.int64))

    def _count(self, shares: Shares) -> None:
        """How many nodes a step guessed, and how many tokens replicas fed for each."""
        num_owned, num_replicas = sum(shares.num_owned), len(shares)
        self._num_guessed = num_owned - 1
        if num_replicas > 1 and self._num_guessed >= num_replicas:
            num_pending = len(shares.owner) - num_owned + 1
            num_fed = sum(shares.sizes) - num_replicas * num_pending
            repeated = num_fed * UNIT // self._num_guessed
            self._learned.repeated += (repeated - self._learned.repeated) // SMOOTHING

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
        budget = StepBudget(np.full((1, 9), 1000), True, None, LearnedCosts.nothing(1))
        budget.fit(tree, np.full(3, 1 << PATH_PROBABILITY_BITS, dtype=np.int64))
        shares = budget.shares(tree)
        for _ in range(2):
            budget.observe(shares, [1], [1], 1)

    with_fresh_cache(use)


@compiled
def _best_size(path_probabilities, num_pending, num_nodes, times, kept, made, plain):
    """Of a tree's first nodes as many as commit the most tokens a nanosecond, the fewest of equals.

    Args:
        path_probabilities: [T] see `StepBudget.fit`.
        num_pending: nodes at least, >= 1.
        num_nodes: at most, T.
        times: [n] how long a step takes that drafts, of the first nodes: num_pending of them, one more, and so on; and
        plain: one that does not.
        kept, made: of what was promised lately so much was kept.

    Returns:
        (nodes, the rate, that of a step that does not draft, promise): rates in tokens a nanosecond, fixed point of
        EXPECTED_BITS + RATE_BITS; what the nodes promise besides the bonus token, of EXPECTED_BITS.
    """
    plain_rate = (np.int64(1) << EXPECTED_BITS + RATE_BITS) // plain
    best, best_rate, best_promise, promise = num_pending, plain_rate, np.int64(0), np.int64(0)
    for node in range(num_pending, min(num_nodes, num_pending + len(times) - 1)):
        promise += path_probabilities[node] >> (PATH_PROBABILITY_BITS - EXPECTED_BITS)
        expected = min((1 << EXPECTED_BITS) + promise * kept // made, MAX_EXPECTED)
        rate = (expected << RATE_BITS) // times[node + 1 - num_pending]
        if rate > best_rate:
            best, best_rate, best_promise = node + 1, rate, promise
    return best, best_rate, plain_rate, best_promise


@compiled
def _follow(scales, others, curves, sizes, nanoseconds, smoothing):
    """Move scales, [R], towards what a step of `sizes` tokens took, [R] nanoseconds, of curves, [R, M + 1], times other
    scales, [R]."""
    for rank in range(len(scales)):
        expected = max(curves[rank, sizes[rank]], 1)
        ratio = min(nanoseconds[rank] * UNIT // expected, UNIT << 20)
        ratio = ratio * UNIT // max(others[rank], 1)
        scales[rank] += (ratio - scales[rank]) // smoothing


@compiled
def _scale(curves, scales, times):
    """Curves times scales, [R, M + 1], into `times`; scales that are about equal are taken for equal."""
    total, least, most = np.int64(0), np.int64(1) << 62, np.int64(1)
    for rank in range(len(scales)):
        scale = max(scales[rank], 1)
        total, least, most = total + scale, min(least, scale), max(most, scale)
    is_equal = most * UNIT <= least * (UNIT + EQUAL_WITHIN)
    for rank in range(len(scales)):
        scale = total // len(scales) if is_equal else max(scales[rank], 1)
        for place in range(curves.shape[1]):
            times[rank, place] = curves[rank, place] * scale // UNIT
