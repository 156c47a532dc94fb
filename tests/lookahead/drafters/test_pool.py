"""The n-gram pool: order and number of guesses, and the n-grams of a text."""

from hypothesis import given
from hypothesis import strategies as st

from lp_runtime.lookahead.drafters.paper.pool import NGramPool


def test_guesses_are_ordered_most_recent_first():
    pool = NGramPool(ngram_size=3, max_guesses=5)
    for ngram in [(1, 2, 3), (1, 4, 5), (2, 6, 7), (1, 2, 4)]:
        pool.insert(ngram)
    assert pool.guesses(1) == [(2, 4), (4, 5), (2, 3)]
    assert pool.guesses(2) == [(6, 7)]
    assert pool.guesses(3) == []


def test_reinserted_ngram_becomes_most_recent_without_duplicate():
    pool = NGramPool(ngram_size=2, max_guesses=3)
    for token in (1, 2, 3, 1):
        pool.insert((0, token))
    assert pool.guesses(0) == [(1,), (3,), (2,)]
    assert pool.expect(0) == 1


def test_oldest_ngram_beyond_G_is_dropped():
    pool = NGramPool(ngram_size=2, max_guesses=2)
    for token in (1, 2, 1, 3):
        pool.insert((0, token))
    assert pool.guesses(0) == [(3,), (1,)]


def test_pool_without_guesses_stays_empty():
    pool = NGramPool(ngram_size=3, max_guesses=0)
    pool.insert((1, 2, 3))
    pool.insert_text([1, 2, 3, 1, 2, 3], first=0, first_end=0)
    assert pool.guesses(1) == []
    assert pool.expect(1) is None
    assert pool.statistics().num_keys == pool.statistics().num_ngrams == 0


def test_expect_returns_token_after_key_in_most_recent_ngram():
    pool = NGramPool(ngram_size=3, max_guesses=2)
    assert pool.expect(1) is None
    pool.insert((1, 2, 3))
    pool.insert((1, 4, 5))
    assert pool.expect(1) == 4


def test_text_is_inserted_in_order_and_ignored_if_shorter_than_N():
    pool = NGramPool(ngram_size=3, max_guesses=9)
    pool.insert_text([1, 2], first=0, first_end=0)
    assert pool.statistics().num_ngrams == 0
    pool.insert_text([1, 2, 3, 1, 2, 4], first=0, first_end=0)
    assert pool.guesses(1) == [(2, 4), (2, 3)]
    assert pool.guesses(2) == [(3, 1)]
    assert pool.guesses(3) == [(1, 2)]


@given(st.integers(2, 5), st.integers(0, 12), st.integers(0, 9), st.integers(0, 12))
def test_insert_text_inserts_exactly_ngrams_within_bounds(size, length, first, first_end):
    tokens = list(range(length))
    pool = NGramPool(size, max_guesses=20)
    pool.insert_text(tokens, first, first_end)
    expected = {
        tuple(tokens[start : start + size])
        for start in range(length - size + 1)
        if start >= first and start + size > first_end
    }
    assert {(token, *rest) for token in tokens for rest in pool.guesses(token)} == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), max_size=40), st.integers(1, 4))
def test_pool_matches_plain_list_of_inserted_ngrams(ngrams, max_guesses):
    pool = NGramPool(3, max_guesses)
    for ngram in ngrams:
        pool.insert(ngram)
    kept = 0
    for key in range(3):
        recent = list(dict.fromkeys(n[1:] for n in reversed(ngrams) if n[0] == key))[:max_guesses]
        kept += len(recent)
        assert pool.guesses(key) == recent
    assert pool.statistics().num_ngrams == kept


def test_statistics_report_fan_out_hit_rate_and_accepted_length():
    pool = NGramPool(ngram_size=2, max_guesses=3)
    assert (pool.statistics().fan_out, pool.statistics().hit_rate, pool.statistics().accepted_length) == (0, 0, 0)
    for ngram in [(1, 2), (1, 3), (2, 2)]:
        pool.insert(ngram)
    pool.record_step(path=[], guess_nodes=set())
    pool.record_step(path=[4], guess_nodes=set())  # accepted, but in the window only
    pool.record_step(path=[4, 5, 6], guess_nodes={4, 5, 9})
    pool.record_step(path=[], guess_nodes={4})
    statistics = pool.statistics()
    assert (statistics.num_keys, statistics.num_ngrams, statistics.fan_out) == (2, 3, 1.5)
    assert statistics.hit_rate == 0.5
    assert statistics.accepted_length == 1.0
