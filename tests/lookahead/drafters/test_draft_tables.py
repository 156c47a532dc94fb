"""The draft tables: their size limit, clearing them, saving and loading them."""

import numpy as np
import pytest
from test_best_first import VOCABULARY, best_first, decode

from lp_runtime.lookahead.drafter import NoiseKey
from lp_runtime.lookahead.drafters.best_first import tables
from lp_runtime.lookahead.drafters.best_first.candidates import match_length
from lp_runtime.lookahead.drafters.best_first.draft_tables import TOKEN_BYTES, DraftTables
from lp_runtime.lookahead.drafters.best_first.features import make_nodes
from lp_runtime.lookahead.drafters.best_first.starting_rates import GREEDY
from lp_runtime.lookahead.drafters.best_first.tables import MAX_MATCH

SIZE = 1 << 16
pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # hashes wrap around


def num_bytes(draft_tables: DraftTables) -> int:
    parts = (draft_tables.top_k, draft_tables.text)
    return sum(array.nbytes for part in parts for array in part)


@pytest.mark.parametrize("size", [1 << 16, 1 << 20, 3 << 20, 16 << 20])
def test_draft_tables_size_is_near_limit(size):
    assert size / 3 <= num_bytes(DraftTables(size)) <= size * 1.1


def test_small_draft_tables_overwrite_and_grow_only_with_longest_text():
    draft_tables = DraftTables(SIZE)
    sizes = []
    for seed in range(6):
        decode([seed, 2, 3], best_first(60, draft_tables), seed, 120)
        sizes.append(num_bytes(draft_tables))
    assert set(sizes[1:]) == {sizes[1]} and sizes[1] < SIZE + 2 * TOKEN_BYTES * 2 * (123 + MAX_MATCH)
    assert np.count_nonzero(draft_tables.top_k.keys) > 0.8 * len(draft_tables.top_k.keys)
    draft_tables.clear()
    assert num_bytes(draft_tables) == num_bytes(DraftTables(SIZE))


def test_draft_tables_save_steps_of_next_request_until_cleared():
    draft_tables = DraftTables(1 << 20)

    def steps() -> int:
        return decode([1, 2, 3], best_first(12, draft_tables), 5, 100)[0].num_steps

    first, second = steps(), steps()
    assert second < 0.6 * first
    draft_tables.clear()
    assert steps() == first


@pytest.mark.parametrize(
    ("num_repeated", "temperature", "is_kept"),
    [(43, 1.0, True), (22, 1.0, True), (20, 1.0, False), (0, 1.0, False), (43, 0.5, False)],
)
def test_top_k_candidates_are_kept_within_a_conversation_only(num_repeated, temperature, is_kept):
    draft_tables = DraftTables(SIZE)
    text = decode([1, 2, 3], best_first(12, draft_tables, noise=NoiseKey(1, 0, 1.0)), 5, 40)[0].tokens
    assert len(text) == 43 and draft_tables.top_k.keys.any()
    best_first(12, draft_tables, noise=NoiseKey(1, 0, temperature)).begin([*text[:num_repeated], VOCABULARY - 1])
    assert draft_tables.top_k.keys.any() == is_kept


def test_position_keys_differ_between_requests():
    draft_tables = DraftTables(1 << 20)
    text = draft_tables.text
    first = tables.position_key(text, 7, -1)
    draft_tables.begin_text([1, 2, 3])
    draft_tables.begin_text([1, 2, 3])
    assert tables.position_key(text, 7, -1) != first


def test_loaded_draft_tables_equal_saved_ones():
    draft_tables = DraftTables(SIZE)
    decode([1, 2, 3], best_first(12, draft_tables), 5, 60)
    again = DraftTables.load(draft_tables.dump(VOCABULARY), SIZE, VOCABULARY)
    outcomes = [decode([3, 2, 1], best_first(12, each), 5, 60) for each in (draft_tables, again)]
    assert [tree.tokens for tree in outcomes[0][1]] == [tree.tokens for tree in outcomes[1][1]]
    assert (draft_tables.rates.accepted == again.rates.accepted).all()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: b"", "not saved draft tables"),
        (lambda data: b"junk" * 100, "not saved draft tables"),
        (lambda data: data[: len(data) // 2], "not saved draft tables"),
    ],
)
def test_invalid_saved_draft_tables_are_refused(spoil, message):
    with pytest.raises(ValueError, match=message):
        DraftTables.load(spoil(DraftTables(SIZE).dump(VOCABULARY)), SIZE, VOCABULARY)


@pytest.mark.parametrize(("tried", "accepted"), [(1, 2), (-1, -1)])
def test_saved_draft_tables_with_impossible_counts_are_refused(tried, accepted):
    draft_tables = DraftTables(SIZE)
    draft_tables.rates.tried[0], draft_tables.rates.accepted[0] = tried, accepted
    with pytest.raises(ValueError, match="it is damaged"):
        DraftTables.load(draft_tables.dump(VOCABULARY), SIZE, VOCABULARY)


