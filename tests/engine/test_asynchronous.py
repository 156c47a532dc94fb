"""An asynchronous device: outputs are delivered during the next pass, and nothing else changes.

The tests use no such device. If a model has a timer, its passes are launched and waited for like those of a GPU.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from support.batches import FIXED, KEEPING, decode_alone, decode_batch
from support.engines import engine_of
from support.ranks import run_ranks
from support.small_models import random_model
from support.thinned import thinned
from transformers import PreTrainedModel

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.distributed.exchange import Exchange
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Arrival
from lp_runtime.errors import ModelError
from lp_runtime.model.forward.passes import FeedChunk
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request

PROMPT = tuple(range(3, 15))
REQUESTS = {
    "fixed": Request(PROMPT, FIXED, 30),
    "auto": Request(PROMPT[3:], LookaheadConfig(prior="none"), 60),
    "paper": Request(PROMPT[:5], LookaheadConfig(7, 5, 7, drafter="paper"), 30),
    "sampled": Request(PROMPT[1:], KEEPING, 50, sampling=SamplingConfig(temperature=0.8, seed=5)),
    "logprobs": Request(PROMPT[2:], FIXED, 20, logprobs=True),
}


class Timer:
    """A timer that reports the same duration for every pass."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.num_started = 0

    def start(self) -> None:
        self.num_started += 1

    def stop(self) -> None:
        pass

    def seconds(self) -> float:
        return self._seconds


def make_model() -> PreTrainedModel:
    """Return a random model whose texts repeat themselves, so that guesses are right."""
    return view_of(random_model(seed=5, initializer_range=0.3))


@pytest.fixture(scope="module")
def loaded() -> PreTrainedModel:
    return make_model()


@pytest.fixture(scope="module")
def blocking(loaded) -> ModelRunner:
    return ModelRunner(loaded, 512, own_attention=True)


@pytest.fixture
def model(loaded) -> ModelRunner:
    """A model whose passes report a minute, so that the receiver of outputs is always quick in comparison."""
    made = ModelRunner(loaded, 512, own_attention=True)
    made.timer = Timer(60.0)
    return made


@pytest.mark.parametrize("name", thinned(2, REQUESTS))
def test_single_request_matches_blocking_device(model, blocking, name):
    request = REQUESTS[name]
    expected, logprobs, before = decode_alone(blocking, request)
    tokens, actual, report = decode_alone(model, request)
    assert tokens == expected and actual == pytest.approx(logprobs, abs=1e-4)
    if request.lookahead.is_auto:  # the size of steps depends on measured times
        return
    assert report.num_steps == before.num_steps
    assert model.timer.num_started == report.num_steps - 1  # the prefill's pass is not timed


@pytest.mark.slow
def test_batched_requests_match_blocking_device(model, blocking):
    together = decode_batch(
        engine_of(model),
        {number + 1: [Arrival(name, request)] for number, (name, request) in enumerate(REQUESTS.items())},
    )
    for name, (tokens, _, report) in together.items():
        assert tokens == decode_alone(blocking, REQUESTS[name])[0], name
        assert report.finish_reason == "length"


@pytest.mark.parametrize("quick", [True, False])
def test_output_is_delivered_after_next_launch_if_receiver_is_fast(model, quick):
    """Exceptions: the first output, of the prefill, and the second, when the receiver's speed is unknown."""
    if not quick:
        model.timer = Timer(0.001)
    launched = []  # number of launched passes when each output was delivered
    for event in engine_of(model).run(REQUESTS["fixed"]):
        if not isinstance(event, Report):
            launched.append(model.timer.num_started)
        time.sleep(0.0 if quick else 0.002)
    num_runs = len(launched)
    late_by_one = [0, *range(2, num_runs), num_runs - 1]
    assert num_runs > 5
    assert launched == (late_by_one if quick else list(range(num_runs)))


def test_outputs_are_delivered_before_next_chunk_of_another_prompt(model, monkeypatch):
    """Outputs are delivered before the next chunk of another request's prompt is fed."""
    model.prefill_chunk = 16
    long = replace(REQUESTS["fixed"], prompt_ids=PROMPT * 16)
    first = replace(REQUESTS["fixed"], max_new_tokens=80)
    arriving = iter([[Arrival("first", first)], [], [], [Arrival("long", long)]])
    order = []
    loop = engine_of(model)
    step, feed = loop._step, model.feed

    def noted_step(*args):
        runs = yield from step(*args)
        order.append("committed")
        return runs

    def noted_feed(work, caches):
        if isinstance(work, FeedChunk) and len(work.tokens) == model.prefill_chunk:
            order.append("chunk")
        return feed(work, caches)

    monkeypatch.setattr(loop, "_step", noted_step)
    monkeypatch.setattr(model, "feed", noted_feed)
    for key, event in loop.run_batch(lambda: next(arriving, [])):
        if not isinstance(event, Report):
            order.append(f"told {key}")
    begin, end = order.index("chunk"), len(order) - order[::-1].index("chunk")
    assert order[begin:end].count("chunk") == len(long.prompt_ids) // 16
    assert order[begin:end].count("committed") > 10
    for what, after in zip(order[begin:end], order[begin + 1 : end], strict=False):
        assert (what, after) != ("committed", "chunk")


def test_committed_outputs_are_delivered_before_error_is_raised(model, monkeypatch):
    loop = engine_of(model)
    *whole, _ = loop.run(REQUESTS["fixed"])
    forward = model.forward

    def fails(*args, **options):
        if model.timer.num_started == 6:
            raise ModelError("no more")
        return forward(*args, **options)

    model.timer.num_started = 0
    monkeypatch.setattr(model, "forward", fails)
    reported = []
    with pytest.raises(ModelError):
        reported.extend(loop.run(REQUESTS["fixed"]))
    assert reported == whole[:6]
    model.timer.num_started, reported = 3, []
    with pytest.raises(ModelError):
        reported.extend(loop.run_batch(iter([[Arrival("one", REQUESTS["fixed"])], [], [], []]).__next__))
    assert [run for _, run in reported] == whole[:3]
    assert not loop.draft_pool.num_in_use


def test_request_closed_during_pass_does_not_affect_next_request(model, blocking):
    loop = engine_of(model)
    events = loop.run(REQUESTS["fixed"])
    for _ in range(4):
        next(events)
    events.close()
    assert decode_alone(model, REQUESTS["fixed"])[0] == decode_alone(blocking, REQUESTS["fixed"])[0]
    assert not loop.draft_pool.num_in_use


def on_a_rank(group: Group):
    """Return (tokens by request, clocks that were sent)."""
    model = ModelRunner(make_model(), 512, own_attention=True)
    model.timer = Timer(0.0001 * (1 + group.rank))
    clocks = []
    start = Exchange.start

    def noted(exchange, shares, values, digest, control, clock=0):
        clocks.append(clock >> 31)
        start(exchange, shares, values, digest, control, clock)

    Exchange.start = noted
    loop = engine_of(model, group)
    results = {}
    for name in ("fixed", "auto", "sampled"):
        *runs, _ = loop.run(REQUESTS[name])
        results[name] = [token for run in runs for token in run.token_ids]
    return results, clocks


@pytest.mark.slow
def test_replicas_report_duration_of_previous_pass(blocking):
    results = run_ranks(on_a_rank, 2)
    for rank, (actual, clocks) in enumerate(results):
        for name, tokens in actual.items():
            assert tokens == decode_alone(blocking, REQUESTS[name])[0], name
        # Neither the prefill nor the first step, which has no step before it, sends a duration.
        assert clocks[:2] == [0, 0] and set(clocks[2:6]) == {100 * (1 + rank)}
