"""The token tree: everything that one step feeds to the model.

Letters: T nodes in the tree, P pending tokens of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np


class TokenTree:
    """A tree of tokens in feeding order: every parent stands before its children.

    The first P nodes are the pending tokens, a chain; the last of them is the root, the last committed token. All
    other nodes are guesses of what follows. A node sees itself and its ancestors (the lookahead mask of the paper,
    section 3.3, figure 2(b), is a special case) and stands at the root's position plus its depth.
    Siblings never carry the same token: adding a token that is already there returns the node that carries it.

    Attributes:
        tokens: [T] token ids.
        parents: [T] index of each node's parent, -1 for the first pending token.
        depths: [T] depth below the root: 0 for the root, negative for the pending tokens before it.
        root: index of the root, P - 1.
        max_depth: no node is added below this depth.
        max_nodes: nor any once there are this many; None for no limit.
        path_probabilities: [T] estimated probability that a node is on the accepted path, fixed point, where a drafter has it; the
            nodes then stand in its order, the largest first, so that any first nodes are the best tree of their size.
    """

    __slots__ = (
        "_tokens",
        "_parents",
        "_depths",
        "root",
        "max_depth",
        "max_nodes",
        "path_probabilities",
        "_children",
        "_arrays",
        "_digest",
    )

    def __init__(self, pending: Sequence[int], max_depth: int, max_nodes: int | None = None):
        assert pending, "a tree has a root"
        self._tokens: list[int] | None = list(pending)
        self._parents: list[int] | None = list(range(-1, len(pending) - 1))
        self._depths: list[int] | None = list(range(1 - len(pending), 1))
        self.root = len(pending) - 1
        self.max_depth = max_depth
        self.max_nodes = max_nodes
        self.path_probabilities: np.ndarray | None = None
        self._children: dict[tuple[int, int], int] = {}
        self._arrays: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._digest: int | None = None

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
        """A tree from [T] arrays, int64 and contiguous, which it keeps; siblings must differ. Nothing is added to it.

        Args:
            digest: of tokens and parents, where there is one already.
        """
        tree = cls.__new__(cls)
        tree._tokens = tree._parents = tree._depths = None  # made when asked for: most trees are not
        tree.root, tree.max_depth, tree.max_nodes, tree.path_probabilities = root, max_depth, None, path_probabilities
        tree._children, tree._arrays, tree._digest = {}, (tokens, parents, depths), digest
        return tree

    def truncate(self, num_nodes: int) -> None:
        """Keep the first nodes only; the pending tokens at least."""
        assert num_nodes > self.root
        if num_nodes >= len(self):
            return
        for values in filter(None, (self._tokens, self._parents, self._depths)):
            del values[num_nodes:]
        if self.path_probabilities is not None:
            self.path_probabilities = self.path_probabilities[:num_nodes]
        if self._arrays is not None:
            tokens, parents, depths = self._arrays
            self._arrays = tokens[:num_nodes], parents[:num_nodes], depths[:num_nodes]
        self._children = {key: node for key, node in self._children.items() if node < num_nodes}

    def __len__(self) -> int:
        return len(self._arrays[0]) if self._arrays is not None else len(self._tokens)

    @property
    def pending(self) -> list[int]:
        """[P] the pending tokens."""
        if self._tokens is None:
            return self._arrays[0][: self.root + 1].tolist()
        return self._tokens[: self.root + 1]

    @property
    def tokens(self) -> list[int]:
        if self._tokens is None:
            self._tokens = self._arrays[0].tolist()
        return self._tokens

    @property
    def parents(self) -> list[int]:
        if self._parents is None:
            self._parents = self._arrays[1].tolist()
        return self._parents

    @property
    def depths(self) -> list[int]:
        if self._depths is None:
            self._depths = self._arrays[2].tolist()
        return self._depths

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if there is one."""
        if self._arrays is not None:
            tokens, parents, _ = self._arrays
            found = np.flatnonzero((parents[node + 1 :] == node) & (tokens[node + 1 :] == token))
            return node + 1 + int(found[0]) if len(found) else None
        return self._children.get((node, token))

    def content(self) -> bytes:
        """What tells trees with as many pending tokens apart: tokens and parents."""
        if self._digest is not None:
            return b"%d %d" % (self._digest, len(self))
        if self._arrays is not None:
            return b"".join(each.tobytes() for each in self._arrays[:2])
        return array("q", self.tokens + self.parents).tobytes()

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, parents, depths), [T] int64 each; not to be written to."""
        return self._arrays or tuple(np.array(each, np.int64) for each in (self.tokens, self.parents, self.depths))

    def add(self, parent: int, token: int) -> int | None:
        """The child of `parent` (the root or below) that carries `token`, made if need be; None without room."""
        assert self._arrays is None
        key = (parent, token)
        node = self._children.get(key)
        if node is None:
            depth = self.depths[parent] + 1
            if depth > self.max_depth or (self.max_nodes is not None and len(self.tokens) >= self.max_nodes):
                return None
            node = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(depth)
            self._children[key] = node
        return node

    def add_branch(self, tokens: Sequence[int]) -> list[int]:
        """Add a chain of tokens under the root, as far as there is room; returns its nodes from the top."""
        nodes: list[int] = []
        node: int | None = self.root
        for token in tokens:
            node = self.add(node, token)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def path(self, node: int) -> list[int]:
        """Token ids from below the root down to a node (the root or below)."""
        tokens = []
        while node != self.root:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


def accept(tree: TokenTree, successors: Sequence[int] | np.ndarray) -> tuple[list[int], list[int]]:
    """Follow the model's own choices from the root, through guesses and window nodes alike.

    Args:
        tree: the tree that was verified.
        successors: [T] the token that follows each node; read from the root downward only.

    Returns:
        (run, path): the run of accepted tokens, ending with the bonus token (the successor of the last node reached,
        which no node had guessed), and the nodes that carried the guesses before it: len(path) == len(run) - 1.
        Paper: algorithm 2 (greedy verification), over a whole tree and keeping the bonus token of a full match.
    """
    run: list[int] = []
    path: list[int] = []
    node = tree.root
    while True:
        token = int(successors[node])
        run.append(token)
        child = tree.child(node, token)
        if child is None:
            return run, path
        path.append(child)
        node = child
