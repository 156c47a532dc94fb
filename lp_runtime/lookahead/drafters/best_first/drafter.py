"""The default drafter: one tree, grown best first from all sources that need no forward pass.

Candidates for what follows a context come from these sources (features.LAYOUT): what followed its longest match in the
text; the top-k candidates that an earlier forward pass computed after the same last 4, 3, 2 and 1 tokens, in the text
or in a branch of a tree; the model's predictions after the last token alone, and after the last two (vocabulary prior);
earlier predictions for the same absolute position; the model's alternatives to the last two committed tokens; and what
follows the longest match in a corpus. Acceptance is counted by source, length or order, rank and margin (estimates.py).
The tree repeatedly adds the candidate with the highest path probability, of all candidates below all its nodes
(growth.py). If successors are sampled, candidates are ranked by log-probability plus the noise of their position, so
that the tree proposes what will be sampled there.

After: best-first trees as in OPT-Tree (arXiv 2406.17276), top-k candidates as in token recycling (arXiv 2408.08696),
matches as in prompt lookup. Combining them, the alternatives, and using the known noise are new here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from lp_runtime.lookahead.drafter import Counts, Drafter, NoiseKey, VerificationResult
from lp_runtime.lookahead.drafters.best_first import growth, guided, outcome, tables
from lp_runtime.lookahead.drafters.best_first.corpus import NO_CORPUS, CorpusIndex
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.drafters.best_first.estimates import Rates
from lp_runtime.lookahead.drafters.best_first.features import SOURCES, Nodes, make_candidates, make_nodes
from lp_runtime.lookahead.drafters.best_first.starting_rates import GREEDY, SAMPLED
from lp_runtime.lookahead.guide import Guide
from lp_runtime.lookahead.top_k import ENTRY, K, VocabularyPrior
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.utils.jit import bound, compiles

NO_VOCABULARY = VocabularyPrior(*np.zeros((2, 0, ENTRY), np.int32))
GUIDED_ROUNDS = 2  # growth rounds of a constrained tree: the second grows below tokens forced after the first
SMALL_BYTES = 1 << 16  # size of the draft tables used to compile the kernels


class BestFirstDrafter(Drafter):
    """Grows trees best first.

    Args:
        max_nodes: largest number of nodes of a tree, including pending tokens; the root is always included.
        draft_tables: the drafter's memory; the owner decides whether to clear it.
        vocabulary: the vocabulary prior; None if not available.
        corpus: texts that answers may repeat; NO_CORPUS without any.
        noise: None for greedy decoding.
    """

    num_top_k = K
    learns_prompt = True

    def __init__(
        self,
        max_nodes: int,
        draft_tables: DraftTables,
        vocabulary: VocabularyPrior | None,
        noise: NoiseKey | None,
        max_depth: int,
        corpus: CorpusIndex = NO_CORPUS,
    ):
        self.max_nodes = max_nodes
        self.max_committed = min(max_depth, max_nodes - 1) + 1
        self.counts = Counts(SOURCES)
        self._max_depth = max_depth
        self._draft_tables = draft_tables
        if noise is None:
            draft_tables.start(GREEDY)
        else:
            draft_tables.start(SAMPLED, noise.temperature)
        self._known = (NO_VOCABULARY if vocabulary is None else vocabulary, corpus)  # before any token is seen
        self._noise = tables.make_noise(noise)
        capacity = max_nodes + self.max_committed
        self._nodes = make_nodes(capacity)
        self._frontier = growth.make_frontier(capacity)
        self._candidates = make_candidates()
        self._path = np.zeros(capacity, np.int64)
        self._grow = _grow()
        accept, advance, store_prompt = _learn()
        self._accept = accept
        self._advance = advance
        self._store_prompt = store_prompt

    @property
    def rates(self) -> Rates:
        """Acceptance counts of candidates, and estimates."""
        return self._draft_tables.rates

    @property
    def arrays(self) -> tuple[tables.DraftArrays, tables.Noise, Nodes]:
        """The arrays that candidates are collected from: draft tables, the sample's noise, and the latest tree."""
        return self._drafts, self._noise, self._nodes

    @property
    def _drafts(self) -> tables.DraftArrays:
        """All arrays in which candidates are looked up; those of the text are replaced when it grows."""
        return self._draft_tables.drafts(*self._known)

    def begin(self, tokens: Sequence[int]) -> None:
        self._draft_tables.begin_text(tokens)

    def add_text(self, tokens: Sequence[int]) -> None:
        self._draft_tables.begin_text(tokens)

    def propose(
        self,
        tokens: Sequence[int],
        num_cached: int,
        max_depth: int,
        tree_size_hint: int | None = None,
        guide: Guide | None = None,
    ) -> TokenTree:
        num_pending = len(tokens) - num_cached
        root = num_pending - 1
        nodes = self._nodes
        nodes.tokens[:num_pending] = tokens[num_cached:]
        max_nodes = max(root + 1, min(self.max_nodes, tree_size_hint or self.max_nodes))
        depth = min(max_depth, self._max_depth)
        digest = None
        if guide is None:
            size, digest = self._grow_below(root + 1, guided.NO_LIMITS, len(tokens), root, max_nodes, depth)
        else:
            size = self._grow_guided(guide, len(tokens), root, max_nodes, depth)
        return self._tree(size, root, max_depth, digest)

    def _tree(self, size: int, root: int, max_depth: int, digest: int | None = None) -> TokenTree:
        """Return the tree of the first `size` nodes; see TokenTree for `digest`."""
        tokens, parents, depths, path_probabilities = self._nodes.rows[:, :size].copy()
        return TokenTree.from_arrays(tokens, parents, depths, path_probabilities, root, max_depth, digest)

    def _grow_below(
        self, num_seeds: int, limits: guided.Limits, position: int, root: int, max_nodes: int, max_depth: int
    ) -> tuple[int, int]:
        state = (self._drafts, self._noise, self.rates, self._nodes, self._frontier, self._candidates)
        return self._grow(*state, position, root, num_seeds, limits, max_nodes, max_depth)

    def _grow_guided(self, guide: Guide, position: int, root: int, max_nodes: int, max_depth: int) -> int:
        """Grow a tree under a constraint, with all forced and no forbidden tokens; return T."""
        nodes = self._nodes
        guided.plant_root(self._drafts, nodes, root)
        chain = np.array(guide.forced(max_depth), np.int64)
        size = num_known = guided.plant(self._drafts, nodes, root + 1, root, chain, max_nodes)
        masks = guide.masks(nodes.tokens[:size], nodes.parents[:size], root, range(root, size))
        limits = guided.Limits(masks, guided.NO_LIMITS.refused)
        for _ in range(GUIDED_ROUNDS):
            num_grown, _ = self._grow_below(size, limits, position, root, max_nodes, max_depth)
            tokens, parents = nodes.rows[:2, :num_grown].copy()
            examined = guide.examine(tokens, parents, root, num_known, max_depth)
            num_known = guided.prune(nodes, examined.is_allowed, self._path, root, num_grown)
            size = num_known
            for node, forced in examined.forced:
                place = self._path[node]
                size = guided.plant(self._drafts, nodes, size, place, np.array(forced, np.int64), len(nodes.tokens))
            if size == num_known == num_grown:
                break
            limits = limits.without_removed(tokens, parents, self._path[:num_grown], root)
        guided.sort(nodes, root, size)
        return min(size, max_nodes)

    def keep(self, tree: TokenTree, nodes: np.ndarray) -> TokenTree:
        is_kept = np.zeros(len(tree) - tree.root, np.bool_)
        is_kept[nodes[tree.root :] - tree.root] = True
        size = _prune()(self._nodes, is_kept, self._path, tree.root, len(tree))
        return self._tree(size, tree.root, tree.max_depth)

    def accept(self, tree: TokenTree, result: VerificationResult) -> tuple[list[int], list[int]]:
        nodes, successors = self._nodes, result.successor_array
        num = self._accept(nodes.tokens, nodes.parents, tree.root, len(tree), successors, self._path)
        path = self._path[:num]
        return successors[path].tolist(), path[1:].tolist()

    def learn_prompt(self, tokens: Sequence[int], entries: np.ndarray) -> None:
        self._store_prompt(
            self._drafts.top_k,
            np.array(tokens, np.int64),
            np.array(entries, np.int32),
            np.zeros((1, tables.NUM_HASHES), np.int64),
            self._draft_tables.next_stamp(),
        )

    def advance_prefill(self, tokens: Sequence[int]) -> None:
        self._draft_tables.append_text(tokens[-1:])

    def advance(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        result: VerificationResult,
        committed: Sequence[int],
        path: Sequence[int],
    ) -> None:
        if result.top_k is None:  # a step without guesses: no top-k candidates were exchanged
            self._draft_tables.append_text(committed)
            self.counts.latest = self.counts.latest[:0]
            return
        self._draft_tables.ensure_capacity(len(committed))
        self.counts.latest = self._nodes.sources[np.array(path, np.int64)]
        self._advance(
            self._drafts,
            self._noise,
            self.rates,
            self._nodes,
            (self.counts.fed, self.counts.accepted),
            self._candidates,
            len(tokens) - len(committed),
            np.array([tree.root, *path], np.int64),
            np.array(committed, np.int64),
            result.successor_array,
            np.ascontiguousarray(result.top_k, np.int32),
            self._draft_tables.next_stamp(),
        )


