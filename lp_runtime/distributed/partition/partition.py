"""Partition of a step's token tree into one share for each replica.

A share is a set of leaves with all their ancestors. An ancestor that several shares need is computed in each of them:
the paper's redundant tokens, section 3.4. The partition minimises the time at which the last replica finishes, from how
long each replica takes for how many tokens.

Letters: T nodes in the tree, P pending tokens, R replicas, M tokens that a replica's time is known for at most.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lp_runtime.distributed.partition.bin_packing import cut
from lp_runtime.distributed.partition.capacity_fill import fill_shares
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.utils.jit import compiles

TIME_OF_A_TOKEN = 1 << 20  # on the fastest replica; the unit does not matter, only its fineness does


@dataclass(frozen=True)
class Share:
    """What one replica does in a step.

    Attributes:
        nodes: int64 indices into the tree of the nodes that the replica feeds, ascending: the P pending tokens, then
            the replica's leaves and their ancestors.
        owned: int64 indices into the tree of the nodes whose results the replica reports, ascending. Every node from
            the root on is owned by exactly one replica.
    """

    nodes: np.ndarray
    owned: np.ndarray


class Shares(Sequence[Share]):
    """What every replica does in a step: a sequence of R shares, by rank.

    Args:
        owner: [T] int64 rank that owns each node; -1 for the pending tokens before the root.
        nodes: int64 nodes that each replica feeds, one replica's behind the other's.
        owned: int64 nodes that each replica owns, one replica's behind the other's.
        sizes: [R] number of tokens that each replica feeds.
        num_owned: [R] number of nodes that each replica owns.

    Attributes:
        owner: The argument.
        sizes: The argument.
        num_owned: The argument.
    """

    # Sizes are lists: numpy takes longer to add up a few numbers.
    def __init__(self, owner: np.ndarray, nodes: np.ndarray, owned: np.ndarray, sizes: list[int], num_owned: list[int]):
        self.owner = owner
        self.sizes = sizes
        self.num_owned = num_owned
        self._nodes, self._owned = nodes, owned

    @classmethod
    def of_one(cls, num_nodes: int, root: int) -> Shares:
        """Return the share of a single replica, which feeds every node.

        Args:
            num_nodes: T.
            root: Index of the root.
        """
        nodes, owner = np.arange(num_nodes), np.zeros(num_nodes, np.int64)
        owner[:root] = -1
        return cls(owner, nodes, nodes[root:], [num_nodes], [num_nodes - root])

    def with_followers(self, num_followers: int, root: int) -> Shares:
        """Return these shares with more replicas behind them, which feed the pending tokens and own nothing.

        Args:
            num_followers: replicas that are added.
            root: index of the root.
        """
        nodes = np.concatenate([self._nodes, np.tile(np.arange(root + 1), num_followers)])
        sizes = self.sizes + [root + 1] * num_followers
        return Shares(self.owner, nodes, self._owned, sizes, self.num_owned + [0] * num_followers)

    def __len__(self) -> int:
        """Return R."""
        return len(self.sizes)

    def __getitem__(self, rank: int) -> Share:  # type: ignore[override]  # no slices
        """Return the share of a replica, 0 <= rank < R."""
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        start, start_owned = sum(self.sizes[:rank]), sum(self.num_owned[:rank])
        return Share(
            self._nodes[start : start + self.sizes[rank]],
            self._owned[start_owned : start_owned + self.num_owned[rank]],
        )

    def digest(self) -> int:
        """Return 56 bits that differ where owners or sizes differ; 0 for one replica."""
        if len(self) == 1:
            return 0
        content = self.owner.tobytes() + repr(self.sizes).encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")


def linear_times(speeds: Sequence[float], num_tokens: int) -> np.ndarray:
    """Return times of replicas that take equally long for every token.

    Args:
        speeds: [R] tokens in a unit of time, > 0; only ratios matter.
        num_tokens: Largest number of tokens to give a time for.

    Returns:
        [R, num_tokens + 1] int64 times for 0, 1, 2 ... tokens; the fastest replica takes TIME_OF_A_TOKEN for each.
    """
    fastest = max(speeds)
    return np.array([np.arange(num_tokens + 1) * (TIME_OF_A_TOKEN * fastest / speed) for speed in speeds]).astype(
        np.int64
    )


def partition(tree: TokenTree, speeds: Sequence[float]) -> Shares:
    """Cut the tree into R shares, for replicas that take equally long for every token.

    Args:
        tree: The step's tree.
        speeds: [R] tokens in a unit of time, > 0; only ratios matter.
    """
    return partition_by_times(tree, linear_times(speeds, len(tree)))


def partition_by_times(tree: TokenTree, times: np.ndarray, limit: int | None = None) -> Shares:
    """Cut the tree into R shares, balanced on what each replica computes, ancestors included.

    Args:
        tree: The step's tree.
        times: [R, M + 1] int64 time that each replica takes for 0, 1, 2 ... tokens, in one unit; must not fall.
        limit: Largest number of tokens that a replica feeds, where a packing is found that keeps it. None for no limit.

    Returns:
        R shares. A replica without leaves feeds the pending tokens alone.
    """
    if len(times) == 1:
        return Shares.of_one(len(tree), tree.root)
    _, parents, depths = tree.arrays()
    max_tokens = len(tree) if limit is None else limit
    owner, nodes, owned, sizes, num_owned = cut(parents, depths, tree.root, times, max_tokens)
    return Shares(owner, nodes, owned, sizes.tolist(), num_owned.tolist())


def select_within(tree: TokenTree, capacity: np.ndarray) -> tuple[np.ndarray, Shares]:
    """Choose nodes that replicas can feed, in the tree's order: what fits nowhere, and all below it, is left out.

    Args:
        tree: The step's tree, its likeliest nodes first.
        capacity: [R] int64 nodes beside the pending ones that each replica may feed.

    Returns:
        (nodes, shares): [m] int64 ascending indices, the pending tokens included, and R shares of the tree of these.
    """
    _, parents, depths = tree.arrays()
    owner, fed, owned, sizes, num_owned = fill_shares(parents, depths, tree.root, capacity)
    nodes = np.flatnonzero((owner >= 0) | (np.arange(len(owner)) < tree.root))
    places = np.empty(len(owner), np.int64)
    places[nodes] = np.arange(len(nodes))
    return nodes, Shares(owner[nodes], places[fed], places[owned], sizes.tolist(), num_owned.tolist())


@compiles
def compile_partition() -> None:
    """Compile the partition's kernels, or load them from disk."""
    tree = TokenTree([0], max_depth=3)
    for branch in ([1, 2], [3]):
        tree.add_branch(branch)
    partition(tree, [1.0, 1.0])
    select_within(tree, np.ones(2, np.int64))
