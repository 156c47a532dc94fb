"""The interface of drafters: a drafter proposes what may follow, and learns from each step's verification result.

A drafter decides how many steps a sequence takes, never which tokens it has: a guess is committed only where the model
agrees. Everything a drafter answers is a function of what all replicas share.

Letters: T nodes in the tree, n of them from the root on, K top-k candidates of a node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.guide import Guide
from lp_runtime.lookahead.tree import TokenTree, accept

MAX_DEPTH_COUNTED = 16  # columns of Counts; deeper nodes are rare and count in the last one


class NoiseKey(NamedTuple):
    """What tells how a request's successors are sampled.

    Attributes:
        seed: 0 to 2**64 - 1.
        sample: index of one of several samples of a prompt.
        temperature: what the model's logits are divided by, more than 0.
    """

    seed: int
    sample: int
    temperature: float = 1.0


@dataclass(frozen=True)
class VerificationResult:
    """What the exchange tells of every node of a step's tree.

    Attributes:
        successors: [T] the token that follows each node, valid from the root on; an int64 array is used as it is.
        top_k: [n, ENTRY] int32 top-k candidates of the nodes from the root on, and their margins, as
            best_first/tables.py lays them out: the K likeliest successors by the scores they are sampled from, before
            noise, -1 where there are fewer. None where the drafter did not ask for them.
    """

    successors: Sequence[int] | np.ndarray
    top_k: np.ndarray | None = None

    @classmethod
    def from_root(cls, root: int, successors: np.ndarray, top_k: np.ndarray | None = None) -> VerificationResult:
        """Return a result from successors of the nodes from the root on; those of the pending tokens before it are -1.

        Args:
            root: index of the root.
            successors: [n] int64 token ids.
            top_k: [n, ENTRY] int32, see VerificationResult.
        """
        if root:
            from_root, successors = successors, np.empty(root + len(successors), np.int64)
            successors[:root], successors[root:] = -1, from_root
        return cls(successors, top_k)

    @cached_property
    def successor_array(self) -> np.ndarray:
        """[T] int64 successors."""
        return np.ascontiguousarray(self.successors, np.int64)


@dataclass
class Counts:
    """How many nodes were fed and accepted, by source and depth: [sources, MAX_DEPTH_COUNTED].

    Column d counts depth d + 1; the last column counts all deeper nodes, too.

    Attributes:
        sources: names of the rows: where a node's token came from.
        fed: [sources, MAX_DEPTH_COUNTED] int64 nodes below the root.
        accepted: [sources, MAX_DEPTH_COUNTED] int64 nodes on the committed path.
        latest: [a] int64 row of each node on the committed path of the latest step, from the root down.
    """

    sources: tuple[str, ...]
    fed: np.ndarray = field(init=False)
    accepted: np.ndarray = field(init=False)
    latest: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.fed = np.zeros((len(self.sources), MAX_DEPTH_COUNTED), dtype=np.int64)
        self.accepted = np.zeros_like(self.fed)
        self.latest = np.zeros(0, dtype=np.int64)

    def add(self, sources: np.ndarray, depths: np.ndarray, path: Sequence[int]) -> None:
        """Count one step.

        Args:
            sources: [m] int64 row of each node below the root.
            depths: [m] int64 depth of each node below the root.
            path: indices into `sources` of the accepted nodes.
        """
        columns = np.minimum(depths, MAX_DEPTH_COUNTED) - 1
        np.add.at(self.fed, (sources, columns), 1)
        self.latest = sources[np.array(path, np.int64)]
        if path:
            np.add.at(self.accepted, (self.latest, columns[path]), 1)

    def latest_sources(self) -> list[str]:
        """Return the name of the source of each node on the committed path of the latest step."""
        return [self.sources[row] for row in self.latest]


class Drafter(ABC):
    """Proposes the trees of one request.

    Attributes:
        num_top_k: K, how many top-k candidates of every node the drafter wants to know; 0 for none.
        learns_prompt: whether `learn_prompt` makes use of the top-k candidates behind a prompt's tokens.
        max_nodes: largest number of nodes of a tree, the root counted; pending tokens before it may come on top.
        max_committed: largest number of tokens that one step commits.
        counts: nodes fed and accepted so far, by source and depth.
    """

    num_top_k: int = 0
    learns_prompt: bool = False
    max_nodes: int
    max_committed: int
    counts: Counts

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> None:
        """Begin a request with the prompt `tokens`."""

    @abstractmethod
    def propose(
        self,
        tokens: Sequence[int],
        num_cached: int,
        max_depth: int,
        tree_size_hint: int | None = None,
        guide: Guide | None = None,
    ) -> TokenTree:
        """Return the next step's tree.

        Args:
            tokens: prompt and committed tokens; the last one is the root.
            num_cached: leading tokens that are cached; the others are pending.
            max_depth: largest depth below the root of a node.
            tree_size_hint: largest number of nodes to propose, where the drafter can choose; None for its own limit.
            guide: the constraint that the text is under; no node stands in the tree that the guide forbids. None
                without one.
        """

    def keep(self, tree: TokenTree, nodes: np.ndarray) -> TokenTree:
        """Return the tree of some nodes of the tree that was proposed last, which is fed in its place.

        Args:
            tree: what `propose` returned last.
            nodes: see `TokenTree.part`.
        """
        return tree.part(nodes)

    def accept(self, tree: TokenTree, found: VerificationResult) -> tuple[list[int], list[int]]:
        """Return (accepted, path): see lp_runtime.lookahead.tree.accept.

        Args:
            tree: what `propose` returned last.
            found: the tree's verification result.
        """
        return accept(tree, found.successors)

    def may_accept(self, node: int) -> bool:
        """Whether `accept` may go on to a node of the tree that was proposed last."""
        return True

    def learn_prompt(self, tokens: Sequence[int], entries: np.ndarray) -> None:  # noqa: B027 (most have no use for it)
        """Learn what a forward pass found behind the prompt's last tokens; called once, before the first step.

        Args:
            tokens: [P] the prompt.
            entries: [n, ENTRY] int32 top-k candidates behind its last n tokens, n <= P, as best_first/tables.py lays
                them out.
        """

    @abstractmethod
    def advance_prefill(self, tokens: Sequence[int], found: VerificationResult) -> None:
        """Learn from the prefill.

        Args:
            tokens: the prompt and the first committed token.
            found: the verification result of the prompt's last token.
        """

    @abstractmethod
    def advance(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        found: VerificationResult,
        committed: Sequence[int],
        path: Sequence[int],
    ) -> None:
        """Learn from a step.

        Args:
            tokens: prompt and committed tokens, this step's included.
            tree: the step's tree.
            found: the tree's verification result.
            committed: the step's committed tokens.
            path: the nodes that carry them, from below the root: of all committed tokens, or of all but the last one.
        """


class CountingDrafter(Drafter):
    """A drafter whose trees grow node by node, and that counts nodes by the sets of nodes that its sources claim.

    Args:
        *sources: names of where a node's token may come from, beside the constraint, which comes last.
    """

    def __init__(self, *sources: str):
        self.counts = Counts((*sources, "forced"))
        self._forced: list[int] = []

    def start_tree(
        self, tokens: Sequence[int], num_cached: int, max_depth: int, budget: int | None, guide: Guide | None
    ) -> tuple[TokenTree, int]:
        """Begin a tree with the pending tokens, and with what a constraint says must follow.

        Args:
            tokens: see `propose`.
            num_cached: see `propose`.
            max_depth: see `propose`.
            guide: see `propose`.
            budget: largest number of nodes, pending tokens included; None for no limit beside max_nodes.

        Returns:
            (tree, node): the tree; the last node that is certain, below which guesses begin.
        """
        if guide is None:
            return TokenTree(tokens[num_cached:], max_depth, budget), len(tokens) - num_cached - 1
        most = len(tokens) - num_cached - 1 + self.max_nodes
        depth = min(max_depth, self.max_committed - 1)
        tree = TokenTree(tokens[num_cached:], depth, most if budget is None else min(most, budget), guide=guide)
        self._forced = tree.add_branch(guide.forced(depth))
        return tree, self._forced[-1] if self._forced else tree.root

    def count(self, tree: TokenTree, path: Sequence[int], claims: Sequence[Iterable[int]]) -> None:
        """Count one step.

        Args:
            tree: the step's tree.
            path: the accepted nodes.
            claims: the nodes that each source claims; the first source that claims a node is the one it counts for.
        """
        sources = np.full(len(tree), -1)
        for source, claimed in reversed(list(enumerate(claims))):
            sources[list(claimed)] = source
        sources[self._forced] = len(claims)
        self._forced = []
        below = tree.root + 1
        assert (sources[below:] >= 0).all()
        self.counts.add(sources[below:], np.array(tree.depths[below:], dtype=np.int64), [node - below for node in path])
