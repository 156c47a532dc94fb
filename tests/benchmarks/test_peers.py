"""Tests that the drafters we compare with follow their published rules."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from goose import Branches, GooseDrafter, Matcher, extended, harmonic
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import NUM_CHILDREN, NUM_COPIED, SamDrafter, first_end, longest_match
from racer import Automaton, RacerDrafter, State, Trie, most_frequent
from suffix_decoding import SuffixDrafter, SuffixTree

from lp_runtime.lookahead.drafter import VerificationResult
from lp_runtime.lookahead.drafters.prompt_lookup import PromptLookupDrafter
from lp_runtime.lookahead.drafters.token_recycling import CHILDREN, TEMPLATE, TokenRecyclingDrafter
from lp_runtime.lookahead.top_k import ENTRY
from lp_runtime.lookahead.tree import TokenTree

# Figure 9 of RACER's paper: a logits tree of 21 nodes, where token t is followed by 4t + 1 to 4t + 4.
FIGURE_9 = {
    (0, 4, 17),
    (0, 1, 5, 21),
    (0, 1, 5, 22),
    (0, 1, 6, 25),
    (0, 1, 7, 29),
    (0, 1, 8, 33),
    (0, 2, 9, 37),
    (0, 2, 10, 41),
    (0, 3, 13, 53),
}
texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def verified(num_nodes: int, rows: list[list[int]]) -> VerificationResult:
    """Return a verification result with these top-k candidates: a row per node, from the root on.

    The successor of every node is token 0.
    """
    entries = np.zeros((len(rows), ENTRY), np.int32)
    for entry, row in zip(entries, rows, strict=True):
        entry[: len(row)] = row
    return VerificationResult([0] * num_nodes, entries)


def test_recycling_template_matches_the_published_one():
    assert len(TEMPLATE) == 80
    assert [sum(len(path) == depth for path, _ in TEMPLATE) for depth in range(6)] == [8, 21, 25, 15, 8, 3]
    assert all(path == "" or (path[:-1], int(path[-1])) in TEMPLATE for path in CHILDREN)


def test_recycling_proposes_the_last_candidates_of_every_token():
    drafter = TokenRecyclingDrafter()
    drafter.begin([1])
    tree = drafter.propose([1, 2], 1, max_depth=50)
    assert tree.tokens == [2, *[0] * 6]  # the table starts as zeros, so the draft is a chain of zeros
    drafter.advance([1, 2, 5], tree, verified(7, [[10 + rank for rank in range(8)]] * 7), [5], [])
    tree = drafter.propose([1, 2, 5, 2], 3, max_depth=50)
    below_root = [tree.tokens[node] for node in range(1, len(tree)) if tree.parents[node] == 0]
    assert below_root == list(range(10, 18))
    # rows of tokens that were never fed are zeros: all entries are the same child
    assert sum(tree.parents[node] == 1 for node in range(len(tree))) == 1


def test_recycling_does_not_keep_a_steps_whole_array_of_candidates():
    drafter = TokenRecyclingDrafter()
    drafter.begin([1])
    tree = drafter.propose([1, 2], 1, max_depth=50)
    result = verified(7, [[10 + rank for rank in range(8)]] * 7)
    entries = weakref.ref(result.top_k)
    drafter.advance([1, 2, 5], tree, result, [5], [])
    del result
    assert entries() is None


@settings(max_examples=60, deadline=None)
@given(texts, texts)
def test_longest_match_is_the_longest_suffix_in_the_text(text, tokens):
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


def test_sam_copies_after_long_matches_and_recycles_otherwise():
    drafter = SamDrafter()
    text = [*range(100, 160), *range(100, 106)]
    tree = drafter.propose(text, len(text) - 1, max_depth=99)
    assert tree.tokens[1:] == list(range(106, 106 + NUM_COPIED - 1))
    drafter.note_prompt([7], np.array([[1, 2, 3, 4, 5, 6, 8, 9, 10, 11]]), np.zeros((1, 10), np.float32))
    tree = drafter.propose([5, 6, 7], 2, max_depth=99)
    assert tree.tokens == [7, 1, 2, 3, 4, 5, 6, 8]
    assert 1 + sum(NUM_CHILDREN.values()) == 61


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.integers(1, 6))
def test_prompt_lookup_copies_after_the_first_longest_match(tokens, num_copied):
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


def paths(tree) -> set[tuple[int, ...]]:
    """Return the token ids from the root down to each leaf."""
    leaves = set(range(tree.root, len(tree))) - {tree.parents[node] for node in range(tree.root + 1, len(tree))}
    return {(tree.tokens[tree.root], *tree.path(leaf)) for leaf in leaves}


def shown(rows: dict[int, list[int]], scores: list[float] | None = None):
    """Return (tokens, ids, logits) for a drafter: a token's successors, padded to 10 with unlikely ones."""
    ids = np.array([[*row, *range(900, 910)][:10] for row in rows.values()])
    logits = np.array([([*(scores or [0.0] * len(row)), *[-50.0] * 10])[:10] for row in rows.values()], np.float32)
    return list(rows), ids, logits


