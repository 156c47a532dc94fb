"""The prefix cache: keys and values of finished sequences, found again by the longest common prefix of their tokens.

A radix tree for each salt. An edge is a segment: tokens that followed one another in a sequence, with their keys and
values in tensors of their own. Where two sequences part, the later one's segment hangs below the token at which they
part, so what they share is kept once. Running sequences keep their slots: a prefix is copied into a slot before the
rest of a prompt is fed, and out of it when the sequence has ended. What is copied is what
a prefill computes.

Letters: H key/value heads, n tokens of a segment, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lp_runtime.model.kv_cache.cache import LayerStates, TreeCache
from lp_runtime.model.rotary_lengths import UNCHANGING, RotaryLengths

MIN_TOKENS = 16  # of a prefix that is read, or of a segment: below, copying costs more than feeding


@dataclass(eq=False)
class _Segment:
    """Tokens that followed one another in a sequence.

    Attributes:
        tokens: [n] int64.
        states: (layer, keys, values) of each layer, [1, H, n, D] each; empty for a root.
        parent: segment below which this one hangs; None for a root.
        place: (tokens of the parent that precede this one, first token of this one): its key there.
        children: segments that hang below this one, by their places.
        tag: names the draft tables of the last sequence that had this segment; 0 for none.
        last_used: when the segment was found or stored last, on the cache's own clock.
    """

    tokens: np.ndarray
    states: list[LayerStates] = field(default_factory=list)
    parent: _Segment | None = None
    place: tuple[int, int] = (0, 0)
    children: dict[tuple[int, int], _Segment] = field(default_factory=dict)
    tag: int = 0
    last_used: int = 0


@dataclass(frozen=True)
class Prefix:
    """What the cache has of a sequence. Its keys and values stay readable, whatever the cache drops meanwhile.

    Attributes:
        num_tokens: length of the prefix.
        tag: names the draft tables of a sequence that began with it; 0 for none.
    """

    num_tokens: int = 0
    tag: int = 0
    _parts: tuple[tuple[_Segment, int], ...] = ()  # segments, and how many tokens of each

    def cut(self, num_tokens: int) -> Prefix:
        """Return the first `num_tokens` tokens of the prefix."""
        parts, left = [], num_tokens
        for segment, size in self._parts:
            if left > 0:
                parts.append((segment, min(size, left)))
            left -= size
        return Prefix(num_tokens, self.tag, tuple(parts))

    @property
    def tokens(self) -> list[int]:
        """The prefix's token ids."""
        return [token for segment, size in self._parts for token in segment.tokens[:size].tolist()]

    @torch.inference_mode()
    def copy_into(self, cache: TreeCache) -> None:
        """Commit the prefix's keys and values to a cache that is empty."""
        for segment, size in self._parts:
            cache.restore(segment.states, size)


