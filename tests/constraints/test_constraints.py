"""Constrained text equals masked decoding of one token a step, whatever is drafted and by how many replicas."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.batches import decode_batch
from support.constrained import (
    EOS,
    TEXTS,
    compile_for_test,
    decode,
    grammars,
    is_valid,
    random_draw,
    reference,
    runner,
    tokenizer,
)
from support.ranks import run_ranks

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.distributed.group import Group
from lp_runtime.engine.batch import Arrival
from lp_runtime.engine.calibration import Calibration
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.request import Request
from lp_runtime.errors import ConfigError
from lp_runtime.hf_generate import lookahead_generate

RECORD = ConstraintConfig(
    json_schema={
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "tags": {"type": "array", "items": {"enum": ["ab", "abcd"]}},
        },
        "required": ["name", "tags"],
    }
)


def record_request(**more) -> Request:
    settings = {"max_new_tokens": 40, "eos_token_ids": frozenset({EOS}), "constraint": compile_for_test(RECORD)}
    return Request((1, 2, 3), **{"lookahead": LookaheadConfig(W=5, N=4, G=5)} | settings | more)


@pytest.mark.parametrize("seed", range(8))
def test_any_settings_give_the_text_of_one_token_a_step(seed):
    draw, model = random_draw(random.Random(seed)), runner("Llama")
    tokens, _, reason = decode(model, draw.request, Group.alone())
    assert tokens == reference(model.model, draw)
    assert reason != "eos" or is_valid(draw.constraint, tokens)


def on_rank(group: Group, seeds: list[int]) -> list[list[int]]:
    return [decode(runner("Llama"), random_draw(random.Random(seed)).request, group)[0] for seed in seeds]


def test_replicas_give_the_same_text():
    seeds = [20, 21, 22, 23]
    expected = on_rank(Group.alone(), seeds)
    assert run_ranks(on_rank, 2, seeds) == [expected, expected]


@pytest.mark.parametrize("drafter", ["full", "paper", "prompt_lookup", "recycling"])
def test_what_is_forced_is_drafted_and_what_is_forbidden_is_not_fed(drafter):
    request = record_request(lookahead=LookaheadConfig(W=5, N=6, G=5, drafter=drafter))
    model = runner("Llama")
    engine = Engine(model, Group.alone(), Calibration(model, Group.alone(), cache_dir=None), grammars=grammars())
    text: list[int] = []
    guide = grammars().guide(request.constraint)

    def observe(nodes, step, rank, samples):
        tree = step.tree
        for node in range(tree.root + 1, len(tree)):
            path = tree.path(node)
            assert guide.allows(path[:-1], path[-1])
            assert path[-1] != EOS
        committed = [tree.tokens[node] for node in nodes[1:]] + [
            int(samples.values[nodes[-1] - tree.root, 0]) & 0xFFFFFFFF
        ]
        guide.advance(committed)

    *outputs, report = engine.run(request, observe=observe)
    text = [token for output in outputs for token in output.token_ids]
    forced = report.counts.sources.index("forced")
    assert report.counts.accepted[forced].sum() >= 5, text
    plain = decode(model, replace(request, lookahead=PLAIN), Group.alone())
    assert text == plain[0] and report.num_steps < 0.8 * plain[1]


def test_resuming_goes_on_behind_what_is_committed():
    request, model = record_request(), runner("Llama")
    whole, _, _ = decode(model, request, Group.alone())
    for done in (1, len(whole) // 2):
        rest, _, _ = decode(model, replace(request, committed=tuple(whole[:done])), Group.alone())
        assert rest == whole[done:]


def test_requests_of_a_batch_keep_their_own_constraints():
    model = runner("Llama")
    requests = {
        0: record_request(sampling=SamplingConfig(temperature=1.0, seed=4)),
        1: record_request(constraint=compile_for_test(ConstraintConfig(choice=["ab", "cd"]))),
        2: record_request(constraint=None),
    }
    engine = Engine(model, Group.alone(), Calibration(model, Group.alone(), cache_dir=None), grammars=grammars())
    found = decode_batch(engine, {1: [Arrival(key, request) for key, request in requests.items()]})
    for key, request in requests.items():
        assert found[key][0] == decode(model, request, Group.alone())[0]


class LikesItsCalls:
    """An ordered processor: what it adds depends on how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + torch.linspace(0, 3, scores.shape[1]).roll(self.calls)[None]


def test_ordered_processors_stop_strings_and_log_probabilities():
    model, request = runner("Llama"), record_request(logprobs=True, top_logprobs=2)
    outputs = []
    for lookahead in (request.lookahead, PLAIN):
        each = replace(request, lookahead=lookahead, processors=(LikesItsCalls(),))
        engine = Engine(model, Group.alone(), Calibration(model, Group.alone(), cache_dir=None), grammars=grammars())
        *steps, _ = engine.run(
            each, stop=lambda committed: next((i for i, t in enumerate(committed, 1) if TEXTS[t] in ('"]', "]")), None)
        )
        outputs.append(
            [(t, round(float(p), 4)) for step in steps for t, p in zip(step.token_ids, step.logprobs, strict=True)]
        )
    assert outputs[0] == outputs[1] and len(outputs[0]) > 5


def test_the_drop_in():
    model = runner("Llama").model
    ids = torch.tensor([[1, 2, 3], [5, 6, 7]])
    options = {"max_new_tokens": 40, "eos_token_id": EOS, "pad_token_id": 0, "constraint": RECORD}
    given = {"attention_mask": torch.ones_like(ids), "custom_generate": lookahead_generate, "do_sample": False}
    output = model.generate(ids, **given, **options, constraint_tokenizer=tokenizer(), W=5, N=4, G=5)
    for row in (0, 1):
        tokens = [token for token in output[row, 3:].tolist() if token]
        request = record_request()
        expected = decode(runner("Llama"), replace(request, prompt_ids=tuple(ids[row].tolist())), Group.alone())[0]
        assert tokens == [token for token in expected if token]
    with pytest.raises(ConfigError, match="constraint_tokenizer"):
        model.generate(ids, **given, **options)
