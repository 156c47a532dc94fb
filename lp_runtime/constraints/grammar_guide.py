"""The state of a constraint at a sequence's committed tokens: a Guide for drafters and the sampler.

Letters: T nodes in the tree, n of them from the root on, V vocabulary size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lp_runtime.constraints.compiled import CompiledConstraint, describe_vocabulary, forced_bytes, load_compiled
from lp_runtime.constraints.library import library
from lp_runtime.errors import ConstraintError
from lp_runtime.lookahead.guide import TOKENS_PER_WORD, Examined
from lp_runtime.text.token_text import TokenTexts
from lp_runtime.utils.jit import compiled

MAX_LOADED_BYTES = 1 << 28  # size of the cache of loaded grammars, in memory


class Vocabulary:
    """The bytes that each of V tokens adds to a text; `info`: xgrammar's TokenizerInfo of `token_texts`."""

    def __init__(self, info: Any, token_texts: TokenTexts):
        self.info, self.size = info, info.vocab_size
        self._token_texts = token_texts
        self._texts = info.decoded_vocab
        self._ids = {text: token for token, text in enumerate(self._texts) if text}
        self._longest = max(map(len, self._ids), default=0)

    def at_start(self, context: Sequence[int]) -> np.ndarray | None:
        """Return [V] int64 tokens that add elsewhere what each token adds first after a context; -1 for none.

        None if each adds what it adds elsewhere. Not so for decoders that strip the first space of a text.
        """
        tokens, differing = self._start_tokens
        return tokens if differing is not None and self._token_texts.is_at_start(context, differing) else None

    @cached_property
    def _start_tokens(self) -> tuple[np.ndarray, int | None]:
        """Return the tokens of `at_start` for an empty context, and a token that adds other text elsewhere."""
        tokens, differing = np.arange(self.size), None
        for token, text in enumerate(self._token_texts.all_bytes_at_start(self.size)):
            if self._texts[token] not in (b"", text):
                tokens[token], differing = self._ids.get(text, -1), token
        return tokens, differing

    def spell(self, text: bytes, max_tokens: int) -> list[int]:
        """Tokenize a text, or as much of it as possible, by longest match, to at most `max_tokens` tokens."""
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
    """A constraint's state, with xgrammar's matcher; implements lookahead.guide.Guide.

    `grammar` is xgrammar's CompiledGrammar, for the same vocabulary. `context` are the tokens that its text continues.
    """

    def __init__(
        self, grammar: Any, vocabulary: Vocabulary, eos_token_ids: Collection[int], context: Sequence[int] = ()
    ):
        self._matcher = library().GrammarMatcher(grammar, override_stop_tokens=sorted(eos_token_ids))
        self._vocabulary = vocabulary
        self._num_words = -(-vocabulary.size // TOKENS_PER_WORD)
        self.ends = np.array(sorted(eos_token_ids), np.int64)
        self._not_drafted = frozenset(eos_token_ids) | {-1}
        self._at_start = vocabulary.at_start(context)  # None once a token is committed

    def allows(self, path: Sequence[int], token: int) -> bool:
        if token in self._not_drafted:
            return False
        num = 0
        for each in (*path, token):
            if not self._accept(each, is_first=num == 0):
                break
            num += 1
        self._matcher.rollback(num)
        return num > len(path)

    def forced(self, max_tokens: int) -> list[int]:
        if max_tokens <= 0 or self._matcher.is_terminated():
            return []
        tokens = self._forced(max_tokens)
        is_changed = self._at_start is not None and tokens and self._at_start[tokens[0]] != tokens[0]
        return [] if is_changed else tokens

    def examine(self, tokens: np.ndarray, parents: np.ndarray, root: int, num_known: int, max_depth: int) -> Examined:
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
        if self._at_start is not None and root in rows:
            masks[rows[root]] = self._mask_at_start(masks[rows[root]])
        return masks

    def _mask_at_start(self, mask: np.ndarray) -> np.ndarray:
        """Convert a mask, [ceil(V / 32)] int32, to one of the tokens that begin the text."""
        assert self._at_start is not None
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        num = len(self._at_start)
        bits[:num] = np.where(self._at_start >= 0, bits[self._at_start], 0)
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _accept(self, token: int, is_first: bool) -> bool:
        """Advance the matcher by a token if it is allowed; `is_first`: whether it follows the root."""
        if self._at_start is not None and is_first:
            token = int(self._at_start[token])
        return token >= 0 and self._matcher.accept_token(token)

    def _forced(self, max_tokens: int) -> list[int]:
        return self._vocabulary.spell(forced_bytes(self._matcher), max_tokens)

    def _allowed(
        self, tokens: np.ndarray, parents: np.ndarray, root: int, is_wanted: Sequence[bool] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield (node, depth below the root) of the allowed nodes, parents first.

        At each yield the matcher's state is that after the node. Callers must exhaust the iterator, which then has
        returned the matcher to the root. `is_wanted` ([T], None for all) excludes nodes with their descendants.
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
            if node < 0:  # no sibling is left: go back to the parent
                matcher.rollback(1)
                node = siblings[path.pop()]
            elif (
                (is_wanted is None or is_wanted[root + node])
                and ids[node] not in self._not_drafted
                and self._accept(ids[node], is_first=not path)
            ):
                path.append(node)
                yield root + node, len(path)
                node = children[node]
            else:
                node = siblings[node]

    def advance(self, committed: Sequence[int]) -> None:
        for number, token in enumerate(committed):
            if not self._accept(token, is_first=number == 0):
                self.check_dead_end()
                raise ConstraintError(
                    f"token {token} was chosen, which the constraint forbids: do the logits contain NaN?"
                )
        if committed:
            self._at_start = None

    def check_dead_end(self) -> None:
        if self._matcher.is_terminated():
            return
        mask = np.zeros((1, self._num_words), np.int32)
        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask))
        if not mask.any():
            raise ConstraintError("the constraint has reached a dead end: no token can follow the text so far")


