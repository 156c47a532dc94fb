"""Sampling is exact: one output per seed, however work is shared; processors act as in `generate`."""

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import engine_of
from support.ranks import CPU, run_ranks
from transformers import ClassifierFreeGuidanceLogitsProcessor, LogitsProcessor

from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.dropin.lookahead_generate import lookahead_generate
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import ConfigError, RequestError
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request

PROMPT = (1, 2, 3, 1, 2, 4, 1, 2, 3, 1)
EOS = frozenset({7, 30})


@pytest.fixture(scope="module")
def model(random_model):
    return random_model("Llama", seed=5, initializer_range=0.15)


@pytest.fixture(scope="module")
def loop(model):
    return engine_of(ModelRunner(model, 2048))


def decode(loop: Engine, request: Request, **options) -> tuple[list[int], Report]:
    *runs, report = loop.run(request, **options)
    return [token for run in runs for token in run.token_ids], report


optional = st.sampled_from
samplings = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.5, 0.8, 1.0, 1.5]),
    top_k=optional([None, 0, 5, 20]),
    top_p=optional([None, 0.9, 1.0]),
    min_p=optional([None, 0.05]),
    typical_p=optional([None, 0.9]),
    repetition_penalty=optional([None, 1.3, 0.8]),
    no_repeat_ngram_size=optional([None, 3]),
    bad_words_ids=optional([None, [[3], [5, 6]]]),
    min_new_tokens=optional([None, 8]),
    logit_bias=optional([None, {4: 2.0, 9: -1.5}]),
    seed=st.integers(0, 2**64 - 1),
)
lookaheads = st.builds(LookaheadConfig, W=st.integers(0, 8), N=st.integers(2, 6), G=st.integers(0, 8))


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 63), min_size=1, max_size=20), samplings, lookaheads, st.booleans(), st.integers(0, 3))
def test_seed_determines_output_for_any_W_N_G(loop, prompt, sampling, lookahead, eos, sample):
    request = Request(tuple(prompt), lookahead, 16, EOS if eos else frozenset(), sampling, sample)
    tokens, report = decode(loop, request)
    expected, plain = decode(loop, replace(request, lookahead=PLAIN))
    assert tokens == expected
    assert report.finish_reason == plain.finish_reason
    assert report.num_steps <= plain.num_steps == len(expected)


RANK_REQUESTS = [
    Request(PROMPT, LookaheadConfig(6, 4, 6), 16, EOS, SamplingConfig(temperature=1.0, seed=3)),
    Request(
        PROMPT,
        LookaheadConfig(5, 3, 5),
        16,
        sampling=SamplingConfig(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=9),
        sample=2,
        logprobs=True,
    ),
]


def sample_on_a_rank(group: Group, folder: str):
    model = load_model(ModelConfig(path=folder), CPU, "float32")
    loop = engine_of(ModelRunner(model, 2048), group)
    return [decode(loop, request)[0] for request in RANK_REQUESTS]


@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_seed_determines_output_on_any_number_of_replicas(make_model_dir, num_replicas):
    folder = str(make_model_dir(seed=5, initializer_range=0.15))
    alone = sample_on_a_rank(Group.alone(), folder)
    assert run_ranks(sample_on_a_rank, num_replicas, folder) == [alone] * num_replicas


def test_different_samples_and_seeds_give_different_outputs(loop):
    request = Request(PROMPT, LookaheadConfig(5, 3, 5), 12, sampling=SamplingConfig(temperature=1.5, seed=1))
    outs = [decode(loop, replace(request, sample=sample))[0] for sample in range(4)]
    outs.append(decode(loop, replace(request, sampling=SamplingConfig(temperature=1.5, seed=2)))[0])
    assert len({tuple(out) for out in outs}) == 5


class EvenTokensOnly(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, 1::2] = float("-inf")
        return scores


class Climbs(LogitsProcessor):
    """Allows the last token and the five that follow it, and fails for a text that it has not allowed."""

    def __init__(self, prefix_only: bool, max_length: int = 999):
        self.prefix_only, self.max_length = prefix_only, max_length

    def __call__(self, input_ids, scores):
        (text,) = input_ids.tolist()
        new = text[len(PROMPT) - 1 :]
        if len(text) > self.max_length or any((b - a) % 64 > 5 for a, b in zip(new, new[1:], strict=False)):
            raise KeyError(new[-1])
        processed = torch.full_like(scores, -torch.inf)
        allowed = [(text[-1] + step) % 64 for step in range(6)]
        processed[:, allowed] = scores[:, allowed]
        return processed


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(temperature=1.0, seed=2)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("drafter", ["full", "paper"])
def test_processor_that_fails_for_guesses_does_not_end_the_request(loop, drafter, sampling):
    request = Request(PROMPT, PLAIN, 24, sampling=sampling, processors=(Climbs(prefix_only=True),), logprobs=True)
    expected, _ = decode(loop, request)
    actual, report = decode(loop, replace(request, lookahead=LookaheadConfig(7, 4, 7, drafter=drafter)))
    assert actual == expected
    assert sum(map(sum, report.counts.fed)) > 0


