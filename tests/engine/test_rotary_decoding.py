"""Models whose rotary factors change with the text length decode as `generate` on a fresh model."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import decode_batch
from support.causal_configs import small_config
from support.causal_types import small_model
from support.engines import engine_of
from support.ranks import run_ranks
from support.small_models import DYNAMIC, LONG, ROPE_THRESHOLD, random_model
from support.stateful import EveryThird
from support.versions import needs_rotary_by_length

from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.dropin.lookahead_generate import lookahead_generate
from lp_runtime.engine.batch import Arrival
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.modules.rotary import library_view
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import make_prefix_cache
from lp_runtime.request.request import Request

pytestmark = needs_rotary_by_length
KINDS = {"dynamic": ("Llama", DYNAMIC), "longrope": ("Llama", LONG), "re-feeding": ("Phi3", LONG)}
LOOKAHEAD = LookaheadConfig(7, 5, 7, prior="none")
CROSSING = [20, ROPE_THRESHOLD - 1, ROPE_THRESHOLD]  # lengths of prompts after which a text crosses the threshold
BEYOND = [ROPE_THRESHOLD + 1, 50]
CHUNK = 8


def always(kind: str) -> list[object]:
    """Return all kinds as parameters: this one always runs, the others with the slow tests."""
    return [pytest.param(each, marks=() if each == kind else pytest.mark.slow) for each in KINDS]


def model_for(kind: str):
    """Return a random model whose texts repeat themselves, so that guesses are right."""
    name, options = KINDS[kind]
    return random_model(name, seed=5, initializer_range=0.2, **options)


@pytest.fixture(scope="module")
def models() -> dict:
    return {kind: model_for(kind) for kind in KINDS}


def prompt_of(length: int, step: int = 7) -> tuple[int, ...]:
    return tuple(3 + step * i % 11 for i in range(length))


def generated(model, request: Request, **options) -> list[int]:
    """Return the new tokens of `generate` on a fresh copy of a model."""
    fresh = copy.deepcopy(library_view(model))
    ids = torch.tensor([request.prompt_ids])
    output = fresh.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=request.max_new_tokens, **options
    )
    return output[0, ids.shape[1] :].tolist()


def decode(engine, request: Request, num_outputs: int | None = None):
    """Return (token ids, report); with `num_outputs`, only the tokens of the first outputs, and None."""
    tokens: list[int] = []
    for number, event in enumerate(engine.run(request)):
        if not hasattr(event, "token_ids"):
            return tokens, event
        if number == num_outputs:
            break
        tokens += event.token_ids
    return tokens, None


def keeping_prefixes(runner: ModelRunner) -> ModelRunner:
    """Give a runner a prefix cache, and return it."""
    with runner.slots.borrowed() as slot:
        runner.begin(slot, 50)
        runner.prefill(slot, [1, 2, 3])  # so that the size of a token is known
    runner.slots.prefixes = make_prefix_cache(runner, 1 << 30, None)
    return runner


lookaheads = st.builds(
    LookaheadConfig,
    W=st.integers(0, 8),
    N=st.integers(2, 6),
    G=st.integers(0, 6),
    drafter=st.sampled_from(["paper", "full"]),
    prior=st.just("none"),
    budget=st.sampled_from([None, None, 5, 20]),
)
requests = st.builds(
    Request,
    prompt_ids=st.builds(prompt_of, st.one_of(st.sampled_from(CROSSING + BEYOND), st.integers(1, 60))),
    lookahead=lookaheads,
    max_new_tokens=st.integers(1, 32),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(requests, st.sampled_from([CHUNK, 2048]))
def test_output_matches_generate_with_any_settings(models, kind, request, chunk):
    model = models[kind]
    tokens, _ = decode(engine_of(ModelRunner(model, chunk)), request)
    assert tokens == generated(model, request)


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_factors_change_output_and_guesses_save_steps(models, kind):
    """Without these two conditions the other tests of this file would show nothing."""
    model = models[kind]
    request = Request(prompt_of(ROPE_THRESHOLD), LOOKAHEAD, 30)
    tokens, report = decode(engine_of(ModelRunner(model, CHUNK)), request)
    assert report.num_steps < 25
    rope = LONG["rope_parameters"]
    same_factors = {"rope_parameters": rope | {"long_factor": rope["short_factor"]}}
    name, options = KINDS[kind]
    options = options | ({"max_position_embeddings": 256} if kind == "dynamic" else same_factors)
    unlike = random_model(name, seed=5, initializer_range=0.2, **options)
    assert generated(unlike, request) != tokens


@pytest.mark.parametrize("kind", always("dynamic"))
def test_resume_on_either_side_of_threshold_matches_generate(models, kind):
    model = models[kind]
    request = Request(prompt_of(26), LOOKAHEAD, 24)
    expected = generated(model, request)
    for num_left in (1, 6, 7, 20):
        runner = ModelRunner(model, CHUNK)
        for _ in range(2):  # on another replica, and on one whose slot holds the tokens
            rest, _ = decode(engine_of(runner), replace(request, committed=tuple(expected[:num_left])))
            assert expected[:num_left] + rest == expected


@pytest.mark.parametrize("kind", always("longrope"))
def test_resume_calls_stateful_processors_for_committed_tokens(models, kind):
    model = models[kind]
    for length, attempts in ((26, (2, 6, 7, 20)), (40, (5,))):
        request = Request(prompt_of(length), LOOKAHEAD, 24, processors=(EveryThird(),))
        expected = generated(model, request, logits_processor=[EveryThird()])
        for num_left in attempts:
            again = replace(request, committed=tuple(expected[:num_left]))
            assert expected[:num_left] + decode(engine_of(ModelRunner(model, CHUNK)), again)[0] == expected


@pytest.mark.parametrize("kind", always("re-feeding"))
def test_prefixes_with_other_rotary_factors_are_not_read(models, kind):
    """Beginnings of one text, on both sides of the threshold, read only prefixes with their own factors."""
    model = models[kind]
    runner = keeping_prefixes(ModelRunner(model, CHUNK))
    engine, text = engine_of(runner), prompt_of(60)
    read = {}
    for length in (25, 60, 30, 59, 58, 31):
        request = Request(text[:length], LOOKAHEAD, 14)
        tokens, report = decode(engine, request)
        assert tokens == generated(model, request)
        read[length] = report.cached_tokens
    # With two sets of factors, long prompts read prefixes of long ones; if each length has its own factors, none.
    # A model that re-feeds a text beyond the threshold did so with the first text, so long prompts read that one, too.
    assert (
        read
        == {
            "dynamic": {25: 0, 60: 0, 30: 25, 59: 0, 58: 0, 31: 25},
            "longrope": {25: 0, 60: 0, 30: 25, 59: 58, 58: 57, 31: 25},
            "re-feeding": {25: 0, 60: 25, 30: 25, 59: 58, 58: 57, 31: 25},
        }[kind]
    )
    # The next turn continues from the previous answer; below the threshold, only up to it.
    answer = tokens[:10]
    turn = Request((*text[:31], *answer, 5), LOOKAHEAD, 20)
    tokens, report = decode(engine, turn)
    assert tokens == generated(model, turn)
    runner.slots.clear()  # as on a replica that has decoded other requests since
    num_before = runner.num_prefilled_tokens
    rest, _ = decode(engine, replace(turn, committed=tuple(tokens[:8])))
    assert tokens[:8] + rest == tokens and runner.num_prefilled_tokens - num_before < 20


@pytest.mark.parametrize("kind", always("longrope"))
def test_batched_sequences_of_different_lengths_match_generate(models, kind):
    model = models[kind]
    asked = [Request(prompt_of(length, step), LOOKAHEAD, 20) for length, step in ((28, 7), (5, 3), (45, 5), (31, 2))]
    arrivals = [Arrival(number, each) for number, each in enumerate(asked)]
    runner = ModelRunner(view_of(model), CHUNK, own_attention=True)
    assert runner.supports_batching
    actual = decode_batch(engine_of(runner), {1: arrivals[:2], 4: arrivals[2:]})
    assert [actual[number][0] for number in range(4)] == [generated(model, each) for each in asked]


@pytest.mark.parametrize("kind", always("re-feeding"))
def test_samples_match_decoding_one_token_per_step(models, kind):
    engine = engine_of(ModelRunner(models[kind], CHUNK))
    for length in (20, 40):
        request = Request(prompt_of(length), LOOKAHEAD, 20, sampling=SamplingConfig(temperature=0.7, seed=4))
        assert decode(engine, request)[0] == decode(engine, replace(request, lookahead=PLAIN))[0]


@pytest.mark.parametrize("kind", ["dynamic", pytest.param("longrope", marks=pytest.mark.slow)])
def test_strict_passes_match_generate(models, kind):
    model = models[kind]
    runner = ModelRunner(model, CHUNK, strict_tokens=16)
    for length in (26, 40):
        request = Request(prompt_of(length), LOOKAHEAD, 20)
        expected = generated(model, request)
        assert decode(engine_of(runner), request)[0] == expected
        rest, _ = decode(engine_of(runner), replace(request, committed=tuple(expected[:12])))
        assert expected[:12] + rest == expected


@pytest.mark.slow
def test_chain_models_match_generate_and_read_prefixes():
    """Models with states and changing rotary factors decode as `generate`, and read prefixes with states."""
    dynamic = DYNAMIC | {"max_position_embeddings": 64}
    model = small_model(small_config("falcon_h1", dynamic), seed=3)
    runner = ChainRunner(model, CHUNK)
    assert runner.rotary_lengths.threshold == 64
    engine = engine_of(keeping_prefixes(runner))
    settings, text, read = LookaheadConfig(budget=5, prior="none"), prompt_of(90), {}
    for length, num_new in ((40, 30), (62, 12), (90, 12), (63, 5)):
        request = Request(text[:length], settings, num_new)
        tokens, report = decode(engine, request)
        assert tokens == generated(model, request)
        if not read:
            with runner.slots.borrowed() as slot:
                states = slot.cache.states()
            num_bytes = 64 * runner.cache_bytes_per_token + states.num_bytes
            assert runner.slots.prefixes.num_bytes == num_bytes, "states after the prompt, and none beyond the length"
        read[length] = report.cached_tokens
        rest, _ = decode(engine, replace(request, committed=tuple(tokens[:4])))
        assert tokens[:4] + rest == tokens
    assert read == {40: 0, 62: 40, 90: 0, 63: 62}


def on_a_rank(group) -> dict[str, list[list[int]]]:
    results = {}
    for kind in ("dynamic", "re-feeding"):
        engine = engine_of(ModelRunner(model_for(kind), CHUNK), group)
        results[kind] = [decode(engine, each)[0] for each in shared_requests()]
    return results


def shared_requests() -> list[Request]:
    asked = [Request(prompt_of(length), LOOKAHEAD, 20) for length in (24, 45)]
    return [*asked, replace(asked[0], sampling=SamplingConfig(temperature=0.7, seed=4))]


@pytest.mark.slow
def test_two_replicas_match_generate_and_single_replica(models):
    expected = {}
    for kind in ("dynamic", "re-feeding"):
        model = models[kind]
        *greedy, sampled = shared_requests()
        expected[kind] = [generated(model, each) for each in greedy]
        expected[kind].append(decode(engine_of(ModelRunner(model, CHUNK)), sampled)[0])
    assert run_ranks(on_a_rank, 2) == [expected, expected]


@pytest.mark.parametrize("kind", always("dynamic"))
def test_drop_in_matches_generate_and_leaves_model_unchanged(models, kind):
    """The drop-in shares the caller's model: `generate` gives the same output afterwards."""
    model = copy.deepcopy(library_view(models[kind]))
    ids = torch.tensor([prompt_of(26), prompt_of(26, 5)])
    options = {"do_sample": False, "max_new_tokens": 16}
    expected = [generated(model, Request(tuple(row), LOOKAHEAD, 16)) for row in ids.tolist()]
    ours = model.generate(
        ids, attention_mask=torch.ones_like(ids), custom_generate=lookahead_generate, W=5, N=4, G=5, **options
    )
    assert ours[:, 26:].tolist() == expected
    after = model.generate(ids[:1], attention_mask=torch.ones_like(ids[:1]), **options)
    assert after[:, 26:].tolist() == expected[:1]
