"""The corpus index: its order, matches of contexts, and the tokens that follow the matches."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given
from test_best_first import VOCABULARY, decode, greedy_text

from lp_runtime.lookahead.drafters.best_first.corpus import (
    MAX_ROOT_MATCH,
    MAX_SAMPLED,
    MIN_ROOT_MATCH,
    NO_CORPUS,
    SORTED_TOKENS,
    CorpusIndex,
    count_next,
    extend_match,
    index_tokens,
    match_root,
)
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.drafters.best_first.drafter import BestFirstDrafter
from lp_runtime.lookahead.top_k import K

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=5)


def indexed(texts: list[list[int]]) -> CorpusIndex:
    return index_tokens(np.array([token for text in texts for token in (*text, -1)], np.int32))


def next_tokens(texts: list[list[int]], context: list[int]) -> list[int]:
    """Return the token after each occurrence of a context in the texts."""
    size = len(context)
    return [
        text[i + size] if i + size < len(text) else -1
        for text in texts
        for i in range(len(text) - size + 1)
        if text[i : i + size] == context
    ]


@given(TEXTS)
@example([[1] * 100, [1] * 100])
def test_places_are_sorted_by_tokens_at_them(texts):
    index = indexed(texts)
    padded = [*index.tokens.tolist(), *[-1] * SORTED_TOKENS]
    assert sorted(index.places.tolist()) == list(range(len(index.tokens)))
    actual = [padded[place : place + SORTED_TOKENS] for place in index.places]
    assert actual == sorted(actual)


@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(0, 3), max_size=6))
@example([[1, 2, 3, 3], [1, 2, 3, 0]], [1, 2], [3])
def test_match_is_longest_suffix_of_text_and_extends_along_branch(texts, text, branch):
    """The candidates are the tokens after the places of the match, the most frequent first."""
    index, tables = indexed(texts), DraftTables(1 << 16)
    tables.begin_text(text)
    matches = np.zeros((1 + len(branch), 3), np.int64)
    match_root(index, tables.text.buffer, tables.text.span, matches, 0)
    lengths = [n for n in range(MIN_ROOT_MATCH, MAX_ROOT_MATCH + 1) if next_tokens(texts, text[-n:]) and n <= len(text)]
    assert matches[0, 2] == max(lengths, default=0)
    for node in range(1 + len(branch)):
        if node:
            extend_match(index, matches, node - 1, branch[node - 1], node)
        context = [*text, *branch[:node]]
        length = int(matches[node, 2])
        places = next_tokens(texts, context[-length:]) if length else []
        if node and matches[node - 1, 2]:
            longer = context[-int(matches[node - 1, 2]) - 1 :]
            assert length == (len(longer) if next_tokens(texts, longer) else 0)
        if not length:
            continue
        assert matches[node, 1] - matches[node, 0] == len(places)
        tokens, counts = np.zeros((1, K), np.int32), np.zeros(K, np.int32)
        num = count_next(index, matches, node, tokens, 0, counts)
        assert num == min(len(places), MAX_SAMPLED)
        if len(places) <= MAX_SAMPLED:
            actual = {token: count for token, count in zip(tokens[0].tolist(), counts.tolist(), strict=True) if count}
            assert actual == {token: places.count(token) for token in set(places) if token >= 0}
        assert counts.tolist() == sorted(counts.tolist(), reverse=True)


def test_corpus_that_contains_text_saves_steps():
    prompt, text = [1, 2, 3], greedy_text([1, 2, 3], 5, 100)

    def steps(corpus: CorpusIndex) -> int:
        drafter = BestFirstDrafter(12, DraftTables(1 << 20), None, None, 24, corpus)
        state, _ = decode(prompt, drafter, 5, 100)
        assert state.tokens == [*prompt, *text]
        return state.num_steps

    without = steps(NO_CORPUS)
    assert steps(indexed([[9, 9], [*prompt, *text]])) < 0.7 * without
    assert steps(indexed([[VOCABULARY - 1, VOCABULARY - 2]])) == without
