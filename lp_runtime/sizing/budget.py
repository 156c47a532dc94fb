"""The step budget: how many nodes of a tree a step feeds, and which replica feeds which.

Each replica alone knows its own times. They travel in the exchange as integers and take effect in the next step, so all
replicas decide equally. Times are in nanoseconds.

Letters: T nodes in the tree, R replicas, M tokens of the largest step with a known time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.distributed.partition.partition import Shares, partition_by_times, select_within
from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS, TokenTree
from lp_runtime.sizing.best_size import best_capacity, best_size
from lp_runtime.sizing.cost_model import CostModel
from lp_runtime.sizing.drafting_schedule import DraftingSchedule
from lp_runtime.sizing.learned_costs import LearnedCosts
from lp_runtime.utils.jit import compiles

MIN_TREE_SIZE_HINT = 64  # nodes; smaller trees take hardly any time to grow


class StepBudget:
    """Decides before each step how many nodes of the tree to feed, and which replica feeds which.

    Args:
        times: [R, M + 1] int64 nanoseconds that each replica takes for 0, 1, 2 ... tokens.
        is_auto: whether to feed only as many nodes as pay off; else all nodes that the budget allows.
        limit: largest number of tokens that a replica feeds, >= 1.
        learned: costs learned from earlier requests, updated in place; None to start from defaults.
        times_are_late: whether a pass's duration is known one step later, as on a GPU. Equal on all replicas.

    Attributes:
        tree_size_hint: largest useful number of nodes of the next tree; None for any number.
    """

    def __init__(
        self,
        times: np.ndarray,
        is_auto: bool,
        limit: int,
        learned: LearnedCosts | None = None,
        times_are_late: bool = False,
    ):
        self._is_auto, self.times_are_late = is_auto, times_are_late
        self.limit = limit
        self._learned = learned or LearnedCosts(len(times))
        self._costs = CostModel(times, self._learned.passes)
        self._schedule = DraftingSchedule(self._learned)
        self._selected: Shares | None = None  # of the nodes that `select` has chosen for the current step
        self._measured = times  # [R, M + 1] measured times of the step that ended last; its batch may be another by now
        self._num_guessed = 0  # nodes below the root in the last step that was observed
        # [R, M + 1] measured times and [R] sizes of the last step, if its times arrive late.
        self._untimed: tuple[np.ndarray, np.ndarray] | None = None
        self.tree_size_hint: int | None = MIN_TREE_SIZE_HINT * len(times) if is_auto else None

    def set_batch_size(self, batch_size: int) -> None:
        """Set the number of requests, >= 1, that share a pass; this one is charged its part of the time."""
        self._costs.set_batch_size(batch_size)

    @property
    def is_resting(self) -> bool:
        """Whether the next step feeds the root alone, without calling the drafter; see `DraftingSchedule`."""
        return self._is_auto and self._schedule.is_resting

    def choose(self, tree: TokenTree) -> int | np.ndarray:
        """Return how many of a tree's first nodes to feed, or the ascending indices of the nodes to feed."""
        probabilities = tree.path_probabilities
        if len(self._costs.times) == 1:
            return len(tree) if probabilities is None else self.fit(tree, probabilities)
        if probabilities is None and len(tree) <= self._max_tokens:
            return len(tree)  # one replica could feed all of it
        return self.select(tree)  # a tree cannot always be divided evenly among replicas

    def fit(self, tree: TokenTree, path_probabilities: np.ndarray) -> int:
        """Return how many of a tree's first nodes a single replica feeds.

        The tree's nodes are in the order of `path_probabilities`, [T] int64: each node's estimated probability of being
        on the accepted path, fixed point of PATH_PROBABILITY_BITS, descending.
        """
        times, num_pending, limit = self._costs.times[0], tree.root + 1, self._max_tokens
        if not self._is_auto:
            return min(len(tree), max(limit, num_pending))
        acceptance, host = self._learned.acceptance, self._learned.host
        size, rate, plain_rate = best_size(
            path_probabilities,
            num_pending,
            times[: limit + 1],
            acceptance.kept,
            acceptance.drafted,
            self._plain_step_time(num_pending),
            host.drafting_ns,
            host.per_node_ns,
        )
        if not self._tree_fitted(rate, plain_rate):
            size = num_pending
        self.tree_size_hint = max(MIN_TREE_SIZE_HINT, 4 * size // 3)
        return int(size)

    def select(self, tree: TokenTree) -> np.ndarray:
        """Return the nodes that several replicas feed, [m] int64 ascending, including the pending tokens.

        Nodes that fit on no replica are left out. That is the end of a long chain, not necessarily the least likely
        nodes.
        """
        times, num_pending, limit = self._costs.times, tree.root + 1, self._max_tokens
        capacity = np.full(len(times), max(0, limit - num_pending))
        if self._is_auto:
            assert tree.path_probabilities is not None
            acceptance, host = self._learned.acceptance, self._learned.host
            capacity, rate, plain_rate = best_capacity(
                tree.arrays()[1],
                tree.path_probabilities,
                tree.root,
                times,
                limit,
                acceptance.kept,
                acceptance.drafted,
                self._plain_step_time(num_pending),
                host.drafting_ns,
                host.per_node_ns,
            )
            if not self._tree_fitted(rate, plain_rate):
                capacity[:] = 0
        nodes, shares = select_within(tree, capacity)
        if len(nodes) == len(tree):  # otherwise the replicas are full
            balanced = partition_by_times(tree, times, self.limit)
            shares = balanced if (np.array(balanced.sizes) <= capacity + num_pending).all() else shares
        self._selected = shares
        if self._is_auto:
            self.tree_size_hint = MIN_TREE_SIZE_HINT + 16 * len(nodes) // 15  # a few are left out
        return nodes

    @property
    def _max_tokens(self) -> int:
        return min(self.limit, self._costs.times.shape[1] - 1)

    def _tree_fitted(self, rate: int, plain_rate: int, min_gain_percent: int = 100) -> bool:
        """Record the rate of the current step's tree, and that of a step that does not draft.

        Returns whether to feed the tree.
        """
        pays = rate * 100 > plain_rate * min_gain_percent
        if not pays:
            self._learned.acceptance.restore()
        return self._schedule.tree_fitted(pays)

    def _plain_step_time(self, num_pending: int) -> int:
        """Return the duration of a step that does not draft, host time included, in nanoseconds."""
        return self._learned.host.plain_ns + int(self._costs.times[:, num_pending].max())

    def shares(self, tree: TokenTree) -> Shares:
        """Return the shares of the tree that was chosen last, or of a tree without guesses."""
        selected, self._selected = self._selected, None
        return partition_by_times(tree, self._costs.times, self.limit) if selected is None else selected

    def settle(self, shares: Shares, path: list[int], num_pending: int) -> int:
        """Return how many tokens of a step stay in the caches of all replicas.

        `path` has the nodes that the committed tokens follow, from the root on. The pending tokens include the root.
        """
        return num_pending - 1 + shares.num_fed_by_all(path)

    def end_step(self) -> None:
        """Record the end of a step. `observe` follows, at the latest before the next step ends."""
        self._measured = self._costs.measured
        self._schedule.end_step()

    def observe(
        self,
        tree: TokenTree,
        shares: Shares,
        forward: Sequence[int],
        overhead: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """Learn from the step that ended last.

        Args:
            forward: [R] nanoseconds of each replica's forward pass, of the step before if times are late; 0 if unknown.
            overhead: [R] nanoseconds that the previous step took outside its forward pass; 0 if unknown.
            accepted: nodes of the tree whose tokens were committed, without the root.
        """
        is_plain = False
        if self._is_auto:
            host_ns = max(overhead)
            if host_ns and not self._schedule.drafted_before:
                self._learned.host.observe_plain(host_ns)
            elif host_ns:
                self._learned.host.observe(self._num_guessed, host_ns)
            is_plain = not self._schedule.drafted
            if tree.path_probabilities is not None:
                self._learned.acceptance.observe(tree.path_probabilities, tree.root + 1, accepted)
            self._num_guessed = sum(shares.num_owned) - 1
        elif len(shares) == 1:
            return
        measured = self._measured
        max_tokens = measured.shape[1] - 1
        sizes = np.array([min(size, max_tokens) for size in shares.sizes])
        timed = None if is_plain else (measured, sizes)  # no line can be fitted to steps of one size
        if self.times_are_late:
            timed, self._untimed = self._untimed, timed
        if timed is not None and min(forward) > 0:
            self._learned.passes.observe(*timed, np.array(forward, dtype=np.int64))
            self._costs.update()


@compiles
def compile_budget() -> None:
    """Compile the step budget of a lone replica, or load its code from disk."""
    tree = _smallest_tree()
    certain = tree.path_probabilities
    assert certain is not None
    learned = LearnedCosts(1)
    budget = StepBudget(np.full((1, 9), 1000), True, 8, learned)
    budget.fit(tree, certain)
    learned.acceptance.corrected(certain)
    learned.acceptance.observe(certain, tree.root + 1, [2])
    shares = budget.shares(tree)
    for _ in range(2):
        budget.end_step()
        budget.observe(tree, shares, [1], [1], [2])


@compiles
def compile_capacity() -> None:
    """Compile the parts of the step budget that only several replicas need, or load them from disk."""
    StepBudget(np.full((2, 9), 1000), True, 8).select(_smallest_tree())


def _smallest_tree() -> TokenTree:
    """Return a tree of two pending tokens and one certain guess."""
    tree = TokenTree([0, 1], max_depth=3)
    tree.add_branch([2])
    tree.path_probabilities = np.full(3, 1 << PATH_PROBABILITY_BITS, dtype=np.int64)
    return tree
