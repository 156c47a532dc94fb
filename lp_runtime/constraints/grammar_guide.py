"""The state of a constraint at a sequence's committed tokens, for drafters and for the sampler: a Guide.

Letters: T nodes in the tree, n of them from the root on, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lp_runtime.constraints.compiled import (
    CompiledConstraint,
    describe_vocabulary,
    forced_bytes,
    library,
    load_compiled,
)
from lp_runtime.errors import ConstraintError
from lp_runtime.lookahead.guide import WORD_BITS, Examined
from lp_runtime.utils.jit import compiled

MAX_LOADED_BYTES = 1 << 28  # of serialised grammars whose loaded forms are kept


class Vocabulary:
    """A model's tokens, as constraints see them.

    Args:
        info: xgrammar's TokenizerInfo.

    Attributes:
        info: as given.
        size: V.
    """

    def __init__(self, info: Any):
        self.info, self.size = info, info.vocab_size
        self._ids = {text: token for token, text in enumerate(info.decoded_vocab) if text}
        self._longest = max(map(len, self._ids), default=0)

    def spell(self, text: bytes, max_tokens: int) -> list[int]:
        """Return tokens that spell a text, or its beginning, each as long as possible; at most `max_tokens`."""
        tokens: list[int] = []
        start = 0
        while start < len(text) and len(tokens) < max_tokens:
            lengths = range(min(self._longest, len(text) - start), 0, -1)
            length = next((length for length in lengths if text[start : start + length] in self._ids), 0)
            if not length:
                break
            tokens.append(self._ids[text[start : start + length]])
            start += length
        return tokens


class GrammarGuide:
    """A constraint's state. Implements lookahead.guide.Guide.

    Args:
        grammar: xgrammar's CompiledGrammar.
        vocabulary: the model's.
        eos_token_ids: tokens that end the text.

    Attributes:
        ends: [e] int64 tokens that end the text.
    """

    def __init__(self, grammar: Any, vocabulary: Vocabulary, eos_token_ids: Collection[int]):
        self._matcher = library().GrammarMatcher(grammar, override_stop_tokens=sorted(eos_token_ids))
        self._vocabulary = vocabulary
        self._num_words = -(-vocabulary.size // WORD_BITS)
        self.ends = np.array(sorted(eos_token_ids), np.int64)
        self._not_drafted = frozenset(eos_token_ids) | {-1}

    def allows(self, path: Sequence[int], token: int) -> bool:
        """See Guide."""
        if token in self._not_drafted:
            return False
        num = self._enter([*path, token])
        self._matcher.rollback(num)
        return num > len(path)

    def forced(self, max_tokens: int) -> list[int]:
        """See Guide."""
        if max_tokens <= 0 or self._matcher.is_terminated():
            return []
        return self._forced(max_tokens)

    def examine(self, tokens: np.ndarray, parents: np.ndarray, root: int, num_known: int, max_depth: int) -> Examined:
        """See Guide."""
        is_allowed = np.zeros(len(tokens) - root, np.bool_)
        forced = []
        for node, depth in self._allowed(tokens, parents, root):
            is_allowed[node - root] = True
            if node >= num_known and depth < max_depth and (chain := self._forced(max_depth - depth)):
                forced.append((node, chain))
        return Examined(is_allowed, sorted(forced))

    def masks(
        self, tokens: np.ndarray, parents: np.ndarray, root: int, nodes: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """See Guide."""
        masks = np.zeros((len(nodes), self._num_words), np.int32)
        if len(nodes) == 0:
            return masks
        memory, rows = torch.from_numpy(masks), {int(node): row for row, node in enumerate(nodes)}
        is_wanted = [False] * len(tokens)
        for node in rows:
            while node >= root and not is_wanted[node]:
                is_wanted[node], node = True, int(parents[node])
        for node, _ in self._allowed(tokens, parents, root, is_wanted):
            if node in rows:
                self._matcher.fill_next_token_bitmask(memory, rows[node])
        return masks

    def _forced(self, max_tokens: int) -> list[int]:
        """Return the likeliest tokens of the text that must follow where the matcher stands."""
        return self._vocabulary.spell(forced_bytes(self._matcher), max_tokens)

    def _allowed(
        self, tokens: np.ndarray, parents: np.ndarray, root: int, is_wanted: Sequence[bool] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield the nodes of a tree that are allowed, parents first, each while the matcher stands there.

        Args:
            tokens: [T] int64 token ids.
            parents: [T] int64 index of each node's parent.
            root: index of the root.
            is_wanted: [T] whether to look at each node, and below it; None to look at all.

        Yields:
            (node, depth): index of the node, and how far it is below the root. All must be asked for.
        """
        matcher, num = self._matcher, len(tokens) - root
        if matcher.is_terminated():
            return
        links = np.full((3, num), -1, np.int64)
        link(parents, root, links)
        children, siblings, ids = links[0].tolist(), links[1].tolist(), tokens[root:].tolist()
        yield root, 0
        path: list[int] = []  # nodes that the matcher has accepted
        node = children[0]
        while node >= 0 or path:
            if node < 0:  # the last of its siblings is behind us
                matcher.rollback(1)
                node = siblings[path.pop()]
            elif self._enters(ids[node], is_wanted is None or is_wanted[root + node]):
                path.append(node)
                yield root + node, len(path)
                node = children[node]
            else:
                node = siblings[node]

    def _enters(self, token: int, is_wanted: bool) -> bool:
        """Advance the matcher by the token of a node that is wanted, if the token may stand in a tree."""
        return is_wanted and token not in self._not_drafted and self._matcher.accept_token(token)

    def advance(self, committed: Sequence[int]) -> None:
        """See Guide."""
        for token in committed:
            if not self._matcher.accept_token(token):
                if self._is_at_dead_end():
                    raise ConstraintError("the constraint has reached a dead end: no token can follow the text so far")
                raise ConstraintError(
                    f"token {token} was chosen, which the constraint forbids: are the logits numbers?"
                )

    def _is_at_dead_end(self) -> bool:
        """Whether no token may follow where the matcher stands, though the text has not ended."""
        if self._matcher.is_terminated():
            return False
        mask = np.zeros((1, self._num_words), np.int32)
        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask))
        return not mask.any()

    def _enter(self, path: Sequence[int]) -> int:
        """Advance the matcher along a path, as far as that is allowed; return by how many tokens."""
        for num, token in enumerate(path):
            if not self._matcher.accept_token(token):
                return num
        return len(path)


