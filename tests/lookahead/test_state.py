"""The decoding state: committed texts, limits, resumed requests, digests.

The model is a toy: a function from all tokens so far to the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lp_runtime.lookahead.drafter import VerificationResult
from lp_runtime.lookahead.drafters.paper.drafter import PaperDrafter
from lp_runtime.lookahead.drafters.prompt_lookup import PromptLookupDrafter
from lp_runtime.lookahead.state import DecodingRules, DecodingState, Proposal


@dataclass(frozen=True)
class Rules:
    """Rules by which a test decodes: the state's rules and the paper's settings."""

    W: int = 4
    N: int = 3
    G: int = 4
    pool_from_prompt: bool = True
    window_seed: int = 0
    max_new_tokens: int = 30
    eos_token_ids: frozenset[int] = frozenset()
    refed_at: int | None = None

    def state(self, prompt: list[int], committed: Sequence[int] = ()) -> DecodingState:
        settings = ((self.W, self.N, self.G), self.pool_from_prompt, self.window_seed)
        rules = DecodingRules(self.max_new_tokens, self.eos_token_ids, repr(settings), refed_at=self.refed_at)
        return DecodingState(prompt, rules, PaperDrafter(*settings), committed=committed)


RULES = Rules()


def toy_next(tokens: list[int], seed: int = 0, vocabulary: int = 5, context: int = 3) -> int:
    """Return the toy model's next token: a hash of the last tokens, and sometimes of the position.

    So texts repeat themselves, but not all the time.
    """
    value = seed
    for token in tokens[-context:]:
        value = (value * 31 + token + 7) % 10_007
    if len(tokens) % 4 == 0:
        value += len(tokens)
    return value % vocabulary


def toy_successors(state: DecodingState, proposal: Proposal, seed: int = 0) -> list[int]:
    """Return the toy model's successor of each node, given the path to the node."""
    tree = proposal.tree
    texts: list[list[int]] = []
    for node, token in enumerate(tree.tokens):
        parent = tree.parents[node]
        texts.append((texts[parent] if parent >= 0 else state.tokens[: state.num_cached]) + [token])
    return [toy_next(text, seed) for text in texts]


def greedy_text(prompt: list[int], rules: Rules, seed: int = 0) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < rules.max_new_tokens:
        tokens.append(toy_next(tokens, seed))
        if tokens[-1] in rules.eos_token_ids:
            break
    return tokens[len(prompt) :]


def advance(state: DecodingState, proposal: Proposal, successors: list[int]) -> tuple[list[int], list[int]]:
    """Advance by a step in which all replicas have cached the pending tokens and no other tokens."""
    actual = state.advance(proposal, VerificationResult(successors))
    state.num_cached += proposal.tree.root + 1
    return actual


def decode(prompt: list[int], rules: Rules, seed: int = 0, state: DecodingState | None = None):
    """Decode a request; return its state, its proposals and the tokens that each step committed."""
    state = state or rules.state(prompt)
    proposals = [state.propose_prefill()]
    outputs = [state.advance_prefill(proposals[0], VerificationResult([toy_next(prompt, seed)]))]
    while state.finish_reason is None:
        proposal = state.propose()
        proposals.append(proposal)
        outputs.append(advance(state, proposal, toy_successors(state, proposal, seed))[0])
    return state, proposals, outputs


rules_strategy = st.builds(
    Rules,
    W=st.integers(0, 7),
    N=st.integers(2, 6),
    G=st.integers(0, 6),
    pool_from_prompt=st.booleans(),
    window_seed=st.integers(0, 3),
    max_new_tokens=st.integers(1, 40),
    eos_token_ids=st.sampled_from([frozenset(), frozenset({3}), frozenset({1, 4})]),
)
prompt_strategy = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(prompt_strategy, rules_strategy, st.integers(0, 50))
def test_output_is_greedy_text_for_any_W_N_G(prompt, rules, seed):
    state, proposals, outputs = decode(prompt, rules, seed)
    expected = greedy_text(prompt, rules, seed)
    assert state.new_tokens == sum(outputs, []) == expected
    assert state.finish_reason == ("eos" if expected[-1] in rules.eos_token_ids else "length")
    assert state.num_steps == len(outputs) == len(proposals)
    assert all(outputs)
    assert len(outputs[0]) == 1
    assert state.num_cached + len(outputs[-1]) == len(state.tokens)


@settings(max_examples=100, deadline=None)
@given(prompt_strategy, rules_strategy, st.integers(0, 50))
def test_tree_depth_is_limited_to_remaining_tokens(prompt, rules, seed):
    _, proposals, outputs = decode(prompt, rules, seed)
    num_committed = 0
    for proposal, committed in zip(proposals, outputs, strict=True):
        assert max(proposal.tree.depths) + 1 <= rules.max_new_tokens - num_committed
        num_committed += len(committed)