def racer(rows: dict[int, list[int]], capacity: int) -> RacerDrafter:
    drafter = RacerDrafter(capacity, breadth=4)
    drafter.note_prompt(*shown(rows))
    return drafter


def test_racer_logits_tree_matches_the_papers_figure():
    drafter = racer({token: [4 * token + child for child in range(1, 5)] for token in range(60)}, 21)
    tree = drafter.propose([0], 0, max_depth=99)
    assert len(tree) == 21 and paths(tree) == FIGURE_9


def test_racer_extends_the_text_draft_with_the_logits_tree():
    """A token that both sources draft costs one node, and the logits tree continues below it.

    The published tests check the same.
    """
    drafter = racer({10: [20, 21, 22, 23], 20: [30, 31, 32, 33], 30: [40, 41, 42, 43]}, 8)
    drafter.automaton.insert([1, 10, 20], 5)
    drafter.automaton.link()
    drafter.automaton.follow([1])
    tree = drafter.propose([1, 10], 1, max_depth=99)
    # 20 is in the tree already and may have 4 >> 0 children. 21, 22, 23 may have 2, 1, 1, but no successors are known.
    assert paths(tree) == {(10, 20, token) for token in (30, 31, 32)} | {(10, token) for token in (21, 22, 23)}
    assert len(tree) == 8
    repeated = racer({10: [20] * 4, 20: [30, 31, 32, 33]}, 6).propose([10], 0, max_depth=99)
    assert paths(repeated) == {(10, 20, token) for token in (30, 31, 32, 33)}
    assert paths(racer({}, 8).propose([7], 0, max_depth=99)) == {(7, *[0] * 7)}  # unseen rows are zeros


def test_racer_continues_the_states_of_every_border():
    """Only 1 2 is continued: of the suffixes 1 2 and 2 of the text, the second is too short.

    The expected values are worked out by hand.
    """

    def matched(states: list[State]) -> list[tuple[int, int]]:
        return [(state.token, state.depth) for state in states]

    automaton = Automaton(100)
    for ngram, frequency in (([1, 2, 3], 3), ([2, 3, 4], 2), ([9, 2, 3, 7], 1)):
        automaton.insert(ngram, frequency)
    automaton.link()
    automaton.follow([1])
    borders = automaton.borders(2)
    assert matched(borders) == [(2, 2)]
    assert [(state.token, state.frequency) for state, _ in most_frequent(borders, 5)] == [(2, 3), (3, 3)]
    assert matched(automaton.borders(3)) == [(3, 3)]  # 2 3 is not found: 1 2 was used, so its failure link is the root
    automaton.link()
    automaton.follow([1])
    automaton.current = automaton.root.children[1].children[2]
    assert matched(automaton.borders(3)) == [(3, 3), (3, 2)]
    assert automaton.borders(8) == [] and automaton.current.depth == 3  # without a border the current state stays


def test_racer_keeps_the_most_frequent_states_of_each_level():
    automaton = Automaton(100)
    automaton.insert([1, 2], 9)
    for last, frequency in ((3, 4), (4, 1), (5, 3)):
        automaton.insert([1, 2, last, 8], frequency)
    automaton.link()
    automaton.follow([1])
    chosen = most_frequent(automaton.borders(2), 3)
    assert [(state.token, state.frequency) for state, _ in chosen] == [(2, 17), (3, 4), (8, 4)]


