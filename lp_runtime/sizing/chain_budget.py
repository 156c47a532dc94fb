"""The step budget of a model fed with chains: which path of the tree each replica feeds, and how far.

A replica's state only advances over certain tokens: when its whole chain was accepted, or when it feeds its pending
tokens alone. Until then it feeds its pending tokens again in every step. Once that has cost more than the replica's
chain saves, the replica skips a chain and catches up.

Letters: T nodes in the tree, R replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lp_runtime.distributed.partition.chains import heaviest_chains
from lp_runtime.distributed.partition.partition import Share, Shares
from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS, TokenTree
from lp_runtime.sizing.acceptance import EXPECTED_BITS
from lp_runtime.sizing.best_size import RATE_BITS
from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.pass_times import FIXED_POINT_ONE

MIN_GAIN_PERCENT = 110  # draft only if a step's rate is 10% higher than without: the estimate is that uncertain
MAX_REFED = 32  # a replica with more pending tokens catches up, whatever the cost
CHAIN_HINT = 48  # tree nodes to propose per replica, which feeds only one path


class ChainBudget(StepBudget):
    """Decides before each step which path of the tree each replica feeds."""

    def __init__(self, times: np.ndarray, is_auto: bool, *others: Any):  # as StepBudget
        super().__init__(times, is_auto, *others)
        num_replicas = len(times)
        self._ahead = [0] * num_replicas  # tokens in each replica's state beyond those in all replicas' states
        self._refed_ns = [0] * num_replicas  # time each replica has spent feeding tokens again since it caught up
        self._saved_ns = [0] * num_replicas  # time that each replica's last chain is expected to have saved
        self._chains: list[np.ndarray] = []  # [R] each replica's nodes of the selected tree; empty if none was selected
        self._expected = [0] * num_replicas  # expected accepted tokens of nodes only this chain feeds, fixed point
        self._must_catch_up = [False] * num_replicas
        self.tree_size_hint = CHAIN_HINT * num_replicas if is_auto else None

    def choose(self, tree: TokenTree) -> np.ndarray:
        """Return the nodes of the replicas' chains and the pending tokens, [m] int64 ascending."""
        weights = _weights(tree)
        expected = self._learned.acceptance.corrected(weights)
        num_refed = [tree.root + 1 - ahead for ahead in self._ahead]
        followers = sorted(
            (rank for rank, is_late in enumerate(self._must_catch_up) if not is_late), key=lambda rank: num_refed[rank]
        )
        paths = dict(zip(followers, heaviest_chains(tree, weights, len(followers)), strict=False))
        needed = np.full(len(tree), np.iinfo(np.int64).max)  # tokens that the first replica to reach a node feeds
        for rank, path in paths.items():
            needed[path] = np.minimum(needed[path], num_refed[rank] + 1 + np.arange(len(path)))
        size = self._best_size(needed, expected, num_refed) if paths else 0
        self._expected = [0] * len(num_refed)
        for rank, path in paths.items():
            path = path[: max(0, size - num_refed[rank])]
            own = path[needed[path] == num_refed[rank] + 1 + np.arange(len(path))]
            self._expected[rank] = int(expected[own].sum())
        kept = np.flatnonzero((needed <= size) | (np.arange(len(tree)) <= tree.root))
        places = np.full(len(tree), -1, np.int64)
        places[kept] = np.arange(len(kept))
        nothing = np.zeros(0, np.int64)
        self._chains = [
            places[paths[rank][: max(0, size - num_refed[rank])]] if rank in paths else nothing
            for rank in range(len(num_refed))
        ]
        return kept

    def _best_size(self, needed: np.ndarray, expected: np.ndarray, num_refed: Sequence[int]) -> int:
        """Return how many tokens a replica may feed, 0 for no chains.

        `needed` is [T] tokens that the first replica to reach each node feeds, the largest int64 for none; `expected`
        [T] expected tokens, fixed point of EXPECTED_BITS; `num_refed` [R] pending tokens that each replica feeds.
        """
        times = self._costs.times
        limit = self._max_tokens
        if not self._is_auto:
            return limit
        fed = needed[needed <= limit]
        host, plain = self._learned.host, self._plain_step_time(min(max(num_refed), times.shape[1] - 1))
        gains = np.bincount(fed, expected[needed <= limit]).astype(np.int64).cumsum()
        nodes = np.bincount(fed).cumsum()
        slowest = times.max(axis=0)
        best, best_rate, plain_rate = 0, 0, _rate(1 << EXPECTED_BITS, plain)
        for size in range(int(fed.min(initial=limit + 1)), len(gains)):
            host_ns = host.drafting_ns + host.per_node_ns * int(nodes[size]) // FIXED_POINT_ONE
            rate = _rate((1 << EXPECTED_BITS) + int(gains[size]), int(slowest[size]) + host_ns)
            if rate > best_rate:
                best, best_rate = size, rate
        return best if self._tree_fitted(best_rate, plain_rate, MIN_GAIN_PERCENT) else 0

    def shares(self, tree: TokenTree) -> Shares:
        """Return the shares of the selected chains, or of the pending tokens alone."""
        chains = self._chains or [np.zeros(0, np.int64)] * len(self._ahead)
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
        """Record which replicas keep what they fed; return by how many tokens the state of all advanced."""
        ahead = []
        for rank, share in enumerate(shares):
            is_kept = int(share.nodes[-1]) in path
            ahead.append(self._ahead[rank] + (len(share.nodes) if is_kept else 0))
            self._charge(rank, share, is_kept, num_pending)
        base = min(ahead)
        self._ahead, self._chains = [each - base for each in ahead], []
        left = [num_pending + len(path) - each for each in ahead]  # pending tokens of each replica's next step
        max_pending = min(MAX_REFED, max(1, self.limit - 1))
        self._must_catch_up = [
            num > 1 and (num > max_pending or refed_ns >= saved_ns)
            for num, refed_ns, saved_ns in zip(left, self._refed_ns, self._saved_ns, strict=True)
        ]
        return base

    def _charge(self, rank: int, share: Share, is_kept: bool, num_pending: int) -> None:
        """Update a replica's time spent on feeding tokens again, and the time that its chain saved."""
        if is_kept:
            self._refed_ns[rank] = 0
            return
        times = self._costs.times[rank]
        most, size, num_again = len(times) - 1, len(share.nodes), num_pending - self._ahead[rank] - 1
        self._refed_ns[rank] += int(times[min(size, most)] - times[min(size - num_again, most)])
        time = int(times[min(size, most)])
        self._saved_ns[rank] = time * self._expected[rank] // ((1 << EXPECTED_BITS) + sum(self._expected))


def _rate(expected: int, nanoseconds: int) -> int:
    """Return tokens per nanosecond, fixed point of EXPECTED_BITS + RATE_BITS, `expected` of EXPECTED_BITS."""
    return (expected << RATE_BITS) // max(1, nanoseconds)


def _weights(tree: TokenTree) -> np.ndarray:
    """Return [T] int64 path probabilities, 0 up to the root; without estimates they halve with each depth."""
    if tree.path_probabilities is not None:
        weights = tree.path_probabilities.copy()
    else:
        weights = np.int64(1) << (PATH_PROBABILITY_BITS - np.clip(tree.arrays()[2], 1, PATH_PROBABILITY_BITS))
    weights[: tree.root + 1] = 0
    return weights