@functools.cache
def _grow() -> Callable:
    """Return `grow` of growth.py, compiled for a drafter's arrays."""
    frontier, candidates = growth.make_frontier(1), make_candidates()
    return bound(growth.grow, *_smallest_state(), frontier, candidates, 0, 0, 0, guided.NO_LIMITS, 0, 0)


@functools.cache
def _learn() -> tuple[Callable, Callable, Callable]:
    """Return (accept, advance, store_prompt) of outcome.py, compiled for a drafter's arrays."""
    drafts, _, _, nodes = state = _smallest_state()
    counts, integers, entries = Counts(SOURCES), np.zeros(1, np.int64), np.zeros((1, ENTRY), np.int32)
    counted, hashes = (counts.fed, counts.accepted), np.zeros((1, tables.NUM_HASHES), np.int64)
    return (
        bound(outcome.accept, nodes.tokens, nodes.parents, 0, 0, integers, integers),
        bound(outcome.advance, *state, counted, make_candidates(), 0, *[integers] * 3, entries, 0),
        bound(outcome.store_prompt, drafts.top_k, integers, entries, hashes, 0),
    )


@functools.cache
def _prune() -> Callable:
    """Return `prune` of guided.py, compiled for a drafter's arrays."""
    return bound(guided.prune, make_nodes(1), np.zeros(1, np.bool_), np.zeros(1, np.int64), 0, 0)


