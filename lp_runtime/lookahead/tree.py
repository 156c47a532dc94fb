"""The token tree: everything that one step feeds to the model.

Letters: T nodes in the tree, P of them pending tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from lp_runtime.lookahead.guide import Guide

PATH_PROBABILITY_BITS = 40  # path probabilities are fixed point, 1 << 40 is certain; sums over a tree stay within int64


class TokenTree:
    """A tree of tokens in feeding order: parents come before their children.

    The first P nodes are the pending tokens, a chain. The last of them is the root, the last committed token. All other
    nodes are guesses. A node attends to itself and its ancestors (the paper's lookahead mask, section 3.3, figure 2(b),
    is a special case), and its position is the root's plus its depth. Siblings never carry the same token: adding a
    token twice under one parent returns the existing node.

    Args:
        pending: [P] token ids of the pending tokens, at least one.
        arrays: (tokens, parents, depths), [T] int64 each and contiguous, of a complete tree, to which no node can be
            added. None for a tree that starts with the pending tokens alone.
        digest: a number that identifies `arrays`; None to digest the arrays themselves.

    Attributes:
        max_depth, max_nodes, guide: limits of `add`: depth, number of nodes, constraint of the text; None for no limit.
        path_probabilities: [T] int64 estimated probability that each node is on the accepted path, fixed point of
            PATH_PROBABILITY_BITS; None if the drafter does not estimate them. Nodes are sorted by them, descending: the
            first k nodes are the best tree of k nodes.
    """

    __slots__ = (
        "root",
        "max_depth",
        "max_nodes",
        "path_probabilities",
        "guide",
        "_children",
        "_lists",
        "_arrays",
        "_digest",
    )

    def __init__(
        self,
        pending: Sequence[int] | np.ndarray,
        max_depth: int,
        max_nodes: int | None = None,
        arrays: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        path_probabilities: np.ndarray | None = None,
        digest: int | None = None,
        guide: Guide | None = None,
    ):
        assert len(pending), "a tree has a root"
        self.root = len(pending) - 1
        self.max_depth = max_depth
        self.max_nodes = max_nodes
        self.path_probabilities = path_probabilities
        self.guide = guide
        self._lists: tuple[list[int], list[int], list[int]] | None = None  # tokens, parents, depths
        if arrays is None:
            num = len(pending)
            self._lists = list(pending), list(range(-1, num - 1)), list(range(1 - num, 1))
        self._children: dict[tuple[int, int], int] = {}
        self._arrays = arrays
        self._digest = digest

    @classmethod
    def from_arrays(
        cls,
        tokens: np.ndarray,
        parents: np.ndarray,
        depths: np.ndarray,
        path_probabilities: np.ndarray,
        root: int,
        max_depth: int,
        digest: int | None = None,
    ) -> TokenTree:
        """Return a complete tree that refers to the given arrays, see TokenTree; no node can be added to it.

        Siblings must differ, and the first pending token's parent is -1.
        """
        return cls(tokens[: root + 1], max_depth, None, (tokens, parents, depths), path_probabilities, digest)

    def part(self, nodes: np.ndarray) -> TokenTree:
        """Return the tree of some nodes: [m] int64 ascending indices, closed under parents.

        They must include all pending tokens, and the parent of every node after the root.
        """
        tokens, parents, depths = self.arrays()
        places = np.full(len(tokens) + 1, -1, np.int64)  # the last element maps parent -1, of the first token, to -1
        places[nodes] = np.arange(len(nodes))
        arrays = tokens[nodes], places[parents[nodes]], depths[nodes]
        probabilities = None if self.path_probabilities is None else self.path_probabilities[nodes]
        return TokenTree(tokens[: self.root + 1], self.max_depth, None, arrays, probabilities)

    def truncate(self, num_nodes: int) -> None:
        """Keep only the first `num_nodes` nodes, which must include the pending tokens."""
        assert num_nodes > self.root
        if num_nodes >= len(self):
            return
        for values in self._lists or ():
            del values[num_nodes:]
        if self.path_probabilities is not None:
            self.path_probabilities = self.path_probabilities[:num_nodes]
        if self._arrays is not None:
            tokens, parents, depths = self._arrays
            self._arrays = tokens[:num_nodes], parents[:num_nodes], depths[:num_nodes]
        self._children = {key: node for key, node in self._children.items() if node < num_nodes}

    def __len__(self) -> int:
        return len(self._arrays[0]) if self._arrays is not None else len(self.tokens)

    @property
    def pending(self) -> list[int]:
        if self._lists is None:
            assert self._arrays is not None
            return self._arrays[0][: self.root + 1].tolist()
        return self._lists[0][: self.root + 1]

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """Return (tokens, parents, depths), of T elements each; the caller must not modify them."""
        if self._lists is None:  # made lazily: most trees that are given as arrays never need them
            assert self._arrays is not None
            tokens, parents, depths = self._arrays
            self._lists = tokens.tolist(), parents.tolist(), depths.tolist()
        return self._lists

    @property
    def tokens(self) -> list[int]:
        return self.lists()[0]

    @property
    def parents(self) -> list[int]:
        """[T] index of each node's parent, -1 for the first pending token."""
        return self.lists()[1]

    @property
    def depths(self) -> list[int]:
        """[T] depth below the root: 0 for the root, negative for the pending tokens before it."""
        return self.lists()[2]

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that carries `token`, or None."""
        if self._arrays is not None:
            tokens, parents, _ = self._arrays
            matches = np.flatnonzero((parents[node + 1 :] == node) & (tokens[node + 1 :] == token))
            return node + 1 + int(matches[0]) if len(matches) else None
        return self._children.get((node, token))

    def content(self) -> bytes:
        """Return bytes that differ between trees with different tokens or parents but equal P."""
        if self._digest is not None:
            return b"%d %d" % (self._digest, len(self))
        if self._arrays is not None:
            return b"".join(values.tobytes() for values in self._arrays[:2])
        return array("q", self.tokens + self.parents).tobytes()

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (tokens, parents, depths), [T] int64 each; the caller must not modify them."""
        if self._arrays is not None:
            return self._arrays
        return np.array(self.tokens, np.int64), np.array(self.parents, np.int64), np.array(self.depths, np.int64)

    def add(self, parent: int, token: int) -> int | None:
        """Return the child of `parent`, the root or a node below it, that carries `token`; add it if needed.

        None if max_depth, max_nodes or the guide forbids a new node.
        """
        assert self._arrays is None
        node = self._children.get((parent, token))
        if node is None:
            tokens, parents, depths = self.lists()
            node, depth = len(tokens), depths[parent] + 1
            if depth > self.max_depth or (self.max_nodes is not None and node >= self.max_nodes):
                return None
            if self.guide is not None and not self.guide.allows(self.path(parent), token):
                return None
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            self._children[parent, token] = node
        return node

    def add_branch(self, tokens: Sequence[int], below: int | None = None) -> list[int]:
        """Add a chain of tokens under the root or node `below`, until one is refused; return its nodes."""
        nodes: list[int] = []
        node = self.root if below is None else below
        for token in tokens:
            child = self.add(node, token)
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def path(self, node: int) -> list[int]:
        """Return the token ids from the root, excluded, down to `node`, included."""
        path = []
        tokens, parents, _ = self.lists()
        while node != self.root:
            path.append(tokens[node])
            node = parents[node]
        return path[::-1]


def accept(tree: TokenTree, successors: Sequence[int] | np.ndarray) -> tuple[list[int], list[int]]:
    """Follow the model's choices from the root down through the tree.

    Paper: algorithm 2 (greedy verification), here over a whole tree, and with the bonus token of a full match kept.
    `successors`, [T], are only read from the root on. Returns the accepted tokens, and the nodes that carry all but the
    last of them, which is the bonus token, the successor of the last node reached.
    """
    accepted: list[int] = []
    path: list[int] = []
    node = tree.root
    while True:
        token = int(successors[node])
        accepted.append(token)
        child = tree.child(node, token)
        if child is None:
            return accepted, path
        path.append(child)
        node = child
