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

from lp_runtime.lookahead import growing, tables
from lp_runtime.lookahead.candidates import SOURCES, make_candidates, make_nodes
from lp_runtime.lookahead.compiled import bound, with_fresh_cache
from lp_runtime.lookahead.drafts import Memory
from lp_runtime.lookahead.policy import Counts, Found, Policy
from lp_runtime.lookahead.tree import TokenTree

MAX_DEPTH = 24
NO_VOCABULARY = np.zeros((0, tables.ENTRY), np.int32)


class BestFirstPolicy(Policy):
    """Grows trees best first.

    Args:
        max_nodes: nodes of a tree at most, pending tokens counted; the root is always there.
        memory: its tables; cleared by whoever owns it, if at all.
        vocabulary: [V, ENTRY] what follows each token alone; None for nothing.
        noise: (seed, sample) where successors are sampled, else None.
        max_depth: of a tree.
    """

    num_runners_up = tables.K

    def __init__(
        self,
        max_nodes: int,
        memory: Memory,
        vocabulary: np.ndarray | None = None,
        noise: tuple[int, int] | None = None,
        max_depth: int = MAX_DEPTH,
    ):
        self.max_nodes = max_nodes
        self.max_run = min(max_depth, max_nodes - 1) + 1
        self.counts = Counts(SOURCES)
        self._max_depth = max_depth
        self._memory = memory
        self._drafts = memory.drafts(NO_VOCABULARY if vocabulary is None else vocabulary)
        seed, sample = noise or (0, 0)
        self._noise = tables.make_noise(noise is not None, seed, sample)
        room = max_nodes + self.max_run
        self._nodes = make_nodes(room)
        self._pushed = growing.make_pushed(room)
        self._candidates = make_candidates()
        self._path = np.zeros(room, np.int64)
        self._counted = (self.counts.fed, self.counts.accepted)
        self._grow, self._accept, self._advance = _bind_kernels()

    def begin(self, tokens: Sequence[int]) -> None:
        self._memory.begin_text(tokens)

    def propose(
        self, tokens: Sequence[int], num_cached: int, max_depth: int, num_wanted: int | None = None
    ) -> TokenTree:
        num_pending = len(tokens) - num_cached
        root = num_pending - 1
        nodes = self._nodes
        nodes.tokens[:num_pending] = tokens[num_cached:]
        size, digest = self._grow(
            self._drafts,
            self._noise,
            self._memory.rates,
            nodes,
            self._pushed,
            self._candidates,
            len(tokens),
            root,
            max(root + 1, min(self.max_nodes, num_wanted or self.max_nodes)),
            min(max_depth, self._max_depth),
        )
        return TokenTree.from_arrays(*nodes.rows[:, :size].copy(), root, max_depth, digest)

    def accept(self, tree: TokenTree, found: Found) -> tuple[list[int], list[int]]:
        nodes, drawn = self._nodes, found.drawn
        num = self._accept(nodes.tokens, nodes.parents, tree.root, len(tree), drawn, self._path)
        path = self._path[:num]
        return drawn[path].tolist(), path[1:].tolist()

    def advance_prefill(self, tokens: Sequence[int], found: Found) -> None:
        self._memory.append_text(tokens[-1:])

    def advance(
        self, tokens: Sequence[int], tree: TokenTree, found: Found, run: Sequence[int], path: Sequence[int]
    ) -> None:
        if found.runners_up is None:  # a step that guessed nothing, and was told of nothing
            self._memory.append_text(run)
            return
        self._advance(
            self._drafts,
            self._noise,
            self._memory.rates,
            self._nodes,
            self._counted,
            self._candidates,
            len(tokens) - len(run),
            np.array([tree.root, *path], np.int64),
            np.array(run, np.int64),
            found.drawn,
            np.ascontiguousarray(found.runners_up, np.int32),
            self._memory.next_stamp(),
        )


@functools.cache
def _bind_kernels() -> tuple[Callable, Callable, Callable]:
    """(grow, accept, advance) of growing.py, for the arrays that a policy has."""
    memory, nodes, counts, candidates = Memory(1 << 16), make_nodes(1), Counts(SOURCES), make_candidates()
    counted = (counts.fed, counts.accepted)
    integers, entries = np.zeros(1, np.int64), np.zeros((1, tables.ENTRY), np.int32)
    state = (memory.drafts(NO_VOCABULARY), tables.make_noise(False, 0, 0), memory.rates, nodes)
    return (
        bound(growing.grow, *state, growing.make_pushed(1), candidates, 0, 0, 0, 0),
        bound(growing.accept, nodes.tokens, nodes.parents, 0, 0, integers, integers),
        bound(growing.advance, *state, counted, candidates, 0, *[integers] * 3, entries, 0),
    )


@functools.cache
def compile_kernels() -> None:
    """Compile, or load from where it is kept, whatever a request needs, so that none waits for it. Once a process."""
    with_fresh_cache(_try_kernels)


def _try_kernels() -> None:
    for noise in (None, (1, 0)):
        policy = BestFirstPolicy(4, Memory(1 << 16), noise=noise)
        policy.begin([1, 2, 1])
        tokens = [1, 2, 1, 2]
        policy.advance_prefill(tokens, Found([2]))
        tree = policy.propose(tokens, 3, max_depth=3)
        told = np.zeros((len(tree), tables.ENTRY), np.int32)
        found = Found([1] * len(tree), told)
        run, path = policy.accept(tree, found)
        policy.advance([*tokens, *run], tree, found, run, path)
