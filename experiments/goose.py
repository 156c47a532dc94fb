"""Goose (arXiv 2604.02047) as a drafter of this runtime.

Follows the rules of its published code (github 2kinto/GOOSE_Speculative_Decoding, goose/). Section numbers are the
paper's.

- Spine (4.1): at most 20 tokens that followed the first earlier occurrence of the text's last 5, else 4, else 3 tokens.
- Branches: two tables of a context's last top-10 candidates with their softmax over these ten: by the last two tokens,
  queried first, and by the last token. All positions enter them, the prompt's, too. A tree's root enters only the table
  by the last token.
- Confidence (4.3): 1.0 if two or more occurrences of the context all continue equally; else 0.6 x length / 8 for a
  chain below 8 tokens, 0.7 + 0.2 x (length - 8) / 12, at most 0.9, for a longer one. Above 0.6, further matches
  continue the chain to 100 x confidence tokens. Confidence adds up to 100 - budget nodes, and gives the spine more.
- Tree (algorithm 1): the spine gets half of the budget, or 0.3 or 0.15 if the moving average of accepted spine tokens
  is below 0.4 or 0.2. Half of the rest branches off the root, half off the spine by 1/i; what is left extends branches.
- Without candidates after the last token, the chain is verified alone (4.2).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from peers import Peer

from lp_runtime.lookahead.drafter import VerificationResult
from lp_runtime.lookahead.guide import Guide
from lp_runtime.lookahead.tree import TokenTree

NGRAMS = (5, 4, 3)  # tokens per matched context, the longest first
MAX_CHAIN = 20  # tokens copied from a match
MAX_EXTENDED = 100  # tokens of a chain continued by further matches, and nodes of a tree
LONG_MATCH = 8  # tokens of a chain with high confidence
EXTENDS_ABOVE = 0.6  # confidence above which a chain is extended
MIN_SCORE = 0.01  # of a branch
TOP_K = 10  # candidates of a context
MAX_BRANCH_DEPTH = 6
SPINE_SHARE = 0.5  # of the branches' budget: the part that branches off the spine
SPINE_RATIOS = (0.15, 0.30, 0.50)  # of the budget, for average acceptance below 0.2, below 0.4, above
ALPHA = 0.3  # of the moving average

Candidates = list[tuple[int, float]]  # (token id, score), the likeliest first


class Draft(NamedTuple):
    """Tree as lists; the first node is the root, and the spine follows it.

    Attributes:
        tokens: token ids.
        parents: index of each node's parent; -1 for the root.
        num_spine: nodes of the spine.
    """

    tokens: list[int]
    parents: list[int]
    num_spine: int


class Branches:
    """The two tables of candidates."""

    def __init__(self) -> None:
        self._by_last: dict[int, Candidates] = {}
        self._by_two: dict[tuple[int, int], Candidates] = {}

    def note(self, tokens: Sequence[int], previous: Sequence[int | None], ids: np.ndarray, logits: np.ndarray) -> None:
        """Enter the candidates after each of n tokens.

        Args:
            tokens: [n] token ids.
            previous: [n] the token before each; None to leave it out of the table by two tokens.
            ids: [n, TOP_K] candidates.
            logits: [n, TOP_K] of the candidates.
        """
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        halves = scores.astype(np.float16).astype(np.float64)  # precision of the published table by one token
        for place, (token, before) in enumerate(zip(tokens, previous, strict=True)):
            row = ids[place].tolist()
            self._by_last[token] = list(zip(row, halves[place].tolist(), strict=True))
            if before is not None:
                self._by_two[before, token] = list(zip(row, scores[place].tolist(), strict=True))

    def after(self, token: int, previous: int | None) -> Candidates:
        """Return the candidates after a token; empty if it was never seen."""
        candidates = None if previous is None else self._by_two.get((previous, token))
        return self._by_last.get(token, []) if candidates is None else candidates


class Matcher:
    """Positions of all contexts in the text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # indices of the tokens after each n-gram

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        start = len(self._tokens)
        self._tokens += tokens
        for size in NGRAMS:  # no token follows the n-gram at the very end yet
            for place in range(max(0, start - size), len(self._tokens) - size):
                self._places.setdefault(tuple(self._tokens[place : place + size]), []).append(place + size)

    def _occurrences(self, tokens: Sequence[int]) -> list[int]:
        """Return the indices after the occurrences of the longest context at the end of `tokens` that has any."""
        for size in NGRAMS:
            places = self._places.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if places:
                return places
        return []

    def chain(self, tokens: Sequence[int]) -> list[int]:
        """Return the continuation of `tokens`; empty without a match."""
        places = self._occurrences(tokens)
        return self._tokens[places[0] : places[0] + MAX_CHAIN] if places else []

    def confidence(self, tokens: Sequence[int], chain: Sequence[int]) -> float:
        """Return the confidence in a chain that continues `tokens`, 0.0 to 1.0."""
        places = set(self._occurrences(tokens))
        if chain and len(places) >= 2 and len({self._tokens[place] for place in places}) == 1:
            return 1.0
        if len(chain) >= LONG_MATCH:
            return min(0.9, 0.7 + 0.2 * (len(chain) - LONG_MATCH) / 12)
        return 0.6 * len(chain) / LONG_MATCH


