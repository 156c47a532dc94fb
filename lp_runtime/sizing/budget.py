"""The step budget: how many nodes of a tree a step feeds, and which replica feeds which.

A replica's times, which it alone knows, travel in the exchange as integers and count from the next step on, so all
replicas decide alike. Times are in nanoseconds.

Letters: T nodes in the tree, R replicas, M tokens that a replica's time is known for at most.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from lp_runtime.distributed.partition import Shares, largest_fit, partition_by_times
from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS, TokenTree
from lp_runtime.sizing.cost_model import FIXED_POINT_ONE, CostModel, finishing_times
from lp_runtime.sizing.drafting_state import DraftingSchedule
from lp_runtime.sizing.learned_costs import LearnedCosts, TimedStep
from lp_runtime.sizing.promises import EXPECTED_BITS, correct
from lp_runtime.utils.jit import compiled, with_fresh_cache

RATE_BITS = 32  # fixed point of tokens a nanosecond, beside EXPECTED_BITS
MAX_EXPECTED = (1 << 31) - 1  # so that rates fit into 64 bits
LITTLE_GAIN_PERCENT = 140  # below this, a change in the time of a step that does not draft may turn the decision
MIN_TREE_SIZE_HINT = 64  # nodes for each replica: less is grown in no time
# Tokens that a node is worth at least. What the model says behind a guess that was wrong goes into the draft tables and
# saves steps later: the first nodes of a step are worth that. Of the others, low estimates are too rough to save by.
NUM_TEACHING = 24
TEACHING_WORTH = (1 << EXPECTED_BITS) // 30
MIN_WORTH = (1 << EXPECTED_BITS) // 500


class StepBudget:
    """Decides, before a step, how many nodes of a tree to feed, and which replica feeds which.

    Args:
        times: [R, M + 1] int64 nanoseconds that each replica takes for 0, 1, 2 ... tokens.
        is_auto: Whether to feed as many nodes as pay; else as many as the tree has and the budget allows.
        budget: Largest number of tokens that a replica feeds; None for no limit.
        learned: What earlier requests have shown, kept up to date; None for nothing.

    Attributes:
        limit: Largest number of tokens that a replica feeds; None for no limit.
        tree_size_hint: Largest number of nodes that the next tree should have; None for any number.
    """

    def __init__(self, times: np.ndarray, is_auto: bool, budget: int | None, learned: LearnedCosts | None = None):
        self._is_auto = is_auto
        self.limit = budget
        self._learned = learned or LearnedCosts.initial(len(times))
        self._costs = CostModel(times, self._learned.scales)
        self._schedule = DraftingSchedule(self._learned)
        self._finishing = np.zeros(0, np.int64)  # memory of `step_times`
        self._cut: tuple[TokenTree, Shares] | None = None  # a tree that was fitted, and its shares then
        self._num_guessed = 0  # nodes below the root in the last step that was observed
        self._untimed: TimedStep | None = None  # a step whose times are still to come
        self.tree_size_hint: int | None = MIN_TREE_SIZE_HINT * len(times) if is_auto else None

    def set_batch_size(self, batch_size: int) -> None:
        """Set how many requests share a forward pass from now on; each answers for its part of the time.

        Args:
            batch_size: Number of requests, >= 1.
        """
        self._costs.set_batch_size(batch_size, self._learned.scales)

    @property
    def is_resting(self) -> bool:
        """Whether the next step feeds the root alone, without asking the drafter: see `DraftingState`."""
        return self._is_auto and self._schedule.is_resting

    def fit(self, tree: TokenTree, path_probabilities: np.ndarray) -> int:
        """Return how many of a tree's first nodes to feed.

        Args:
            tree: The drafter's tree, its nodes in the order of `path_probabilities`.
            path_probabilities: [T] int64 estimated probability that a node is on the accepted path, fixed point of
                PATH_PROBABILITY_BITS, descending.
        """
        times = self._costs.times
        num_replicas, max_tokens = times.shape[0], times.shape[1] - 1
        limit = max_tokens if self.limit is None else min(max_tokens, self.limit)
        if not self._is_auto:
            return largest_fit(tree, num_replicas, limit)
        num_pending = tree.root + 1
        promises = self._learned.promises
        size, rate, plain_rate = _best_size(
            path_probabilities,
            num_pending,
            len(tree),
            self.step_times(num_pending, len(tree), limit),
            promises.kept,
            promises.promised,
            self._plain_step_time(num_pending),
        )
        if num_replicas > 1 and size > num_pending:
            shares = partition_by_times(tree, times, self.limit, size)
            self._cut = tree, shares
            if max(shares.sizes) > limit:
                size = largest_fit(tree, num_replicas, limit, size)
        pays = size > num_pending
        self._fitted(pays, pays and rate * 100 < plain_rate * LITTLE_GAIN_PERCENT)
        self.tree_size_hint = max(MIN_TREE_SIZE_HINT * num_replicas, 4 * size // 3)
        return int(size)

    def _fitted(self, pays: bool, gains_little: bool) -> None:
        """Note what the tree of the step under way is worth.

        Args:
            pays: Whether any nodes but the pending tokens are fed.
            gains_little: Whether they are fed for a small gain.
        """
        if not pays:
            self._learned.promises.restore()
        self._schedule.tree_fitted(pays, gains_little)

    def _plain_step_time(self, num_pending: int) -> int:
        """Return the nanoseconds of a step that does not draft, host included.

        Args:
            num_pending: Pending tokens, >= 1.
        """
        learned = self._learned
        times = zip(self._costs.times[:, num_pending].tolist(), learned.plain_scales.tolist(), strict=True)
        return learned.host.plain_ns + max(time * scale // FIXED_POINT_ONE for time, scale in times)

    def step_times(self, num_pending: int, num_nodes: int, limit: int) -> np.ndarray:
        """Return how long steps take that draft and feed the pending tokens and 0, 1, 2 ... nodes more, host included.

        Args:
            num_pending: Pending tokens, >= 1.
            num_nodes: Nodes of the tree, T.
            limit: Largest number of tokens that a replica feeds.

        Returns:
            [n] int64 nanoseconds, up to T nodes or as many as the replicas may feed; valid until the next call.
        """
        times, host = self._costs.times, self._learned.host
        num_replicas = len(times)
        max_nodes = min(num_pending + num_replicas * max(0, limit - num_pending), num_nodes)
        size = max(1, max_nodes - num_pending + 1)
        if len(self._finishing) < size:
            self._finishing = np.zeros(2 * size, np.int64)
        finishing = self._finishing[:size]
        fed_per_node = self._learned.fed_per_node if num_replicas > 1 else FIXED_POINT_ONE
        finishing_times(times, num_pending, limit, fed_per_node, host.drafting_ns, host.per_node_ns, finishing)
        return finishing

    def shares(self, tree: TokenTree) -> Shares:
        """Return the tree's shares, with which the last replica finishes as soon as the partition can make it.

        Args:
            tree: The tree to feed, cut to what `fit` returned.
        """
        cut, self._cut = self._cut, None
        if cut is not None and cut[0] is tree and len(cut[1].owner) == len(tree):
            return cut[1]
        return partition_by_times(tree, self._costs.times, self.limit)

    def observe(
        self,
        tree: TokenTree,
        shares: Shares,
        forward: Sequence[int],
        overhead: Sequence[int],
        accepted: Sequence[int],
        is_late: bool = False,
    ) -> None:
        """Learn from a step.

        Args:
            tree: The tree that was fed.
            shares: [R] the step's shares.
            forward: [R] nanoseconds that each replica's forward pass took; 0 where unknown.
            overhead: [R] nanoseconds that the step before took beside its forward pass; 0 where unknown.
            accepted: Nodes of the tree whose tokens the step has committed, the root excluded.
            is_late: Whether `forward`, too, is of the step before.
        """
        is_plain = follows_plain = False
        if self._is_auto:
            follows_plain = not self._schedule.drafted
            self._observe_overhead(max(overhead))
            self._schedule.end_step()
            is_plain = not self._schedule.drafted
            if tree.path_probabilities is not None:
                self._learned.promises.observe(tree.path_probabilities, tree.root + 1, accepted)
            self._num_guessed = sum(shares.num_owned) - 1
            self._learned.observe_shares(shares, self._num_guessed)
        elif len(shares) == 1:
            return
        measured = self._costs.measured
        max_tokens = measured.shape[1] - 1
        sizes = np.array([min(size, max_tokens) for size in shares.sizes])
        timed: TimedStep | None = TimedStep(measured, sizes, is_plain, follows_plain)
        if is_late:
            timed, self._untimed = self._untimed, timed
        if timed is not None and min(forward) > 0:
            self._learned.observe_times(timed, np.array(forward, dtype=np.int64))
            if not timed.is_plain:
                self._costs.rescale(self._learned.scales)

    def _observe_overhead(self, nanoseconds: int) -> None:
        """Learn from the host time of the step before the one that is being observed.

        Args:
            nanoseconds: Host time; 0 where unknown.
        """
        if nanoseconds and self._schedule.drafted:
            self._learned.host.observe(self._num_guessed, nanoseconds)
        elif nanoseconds:
            self._learned.host.observe_plain(nanoseconds)


@functools.cache
def compile_budget() -> None:
    """Compile the step budget's Numba code, or load it from the cache on disk; once a process."""

    def use() -> None:
        tree = TokenTree([0, 1], max_depth=3)
        tree.add_branch([2])
        learned, certain = LearnedCosts.initial(1), np.full(3, 1 << PATH_PROBABILITY_BITS, dtype=np.int64)
        budget = StepBudget(np.full((1, 9), 1000), True, None, learned)
        budget.fit(tree, certain)
        learned.promises.corrected(certain)
        learned.promises.observe(certain, tree.root + 1, [2])
        shares = budget.shares(tree)
        for _ in range(2):
            budget.observe(tree, shares, [1], [1], [2])

    with_fresh_cache(use)


