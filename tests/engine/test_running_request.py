"""The decoding loop gives the tokens of transformers' greedy `generate` on any number of replicas."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import engine_of
from support.ranks import CPU, run_ranks
from support.small_models import random_model
from support.thinned import thinned

from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.decoder import decoder_factory, sampler_factory
from lp_runtime.decoder.decoder import Decoder, DrafterSetup, Samples
from lp_runtime.decoder.draft_pool import DraftPool
from lp_runtime.distributed.exchange import Exchange, Outcome
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.running_request import Callbacks, Peers, RunningRequest
from lp_runtime.errors import StateMismatchError
from lp_runtime.lookahead.drafters.prompt_lookup import PromptLookupDrafter
from lp_runtime.lookahead.state import DecodingRules, DecodingState
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import PromptPrefix
from lp_runtime.request.output import Report, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.learned_costs import LearnedCosts

ARCHITECTURES = {
    "llama": ("Llama", {"initializer_range": 0.3}),
    "mistral": ("Mistral", {"initializer_range": 0.3, "sliding_window": 8}),
    "gpt2": ("GPT2", {"initializer_range": 0.3}),
    "gemma3": (
        "Gemma3",
        {
            "initializer_range": 0.3,
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@pytest.fixture(scope="module")
def models() -> dict:
    """A few random models whose logits are spread widely enough that texts differ."""
    return {key: random_model(name, seed=5, **settings) for key, (name, settings) in ARCHITECTURES.items()}


def greedy_text(model, request: Request) -> list[int]:
    """Return the new tokens of transformers' greedy `generate`."""
    eos = sorted(request.eos_token_ids) or None
    ids = torch.tensor([request.prompt_ids])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=eos,
        pad_token_id=0 if eos else None,
    )
    return output[0, len(request.prompt_ids) :].tolist()


def decode(loop: Engine, request: Request, **options) -> tuple[list[int], list[list[int]], Report]:
    *runs, report = loop.run(request, **options)
    assert isinstance(report, Report)
    runs = [run.token_ids for run in runs]
    return sum(runs, []), runs, report


papers = st.builds(
    LookaheadConfig,
    W=st.integers(0, 8),
    N=st.integers(2, 6),
    G=st.integers(0, 6),
    drafter=st.just("paper"),
    acceptance=st.sampled_from(["tree", "guesses"]),
    budget=st.sampled_from([None, None, 1, 2, 5, 20]),
    pool_from_prompt=st.booleans(),
    window_seed=st.integers(0, 3),
)
others = st.builds(
    LookaheadConfig,
    W=st.sampled_from([None, 0, 4, 15]),
    drafter=st.sampled_from(["full", "full", "prompt_lookup", "recycling"]),
    prior=st.sampled_from(["vocabulary", "none"]),
    draft_tables=st.sampled_from(["request", "runtime"]),
    draft_tables_bytes=st.sampled_from([1 << 16, 1 << 20]),
    budget=st.sampled_from([None, 1, 2, 5, 20]),
)
lookaheads = papers | others
requests = st.builds(
    Request,
    prompt_ids=st.lists(st.integers(0, 63), min_size=1, max_size=40).map(tuple),
    lookahead=lookaheads,
    max_new_tokens=st.integers(1, 24),
    eos_token_ids=st.sampled_from([frozenset(), frozenset(range(0, 64, 9))]),
)


@pytest.mark.parametrize("architecture", thinned(3, ARCHITECTURES))
@settings(max_examples=7, deadline=None, derandomize=True)
@given(requests, st.sampled_from([1, 5, 2048]))
def test_output_matches_generate_with_any_settings(models, architecture, request, chunk):
    model = models[architecture]
    tokens, runs, report = decode(engine_of(ModelRunner(model, chunk)), request)
    assert tokens == greedy_text(model, request)
    assert report.num_steps == len(runs) <= len(tokens)
    assert all(runs)
    assert report.finish_reason == ("eos" if tokens[-1] in request.eos_token_ids else "length")
    assert report.exchange_bytes == 0
    assert report.step_tokens <= (request.lookahead.budget or 10_000)


