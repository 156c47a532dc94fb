"""All drafters, the best-first one in detail, with a toy language model whose candidates are known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lp_runtime.lookahead.drafter import Drafter, NoiseKey, VerificationResult
from lp_runtime.lookahead.drafters.best_first import estimates, features, guided, tables
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.drafters.best_first.drafter import BestFirstDrafter
from lp_runtime.lookahead.drafters.best_first.starting_rates import GREEDY, SAMPLED
from lp_runtime.lookahead.drafters.paper.drafter import PaperDrafter
from lp_runtime.lookahead.drafters.prompt_lookup import PromptLookupDrafter
from lp_runtime.lookahead.drafters.token_recycling import TokenRecyclingDrafter
from lp_runtime.lookahead.state import DecodingRules, DecodingState
from lp_runtime.lookahead.top_k import ENTRY, MARGINS, MAX_MARGIN, STAMP, UNITS_PER_NAT, K, VocabularyPrior
from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS, TokenTree
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.utils.jit import compiled

VOCABULARY = 11
CERTAIN = 1 << PATH_PROBABILITY_BITS
SMALL = 1 << 16  # bytes of draft tables


def toy_ranking(tokens: list[int], seed: int) -> list[int]:
    """Rank all tokens with the toy model: a hash of the last two tokens, and sometimes of the position."""
    value = seed
    for token in tokens[-2:]:
        value = (value * 31 + token + 7) % 10_007
    if len(tokens) % 5 == 0:
        value += len(tokens)
    return sorted(range(VOCABULARY), key=lambda token: (value * (token + 3)) % 101)


def entries_of(rankings: list[list[int]], nats: int = 1) -> np.ndarray:
    """Return top-k entries as in a verification result, with margins of 0, `nats`, 2 `nats` and so on."""
    entries = np.full((len(rankings), ENTRY), -1, np.int32)
    steps = np.minimum(np.arange(K) * nats * UNITS_PER_NAT, MAX_MARGIN).astype(np.uint8)
    margins = np.tile(steps, (len(rankings), 1))
    entries[:, MARGINS:STAMP] = margins.view(np.int32)
    entries[:, :K] = [ranking[:K] for ranking in rankings]
    return entries


def prior_of(
    after_token: np.ndarray, pairs: Mapping[tuple[int, int], np.ndarray] | None = None, num_paired: int = VOCABULARY
) -> VocabularyPrior:
    """Return a vocabulary prior from entries after each token, [V, ENTRY], and after (token, its rank-th successor)."""
    after_pair = np.full((num_paired, K, ENTRY), -1, np.int32)
    for (token, rank), entry in (pairs or {}).items():
        after_pair[token, rank] = entry
    return VocabularyPrior(after_token, after_pair.reshape(-1, ENTRY))


def best_first(
    max_nodes: int,
    draft_tables: DraftTables | None = None,
    vocabulary: VocabularyPrior | None = None,
    noise: NoiseKey | None = None,
    max_depth: int = 24,
) -> BestFirstDrafter:
    return BestFirstDrafter(max_nodes, draft_tables or DraftTables(SMALL), vocabulary, noise, max_depth)


def verify(
    tree: TokenTree, committed: list[int], drafter: Drafter, seed: int, num_candidates: int = K
) -> VerificationResult:
    """Return the toy model's verification result for a tree; `committed` ends with the tree's root."""
    texts: list[list[int]] = []
    for node, token in enumerate(tree.tokens):
        parent = tree.parents[node]
        before = texts[parent] if parent >= 0 else committed[: len(committed) - tree.root - 1]
        texts.append([*before, token])
    rankings = [toy_ranking(text, seed) for text in texts]
    entries = entries_of(rankings[tree.root :]) if drafter.num_top_k else None
    if entries is not None:
        entries[:, num_candidates:K] = -1
    return VerificationResult([ranking[0] for ranking in rankings], entries)


def decode(
    prompt: list[int], drafter: Drafter, seed: int, num_new: int, num_candidates: int = K
) -> tuple[DecodingState, list[TokenTree]]:
    state = DecodingState(prompt, DecodingRules(num_new), drafter)
    proposal = state.propose_prefill()
    state.advance_prefill(proposal, verify(proposal.tree, state.tokens, drafter, seed))
    trees = []
    while state.finish_reason is None:
        proposal = state.propose()
        trees.append(proposal.tree)
        state.advance(proposal, verify(proposal.tree, state.tokens, drafter, seed, num_candidates))
        state.num_cached += proposal.tree.root + 1
    return state, trees


def greedy_text(prompt: list[int], seed: int, num_new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(toy_ranking(tokens, seed)[0])
    return tokens[len(prompt) :]


DRAFTERS = {
    "full": lambda: best_first(24),
    "full, one node": lambda: best_first(1),
    "full, flat": lambda: best_first(40, max_depth=1),
    "full, noise": lambda: best_first(30, noise=NoiseKey(5, 0)),
    "paper": lambda: PaperDrafter((4, 3, 4)),
    "paper, guesses alone": lambda: PaperDrafter((4, 3, 4), only_guesses=True),
    "paper, budget": lambda: PaperDrafter((4, 3, 4), budget=7),
    "prompt lookup": lambda: PromptLookupDrafter(5),
    "prompt lookup, budget": lambda: PromptLookupDrafter(5, budget=3),
    "recycling": TokenRecyclingDrafter,
    "recycling, budget": lambda: TokenRecyclingDrafter(budget=9),
}


@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
    st.integers(0, 50),
    st.integers(1, 60),
    st.sampled_from([1, 3, K]),
)
def test_drafters_do_not_change_output(name, prompt, seed, num_new, num_candidates):
    """Given fewer than K candidates, as with sampling.top_k=3, drafters propose only valid tokens."""
    drafter = DRAFTERS[name]()
    state, trees = decode(prompt, drafter, seed, num_new, num_candidates=num_candidates)
    assert state.new_tokens == greedy_text(prompt, seed, num_new)
    for tree in trees:
        assert all(0 <= token < VOCABULARY for token in tree.tokens)
        assert max(tree.depths) <= drafter.max_committed - 1
        assert len(tree) - tree.root <= drafter.max_nodes
        assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)  # siblings differ
        assert all(parent < node for node, parent in enumerate(tree.parents))
    accepted, fed = drafter.counts.accepted.sum(), drafter.counts.fed.sum()
    assert fed == sum(len(tree) - tree.root - 1 for tree in trees)
    assert state.num_steps - 1 <= len(state.new_tokens) - 1 <= accepted + state.num_steps - 1 + (num_new == 1)


@pytest.mark.parametrize("budget", [7, 9])
def test_budget_limits_fed_tokens_including_pending_ones(budget):
    for drafter in (
        PaperDrafter((6, 4, 6), budget=budget),
        PromptLookupDrafter(20, budget),
        TokenRecyclingDrafter(budget),
    ):
        _, trees = decode([1, 2, 3], drafter, 3, 80)
        assert max(map(len, trees)) == budget


def test_equal_histories_give_equal_trees():
    first, second = (decode([1, 2, 3], best_first(30), 4, 60)[1] for _ in range(2))
    assert [tree.tokens for tree in first] == [tree.tokens for tree in second]
    assert [tree.parents for tree in first] == [tree.parents for tree in second]
    assert all((a.path_probabilities == b.path_probabilities).all() for a, b in zip(first, second, strict=True))


def test_nodes_are_sorted_by_path_probability():
    _, trees = decode([1, 2, 3], best_first(40), 4, 60)
    assert len(trees[-2]) > 10
    for tree in trees:
        below = tree.path_probabilities[tree.root :]
        assert below[0] == CERTAIN
        assert (np.diff(below) <= 0).all()
        parents = np.array(tree.parents[tree.root + 1 :], dtype=np.int64)
        assert (tree.path_probabilities[tree.root + 1 :] < tree.path_probabilities[parents]).all()


def test_sorting_a_constrained_tree_moves_all_that_belongs_to_a_node():
    nodes, size = features.make_nodes(20), 20
    nodes.tokens[:] = nodes.sources[:] = nodes.hashes[:, 0] = nodes.matches[:, 0] = np.arange(size)
    nodes.parents[:] = np.arange(size) - 1
    nodes.parents[1:] //= 2
    nodes.path_probabilities[:] = 1000 - np.random.default_rng(0).permutation(size) - 100 * nodes.parents
    guided.sort(nodes, 0, size)
    assert (np.diff(nodes.path_probabilities) <= 0).all() and (np.diff(nodes.tokens) < 0).any()
    for moved in (nodes.sources, nodes.hashes[:, 0], nodes.matches[:, 0]):
        assert (moved == nodes.tokens).all()
    assert (nodes.tokens[nodes.parents[1:]] == (nodes.tokens[1:] - 1) // 2).all()


@pytest.mark.parametrize("noise", [None, NoiseKey(3, 0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", [4, 5, 6])
def test_smaller_tree_is_prefix_of_larger_tree(seed, noise):
    """In the same state, the nodes of a smaller budget are the first nodes of a larger one."""
    drafter, sizes = best_first(60, noise=noise), (8, 24, 60)
    tokens = decode([1, 2, 3], drafter, seed, 60)[0].tokens
    trees = [drafter.propose(tokens, len(tokens) - 2, max_depth=20, tree_size_hint=size) for size in sizes]
    assert tuple(map(len, trees)) == sizes
    for small, large in zip(trees, trees[1:], strict=False):
        assert small.tokens == large.tokens[: len(small)]
        assert small.parents == large.parents[: len(small)]
        assert (small.path_probabilities == large.path_probabilities[: len(small)]).all()


def test_more_nodes_take_fewer_steps():
    steps = [decode([1, 2, 3], best_first(size), 7, 150)[0].num_steps for size in (1, 4, 16, 64)]
    assert steps[0] == 150
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 60


def test_repeated_text_is_copied_into_tree():
    # The toy model depends on the last two tokens and the position; without the position its text repeats forever.
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    drafter = best_first(12)
    tokens = text * 3 + text[:3]
    drafter.begin(tokens)
    tree = drafter.propose(tokens, len(tokens) - 1, max_depth=30)
    chain = [tree.tokens[node] for node in range(1, len(tree)) if tree.parents[node] == node - 1]
    assert chain[:5] == [1, 5, 9, 2, 6]
    assert len(tree) == 12


@pytest.mark.parametrize("cut", [0, 9], ids=["one text", "two texts"])
def test_both_continuations_of_a_fork_are_drafted(cut):
    copied, drafter = [1, 2, 3, 4, 5, 6], best_first(40)
    earlier = [0, *copied, 7, 8, 10, *copied, 9, 10, 8]
    drafter.begin(earlier[:cut])
    tokens = [*earlier[cut:], *copied]
    drafter.begin(tokens)
    tree = drafter.propose(tokens, len(tokens) - 1, max_depth=30)
    assert {token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0} >= {7, 9}


@pytest.mark.parametrize("longer_is_latest", [True, False])
def test_much_longer_match_of_a_fork_is_as_likely_as_an_only_match(longer_is_latest):
    known, copied = list(range(10, 25)), [1, 2, 3, 4, 5, 6]
    longer, shorter = [*known, *copied, 7], [0, *copied, 9]
    probabilities = []
    for earlier in (longer, [*shorter, *longer] if longer_is_latest else [*longer, *shorter]):
        drafter, tokens = best_first(2), [*earlier, *known, *copied]
        drafter.begin(tokens)
        tree = drafter.propose(tokens, len(tokens) - 1, max_depth=30)
        assert tree.tokens[1] == 7
        probabilities.append(tree.path_probabilities[1])
    assert probabilities[1] > 0.99 * probabilities[0]


def test_overwritten_branch_of_a_fork_is_not_drafted():
    draft_tables = DraftTables(SMALL)
    copied, size = [1, 2, 3, 4, 5, 6], len(draft_tables.text.buffer)
    draft_tables.begin_text([*copied, 7, 8, 0, *copied, 9, 10])
    for _ in range(3):  # 7 is too old then, and 9 is not
        draft_tables.begin_text([0] * ((size - tables.MAX_MATCH - 13) // 3))
    assert len(draft_tables.text.buffer) == size
    drafter = best_first(10, draft_tables)
    drafter.begin(copied)
    tree = drafter.propose(copied, len(copied) - 1, max_depth=30)
    assert 9 in tree.tokens and 7 not in tree.tokens


def test_vocabulary_prior_gives_candidates_without_history():
    ranked = [[(token + rank + 1) % VOCABULARY for rank in range(8)] for token in range(VOCABULARY)]
    vocabulary = prior_of(entries_of(ranked, nats=4))
    drafter = best_first(6, vocabulary=vocabulary)
    drafter.begin([4])
    tree = drafter.propose([4], 0, max_depth=30)
    assert (tree.tokens[1], tree.parents[1]) == (5, 0)
    assert len(tree) == 6
    none = best_first(6)
    none.begin([4])
    assert len(none.propose([4], 0, max_depth=30)) == 1


def test_vocabulary_prior_after_two_tokens_is_used_in_trees_and_at_the_root():
    """The prior has, after each token, the next number, but 9 after 4 and 5."""
    ranked = [[(token + rank + 1) % VOCABULARY for rank in range(8)] for token in range(VOCABULARY)]
    (nine,) = entries_of([[9, 8, 7, 6, 5, 4, 3, 2]], nats=8)
    drafter = best_first(3, vocabulary=prior_of(entries_of(ranked, nats=4), {(4, 0): nine}))
    drafter.begin([3])
    tree = drafter.propose([3, 4], 1, max_depth=30)
    assert tree.tokens == [4, 5, 9] and tree.parents == [-1, 0, 1]
    for texts, expected in (([[4, 5]], 9), ([[3, 5]], 6), ([[4], [5]], 6)):  # the last: two texts
        for text in texts:
            drafter.begin(text)
        assert drafter.propose(texts[-1], len(texts[-1]) - 1, max_depth=1).tokens[1] == expected


def test_pairs_of_other_tokens_are_unknown():
    """The first of a token's equal successors counts, and tokens after the paired ones have no pairs."""
    (next_, nine, eight) = entries_of([[5] * K, [9] * K, [8] * K], nats=8)
    after_token = np.stack([next_] * VOCABULARY)
    for num_paired, expected in ((5, 9), (4, 5)):
        vocabulary = prior_of(after_token, {(4, 0): nine, (4, 1): eight} if num_paired == 5 else None, num_paired)
        drafter = best_first(2, vocabulary=vocabulary)
        drafter.begin([4, 5])
        assert drafter.propose([4, 5], 1, max_depth=30).tokens == [5, expected]


