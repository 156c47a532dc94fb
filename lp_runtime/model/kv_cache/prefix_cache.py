"""Prefix cache: keys and values of finished sequences, looked up by longest common token prefix.

There is a radix tree for each salt, and for each set of rotary factors if these change with a prompt's length. An edge
is a segment: consecutive tokens of a sequence, with separate tensors for their keys and values. If two sequences
diverge, the later one's segment is attached below the last token they share, so shared tokens are stored once. Running
sequences keep their slots: a prefix is copied into a slot before the rest of a prompt is fed, and out of it when the
sequence has ended. The copies equal what a prefill computes.

For layers that carry a state, a prefix needs that state in addition to keys and values, and a state belongs to one
point of a sequence. States are therefore kept at few points only: at the end of a prompt, at the end of a sequence, and
where a prompt diverged from the stored tokens. A prefix of such a model ends at one of these points.

Letters: H key/value heads, n tokens of a segment, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lp_runtime.model.hf.rotary_lengths import UNCHANGING, RotaryLengths
from lp_runtime.model.kv_cache.cache import LayerStates, SavedStates, TreeCache
from lp_runtime.utils.memory import is_out_of_memory

MIN_TOKENS = 16  # of a prefix that is read, or of a segment: feeding fewer tokens is cheaper than copying them


@dataclass
class _Point:
    """States of recurrent layers after a token; `last_used` is a time on the PrefixCache's clock."""

    states: SavedStates
    last_used: int


@dataclass(eq=False)
class _Segment:
    """Edge of the radix tree: consecutive tokens of a sequence, with their keys and values."""

    tokens: np.ndarray  # [n] int64
    # (layer, keys, values) of each layer, [1, H, n, D] each; empty for a root.
    states: list[LayerStates] = field(default_factory=list)
    parent: _Segment | None = None
    # Key in the parent's `children`: (number of the parent's tokens before this segment, its first token)
    place: tuple[int, int] = (0, 0)
    children: dict[tuple[int, int], _Segment] = field(default_factory=dict)
    # Recurrent states, by the number of this segment's tokens they come after; empty without such layers.
    points: dict[int, _Point] = field(default_factory=dict)
    tag: int = 0  # identifies the draft tables of the last sequence that had this segment; 0 for none
    last_used: int = 0  # time at which the segment was last read or stored, on the PrefixCache's clock


@dataclass(frozen=True)
class Prefix:
    """Cached prefix of a prompt; its keys and values stay readable even if the cache evicts them."""

    num_tokens: int = 0
    tag: int = 0  # identifies the draft tables of a sequence that began with it; 0 for none
    num_shared: int = 0  # tokens that the prompt shares with the stored ones, including those that cannot be read
    _parts: tuple[tuple[_Segment, int], ...] = ()  # (segment, number of its tokens used)
    _points: tuple[tuple[int, SavedStates], ...] = ()  # (length, states after that many tokens), longest first

    @property
    def lengths(self) -> list[int]:
        """Lengths that have stored states, longest first; for a model without states, only the prefix's own."""
        return [length for length, _ in self._points] if self._points else [self.num_tokens]

    def cut(self, num_tokens: int) -> Prefix:
        """Return the prefix cut to `num_tokens` tokens; with states that must be 0 or one of `lengths`."""
        parts, left = [], num_tokens
        for segment, size in self._parts:
            if left > 0:
                parts.append((segment, min(size, left)))
            left -= size
        points = tuple(point for point in self._points if point[0] <= num_tokens)
        return Prefix(num_tokens, self.tag, self.num_shared, tuple(parts), points)

    @property
    def tokens(self) -> list[int]:
        return [token for segment, size in self._parts for token in segment.tokens[:size].tolist()]

    @torch.inference_mode()
    def copy_into(self, cache: TreeCache) -> None:
        """Copy the prefix's keys, values and states into an empty cache, and commit them."""
        for segment, size in self._parts:
            cache.restore(segment.states, size)
        if self._points:
            cache.restore_states(self._points[0][1])


