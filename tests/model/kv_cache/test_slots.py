"""KV-cache slots: which of them a sequence gets, how they grow, and which tokens a resumed text finds there."""

from types import SimpleNamespace

import pytest
import torch

from lp_runtime.model.hf.rotary_lengths import UNCHANGING, RotaryLengths
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.slots import CacheSlot, SlotPool


def slot(capacity: int, tokens=()) -> CacheSlot:
    return CacheSlot(SimpleNamespace(capacity=capacity, bytes_per_token=7), list(tokens))


def pool(*slots: CacheSlot, padding: int = 0) -> SlotPool:
    made = SlotPool(lambda capacity: capacity + padding)
    for each in slots:
        made.release(each)
    return made


def test_acquire_returns_the_smallest_sufficient_slot():
    small, middle, large = slot(10), slot(100), slot(1000)
    slots = pool(large, small, middle)
    assert slots.acquire(50) is middle
    assert slots.acquire(50) is large
    assert slots.acquire(50) is small, "it must grow"
    assert slots.acquire(50).capacity == 0


def test_acquire_adds_padding_to_the_needed_capacity():
    small, large = slot(60), slot(100)
    assert pool(small, large, padding=20).acquire(50) is large


def test_other_free_slots_are_dropped_if_none_suffices():
    small, large = slot(10), slot(100)
    slots = pool(small, large)
    assert slots.acquire(200) is large
    assert small.capacity == 0, "its memory is free, whoever refers to it"
    assert slots.acquire(5) is not large


def test_resumed_sequence_gets_the_slot_with_its_longest_prefix():
    for text, expected in (((1, 2, 3, 5), 1), ((), 0), ((7, 7), 0)):
        free = slot(100, [1, 2, 9, 9]), slot(10, [1, 2, 3, 4])
        assert pool(*free).acquire(50, text) is free[expected]


def test_tokens_with_other_rotary_factors_are_not_known():
    held = slot(100, [1, 2, 3])
    held.prompt_length = 3
    assert held.num_known([1, 2, 9], 50, UNCHANGING) == 2
    changing = RotaryLengths(threshold=40, num_rows=2)
    assert (held.num_known([1, 2, 9], 40, changing), held.num_known([1, 2, 9], 41, changing)) == (2, 0)


def test_borrowed_slot_is_returned():
    only = slot(100)
    slots = pool(only)
    assert slots.bytes_per_token == 7
    with slots.borrowed(50) as borrowed:
        assert borrowed is only
    assert slots.acquire(50) is only
    slots.clear()
    assert slots.bytes_per_token == 7


def test_total_capacity_of_slots_in_use_is_limited():
    """Free slots are dropped first; a slot that is the only one may have any size."""
    slots = pool(slot(60))
    slots.limit = 100
    alone = slots.acquire(150)
    slots.release(alone)
    slots.clear()
    first = slots.acquire(50)
    slots.release(slot(40))
    second = slots.acquire(45)
    assert slots.capacity == 95  # the free one was dropped
    with pytest.raises(torch.OutOfMemoryError, match="slots of 106 tokens are needed, and 100 tokens fit into memory"):
        slots.acquire(11)
    assert slots.capacity == 95
    slots.drop(second)
    assert slots.capacity == 50 and slots.acquire(50).capacity == 0
    slots.release(first)


def filled(slots: SlotPool) -> CacheSlot:
    """Return a slot in use, of 32 tokens, that holds three."""
    held = slots.acquire(30)
    held.reset(lambda capacity: TreeCache(1, capacity), 32)
    held.cache.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 0)
    held.commit([5, 6, 7])
    return held


def test_growing_slot_keeps_its_tokens_within_the_limit():
    slots = pool(padding=2)
    slots.limit = 100
    held, _ = filled(slots), slots.acquire(40)
    with pytest.raises(torch.OutOfMemoryError, match="slots of 101 tokens"):
        slots.grow(held, 57)
    assert held.capacity == 32
    slots.grow(held, 56, spare=10)
    assert (held.capacity, held.tokens, slots.capacity) == (58, [5, 6, 7], 100)
    assert torch.equal(next(held.cache.committed())[1], torch.ones(1, 1, 3, 2))


def test_slot_grows_without_spare_tokens_if_these_exceed_the_host_memory():
    slots = pool()
    slots.limit = 1 << 51
    held = filled(slots)
    slots.grow(held, 64, spare=1 << 50)
    assert held.capacity == slots.capacity == 64


def test_slot_that_could_not_grow_counts_with_its_earlier_size():
    slots = pool()
    slots.limit = 1 << 51
    held = filled(slots)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        slots.grow(held, 1 << 50)
    assert held.capacity == slots.capacity == 32
