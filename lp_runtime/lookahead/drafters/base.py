"""What a drafting drafter is: it proposes what may follow, and learns from what the step found.

A drafter decides how many steps a text takes, never which text it is: a guess is committed only where the model agrees.
Its answers are functions of what all replicas share.

Letters: T nodes in the tree, n of them from the root on, K runners-up of a node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lp_runtime.lookahead.tree import TokenTree, accept

MAX_DEPTH_COUNTED = 16


@dataclass(frozen=True)
class VerificationResult:
    """What a step found.

    Attributes:
        successors: [T] the token that follows each node, from the root on; int64 if it is an array, which takes the
            least time.
        top_k: [n, ENTRY] int32, of the nodes from the root on, where the drafter asked for them: the K likeliest
            successors by the scores they are drawn from, before noise; -1 where there are fewer, and how far each lies
            below the first (tables.py).
    """

    successors: Sequence[int] | np.ndarray
    top_k: np.ndarray | None = None

    @classmethod
    def from_root(cls, root: int, successors: np.ndarray, top_k: np.ndarray | None = None) -> VerificationResult:
        """What was found of the nodes from the root on, [n]; of the pending tokens before it nothing is known."""
        if root:
            below, successors = successors, np.empty(root + len(successors), np.int64)
            successors[:root], successors[root:] = -1, below
        return cls(successors, top_k)

    @cached_property
    def successor_array(self) -> np.ndarray:
        """[T] int64, the successors."""
        return np.ascontiguousarray(self.successors, np.int64)


@dataclass
class Counts:
    """Nodes by where they came from and how deep they stood: [sources, MAX_DEPTH_COUNTED], the last column and deeper.

    Attributes:
        sources: names of the rows.
        fed: nodes below the root.
        accepted: of these, what stood on the committed run.
    """

    sources: tuple[str, ...]
    fed: np.ndarray = field(init=False)
    accepted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.fed = np.zeros((len(self.sources), MAX_DEPTH_COUNTED), dtype=np.int64)
        self.accepted = np.zeros_like(self.fed)

    def add(self, sources: np.ndarray, depths: np.ndarray, path: Sequence[int]) -> None:
        """Count a step: source and depth of each node below the root, and which of them were accepted."""
        columns = np.minimum(depths, MAX_DEPTH_COUNTED) - 1
        np.add.at(self.fed, (sources, columns), 1)
        if path:
            np.add.at(self.accepted, (sources[path], columns[path]), 1)


class Drafter(ABC):
    """Proposes trees for one request.

    Attributes:
        num_top_k: K, how many likeliest successors of every node it wants to know; 0 for none.
        max_nodes: nodes of a tree at most, the root counted; pending tokens before it may come on top.
        max_committed: tokens that one step commits at most.
        counts: what was fed and accepted, by source.
    """

    num_top_k: int = 0
    max_nodes: int
    max_committed: int
    counts: Counts

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> None:
        """Take up a request, whose prompt is `tokens`."""

    @abstractmethod
    def propose(
        self, tokens: Sequence[int], num_cached: int, max_depth: int, tree_size_hint: int | None = None
    ) -> TokenTree:
        """The next step's tree.

        Args:
            tokens: prompt and committed tokens; those from `num_cached` on are pending, the last one is the root.
            max_depth: no node may stand deeper below the root.
            tree_size_hint: nodes at most, where the drafter can choose.
        """

    def accept(self, tree: TokenTree, found: VerificationResult) -> tuple[list[int], list[int]]:
        """(run, path): see lp_runtime.lookahead.tree.accept."""
        return accept(tree, found.successors)

    @abstractmethod
    def advance_prefill(self, tokens: Sequence[int], found: VerificationResult) -> None:
        """The prefill is done; `tokens` ends with the first committed token."""

    @abstractmethod
    def advance(
        self, tokens: Sequence[int], tree: TokenTree, found: VerificationResult, run: Sequence[int], path: Sequence[int]
    ) -> None:
        """A step is done.

        Args:
            tokens: prompt and committed tokens, this step's included.
            tree: the step's.
            found: what it found.
            run: what it committed.
            path: the nodes that carry the run's tokens, from below the root: all of them, or all but the last one.
        """


class CountingDrafter(Drafter):
    """Counts what was fed and accepted by the set of nodes that each of its sources claims."""

    def __init__(self, *sources: str):
        self.counts = Counts(sources)

    def count(self, tree: TokenTree, path: Sequence[int], claims: Sequence[Iterable[int]]) -> None:
        """Count a step.

        Args:
            path: what `advance` is told.
            claims: the nodes of each source; the first one that claims a node has it.
        """
        sources = np.full(len(tree), -1)
        for source, claimed in reversed(list(enumerate(claims))):
            sources[list(claimed)] = source
        below = tree.root + 1
        assert (sources[below:] >= 0).all()
        self.counts.add(sources[below:], np.array(tree.depths[below:], dtype=np.int64), [node - below for node in path])