def test_step_tokens_follow_lookahead_settings(models):
    loop = engine_of(ModelRunner(models["llama"], 2048))
    _, runs, report = decode(loop, Request((1, 2, 3), PLAIN, max_new_tokens=12))
    assert runs == [[token] for run in runs for token in run]
    assert (report.num_steps, report.step_tokens) == (12, 1.0)
    for drafter in ("paper", "full"):
        settings = LookaheadConfig(W=4, N=3, G=4, drafter=drafter)
        _, _, report = decode(loop, Request((1, 2, 3), settings, max_new_tokens=24))
        assert 1 < report.step_tokens <= 16
    _, _, report = decode(loop, Request((1, 2, 3), LookaheadConfig(tokens=12), max_new_tokens=24))
    assert 8 < report.step_tokens <= 12


def test_guesses_in_repetitive_text_save_steps(models):
    loop = engine_of(ModelRunner(models["llama"], 2048))
    _, _, report = decode(loop, Request((1, 2, 3), LookaheadConfig(W=8, N=5, G=8, drafter="paper"), max_new_tokens=80))
    assert report.num_steps < 64
    assert report.pool.hit_rate > 0.3
    assert report.pool.accepted_length > 0


def test_engine_serves_successive_requests_of_different_lengths(models):
    loop = engine_of(ModelRunner(models["llama"], 2048))
    for length in (30, 2, 50, 3):
        request = Request(tuple(range(length)), LookaheadConfig(W=5, N=4, G=5), max_new_tokens=length)
        assert decode(loop, request)[0] == greedy_text(models["llama"], request)


@pytest.mark.slow
def test_lack_of_processors_is_remembered_per_kind_of_request(models, monkeypatch):
    """Later requests of a kind without processors skip the call, which takes milliseconds."""
    loop = engine_of(ModelRunner(models["llama"], 512))
    asked, build = [], sampler_factory.build_processors
    monkeypatch.setattr(sampler_factory, "build_processors", lambda *args: (asked.append(args[2]), build(*args))[1])
    plain = Request((5, 6, 7), PLAIN, 40, frozenset({1}))
    penalized = replace(plain, sampling=SamplingConfig(repetition_penalty=5.0))

    def texts(*requests: Request) -> tuple[list, int]:
        asked.clear()
        return [decode(loop, each)[0] for each in requests], len(asked)

    first, num = texts(plain, penalized)
    assert num == 2 and first[0] != first[1]
    again, num = texts(plain, penalized)
    assert again == first and num == 1
    others = [
        replace(plain, max_new_tokens=41),
        replace(plain, eos_token_ids=frozenset()),
        replace(plain, sampling=SamplingConfig(temperature=1.0, seed=1)),
        replace(plain, processors=(lambda ids, scores: scores,)),
    ]
    assert texts(*others)[1] == 4
    seeds = [replace(others[2], sampling=SamplingConfig(temperature=1.0, seed=seed)) for seed in (2, 3)]
    assert texts(replace(plain, prompt_ids=(7, 8)), *others[:3], *seeds)[1] == 0
    assert texts(others[3])[1] == 1


def test_abandoned_request_does_not_affect_next_request(models):
    loop = engine_of(ModelRunner(models["llama"], 2048))
    request = Request((5, 6, 7), LookaheadConfig(W=5, N=4, G=5), max_new_tokens=30)
    events = loop.run(Request((9, 8, 7, 6, 5), LookaheadConfig(), max_new_tokens=60))
    for _ in range(4):
        next(events)
    events.close()
    assert decode(loop, request)[0] == greedy_text(models["llama"], request)


def test_cancelled_request_ends_after_current_step(models):
    loop = engine_of(ModelRunner(models["llama"], 2048))
    request = Request((1, 2, 3), LookaheadConfig(W=5, N=4, G=5), max_new_tokens=100)
    asked = iter([False, False, True])
    tokens, runs, report = decode(loop, request, should_cancel=lambda: next(asked))
    assert report.finish_reason == "cancelled"
    assert len(runs) == report.num_steps == 3
    assert tokens == greedy_text(models["llama"], request)[: len(tokens)]