def test_rate_of_often_wrong_source_falls():
    """Rates are learned: a source whose candidate is never right loses its place to one that is."""
    draft_tables = DraftTables(SMALL)
    feature = features.FIRST_TOP_K  # order 1, rank 0, the narrowest margin
    before = draft_tables.rates.rate.copy()
    draft_tables.rates.tried[feature] += 250
    draft_tables.rates.tried[0] += 50
    draft_tables.rates.accepted[0] += 50
    draft_tables.estimate()
    assert draft_tables.rates.rate[feature] < before[feature] / 5
    assert draft_tables.rates.rate[0] > before[0]
    assert (draft_tables.rates.rate >= 0).all() and (draft_tables.rates.rate <= estimates.ONE).all()


@pytest.mark.parametrize("seed", [0, 1, 2**33 + 5, 2**64 - 1])
def test_drafter_noise_matches_sampling_noise(seed):
    noise = GumbelNoise(seed, 3, 64, torch.device("cpu"))
    key = tables.make_noise(NoiseKey(seed, 3))
    rows = noise.at([0, 7, 100_000])
    for row, position in zip(rows, (0, 7, 100_000), strict=True):
        ours = [tables.gumbel(key, position, token) for token in range(64)]
        assert ours == [tables.gumbel(key, position, token) for token in range(64)]  # from the cache
        assert np.abs(np.array(ours) / UNITS_PER_NAT - row.numpy()).max() <= 0.5 / UNITS_PER_NAT + 1e-5


