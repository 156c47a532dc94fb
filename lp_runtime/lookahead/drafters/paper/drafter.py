"""The paper's drafter: the Jacobi window, and up to G guesses from the n-gram pool (paper, section 3)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from lp_runtime.lookahead.drafter import CountingDrafter, PoolStatistics, VerificationResult, places_of
from lp_runtime.lookahead.drafters.paper.pool import NGramPool
from lp_runtime.lookahead.drafters.paper.window import Slots, Window
from lp_runtime.lookahead.guide import Guide
from lp_runtime.lookahead.tree import TokenTree, accept


class PaperDrafter(CountingDrafter):
    """Proposes the window and the pool's guesses as one tree.

    Args:
        sizes: (W, N, G): window size in columns, >= 0, 0 for no window; n-gram size, >= 2; largest number of guesses
            verified in a step, >= 0.
        window_seed: seed for the choice of prompt tokens that window slots start from.
        only_guesses: whether to accept along guesses only, as the paper does, instead of along any node of the tree.
        samples: whether successors are sampled. The window itself always uses the likeliest tokens.
        budget: largest number of nodes, including pending tokens; None for no limit besides W, N and G.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        pool_from_prompt: bool = True,
        window_seed: int = 0,
        only_guesses: bool = False,
        samples: bool = False,
        budget: int | None = None,
    ):
        super().__init__("guesses", "window")
        W, N, G = sizes
        self.W, self.N = W, N
        self.max_nodes = 1 + max(0, W * (N - 1) - 1) + G * (N - 1)
        self.max_committed = max(W + N - 3 if W else 0, N - 1 if G else 0) + 1
        self.num_top_k = 1 if samples and W else 0
        self.pool = NGramPool(N, G)
        self.window: Window | None = None
        self._pool_from_prompt = pool_from_prompt
        self._random = random.Random(window_seed)
        self._only_guesses = only_guesses
        self._budget = budget
        self._prompt: list[int] = []
        self._pool_first = 0
        self._slots: Slots = []
        self._guess_nodes: set[int] = set()

    def begin(self, tokens: Sequence[int]) -> None:
        self._prompt = list(tokens)
        self._pool_first = 0 if self._pool_from_prompt else len(tokens)
        self.pool.insert_text(tokens, self._pool_first, 0)
        self.window = Window(self.W, self.N, self._refill) if self.W else None

    def _refill(self, previous: int | None) -> int:
        """Return a first guess for a window slot: what last followed `previous`, else a random prompt token."""
        expected = None if previous is None else self.pool.expect(previous)
        return self._prompt[self._random.randrange(len(self._prompt))] if expected is None else expected

    def propose(
        self,
        tokens: Sequence[int],
        num_cached: int,
        max_depth: int,
        tree_size_hint: int | None = None,
        guide: Guide | None = None,
    ) -> TokenTree:
        tree, certain = self.start_tree(tokens, num_cached, max_depth, self._budget, guide)
        self._guess_nodes = set(range(tree.root + 1, len(tree)))  # tokens that a constraint forces
        self._slots = self.window.place(tree) if self.window else []
        for guess in self.pool.guesses(tree.tokens[certain]):
            self._guess_nodes.update(tree.add_branch(guess, certain))
        return tree

    def keep(self, tree: TokenTree, nodes: np.ndarray) -> TokenTree:
        places = places_of(nodes)
        self._guess_nodes = {places[node] for node in self._guess_nodes if node in places}
        self._slots = [[None if node is None else places.get(node) for node in level] for level in self._slots]
        return super().keep(tree, nodes)

    def accept(self, tree: TokenTree, result: VerificationResult) -> tuple[list[int], list[int]]:
        accepted, path = accept(tree, result.successors)
        if self._only_guesses:
            num_guessed = next((i for i, node in enumerate(path) if node not in self._guess_nodes), len(path))
            accepted, path = accepted[: num_guessed + 1], path[:num_guessed]
        return accepted, path

    def may_accept(self, node: int) -> bool:
        return not self._only_guesses or node in self._guess_nodes

    def pool_statistics(self) -> PoolStatistics:
        return self.pool.statistics()

    def advance_prefill(self, tokens: Sequence[int]) -> None:
        self.pool.insert_text(tokens, self._pool_first, len(self._prompt))

    def advance(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        result: VerificationResult,
        committed: Sequence[int],
        path: Sequence[int],
    ) -> None:
        successors = result.successor_array.tolist()
        if result.top_k is not None:  # the window continues with the likeliest tokens, even if others were sampled
            successors = [-1] * tree.root + result.top_k[:, 0].tolist()
        ngrams = self.window.ngrams(tree, self._slots, successors) if self.window else []
        for ngram in ngrams:
            self.pool.insert(ngram)
        self.pool.insert_text(tokens, self._pool_first, len(tokens) - len(committed))
        self.pool.record_step(path, self._guess_nodes)
        self.count(tree, path, [self._guess_nodes, range(tree.root + 1, len(tree))])
        if self.window:
            self.window.advance(self._slots, successors, len(committed))
