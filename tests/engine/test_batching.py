"""Requests that arrive and end at any time and share forward passes have unchanged outputs."""

from dataclasses import replace

import pytest
from support.batches import FIXED, KEEPING, decode_alone, decode_batch
from support.engines import engine_of
from support.small_models import random_model

from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.engine.batch import Arrival
from lp_runtime.errors import LookaheadError, RequestError
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request
from lp_runtime.text.stop_strings import StopStrings

CASES = {
    "full": (FIXED, {}),
    "plain": (PLAIN, {}),
    "paper": (LookaheadConfig(7, 5, 7, drafter="paper"), {}),
    "auto": (LookaheadConfig(prior="none"), {}),
    "sampled": (FIXED, {"sampling": SamplingConfig(temperature=0.8, seed=5)}),
    "penalty": (FIXED, {"sampling": SamplingConfig(temperature=0, repetition_penalty=1.3), "logprobs": True}),
    "keeping": (KEEPING, {}),
    "keeping, too": (KEEPING, {"sampling": SamplingConfig(temperature=1.0, seed=6)}),
}
PROMPTS = ((17, 31, 8, 22, 36, 13, 27, 41, 18, 32, 9), (11, 3, 5, 7), (42, 6))


@pytest.fixture(scope="module")
def model() -> ModelRunner:
    return ModelRunner(view_of(random_model(seed=5, initializer_range=0.3)), 16, own_attention=True)


@pytest.fixture(scope="module")
def requests() -> dict[str, Request]:
    return {
        name: Request(PROMPTS[number % len(PROMPTS)], settings, max_new_tokens=8 + 3 * number, **options)
        for number, (name, (settings, options)) in enumerate(CASES.items())
    }


def test_batched_outputs_match_requests_decoded_alone(model, requests, monkeypatch):
    sizes = []
    forward = ModelRunner.forward_batch
    monkeypatch.setattr(
        ModelRunner, "forward_batch", lambda self, parts: sizes.append(len(parts)) or forward(self, parts)
    )
    arriving = {1: [], 3: [], 4: []}
    for number, (name, request) in enumerate(requests.items()):
        arriving[(1, 3, 4)[number % 3]].append(Arrival(name, request))
    loop = engine_of(model)
    actual = decode_batch(loop, arriving)
    assert max(sizes) >= len(requests) - 2 and sizes[-1] == 1
    for name, (tokens, logprobs, report) in actual.items():
        alone, alone_logprobs, _ = decode_alone(model, requests[name])
        assert tokens == alone, name
        assert logprobs == pytest.approx(alone_logprobs, abs=1e-4)
        assert report.finish_reason == "length" and report.num_steps <= len(tokens)
    again = decode_batch(loop, {1: [Arrival(name, request) for name, request in requests.items()]})
    assert {name: each[0] for name, each in again.items()} == {name: each[0] for name, each in actual.items()}


def test_long_prompt_does_not_block_running_request(model, requests):
    """One chunk of 16 tokens is fed between two steps of the others, also for a resumed request."""
    running = replace(requests["plain"], max_new_tokens=24)
    prompt = requests["sampled"].prompt_ids * 24
    long = replace(requests["sampled"], prompt_ids=prompt)
    alone = {"running": decode_alone(model, running)[0], "long": decode_alone(model, long)[0]}
    rest = replace(long, committed=tuple(alone["long"][:5]))
    for newcomer, expected in ((long, alone["long"]), (rest, alone["long"][5:])):
        model.slots.clear()  # tokens that a slot still holds would not be fed again
        order, tokens = [], {"running": [], "long": []}
        arriving = iter([[Arrival("running", running)], [], [Arrival("long", newcomer)]])
        for key, event in engine_of(model).run_batch(lambda arriving=arriving: next(arriving, [])):
            if not isinstance(event, Report):
                order.append(key)
                tokens[key] += event.token_ids
        assert tokens == {"running": alone["running"], "long": expected}
        assert order.index("long") >= 2 + len(prompt) // 16


