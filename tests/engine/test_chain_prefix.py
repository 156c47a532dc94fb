"""Cached prefixes of models whose layers carry a state: a prefix ends where a state was stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.causal_configs import small_config
from support.causal_types import small_model
from support.chain_models import CHUNK_TOKENS, model_of
from support.engines import engine_of
from support.ranks import run_ranks
from support.thinned import thinned
from transformers import PreTrainedModel

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.prefill.prefix import MAX_POINTS, make_prefix_cache
from lp_runtime.request.request import Request

PROMPT = tuple(5 + 3 * i % 41 for i in range(60))
KINDS = ("falcon_h1", "qwen3_next", "mamba2")  # states in layers with attention; in other layers; no attention
MAX_BYTES = 1 << 30
CAPACITY_TOKENS = 1 << 20  # of models whose prefixes are evicted for slots
SETTINGS = LookaheadConfig(tokens=5, prior="none")
NUM_NEW = 6  # tokens of an answer


def make_model(weights: PreTrainedModel, max_bytes: int = MAX_BYTES, capacity: int | None = None) -> ChainRunner:
    model = ChainRunner(weights, CHUNK_TOKENS)
    with model.slots.borrowed() as slot:
        model.begin(slot, 50)
        model.prefill(slot, [1, 2, 3])  # so that the size of a token is known
    model.slots.prefixes = make_prefix_cache(model, max_bytes, capacity)
    return model


def decode(engine, model: ChainRunner, request: Request):
    """Return (token ids, number of tokens read from the cache, number of prompt tokens fed)."""
    before = model.num_prefilled_tokens
    *outputs, report = engine.run(request)
    tokens = [token for each in outputs for token in each.token_ids]
    return tokens, report.cached_tokens, model.num_prefilled_tokens - before


def turns(engine, model: ChainRunner, forget=lambda: None) -> list[tuple[list[int], int, int]]:
    """Decode two turns, three other prompts with the same first 40 tokens, and the first turn twice more.

    `forget` is called after the first turn.
    """
    engine.prepare(SETTINGS)
    first = Request(PROMPT, SETTINGS, NUM_NEW)
    actual = [decode(engine, model, first)]
    forget()
    second = replace(first, prompt_ids=(*PROMPT, *actual[0][0], 7, 8, 9))
    actual.append(decode(engine, model, second))
    actual += [decode(engine, model, replace(first, prompt_ids=(*PROMPT[:40], other, 1, 2))) for other in (3, 4, 6)]
    return [*actual, decode(engine, model, first), decode(engine, model, first)]


@pytest.mark.parametrize("kind", thinned(4, KINDS))
def test_prefix_ends_at_stored_state(kind):
    weights = model_of(kind)
    plain, model = make_model(weights, 0), make_model(weights)
    expected, actual = turns(engine_of(plain), plain), turns(engine_of(model), model)
    assert [tokens for tokens, _, _ in actual] == [tokens for tokens, _, _ in expected]
    first, second, *others, again, once_more = actual
    assert first[1:] == (0, 60)
    assert 60 <= second[1] <= 60 + NUM_NEW, "after the prompt, or after what the answer's last step had committed"
    assert [each[1:] for each in others] == [(0, 43), (40, 3), (40, 3)], (
        "where the first of them parted from the prompt"
    )
    assert (again[1], once_more[1]) == (40, 59), "where a prompt ends it cannot be read: its last logits are wanted"
    for _, num_read, num_fed in actual:
        assert num_read + num_fed in (60, 43, 60 + NUM_NEW + 3)


def test_answer_is_not_read_where_prompts_have_limited_time_steps():
    """transformers does not limit the time steps of an answer, but those of the next prompt that contains it."""
    weights = small_model(small_config("falcon_h1", {"time_step_limit": (0.5, 0.6)}), seed=3)
    model = make_model(weights)
    engine = engine_of(model)
    engine.prepare(SETTINGS)
    request, num_reads = Request(PROMPT, SETTINGS, NUM_NEW, logprobs=True, prompt_logprobs=True), []
    for _ in range(3):
        expected = weights.generate(torch.tensor([request.prompt_ids]), max_new_tokens=NUM_NEW, do_sample=False)[0]
        tokens, num_read, _ = decode(engine, model, request)
        assert [*request.prompt_ids, *tokens] == expected.tolist()
        num_reads.append(num_read)
        request = Request((*expected.tolist(), *PROMPT[:20]), SETTINGS, NUM_NEW)
    assert num_reads == [0, len(PROMPT), len(PROMPT) + NUM_NEW + 20], "up to the end of the prompt before"


def test_last_token_of_a_prompt_is_not_fed_alone_where_time_steps_are_limited():
    """transformers does not limit the time step of a token that is fed alone after others."""
    weights = small_model(small_config("falcon_h1", {"time_step_limit": (0.5, 0.6)}), seed=3)
    model = make_model(weights)
    engine = engine_of(model)
    engine.prepare(SETTINGS)
    for prompt in (PROMPT, (*PROMPT, 7)):
        expected = weights.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)[0]
        tokens, _, _ = decode(engine, model, Request(prompt, SETTINGS, NUM_NEW))
        assert [*prompt, *tokens] == expected.tolist()
    with model.slots.borrowed() as slot:
        model.begin(slot, 80)
        model.prefill(slot, PROMPT)
        before = model.num_prefilled_tokens
        list(model.resume(slot, [*PROMPT, 7], [8], 80))
        assert model.num_prefilled_tokens - before == len(PROMPT) + 1, "the prompt is fed again"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:1])
def test_states_are_evicted_with_least_used_prefixes(kind):
    weights = model_of(kind)
    model = make_model(weights, capacity=CAPACITY_TOKENS)
    turns(engine_of(model), model)
    cache = model.slots.prefixes
    num_bytes = cache.num_bytes
    cache.reserve(1 << 40)
    assert cache.num_bytes == 0, "every state was counted"
    model.slots.prefixes = make_prefix_cache(model, num_bytes // 2, None)
    engine = engine_of(model)
    plain = make_model(weights, 0)
    expected = turns(engine_of(plain), plain)
    actual = turns(engine, model)
    assert [tokens for tokens, _, _ in actual] == [tokens for tokens, _, _ in expected]
    assert model.slots.prefixes.num_bytes <= num_bytes // 2


def on_a_rank(group: Group, forgetful: int) -> list[tuple[list[int], int, int]]:
    """Return `turns` of a rank; the rank `forgetful` forgets all prefixes after the first turn."""
    model = make_model(model_of("qwen3_next"), capacity=CAPACITY_TOKENS)
    engine = engine_of(model, group)
    for number in range(MAX_POINTS + 2):  # more points than replicas exchange
        decode(engine, model, Request((*PROMPT[: 60 - 2 * number], number), SETTINGS, 2))

    def forget() -> None:
        if group.rank == forgetful:
            model.slots.prefixes.reserve(1 << 40)
            assert model.slots.prefixes.num_bytes == 0
            model.slots.prefixes.reserve(0)

    return turns(engine, model, forget)


@pytest.mark.slow
def test_replicas_agree_on_length_of_read_prefix():
    plain = make_model(model_of("qwen3_next"), 0)
    expected = turns(engine_of(plain), plain)
    one, two = run_ranks(on_a_rank, 2, 1)
    assert one == two
    assert [tokens for tokens, _, _ in one] == [tokens for tokens, _, _ in expected]
    first, second, *others, again, once_more = [num_read for _, num_read, _ in one]
    assert 0 < first < 60 and second == 0, "one of them has nothing"
    assert others == [0, 40, 40] and (again, once_more) == (40, 59)
