"""A request that is resumed after the tokens of an earlier attempt has the same output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.engines import engine_of
from support.ranks import run_ranks
from support.small_models import random_model
from support.stateful import EveryThird
from support.thinned import thinned

from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request
from lp_runtime.text.stop_strings import StopStrings

PROMPT = (17, 31, 8, 22, 36, 13, 27, 41, 18, 32, 9, 23)
FIXED = LookaheadConfig(7, 5, 7, prior="none")
CASES = {
    "full": (FIXED, {}),
    "plain": (PLAIN, {}),
    "paper": (LookaheadConfig(7, 5, 7, drafter="paper"), {}),
    "prompt_lookup": (LookaheadConfig(drafter="prompt_lookup"), {}),
    "sampled": (FIXED, {"sampling": SamplingConfig(temperature=0.8, seed=5)}),
    "penalty": (FIXED, {"sampling": SamplingConfig(temperature=0, repetition_penalty=1.3)}),
    "logprobs": (FIXED, {"logprobs": True}),
}


def make_model(dtype: torch.dtype = torch.float32, strict_tokens: int | None = None) -> ModelRunner:
    weights = random_model(seed=5, initializer_range=0.3).to(dtype)
    return ModelRunner(view_of(weights), 16, strict_tokens, own_attention=True)


@pytest.fixture(scope="module")
def model() -> ModelRunner:
    return make_model()


def decode(model: ModelRunner, request: Request, num_runs: int | None = None, stop=None):
    """Return (token ids, log-probabilities, report); with `num_runs`, of the first outputs, and no report."""
    tokens, logprobs = [], []
    events = engine_of(model).run(request, stop=stop)
    for number, event in enumerate(events):
        if isinstance(event, Report):
            return tokens, logprobs, event
        if number == num_runs:
            break  # this step is lost
        tokens += event.token_ids
        logprobs += event.logprobs or ()
    return tokens, logprobs, None


@pytest.mark.parametrize(("case", "keeps_cache"), thinned(4, CASES, [True, False]))
def test_resumed_request_matches_uninterrupted_output(model, case, keeps_cache, monkeypatch):
    lookahead, options = CASES[case]
    request = Request(PROMPT, lookahead, 18, **options)
    expected, expected_logprobs, report = decode(model, request)
    assert len(expected) == 18
    fed = []
    prefill = ModelRunner.prefill_in_chunks
    for num_runs in (1, report.num_steps - 1):
        committed, logprobs, _ = decode(model, request, num_runs)
        assert 0 < len(committed) < 18
        if not keeps_cache:
            decode(model, Request((3, 1, 4), PLAIN, 2))
        with monkeypatch.context() as patch:
            patch.setattr(
                ModelRunner,
                "prefill_in_chunks",
                lambda self, slot, tokens: fed.append(len(tokens)) or prefill(self, slot, tokens),
            )
            rest, more, report = decode(model, replace(request, committed=tuple(committed)))
        assert committed + rest == expected
        assert torch.allclose(torch.tensor(logprobs + more), torch.tensor(expected_logprobs), atol=1e-4)
        assert report.finish_reason == "length" and 2 <= report.num_steps <= len(rest) + 1
    # With the cache, at most the tokens of one output are fed again; without it, everything, the prompt first.
    assert all(size < len(PROMPT) for size in fed) if keeps_cache else fed.count(len(PROMPT)) == 2


def test_resumed_request_ends_at_stop_string(model):
    tokenizer = load_tokenizer(ModelConfig())  # each of the model's tokens is a character of it
    whole, _, _ = decode(model, Request(PROMPT, FIXED, 20))
    text = tokenizer.decode(whole)
    string = text[8:12]
    stop = text[: text.index(string) + len(string)]
    request = Request(PROMPT, FIXED, 20, stop=(string,))
    expected, _, report = decode(model, request, stop=StopStrings(tokenizer, [string]))
    assert report.finish_reason == "stop" and tokenizer.decode(expected).startswith(stop)
    for length in range(1, len(expected)):
        committed = replace(request, committed=tuple(expected[:length]))
        rest, _, report = decode(model, committed, stop=StopStrings(tokenizer, [string]))
        assert (expected[:length] + rest, report.finish_reason) == (expected, "stop")


def test_resume_of_complete_request_returns_no_tokens(model):
    expected, _, _ = decode(model, Request(PROMPT, FIXED, 9))
    rest, _, report = decode(model, Request(PROMPT, FIXED, 9, committed=tuple(expected)))
    assert rest == [] and report.finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("keeps_cache", thinned(2, [True, False]))
def test_strict_resume_gives_identical_bits(keeps_cache):
    """Tokens that are fed again give the same results as the first time, bit for bit."""
    model = make_model(torch.bfloat16, strict_tokens=16)
    request = Request(PROMPT, LookaheadConfig(3, 5, 3, prior="none"), 24, logprobs=True)
    expected, expected_logprobs, _ = decode(model, request)
    for num_runs in (1, 4):
        committed, logprobs, _ = decode(model, request, num_runs)
        if not keeps_cache:
            decode(model, Request((3, 1, 4), PLAIN, 2))
        rest, more, _ = decode(model, replace(request, committed=tuple(committed)))
        assert committed + rest == expected and logprobs + more == expected_logprobs


def test_strict_resume_starts_chunks_at_same_positions(monkeypatch):
    """A chunk that the slot holds in part is fed again from its beginning."""
    model = make_model(strict_tokens=16)
    chunk, prompt = model.prefill_chunk, (PROMPT * 10)[:60]
    num_held = chunk + 5
    slot = CacheSlot()
    model.begin(slot, 100)
    model.prefill(slot, prompt[:num_held])
    starts, feed_prompt = [], ModelRunner.feed_prompt

    def noted(self, slot, *args):
        starts.append(len(slot.tokens))
        return feed_prompt(self, slot, *args)

    monkeypatch.setattr(ModelRunner, "feed_prompt", noted)
    for _ in model.resume(slot, prompt, [1, 2], 100):
        pass
    assert starts == list(range(chunk, len(prompt), chunk))


@pytest.mark.parametrize("strict_tokens", [None, pytest.param(8, marks=pytest.mark.slow)])
def test_resume_aborted_between_chunks_can_be_repeated(strict_tokens):
    model = make_model(strict_tokens=strict_tokens)
    prompt = PROMPT * 4  # several chunks
    request = Request(prompt, FIXED, 24)
    expected, _, _ = decode(model, request)
    for num_asked in range(1, 6):
        slot = CacheSlot()
        for _ in zip(range(num_asked), model.resume(slot, prompt, expected[:20], 100), strict=False):
            pass
        assert slot.tokens == [*prompt, *expected[:20]][: len(slot.tokens)] and slot.cache.length == len(slot.tokens)
        model.slots.release(slot)
        assert expected[:20] + decode(model, replace(request, committed=tuple(expected[:20])))[0] == expected


def resumed(group: Group, prompt: tuple[int, ...], committed: list[int], is_ordered: bool, cancels: bool):
    """Resume a request on a rank; return (order of its feeds and gathers, new tokens, report).

    Rank 1 already holds the text; if `cancels`, it cancels the request.
    """
    model = make_model()
    processors = (EveryThird(),) if is_ordered else ()
    request = Request(prompt, FIXED, 24, committed=tuple(committed), processors=processors)
    if group.rank == 1:
        decode(model, replace(request, processors=()))
    noted: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for place, name, what in (
            (ModelRunner, "feed_prompt", "feed"),
            (ModelRunner, "forward", "feed"),
            (type(group.connected), "all_gather", "gather"),
        ):
            method = getattr(place, name)

            def call(*args, what=what, method=method):
                noted.append(what)
                return method(*args)

            patch.setattr(place, name, call)
        *outputs, report = engine_of(model, group).run(request, should_cancel=lambda: cancels and group.rank == 1)
    return noted, [token for output in outputs for token in output.token_ids], report


@pytest.mark.parametrize("is_ordered", [pytest.param(False, marks=pytest.mark.slow), True])
def test_replica_that_lacks_text_gathers_after_each_chunk(model, is_ordered):
    """A replica that lacks the whole text gathers after each chunk, so its peer does not take it for lost."""
    prompt = PROMPT * 4
    processors = (EveryThird(),) if is_ordered else ()
    expected, _, _ = decode(model, Request(prompt, FIXED, 24, processors=processors))
    actual = run_ranks(resumed, 2, prompt, expected[:10], is_ordered, False)
    num_chunks = -(-len(prompt) // 16) + 1
    assert num_chunks > 3
    noted, tokens, report = actual[0]
    assert noted[: 2 * num_chunks] == ["feed", "gather"] * num_chunks
    assert actual[1][0][:num_chunks] == ["gather"] * num_chunks
    for _, tokens, report in actual:
        assert expected[:10] + tokens == expected and report.finish_reason == "length"


def test_resume_is_cancelled_between_chunks_on_all_replicas(model):
    """All replicas cancel at once, whatever part of the text each of them lacks."""
    prompt = PROMPT * 4
    expected, _, _ = decode(model, Request(prompt, FIXED, 24))
    for noted, tokens, report in run_ranks(resumed, 2, prompt, expected[:10], False, True):
        assert noted.count("feed") <= 1 and tokens == [] and report.finish_reason == "cancelled"