def test_racer_drops_the_least_recently_used_leaf():
    trie = Trie(4)  # a root and three states
    trie.insert([1, 2])
    trie.insert([3])
    trie.insert([1])
    trie.insert([4])  # replaces 2, which was used before 3

    def ngrams(state: State) -> list:
        return [[token, *ngrams(child)] for token, child in state.children.items()]

    assert ngrams(trie.root) == [[1], [3], [4]]


def test_racer_learns_text_and_candidates_of_a_step():
    prompt = [*range(1, 11), 1, 2]
    drafter = RacerDrafter(12)
    drafter.begin(prompt)
    text = [*prompt, 3]
    tree = drafter.propose(text, len(prompt), max_depth=99)
    assert paths(tree) == {(3, *[0] * 11)}  # 3 alone is too short a match; unseen rows are zeros
    drafter.note_nodes(tree, *shown({node: [60 + node] for node in range(len(tree))})[1:])
    drafter.advance([*text, 4, 5], tree, VerificationResult([4] * len(tree)), [4, 5], [1])
    tree = drafter.propose([*text, 4, 5], len(text) + 1, max_depth=99)
    # 3 4 was followed by 5, and 5 by 6 to 2 in the text. Zeros follow; the last node with token 0 has set their row.
    assert (5, 6, 7, 8, 9, 10, 1, 2) in {path[:8] for path in paths(tree)}
    tree = drafter.propose([3], 0, max_depth=99)
    assert {path[1] for path in paths(tree)} >= {60, 900}


def goose(rows: dict[int, list[int]], scores: list[float] | None = None, budget: int = 60) -> GooseDrafter:
    drafter = GooseDrafter(budget)
    drafter.note_prompt(*shown(rows, scores))
    return drafter


def test_goose_copies_after_the_longest_context():
    matcher = Matcher()
    matcher.extend([1, 2, 3, 4, 9, 2, 3, 4, 8, 7])
    matcher.extend([1, 2, 3, 4])
    assert matcher.chain([7, 1, 2, 3, 4]) == [9, 2, 3, 4, 8, 7, 1, 2, 3, 4]  # after 1 2 3 4
    assert matcher.chain([5, 2, 3, 4]) == [9, 2, 3, 4, 8, 7, 1, 2, 3, 4]  # after the first 2 3 4
    assert matcher.chain([3, 4]) == []
    # 2 3 4 was followed by 9 and by 8, so the chain's confidence comes from its length, here ten
    assert matcher.confidence([5, 2, 3, 4], [0] * 10) == 0.7 + 0.2 * 2 / 12
    assert matcher.confidence([5, 2, 3, 4], [0] * 4) == 0.3
    assert matcher.confidence([5, 2, 3, 4], []) == 0


def test_goose_extends_chains_that_always_recur():
    matcher = Matcher()
    matcher.extend([1, 2, 3, 4] * 8)
    chain = matcher.chain([2, 3, 4])
    assert chain == [1, 2, 3, 4] * 5 and matcher.confidence([2, 3, 4], chain) == 1.0
    assert len(extended(matcher, [2, 3, 4], chain, 1.0)) == 100
    assert len(extended(matcher, [2, 3, 4], chain, 0.7)) == 80  # at least 70, in chains of 20


def test_goose_prefers_the_two_token_table():
    branches = Branches()
    tokens, ids, logits = shown({5: [1, 2], 6: [3, 4]}, [np.log(3.0), 0.0])
    branches.note(tokens, [None, 5], ids, logits)
    assert branches.after(6, 5)[0] == (3, np.float64(np.float32(0.75)))
    assert branches.after(6, 9)[0] == (3, 0.75) and branches.after(5, 9)[0] == (1, 0.75)
    assert branches.after(7, 5) == []


ROWS = {1: [2, 50], 2: [3, 51], 3: [60, 61], 50: [70, 71], 51: [72, 73], 60: [74, 75], 61: [76, 77]}


