"""The drafter interface: a drafter proposes trees of guesses and learns from each step's results.

A drafter affects how many steps a sequence takes, never its tokens: a guess is committed only if the model agrees. All
results of a drafter are functions of data that all replicas share.

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

MAX_DEPTH_COUNTED = 16  # columns of Counts; deeper nodes are rare and are counted in the last one


class NoiseKey(NamedTuple):
    """Seed, 0 to 2**64 - 1, sample index and temperature, more than 0, that determine the noise."""

    seed: int
    sample: int
    temperature: float = 1.0


@dataclass(frozen=True)
class VerificationResult:
    """Result of a step: each node's successor and, if requested, its top-k candidates.

    Attributes:
        successors: [T] the token that follows each node, -1 if it is not known because a processor failed for a guess;
            valid from the root on; an int64 array is not copied.
        top_k: [n, ENTRY] int32 top-k candidates and margins of the nodes from the root on, in the layout of
            top_k.py: the K likeliest successors by the scores they are sampled from, before noise, -1 if
            there are fewer. None if the drafter did not request them.
    """

    successors: Sequence[int] | np.ndarray
    top_k: np.ndarray | None = None

    @cached_property
    def successor_array(self) -> np.ndarray:
        """[T] int64 successors, contiguous."""
        return np.ascontiguousarray(self.successors, np.int64)


@dataclass
class Counts:
    """Numbers of fed and accepted nodes by source and depth, [sources, MAX_DEPTH_COUNTED].

    Column d counts depth d + 1; the last column also counts all deeper nodes.

    Attributes:
        sources: names of the rows: the origin of a node's token.
        fed, accepted: int64 nodes below the root, and on the committed path.
        latest: [a] int64 rows of the nodes on the latest step's committed path, from the root down.
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
        """Count one step: the source rows and depths, [m] int64, of the nodes below the root.

        `path` has the indices of the accepted nodes among these m.
        """
        columns = np.minimum(depths, MAX_DEPTH_COUNTED) - 1
        np.add.at(self.fed, (sources, columns), 1)
        self.latest = sources[np.array(path, np.int64)]
        if path:
            np.add.at(self.accepted, (self.latest, columns[path]), 1)

    def so_far(self) -> DraftCounts:
        rows = [tuple(map(tuple, numbers.tolist())) for numbers in (self.fed, self.accepted)]
        return DraftCounts(self.sources, *rows)

    def latest_sources(self) -> list[str]:
        return [self.sources[row] for row in self.latest]


@dataclass(frozen=True)
class DraftCounts:
    """Numbers of fed and accepted draft tokens, plain so that they can be compared and written as JSON.

    Attributes:
        sources: names of the rows: the origin of a draft token.
        fed, accepted: by source, then by depth; column d counts depth d + 1, the last column also all deeper ones.
    """

    sources: tuple[str, ...] = ()
    fed: tuple[tuple[int, ...], ...] = ()
    accepted: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class PoolStatistics:
    """Size of an n-gram pool, and usefulness of its guesses.

    Attributes:
        num_keys: first tokens that have at least one n-gram.
        fan_out: mean number of n-grams per key.
        hit_rate: fraction of steps that had a guess to verify.
        accepted_length: mean number of accepted guessed tokens, over the steps that had guesses.
    """

    num_keys: int
    num_ngrams: int
    fan_out: float
    hit_rate: float
    accepted_length: float