def test_draft_tables_of_another_size_are_refused():
    with pytest.raises(ValueError, match="draft_tables_bytes=65536"):
        DraftTables.load(DraftTables(SIZE).dump(VOCABULARY), 2 * SIZE, VOCABULARY)


def match(draft_tables: DraftTables, tail: list[int]) -> tuple[int, int]:
    """Return (place, length) of the longest match of a chain of nodes below the text's last token."""
    nodes = make_nodes(len(tail) + 1)
    nodes.hashes[0] = draft_tables.text.hashes
    nodes.tokens[1:] = tail
    nodes.parents[:] = np.arange(-1, len(tail))
    for node in range(1, len(tail) + 1):
        tables.extend_hashes(nodes.hashes, node - 1, nodes.tokens[node], nodes.hashes, node)
    place, length = tables.find_ngram(draft_tables.text, nodes.hashes, len(tail))
    if length == tables.MAX_GRAM:
        length = match_length(draft_tables.text, nodes, 0, len(tail), place)
    return place, length


def test_longest_match_in_text_wins():
    draft_tables = DraftTables(SIZE)
    #                    0  1  2  3  4  5  6  7  8  9
    draft_tables.begin_text([7, 1, 2, 3, 4, 9, 2, 3, 5, 8])
    assert match(draft_tables, [1, 2, 3]) == (4, 3)  # 1 2 3 -> 4, though 2 3 -> 5 is later
    assert match(draft_tables, [8, 2, 3]) == (8, 2)  # 2 3 -> 5
    assert match(draft_tables, [6])[1] == 0


def test_match_extends_from_branch_into_text():
    draft_tables = DraftTables(SIZE)
    draft_tables.begin_text([1, 2, 3, 4, 9, 1, 2])
    assert match(draft_tables, [3]) == (3, 3)


@pytest.mark.parametrize("num_committed", [0, 20, 39])
def test_long_match_is_traced_back_to_maximum_length(num_committed):
    draft_tables = DraftTables(1 << 20)
    draft_tables.begin_text([*range(100, 140), 1, *range(100, 100 + num_committed)])
    assert match(draft_tables, [*range(100 + num_committed, 140)]) == (40, MAX_MATCH)


def test_match_ends_at_beginning_of_request():
    draft_tables = DraftTables(1 << 20)
    draft_tables.begin_text([*range(100, 140)])
    draft_tables.begin_text([*range(130, 139)])
    assert match(draft_tables, [139])[1] == 0  # nothing followed it
    draft_tables.begin_text([*range(120, 129)])
    assert match(draft_tables, [129]) == (30, 10)


def test_overwritten_text_is_not_matched():
    draft_tables = DraftTables(SIZE)
    size = len(draft_tables.text.buffer)
    draft_tables.begin_text([1, 2, 3, 4])
    for _ in range(10):
        draft_tables.begin_text([5 + i % 3 for i in range(size // 4)])
    assert len(draft_tables.text.buffer) == size
    assert match(draft_tables, [1, 2, 3])[1] == 0


def test_long_text_is_kept_whole_with_texts_before_it():
    draft_tables = DraftTables(SIZE)
    size = len(draft_tables.text.buffer)
    draft_tables.begin_text([1, 2, 3, 4])
    draft_tables.begin_text([7, 8, 9])
    for i in range(4 * size):
        draft_tables.append_text([100 + i])
    for tables_now in (draft_tables, DraftTables.load(draft_tables.dump(8 * size), SIZE, 8 * size)):
        assert match(tables_now, [1, 2, 3]) == (3, 3)
        assert match(tables_now, [7, 8]) == (6, 2)
        assert match(tables_now, [4, 7]) == (5, 1), "one text ends where the next one begins"
        assert match(tables_now, [*range(100, 140)]) == (47, MAX_MATCH)
        assert tables_now.text.span.tolist() == [4, 7 + 4 * size]


def test_memory_of_a_long_text_is_given_back_with_the_next_short_one():
    draft_tables = DraftTables(SIZE)
    size = len(draft_tables.text.buffer)
    draft_tables.begin_text([100 + i for i in range(4 * size)])
    draft_tables.begin_text([1, 2, 3])
    assert match(draft_tables, [100, 101]) == (2, 2), "of the same request nothing is forgotten"
    draft_tables.start(GREEDY)
    draft_tables.begin_text([1, 2, 3])
    assert num_bytes(draft_tables) == num_bytes(DraftTables(SIZE))
    last = 99 + 4 * size
    place, length = match(draft_tables, [last - 3, last - 2, last - 1])
    assert draft_tables.text.buffer[place & (size - 1)] == last and length == 3