def test_batch_handles_resumed_stopped_and_cancelled_requests(model, requests):
    tokenizer = load_tokenizer(ModelConfig())  # each of the model's tokens is a character of it
    whole, _, _ = decode_alone(model, requests["sampled"])
    request = requests["full"]
    text = tokenizer.decode(decode_alone(model, requests["auto"])[0])
    ending = replace(requests["auto"], stop=(text[8:12],))
    stop = StopStrings(tokenizer, ending.stop)
    cancels = iter([False])  # when it arrives
    actual = decode_batch(
        engine_of(model),
        {
            1: [
                Arrival("taken up", replace(requests["sampled"], committed=tuple(whole[:9]))),
                Arrival("stops", ending, stop),
                Arrival("cancelled", request, should_cancel=lambda: next(cancels, True)),
                Arrival("never fed", request, should_cancel=lambda: True),
            ]
        },
    )
    assert actual["taken up"][0] == whole[9:]
    tokens, _, report = actual["stops"]
    assert report.finish_reason == "stop" and text[8:12] in tokenizer.decode(tokens)
    assert actual["cancelled"][2].finish_reason == "cancelled" and len(actual["cancelled"][0]) == 1
    assert actual["never fed"][2].finish_reason == "cancelled" and not actual["never fed"][0]


@pytest.mark.parametrize("num_committed", [0, 5])
def test_request_cancelled_during_prefill_feeds_no_further_chunk(model, requests, monkeypatch, num_committed):
    """No further chunk of a cancelled request is fed, and the next request is unaffected."""
    prompt = requests["full"].prompt_ids * 8
    long = replace(requests["full"], prompt_ids=prompt)
    expected = decode_alone(model, long)[0]
    fed = []
    commit = TreeCache.commit
    monkeypatch.setattr(TreeCache, "commit", lambda self, count: fed.append(count) or commit(self, count))
    loop = engine_of(model)
    rest = replace(long, committed=tuple(expected[:num_committed]))
    model.slots.clear()
    *runs, report = loop.run(rest, should_cancel=lambda: len(fed) > 2)
    assert runs == [] and report.finish_reason == "cancelled"
    assert fed == [16] * 3
    assert [token for run in list(loop.run(rest))[:-1] for token in run.token_ids] == expected[num_committed:]


class Refuses:
    """A user's logits processor that fails from some length on."""

    def __init__(self, length: int, kind: type[Exception]):
        self.length, self.kind = length, kind

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise self.kind("this processor does not like it")
        return scores


@pytest.mark.parametrize(
    "length, kind",
    [
        (0, RequestError),
        pytest.param(20, RequestError, marks=pytest.mark.slow),
        pytest.param(0, ValueError, marks=pytest.mark.slow),
        (20, IndexError),
    ],
)
def test_failing_request_does_not_affect_others_in_batch(model, requests, length, kind):
    bad = replace(requests["full"], processors=(Refuses(length, kind),), max_new_tokens=40)
    loop = engine_of(model)
    actual = decode_batch(loop, {1: [Arrival("good", requests["auto"])], 2: [Arrival("bad", bad)]})
    assert isinstance(actual["bad"][2], LookaheadError) and len(actual["bad"][0]) < 40
    assert actual["good"][0] == decode_alone(model, requests["auto"])[0]
    assert not loop.draft_pool.num_in_use


def test_closed_batch_releases_its_draft_tables(model, requests):
    loop = engine_of(model)
    events = loop.run_batch(iter([[Arrival("one", requests["full"]), Arrival("two", requests["plain"])], []]).__next__)
    next(events)
    events.close()
    assert not loop.draft_pool.num_in_use
    assert (
        decode_batch(loop, {1: [Arrival("one", requests["full"])]})["one"][0]
        == decode_alone(model, requests["full"])[0]
    )
