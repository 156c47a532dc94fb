"""The prefix cache: keys and values of finished sequences, found again by the longest common prefix of their tokens.

A radix tree for each salt, and for each set of rotary factors where those change with a prompt's length. An edge is a
segment: tokens that followed one another in a sequence, with their keys and values in tensors of their own. Where two
sequences part, the later one's segment hangs below the token at which they part, so what they share is kept once.
Running sequences keep their slots: a prefix is copied into a slot before the rest of a prompt is fed, and out of it
when the sequence has ended. What is copied is what a prefill computes.

Of layers that carry a state, keys and values of a prefix are not enough, and a state is that of one point. So states
are kept at few points: where a prompt and where a sequence ended, and where a prompt parted from what was kept. A
prefix ends at one of them.

Letters: H key/value heads, n tokens of a segment, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lp_runtime.model.hf.rotary_lengths import UNCHANGING, RotaryLengths
from lp_runtime.model.kv_cache.cache import LayerStates, SavedStates, TreeCache

MIN_TOKENS = 16  # of a prefix that is read, or of a segment: below, copying costs more than feeding


@dataclass
class _Point:
    """What layers carry behind a token.

    Attributes:
        states: what they carry.
        last_used: when the point was found or stored last, on the cache's own clock.
    """

    states: SavedStates
    last_used: int


@dataclass(eq=False)
class _Segment:
    """Tokens that followed one another in a sequence.

    Attributes:
        tokens: [n] int64.
        states: (layer, keys, values) of each layer, [1, H, n, D] each; empty for a root.
        parent: segment below which this one hangs; None for a root.
        place: (tokens of the parent that precede this one, first token of this one): its key there.
        children: segments that hang below this one, by their places.
        points: what layers carry, by the number of the segment's tokens that it is behind; empty without such layers.
        tag: names the draft tables of the last sequence that had this segment; 0 for none.
        last_used: when the segment was found or stored last, on the cache's own clock.
    """

    tokens: np.ndarray
    states: list[LayerStates] = field(default_factory=list)
    parent: _Segment | None = None
    place: tuple[int, int] = (0, 0)
    children: dict[tuple[int, int], _Segment] = field(default_factory=dict)
    points: dict[int, _Point] = field(default_factory=dict)
    tag: int = 0
    last_used: int = 0


@dataclass(frozen=True)
class Prefix:
    """What the cache has of a sequence. Its keys and values stay readable, whatever the cache drops meanwhile.

    Attributes:
        num_tokens: length of the prefix.
        tag: names the draft tables of a sequence that began with it; 0 for none.
        num_shared: tokens that the prompt has in common with what is kept, whether they can be read or not.
    """

    num_tokens: int = 0
    tag: int = 0
    num_shared: int = 0
    _parts: tuple[tuple[_Segment, int], ...] = ()  # segments, and how many tokens of each
    _points: tuple[tuple[int, SavedStates], ...] = ()  # lengths that have states, the longest first, with them

    @property
    def lengths(self) -> list[int]:
        """Lengths that the prefix can be cut to, the longest first; of one without states any, so its own alone."""
        return [length for length, _ in self._points] if self._points else [self.num_tokens]

    def cut(self, num_tokens: int) -> Prefix:
        """Return the first `num_tokens` tokens of the prefix; with states, 0 or one of `lengths`."""
        parts, left = [], num_tokens
        for segment, size in self._parts:
            if left > 0:
                parts.append((segment, min(size, left)))
            left -= size
        points = tuple(point for point in self._points if point[0] <= num_tokens)
        return Prefix(num_tokens, self.tag, self.num_shared, tuple(parts), points)

    @property
    def tokens(self) -> list[int]:
        """The prefix's token ids."""
        return [token for segment, size in self._parts for token in segment.tokens[:size].tolist()]

    @torch.inference_mode()
    def copy_into(self, cache: TreeCache) -> None:
        """Commit the prefix's keys, values and states to a cache that is empty."""
        for segment, size in self._parts:
            cache.restore(segment.states, size)
        if self._points:
            cache.restore_states(self._points[0][1])


