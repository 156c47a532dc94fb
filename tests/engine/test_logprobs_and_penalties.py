"""Options of the OpenAI API: presence and frequency penalties, top and prompt log-probabilities."""

from __future__ import annotations

import pickle

import pytest
import torch
from support.small_models import random_model
from support.thinned import thinned
from transformers import PreTrainedModel

from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.errors import ConfigError
from lp_runtime.launchers.wire.messages import Progress
from lp_runtime.request.output import Logprob, StepOutput

NUM_TOKENS = 24
PROMPT = [11, 3, 5, 7, 20, 33, 9]
SETTINGS = [
    LookaheadConfig(7, 5, 7, prior="none"),
    LookaheadConfig(5, 4, 5, drafter="paper"),
    LookaheadConfig(drafter="prompt_lookup"),
]
PENALTIES = [(0.0, 1.9), (2.0, 0.5), (-0.5, 2.0)]


@pytest.fixture(scope="module")
def hf() -> PreTrainedModel:
    """A random model whose texts repeat themselves, so that guesses are right and penalties matter."""
    return random_model(seed=5, initializer_range=0.3)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def runtime(hf, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("model")
    hf.save_pretrained(folder)
    with LookaheadRuntime(folder, gpus=request.param, device="cpu", dtype="float32", lookahead=SETTINGS[0]) as runtime:
        yield runtime


def logits_after(model, ids: list[int]) -> torch.Tensor:
    """Return [len(ids), V] logits of one forward pass without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def penalised_greedy(model, prompt: list[int], presence: float, frequency: float) -> list[int]:
    """Decode greedily by logit - frequency * count - presence * (count > 0), as the OpenAI API defines."""
    new: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = logits_after(model, prompt + new)[-1].clone()
        for token in set(new):
            logits[token] -= frequency * new.count(token) + presence
        new.append(int(logits.argmax()))
    return new


@pytest.mark.parametrize("penalties", thinned(8, PENALTIES))
def test_penalties_follow_openai_definition_at_any_parallelism(runtime, hf, penalties):
    presence, frequency = penalties
    expected = penalised_greedy(hf, PROMPT, presence, frequency)
    plain = runtime.generate(PROMPT, NUM_TOKENS, eos=False, lookahead=PLAIN)
    assert expected != plain.token_ids, "the penalty matters"
    sampling = SamplingConfig(presence_penalty=presence, frequency_penalty=frequency)
    for lookahead in SETTINGS:
        done = runtime.generate(PROMPT, NUM_TOKENS, eos=False, sampling=sampling, lookahead=lookahead)
        assert done.token_ids == expected
    sampled = SamplingConfig(temperature=0.9, seed=3, presence_penalty=presence, frequency_penalty=frequency)
    one_by_one = runtime.generate(PROMPT, NUM_TOKENS, eos=False, sampling=sampled, lookahead=PLAIN)
    several = runtime.generate(PROMPT, NUM_TOKENS, eos=False, sampling=sampled, lookahead=SETTINGS[0])
    assert several.token_ids == one_by_one.token_ids


def test_top_and_prompt_logprobs_match_plain_forward_pass(runtime, hf):
    """A prompt of several chunks; sampled tokens are not always the likeliest; a penalty must not show."""
    prompt = PROMPT * 11
    sampling = SamplingConfig(temperature=1.0, seed=5, presence_penalty=1.0)
    options = {"eos": False, "logprobs": True, "sampling": sampling}
    plain = runtime.generate(prompt, NUM_TOKENS, lookahead=PLAIN, **options)
    done = runtime.generate(prompt, NUM_TOKENS, lookahead=SETTINGS[0], top_logprobs=20, prompt_logprobs=True, **options)
    assert done.token_ids == plain.token_ids and done.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    whole = prompt + done.token_ids
    expected = logits_after(hf, whole).log_softmax(-1)
    first = done.logprobs[0]
    assert len(first.prompt) == len(prompt) - 1 and not any(each.prompt for each in done.logprobs[1:])
    num_unlikely = 0
    for place, value in enumerate([*first.prompt, *done.logprobs]):
        row = expected[place]
        assert float(value) == pytest.approx(float(row[whole[place + 1]]), abs=1e-3)
        assert [each for _, each in value.top] == pytest.approx(row.topk(20).values.tolist(), abs=1e-3)
        assert [float(row[token]) for token, _ in value.top] == pytest.approx([v for _, v in value.top], abs=1e-3)
        num_unlikely += value.top[0][0] != whole[place + 1]
    assert num_unlikely > 5


def test_prompt_of_one_token_has_no_prompt_logprobs(runtime):
    done = runtime.generate([7], 3, eos=False, logprobs=True, prompt_logprobs=True, top_logprobs=1)
    assert done.logprobs[0].prompt == () and len(done.logprobs) == 3
    assert done.token_ids == runtime.generate([7], 3, eos=False).token_ids


def test_logprob_keeps_all_fields_when_pickled():
    value = Logprob(-0.5, ((1, -0.5), (2, -3.0)), (Logprob(-2.0),))
    back = pickle.loads(pickle.dumps(value))
    assert back == -0.5 and back.top == value.top and back.prompt == (-2.0,)
    # When a replica is lost, the others report undelivered tokens, with all of this, too.
    progress = Progress()
    progress.add(StepOutput([7], [value]))
    kept = pickle.loads(pickle.dumps(progress)).logprobs
    assert kept[0].top == value.top and kept[0].prompt == value.prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21: must be at most 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs=-1"),
        ({"top_logprobs": 2}, "top_logprobs: only with logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs: only with logprobs"),
    ],
)
def test_invalid_logprob_options_are_refused(runtime, options, message):
    with pytest.raises(ConfigError, match=message):
        runtime.generate([7], 3, **options)


def test_penalties_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"sampling.presence_penalty=2.5: must be in \[-2, 2\]"):
        SamplingConfig(presence_penalty=2.5)
