"""The lookahead window: its geometry, how it slides, and its n-grams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lp_runtime.lookahead.drafters.paper.window import Window
from lp_runtime.lookahead.tree import TokenTree

GAP = -5  # refills slots in these tests: a token that no model produces


def make_window(num_columns: int, ngram_size: int) -> Window:
    return Window(num_columns, ngram_size, lambda previous: GAP)


def unmerged_step(window: Window, step: int, num_committed: int):
    """Run a step in which each node has a different successor, 1000 * step + node."""
    tree = TokenTree([10_000 + step], max_depth=99)
    slots = window.place(tree)
    successors = [1000 * step + node for node in range(len(tree))]
    ngrams = window.ngrams(tree, slots, successors)
    window.advance(slots, successors, num_committed)
    return tree, slots, successors, ngrams


@pytest.mark.parametrize("num_columns", [1, 2, 5])
@pytest.mark.parametrize("ngram_size", [2, 3, 5])
def test_column_i_of_level_r_has_depth_i_plus_r(num_columns, ngram_size):
    window = make_window(num_columns, ngram_size)
    for step in range(1, ngram_size + 2):
        tree, slots, _, _ = unmerged_step(window, step, 1)
        assert slots[0][0] == tree.root
        for r, level in enumerate(slots):
            assert len(level) == num_columns
            for i, node in enumerate(level):
                assert tree.depths[node] == i + r
                above = slots[r - 1][i] if r else slots[0][i - 1] if i else None
                assert tree.parents[node] == (-1 if above is None else above)


@pytest.mark.parametrize("ngram_size", [2, 3, 5])
def test_warm_up_fills_one_level_per_step_without_ngrams(ngram_size):
    window = make_window(4, ngram_size)
    for step in range(1, ngram_size + 3):
        assert len(window.levels) == min(step, ngram_size - 1)
        assert window.is_full == (step >= ngram_size - 1)
        was_full = window.is_full
        _, _, _, ngrams = unmerged_step(window, step, 1)
        assert len(ngrams) == (4 if was_full else 0)


def test_full_window_slides_by_number_of_committed_tokens():
    window = make_window(4, 4)
    for step in (1, 2):
        unmerged_step(window, step, 1)
    assert window.is_full
    old = [list(level) for level in window.levels]
    _, slots, successors, _ = unmerged_step(window, 3, num_committed=3)
    made = [successors[node] for node in slots[-1]]
    # Level r + 1 becomes level r, which slides by one column; two more columns are cut at the left and refilled.
    assert window.levels == [old[1][2:] + [GAP] * 2, old[2][2:] + [GAP] * 2, made[2:] + [GAP] * 2]


def test_full_window_is_not_refilled_after_one_committed_token():
    window = make_window(3, 3)
    for step in range(1, 6):
        unmerged_step(window, step, 1)
    assert GAP not in [token for level in window.levels for token in level]


def test_warm_up_slides_levels_by_number_of_committed_tokens():
    window = make_window(4, 5)
    window.levels = [[0, 1, 2, 3]]
    tree, slots, successors, _ = unmerged_step(window, 1, num_committed=2)
    made = [successors[node] for node in slots[0]]
    assert window.levels == [[2, 3, GAP, GAP], [*made[2:], GAP, GAP]]


def test_committing_past_window_refills_all_slots():
    window = make_window(3, 4)
    for step in (1, 2):
        unmerged_step(window, step, 1)
    unmerged_step(window, 3, num_committed=8)
    assert window.levels == [[GAP] * 3] * 3


def test_ngrams_are_columns_with_their_successors():
    window = make_window(3, 4)
    for step in (1, 2):
        unmerged_step(window, step, 1)
    levels = [list(level) for level in window.levels]
    tree, slots, successors, ngrams = unmerged_step(window, 3, 1)
    levels[0][0] = tree.tokens[tree.root]
    assert ngrams == [(*(level[i] for level in levels), successors[slots[-1][i]]) for i in range(3)]


def test_N_of_2_places_one_chain_and_collects_bigrams():
    window = make_window(4, 2)
    window.levels = [[0, 1, 2, 3]]
    tree, slots, successors, ngrams = unmerged_step(window, 1, 1)
    assert tree.parents == [-1, 0, 1, 2]
    assert slots == [[0, 1, 2, 3]]
    assert ngrams == list(zip(tree.tokens, successors, strict=True))
    assert window.levels == [successors]


def test_W_of_1_places_one_column_that_starts_at_root():
    window = make_window(1, 3)
    unmerged_step(window, 1, 1)
    tree, slots, successors, ngrams = unmerged_step(window, 2, 1)
    assert slots == [[0], [1]]
    assert ngrams == [(tree.tokens[0], tree.tokens[1], successors[1])]


def test_slots_beyond_max_depth_are_refilled_without_ngrams():
    window = make_window(3, 3)
    unmerged_step(window, 1, 1)
    tree = TokenTree([1], max_depth=2)
    slots = window.place(tree)
    assert [[node is None for node in level] for level in slots] == [[False] * 3, [False, False, True]]
    successors = list(range(100, 100 + len(tree)))
    assert len(window.ngrams(tree, slots, successors)) == 2
    window.advance(slots, successors, 1)
    assert window.levels[-1][-1] == GAP
    assert GAP not in window.levels[-1][:-1]


def test_refill_receives_token_before_slot():
    asked = []

    def refill(previous):
        asked.append(previous)
        return 50 if previous is None else previous + 1

    window = Window(4, 2, refill)
    assert asked == [None, 50, 51, 52]
    assert window.levels == [[50, 51, 52, 53]]
    tree = TokenTree([1], max_depth=9)
    window.advance(window.place(tree), [70, 80, 90, 100], num_committed=3)
    assert asked[4:] == [100, 101]
    assert window.levels == [[90, 100, 101, 102]]


@given(st.integers(1, 6), st.integers(2, 5), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_levels_keep_full_width_after_any_commit(num_columns, ngram_size, committed):
    window = make_window(num_columns, ngram_size)
    for step, num_committed in enumerate(committed, start=1):
        assert [len(level) for level in window.levels] == [num_columns] * min(step, ngram_size - 1)
        unmerged_step(window, step, num_committed)
