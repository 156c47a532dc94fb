"""SuffixDecoding (arXiv 2411.04975) as a drafter of this runtime.

Follows the rules of vLLM's method `suffix`. Two trees count the occurrences of n-grams: one in the request's prompt and
answer, one in all answers. Every suffix of the text is looked up in both. A suffix of n tokens is continued by at most
n tokens, each the most frequent one after those before it, while the product of relative frequencies is 0.1 or more.
The continuation with the largest sum of these products is proposed, as a chain. Defaults are vLLM's; answers are never
evicted here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from peers import Peer

from lp_runtime.lookahead.drafter import VerificationResult
from lp_runtime.lookahead.guide import Guide
from lp_runtime.lookahead.tree import TokenTree

MAX_DEPTH = 24  # tokens of the longest n-gram: suffix_decoding_max_tree_depth
MIN_PROBABILITY = 0.1  # of a proposed token: suffix_decoding_min_token_prob


class _Node:
    """Count of an n-gram, and the n-grams with one token more."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, _Node] = {}


class SuffixTree:
    """Counts of all n-grams of up to MAX_DEPTH tokens in some texts."""

    def __init__(self) -> None:
        self._root = _Node()
        self._ends: deque[_Node] = deque(maxlen=MAX_DEPTH)  # nodes of the text's suffixes, the longest first

    def begin_text(self) -> None:
        """Begin a new text; n-grams do not extend into the previous text."""
        self._ends.clear()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._root.count += 1
            ends, self._ends = [*self._ends, self._root], deque(maxlen=MAX_DEPTH)
            for node in ends:
                child = node.children.setdefault(token, _Node())
                child.count += 1
                self._ends.append(child)

    def speculate(self, context: Sequence[int]) -> tuple[float, list[int]]:
        """Return (score, tokens) of the best continuation of a context's suffixes; (0, []) if there is none."""
        best: tuple[float, list[int]] = (0.0, [])
        for length in range(1, len(context)):
            node: _Node | None = self._root
            for token in context[len(context) - length :]:
                node = node.children.get(token) if node is not None else None
            if node is None:
                break
            continuation = _continue(node, min(length, MAX_DEPTH))
            best = continuation if continuation[0] >= best[0] else best  # at equal scores prefer the longer suffix
        return best


def _continue(node: _Node, max_tokens: int) -> tuple[float, list[int]]:
    """Return (score, tokens) of the most frequent continuation of an n-gram."""
    probability, score, tokens = 1.0, 0.0, list[int]()
    while node.children and len(tokens) < max_tokens:
        token, child = max(node.children.items(), key=lambda each: each[1].count)
        probability *= child.count / node.count
        if probability < MIN_PROBABILITY:
            break
        tokens.append(token)
        score += probability
        node = child
    return score, tokens


class SuffixDrafter(Peer):
    """Drafter of SuffixDecoding; its tree of answers outlives requests."""

    def __init__(self) -> None:
        super().__init__("text", "answers")
        self.max_nodes = 1 + MAX_DEPTH
        self.max_committed = MAX_DEPTH + 1
        self._answers = SuffixTree()
        self._local = SuffixTree()
        self._is_local = False  # whether the last tree came from the request's own text

    def begin(self, tokens: Sequence[int]) -> None:
        self._local = SuffixTree()
        self._local.extend(tokens)
        self._answers.begin_text()

    def propose(
        self,
        tokens: Sequence[int],
        num_cached: int,
        max_depth: int,
        tree_size_hint: int | None = None,
        guide: Guide | None = None,
    ) -> TokenTree:
        context = tokens[-MAX_DEPTH:]
        local, answers = self._local.speculate(context), self._answers.speculate(context)
        self._is_local = local[0] >= answers[0]
        tree = TokenTree(tokens[num_cached:], max_depth)
        tree.add_branch((local if self._is_local else answers)[1])
        return tree

    def advance_prefill(self, tokens: Sequence[int]) -> None:
        self._learn(tokens[-1:])

    def advance(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        result: VerificationResult,
        committed: Sequence[int],
        path: Sequence[int],
    ) -> None:
        self._learn(committed)
        nodes = range(tree.root + 1, len(tree))
        self.count(tree, path, [nodes if self._is_local else (), nodes])

    def _learn(self, tokens: Sequence[int]) -> None:
        self._local.extend(tokens)
        self._answers.extend(tokens)
