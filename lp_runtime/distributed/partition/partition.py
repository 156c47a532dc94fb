"""Partition of a step's token tree into one share per replica.

A share is a set of leaves with all their ancestors. An ancestor that several shares need is computed in each of them
(the paper's redundant tokens, section 3.4). The partition minimises the time at which the last replica finishes, given
each replica's time by number of tokens.

Letters: T nodes in the tree, P pending tokens, R replicas, M largest number of tokens with a known time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lp_runtime.distributed.partition.bin_packing import cut
from lp_runtime.distributed.partition.capacity_fill import fill_shares
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.utils.jit import compiles

TIME_OF_A_TOKEN = 1 << 20  # on the fastest replica, in an arbitrary unit; large, so that rounding to integers is fine


class Share(NamedTuple):
    """Nodes of one replica in a step, as ascending int64 indices."""

    nodes: np.ndarray  # that the replica feeds: the P pending tokens, then its leaves and their ancestors
    owned: np.ndarray  # whose results the replica reports; every node from the root on has exactly one owner


class Shares(Sequence[Share]):
    """Sequence of the R replicas' shares of a step, by rank."""

    # Sizes are lists: summing a few numbers is slower in numpy.
    def __init__(self, owner: np.ndarray, nodes: np.ndarray, owned: np.ndarray, sizes: list[int], num_owned: list[int]):
        self.owner = owner  # [T] int64 rank that owns each node; -1 for nodes before the root
        self.sizes = sizes  # [R] number of tokens that each replica feeds
        self.num_owned = num_owned  # [R] number of nodes that each replica owns
        self._nodes, self._owned = nodes, owned  # of all shares, concatenated

    @classmethod
    def of_one(cls, num_nodes: int, root: int) -> Shares:
        """Return the share of a single replica, which feeds all T nodes."""
        nodes, owner = np.arange(num_nodes), np.zeros(num_nodes, np.int64)
        owner[:root] = -1
        return cls(owner, nodes, nodes[root:], [num_nodes], [num_nodes - root])

    def with_followers(self, num_followers: int, root: int) -> Shares:
        """Return these shares extended by replicas that feed only the pending tokens and own nothing."""
        nodes = np.concatenate([self._nodes, np.tile(np.arange(root + 1), num_followers)])
        sizes = self.sizes + [root + 1] * num_followers
        return Shares(self.owner, nodes, self._owned, sizes, self.num_owned + [0] * num_followers)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, rank: int) -> Share:  # type: ignore[override]  # no slices
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        start, start_owned = sum(self.sizes[:rank]), sum(self.num_owned[:rank])
        return Share(
            self._nodes[start : start + self.sizes[rank]],
            self._owned[start_owned : start_owned + self.num_owned[rank]],
        )

    def num_fed_by_all(self, path: list[int]) -> int:
        """Return how many nodes of a path, whose first is the root, every replica feeds in order and without a gap.

        Their keys and values follow those of the pending tokens in every replica's cache. At least 1, the root.
        """
        fed, start = list(path), 0
        for size in self.sizes:
            first, start = start + path[0], start + size
            fed = self._nodes[first : min(first + len(fed), start)].tolist()
            while fed != path[: len(fed)]:
                fed.pop()
        return len(fed)

    def digest(self) -> int:
        """Return a 56-bit hash of the owners and sizes; 0 for one replica."""
        if len(self) == 1:
            return 0
        content = self.owner.tobytes() + repr(self.sizes).encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")


def partition(tree: TokenTree, speeds: Sequence[float]) -> Shares:
    """Cut the tree into R shares for replicas with `speeds`: [R] tokens per time in any unit, > 0."""
    times_of_a_token = TIME_OF_A_TOKEN * max(speeds) / np.array(speeds)
    return partition_by_times(tree, np.outer(times_of_a_token, np.arange(len(tree) + 1)).astype(np.int64))


def partition_by_times(tree: TokenTree, times: np.ndarray, limit: int | None = None) -> Shares:
    """Cut the tree into R shares of balanced time, recomputed ancestors included.

    A replica without leaves feeds only the pending tokens.

    Args:
        times: [R, M + 1] int64 time of each replica for 0, 1, 2 ... tokens, all in the same unit; must not decrease.
        limit: largest number of tokens that a replica feeds, ignored if no packing within it is found; None for none.
    """
    if len(times) == 1:
        return Shares.of_one(len(tree), tree.root)
    _, parents, depths = tree.arrays()
    max_tokens = len(tree) if limit is None else limit
    owner, nodes, owned, sizes, num_owned = cut(parents, depths, tree.root, times, max_tokens)
    return Shares(owner, nodes, owned, sizes.tolist(), num_owned.tolist())


def select_within(tree: TokenTree, capacity: np.ndarray) -> tuple[np.ndarray, Shares]:
    """Choose the nodes to feed, in the tree's order; leave out nodes that fit nowhere and their subtrees.

    `capacity` is the int64 number of nodes, [R], that each replica may feed in addition to the pending ones. Returns
    ([m] int64 ascending indices of the chosen nodes, pending tokens included; R shares of the tree of these nodes).
    """
    _, parents, depths = tree.arrays()
    nodes, owner, fed, owned, sizes, num_owned = fill_shares(parents, depths, tree.root, capacity)
    return nodes, Shares(owner, fed, owned, sizes.tolist(), num_owned.tolist())


@compiles
def compile_partition() -> None:
    tree = TokenTree([0], max_depth=3)
    for branch in ([1, 2], [3]):
        tree.add_branch(branch)
    partition(tree, [1.0, 1.0])
    select_within(tree, np.ones(2, np.int64))