def test_replicas_learn_same_pass_times_of_all_replicas(models):
    """Two replicas receive unequal clocks; their budgets stay equal, and know which replica is slower."""
    model, request = ModelRunner(models["llama"], 2048), Request((1, 2, 3), PLAIN, 60)
    logits = torch.zeros(1, 64)
    samples = Samples(logits.long(), StepLogits(logits), lambda: logits)  # not read: the gathered values are used
    fast, slow = (microseconds << 31 for microseconds in (100, 700))
    results = []
    for rank in range(2):
        learned = LearnedCosts(2)
        drafter = PromptLookupDrafter(4)
        budget = StepBudget(np.tile(100_000 * np.arange(1, 20), (2, 1)), False, 19, learned)
        state = DecodingState(request.prompt_ids, DecodingRules(request.max_new_tokens), drafter)
        decoder = Decoder(state, DrafterSetup(drafter, budget, None), Sampler(TreeProcessors([], CPU), None))
        group = Group(rank, 2)
        prefix = PromptPrefix(None, request, group, DraftPool(None))
        peers = Peers(group, Exchange)
        running = RunningRequest(model, peers, request, decoder, CacheSlot(), prefix, Callbacks())
        step, sizes = decoder.propose_prefill(), []
        for _ in range(8):
            sizes.append(step.shares.sizes)
            values = np.full((len(step.tree), 1), 5)  # each token's successor is 5
            decoder.advance(step, running.unpack(step, samples, Outcome(values, 0, [fast, slow])))
            step = decoder.propose()
        results.append((sizes, learned.passes.slopes.tolist()))
    assert results[0] == results[1]
    _, (slope_of_fast, slope_of_slow) = results[0]
    assert 2 * slope_of_fast < slope_of_slow


RANKS_REQUESTS = [
    Request(prompt, lookahead, max_new_tokens, eos)
    for prompt, lookahead, max_new_tokens, eos in [
        ((1, 2, 3), LookaheadConfig(W=15, N=5, G=15), 20, frozenset()),
        (tuple(range(40)), LookaheadConfig(W=5, N=3, G=5), 12, frozenset()),
        ((7,), LookaheadConfig(W=7, N=4, G=7, drafter="paper"), 16, frozenset()),
        ((4, 4, 4, 4), LookaheadConfig(W=0, N=6, G=3, pool_from_prompt=False), 12, frozenset()),
        ((9, 9), LookaheadConfig(W=7, N=2, G=7), 1, frozenset()),
        ((9, 1), LookaheadConfig(W=7, N=5, G=7, drafter="paper", window_seed=3), 24, frozenset(range(0, 64, 9))),
        ((3, 1), PLAIN, 6, frozenset()),
    ]
]


@dataclass(frozen=True)
class RankResult:
    outputs: list
    reports: list
    cancelled: list
    cancel_report: Report
    unread: tuple[list[int], str, int]
    read: list[int]
    found_by: list[int]
    found_here: list[bool]
    error: Exception | None


LONG = Request(tuple(range(1, 22)), LookaheadConfig(3, 4, 3, prior="none"), 12)


def decode_on_a_rank(group: Group) -> RankResult:
    rank, num_replicas = group.rank, group.size
    name, settings = ARCHITECTURES["llama"]
    model = ModelRunner(random_model(name, seed=5, **settings), 2048)
    loop = engine_of(model, group)
    actual = [decode(loop, request) for request in RANKS_REQUESTS]
    # only the last rank cancels, in the third step
    asked = iter([False, False, rank == num_replicas - 1])
    cancelled, _, cancel_report = decode(loop, RANKS_REQUESTS[0], should_cancel=lambda: next(asked))
    # a long prompt, in chunks of 4: cancelled by the last rank after the second chunk, then fed to its end
    model.prefill_chunk = 4
    num_prefilled_tokens = model.num_prefilled_tokens
    asked = iter([False, rank == num_replicas - 1])
    given_up, _, report = decode(loop, LONG, should_cancel=lambda: next(asked))
    unread = (given_up, report.finish_reason, model.num_prefilled_tokens - num_prefilled_tokens)
    read = decode(loop, LONG)[0]
    # whether this rank owned each committed node
    found_here = []
    traced = loop.run(
        replace(RANKS_REQUESTS[0], trace=True),
        observe=lambda nodes, step, own_rank, _: found_here.extend(
            node in step.shares[own_rank].owned.tolist() for node in nodes
        ),
    )
    found_by = [finder for run in traced if isinstance(run, StepOutput) for finder in run.found_by]
    # rank 1 gets another prompt than its peers, of another length
    error = None
    try:
        decode(loop, Request((1, 2, 3, 4, 5, 6, 7)[: 3 + 3 * (rank == 1)], LookaheadConfig(5, 3, 5), 20))
    except StateMismatchError as caught:
        error = caught
    outputs, reports = [f[0] for f in actual], [f[2] for f in actual]
    return RankResult(outputs, reports, cancelled, cancel_report, unread, read, found_by, found_here, error)


