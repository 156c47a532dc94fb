"""An error on one replica ends the request with the same error on all of them; the group continues."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.engines import engine_of
from support.ranks import run_ranks
from transformers import AutoModelForCausalLM, LogitsProcessor

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.decoder.shared_error import shared_error
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import ConfigError, LookaheadError, RequestError
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import StepOutput
from lp_runtime.request.request import Request

REQUEST = Request((3, 5, 7, 11, 3, 5, 7), LookaheadConfig(W=7, N=5, G=7), 12)
BACKENDS = ["shared", "gloo", "two machines"]


class OwnError(RequestError):
    """An error of a caller's processor."""


class Fails(LogitsProcessor):
    """Raises when the text has `num_tokens` tokens. Called on one replica, since it may keep a state."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.num_tokens:
            raise OwnError(f"no more than {self.num_tokens} tokens")
        return scores


def errors_on_rank(group: Group) -> list[tuple[type[LookaheadError], str]]:
    """Return the errors that a rank learns of if some of the ranks have one."""
    results = []
    for errors in ({2: RequestError("a" * 5000)}, {1: ConfigError("one"), 2: ConfigError("two")}, {0: OwnError("é")}):
        error = shared_error(errors.get(group.rank), group)
        results.append((type(error), str(error)))
    return results


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_replicas_get_error_of_first_failing_rank(backend):
    expected = [(RequestError, "a" * 5000), (ConfigError, "one"), (RequestError, "é")]
    assert run_ranks(errors_on_rank, 3, backend=backend) == [expected] * 3


def decoded(group: Group, folder: str) -> list[object]:
    """Return the errors of failing requests on a rank, each followed by the tokens of a plain request."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = engine_of(ModelRunner(model, 2048), group)
    results: list[object] = []
    for num_tokens in (len(REQUEST.prompt_ids), len(REQUEST.prompt_ids) + 5):
        try:
            list(engine.run(replace(REQUEST, processors=(Fails(num_tokens),))))
        except LookaheadError as error:
            results.append((type(error), str(error)))
        outputs = engine.run(REQUEST)
        results.append([token for each in outputs if isinstance(each, StepOutput) for token in each.token_ids])
    return results


@pytest.mark.slow
def test_failing_processor_ends_only_its_request_on_all_replicas(demo_model_dir):
    alone, *others = [decoded(Group.alone(), str(demo_model_dir)), *run_ranks(decoded, 2, str(demo_model_dir))]
    assert (alone[0][1], alone[2][1]) == ("no more than 7 tokens", "no more than 12 tokens")
    assert alone[1] == alone[3] and len(alone[1]) == REQUEST.max_new_tokens
    kinds = [[each[0] for each in (actual[0], actual[2])] for actual in (alone, *others)]
    assert kinds == [[OwnError] * 2, [RequestError] * 2, [RequestError] * 2]
    for actual in others:
        assert [actual[0][1], actual[1], actual[2][1], actual[3]] == [alone[0][1], alone[1], alone[2][1], alone[3]]