def test_ordered_processor_may_fail_for_guesses_after_the_end(loop):
    """Guesses are processed before a stop condition is asked; without the condition the failure ends the request."""
    request = Request(PROMPT, LookaheadConfig(5, 4, 5), 24, processors=(Climbs(prefix_only=False),))
    everything, report = decode(loop, request)
    assert report.num_steps < len(everything)
    for num in range(4, 12):
        cut = replace(request, processors=(Climbs(prefix_only=False, max_length=len(PROMPT) + num - 1),))
        committed: list[int] = []

        def stop(run, committed=committed, num=num):
            committed += run
            return len(run) - len(committed) + num if len(committed) >= num else None

        assert decode(loop, cut, stop=stop)[0] == everything[:num]
        with pytest.raises(RequestError, match="Climbs failed"):
            decode(loop, cut)


class RunsOut(LogitsProcessor):
    """Sets every token's score to -inf, or NaN, from a number of new tokens on."""

    def __init__(self, num_new: int, prefix_only: bool, score: float = -torch.inf):
        self.num_new, self.prefix_only, self.score = num_new, prefix_only, score

    def __call__(self, input_ids, scores):
        return scores if input_ids.shape[1] < len(PROMPT) + self.num_new else torch.full_like(scores, self.score)


SAMPLED = Request(PROMPT, LookaheadConfig(7, 4, 7), 12, sampling=SamplingConfig(temperature=0.3, seed=2), logprobs=True)


def run_out(loop: Engine, processor: RunsOut) -> tuple[list[int], str]:
    """Return the tokens before the error of a request that runs out of tokens to choose from, and the error."""
    tokens: list[int] = []
    with pytest.raises(RequestError) as caught:
        for event in loop.run(replace(SAMPLED, processors=(processor,))):
            tokens += event.token_ids
    return tokens, str(caught.value)


@pytest.mark.parametrize("score", [-torch.inf, torch.nan])
@pytest.mark.parametrize("prefix_only", [True, False])
def test_sampling_without_a_possible_token_ends_the_request(loop, prefix_only, score):
    """The error is that of `generate`, and guesses that no token can follow change nothing."""
    expected, report = decode(loop, SAMPLED)
    assert report.num_steps < len(expected)
    for num_new in (0, 5):
        tokens, error = run_out(loop, RunsOut(num_new, prefix_only, score))
        assert tokens == expected[:num_new]
        assert error.startswith(f"sampling: no token can follow {num_new} new tokens: ")
    assert decode(loop, SAMPLED)[0] == expected


@pytest.mark.parametrize("prefix_only", [True, False])
def test_drop_in_without_a_possible_token_does_as_generate(model, prefix_only):
    """Greedy search chooses token 0, and sampling fails."""

    def generated(**options) -> list[int]:
        options |= {"logits_processor": [RunsOut(5, prefix_only)], "max_new_tokens": 12, "eos_token_id": None}
        return model.generate(torch.tensor([PROMPT]), **options)[0].tolist()

    expected = generated(do_sample=False)
    assert generated(do_sample=False, custom_generate=lookahead_generate) == expected
    assert expected[-7:] == [0] * 7
    with pytest.raises(RuntimeError, match="inf"):
        generated(do_sample=True)
    with pytest.raises(RequestError, match="-inf"):
        generated(do_sample=True, custom_generate=lookahead_generate)


def run_out_on_a_rank(group: Group, folder: str):
    loop = engine_of(ModelRunner(load_model(ModelConfig(path=folder), CPU, "float32"), 2048), group)
    return run_out(loop, RunsOut(5, prefix_only=True)), decode(loop, SAMPLED)[0]


def test_sampling_without_a_possible_token_ends_the_request_on_all_replicas(make_model_dir):
    folder = str(make_model_dir(seed=5, initializer_range=0.15))
    alone = run_out_on_a_rank(Group.alone(), folder)
    assert run_ranks(run_out_on_a_rank, 2, folder) == [alone] * 2


