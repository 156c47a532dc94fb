"""KV-cache slots: each holds the keys and values of one sequence. The pool keeps the free ones for reuse."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lp_runtime.model.hf.rotary_lengths import RotaryLengths
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.prefix_cache import Prefix, PrefixCache


@dataclass
class CacheSlot:
    """A place for one sequence's keys and values.

    Attributes:
        tokens: token ids whose keys and values are committed in `cache`.
        num_prefilled: leading tokens of `tokens` that were fed as a prompt, not as a tree.
        prompt_length: P: tokens of the prompt that the sequence has, or will have; see model/hf/rotary_lengths.py.
        undecided: token ids that were fed behind `tokens` as a chain of guesses: kept or taken back at the next pass.
    """

    _cache: TreeCache | None = None
    tokens: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    prompt_length: int = 0
    undecided: list[int] = field(default_factory=list)

    @property
    def cache(self) -> TreeCache:
        """Keys and values of all layers, allocated by the first `reset`."""
        assert self._cache is not None, "a slot is reset before it is used"
        return self._cache

    @property
    def capacity(self) -> int:
        """Tokens that fit into the slot's memory; 0 before memory was allocated."""
        return 0 if self._cache is None else self._cache.capacity

    def reset(
        self, make_cache: Callable[[int], TreeCache], capacity: int, length: int = 0, prompt_length: int = 0
    ) -> None:
        """Empty the slot but for its first tokens, and make `capacity` tokens fit.

        Args:
            make_cache: returns an empty cache with a capacity in tokens.
            capacity: tokens; memory is allocated anew only if the present capacity is smaller.
            length: committed tokens to keep; they are copied where memory is allocated anew.
            prompt_length: P of the next sequence.
        """
        if self.capacity < capacity and length:
            self.cache.truncate(length)
            self.cache.grow(capacity)
        elif self.capacity < capacity:
            self._cache = None  # freed before the larger cache is allocated
            self._cache = make_cache(capacity)
        if length:
            self.cache.truncate(length)
        else:
            self.cache.clear()
        self.tokens, self.undecided, self.prompt_length = self.tokens[:length], [], prompt_length

    def num_known(self, tokens: Sequence[int], prompt_length: int, lengths: RotaryLengths) -> int:
        """Return how many of a text's first tokens the slot holds.

        Args:
            tokens: of the text.
            prompt_length: P of the text.
            lengths: at which the model's rotary factors change; keys that have others are not counted.
        """
        is_alike = lengths.row(self.prompt_length) == lengths.row(prompt_length)
        return len(os.path.commonprefix([self.tokens, list(tokens)])) if is_alike else 0

    def told(self, lengths: RotaryLengths) -> int:
        """Return the length that the next pass must be told: see RotaryLengths.told."""
        return lengths.told(self.prompt_length, len(self.tokens))

    def commit(self, tokens: Sequence[int], keeps_any: bool = True) -> None:
        """Keep the first tokens that the last pass has fed, which are these, or none of them; forget the others."""
        self.cache.commit(len(tokens) if keeps_any else 0)
        if keeps_any:
            self.tokens += tokens

    def restore(self, prefix: Prefix) -> None:
        """Commit a prefix to the slot, which is empty, as if a prompt's first tokens had been fed."""
        prefix.copy_into(self.cache)
        self.tokens = prefix.tokens
        self.num_prefilled = len(self.tokens)


class SlotPool:
    """The free slots of a model. Their memory is reused, and what they hold may be a prefix of the next sequence.

    Args:
        padded: maps tokens that must fit to the capacity that a slot is allocated with.

    Attributes:
        prefixes: keys and values of finished sequences; they leave where slots need the memory. None to keep none.
    """

    def __init__(self, padded: Callable[[int], int]):
        self.prefixes: PrefixCache | None = None
        self._padded = padded
        self._free: list[CacheSlot] = []
        self._in_use: dict[int, tuple[CacheSlot, int]] = {}  # by id: slots, and tokens that must fit

    @property
    def capacity(self) -> int:
        """Tokens that fit into all slots together, free or in use."""
        in_use = sum(max(slot.capacity, capacity) for slot, capacity in self._in_use.values())
        return in_use + sum(slot.capacity for slot in self._free)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in a slot, of all layers; 0 if no free slot has been used yet."""
        return next((slot.cache.bytes_per_token for slot in self._free if slot.capacity), 0)

    def acquire(self, capacity: int = 0, tokens: Sequence[int] = ()) -> CacheSlot:
        """Take a slot out of the pool.

        Prefers, in this order: the slot that holds the longest prefix of `tokens`; one whose capacity suffices; the
        smallest that suffices. If no capacity suffices, the largest slot is taken and all
        other free slots are dropped, so that their memory can be allocated again.

        Args:
            capacity: tokens that the sequence will need.
            tokens: token ids of a sequence that is resumed; empty for a new one.
        """
        wanted, capacity = list(tokens), self._padded(capacity) if capacity else 0

        def preference(slot: CacheSlot) -> tuple[int, bool, int]:
            num_known = len(os.path.commonprefix([slot.tokens, wanted])) if wanted else 0
            fits = slot.capacity >= capacity
            return num_known, fits, -slot.capacity if fits else slot.capacity

        best = max(self._free, key=preference, default=None)
        if best is None:
            best = CacheSlot()
        self._free = [slot for slot in self._free if slot is not best]
        if best.capacity < capacity:
            self._free = []
        self._in_use[id(best)] = best, capacity
        if self.prefixes is not None:
            self.prefixes.reserve(self.capacity)
        return best

    def release(self, slot: CacheSlot) -> None:
        """Put a slot back."""
        self._in_use.pop(id(slot), None)
        self._free.append(slot)
        if self.prefixes is not None:
            self.prefixes.reserve(self.capacity)

    @contextmanager
    def borrowed(self, capacity: int = 0, tokens: Sequence[int] = ()) -> Iterator[CacheSlot]:
        """Acquire a slot for the duration of a `with` block. Arguments as in `acquire`."""
        slot = self.acquire(capacity, tokens)
        try:
            yield slot
        finally:
            self.release(slot)

    def clear(self) -> None:
        """Drop all free slots and their memory."""
        self._free = []
