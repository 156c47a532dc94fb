"""Prompts with a cached prefix: tokens that are read are not fed again; the output does not change."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from support.batches import FIXED, decode_batch
from support.engines import engine_of
from support.ranks import run_ranks
from support.small_models import FAMILIES, random_model
from support.thinned import slow, thinned

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.engine.batch import Arrival
from lp_runtime.engine.engine import Engine
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import make_prefix_cache, read_for_resume
from lp_runtime.request.request import Request

CASES = {
    "full": (FIXED, {}),
    "paper": (LookaheadConfig(7, 5, 7, drafter="paper"), {}),
    "sampled": (FIXED, {"sampling": SamplingConfig(temperature=0.8, seed=5)}),
    "penalty": (FIXED, {"sampling": SamplingConfig(temperature=0, repetition_penalty=1.3), "logprobs": True}),
}
SHARING = replace(FIXED, draft_tables="runtime")
PROMPT = tuple(3 + 7 * i % 53 for i in range(110))
NUM_NEW = 16  # tokens that two replicas decode


def make_model(dtype: torch.dtype = torch.float32, strict_tokens: int | None = None, keeps: bool = True) -> ModelRunner:
    """Return a runner that feeds prompts in chunks of 16 tokens; with a prefix cache if `keeps`."""
    weights = random_model(seed=5, initializer_range=0.3).to(dtype)
    model = ModelRunner(view_of(weights), 16, strict_tokens, own_attention=True)
    return keep_prefixes(model) if keeps else model


def keep_prefixes(model: ModelRunner) -> ModelRunner:
    with model.slots.borrowed() as slot:
        model.begin(slot, 50)
        model.prefill(slot, [1, 2, 3])  # so that the size of a token is known
    model.slots.prefixes = make_prefix_cache(model, None, 10_000)
    return model


@pytest.fixture(scope="module")
def plain_model() -> ModelRunner:
    return make_model(keeps=False)


def decode(engine: Engine, model: ModelRunner, request: Request):
    """Return (token ids, log-probabilities, report, number of prompt tokens fed)."""
    before = model.num_prefilled_tokens
    *outputs, report = engine.run(request)
    tokens = [token for each in outputs for token in each.token_ids]
    return tokens, [p for each in outputs for p in each.logprobs or ()], report, model.num_prefilled_tokens - before


@pytest.mark.parametrize("case", thinned(4, CASES))
def test_second_turn_feeds_only_new_tokens(plain_model, case):
    lookahead, options = CASES[case]
    model = make_model()
    engine = engine_of(model)
    first = Request(PROMPT, lookahead, 20, **options)
    answer, _, report, num_fed = decode(engine, model, first)
    assert (report.cached_tokens, num_fed) == (0, len(PROMPT))
    turn = replace(first, prompt_ids=(*PROMPT, *answer, 7, 8, 9))
    expected, logprobs, _, _ = decode(engine_of(plain_model), plain_model, turn)
    tokens, actual, report, num_fed = decode(engine, model, turn)
    assert tokens == expected and actual == pytest.approx(logprobs, abs=1e-4)
    assert report.cached_tokens + num_fed == len(turn.prompt_ids)
    assert num_fed <= 3 + 25, "the question, and what the last step of the answer had not cached"
    # Another conversation with the same beginning.
    other = replace(first, prompt_ids=(*PROMPT[:100], 5, 6))
    expected, _, _, _ = decode(engine_of(plain_model), plain_model, other)
    tokens, _, report, num_fed = decode(engine, model, other)
    assert (tokens, report.cached_tokens, num_fed) == (expected, 100, 2)


def test_running_request_does_not_keep_evicted_prefix_in_memory():
    model = make_model()
    engine = engine_of(model)
    decode(engine, model, Request(PROMPT, FIXED, 5))
    prefixes = model.slots.prefixes
    stored = [weakref.ref(segment) for segment in prefixes._segments() if segment.states]
    events = engine.run(Request((*PROMPT, 7), FIXED, 20))
    next(events)
    prefixes.clear()
    assert stored and not any(reference() for reference in stored)
    *_, report = events
    assert report.cached_tokens == len(PROMPT)


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_prefix_may_be_cut_anywhere_with_windows_or_learned_positions(family):
    """A prefix may be cut anywhere, since windows of 8 tokens are masks over the whole cache."""
    name, settings = FAMILIES[family]
    weights = random_model(name, seed=2, **settings)
    plain, model = ModelRunner(weights, 16), keep_prefixes(ModelRunner(weights, 16))
    prompt = tuple((7 * i) % 61 for i in range(90))
    request = Request(prompt, FIXED, 12)
    engine = engine_of(model)
    decode(engine, model, request)
    for length in (90, 60, 33):
        again = replace(request, prompt_ids=(*prompt[:length], 3, 5))
        tokens, _, report, _ = decode(engine, model, again)
        assert report.cached_tokens == length
        assert tokens == decode(engine_of(plain), plain, again)[0]


@pytest.mark.slow
def test_strict_mode_reads_whole_chunks_and_gives_identical_bits():
    """Only whole chunks of prompts are read, and every bit is as if all tokens had been fed."""
    model, plain = (make_model(torch.bfloat16, strict_tokens=16, keeps=keeps) for keeps in (True, False))
    engine = engine_of(model)
    first = Request(PROMPT, LookaheadConfig(3, 5, 3, prior="none"), 24, logprobs=True)
    answer, _, _, _ = decode(engine, model, first)
    for length in (len(PROMPT), 100, 64, 40):
        turn = replace(first, prompt_ids=(*PROMPT[:length], *answer[: length % 7], 7, 8))
        expected = decode(engine_of(plain), plain, turn)
        actual = decode(engine, model, turn)
        assert actual[:2] == expected[:2]
        assert actual[2].cached_tokens == length // 16 * 16 and actual[3] == len(turn.prompt_ids) - length // 16 * 16


def test_repeated_request_with_same_salt_reuses_draft_tables():
    """A repeated request drafts the answer from the first one's tables, although no prompt contains it."""
    model = make_model()
    engine, request = engine_of(model), Request(PROMPT, FIXED, 30, sampling=SamplingConfig(temperature=1.2, seed=3))
    tokens, _, first, _ = decode(engine, model, request)
    again, _, second, _ = decode(engine, model, request)
    assert again == tokens and second.num_steps < first.num_steps
    _, _, other, _ = decode(engine, model, replace(request, cache_salt="another's"))
    assert (other.num_steps, other.cached_tokens) == (first.num_steps, 0)