class PrefixCache:
    """Keys and values of finished sequences, shared by prefix and evicted least recently used first."""

    def __init__(
        self,
        max_bytes: int,
        memory_bytes: int | None,  # limit of the stored bytes and the slots' memory together; None if unknown
        token_bytes: int,  # bytes of one token in all layers
        # Tokens of a prompt that one pass feeds, if the bits of keys and values depend on that: then only whole chunks
        # of prompts are stored and read.
        prompt_chunk: int | None = None,
        # Whether layers carry states; a prefix can then be read only up to a point with stored states.
        keeps_states: bool = False,
        # The lengths at which the model's rotary factors change; keys with other factors than a prompt's are not read.
        lengths: RotaryLengths = UNCHANGING,
        min_rest: int = 1,  # fewest tokens of a prompt that are fed after a prefix
    ):
        self.num_bytes = 0
        self._min_rest = min_rest
        self.keeps_states = keeps_states
        self._lengths = lengths
        self._max_bytes = max_bytes
        self._memory_bytes = memory_bytes
        self._token_bytes = token_bytes
        self._limit = max_bytes
        self._prompt_chunk = prompt_chunk
        self._roots: dict[tuple[str, int], _Segment] = {}  # by (salt, row of the keys' rotary factors)
        self._clock = 0

    def reserve(self, slot_tokens: int) -> None:
        """Set the limit so that slots of `slot_tokens` tokens in all fit, and evict what exceeds it."""
        if self._memory_bytes is not None:
            self._limit = min(self._max_bytes, max(0, self._memory_bytes - slot_tokens * self._token_bytes))
        self._evict(self._limit, self._clock + 1)

    def find(self, tokens: Sequence[int], salt: str, prompt_length: int = 0) -> Prefix:
        """Return the longest prefix stored with `salt` that leaves tokens to feed; empty if too short to use."""
        parts = self._match(np.array(tokens, np.int64), (salt, self._lengths.row(prompt_length)))
        num_shared = min(sum(size for _, size in parts), len(tokens) - self._min_rest)
        num_tokens, points = self._whole_chunks(num_shared), self._points_of(parts, num_shared)
        if self.keeps_states:
            num_tokens = points[0][0] if points else 0
        if num_tokens < MIN_TOKENS:
            return Prefix(num_shared=num_shared)
        return Prefix(len(tokens), parts[-1][0].tag, num_shared, tuple(parts), points).cut(num_tokens)

    def _points_of(self, parts: Sequence[tuple[_Segment, int]], limit: int) -> tuple[tuple[int, SavedStates], ...]:
        """Return (length, states) of the points up to `limit` tokens along a path of segments, longest first."""
        points, start = [], 0
        for segment, size in parts:
            points += [(start + place, point) for place, point in segment.points.items() if place <= size]
            start += size
        points = sorted((each for each in points if each[0] <= limit), key=lambda each: -each[0])
        if points:
            points[0][1].last_used = self._clock
        return tuple((length, point.states) for length, point in points)

    @torch.inference_mode()
    def store(
        self,
        cache: TreeCache,  # of a sequence whose prompt has been fed, or that has ended
        tokens: Sequence[int],  # ids of all tokens committed in `cache`
        num_prefilled: int,  # how many of them were fed as a prompt, not as a tree
        salt: str,
        tag: int = 0,  # identifies the sequence's draft tables; 0 for none
        prompt_length: int = 0,  # P of the sequence; tokens with other rotary factors than its prompt's are not stored
    ) -> None:
        """Copy the tokens of a sequence that are not stored yet; if memory runs out, the cache is emptied."""
        try:
            self._store(cache, tokens, num_prefilled, salt, tag, prompt_length)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.clear()

    def clear(self) -> None:
        for segment in list(self._segments()):
            segment.parent = None  # or only the garbage collector would free parents and children
        self._roots, self.num_bytes = {}, 0

    def _store(
        self, cache: TreeCache, tokens: Sequence[int], num_prefilled: int, salt: str, tag: int, prompt_length: int
    ) -> None:
        length = len(tokens) if self._prompt_chunk is None else self._whole_chunks(num_prefilled)
        length, key = self._lengths.num_shared(prompt_length, length), (salt, self._lengths.row(prompt_length))
        ids = np.array(tokens[:length], np.int64)
        parts = self._match(ids, key)
        start = sum(size for _, size in parts)
        limit = self._limit - (length - start) * self._token_bytes
        fits = length * self._token_bytes <= self._limit
        if length - start >= MIN_TOKENS and fits and self._evict(limit, self._clock):
            parent, size = parts[-1] if parts else (self._roots.setdefault(key, _Segment(ids[:0])), 0)
            states = [
                (layer, keys[:, :, start:length].clone(), values[:, :, start:length].clone())
                for layer, keys, values in cache.committed()
            ]
            place = (size, int(ids[start]))
            child = _Segment(ids[start:], states, parent, place, last_used=self._clock)
            parent.children[place] = child
            self.num_bytes += len(child.tokens) * self._token_bytes
            parts = [*parts, (child, length - start)]
        self._store_point(parts, length, cache.states() if length == len(tokens) else None)
        for segment, _ in parts:
            segment.tag = tag or segment.tag

    def _store_point(self, parts: Sequence[tuple[_Segment, int]], length: int, states: SavedStates | None) -> None:
        """Store the states after `length` tokens, if all these tokens are stored and there is memory."""
        if states is None or not parts or sum(size for _, size in parts) < length:
            return
        segment, place = parts[-1]
        if place in segment.points:
            segment.points[place].last_used = self._clock
        elif self._evict(self._limit - states.num_bytes, self._clock):
            segment.points[place] = _Point(states, self._clock)
            self.num_bytes += states.num_bytes

    def _whole_chunks(self, num_tokens: int) -> int:
        """Round a number of tokens down to whole prompt chunks, if only these are stored."""
        return num_tokens if self._prompt_chunk is None else num_tokens // self._prompt_chunk * self._prompt_chunk

    def _match(self, tokens: np.ndarray, key: tuple[str, int]) -> list[tuple[_Segment, int]]:
        """Return the path of (segment, number of matching tokens) for `tokens`, and mark it as used now."""
        self._clock += 1
        parts: list[tuple[_Segment, int]] = []
        segment, size, start = self._roots.get(key), 0, 0
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
        """Evict states and leaf segments, least recently used first, until at most `limit` bytes are stored.

        Only entries last used before the time `before` are evicted. Returns whether the limit was reached.
        """
        while self.num_bytes > limit:
            unused = [each for each in self._droppable() if each[0] < before]
            for _, segment, place in sorted(unused, key=lambda each: each[0]):
                if self.num_bytes > limit:
                    self._drop_point(segment, place) if place else self._drop(segment)
            if not unused:
                return False
        return True

    def _droppable(self) -> Iterator[tuple[int, _Segment, int]]:
        """Yield what can be evicted: (last used, segment, place of a point in it, or 0 for a leaf itself)."""
        for segment in self._segments():
            for place, point in segment.points.items():
                yield point.last_used, segment, place
            if not segment.children:
                yield segment.last_used, segment, 0

    def _drop_point(self, segment: _Segment, place: int) -> None:
        if point := segment.points.pop(place, None):  # None if it was dropped with its segment
            self.num_bytes -= point.states.num_bytes

    def _drop(self, leaf: _Segment) -> None:
        assert leaf.parent is not None
        del leaf.parent.children[leaf.place]
        for place in list(leaf.points):
            self._drop_point(leaf, place)
        self.num_bytes -= len(leaf.tokens) * self._token_bytes
        if leaf.parent.parent is None and not leaf.parent.children:
            self._roots = {key: root for key, root in self._roots.items() if root.children}

    def _segments(self) -> Iterator[_Segment]:
        """Yield all segments except the roots."""
        stack = list(self._roots.values())
        while stack:
            segment = stack.pop()
            stack += segment.children.values()
            if segment.parent is not None:
                yield segment