def test_candidates_with_noise_include_token_that_would_be_sampled():
    key = NoiseKey(9, 0)
    drafter = best_first(9, noise=key)
    drafter.begin([1, 2])
    tokens = [1, 2, 3]
    drafter.advance_prefill(tokens)
    tree = drafter.propose(tokens, 2, max_depth=30)
    ranking = [5, 6, 7, 8, 9, 10, 0, 1]
    drafter.advance([*tokens, 3], tree, VerificationResult([3] * len(tree), entries_of([ranking] * len(tree))), [3], [])
    # The root is 3 again, so the candidates found after 3 are ranked again, by the noise of the next position.
    noise = tables.make_noise(key)
    values = [tables.gumbel(noise, 4, token) - UNITS_PER_NAT * rank for rank, token in enumerate(ranking)]
    tree = drafter.propose([*tokens, 3], 3, max_depth=1)
    first = [tree.tokens[node] for node in range(1, len(tree))]
    assert ranking[int(np.argmax(values))] in first[:2]  # the token sampled before may be the other one


@pytest.mark.parametrize("is_pair", [False, True], ids=["after one token", "after two"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_prior_is_ranked_at_temperature_of_request(temperature, is_pair):
    """The prior holds the model's own log-probabilities, which the request divides by the temperature."""
    ranking, num_apart = [5, 6, 7, 8, 9, 10, 0, 1], 0
    margins = UNITS_PER_NAT * np.arange(K)
    (entry,) = entries_of([ranking])
    empty = np.full((VOCABULARY, ENTRY), -1, np.int32)
    if is_pair:
        empty[2, 0] = 3
        vocabulary = prior_of(empty, {(2, 0): entry})
    else:
        empty[3] = entry
        vocabulary = prior_of(empty)
    for seed in range(40):
        key = NoiseKey(seed, 0, temperature)
        noise = tables.make_noise(key)
        noises = np.array([tables.gumbel(noise, 3, token) for token in ranking])
        scores = noises - margins / temperature
        second, first = np.sort(scores)[-2:]
        if first - second < UNITS_PER_NAT:  # nearly a tie
            continue
        drafter = best_first(2, vocabulary=vocabulary, noise=key)
        tokens = [1, 2, 3]
        drafter.begin(tokens[:-1])
        drafter.advance_prefill(tokens)
        assert drafter.propose(tokens, 2, max_depth=1).tokens[1] == ranking[scores.argmax()]
        num_apart += scores.argmax() != (noises - margins).argmax()
    assert (num_apart > 0) == (temperature != 1.0)


def test_deeper_candidate_is_ranked_by_noise_of_its_position():
    """The root has one candidate, so the second guess follows the first, two positions after the root."""
    only, ranking, num_apart = 4, [5, 6, 7, 8, 9, 10, 0, 1], 0
    after_token = entries_of([ranking] * VOCABULARY)
    after_token[3, :K] = [only] + [-1] * (K - 1)
    vocabulary = prior_of(after_token)
    for seed in range(40):
        key = NoiseKey(seed, 0)
        noise = tables.make_noise(key)
        of_root, scores = (
            np.array([tables.gumbel(noise, position, token) for token in ranking]) - UNITS_PER_NAT * np.arange(K)
            for position in (3, 4)
        )
        second, first = np.sort(scores)[-2:]
        if first - second < UNITS_PER_NAT:  # nearly a tie
            continue
        drafter = best_first(3, vocabulary=vocabulary, noise=key)
        tokens = [1, 2, 3]
        drafter.begin(tokens[:-1])
        drafter.advance_prefill(tokens)
        tree = drafter.propose(tokens, 2, max_depth=2)
        assert (tree.parents, tree.tokens) == ([-1, 0, 1], [3, only, ranking[scores.argmax()]])
        num_apart += scores.argmax() != of_root.argmax()
    assert num_apart > 5


def merged_one_by_one(rates, candidates, num_rows: int) -> list[tuple[int, int, int, int]]:
    """Return (token, best feature, its score, sum of weights) as `merge` does, with one list per token."""
    naming: dict[int, list[int]] = {}
    for token, feature in zip(candidates.tokens[:num_rows].flat, candidates.features[:num_rows].flat, strict=True):
        if token >= 0:
            naming.setdefault(int(token), []).append(int(feature))
    best = {token: max(named, key=rates.score.__getitem__) for token, named in naming.items()}
    return [
        (token, best[token], int(rates.score[best[token]]), int(rates.weight[named].sum()))
        for token, named in naming.items()
    ]


def random_candidates(seed: int, num_rows: int, num_tokens: int) -> tuple[estimates.Rates, features.Candidates]:
    """Return rates and collected candidates, random, with `num_tokens` different tokens."""
    random = np.random.default_rng(seed)
    rates, candidates = DraftTables(SMALL).rates, features.make_candidates()
    rates.rate[:] = random.integers(0, 9, features.NUM_FEATURES) * (estimates.ONE // 8)
    estimates.score_features(rates, estimates.ONE)
    candidates.features[:] = random.integers(0, features.NUM_FEATURES, candidates.features.shape)
    tokens = random.permutation(1 << 17)[:num_tokens]
    for row in candidates.tokens:
        num = random.integers(0, K + 1)
        row[:num], row[num:] = random.permutation(tokens)[:num], -1
    return rates, candidates


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(0, features.NUM_ROWS), st.sampled_from([K, 14, 100]))
def test_candidates_of_same_token_are_merged(seed, num_rows, num_tokens):
    rates, candidates = random_candidates(seed, num_rows, num_tokens)
    expected = merged_one_by_one(rates, candidates, num_rows)
    num = estimates.merge(rates, candidates, num_rows)
    arrays = (candidates.merged, candidates.best, candidates.scores, candidates.weights)
    assert [tuple(map(int, each)) for each in zip(*(array[:num] for array in arrays), strict=True)] == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, features.NUM_ROWS), st.booleans())
