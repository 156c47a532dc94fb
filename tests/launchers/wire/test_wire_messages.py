"""Requests on their way to replicas: what cannot be read there is refused, and named."""

from __future__ import annotations

import enum
import pickle
import sys
from types import ModuleType

import pytest
import torch
from transformers import LogitsProcessor

from lp_runtime.config.lookahead import PLAIN
from lp_runtime.errors import RequestError
from lp_runtime.launchers.wire.messages import Decode, SealedRequest
from lp_runtime.request.request import Request


class Biased(LogitsProcessor):
    """Adds what it holds."""

    prefix_only = True

    def __init__(self, bias: torch.Tensor):
        self.bias = bias

    def __call__(self, input_ids, scores):
        return scores + self.bias


class Token(enum.IntEnum):
    """A caller's own integers."""

    FIRST = 3


def test_a_request_arrives_as_it_was():
    request = Request((1, Token.FIRST), PLAIN, 4, processors=(Biased(torch.arange(3.0)),), trace=True)
    order = pickle.loads(pickle.dumps(Decode(7, SealedRequest.of(request))))
    opened = order.request.opened()
    assert (order.order, opened.prompt_ids, opened.trace) == (7, (1, 3), True)
    assert torch.equal(opened.processors[0](None, torch.zeros(3)), torch.arange(3.0))


def test_a_class_that_is_not_there_is_named_and_the_order_can_be_read(monkeypatch):
    module = ModuleType("only_the_callers")
    monkeypatch.setitem(sys.modules, "only_the_callers", module)
    for each in (Biased, Token):
        setattr(module, each.__name__, each)
        monkeypatch.setattr(each, "__module__", "only_the_callers")
    processors = (Biased(torch.zeros(1)),)
    orders = [
        pickle.dumps(Decode(number, SealedRequest.of(request)))
        for number, request in enumerate(
            [Request((1,), PLAIN, 4, processors=processors), Request((Token.FIRST,), PLAIN, 4)]
        )
    ]
    monkeypatch.delitem(sys.modules, "only_the_callers")
    for number, (data, what) in enumerate(
        zip(orders, ["processors: only_the_callers.Biased", "the request"], strict=True)
    ):
        order = pickle.loads(data)
        assert order.order == number
        with pytest.raises(RequestError) as caught:
            order.request.opened()
        assert str(caught.value) == (
            f"{what}: replicas cannot import it (ModuleNotFoundError: No module named 'only_the_callers');"
            " define it in a module that they can import"
        )