@compiled
def link(parents: np.ndarray, root: int, links: np.ndarray) -> None:
    """Compute the first child and the next sibling of every node from the root on.

    Args:
        parents: [T] int64 index of each node's parent.
        links: [3, n] int64 output, filled with -1 by the caller: first child, next sibling, and last child as scratch.
            Indices count from the root.
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
    """Factory of guides for the requests on one replica, with an LRU cache of loaded grammars.

    `tokenizer` is called at the first request with a constraint. `vocabulary_size` is the model's, which may exceed the
    tokenizer's.
    """

    def __init__(self, tokenizer: Callable[[], Any], vocabulary_size: int, eos_token_ids: Collection[int]):
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = eos_token_ids
        self._vocabularies: dict[bool, Vocabulary] = {}
        self._loaded: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def vocabulary(self, with_special_tokens: bool) -> Vocabulary:
        """Return the model's vocabulary, with or without text for its special tokens; built at the first call."""
        if with_special_tokens not in self._vocabularies:
            texts = self._token_texts
            info = describe_vocabulary(texts, self._vocabulary_size, self._eos_token_ids, with_special_tokens)
            self._vocabularies[with_special_tokens] = Vocabulary(info, texts)
        return self._vocabularies[with_special_tokens]

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self._tokenizer())

    def guide(self, constraint: CompiledConstraint, context: Sequence[int] = ()) -> GrammarGuide:
        """Create the guide of a request before its first new token; its text continues `context`."""
        vocabulary = self.vocabulary(constraint.has_special_tokens)
        if constraint.key not in self._loaded:
            grammar = load_compiled(constraint, vocabulary.info)
            self._loaded[constraint.key] = grammar, grammar.memory_size_bytes
        grammar, _ = self._loaded[constraint.key]
        self._loaded.move_to_end(constraint.key)
        while len(self._loaded) > 1 and sum(size for _, size in self._loaded.values()) > MAX_LOADED_BYTES:
            self._loaded.popitem(last=False)
        return GrammarGuide(grammar, vocabulary, self._eos_token_ids, context)