def test_probabilities_of_one_context_are_those_of_a_conditional_logit(seed, num_rows, is_root):
    rates, candidates = random_candidates(seed, num_rows, 14)
    num = estimates.merge(rates, candidates, num_rows)
    estimates.compete(rates, candidates, num, is_root, 0)
    probabilities = candidates.probabilities[:num].copy()
    log_odds = rates.bias[int(is_root)] + candidates.scores[:num] + candidates.weights[:num]
    odds = np.exp2(np.minimum(log_odds, estimates.MAX_LOG_ODDS) / estimates.OCTAVE)
    assert probabilities / estimates.ONE == pytest.approx(odds / (1 + odds.sum()), abs=2e-4)
    assert probabilities.sum() <= estimates.ONE
    floor = int(np.median(probabilities)) if num else 0
    estimates.compete(rates, candidates, num, is_root, floor)
    assert (candidates.probabilities[:num] == np.where(probabilities >= floor, probabilities, 0)).all()


@compiled
def compete_compiled(rates, candidates, num, is_root, floor):
    """Compiled code differs from Python's where integers overflow, or are shifted by too much."""
    estimates.compete(rates, candidates, num, is_root, floor)


@pytest.mark.parametrize(("octaves", "total"), [(-4000, 0), (-70, 0), (30, estimates.ONE), (4000, estimates.ONE)])
def test_extreme_log_odds_are_probabilities(octaves, total):
    rates, candidates = DraftTables(SMALL).rates, features.make_candidates()
    rates.bias[:], candidates.scores[:], candidates.weights[:] = 0, octaves * estimates.OCTAVE, 0
    compete_compiled(rates, candidates, features.MAX_CANDIDATES, False, 0)
    assert (candidates.probabilities >= 0).all()
    assert candidates.probabilities.sum() == pytest.approx(total, abs=features.MAX_CANDIDATES)