class PrefixCache:
    """Keeps the keys and values of finished sequences. The least recently used segments leave first.

    Args:
        max_bytes: of all that is kept, at most.
        memory_bytes: of what is kept and of the slots' memory together, at most.
        token_bytes: that one token takes in all layers.
        prompt_chunk: tokens of a prompt that one pass feeds, where the bits of keys and values depend on that: whole
            chunks of prompts are kept and read alone then. None to keep and read any tokens.
        lengths: at which the model's rotary factors change: keys are kept and read under the name of their factors.

    Attributes:
        num_bytes: of what is kept.
    """

    def __init__(
        self,
        max_bytes: int,
        memory_bytes: int,
        token_bytes: int,
        prompt_chunk: int | None = None,
        lengths: RotaryLengths = UNCHANGING,
    ):
        self.num_bytes = 0
        self._lengths = lengths
        self._max_bytes, self._memory_bytes, self._token_bytes = max_bytes, memory_bytes, token_bytes
        self._limit = max_bytes
        self._prompt_chunk = prompt_chunk
        self._roots: dict[str, _Segment] = {}  # by salt, and by the name of the keys' factors
        self._clock = 0

    def reserve(self, slot_tokens: int) -> None:
        """Leave memory for slots: drop what does not fit beside them.

        Args:
            slot_tokens: capacity of all slots together, in tokens.
        """
        self._limit = min(self._max_bytes, max(0, self._memory_bytes - slot_tokens * self._token_bytes))
        self._evict(self._limit, self._clock + 1)

    def find(self, tokens: Sequence[int], salt: str, prompt_length: int = 0) -> Prefix:
        """Return the longest prefix of a prompt that is kept, and shorter than the prompt; empty if it is of no use.

        Args:
            tokens: of the prompt.
            salt: only what was stored with the same salt is found.
            prompt_length: P of the sequence.
        """
        parts = self._match(np.array(tokens, np.int64), salt + self._lengths.name(prompt_length))
        num_tokens = self._whole_chunks(min(sum(size for _, size in parts), len(tokens) - 1))
        if num_tokens < MIN_TOKENS:
            return Prefix()
        return Prefix(len(tokens), parts[-1][0].tag, tuple(parts)).cut(num_tokens)

    @torch.inference_mode()
    def store(
        self,
        cache: TreeCache,
        tokens: Sequence[int],
        num_prefilled: int,
        salt: str,
        tag: int = 0,
        prompt_length: int = 0,
    ) -> None:
        """Copy what a sequence has and this cache has not, if memory is free for it.

        Args:
            cache: of a sequence whose prompt is fed, or that has ended.
            tokens: ids of all tokens that are committed there.
            num_prefilled: how many of them were fed as a prompt, not as a tree.
            salt: of the sequence.
            tag: names the sequence's draft tables; 0 for none.
            prompt_length: P of the sequence; what has other factors than its prompt is not kept.
        """
        length = len(tokens) if self._prompt_chunk is None else self._whole_chunks(num_prefilled)
        length, salt = self._lengths.num_alike(prompt_length, length), salt + self._lengths.name(prompt_length)
        ids = np.array(tokens[:length], np.int64)
        parts = self._match(ids, salt)
        start = sum(size for _, size in parts)
        room = self._limit - (length - start) * self._token_bytes
        fits = length * self._token_bytes <= self._limit
        if length - start >= MIN_TOKENS and fits and self._evict(room, self._clock):
            parent, size = parts[-1] if parts else (self._roots.setdefault(salt, _Segment(ids[:0])), 0)
            states = [
                (layer, keys[:, :, start:length].clone(), values[:, :, start:length].clone())
                for layer, keys, values in cache.committed()
            ]
            place = (size, int(ids[start]))
            child = _Segment(ids[start:], states, parent, place, last_used=self._clock)
            parent.children[place] = child
            self.num_bytes += len(child.tokens) * self._token_bytes
            parts = [*parts, (child, length - start)]
        for segment, _ in parts:
            segment.tag = tag or segment.tag

    def _whole_chunks(self, num_tokens: int) -> int:
        """Return how many of some tokens are in whole chunks of a prompt, where that matters."""
        return num_tokens if self._prompt_chunk is None else num_tokens // self._prompt_chunk * self._prompt_chunk

    def _match(self, tokens: np.ndarray, salt: str) -> list[tuple[_Segment, int]]:
        """Return the segments, and how many tokens of each, that tokens begin with; they count as used now."""
        self._clock += 1
        parts: list[tuple[_Segment, int]] = []
        segment, size, start = self._roots.get(salt), 0, 0
        while segment is not None and start < len(tokens):
            segment = segment.children.get((size, int(tokens[start])))
            if segment is not None:
                num = min(len(segment.tokens), len(tokens) - start)
                differ = segment.tokens[:num] != tokens[start : start + num]
                size = int(differ.argmax()) if differ.any() else num
                segment.last_used = self._clock
                parts.append((segment, size))
                start += size
        return parts

    def _evict(self, limit: int, before: int) -> bool:
        """Drop segments that nothing hangs below, the least recently used first, until `limit` bytes are kept.

        Args:
            limit: bytes.
            before: segments that were used at this time of the clock, or later, stay.

        Returns:
            whether no more than `limit` bytes are kept.
        """
        while self.num_bytes > limit:
            leaves = [each for each in self._segments() if not each.children and each.last_used < before]
            for leaf in sorted(leaves, key=lambda each: each.last_used):
                if self.num_bytes > limit:
                    self._drop(leaf)
            if not leaves:
                return False
        return True

    def _drop(self, leaf: _Segment) -> None:
        assert leaf.parent is not None
        del leaf.parent.children[leaf.place]
        self.num_bytes -= len(leaf.tokens) * self._token_bytes
        if leaf.parent.parent is None and not leaf.parent.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root.children}

    def _segments(self) -> Iterator[_Segment]:
        """Yield all segments but the roots."""
        stack = list(self._roots.values())
        while stack:
            segment = stack.pop()
            stack += segment.children.values()
            if segment.parent is not None:
                yield segment