def extended(matcher: Matcher, tokens: Sequence[int], chain: list[int], confidence: float) -> list[int]:
    """Return a chain continued by further matches; at confidence 1.0, stop after a less certain match."""
    drafted = [*tokens, *chain]
    while len(drafted) - len(tokens) < int(MAX_EXTENDED * confidence):
        more = matcher.chain(drafted)
        if not more:
            break
        is_last = confidence >= 1.0 and matcher.confidence(drafted, more) < 1.0
        drafted += more
        if is_last:
            break
    return drafted[len(tokens) :]


class Grower:
    """Builds one tree (algorithm 1).

    Args:
        branches: the tables.
        anchor: the root's token.
        previous: the token before the root.
        budget: nodes, the root included.
    """

    def __init__(self, branches: Branches, anchor: int, previous: int | None, budget: int):
        self._branches, self._previous, self._budget = branches, previous, budget
        self.draft = Draft([anchor], [-1], 0)
        self._depths = [0]
        self._frontier: deque[tuple[int, float]] = deque()

    def _candidates(self, node: int) -> Candidates:
        parent = self.draft.parents[node]
        return self._branches.after(self.draft.tokens[node], self.draft.tokens[parent] if node else self._previous)

    def _add(self, token: int, parent: int, score: float | None = None) -> int:
        """Add a node; one with a score is a branch, and may grow."""
        node = len(self.draft.tokens)
        self.draft.tokens.append(token)
        self.draft.parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        if score is not None and self._depths[node] < MAX_BRANCH_DEPTH:
            self._frontier.append((node, score))
        return node

    def _fork(self, node: int, num: int, on_spine: int | None) -> None:
        """Add branches to a node of the spine or the root, except for the spine's own next token."""
        for token, score in self._candidates(node):
            if num <= 0 or score < MIN_SCORE:
                break
            if token != on_spine:
                self._add(token, node, score)
                num -= 1

    def grow(self, chain: Sequence[int], ratio: float) -> Draft:
        """Return the tree.

        Args:
            chain: the spine's tokens; empty for a tree of branches alone.
            ratio: maximum share of the budget for the spine.
        """
        spine = list(chain[: int(self._budget * ratio)])
        node = 0
        for token in spine:
            node = self._add(token, node)
        left = self._budget - 1 - len(spine)
        on_spine = max(1, int(left * SPINE_SHARE)) if spine and left > 0 else 0
        self._fork(0, left - on_spine, chain[0] if chain else None)
        for place, num in enumerate(harmonic(on_spine, len(spine))):
            self._fork(1 + place, num, spine[place + 1] if place + 1 < len(spine) else None)
        self._extend()
        return self.draft._replace(num_spine=len(spine))

    def _extend(self) -> None:
        """Extend the branches, breadth first, while there is budget."""
        left = self._budget - len(self.draft.tokens)
        while self._frontier and left > 0:
            node, score = self._frontier.popleft()
            candidates = self._candidates(node)
            width = max(1, min(len(candidates), math.ceil(left * score)))
            for token, its_score in candidates[: min(width, max(1, TOP_K // self._depths[node]))]:
                if left <= 0 or its_score < MIN_SCORE:
                    break
                self._add(token, node, its_score)
                left -= 1


def harmonic(budget: int, num_places: int) -> list[int]:
    """Return a budget split by the weights 1, 1/2, 1/3 ..., at least 1 each while it lasts."""
    weights = [1 / (place + 1) for place in range(num_places)]
    shares = []
    left = budget
    for weight in weights:
        share = min(max(1, int(budget * weight / sum(weights))), left) if left > 0 else 0
        shares.append(share)
        left -= share
    return shares


class GooseDrafter(Peer):
    """Drafter of Goose.

    Args:
        budget: nodes of a tree, the root included, before confidence adds some; 60 in the published code.

    Attributes:
        average: moving average of the share of spines that was accepted.
    """

    def __init__(self, budget: int = 60):
        super().__init__("spine", "branch")
        self.max_nodes = max(budget, MAX_EXTENDED) + 1  # the root is added to a spine that uses the whole budget
        self.max_committed = self.max_nodes
        self._budget = budget
        self._branches = Branches()
        self._matcher = Matcher()
        self._num_spine = 0  # nodes of the last tree's spine
        self._is_chain = False  # whether the last tree was a chain because the tables had no branches
        self._before_root: int | None = None
        self.average = 0.5

    def begin(self, tokens: Sequence[int]) -> None:
        self._matcher, self.average = Matcher(), 0.5  # the spine's text and the average belong to one request
        self._matcher.extend(tokens)

    def note_prompt(self, tokens: Sequence[int], ids: np.ndarray, logits: np.ndarray) -> None:
        self._branches.note(tokens, [None, *tokens[:-1]], ids, logits)

    def note_nodes(self, tree: TokenTree, ids: np.ndarray, logits: np.ndarray) -> None:
        tokens, parents = tree.tokens, tree.parents
        previous: list[int | None] = [tokens[parents[node]] for node in range(tree.root + 1, len(tree))]
        self._branches.note(
            tokens[tree.root :], [self._before_root if self._is_chain else None, *previous], ids, logits
        )

    def advance_prefill(self, tokens: Sequence[int]) -> None:
        self._matcher.extend(tokens[-1:])

    def propose(
        self,
        tokens: Sequence[int],
        num_cached: int,
        max_depth: int,
        tree_size_hint: int | None = None,
        guide: Guide | None = None,
    ) -> TokenTree:
        draft = self.draft(tokens)
        tree = TokenTree(tokens[num_cached:], max_depth)
        nodes: list[int | None] = [tree.root]
        for token, parent in zip(draft.tokens[1:], draft.parents[1:], strict=True):
            above = nodes[parent]
            nodes.append(None if above is None else tree.add(above, token))
        self._num_spine = sum(node is not None for node in nodes[1 : 1 + draft.num_spine])
        return tree

    def draft(self, tokens: Sequence[int]) -> Draft:
        """Return the tree after a text."""
        anchor, self._before_root = tokens[-1], tokens[-2] if len(tokens) > 1 else None
        chain = self._matcher.chain(tokens)
        self._is_chain = not self._branches.after(anchor, self._before_root)
        if self._is_chain:
            return Draft([anchor, *chain], list(range(-1, len(chain))), len(chain))
        confidence = self._matcher.confidence(tokens, chain) if chain else 0.0
        if confidence > EXTENDS_ABOVE:
            chain = extended(self._matcher, tokens, chain, confidence)
        ratio = SPINE_RATIOS[(self.average >= 0.2) + (self.average >= 0.4)]
        budget = self._budget + int(confidence * max(0, MAX_EXTENDED - self._budget))
        grower = Grower(self._branches, anchor, self._before_root, budget)
        draft = grower.grow(chain, ratio + confidence * (1 - ratio))
        self._is_chain = len(draft.tokens) < 2  # an ordinary step; the published code counts it as a chain
        return draft

    def advance(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        result: VerificationResult,
        committed: Sequence[int],
        path: Sequence[int],
    ) -> None:
        spine = range(tree.root + 1, tree.root + 1 + self._num_spine)
        if spine and not self._is_chain:
            rate = sum(node in spine for node in path) / len(spine)
            self.average = ALPHA * rate + (1 - ALPHA) * self.average
        self._matcher.extend(committed)
        self.count(tree, path, [spine, range(tree.root + 1, len(tree))])