def test_sources_that_agree_add_up():
    def probability(*named: int) -> int:
        candidates.tokens[:] = -1
        candidates.tokens[: len(named), 0], candidates.features[: len(named), 0] = 5, named
        estimates.compete(rates, candidates, estimates.merge(rates, candidates, len(named)), False, 0)
        return int(candidates.probabilities[0])

    rates, candidates = DraftTables(SMALL).rates, features.make_candidates()
    estimates.score_features(rates, estimates.ONE)
    text, top_k = 2 * features.NUM_NOISE_BINS, features.FIRST_TOP_K + features.NUM_BINS - 1
    assert probability(text, top_k) > max(probability(text), probability(top_k)) > 0


@pytest.mark.parametrize("starting", [GREEDY, SAMPLED])
def test_each_part_of_a_source_has_constants(starting):
    num_parts = features.PARTS.index("corpus")
    assert len(starting.slopes) == len(starting.weights) == num_parts == features.NUM_PARTS - 1


def test_recent_copies_without_a_miss_make_copies_likelier():
    def probability() -> int:
        estimates.score_features(rates, estimates.missing_copies(rates))
        num = estimates.merge(rates, candidates, 1)
        estimates.compete(rates, candidates, num, False, 0)
        return int(candidates.probabilities[0])

    rates, candidates = DraftTables(SMALL).rates, features.make_candidates()
    candidates.tokens[0, 1:] = -1
    candidates.tokens[0, 0], candidates.features[0, 0] = 5, features.FIRST_COPY
    before = probability()
    for _ in range(300):
        estimates.count_copies(rates, candidates, 1, 5)
    after = probability()
    assert after > before
    for _ in range(300):
        estimates.count_copies(rates, candidates, 1, 6)
    assert probability() == before  # more misses than expected change nothing