@pytest.fixture(scope="module", params=[3])
def ranks(request) -> list[RankResult]:
    """The result of each rank."""
    return run_ranks(decode_on_a_rank, request.param)


def test_every_rank_matches_generate(models, ranks):
    expected = [greedy_text(models["llama"], request) for request in RANKS_REQUESTS]
    for result in ranks:
        assert result.outputs == expected


def test_paper_drafter_takes_same_steps_on_any_number_of_replicas(models, ranks):
    """The drafter `full` may take fewer steps alone: tokens that are not re-fed leave room for guesses."""
    loop = engine_of(ModelRunner(models["llama"], 2048))
    alone = [decode(loop, request)[2] for request in RANKS_REQUESTS]
    of_paper = [i for i, request in enumerate(RANKS_REQUESTS) if request.lookahead.drafter == "paper"]
    assert len(of_paper) == 3
    for result in ranks:
        for i in of_paper:
            assert result.reports[i].num_steps == alone[i].num_steps
            assert result.reports[i].pool == alone[i].pool
        assert [report.finish_reason for report in result.reports] == [report.finish_reason for report in alone]
        assert result.reports[0].step_tokens < 0.75 * alone[0].step_tokens
        assert all(report.exchange_bytes > 0 for report in result.reports)


def test_cancellation_on_one_rank_ends_all_ranks_in_same_step(ranks):
    for result in ranks:
        assert result.cancel_report.finish_reason == "cancelled"
        assert result.cancel_report.num_steps == 3
        assert result.cancelled == ranks[0].cancelled == result.outputs[0][: len(result.cancelled)]


def test_cancellation_during_prefill_ends_all_ranks_after_same_chunk(models, ranks):
    expected = greedy_text(models["llama"], LONG)
    for result in ranks:
        assert result.unread == ([], "cancelled", 8)
        assert result.read == expected


def test_traced_tokens_name_rank_that_owned_their_node(ranks):
    for rank, result in enumerate(ranks):
        assert len(result.found_by) == len(result.outputs[0])
        assert [finder == rank for finder in result.found_by] == result.found_here


def test_ranks_with_different_requests_raise_state_mismatch(ranks):
    for result in ranks:
        assert isinstance(result.error, StateMismatchError)


LARGE_WINDOW = LookaheadConfig(W=12, N=6, G=12, drafter="paper")


def decode_with_a_large_window(group: Group) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the text, and of each step the tokens that the busiest replica feeds and the nodes of the tree."""
    decoder_factory.STEP_TOKENS = 24  # in this process, which serves one test
    name, settings = ARCHITECTURES["llama"]
    loop = engine_of(ModelRunner(random_model(name, seed=5, **settings), 2048), group)
    fed = []
    request = Request(tuple(range(20)), LARGE_WINDOW, max_new_tokens=24)
    tokens, _, _ = decode(
        loop, request, observe=lambda nodes, step, rank, _: fed.append((max(step.shares.sizes), len(step.tree)))
    )
    return tokens, fed


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_window_that_cannot_be_divided_is_fed_in_part(models, num_replicas):
    """The window's first level is a chain that several replicas need, so R times the limit does not fit."""
    expected = greedy_text(models["llama"], Request(tuple(range(20)), LARGE_WINDOW, max_new_tokens=24))
    for tokens, fed in run_ranks(decode_with_a_large_window, num_replicas):
        assert tokens == expected
        most_fed, most_nodes = map(max, zip(*fed, strict=True))
        assert most_fed == 24 < most_nodes
