"""The peers that drafting is compared with follow their published rules."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.peers import NUM_CHILDREN, NUM_COPIED, SamDrafter, first_end, longest_match

from lp_runtime.lookahead.drafters.base import VerificationResult
from lp_runtime.lookahead.drafters.best_first.tables import ENTRY
from lp_runtime.lookahead.drafters.prompt_lookup import PromptLookupDrafter
from lp_runtime.lookahead.drafters.token_recycling import CHILDREN, TEMPLATE, TokenRecyclingDrafter

texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def found(num_nodes: int, rows: list[list[int]]) -> VerificationResult:
    """Return a result with these top-k candidates, a row a node from the root on; every successor is token 0."""
    entries = np.zeros((len(rows), ENTRY), np.int32)
    for entry, row in zip(entries, rows, strict=True):
        entry[: len(row)] = row
    return VerificationResult([0] * num_nodes, entries)


def test_recyclings_template_is_the_published_one():
    assert len(TEMPLATE) == 80
    assert [sum(len(path) == depth for path, _ in TEMPLATE) for depth in range(6)] == [8, 21, 25, 15, 8, 3]
    assert all(path == "" or (path[:-1], int(path[-1])) in TEMPLATE for path in CHILDREN)


def test_recycling_proposes_the_last_candidates_of_every_token():
    drafter = TokenRecyclingDrafter()
    drafter.begin([1])
    tree = drafter.propose([1, 2], 1, max_depth=50)
    assert tree.tokens == [2, *[0] * 6]  # the table starts as zeros: a chain of them
    drafter.advance([1, 2, 5], tree, found(7, [[10 + rank for rank in range(8)]] * 7), [5], [])
    tree = drafter.propose([1, 2, 5, 2], 3, max_depth=50)
    below_root = [tree.tokens[node] for node in range(1, len(tree)) if tree.parents[node] == 0]
    assert below_root == list(range(10, 18))
    # tokens that were never fed have zeros, all of them the same child
    assert sum(tree.parents[node] == 1 for node in range(len(tree))) == 1


@settings(max_examples=60, deadline=None)
@given(texts, texts)
def test_the_longest_match_is_the_longest_suffix_that_occurs(text, tokens):
    length = longest_match(text, tokens)
    occurs = [
        size
        for size in range(1, len(tokens) + 1)
        if any(text[i : i + size] == tokens[-size:] for i in range(len(text) - size + 1))
    ]
    assert length == max(occurs, default=0)
    if length:
        end = first_end(text, tokens[-length:])
        assert text[end - length : end] == tokens[-length:]


def test_sam_copies_where_the_match_is_long_and_recycles_elsewhere():
    drafter = SamDrafter()
    text = [*range(100, 160), *range(100, 106)]
    tree = drafter.propose(text, len(text) - 1, max_depth=99)
    assert tree.tokens[1:] == list(range(106, 106 + NUM_COPIED - 1))
    drafter.note_prompt([7], np.array([[1, 2, 3, 4, 5, 6, 8, 9] + [0] * 8], np.int32))
    tree = drafter.propose([5, 6, 7], 2, max_depth=99)
    assert tree.tokens == [7, 1, 2, 3, 4, 5, 6, 8]
    assert 1 + sum(NUM_CHILDREN.values()) == 61


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.integers(1, 6))
def test_prompt_lookup_copies_what_followed_the_first_longest_match(tokens, num_copied):
    drafter = PromptLookupDrafter(num_copied)
    drafter.begin(tokens)
    tree = drafter.propose(tokens, len(tokens) - 1, max_depth=99)
    expected: list[int] = []
    for size in (3, 2, 1):
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
        if ends:
            expected = tokens[ends[0] : ends[0] + num_copied]
            break
    assert tree.tokens[1:] == expected
