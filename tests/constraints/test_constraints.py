"""Constrained text equals masked decoding of one token per step, with any drafts and any LP degree."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.batches import decode_batch
from support.constrained import (
    EOS,
    TEXTS,
    WatchedGrammars,
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
from support.small_models import random_model
from support.thinned import thinned

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.dropin.lookahead_generate import lookahead_generate
from lp_runtime.engine.batch import Arrival
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import ConfigError, ConstraintError
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import MODEL
from lp_runtime.request.request import Request

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


@pytest.mark.parametrize("seed", thinned(2, range(8)))
def test_constrained_text_matches_single_token_steps(seed):
    draw, model = random_draw(random.Random(seed)), runner("Llama")
    tokens, _, reason = decode(model, draw.request, Group.alone())
    assert tokens == reference(model.model, draw)
    assert reason != "eos" or is_valid(draw.constraint, tokens)


def on_rank(group: Group, seeds: list[int]) -> list[list[int]]:
    return [decode(runner("Llama"), random_draw(random.Random(seed)).request, group)[0] for seed in seeds]


def test_two_replicas_give_the_same_text():
    seeds = [20, 21]
    expected = on_rank(Group.alone(), seeds)
    assert run_ranks(on_rank, 2, seeds) == [expected, expected]


@pytest.mark.parametrize("drafter", ["full", "paper", "prompt_lookup", "recycling"])
def test_forced_tokens_are_drafted_and_forbidden_tokens_are_not(drafter):
    request = record_request(lookahead=LookaheadConfig(W=5, N=6, G=5, drafter=drafter), trace=True)
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
    assert sum(report.counts.accepted[forced]) >= 5, text
    actual = Counter(source for output in outputs for source in output.sources)
    accepted = dict(zip(report.counts.sources, map(sum, report.counts.accepted), strict=True))
    assert actual.pop(MODEL) >= len(outputs) - 1 and actual == Counter(accepted)
    assert all(len(output.sources) == len(output.token_ids) for output in outputs)
    plain = decode(model, replace(request, lookahead=PLAIN), Group.alone())
    assert text == plain[0] and report.num_steps < 0.8 * plain[1]


def masked_on_rank(group: Group, drafter: str) -> list[tuple[list[int], int, int]]:
    """Return (numbers of nodes in each query for masks, nodes owned, nodes of the tree) for each step."""
    steps, asked, model = [], [], runner("Llama")

    def observe(nodes, step, rank, samples):
        steps.append((asked.copy(), step.shares.num_owned[rank], len(step.tree) - step.tree.root))
        asked.clear()

    watched = WatchedGrammars(grammars(), lambda nodes: asked.append(len(nodes)))
    engine = Engine(model, group, Calibration(model, group, cache_dir=None), grammars=watched)
    request = record_request(lookahead=LookaheadConfig(W=7, N=5, G=7, drafter=drafter))
    for _ in engine.run(request, observe=observe):
        pass
    return steps


@pytest.mark.parametrize("drafter", ["full", "paper"])
def test_replica_fills_only_the_masks_of_its_nodes(drafter):
    """Masks are filled after the pass; drafter `full` fills the root's and forced tokens' masks before it."""
    both = run_ranks(masked_on_rank, 2, drafter)
    for ranks in zip(*both, strict=True):
        assert sum(num_owned for _, num_owned, _ in ranks) == ranks[0][2]
        for asked, num_owned, _ in ranks:
            assert asked[-1] == num_owned
            assert len(asked) <= 2 if drafter == "full" else len(asked) == 1
    is_shared = any(min(num_owned for _, num_owned, _ in ranks) > 0 for ranks in zip(*both, strict=True))
    assert is_shared or drafter == "paper"  # its trees are chains under such a strict constraint


@pytest.mark.parametrize("seed", thinned(2, range(30, 34)))
def test_resumed_request_continues_after_committed_tokens(seed):
    """A retry after any committed token continues the same text, greedy or sampled, with any drafter."""
    draw, model = random_draw(random.Random(seed)), runner("Llama")
    whole, rng = reference(model.model, draw), random.Random(seed)
    for done in {1, len(whole) - 1, rng.randrange(len(whole))} - {0}:
        lookahead = rng.choice([draw.request.lookahead, PLAIN, LookaheadConfig(drafter="full")])
        again = replace(draw.request, committed=tuple(whole[:done]), lookahead=lookahead)
        rest, _, _ = decode(model, again, Group.alone())
        assert rest == whole[done:]


def test_resumed_request_replays_ordered_processors():
    """Their input does not depend on the constraint's mask, which is applied after them."""
    model, request = runner("Llama"), record_request(processors=(LikesItsCalls(),))
    whole, _, _ = decode(model, request, Group.alone())
    assert len(whole) > 5
    for done in (1, len(whole) // 2, len(whole) - 1):
        rest, _, _ = decode(model, replace(request, committed=tuple(whole[:done])), Group.alone())
        assert rest == whole[done:]


def strict_runner() -> ModelRunner:
    """Return a runner with passes of equal size, and with a bfloat16 model, in which ties are common."""
    model = random_model("Llama", seed=1, initializer_range=0.3).to(torch.bfloat16)
    return ModelRunner(model, prefill_chunk=16, strict_tokens=16, own_attention=True)


def strict_request(seed: int) -> Request:
    return replace(random_draw(random.Random(seed)).request, logprobs=True, max_new_tokens=10)


def strict_on_rank(group: Group, seeds: list[int]) -> list[list[tuple[int, float]]]:
    model, results = strict_runner(), []
    for seed in seeds:
        engine = Engine(model, group, Calibration(model, group, cache_dir=None), grammars=grammars())
        *outputs, _ = engine.run(strict_request(seed))
        results.append([pair for output in outputs for pair in zip(output.token_ids, output.logprobs, strict=True)])
    return results


@pytest.mark.slow
def test_strict_replicas_equal_single_token_steps_bitwise():
    """In strict bfloat16, tokens and log-probabilities have the same bits as with one token per step."""
    seeds, model = [42, 43], strict_runner()
    expected = []
    for seed in seeds:
        request = replace(strict_request(seed), lookahead=PLAIN)
        engine = Engine(model, Group.alone(), Calibration(model, Group.alone(), cache_dir=None), grammars=grammars())
        *outputs, _ = engine.run(request)
        expected.append([pair for output in outputs for pair in zip(output.token_ids, output.logprobs, strict=True)])
    assert run_ranks(strict_on_rank, 2, seeds) == [expected, expected]


def test_batched_requests_use_separate_constraints():
    model = runner("Llama")
    requests = {
        0: record_request(sampling=SamplingConfig(temperature=1.0, seed=4)),
        1: record_request(constraint=compile_for_test(ConstraintConfig(choice=["ab", "cd"]))),
        2: record_request(constraint=None),
    }
    engine = Engine(model, Group.alone(), Calibration(model, Group.alone(), cache_dir=None), grammars=grammars())
    actual = decode_batch(engine, {1: [Arrival(key, request) for key, request in requests.items()]})
    for key, request in requests.items():
        assert actual[key][0] == decode(model, request, Group.alone())[0]


@pytest.mark.parametrize(
    ("drafter", "sampling", "grammar"),
    thinned(
        3,
        ["full", "paper", "prompt_lookup"],
        [SamplingConfig(), SamplingConfig(temperature=1.0, top_p=0.9, seed=3)],
        ['"ab" ("é" | "cd" "é")', '([a-z] ", "){3} "é"'],
    ),
)
def test_dead_end_without_a_matching_token_is_reported(drafter, sampling, grammar):
    """No token of the vocabulary can begin `é`, which a check of the grammar alone cannot know."""
    constraint = compile_for_test(ConstraintConfig(grammar=f"root ::= {grammar}"))
    lookahead = LookaheadConfig(W=5, N=4, G=5, drafter=drafter)
    request = record_request(constraint=constraint, sampling=sampling, lookahead=lookahead, logprobs=True)
    with pytest.raises(ConstraintError, match="reached a dead end: no token can follow the text so far"):
        decode(runner("Llama"), request, Group.alone())


def test_dead_end_in_a_draft_gives_an_empty_mask():
    """A text that never reaches the dead end is decoded normally."""
    guide = grammars().guide(compile_for_test(ConstraintConfig(grammar='root ::= "a" | "b" "é"')))
    tokens, parents = np.array([1, 1]), np.array([-1, 0])  # b after any root
    end, dead = guide.masks(tokens, parents, 0, [0, 1])
    assert end.any() and not dead.any()
    guide.advance([0, EOS])
    with pytest.raises(ConstraintError, match="token 1 was chosen, which the constraint forbids: do the logits"):
        guide.advance([1])


class LikesItsCalls:
    """An ordered processor: the scores that it adds depend on the number of its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + torch.linspace(0, 3, scores.shape[1]).roll(self.calls)[None]


def test_ordered_processors_stop_and_logprobs_match_plain_decoding():
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


def test_custom_generate_applies_the_constraint():
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
