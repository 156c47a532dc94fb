"""KV-cache slots, each for one sequence, and the pool that keeps free slots for reuse."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lp_runtime.model.hf.rotary_lengths import RotaryLengths
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.prefix_cache import Prefix, PrefixCache
from lp_runtime.utils.memory import is_out_of_memory

GROWTH_TOKENS = 1024  # space for output that a slot begins with, and the least that it grows by
STEP_TOKENS = 1024  # that a replica feeds in a step at most: the largest step that calibration measures
STEP_SPACE_TOKENS = 1200  # space of a slot for a step: STEP_TOKENS, and pending tokens
# Tokens of a slot in addition to its text's: STEP_SPACE_TOKENS, and the rounding of the slot's size (CAPACITY_UNIT and
# the largest captured step).
OVERHEAD_TOKENS = 2560


def initial_text_tokens(num_prompt: int, num_new: int, max_new_tokens: int) -> int:
    """Return the tokens of text that a slot has space for at first, if `num_new` tokens of output exist already."""
    return num_prompt + min(max_new_tokens, num_new + GROWTH_TOKENS)


@dataclass
class CacheSlot:
    """Memory for one sequence's keys and values, and the tokens that it holds."""

    _cache: TreeCache | None = None
    tokens: list[int] = field(default_factory=list)  # token ids whose keys and values are committed in `cache`
    num_prefilled: int = 0  # number of leading `tokens` that were fed as a prompt, not as a tree
    # P, prompt tokens of the sequence, including those not fed yet; see model/hf/rotary_lengths.py.
    prompt_length: int = 0
    # Token ids fed after `tokens` as a chain of guesses; the next pass commits them or takes them back.
    undecided: list[int] = field(default_factory=list)

    @property
    def cache(self) -> TreeCache:
        """Keys and values of all layers, allocated by the first `reset`."""
        assert self._cache is not None, "a slot is reset before it is used"
        return self._cache

    @property
    def capacity(self) -> int:
        return 0 if self._cache is None else self._cache.capacity

    def reset(
        self, make_cache: Callable[[int], TreeCache], capacity: int, length: int = 0, prompt_length: int = 0
    ) -> None:
        """Empty the slot except for its first `length` tokens, and make `capacity` tokens fit.

        Memory is reallocated, by `make_cache`, only if the current capacity is smaller. `prompt_length` is P of the
        next sequence.
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
        self.tokens = self.tokens[:length]
        self.undecided = []
        self.prompt_length = prompt_length

    def drop(self) -> None:
        self._cache = None
        self.tokens, self.undecided = [], []
        self.num_prefilled = 0

    def num_known(self, tokens: Sequence[int], prompt_length: int, lengths: RotaryLengths) -> int:
        """Return how many of a text's first tokens the slot holds, with the rotary factors of P."""
        has_same_factors = lengths.row(self.prompt_length) == lengths.row(prompt_length)
        return len(os.path.commonprefix([self.tokens, list(tokens)])) if has_same_factors else 0

    def commit(self, tokens: Sequence[int]) -> None:
        """Commit `tokens`, the first ones that the last pass fed, perhaps none; discard the others."""
        self.cache.commit(len(tokens))
        self.tokens += tokens

    def restore(self, prefix: Prefix) -> None:
        prefix.copy_into(self.cache)
        self.tokens = prefix.tokens
        self.num_prefilled = len(self.tokens)


class SlotPool:
    """Pool of a model's free slots, whose memory and matching tokens the next sequence reuses.

    A slot begins with space for GROWTH_TOKENS of output, and grows. torch.OutOfMemoryError is raised if memory runs
    out, or if several slots in use would hold more tokens than `limit`.
    """

    def __init__(self, padded: Callable[[int], int]):
        self.prefixes: PrefixCache | None = None  # evicted when slots need the memory
        self.limit: int | None = None  # tokens of all slots in use; None for no limit
        self.bytes_per_token = 0  # of a token in all layers of a slot; 0 before a slot that has been used is released
        self._padded = padded  # the capacity to allocate, by the number of tokens that must fit
        self._free: list[CacheSlot] = []
        self._in_use: dict[int, tuple[CacheSlot, int]] = {}  # by id(slot): (slot, tokens that must fit)

    @property
    def capacity(self) -> int:
        in_use = sum(max(slot.capacity, capacity) for slot, capacity in self._in_use.values())
        return in_use + sum(slot.capacity for slot in self._free)

    def acquire(self, capacity: int = 0, tokens: Sequence[int] = ()) -> CacheSlot:
        """Take a slot out of the pool, or make one.

        Prefers, in this order: the slot that holds the longest prefix of `tokens`, those of a sequence that is resumed;
        one that is large enough; the smallest of these, or the largest if none is large enough. If the chosen slot is
        too small, all other free slots are dropped, so that their memory can be allocated again.
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
            self.clear()
        self._use(best, capacity)
        return best

    def grow(self, slot: CacheSlot, capacity: int, spare: int = 0) -> None:
        """Make `capacity` tokens fit into a slot, which keeps its tokens, and `spare` more if there is memory."""
        sizes = [self._padded(capacity + spare), self._padded(capacity)]
        before = self._in_use.get(id(slot))
        for size in sizes:
            try:
                if before is not None:
                    self._use(slot, size)
                slot.cache.grow(size)
                return
            except Exception as error:
                if before is not None:
                    self._in_use[id(slot)] = before
                if size == sizes[-1] or not is_out_of_memory(error):
                    raise

    def drop(self, slot: CacheSlot) -> None:
        slot.drop()
        self._in_use[id(slot)] = slot, 0

    def _use(self, slot: CacheSlot, capacity: int) -> None:
        """Count a slot of `capacity` tokens as in use; free slots and prefixes make room for it."""
        others = sum(max(each.capacity, size) for each, size in self._in_use.values() if each is not slot)
        if self.limit is not None and others and others + max(slot.capacity, capacity) > self.limit:
            raise torch.OutOfMemoryError(
                f"slots of {others + capacity} tokens are needed, and {self.limit} tokens fit into memory"
            )
        self._in_use[id(slot)] = slot, capacity
        if self.limit is not None and self.capacity > self.limit:
            self.clear()
        if self.prefixes is not None:
            self.prefixes.reserve(self.capacity)

    def release(self, slot: CacheSlot) -> None:
        self._in_use.pop(id(slot), None)
        self._free.append(slot)
        if slot.capacity:
            self.bytes_per_token = slot.cache.bytes_per_token or self.bytes_per_token
        if self.prefixes is not None:
            self.prefixes.reserve(self.capacity)

    @contextmanager
    def borrowed(self, capacity: int = 0, tokens: Sequence[int] = ()) -> Iterator[CacheSlot]:
        slot = self.acquire(capacity, tokens)
        try:
            yield slot
        finally:
            self.release(slot)

    def clear(self) -> None:
        """Drop all free slots and their memory."""
        for slot in self._free:
            slot.drop()  # the frames of an error may still refer to it
        self._free = []
