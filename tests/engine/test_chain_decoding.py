"""Decoding by chains: the tokens of `generate`, and one text per seed, on any number of replicas."""

from dataclasses import replace

import pytest
import torch
from support.causal_types import compare
from support.chain_models import RECURRENT, decode, decode_type, model_of, request_of
from support.engines import engine_of
from support.ranks import run_ranks
from support.thinned import slow, thinned

from lp_runtime.calibration import step_meter
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import ConfigError
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.request.request import Request

NUM_REQUESTS = 6


@pytest.mark.slow
@pytest.mark.parametrize("model_type", thinned(len(RECURRENT), RECURRENT))
def test_drop_in_matches_generate(model_type):
    outcome = compare(model_of(model_type), prompts=(1, 30))
    assert outcome.kind == "exact", outcome.reason


def decode_on_a_rank(group: Group, model_type: str, requests: list[Request]):
    """Decode requests on a rank that measures small steps only; larger ones are estimated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_meter, "MIN_MEASURED_TOKENS", 4)
        patch.setattr(step_meter, "MEASURE_SECONDS", 0.0)
        return decode_type(group, model_type, requests)


@pytest.mark.parametrize(
    ("num_replicas", "model_type"),
    thinned(6, slow([2, 1, 3], [1, 3]), slow(["bamba", "qwen3_next"], ["qwen3_next"])),  # 10 s and more each
)
def test_outputs_do_not_depend_on_settings_or_replicas(num_replicas, model_type):
    requests = [replace(request_of(number), max_new_tokens=10) for number in range(4)]
    plain = decode(Group.alone(), model_of(model_type), [replace(each, lookahead=PLAIN) for each in requests])
    for actual in run_ranks(decode_on_a_rank, num_replicas, model_type, requests):
        assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in plain]


@pytest.mark.slow
def test_accepted_chains_save_steps():
    requests = [request_of(number) for number in range(NUM_REQUESTS)]
    actual = decode(Group.alone(), model_of("lfm2_moe"), requests)
    assert sum(report.num_steps for _, report in actual) < 0.8 * sum(len(tokens) for tokens, _ in actual)


def test_resumed_request_continues_after_committed_tokens():
    request = replace(request_of(1), lookahead=LookaheadConfig(tokens=5), max_new_tokens=20)
    model = model_of("bamba")
    ((tokens, _),) = decode(Group.alone(), model, [request])
    ((rest, _),) = decode(Group.alone(), model, [replace(request, committed=tuple(tokens[:9]))])
    assert tokens[:9] + rest == tokens


def test_paper_drafter_is_refused():
    request = Request((9, 10, 11), LookaheadConfig(drafter="paper"), 8)
    with pytest.raises(ConfigError, match="lookahead.drafter=paper"):
        list(engine_of(ChainRunner(model_of("lfm2_moe"), 7)).run(request))


@pytest.mark.slow
def test_prompt_logprobs_match_plain_forward_pass():
    model = model_of("qwen3_next")
    request = replace(request_of(0), logprobs=True, prompt_logprobs=True, max_new_tokens=1)
    output, _ = engine_of(ChainRunner(model, 7)).run(request)
    ids = torch.tensor([request.prompt_ids])
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])
    actual = output.logprobs[0].prompt
    torch.testing.assert_close(
        torch.tensor(list(map(float, actual[-len(expected) :]))), expected[:, 0], rtol=0, atol=1e-4
    )
