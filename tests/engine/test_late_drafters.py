"""Requests that begin before their drafter is compiled get it between two steps, and their texts stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from support import constrained
from support.batches import FIXED, KEEPING, decode_alone, decode_batch
from support.chain_models import CHUNK_TOKENS, model_of, request_of
from support.engines import engine_of
from support.ranks import run_ranks
from support.small_models import random_model
from support.stateful import EveryThird

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.batch import Arrival
from lp_runtime.engine.engine import Engine
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request

AUTO = LookaheadConfig()
NUM_NEW = 30
NUM_WITHOUT = 9  # steps of the first request before the drafter is compiled
PROMPTS = ((17, 31, 8, 22, 36, 13, 27, 41, 18, 32, 9), (11, 3, 5, 7), (42, 6))
CASES = {
    "auto": (AUTO, {}),
    "fixed": (FIXED, {}),
    "kept tables": (KEEPING, {}),
    "sampled": (FIXED, {"sampling": SamplingConfig(temperature=0.8, seed=5)}),
    "log-probabilities": (FIXED, {"logprobs": True, "top_logprobs": 2}),
    "prediction": (FIXED, {"prediction": (5, 6, 7)}),
    "prompt's candidates": (replace(FIXED, prompt_top_k=True), {}),
    "processor with a state": (FIXED, {"processors": (EveryThird(),)}),
}


@pytest.fixture(scope="module")
def model() -> ModelRunner:
    return ModelRunner(random_model(seed=5, initializer_range=0.3), 16, own_attention=True)


def compiled_after(num_calls: int) -> Callable[[], bool]:
    """Return an `is_compiling` that is true `num_calls` times."""
    calls: Iterator[bool] = iter([True] * num_calls)
    return lambda: next(calls, False)


def engine_without_drafter(model: ModelRunner, num_calls: int = NUM_WITHOUT) -> Engine:
    """Return an engine that asks when a request begins, and in each step of each request."""
    engine = engine_of(model)
    engine.prepare(AUTO, compiled_after(num_calls))
    return engine


def decode(engine: Engine, request: Request) -> tuple[list[int], Report]:
    *outputs, report = engine.run(request)
    return [token for output in outputs for token in output.token_ids], report


@pytest.mark.parametrize("case", CASES)
def test_request_gets_its_drafter_between_two_steps(model, case):
    settings, options = CASES[case]
    request = Request(PROMPTS[0], settings, NUM_NEW, **options)
    expected, _, usual = decode_alone(model, request)
    engine = engine_without_drafter(model)
    tokens, report = decode(engine, request)
    assert tokens == expected
    assert report.steps_without_drafter == NUM_WITHOUT
    assert report.counts.sources == usual.counts.sources
    if not settings.is_auto:  # measured times decide how much auto drafts
        assert NUM_WITHOUT < report.num_steps < NUM_NEW and sum(map(sum, report.counts.accepted)) > 0
    again, report = decode(engine, request)
    assert again == expected and report.steps_without_drafter == 0


def test_requests_of_a_batch_get_their_drafters(model):
    requests = {number: Request(prompt, FIXED, NUM_NEW) for number, prompt in enumerate(PROMPTS)}
    long = Request(PROMPTS[0] * 12, FIXED, NUM_NEW)  # its prompt is still being fed when the drafter is ready
    arriving = {1: [Arrival(number, request) for number, request in requests.items()], 4: [Arrival("long", long)]}
    actual = decode_batch(engine_without_drafter(model, num_calls=24), arriving)
    for key, request in {**requests, "long": long}.items():
        tokens, _, report = actual[key]
        assert tokens == decode_alone(model, request)[0]
        assert 0 < report.steps_without_drafter < report.num_steps < NUM_NEW


def decode_on_ranks(group: Group) -> list[tuple[list[int], int, int]]:
    """Decode a request twice, on a rank whose drafter is compiled after a number of steps that depends on the rank."""
    engine = Engine(ModelRunner(random_model(seed=5, initializer_range=0.3), 16), group)
    engine.prepare(FIXED, compiled_after((5, NUM_WITHOUT, 0)[group.rank]))
    results = [decode(engine, Request(PROMPTS[0], FIXED, NUM_NEW)) for _ in range(2)]
    return [(tokens, report.num_steps, report.steps_without_drafter) for tokens, report in results]


@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_replicas_begin_to_draft_in_the_same_step(model, num_replicas):
    expected, _, _ = decode_alone(model, Request(PROMPTS[0], FIXED, NUM_NEW))
    first, *others = run_ranks(decode_on_ranks, num_replicas)
    assert all(other == first for other in others)
    assert [tokens for tokens, _, _ in first] == [expected] * 2
    assert [num_without for _, _, num_without in first] == [NUM_WITHOUT, 0]
    assert all(num_steps < NUM_NEW for _, num_steps, _ in first)


def test_request_that_ends_first_had_no_drafter(model):
    request = Request(PROMPTS[0], AUTO, NUM_NEW)
    tokens, report = decode(engine_without_drafter(model, num_calls=100), request)
    assert tokens == decode_alone(model, request)[0]
    assert report.steps_without_drafter == report.num_steps == NUM_NEW


def test_other_drafters_do_not_wait(model):
    request = Request(PROMPTS[0], replace(AUTO, drafter="recycling"), NUM_NEW)
    tokens, report = decode(engine_without_drafter(model), request)
    assert tokens == decode_alone(model, request)[0]
    assert report.steps_without_drafter == 0 and report.num_steps < NUM_NEW


def test_constrained_request_gets_its_drafter():
    runner, constraint = constrained.runner("Llama"), constrained.compile_for_test(ConstraintConfig(regex="[ab]{20}d"))
    request = Request((3, 5, 7), AUTO, NUM_NEW, frozenset({constrained.EOS}), constraint=constraint)
    expected, _, _ = constrained.decode(runner, request, Group.alone())
    engine = Engine(runner, Group.alone(), grammars=constrained.grammars())
    engine.prepare(AUTO, compiled_after(3))
    tokens, report = decode(engine, request)
    assert tokens == expected and report.steps_without_drafter == 3


def test_chains_begin_without_a_drafter():
    runner = ChainRunner(model_of("bamba"), CHUNK_TOKENS)
    request = replace(request_of(1), lookahead=LookaheadConfig(tokens=5), max_new_tokens=20)
    tokens, report = decode(engine_without_drafter(runner), request)
    assert tokens == decode(engine_of(runner), request)[0]
    assert report.steps_without_drafter == NUM_WITHOUT
