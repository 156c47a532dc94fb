"""Which memory a text gets: large enough if there is any, and what it holds of a text that is taken up."""

from types import SimpleNamespace

from lp_runtime.model.kv_cache.slots import CacheSlot, SlotPool


def text(capacity: int, tokens=(), fixed=None) -> CacheSlot:
    return CacheSlot(SimpleNamespace(capacity=capacity), list(tokens), fixed=fixed)


def idle(*texts: CacheSlot) -> SlotPool:
    found = SlotPool(texts[0])
    for each in texts[1:]:
        found.give(each)
    return found


def test_the_smallest_that_has_room():
    small, middle, large = text(10), text(100), text(1000)
    texts = idle(large, small, middle)
    assert texts.take(50) is middle
    assert texts.take(50) is large
    assert texts.take(50) is small, "it must grow"
    assert texts.take(50).capacity == 0


def test_all_others_are_freed_if_none_has_room():
    small, large = text(10), text(100)
    texts = idle(small, large)
    assert texts.take(200) is large
    assert texts.take(5) not in (small, large)


def test_a_text_that_is_taken_up():
    other, same = text(100, [1, 2, 9, 9]), text(10, [1, 2, 3, 4])
    assert idle(other, same).take(50, (1, 2, 3, 5)) is same
    assert idle(other, same).take(50) is other
    assert idle(other, same).take(50, (7, 7)) is other


def test_passes_of_fixed_sizes_are_kept_once_and_used_again():
    first, second, spare = text(100, fixed=object()), text(200, fixed=object()), text(60)
    texts = idle(first, spare, second)
    assert first.fixed is None
    assert texts.take(50) is second