class PrefixCache:
    """Keeps the keys and values of finished sequences. The least recently used segments leave first.

    Args:
        max_bytes: of all that is kept, at most.
        memory_bytes: of what is kept and of the slots' memory together, at most.
        token_bytes: that one token takes in all layers.
        prompt_chunk: tokens of a prompt that one pass feeds, where the bits of keys and values depend on that: whole
            chunks of prompts are kept and read alone then. None to keep and read any tokens.
        keeps_states: whether layers carry states; a prefix can be read up to a point at which they are kept then.
        lengths: at which the model's rotary factors change: keys with other factors than a prompt's are not read.

    Attributes:
        num_bytes: of what is kept.
        keeps_states: as given.
    """

    def __init__(
        self,
        max_bytes: int,
        memory_bytes: int,
        token_bytes: int,
        prompt_chunk: int | None = None,
        keeps_states: bool = False,
        lengths: RotaryLengths = UNCHANGING,
    ):
        self.num_bytes, self.keeps_states, self._lengths = 0, keeps_states, lengths
        self._max_bytes, self._memory_bytes, self._token_bytes = max_bytes, memory_bytes, token_bytes
        self._limit = max_bytes
        self._prompt_chunk = prompt_chunk
        self._roots: dict[tuple[str, int], _Segment] = {}  # by salt, and by the row of the keys' rotary factors
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
        parts = self._match(np.array(tokens, np.int64), (salt, self._lengths.row(prompt_length)))
        num_shared = min(sum(size for _, size in parts), len(tokens) - 1)
        num_tokens, points = self._whole_chunks(num_shared), self._points_of(parts, num_shared)
        if self.keeps_states:
            num_tokens = points[0][0] if points else 0
        if num_tokens < MIN_TOKENS:
            return Prefix(num_shared=num_shared)
        return Prefix(len(tokens), parts[-1][0].tag, num_shared, tuple(parts), points).cut(num_tokens)

    def _points_of(self, parts: Sequence[tuple[_Segment, int]], limit: int) -> tuple[tuple[int, SavedStates], ...]:
        """Return (length, states) of the points on the way through some segments, the longest first.

        Args:
            parts: segments from a root down, and how many tokens of each.
            limit: points behind more tokens do not count.
        """
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
        length, key = self._lengths.num_alike(prompt_length, length), (salt, self._lengths.row(prompt_length))
        ids = np.array(tokens[:length], np.int64)
        parts = self._match(ids, key)
        start = sum(size for _, size in parts)
        room = self._limit - (length - start) * self._token_bytes
        fits = length * self._token_bytes <= self._limit
        if length - start >= MIN_TOKENS and fits and self._evict(room, self._clock):
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
        """Keep what layers carry behind `length` tokens, if all those are kept and memory is free for it.

        Args:
            parts: segments from a root down, and how many tokens of each.
            length: tokens.
            states: what layers carry; None for nothing.
        """
        if states is None or not parts or sum(size for _, size in parts) < length:
            return
        segment, place = parts[-1]
        if place in segment.points:
            segment.points[place].last_used = self._clock
        elif self._evict(self._limit - states.num_bytes, self._clock):
            segment.points[place] = _Point(states, self._clock)
            self.num_bytes += states.num_bytes

    def _whole_chunks(self, num_tokens: int) -> int:
        """Return how many of some tokens are in whole chunks of a prompt, where that matters."""
        return num_tokens if self._prompt_chunk is None else num_tokens // self._prompt_chunk * self._prompt_chunk

    def _match(self, tokens: np.ndarray, key: tuple[str, int]) -> list[tuple[_Segment, int]]:
        """Return the segments, and how many tokens of each, that tokens begin with; they count as used now."""
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
        """Drop states, and segments that nothing hangs below, the least recently used first, down to `limit` bytes.

        Args:
            limit: bytes.
            before: what was used at this time of the clock, or later, stays.

        Returns:
            whether no more than `limit` bytes are kept.
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
        """Yield (when it was used last, segment, place of a point in it; 0 for a segment below which nothing hangs)."""
        for segment in self._segments():
            for place, point in segment.points.items():
                yield point.last_used, segment, place
            if not segment.children:
                yield segment.last_used, segment, 0

    def _drop_point(self, segment: _Segment, place: int) -> None:
        if point := segment.points.pop(place, None):  # it may have gone with its segment
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
        """Yield all segments but the roots."""
        stack = list(self._roots.values())
        while stack:
            segment = stack.pop()
            stack += segment.children.values()
            if segment.parent is not None:
                yield segment
