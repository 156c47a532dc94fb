"""Top-k candidates of a prompt's tokens: equal on every replica, and collected only if they pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from support.small_models import random_model
from support.thinned import slow

from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.calibration.step_meter import StepMeasurement, make_greedy_sampler
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.decoder.harvest_size import num_paying, num_to_harvest
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.lookahead.drafter import Drafter
from lp_runtime.lookahead.drafters.best_first.drafter import BestFirstDrafter
from lp_runtime.lookahead.top_k import K
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.harvest import PromptHarvest
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request

PROMPT = tuple(range(3, 40))
FIXED = LookaheadConfig(5, 4, 5, prior="none", prompt_top_k=True)


def make_model() -> ModelRunner:
    return ModelRunner(view_of(random_model(seed=5, initializer_range=0.3)), 16, own_attention=True)


@pytest.fixture(scope="module")
def model() -> ModelRunner:
    return make_model()


def harvest(model: ModelRunner, group: Group, num_harvested: int) -> tuple[np.ndarray, torch.Tensor]:
    """Return (entries, logits of the prompt's last token)."""
    with model.slots.borrowed() as slot:
        model.begin(slot, len(PROMPT))
        harvest = PromptHarvest(model, slot, len(PROMPT), num_harvested, make_greedy_sampler(model), group)
        logits = [harvest.feed(chunk) for chunk in harvest.cut(PROMPT, point=0)][-1]
        assert slot.tokens == list(PROMPT)
        return harvest.share(), logits


def harvest_on(group: Group, num_harvested: int) -> np.ndarray:
    return harvest(make_model(), group, num_harvested)[0]


def decode(group: Group, settings: LookaheadConfig) -> tuple[list[int], list[np.ndarray]]:
    """Return the tokens, and (length, candidates) of the prompts that drafters learned."""
    model, learned = make_model(), []
    learn = BestFirstDrafter.learn_prompt

    class Recorder(BestFirstDrafter):
        def learn_prompt(self, tokens, entries):
            learned.append((len(tokens), entries.copy()))
            learn(self, tokens, entries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lp_runtime.decoder.drafter_factory.BestFirstDrafter", Recorder)
        events = list(Engine(model, group).run(Request(PROMPT, settings, 16)))
    return [token for event in events if not isinstance(event, Report) for token in event.token_ids], learned


@torch.inference_mode()
def test_candidates_match_plain_forward_pass(model):
    logits = model.model(torch.tensor([PROMPT])).logits[0]
    entries, last = harvest(model, Group.alone(), len(PROMPT))
    assert (entries[:, 0] == logits.argmax(-1).numpy()).all()
    assert (np.sort(entries[:, :K]) == np.sort(logits.topk(K).indices.numpy())).all()
    assert torch.allclose(last[0], logits[-1], atol=1e-4)
    assert (harvest(model, Group.alone(), 5)[0] == entries[-5:]).all()
    assert len(harvest(model, Group.alone(), 0)[0]) == 0


@pytest.mark.parametrize("num_harvested", slow([len(PROMPT), 4], [len(PROMPT)]))
def test_replicas_get_same_candidates_as_single_replica(model, num_harvested):
    expected = harvest(model, Group.alone(), num_harvested)[0]
    for entries in run_ranks(harvest_on, 3, num_harvested):
        assert (entries[:, :K] == expected[:, :K]).all()


def test_drafter_learns_prompt_candidates_without_changing_output():
    (plain, nothing), (alone, learned) = decode(Group.alone(), PLAIN), decode(Group.alone(), FIXED)
    assert not nothing and [size for size, _ in learned] == [len(PROMPT)] and len(learned[0][1]) == len(PROMPT)
    assert alone == plain
    for tokens, learned_there in run_ranks(decode, 2, FIXED):
        assert tokens == plain
        assert (learned_there[0][1][:, :K] == learned[0][1][:, :K]).all()


class LearningDrafter:
    learns_prompt = True


@pytest.mark.parametrize(
    ("harvest_ns", "expected"), [(0, len(PROMPT)), (1_000, len(PROMPT)), (100_000, 6), (1 << 40, 0)]
)
def test_harvest_covers_only_tokens_that_pay(model, harvest_ns, expected):
    steps = StepMeasurement(
        np.array([1, 2]), np.array([1_000_000, 1_000_000]), np.array(0), np.array(harvest_ns), np.zeros(2, np.int64)
    )
    calibration = Calibration(model, Group.alone(), None, Measured(steps))
    drafter: Drafter = LearningDrafter()  # type: ignore[assignment]
    assert (
        num_to_harvest(Request(PROMPT, LookaheadConfig(prompt_top_k=True), 128), drafter, model, calibration, 1)
        == expected
    )
    assert num_to_harvest(Request(PROMPT, FIXED, 128), drafter, model, calibration, 1) == len(PROMPT)


def test_nothing_is_collected_for_a_resumed_request_or_a_strict_model(model):
    """A head that runs on more tokens may round differently, which a strict model must not."""
    request, strict = Request(PROMPT, FIXED, 128), ModelRunner(model.model, 16, strict_tokens=8)
    calibration, drafter = Calibration(model, Group.alone(), None), LearningDrafter()
    assert num_to_harvest(request, drafter, model, calibration, 1) == len(PROMPT)
    assert num_to_harvest(replace(request, committed=(5,)), drafter, model, calibration, 1) == 0
    assert num_to_harvest(request, drafter, strict, calibration, 1) == 0


def test_number_of_paying_tokens_is_proportional_to_replicas():
    assert num_paying(1000, 128, 1_000_000, 64_000, 4) == 4 * num_paying(1000, 128, 1_000_000, 64_000, 1) > 0
    assert num_paying(1000, 8, 1_000_000, 100_000, 1) < num_paying(1000, 128, 1_000_000, 100_000, 1)
