"""The step budget of a model that is fed chains: which path of the tree each replica follows, and how far.

A replica's state moves on over tokens that are certain: when its whole chain was accepted, or when it feeds its pending
tokens alone. Until then they are fed again in every step. What that costs beside what a chain brings decides when a
replica follows none, and catches up.

Letters: T nodes in the tree, R replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.distributed.partition.chains import heaviest_chains
from lp_runtime.distributed.partition.partition import Share, Shares
from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS, TokenTree
from lp_runtime.sizing.best_size import RATE_BITS
from lp_runtime.sizing.budget import LITTLE_GAIN_PERCENT, StepBudget
from lp_runtime.sizing.learned_costs import LearnedCosts
from lp_runtime.sizing.pass_times import FIXED_POINT_ONE
from lp_runtime.sizing.promises import EXPECTED_BITS

MIN_GAIN_PERCENT = 110  # of a step that drafts, over one that does not: estimates of it are that uncertain
MAX_REFED = 32  # pending tokens of a replica: with more it catches up, whatever that costs
CHAIN_HINT = 48  # nodes of a tree for each replica: one path of it is fed


class ChainBudget(StepBudget):
    """Decides, before a step, which path of a tree each replica feeds.

    Args:
        times: see StepBudget.
        is_auto: see StepBudget.
        budget: see StepBudget.
        learned: see StepBudget.
    """

    def __init__(self, times: np.ndarray, is_auto: bool, budget: int | None, learned: LearnedCosts | None = None):
        super().__init__(times, is_auto, budget, learned)
        num_replicas = len(times)
        self._ahead = [0] * num_replicas  # tokens that each replica's state holds beyond those that all hold
        self._rent = [0] * num_replicas  # nanoseconds that each replica has fed tokens again for, since it caught up
        self._price = [0] * num_replicas  # nanoseconds that the last step's chain of each replica has saved
        self._chains: list[np.ndarray] = []  # [R] nodes of the tree that was selected; empty where none was
        self._brought = [0] * num_replicas  # accepted tokens that each chain alone promises, fixed point
        self._must_catch_up = [False] * num_replicas
        self.tree_size_hint = CHAIN_HINT * num_replicas if is_auto else None

    @property
    def selects(self) -> bool:
        """True: a replica feeds one path of the tree."""
        return True

    def select(self, tree: TokenTree) -> np.ndarray:
        """Return the nodes of the replicas' chains and the pending tokens, [m] int64 ascending.

        Args:
            tree: what the drafter proposed.
        """
        weights = _weights(tree)
        expected = self._learned.promises.corrected(weights)
        num_refed = [tree.root + 1 - ahead for ahead in self._ahead]
        followers = sorted(
            (rank for rank, is_late in enumerate(self._must_catch_up) if not is_late), key=lambda rank: num_refed[rank]
        )
        paths = dict(zip(followers, heaviest_chains(tree, weights, len(followers)), strict=False))
        needed = np.full(len(tree), np.iinfo(np.int64).max)  # tokens that the first replica to reach a node feeds
        for rank, path in paths.items():
            needed[path] = np.minimum(needed[path], num_refed[rank] + 1 + np.arange(len(path)))
        size, gains_little = self._best_size(needed, expected, num_refed) if paths else (0, False)
        self._brought = [0] * len(num_refed)
        for rank, path in paths.items():
            path = path[: max(0, size - num_refed[rank])]
            own = path[needed[path] == num_refed[rank] + 1 + np.arange(len(path))]
            self._brought[rank] = int(expected[own].sum())
        kept = np.flatnonzero((needed <= size) | (np.arange(len(tree)) <= tree.root))
        if paths and self._is_auto:
            self._fitted(size > 0, gains_little)
        places = np.full(len(tree), -1, np.int64)
        places[kept] = np.arange(len(kept))
        nothing = np.zeros(0, np.int64)
        self._chains = [
            places[paths[rank][: max(0, size - num_refed[rank])]] if rank in paths else nothing
            for rank in range(len(num_refed))
        ]
        return kept

    def _best_size(self, needed: np.ndarray, expected: np.ndarray, num_refed: Sequence[int]) -> tuple[int, bool]:
        """Return how many tokens a replica may feed, 0 for no chains, and whether chains of so many gain little.

        Args:
            needed: [T] int64 tokens that the first replica to reach each node feeds; the largest int64 for none.
            expected: [T] int64 tokens that are expected of each node, fixed point of EXPECTED_BITS.
            num_refed: [R] pending tokens that each replica feeds.
        """
        times = self._costs.times
        limit = times.shape[1] - 1 if self.limit is None else min(self.limit, times.shape[1] - 1)
        if not self._is_auto:
            return limit, False
        fed = needed[needed <= limit]
        if not len(fed):
            return 0, False
        host, plain = self._learned.host, self._plain_step_time(min(max(num_refed), times.shape[1] - 1))
        gains = np.bincount(fed, expected[needed <= limit]).astype(np.int64).cumsum()
        nodes = np.bincount(fed).cumsum()
        slowest = times.max(axis=0)
        best, best_rate, plain_rate = 0, _rate(1 << EXPECTED_BITS, plain), _rate(1 << EXPECTED_BITS, plain)
        for size in range(int(fed.min()), len(gains)):
            host_ns = host.drafting_ns + host.per_node_ns * int(nodes[size]) // FIXED_POINT_ONE
            rate = _rate((1 << EXPECTED_BITS) + int(gains[size]), int(slowest[size]) + host_ns)
            if rate > best_rate:
                best, best_rate = size, rate
        if best_rate * 100 < plain_rate * MIN_GAIN_PERCENT:
            best = 0
        return best, best > 0 and best_rate * 100 < plain_rate * LITTLE_GAIN_PERCENT

    def shares(self, tree: TokenTree) -> Shares:
        """Return the shares of the chains that were selected, or of the pending tokens alone.

        Args:
            tree: the tree to feed, of the nodes that `select` returned.
        """
        nothing = np.zeros(0, np.int64)
        chains = self._chains or [nothing] * len(self._ahead)
        owner = np.full(len(tree), -1, np.int64)
        owner[tree.root] = 0
        for rank, chain in enumerate(chains):
            owner[chain[owner[chain] < 0]] = rank
        fed = [
            np.append(np.arange(ahead, tree.root + 1), chain) for ahead, chain in zip(self._ahead, chains, strict=True)
        ]
        owned = [np.flatnonzero(owner == rank) for rank in range(len(chains))]
        sizes, num_owned = [len(each) for each in fed], [len(each) for each in owned]
        return Shares(owner, np.concatenate(fed), np.concatenate(owned), sizes, num_owned)

    def settle(self, shares: Shares, path: Sequence[int], num_pending: int) -> int:
        """Note which replicas hold what they have fed, and return how many more tokens all of them hold.

        Args:
            shares: [R] the step's shares.
            path: the nodes that the committed tokens follow, from the root on.
            num_pending: pending tokens of the tree.
        """
        ahead = []
        for rank, share in enumerate(shares):
            is_kept = int(share.nodes[-1]) in path
            ahead.append(self._ahead[rank] + (len(share.nodes) if is_kept else 0))
            self._charge(rank, share, is_kept, num_pending)
        base = min(ahead)
        self._ahead, self._chains = [each - base for each in ahead], []
        left = [num_pending + len(path) - each for each in ahead]  # pending tokens of each replica's next step
        room = MAX_REFED if self.limit is None else min(MAX_REFED, max(1, self.limit - 1))
        self._must_catch_up = [
            num > 1 and (num > room or rent >= price)
            for num, rent, price in zip(left, self._rent, self._price, strict=True)
        ]
        return base

    def _charge(self, rank: int, share: Share, is_kept: bool, num_pending: int) -> None:
        """Add up what a replica has fed again, beside what its chain promised in this step."""
        if is_kept:
            self._rent[rank] = 0
            return
        times = self._costs.times[rank]
        most, size, num_again = len(times) - 1, len(share.nodes), num_pending - self._ahead[rank] - 1
        self._rent[rank] += int(times[min(size, most)] - times[min(size - num_again, most)])
        time = int(times[min(size, most)])
        self._price[rank] = time * self._brought[rank] // ((1 << EXPECTED_BITS) + sum(self._brought))


def _rate(expected: int, nanoseconds: int) -> int:
    """Return tokens a nanosecond, fixed point of EXPECTED_BITS + RATE_BITS.

    Args:
        expected: tokens, fixed point of EXPECTED_BITS.
        nanoseconds: > 0.
    """
    return (expected << RATE_BITS) // max(1, nanoseconds)


def _weights(tree: TokenTree) -> np.ndarray:
    """Return [T] int64 path probabilities of a tree's nodes, 0 up to the root; halves by depth where nobody knows."""
    if tree.path_probabilities is not None:
        weights = tree.path_probabilities.copy()
    else:
        weights = np.int64(1) << (PATH_PROBABILITY_BITS - np.clip(tree.arrays()[2], 1, PATH_PROBABILITY_BITS))
    weights[: tree.root + 1] = 0
    return weights
