"""A replica's orders, carried out in this process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.chain_models import CHUNK_TOKENS, model_of
from transformers import PreTrainedModel

from lp_runtime.calibration.calibration import Measured
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.errors import RequestError
from lp_runtime.launchers.wire.messages import Decode, Finished, Join, Prefill, Prefilled, Progress, Refused
from lp_runtime.launchers.wire.sealed_request import seal
from lp_runtime.launchers.worker import replica_server
from lp_runtime.launchers.worker.process_host import Placement
from lp_runtime.launchers.worker.replica_server import ReplicaServer
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.replica.loaded_model import LoadedModel, ReplicaInfo
from lp_runtime.request.request import Request

REQUEST = Request(tuple(range(8, 33)), PLAIN, 20, logprobs=True)  # its prompt takes several chunks


class _Ended(Exception):
    """Ends a replica that has carried out its last order."""


def answers_of(weights: PreTrainedModel, orders: Sequence[object]) -> list[Any]:
    """Return a replica's answers to orders; the last one is to decode."""
    answers: list[Any] = []

    def send(message: object) -> None:
        answers.append(message)
        if isinstance(message, Finished):
            raise _Ended

    model = ChainRunner(weights, CHUNK_TOKENS)
    info = ReplicaInfo(model.vocabulary_size, None, frozenset(), {}, "cpu", "float32", 0.0, None)
    server = ReplicaServer(RuntimeConfig(device="cpu", lookahead=PLAIN, cache_dir=None), Placement(0, 1), send)
    for order in (Join(0, ReplicaContext(owns_process=False)), *orders):
        server.post(order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_server, "load_replica", lambda *_, **__: LoadedModel(model, info, Measured()))
        server.run()
    return answers


class Refusing:
    """A logits processor with an error of its author's, whose class has other arguments and cannot be pickled."""

    prefix_only = True

    def __call__(self, input_ids, scores):
        class NotLiked(RequestError):
            def __init__(self, what: str, why: str):
                super().__init__(f"{what} {why}")

        raise NotLiked("not", "liked")


def test_refusal_has_a_class_that_the_driver_knows():
    refused = seal(replace(REQUEST, processors=(Refusing(),)))
    answers = answers_of(model_of("bamba"), [Decode(1, refused), Decode(2, seal(REQUEST))])
    assert Refused(1, "not liked", RequestError) in answers


def progress_of(answers: list[Any]) -> Progress:
    return next(answer.progress for answer in answers if isinstance(answer, Finished))


def test_prefill_that_ran_out_of_memory_leaves_no_states():
    """The pass fails in its last layer, when the states of the others have advanced."""
    weights = model_of("bamba")
    expected = progress_of(answers_of(weights, [Decode(1, seal(REQUEST))]))
    calls = itertools.count()

    def fail_once(*_: object) -> None:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    layers = [module for module in weights.modules() if type(module).__name__.endswith("DecoderLayer")]
    layers[-1].register_forward_pre_hook(fail_once)
    rest = seal(replace(REQUEST, committed=tuple(expected.token_ids[:9])))
    answers = answers_of(weights, [Prefill(1, rest), Decode(2, rest)])
    assert Prefilled(1) in answers and next(calls) > 3
    assert progress_of(answers).token_ids == expected.token_ids[9:]
    assert progress_of(answers).logprobs == pytest.approx(expected.logprobs[9:], abs=1e-4)