def _smallest_state() -> tuple[tables.DraftArrays, tables.Noise, Rates, Nodes]:
    """Return minimal draft tables, noise, rates and nodes, as arguments for compilation."""
    draft_tables = DraftTables(SMALL_BYTES)
    return (
        draft_tables.drafts(NO_VOCABULARY, NO_CORPUS),
        tables.make_noise(None),
        draft_tables.rates,
        make_nodes(1),
    )


@compiles
def compile_growth() -> None:
    _grow()


@compiles
def compile_learning() -> None:
    _learn()


@compiles
def compile_pruning() -> None:
    _prune()


@compiles
def compile_drafter() -> None:
    """Compile all code of a request, or load it from disk, by decoding a greedy and a sampled step."""
    compile_growth()
    compile_learning()
    for noise in (None, NoiseKey(1, 0)):
        drafter = BestFirstDrafter(4, DraftTables(SMALL_BYTES), None, noise, max_depth=3)
        drafter.begin([1, 2, 1])
        tokens = [1, 2, 1, 2]
        drafter.learn_prompt([1, 2, 1], np.zeros((3, ENTRY), np.int32))
        drafter.advance_prefill(tokens)
        tree = drafter.propose(tokens, 3, max_depth=3)
        result = VerificationResult([1] * len(tree), np.zeros((len(tree), ENTRY), np.int32))
        accepted, path = drafter.accept(tree, result)
        drafter.advance([*tokens, *accepted], tree, result, accepted, path)