@compiled
def _best_size(path_probabilities, num_pending, num_nodes, times, kept, promised, plain_time):
    """Return how many of the tree's first nodes maximise tokens per nanosecond; ties go to fewer.

    Tokens are the expected committed ones, and no node is worth less than TEACHING_WORTH or MIN_WORTH.

    Args:
        path_probabilities: [T] see `StepBudget.fit`.
        num_pending: Smallest result, >= 1.
        num_nodes: Largest result, T.
        times: [n] nanoseconds of a step that drafts and feeds the pending tokens and 0, 1, 2 ... nodes more.
        kept: [L] see Promises.
        promised: [L] see Promises.
        plain_time: Nanoseconds of a step that does not draft.

    Returns:
        (number of nodes, its rate, the rate of a step that does not draft). Rates are in tokens a nanosecond, fixed
        point of EXPECTED_BITS + RATE_BITS.
    """
    plain_rate = (np.int64(1) << EXPECTED_BITS + RATE_BITS) // plain_time
    best, best_rate, expected = num_pending, plain_rate, np.int64(1) << EXPECTED_BITS
    for node in range(num_pending, min(num_nodes, num_pending + len(times) - 1)):
        least = TEACHING_WORTH if node < num_pending + NUM_TEACHING else MIN_WORTH
        expected = min(expected + max(least, correct(path_probabilities[node], kept, promised)), MAX_EXPECTED)
        rate = (expected << RATE_BITS) // times[node + 1 - num_pending]
        if rate > best_rate:
            best, best_rate = node + 1, rate
    return best, best_rate, plain_rate