def test_tree_content_identifies_tree():
    texts = [([1, 2, 3], seed, max_depth) for seed in range(4) for max_depth in (1, 24)]
    trees = [
        tree
        for prompt, seed, max_depth in texts + texts
        for tree in decode(prompt, best_first(24, max_depth=max_depth), seed, 60)[1]
    ]
    kinds = {(tuple(tree.tokens), tuple(tree.parents)): tree.content() for tree in trees}
    assert len(trees) > len(kinds) > 100
    assert all(tree.content() == kinds[tuple(tree.tokens), tuple(tree.parents)] for tree in trees)
    assert len(set(kinds.values())) == len(kinds)
    # The same tokens, as a chain and as siblings.
    pair = []
    for top_k in ({0: [1], 1: [2]}, {0: [1, 2]}):
        vocabulary = np.full((3, ENTRY), -1, np.int32)
        for token, following in top_k.items():
            vocabulary[token, : len(following)] = following
        drafter = best_first(3, vocabulary=prior_of(vocabulary))
        drafter.begin([0])
        pair.append(drafter.propose([0], 0, max_depth=5))
    assert pair[0].tokens == pair[1].tokens == [0, 1, 2]
    assert pair[0].content() != pair[1].content()
    contents = [trees[-2].content()]
    while len(trees[-2]) > trees[-2].root + 1:
        trees[-2].truncate(len(trees[-2]) - 1)
        contents.append(trees[-2].content())
    assert len(set(contents)) == len(contents) > 10


@pytest.mark.parametrize("name", DRAFTERS)
def test_successors_may_be_an_array(name, monkeypatch):
    expected, _ = decode([1, 2, 3], DRAFTERS[name](), 4, 40)
    made = verify

    def verify_with_array(*args) -> VerificationResult:
        verified = made(*args)
        return VerificationResult(np.array(verified.successors), verified.top_k)

    monkeypatch.setitem(globals(), "verify", verify_with_array)
    state, _ = decode([1, 2, 3], DRAFTERS[name](), 4, 40)
    assert state.tokens == expected.tokens and state.num_steps == expected.num_steps
    assert {type(token) for token in state.tokens} == {int}


def test_accepted_tokens_are_counted_by_source_and_depth():
    drafter = best_first(24)
    state, trees = decode([1, 2, 3], drafter, 7, 150)
    counts = drafter.counts
    assert counts.sources == features.SOURCES
    assert (counts.accepted <= counts.fed).all()
    assert counts.accepted[0].sum() > 0  # from the text
    assert counts.accepted[1:].sum() > 0
    assert len(state.new_tokens) - state.num_steps <= counts.accepted.sum() <= len(state.new_tokens)