@compiled
def link(parents: np.ndarray, root: int, links: np.ndarray) -> None:
    """Write the first child and the next sibling of every node from the root on.

    Args:
        parents: [T] int64 index of each node's parent.
        root: index of the root.
        links: [3, n] int64, -1 at first: first child, next sibling, last child so far; counted from the root.
    """
    for node in range(1, links.shape[1]):
        parent = parents[root + node] - root
        last = links[2, parent]
        if last < 0:
            links[0, parent] = node
        else:
            links[1, last] = node
        links[2, parent] = node


class Grammars:
    """Makes the guides of requests on one replica; loaded grammars are kept.

    Args:
        tokenizer: returns the model's tokenizer; called at the first request with a constraint.
        vocabulary_size: the model's.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Callable[[], Any], vocabulary_size: int, eos_token_ids: Collection[int]):
        self._tokenizer, self._vocabulary_size, self._eos_token_ids = tokenizer, vocabulary_size, eos_token_ids
        self._vocabularies: dict[bool, Vocabulary] = {}
        self._loaded: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def vocabulary(self, with_special_tokens: bool) -> Vocabulary:
        """Return the model's tokens, with or without special ones."""
        if with_special_tokens not in self._vocabularies:
            info = describe_vocabulary(
                self._tokenizer(), self._vocabulary_size, self._eos_token_ids, with_special_tokens
            )
            self._vocabularies[with_special_tokens] = Vocabulary(info)
        return self._vocabularies[with_special_tokens]

    def guide(self, constraint: CompiledConstraint) -> GrammarGuide:
        """Return the state of a constraint before the first new token."""
        vocabulary = self.vocabulary(constraint.has_special_tokens)
        if constraint.key not in self._loaded:
            grammar = load_compiled(constraint, vocabulary.info)
            self._loaded[constraint.key] = grammar, grammar.memory_size_bytes
        grammar, _ = self._loaded[constraint.key]
        self._loaded.move_to_end(constraint.key)
        while len(self._loaded) > 1 and sum(size for _, size in self._loaded.values()) > MAX_LOADED_BYTES:
            self._loaded.popitem(last=False)
        return GrammarGuide(grammar, vocabulary, self._eos_token_ids)