GREEDY = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[2], [42, 24]]},
    {"min_new_tokens": 12},
    {"logit_bias": {24: -9.0, 9: 2.0}},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 9, "bad_words_ids": [[1, 2]]},
]


@pytest.mark.parametrize(
    ("values", "processors"),
    [*((values, ()) for values in GREEDY), ({}, (EvenTokensOnly(),)), (GREEDY[-1], (EvenTokensOnly(),))],
    ids=["+".join(values) for values in GREEDY] + ["own", "all and own"],
)
def test_greedy_with_processors_matches_generate(loop, model, values, processors):
    ids = torch.tensor([PROMPT])
    eos = {24} if "min_new_tokens" in values else {7}  # this model soon generates 24
    theirs = dict(values)
    if bias := theirs.pop("logit_bias", None):
        theirs["sequence_bias"] = [[[token], value] for token, value in bias.items()]
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        eos_token_id=sorted(eos),
        pad_token_id=0,
        logits_processor=list(processors),
        **theirs,
    )
    request = Request(
        PROMPT, LookaheadConfig(5, 4, 5), 20, frozenset(eos), SamplingConfig(**values), processors=processors
    )
    tokens, report = decode(loop, request)
    assert tokens == output[0, len(PROMPT) :].tolist()
    assert tokens != decode(loop, replace(request, sampling=SamplingConfig(), processors=()))[0]


def test_generation_config_applies_unless_overridden(random_model):
    model = random_model("Llama", seed=5, initializer_range=0.15)
    loop = engine_of(ModelRunner(model, 2048))
    request = Request(PROMPT, LookaheadConfig(5, 4, 5), 12, sampling=SamplingConfig(seed=4))
    greedy = decode(loop, request)[0]
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=3, repetition_penalty=1.4)
    given = SamplingConfig(temperature=0.7, top_k=3, repetition_penalty=1.4, seed=4)
    default = decode(loop, request)[0]
    assert default == decode(loop, replace(request, sampling=given))[0] != greedy
    overridden = SamplingConfig(temperature=0, repetition_penalty=1.0)
    assert decode(loop, replace(request, sampling=overridden))[0] == greedy


def test_processor_without_tree_support_is_refused(loop):
    processors = (ClassifierFreeGuidanceLogitsProcessor(1.5),)
    with pytest.raises(ConfigError, match="^ClassifierFreeGuidanceLogitsProcessor: must be left out"):
        decode(loop, Request(PROMPT, PLAIN, 4, processors=processors))
    assert decode(loop, Request(PROMPT, PLAIN, 4, sampling=SamplingConfig(bad_words_ids=[])))[1].num_steps == 4


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.7, top_k=5, seed=8)])
@pytest.mark.parametrize("lookahead", [PLAIN, LookaheadConfig(5, 4, 5)])
def test_logprobs_match_plain_forward_pass(loop, model, sampling, lookahead):
    request = Request(PROMPT, lookahead, 16, sampling=sampling, logprobs=True)
    *runs, _ = loop.run(request)
    tokens = [token for run in runs for token in run.token_ids]
    logprobs = [value for run in runs for value in run.logprobs]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-4, atol=1e-4)
    assert decode(loop, replace(request, logprobs=False))[0] == tokens


def test_time_limit_ends_request_after_current_step(loop):
    def slow() -> bool:
        time.sleep(0.02)
        return False

    request = Request(PROMPT, PLAIN, 200, max_time=0.1)
    tokens, report = decode(loop, request, should_cancel=slow)
    assert report.finish_reason == "time"
    assert 1 <= len(tokens) <= 6
    assert tokens == decode(loop, replace(request, max_time=None, max_new_tokens=len(tokens)))[0]


@pytest.mark.parametrize("num_kept", [1, 2])
def test_stop_condition_may_cut_step_output(loop, num_kept):
    """A stop condition is called once per step output, and may keep a part of it."""
    request = Request(PROMPT, LookaheadConfig(5, 4, 5), 60)
    everything = decode(loop, request)[0]
    seen = []

    def stop(run):
        seen.append(list(run))
        return num_kept if len(run) > 2 else None

    tokens, report = decode(loop, request, stop=stop)
    assert report.finish_reason == "stop"
    before = [token for run in seen[:-1] for token in run]
    assert tokens == before + seen[-1][:num_kept] == everything[: len(tokens)]