def test_goose_grows_a_spine_and_branches():
    """A spine gets branches at the root and at each of its nodes.

    Worked out by hand: the chain 2 3 has a confidence of 0.15, which raises the budget from 12 nodes to 25. The spine
    may have 14 of them. Without the root and the spine's two nodes, 22 are left for branches: 11 at the root, 7 and 3
    on the spine. Branches skip the spine's own next token.
    """
    drafter = goose(ROWS, [0.0, 0.0], budget=12)
    drafter.begin([7, 8, 1, 2, 3])
    draft = drafter.draft([7, 8, 1, 2, 3, 7, 8, 1])
    assert draft.tokens[1 : 1 + draft.num_spine] == [2, 3]
    paths = {tuple(_tokens_to(draft, node)) for node in range(1, len(draft.tokens))}
    forks = {(50,), (2, 51), (2, 3, 60), (2, 3, 61)}
    below = {
        (50, 70),
        (50, 71),
        (2, 51, 72),
        (2, 51, 73),
        (2, 3, 60, 74),
        (2, 3, 60, 75),
        (2, 3, 61, 76),
        (2, 3, 61, 77),
    }
    assert paths == {(2,), (2, 3)} | forks | below


def test_goose_grows_branches_by_score_without_a_spine():
    """Branches alone share the budget by their scores.

    Worked out by hand: of 6 nodes, 3 are left below 2 and 50. Token 2 gets ceil(3 x 0.5), 50 gets the last one.
    """
    drafter = goose(ROWS, [0.0, 0.0], budget=6)
    drafter.begin([9])
    draft = drafter.draft([9, 1])
    paths = {tuple(_tokens_to(draft, node)) for node in range(1, len(draft.tokens))}
    assert paths == {(2,), (50,), (2, 3), (2, 51), (50, 70)}


def _tokens_to(draft, node: int) -> list[int]:
    tokens = []
    while node:
        tokens.append(draft.tokens[node])
        node = draft.parents[node]
    return tokens[::-1]


def test_goose_divides_branches_by_harmonic_weights():
    assert harmonic(12, 3) == [6, 3, 2]
    assert harmonic(3, 5) == [1, 1, 1, 0, 0]
    assert harmonic(0, 2) == [0, 0]


def test_goose_tracks_the_accepted_fraction_of_a_spine():
    drafter = goose({1: [2, 3]}, budget=10)
    text = [7, 8, 1, *range(20, 60), 7, 8]
    drafter.begin(text)
    tree = drafter.propose([*text, 1], len(text), max_depth=99)
    spine = [node for node in range(1, len(tree)) if 20 <= tree.tokens[node] < 60]
    # a chain of 20 has a confidence of 0.9, so it is extended by 20 tokens, then by 7 and 8: 42 nodes
    assert [tree.tokens[node] for node in spine[:40]] == list(range(20, 60))
    path = spine[:10]

    committed = [*range(20, 30), 999]
    drafter.advance([*text, 1, *committed], tree, VerificationResult([999] * len(tree)), committed, path)
    assert drafter.average == pytest.approx(0.3 * 10 / 42 + 0.7 * 0.5)


def test_goose_drafts_only_a_chain_without_known_branches():
    drafter = GooseDrafter(10)
    text = [7, 8, 1, *range(20, 60), 7, 8, 1]
    drafter.begin(text)
    tree = drafter.propose(text, len(text) - 1, max_depth=99)
    assert tree.tokens == [1, *range(20, 40)]
    assert tree.parents == list(range(-1, 20))


def test_suffix_decoding_continues_the_likeliest_suffix():
    """A draft is at most as long as its suffix. Earlier requests' answers count, their prompts do not."""
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert drafted(drafter, [1, 2, 3, 4, 5, 9, 1, 2, 3]) == [4, 5, 9]
    assert drafted(drafter, [8, 3]) == [4]
    drafter.advance_prefill([3, 6])
    for token in (7, 8):
        drafter.advance([token], TokenTree([0], 0), verified(1, []), [token], [])
    drafter.begin([5])
    assert drafted(drafter, [0, 6, 7]) == [8], "of an earlier answer"
    assert drafted(drafter, [0, 1, 2]) == [], "of an earlier prompt"


def test_suffix_decoding_counts_every_occurrence():
    tree = SuffixTree()
    tree.extend([1, 2, 1, 3, 1, 3, 0, 1])
    score, tokens = tree.speculate([0, 1])
    assert tokens == [3] and score == pytest.approx(2 / 4), "the last 1 is followed by nothing yet"


def drafted(drafter: SuffixDrafter, tokens: list[int]) -> list[int]:
    """Return the chain that is drafted after some tokens."""
    tree = drafter.propose(tokens, len(tokens) - 1, max_depth=50)
    return tree.tokens[1:]
