"""The tables that drafts are made from: bounded, forgotten, kept."""

import numpy as np
import pytest
from test_best_first import VOCABULARY, decode

from lp_runtime.lookahead import tables
from lp_runtime.lookahead.best_first import BestFirstPolicy
from lp_runtime.lookahead.candidates import make_nodes, match_text
from lp_runtime.lookahead.drafts import Memory

SIZE = 1 << 16


def num_bytes(memory: Memory) -> int:
    tables = (memory._runners_up, memory._text, memory.rates)
    return sum(array.nbytes for table in tables for array in table)


@pytest.mark.parametrize("size", [1 << 16, 1 << 20, 3 << 20, 16 << 20])
def test_a_memory_is_as_large_as_it_may_be(size):
    assert size / 3 <= num_bytes(Memory(size)) <= size * 1.1


def test_a_small_memory_forgets_and_does_not_grow():
    memory = Memory(SIZE)
    before = num_bytes(memory)
    for seed in range(6):
        decode([seed, 2, 3], BestFirstPolicy(60, memory), seed, 120)
    assert num_bytes(memory) == before
    assert np.count_nonzero(memory._runners_up.keys) > 0.8 * len(memory._runners_up.keys)


def test_what_was_seen_helps_the_next_request_and_a_cleared_memory_does_not():
    memory = Memory(1 << 20)

    def steps() -> int:
        return decode([1, 2, 3], BestFirstPolicy(12, memory), 5, 100)[0].num_steps

    first, second = steps(), steps()
    assert second < 0.6 * first
    memory.clear()
    assert steps() == first


def test_nothing_of_an_earlier_request_is_taken_for_this_ones_positions():
    """What was drawn at a position belongs to a request."""
    memory = Memory(1 << 20)
    text = memory._text
    first = tables.position_key(text, 7, -1)
    memory.begin_text([1, 2, 3])
    memory.begin_text([1, 2, 3])
    assert tables.position_key(text, 7, -1) != first


def test_a_saved_memory_is_the_same_memory():
    memory = Memory(SIZE)
    decode([1, 2, 3], BestFirstPolicy(12, memory), 5, 60)
    again = Memory.load(memory.dump(VOCABULARY), SIZE, VOCABULARY)
    runs = [decode([3, 2, 1], BestFirstPolicy(12, each), 5, 60) for each in (memory, again)]
    assert [tree.tokens for tree in runs[0][1]] == [tree.tokens for tree in runs[1][1]]
    assert (memory.rates.taken == again.rates.taken).all()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: b"", "not a saved memory"),
        (lambda data: b"junk" * 100, "not a saved memory"),
        (lambda data: data[: len(data) // 2], "not a saved memory"),
    ],
)
def test_what_is_not_a_saved_memory_is_refused(spoil, message):
    with pytest.raises(ValueError, match=message):
        Memory.load(spoil(Memory(SIZE).dump(VOCABULARY)), SIZE, VOCABULARY)


def test_a_memory_of_another_size_is_refused():
    with pytest.raises(ValueError, match="memory_bytes=65536"):
        Memory.load(Memory(SIZE).dump(VOCABULARY), 2 * SIZE, VOCABULARY)


def match(memory: Memory, tail: list[int]) -> tuple[int, int]:
    """(place, length) of the longest match of a chain of nodes under the text's last token."""
    nodes = make_nodes(len(tail) + 1)
    nodes.hashes[0] = memory._text.hashes
    nodes.tokens[1:] = tail
    nodes.parents[:] = np.arange(-1, len(tail))
    for node in range(1, len(tail) + 1):
        tables.extend_hashes(nodes.hashes, node - 1, nodes.tokens[node], nodes.hashes, node)
    return match_text(memory._text, nodes, 0, len(tail))


def test_the_longest_match_in_the_text_wins():
    memory = Memory(SIZE)
    #                    0  1  2  3  4  5  6  7  8  9
    memory.begin_text([7, 1, 2, 3, 4, 9, 2, 3, 5, 8])
    assert match(memory, [1, 2, 3]) == (4, 3)  # 1 2 3 -> 4, though 2 3 -> 5 is later
    assert match(memory, [8, 2, 3]) == (8, 2)  # 2 3 -> 5
    assert match(memory, [6])[1] == 0


def test_a_match_reaches_from_a_branch_into_the_text():
    memory = Memory(SIZE)
    memory.begin_text([1, 2, 3, 4, 9, 1, 2])
    assert match(memory, [3]) == (3, 3)


@pytest.mark.parametrize("num_committed", [0, 20, 39])
def test_a_long_match_is_followed_back(num_committed):
    memory = Memory(1 << 20)
    memory.begin_text([*range(100, 140), 1, *range(100, 100 + num_committed)])
    assert match(memory, [*range(100 + num_committed, 140)]) == (40, tables.MAX_MATCH)


def test_a_match_ends_where_the_request_begins():
    memory = Memory(1 << 20)
    memory.begin_text([*range(100, 140)])
    memory.begin_text([*range(130, 139)])
    assert match(memory, [139])[1] == 0  # nothing followed it
    memory.begin_text([*range(120, 129)])
    assert match(memory, [129]) == (30, 10)


def test_text_that_is_overwritten_is_not_matched():
    memory = Memory(SIZE)
    size = len(memory._text.buffer)
    memory.begin_text([1, 2, 3, 4])
    memory.append_text([5 + i % 3 for i in range(2 * size)])
    assert match(memory, [1, 2, 3])[1] == 0