@pytest.mark.slow
def test_batched_requests_read_prefix_of_first_request():
    model = make_model()
    engine = engine_of(model)
    request = Request(PROMPT, FIXED, 12)
    requests = [replace(request, sampling=SamplingConfig(temperature=1, seed=seed)) for seed in range(4)]
    alone = [decode(engine_of(plain), plain, each)[0] for plain in [make_model(keeps=False)] for each in requests]
    before = model.num_prefilled_tokens
    # The first prompt is fed before the other requests arrive, which arrive together.
    arrivals = [Arrival(number, each) for number, each in enumerate(requests)]
    actual = decode_batch(engine, {1: arrivals[:1], len(PROMPT) // 16 + 2: arrivals[1:]})
    assert [actual[number][0] for number in range(4)] == alone
    assert model.num_prefilled_tokens - before == len(PROMPT) + 3
    assert [actual[number][2].cached_tokens for number in range(4)] == [0, *[len(PROMPT) - 1] * 3]


def test_prompt_with_prompt_logprobs_is_fed_in_full():
    model = make_model()
    engine = engine_of(model)
    request = Request(PROMPT, FIXED, 4, logprobs=True)
    decode(engine, model, request)
    _, logprobs, report, _ = decode(engine, model, replace(request, prompt_logprobs=True))
    assert report.cached_tokens == 0 and len(logprobs[0].prompt) == len(PROMPT) - 1


@pytest.mark.parametrize("strict_tokens", slow([None, 16], [None]))
def test_resumed_request_reads_cached_prefix(strict_tokens):
    model = make_model(strict_tokens=strict_tokens)
    engine, request = engine_of(model), Request(PROMPT, FIXED, 30)
    tokens, _, _, _ = decode(engine, model, request)
    model.slots.clear()  # as on a replica that has decoded other requests since
    rest, _, _, num_fed = decode(engine, model, replace(request, committed=tuple(tokens[:10])))
    assert tokens[:10] + rest == tokens and num_fed < 16 + 16 + 10
    slot = CacheSlot()
    read_for_resume(model, slot, request, 300)
    assert slot.tokens == list(PROMPT[: slot.cache.length]) and slot.cache.length > len(PROMPT) - 17


def test_aborted_request_stores_only_its_prompt():
    model = make_model()
    events = engine_of(model).run(Request(PROMPT, FIXED, 60))
    next(events), next(events), next(events)
    events.close()
    assert model.slots.prefixes.num_bytes == len(PROMPT) * model.cache_bytes_per_token


def on_a_rank(group, forgetful: int):
    """Decode three turns; the rank `forgetful` forgets all prefixes before the second one."""
    model = make_model()
    engine = engine_of(model, group)
    first = Request(PROMPT, FIXED, NUM_NEW)
    answers = [decode(engine, model, first)]
    if group.rank == forgetful:
        model.slots.prefixes.reserve(10**9)
        model.slots.prefixes.reserve(0)
    for question in (3, 4):
        turn = replace(first, prompt_ids=(*PROMPT, *answers[0][0], question))
        answers.append(decode(engine, model, turn))
    return [(tokens, report.cached_tokens, num_fed, report.num_steps) for tokens, _, report, num_fed in answers]


def test_replicas_with_different_prefixes_agree(plain_model):
    actual = run_ranks(on_a_rank, 2, 1)
    assert actual[0] == actual[1]
    (answer, *_), second, third = actual[0]
    assert second[1] == 0, "one of them has nothing"
    assert third[1] == len(PROMPT) + NUM_NEW and third[2] == 1
    for (tokens, *_), question in ((second, 3), (third, 4)):
        turn = Request((*PROMPT, *answer, question), FIXED, NUM_NEW)
        assert tokens == decode(engine_of(plain_model), plain_model, turn)[0]


def on_a_rank_that_lost_its_tables(group) -> list[tuple[list[int], int]]:
    """Decode a prompt four times in one scope on a rank; rank 1 loses its draft tables after the second."""
    model = make_model(keeps=False)
    engine, actual = engine_of(model, group), []
    for number in range(4):
        if number == 2 and group.rank == 1:
            pool, size = engine.draft_pool, SHARING.draft_tables_bytes
            pool.release(pool.acquire(size, pool.find(0, "", size)))
        tokens, _, report, _ = decode(engine, model, Request(PROMPT, SHARING, NUM_NEW))
        actual.append((tokens, report.num_steps))
    return actual


def test_draft_tables_are_reused_only_if_all_replicas_have_them(plain_model):
    """Tables are shared without a prefix cache, too; tables that one replica has lost are not used."""
    actual = run_ranks(on_a_rank_that_lost_its_tables, 2)
    assert actual[0] == actual[1]
    (first, second, third, fourth) = actual[0]
    expected = decode(engine_of(plain_model), plain_model, Request(PROMPT, FIXED, NUM_NEW))[0]
    assert all(tokens == expected for tokens, _ in actual[0])
    # Steps with empty tables, and with those of a request. Measured times may move a node to another replica, and with
    # it a token that is fed again: that can cost a step.
    assert max(second[1], fourth[1]) < min(first[1], third[1])


@pytest.mark.slow
def test_prefix_cache_size_follows_settings():
    model = make_model(keeps=False)
    with model.slots.borrowed() as slot:
        model.begin(slot, 50)
        model.prefill(slot, [1, 2, 3])
    assert make_prefix_cache(model, 0, 1000) is None
    for max_bytes, capacity, num_kept in (
        (None, None, 0),
        (None, 100, 280),
        (50 * model.cache_bytes_per_token, None, 50),
    ):
        model.slots.prefixes = cache = make_prefix_cache(model, max_bytes, capacity)
        for first in range(30):
            slot = CacheSlot()
            model.begin(slot, 30)
            model.prefill(slot, range(first, first + 20))
            cache.store(slot.cache, slot.tokens, slot.num_prefilled, "")
        assert num_kept - 20 < cache.num_bytes / model.cache_bytes_per_token <= max(num_kept, 0)
    assert torch.is_inference(slot.cache.tensors(0)[0])


def test_prefixes_may_take_their_bytes_whatever_the_slots_take_if_the_capacity_is_unknown():
    model = make_model(keeps=False)
    with model.slots.borrowed() as slot:
        model.begin(slot, 300)
        model.prefill(slot, range(20))  # so that the size of a token is known
    with model.slots.borrowed() as slot:
        model.begin(slot, 300)
        model.prefill(slot, range(20))
        cache = make_prefix_cache(model, 50 * model.cache_bytes_per_token, None)
        model.slots.prefixes = cache
        cache.store(slot.cache, slot.tokens, slot.num_prefilled, "")
    assert model.slots.capacity >= 300
    assert cache.num_bytes == 20 * model.cache_bytes_per_token