class Drafter(ABC):
    """Proposes the trees of one request.

    Attributes:
        num_top_k: K, the number of top-k candidates that the drafter needs of every node; 0 for none.
        learns_prompt: whether `learn_prompt` uses the top-k candidates of prompt tokens.
        max_nodes: largest number of nodes of a tree, including the root; pending tokens before it may be added.
        max_committed: largest number of tokens that a step can commit: the tree's depth, plus the bonus token.
        counts: how many nodes of each source were fed and accepted.
    """

    num_top_k: int = 0
    learns_prompt: bool = False
    max_nodes: int
    max_committed: int
    counts: Counts

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> None:
        """Begin a request; `tokens` are the prompt."""

    def pool_statistics(self) -> PoolStatistics | None:
        """Return statistics of the n-gram pool; None for a drafter without one."""
        return None

    def add_text(self, tokens: Sequence[int]) -> None:  # noqa: B027 (most drafters have no other text)
        """Take in another text, before the prompt, that the answer may repeat."""

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

        `tokens` are the prompt and the committed tokens. The first `num_cached` of them are cached, the others
        pending. `tree_size_hint` is the largest useful number of nodes; None for the drafter's own limit.
        """

    def keep(self, tree: TokenTree, nodes: np.ndarray) -> TokenTree:
        """Reduce the tree proposed last to some of its nodes (see `TokenTree.part`), which are fed instead."""
        return tree.part(nodes)

    def accept(self, tree: TokenTree, result: VerificationResult) -> tuple[list[int], list[int]]:
        """Return (accepted, path) of the tree proposed last; see lp_runtime.lookahead.tree.accept."""
        return accept(tree, result.successors)

    def may_accept(self, node: int) -> bool:
        """Return whether `accept` may continue to a node."""
        return True

    def learn_prompt(self, tokens: Sequence[int], entries: np.ndarray) -> None:  # noqa: B027 (most have no use for it)
        """Learn from top-k candidates of the prompt; called at most once, before the first step.

        `entries`, [n, ENTRY] int32, are those after the last n tokens, in the layout of top_k.py.
        """

    @abstractmethod
    def advance_prefill(self, tokens: Sequence[int]) -> None:
        """Learn the first committed token, which `tokens` end with."""

    @abstractmethod
    def advance(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        result: VerificationResult,
        committed: Sequence[int],
        path: Sequence[int],
    ) -> None:
        """Learn from a step, whose `committed` tokens are also the last ones of `tokens`.

        `path` has the nodes below the root that carry the committed tokens: of all of them, or of all but the last one.
        """


def places_of(nodes: np.ndarray) -> dict[int, int]:
    """Return the index of each of `nodes`, [m] indices into a tree, in the tree of these nodes; see `Drafter.keep`."""
    return {node: place for place, node in enumerate(nodes.tolist())}


class CountingDrafter(Drafter):
    """Base of drafters that add nodes one by one; counts them by source, "forced" being the last."""

    def __init__(self, *sources: str):
        self.counts = Counts((*sources, "forced"))
        self._forced: list[int] = []

    def start_tree(
        self, tokens: Sequence[int], num_cached: int, max_depth: int, budget: int | None, guide: Guide | None
    ) -> tuple[TokenTree, int]:
        """Start a tree with the pending tokens and the tokens that the constraint forces.

        Returns (tree, node): the tree, and its last certain node, below which guesses begin. The tree has at most
        `budget` nodes, including pending tokens; None for no limit besides max_nodes. The other arguments are those of
        `propose`.
        """
        if guide is None:
            return TokenTree(tokens[num_cached:], max_depth, budget), len(tokens) - num_cached - 1
        most = len(tokens) - num_cached - 1 + self.max_nodes
        depth = min(max_depth, self.max_committed - 1)
        tree = TokenTree(tokens[num_cached:], depth, most if budget is None else min(most, budget), guide=guide)
        self._forced = tree.add_branch(guide.forced(depth))
        return tree, self._forced[-1] if self._forced else tree.root

    def keep(self, tree: TokenTree, nodes: np.ndarray) -> TokenTree:
        places = places_of(nodes)
        self._forced = [places[node] for node in self._forced if node in places]
        return super().keep(tree, nodes)

    def count(self, tree: TokenTree, path: Sequence[int], claims: Sequence[Iterable[int]]) -> None:
        """Count one step by source: a node counts for the first of the `claims` that contains it."""
        sources = np.full(len(tree), -1)
        for source, claimed in reversed(list(enumerate(claims))):
            sources[list(claimed)] = source
        sources[self._forced] = len(claims)
        self._forced = []
        below = tree.root + 1
        assert (sources[below:] >= 0).all()
        self.counts.add(sources[below:], np.array(tree.depths[below:], dtype=np.int64), [node - below for node in path])
