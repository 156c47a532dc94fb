"""Draft tables that requests share outlive a request that fails, is left early or is resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.batches import KEEPING, decode_batch
from support.engines import engine_of
from support.ranks import run_ranks
from support.small_models import random_model
from transformers import LogitsProcessor

from lp_runtime.constraints.compiled import CompiledConstraint
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.batch import Arrival
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import RequestError
from lp_runtime.model.kv_cache.slots import SlotPool
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request

REQUEST = Request(tuple(3 + 7 * i % 53 for i in range(30)), KEEPING, 24)
NUM_BEFORE = 1  # new tokens before a request fails


class Fails(LogitsProcessor):
    """Raises an error after NUM_BEFORE new tokens, if there is one."""

    prefix_only = True

    def __init__(self, error: Exception | None):
        self._error = error

    def __call__(self, input_ids, scores):
        if self._error is not None and input_ids.shape[1] >= len(REQUEST.prompt_ids) + NUM_BEFORE:
            raise self._error
        return scores


class NoGrammar:
    """Grammars that refuse every constraint."""

    def guide(self, *_: object) -> None:
        raise RequestError("refused")


def lacks_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no memory")


def end_early(engine: Engine, group: Group, how: str) -> None:
    """End a request before its time: left by the caller, or with an error."""
    if how == "left":
        events = engine.run(REQUEST)
        next(events)
        events.close()
        return
    request = REQUEST
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RequestError):
        if how == "refused":
            request = replace(REQUEST, constraint=CompiledConstraint("any", b""))
        elif how == "without a slot":
            patch.setattr(SlotPool, "acquire", lacks_memory)
        elif how == "without a drafter":
            patch.setattr("lp_runtime.decoder.drafter_factory.BestFirstDrafter", lacks_memory)
        elif how == "failed":
            request = replace(REQUEST, processors=(Fails(ValueError("wrong")),))
        elif how == "first rank lacks memory":
            error = torch.OutOfMemoryError("no memory") if group.rank == 0 else None
            request = replace(REQUEST, processors=(Fails(error),))
        list(engine.run(request))


def steps_of(group: Group, how: str) -> list[int]:
    """Return the steps of a request: at first, again, after another one has ended early, and of one that is resumed."""
    engine = Engine(ModelRunner(random_model(seed=5, initializer_range=0.3), 16), group, grammars=NoGrammar())
    num_steps = []

    def decode(request: Request) -> list[int]:
        *outputs, report = engine.run(request)
        num_steps.append(report.num_steps)
        return [token for output in outputs for token in output.token_ids]

    tokens = decode(REQUEST)
    assert decode(REQUEST) == tokens
    end_early(engine, group, how)
    assert decode(REQUEST) == tokens
    assert decode(replace(REQUEST, committed=tuple(tokens[:1]))) == tokens[1:]
    return num_steps


@pytest.mark.parametrize(
    ("num_replicas", "how"),
    [
        (1, "left"),
        (1, "refused"),
        (1, "without a slot"),
        (1, "without a drafter"),
        (1, "failed"),
        pytest.param(2, "failed", marks=pytest.mark.slow),
        (2, "first rank lacks memory"),
    ],
)
def test_request_that_ends_early_keeps_draft_tables(num_replicas, how):
    alone = num_replicas == 1
    for first, again, after, resumed in (
        [steps_of(Group.alone(), how)] if alone else run_ranks(steps_of, num_replicas, how)
    ):
        assert after <= again < first and resumed <= again


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_request_that_learned_nothing_replaces_no_draft_tables(how):
    """In a batch a request has empty tables while another one holds those of their scope."""
    engine = engine_of(ModelRunner(random_model(seed=5, initializer_range=0.3), 16))

    def num_steps() -> int:
        return list(engine.run(REQUEST))[-1].num_steps

    first, again = num_steps(), num_steps()
    calls = iter([False] * 2)  # cancelled between chunks of its prompt
    other = replace(REQUEST, prompt_ids=(5,) * 200)
    if how == "failed":
        arrival = Arrival(1, replace(other, processors=(Fails(ValueError("wrong")),)))
    else:
        arrival = Arrival(1, other, should_cancel=lambda: next(calls, True))
    decode_batch(engine, {1: [Arrival(0, REQUEST)], again: [arrival]})
    assert num_steps() <= again < first
