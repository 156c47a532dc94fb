"""The prefix cache: lookup, contents, states and order of eviction; keys have their token ids as values."""

import functools
import random
import weakref

import torch

from lp_runtime.model.hf.rotary_lengths import RotaryLengths
from lp_runtime.model.kv_cache.cache import SavedStates, TreeCache
from lp_runtime.model.kv_cache.prefix_cache import MIN_TOKENS, PrefixCache
from lp_runtime.model.kv_cache.slots import CacheSlot, SlotPool

TOKEN_BYTES = 10


class StatefulCache(TreeCache):
    """A cache with a state of 8 bytes: the number of its tokens."""

    def states(self) -> SavedStates:
        return SavedStates(({"length": torch.tensor(self.length)},))

    def restore_states(self, states: SavedStates) -> None:
        self.restored = int(states.layers[0]["length"])


def filled(tokens, kind: type[TreeCache] = TreeCache) -> CacheSlot:
    """Return a slot that holds tokens in two layers; the second layer's keys and values are negative."""
    slot = CacheSlot()
    slot.reset(functools.partial(kind, 2), len(tokens) + 8)
    values = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None].expand(1, 2, -1, 3)
    slot.cache.update(values, 2 * values, 0)
    slot.cache.update(-values, -2 * values, 1)
    slot.cache.commit(len(tokens))
    slot.tokens, slot.num_prefilled = list(tokens), len(tokens)
    return slot


def held(slot: CacheSlot) -> list[int]:
    """Return the tokens that a slot's keys and values encode."""
    states = [each for _, keys, values in slot.cache.committed() for each in (keys, values / 2)]
    assert len(states) == 4 and all(torch.equal(each.abs(), states[0]) for each in states)
    return states[0][0, 0, :, 0].int().tolist()


def read(cache: PrefixCache, tokens, salt: str = "") -> list[int]:
    """Read a prompt's cached prefix into a slot, check that keys and tokens agree, and return the tokens."""
    prefix, slot = cache.find(tokens, salt), CacheSlot()
    slot.reset(functools.partial(TreeCache, 2), len(tokens))
    slot.restore(prefix)
    assert slot.cache.length == prefix.num_tokens == slot.num_prefilled
    if prefix.num_tokens:
        assert held(slot) == slot.tokens == list(tokens[: prefix.num_tokens])
    return slot.tokens


def store(cache: PrefixCache, slot: CacheSlot, salt: str = "") -> None:
    cache.store(slot.cache, slot.tokens, slot.num_prefilled, salt)


def make(max_tokens: int = 1000, **options) -> PrefixCache:
    return PrefixCache(max_tokens * TOKEN_BYTES, 10**9, TOKEN_BYTES, **options)


def test_lookup_returns_the_longest_common_prefix():
    cache, rng = make(10**6), random.Random(1)
    kept: list[list[int]] = []
    for _ in range(60):
        base = rng.choice(kept)[: rng.randint(0, 80)] if kept else []
        tokens = base + [rng.randint(1, 3) for _ in range(rng.randint(20, 60))]
        store(cache, filled(tokens), "")
        kept.append(tokens)
        prompt = rng.choice(kept)[: rng.randint(10, 90)] + [rng.randint(1, 3) for _ in range(rng.randint(1, 9))]
        longest = max(
            next(
                (i for i, pair in enumerate(zip(prompt, each, strict=False)) if pair[0] != pair[1]),
                min(len(prompt), len(each)),
            )
            for each in kept
        )
        actual = len(read(cache, prompt))
        # A sequence's new tokens are not stored if there are fewer than MIN_TOKENS of them.
        assert min(longest, len(prompt) - 1) - MIN_TOKENS < actual <= min(longest, len(prompt) - 1)


def test_shared_prefix_is_stored_once():
    cache, shared = make(), list(range(1, 101))
    for other in (200, 300, 400):
        store(cache, filled([*shared, *range(other, other + 50)]), "")
    assert cache.num_bytes == (100 + 3 * 50) * TOKEN_BYTES
    assert read(cache, [*shared, *range(300, 350), 7]) == [*shared, *range(300, 350)]
    assert read(cache, shared) == shared[:-1], "the last token is fed: its logits are wanted"


def test_lookup_with_another_salt_returns_nothing():
    cache = make()
    store(cache, filled(list(range(50))), "mine")
    assert read(cache, range(60), "yours") == read(cache, range(60)) == []
    assert len(read(cache, range(60), "mine")) == 50


def test_prefix_with_other_rotary_factors_is_neither_stored_nor_read():
    cache, slot = make(lengths=RotaryLengths(threshold=40, num_rows=2)), filled(list(range(60)))
    cache.store(slot.cache, slot.tokens, 30, "", prompt_length=30)  # the text has grown past the threshold
    assert cache.find(range(60), "", prompt_length=35).num_tokens == 40
    assert cache.find(range(60), "", prompt_length=60).num_tokens == 0


