"""The runtime's own drafting: one tree, grown best first from everything that is free.

Sources of what may follow a context (candidates.py): what followed the longest match of it in the text; the runners-up
that a forward pass found under its last 4, 3, 2 and 1 tokens, in this text or in a branch of an earlier tree; and what
the model says follows its last token alone. How often a candidate is accepted is counted by source, length or order,
rank and log-probability, and the tree takes, of all candidates below all its nodes, always the one that is likeliest to
be reached. Where successors are sampled, candidates are ranked by log-probability plus the noise of the position that
they would stand at (sampling.py): what will be drawn there is what is proposed.

After: best-first trees as in OPT-Tree (arXiv 2406.17276), runners-up as in token recycling (arXiv 2408.08696), matches
as in prompt lookup; all of them at once, and with the noise known, are this project's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from lp_runtime.lookahead.drafters.base import Counts, Drafter, VerificationResult
from lp_runtime.lookahead.drafters.best_first import growth, tables
from lp_runtime.lookahead.drafters.best_first.candidates import SOURCES, make_candidates, make_nodes
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.utils.jit import bound, with_fresh_cache

MAX_DEPTH = 24
NO_VOCABULARY = np.zeros((0, tables.ENTRY), np.int32)


class BestFirstDrafter(Drafter):
    """Grows trees best first.

    Args:
        max_nodes: nodes of a tree at most, pending tokens counted; the root is always there.
        draft_tables: its tables; cleared by whoever owns it, if at all.
        vocabulary: [V, ENTRY] what follows each token alone; None for nothing.
        noise: (seed, sample) where successors are sampled, else None.
        max_depth: of a tree.
    """

    num_top_k = tables.K

    def __init__(
        self,
        max_nodes: int,
        draft_tables: DraftTables,
        vocabulary: np.ndarray | None = None,
        noise: tuple[int, int] | None = None,
        max_depth: int = MAX_DEPTH,
    ):
        self.max_nodes = max_nodes
        self.max_committed = min(max_depth, max_nodes - 1) + 1
        self.counts = Counts(SOURCES)
        self._max_depth = max_depth
        self._draft_tables = draft_tables
        self._drafts = draft_tables.drafts(NO_VOCABULARY if vocabulary is None else vocabulary)
        seed, sample = noise or (0, 0)
        self._noise = tables.make_noise(noise is not None, seed, sample)
        room = max_nodes + self.max_committed
        self._nodes = make_nodes(room)
        self._pushed = growth.make_pushed(room)
        self._candidates = make_candidates()
        self._path = np.zeros(room, np.int64)
        self._counted = (self.counts.fed, self.counts.accepted)
        self._grow, self._accept, self._advance = _bind_kernels()

    def begin(self, tokens: Sequence[int]) -> None:
        self._draft_tables.begin_text(tokens)

    def propose(
        self, tokens: Sequence[int], num_cached: int, max_depth: int, tree_size_hint: int | None = None
    ) -> TokenTree:
        num_pending = len(tokens) - num_cached
        root = num_pending - 1
        nodes = self._nodes
        nodes.tokens[:num_pending] = tokens[num_cached:]
        size, digest = self._grow(
            self._drafts,
            self._noise,
            self._draft_tables.rates,
            nodes,
            self._pushed,
            self._candidates,
            len(tokens),
            root,
            max(root + 1, min(self.max_nodes, tree_size_hint or self.max_nodes)),
            min(max_depth, self._max_depth),
        )
        return TokenTree.from_arrays(*nodes.rows[:, :size].copy(), root, max_depth, digest)

    def accept(self, tree: TokenTree, found: VerificationResult) -> tuple[list[int], list[int]]:
        nodes, drawn = self._nodes, found.successor_array
        num = self._accept(nodes.tokens, nodes.parents, tree.root, len(tree), drawn, self._path)
        path = self._path[:num]
        return drawn[path].tolist(), path[1:].tolist()

    def advance_prefill(self, tokens: Sequence[int], found: VerificationResult) -> None:
        self._draft_tables.append_text(tokens[-1:])

    def advance(
        self, tokens: Sequence[int], tree: TokenTree, found: VerificationResult, run: Sequence[int], path: Sequence[int]
    ) -> None:
        if found.top_k is None:  # a step that guessed nothing, and was told of nothing
            self._draft_tables.append_text(run)
            return
        self._advance(
            self._drafts,
            self._noise,
            self._draft_tables.rates,
            self._nodes,
            self._counted,
            self._candidates,
            len(tokens) - len(run),
            np.array([tree.root, *path], np.int64),
            np.array(run, np.int64),
            found.successor_array,
            np.ascontiguousarray(found.top_k, np.int32),
            self._draft_tables.next_stamp(),
        )


@functools.cache
def _bind_kernels() -> tuple[Callable, Callable, Callable]:
    """(grow, accept, advance) of growth.py, for the arrays that a drafter has."""
    draft_tables, nodes, counts, candidates = DraftTables(1 << 16), make_nodes(1), Counts(SOURCES), make_candidates()
    counted = (counts.fed, counts.accepted)
    integers, entries = np.zeros(1, np.int64), np.zeros((1, tables.ENTRY), np.int32)
    state = (draft_tables.drafts(NO_VOCABULARY), tables.make_noise(False, 0, 0), draft_tables.rates, nodes)
    return (
        bound(growth.grow, *state, growth.make_pushed(1), candidates, 0, 0, 0, 0),
        bound(growth.accept, nodes.tokens, nodes.parents, 0, 0, integers, integers),
        bound(growth.advance, *state, counted, candidates, 0, *[integers] * 3, entries, 0),
    )


@functools.cache
def compile_kernels() -> None:
    """Compile, or load from where it is kept, whatever a request needs, so that none waits for it. Once a process."""
    with_fresh_cache(_try_kernels)


def _try_kernels() -> None:
    for noise in (None, (1, 0)):
        drafter = BestFirstDrafter(4, DraftTables(1 << 16), noise=noise)
        drafter.begin([1, 2, 1])
        tokens = [1, 2, 1, 2]
        drafter.advance_prefill(tokens, VerificationResult([2]))
        tree = drafter.propose(tokens, 3, max_depth=3)
        told = np.zeros((len(tree), tables.ENTRY), np.int32)
        found = VerificationResult([1] * len(tree), told)
        run, path = drafter.accept(tree, found)
        drafter.advance([*tokens, *run], tree, found, run, path)
