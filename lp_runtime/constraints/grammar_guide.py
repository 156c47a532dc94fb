"""The state of a constraint at a sequence's committed tokens, for drafters and for the sampler: a Guide.

Letters: T nodes in the tree, n of them from the root on, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from lp_runtime.constraints.compiled import CompiledConstraint, describe_vocabulary, library, load_compiled
from lp_runtime.errors import ConstraintError
from lp_runtime.lookahead.guide import WORD_BITS
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
        self._masks: dict[tuple[int, ...], np.ndarray] = {}  # by path, at the committed tokens
        self._forced: dict[tuple[int, ...], bytes] = {}

    def allows(self, path: Sequence[int], token: int) -> bool:
        """See Guide."""
        if token < 0 or token in self.ends:
            return False
        key = tuple(path)
        if key not in self._masks:
            mask = np.zeros((1, self._num_words), np.int32)
            num = self._enter(path)
            if num == len(path):
                self._matcher.fill_next_token_bitmask(torch.from_numpy(mask))
            self._matcher.rollback(num)
            self._masks[key] = mask[0]
        return bool((int(self._masks[key][token // WORD_BITS]) >> (token % WORD_BITS)) & 1)

    def forced(self, path: Sequence[int], max_tokens: int) -> list[int]:
        """See Guide."""
        key = tuple(path)
        if max_tokens <= 0 or self._matcher.is_terminated():
            return []
        if key not in self._forced:
            num = self._enter(path)
            is_there = num == len(path) and not self._matcher.is_terminated()
            self._forced[key] = self._matcher.find_jump_forward_string().encode() if is_there else b""
            self._matcher.rollback(num)
        return self._vocabulary.spell(self._forced[key], max_tokens)

    def masks(self, tokens: np.ndarray, parents: np.ndarray, root: int) -> np.ndarray:
        """See Guide."""
        num = len(tokens) - root
        masks = np.zeros((num, self._num_words), np.int32)
        if self._matcher.is_terminated():
            return masks
        links = np.full((3, num), -1, np.int64)
        link(parents, root, links)
        child, sibling = torch.from_numpy(links[0]), torch.from_numpy(links[1])
        self._matcher.traverse_draft_tree(
            child, sibling, torch.from_numpy(np.ascontiguousarray(tokens[root:])), torch.from_numpy(masks)
        )
        return masks

    def advance(self, committed: Sequence[int]) -> None:
        """See Guide."""
        self._masks, self._forced = {}, {}
        for token in committed:
            if not self._matcher.accept_token(token):
                raise ConstraintError(
                    f"token {token} was chosen, which the constraint forbids: are the logits numbers?"
                )

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