@pytest.mark.parametrize("refed_at", range(4, 24))
def test_tree_does_not_cross_length_at_which_text_is_fed_again(refed_at):
    prompt = [1, 2, 3, 1, 2, 3]
    _, proposals, outputs = decode(prompt, replace(RULES, refed_at=refed_at))
    length, depths = len(prompt), {True: 0, False: 0}  # maximum depth for shorter and for longer texts
    for proposal, committed in zip(proposals, outputs, strict=True):
        depth, is_shorter = max(proposal.tree.depths), length <= refed_at
        assert not is_shorter or length + depth <= refed_at
        depths[is_shorter] = max(depths[is_shorter], depth)
        length += len(committed)
    assert depths[False] > 1


@settings(max_examples=50, deadline=None)
@given(prompt_strategy, rules_strategy, st.integers(0, 50))
def test_equal_successors_give_equal_states(prompt, rules, seed):
    _, first, _ = decode(prompt, rules, seed)
    _, second, _ = decode(prompt, rules, seed)
    assert [p.digest for p in first] == [p.digest for p in second]
    assert [p.tree.tokens for p in first] == [p.tree.tokens for p in second]
    assert [p.tree.parents for p in first] == [p.tree.parents for p in second]


def test_guesses_save_steps():
    state, _, outputs = decode([1, 2, 3], replace(RULES, W=5, N=4, G=5, max_new_tokens=200))
    assert state.num_steps < 150
    assert max(map(len, outputs)) > 2


def test_fully_accepted_guess_commits_N_tokens():
    state = replace(RULES, W=0, N=4).state([1])
    state.advance_prefill(state.propose_prefill(), VerificationResult([1]))
    state.drafter.pool.insert((1, 2, 3, 4))
    assert advance(state, state.propose(), [2, 3, 4, 5]) == ([2, 3, 4, 5], [0, 1, 2, 3])
    assert (state.num_cached, state.pending) == (2, [2, 3, 4, 5])


def test_step_without_window_and_guesses_feeds_only_root():
    state, proposals, outputs = decode([1, 2, 3], replace(RULES, W=0, G=0))
    assert [len(p.tree) for p in proposals] == [1] * 30
    assert [len(committed) for committed in outputs] == [1] * 30


def test_pending_tokens_are_tokens_committed_by_last_step():
    state = RULES.state([1, 2, 3])
    assert state.pending == [1, 2, 3]
    proposal = state.propose_prefill()
    committed = state.advance_prefill(proposal, VerificationResult([toy_next([1, 2, 3])]))
    while state.finish_reason is None:
        assert state.pending == committed
        proposal = state.propose()
        assert proposal.tree.tokens[: len(committed)] == committed
        assert proposal.tree.root == len(committed) - 1
        committed, _ = advance(state, proposal, toy_successors(state, proposal))


def test_accepted_tokens_are_cut_after_first_eos():
    state = replace(RULES, W=0, N=4, eos_token_ids=frozenset({9})).state([1])
    state.advance_prefill(state.propose_prefill(), VerificationResult([1]))
    state.drafter.pool.insert((1, 2, 9, 4))
    proposal = state.propose()
    assert proposal.tree.tokens == [1, 2, 9, 4]
    assert advance(state, proposal, [2, 9, 4, 5])[0] == [2, 9]
    assert state.new_tokens == [1, 2, 9]
    assert state.finish_reason == "eos"


def test_tokens_cut_after_eos_are_neither_counted_nor_pooled():
    state = replace(RULES, W=0, N=4, eos_token_ids=frozenset({9})).state([1])
    state.advance_prefill(state.propose_prefill(), VerificationResult([1]))
    state.drafter.pool.insert((1, 2, 9, 4))
    advance(state, state.propose(), [2, 9, 4, 5])
    assert state.drafter.pool.statistics().accepted_length == 2  # the nodes 2 and 9, not 4
    assert state.drafter.pool.guesses(9) == []


def test_token_of_prefill_may_end_request():
    state = replace(RULES, eos_token_ids=frozenset({9})).state([1])
    assert state.advance_prefill(state.propose_prefill(), VerificationResult([9])) == [9]
    assert state.finish_reason == "eos"
    state = replace(RULES, max_new_tokens=1).state([1])
    state.advance_prefill(state.propose_prefill(), VerificationResult([9]))
    assert state.finish_reason == "length"


def test_eos_as_last_allowed_token_is_reported_as_eos():
    state = replace(RULES, max_new_tokens=1, eos_token_ids=frozenset({9})).state([1])
    state.advance_prefill(state.propose_prefill(), VerificationResult([9]))
    assert state.finish_reason == "eos"


@pytest.mark.parametrize(("eos_token_ids", "reason"), [({9}, "eos"), ((), "stop")])
def test_stop_condition_that_keeps_an_eos_token_is_reported_as_eos(eos_token_ids, reason):
    rules = DecodingRules(30, frozenset(eos_token_ids))
    state = DecodingState([1], rules, PromptLookupDrafter(3), stop=len)  # stops at once, and keeps all tokens
    assert state.advance_prefill(state.propose_prefill(), VerificationResult([9])) == [9]
    assert state.finish_reason == reason