def test_prefix_restores_the_states_at_its_own_end():
    cache = make(keeps_states=True)
    for length in (30, 50):
        store(cache, filled(list(range(length)), StatefulCache))
    assert cache.num_bytes == 50 * TOKEN_BYTES + 2 * 8
    prefix = cache.find(range(60), "")
    assert prefix.lengths == [50, 30]
    for length in (50, 30):
        slot = CacheSlot()
        slot.reset(functools.partial(StatefulCache, 2), 60)
        slot.restore(prefix.cut(length))
        assert (slot.cache.restored, held(slot)) == (length, list(range(length)))
    cache.reserve(10**9)
    assert cache.num_bytes == 0


def test_salt_of_evicted_prefixes_is_forgotten():
    """A server may see any number of salts."""

    class Salt(str):
        """A text that can be referenced weakly."""

    cache, salt = make(), Salt("mine")
    store(cache, filled(list(range(50))), salt)
    kept = weakref.ref(salt)
    del salt
    assert kept() == "mine" and len(read(cache, range(60), "mine")) == 50
    cache.reserve(10**9)
    assert kept() is None


def test_least_recently_used_prefix_is_evicted_at_the_memory_limit():
    cache = make(max_tokens=200)
    for number in range(500):
        start = 1000 * number
        store(cache, filled(list(range(start, start + 60))), "")
        assert cache.num_bytes <= 200 * TOKEN_BYTES
        read(cache, range(61))  # uses the first sequence again
    assert len(read(cache, range(61))) == 60
    assert len(read(cache, range(499_000, 499_061))) == 60
    assert read(cache, range(100_000, 100_061)) == []
    store(cache, filled(list(range(700, 1000))), "")  # larger than the whole cache
    assert read(cache, range(700, 1001)) == [] and cache.num_bytes <= 200 * TOKEN_BYTES


def test_prefix_is_evicted_after_its_continuations():
    cache = make(max_tokens=100)
    store(cache, filled(list(range(40))), "")
    store(cache, filled([*range(40), *range(100, 140)]), "")
    store(cache, filled(list(range(500, 530))), "")  # evicts the first conversation's end, not its beginning
    assert len(read(cache, [*range(40), *range(100, 140), 1])) == 40


def test_acquiring_slots_evicts_prefixes_to_free_memory():
    slots = SlotPool(lambda capacity: capacity)
    slots.prefixes = cache = PrefixCache(10**6, 300 * TOKEN_BYTES, TOKEN_BYTES)
    store(cache, filled(list(range(100))), "")
    store(cache, filled(list(range(500, 600))), "")
    first = slots.acquire(100)
    assert cache.num_bytes == 200 * TOKEN_BYTES
    first.reset(functools.partial(TreeCache, 2), 100)
    second = slots.acquire(90)
    assert cache.num_bytes == 100 * TOKEN_BYTES and len(read(cache, range(500, 601))) == 100
    store(cache, filled(list(range(900, 1000))), "")
    assert cache.num_bytes == 100 * TOKEN_BYTES, "what is stored later has no more memory than that"
    second.reset(functools.partial(TreeCache, 2), 90)
    slots.release(first)
    slots.release(second)
    slots.acquire(1000)  # more than the memory: all prefixes are evicted
    assert cache.num_bytes == 0


def test_prompt_chunk_limits_the_cache_to_whole_chunks():
    cache = make(prompt_chunk=32)
    slot = filled(list(range(100)))
    slot.num_prefilled = 80  # the rest came from trees
    store(cache, slot)
    assert cache.num_bytes == 64 * TOKEN_BYTES
    assert len(read(cache, range(100))) == len(read(cache, range(65))) == 64
    assert len(read(cache, range(64))) == 32, "the last chunk is fed: its last logits are wanted"


def test_returned_prefix_survives_eviction():
    cache = make(max_tokens=100)
    store(cache, filled(list(range(50))), "")
    prefix = cache.find(range(60), "").cut(30)
    cache.reserve(10**9)
    assert cache.num_bytes == 0
    slot = CacheSlot()
    slot.reset(functools.partial(TreeCache, 2), 60)
    slot.restore(prefix)
    assert held(slot) == list(range(30))


def test_repeated_restores_append_tokens():
    slot = CacheSlot()
    slot.reset(functools.partial(TreeCache, 1), 10)
    cache = TreeCache(1, 4)
    cache.update(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1), 0)
    cache.commit(2)
    states = list(cache.committed())
    slot.cache.restore(states, 2)
    slot.cache.restore(states, 1)
    assert slot.cache.length == 3