@pytest.mark.parametrize("num_committed", [1, 2, 13, 29])
def test_resumed_state_continues_after_its_committed_tokens(num_committed):
    prompt = [1, 2, 3]
    text = greedy_text(prompt, RULES)
    state = RULES.state(prompt, text[:num_committed])
    assert state.pending == text[:num_committed][-1:], "all tokens but the last one are cached"
    assert (state.new_tokens, state.num_steps) == (text[:num_committed], 1)
    while state.finish_reason is None:
        proposal = state.propose()
        advance(state, proposal, toy_successors(state, proposal))
    assert state.new_tokens == text


class RecordingDrafter(PromptLookupDrafter):
    """Records the texts that it receives before the first step."""

    def __init__(self) -> None:
        super().__init__(3)
        self.texts: list[list[int]] = []

    def begin(self, tokens):
        self.texts.append(list(tokens))
        super().begin(tokens)

    def advance_prefill(self, tokens):
        self.texts.append(list(tokens))
        super().advance_prefill(tokens)


def test_later_drafter_learns_the_last_token_once():
    """`begin` takes a text without its last token, which `advance_prefill` adds."""
    state, drafter = RULES.state([1, 2, 3], [4, 5]), RecordingDrafter()
    state.use(drafter)
    assert drafter.texts == [[1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_prompt_ngrams_are_guessed_from_first_step():
    state = replace(RULES, W=0).state([1, 2, 3, 4])
    state.advance_prefill(state.propose_prefill(), VerificationResult([2]))
    assert state.drafter.pool.guesses(3) == [(4, 2)]  # it crosses from the prompt into the output
    assert state.propose().tree.tokens == [2, 3, 4]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(100, 104), min_size=1, max_size=9), st.integers(2, 5), st.integers(0, 20))
def test_pool_without_prompt_holds_only_ngrams_of_output(prompt, size, seed):
    # The toy model never produces the prompt's tokens.
    rules = replace(RULES, W=0, N=size, G=9, pool_from_prompt=False)
    state, _, _ = decode(prompt, rules, seed)
    out = state.new_tokens
    assert all(state.drafter.pool.guesses(token) == [] for token in range(100, 105))
    held = {(token, *rest) for token in range(5) for rest in state.drafter.pool.guesses(token)}
    seen = {tuple(out[start : start + size]) for start in range(len(out) - size + 1)}
    assert held <= seen
    assert bool(held) == bool(seen)


def test_pool_holds_committed_ngrams():
    state, _, _ = decode([1, 2, 3], replace(RULES, W=0, G=50, max_new_tokens=20))
    for start in range(len(state.tokens) - 2):
        first, *rest = state.tokens[start : start + 3]
        assert tuple(rest) in state.drafter.pool.guesses(first)


def test_window_starts_with_prompt_tokens_chosen_by_seed():
    def first_level(seed: int) -> list[int]:
        rules = replace(RULES, W=12, G=0, window_seed=seed)
        return rules.state([50, 60, 70]).drafter.window.levels[0]

    assert set(first_level(0)) <= {50, 60, 70}
    assert first_level(0) == first_level(0)
    assert first_level(0) != first_level(1)


@pytest.mark.parametrize(
    "other",
    [
        replace(RULES, W=5),
        replace(RULES, N=4),
        replace(RULES, G=5),
        replace(RULES, pool_from_prompt=False),
        replace(RULES, window_seed=1),
        replace(RULES, max_new_tokens=31),
        replace(RULES, eos_token_ids=frozenset({3})),
    ],
    ids=lambda rules: repr(rules)[13:],
)
def test_prefill_digest_depends_on_rules_and_prompt(other):
    digest = RULES.state([1, 2, 3]).propose_prefill().digest
    assert digest == RULES.state([1, 2, 3]).propose_prefill().digest
    assert digest != other.state([1, 2, 3]).propose_prefill().digest
    assert digest != RULES.state([1, 2, 4]).propose_prefill().digest


def test_prefill_digest_does_not_depend_on_order_of_eos_tokens():
    forward, backward = (replace(RULES, eos_token_ids=frozenset(ids)) for ids in ([8, 16, 0], [0, 16, 8]))
    assert forward.state([1]).propose_prefill().digest == backward.state([1]).propose_prefill().digest


def test_digests_differ_after_states_diverge():
    pair = [RULES.state([1, 2, 3]) for _ in range(2)]
    for state, token in zip(pair, (1, 2), strict=True):
        state.advance_prefill(state.propose_prefill(), VerificationResult([token]))
    assert pair[0].propose().digest != pair[1].propose().digest
    # Digests also differ if the next trees are equal but the histories are not.
    pair = [replace(RULES, W=0, G=0).state([1, 2, 3]) for _ in range(2)]
    for state, tokens in zip(pair, ([1, 4, 4], [1, 3, 4]), strict=True):
        state.advance_prefill(state.propose_prefill(), VerificationResult(tokens[:1]))
        for token in tokens[1:]:
            advance(state, state.propose(), [token])
    first, second = (state.propose() for state in pair)
    assert first.tree.tokens == second.tree.tokens
    assert first.digest != second.digest


def test_digests_are_distinct_and_fit_exchange_header():
    _, proposals, _ = decode([1, 2, 3], RULES)
    assert all(0 <= proposal.digest < 2**56 for proposal in proposals)
    assert len({proposal.digest for proposal in proposals}) == len(proposals)
