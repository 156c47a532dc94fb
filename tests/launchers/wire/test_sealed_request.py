"""Tests of requests and orders sent to replicas: every field arrives, and unreadable data is refused."""

from __future__ import annotations

import enum
import pickle
import sys
from dataclasses import MISSING, fields, is_dataclass, replace
from types import ModuleType

import pytest
import torch
from transformers import LogitsProcessor

from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.constraints.compiled import CompiledConstraint
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.errors import LaunchError, RequestError
from lp_runtime.launchers.wire.messages import PING, Abort, Cancel, Decode, Join, Prefill, decode_order, encode_order
from lp_runtime.launchers.wire.sealed_request import open_request, seal
from lp_runtime.request.request import Request
from lp_runtime.text.reasoning import Reasoning


class Biased(LogitsProcessor):
    """A processor that adds a bias."""

    prefix_only = True

    def __init__(self, bias: torch.Tensor):
        self.bias = bias

    def __call__(self, input_ids, scores):
        return scores + self.bias

    def __eq__(self, other):
        return torch.equal(self.bias, other.bias)

    __hash__ = None


class Token(enum.IntEnum):
    """An integer enumeration of the caller."""

    FIRST = 3


FULL = Request(
    prompt_ids=(1, 2, 300_000),
    lookahead=LookaheadConfig(
        W=3,
        N=4,
        G=5,
        drafter="paper",
        acceptance="guesses",
        budget=99,
        prior="none",
        prompt_top_k=True,
        draft_tables="runtime",
        draft_tables_bytes=1 << 20,
        pool_from_prompt=False,
        window_seed=8,
    ),
    max_new_tokens=7,
    eos_token_ids=frozenset({2, 9}),
    sampling=SamplingConfig(
        temperature=0.7,
        top_k=5,
        top_p=0.1 + 0.2,
        min_p=0.05,
        typical_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=0.5,
        no_repeat_ngram_size=3,
        bad_words_ids=[[1, 2], [3]],
        min_new_tokens=1,
        logit_bias={7: -100.0, 11: 1},
        seed=2**64 - 1,
    ),
    sample=4,
    stop=("\n\n", "\u2028é"),
    stop_after=3,
    max_time=1.25,
    logprobs=True,
    top_logprobs=3,
    prompt_logprobs=True,
    processors=(Biased(torch.arange(3.0)),),
    trace=True,
    request_id="an id",
    cache_salt="a salt",
    committed=(5, 6),
    constraint=CompiledConstraint("a key", bytes(range(256)), has_special_tokens=True),
    is_answer=True,
    skip_special_tokens=False,
    reasoning=Reasoning(None, "</think>", ("<content>",)),
    prediction=(8, 9),
    tools=({"type": "function", "function": {"name": "find", "parameters": {"type": "object", "required": [1.5]}}},),
)


def unset_fields(value: object) -> list[str]:
    """Return the names of fields that have their default, in a dataclass and in those nested in it."""
    results = []
    for field in fields(value):
        here = getattr(value, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if here == default:
            results.append(field.name)
        if is_dataclass(here):
            results += [f"{field.name}.{name}" for name in unset_fields(here)]
    return results


def test_sealed_request_keeps_every_field():
    fixed = replace(FULL, lookahead=LookaheadConfig(tokens=64, corpus="texts"))  # not allowed with FULL's fields
    assert open_request(seal(fixed)) == fixed
    assert unset_fields(FULL) == ["lookahead.tokens", "lookahead.corpus"], "FULL must set every other field"
    assert repr(FULL) != repr(Request((1,), PLAIN, 1))
    opened = open_request(seal(FULL))
    assert opened == FULL
    assert opened.sampling_key == FULL.sampling_key  # part of the digest that must be equal on all ranks


def test_enum_token_ids_are_opened_as_integers():
    assert repr(open_request(seal(Request((Token.FIRST,), PLAIN, 4))).prompt_ids) == "(3,)"


def test_open_request_unpickles_only_processors(monkeypatch):
    data = seal(FULL)
    read = []

    def loads(pickled):
        read.append(pickled)
        return Biased(torch.arange(3.0))

    monkeypatch.setattr(pickle, "loads", loads)
    assert open_request(data) == FULL
    assert read == [pickle.dumps(FULL.processors[0])]


def test_processor_whose_class_is_missing_is_named(monkeypatch):
    module = ModuleType("only_the_callers")
    monkeypatch.setitem(sys.modules, "only_the_callers", module)
    module.Biased = Biased
    monkeypatch.setattr(Biased, "__module__", "only_the_callers")
    data = seal(Request((1,), PLAIN, 4, processors=(Biased(torch.zeros(1)),)))
    monkeypatch.delitem(sys.modules, "only_the_callers")
    with pytest.raises(RequestError) as caught:
        open_request(data)
    assert str(caught.value) == (
        "processors: only_the_callers.Biased: replicas cannot import it"
        " (ModuleNotFoundError: No module named 'only_the_callers'); define it in a module that they can import"
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (seal(FULL)[:-1], "its checksum is wrong"),
        (pickle.dumps(FULL), "it is not a message of this version of lp_runtime"),
    ],
)
def test_damaged_or_foreign_request_is_refused_in_one_line(data, reason):
    with pytest.raises(RequestError) as caught:
        open_request(data)
    assert str(caught.value) == (
        f"the request cannot be read: {reason}; all machines need the same version of lp_runtime"
    )


def test_decoded_order_equals_the_encoded_one():
    context = ReplicaContext(1, 4, 2, 3, "10.0.0.1", 29500, True, False, "/segment", True, 1)
    for order in (Join(1, context), Decode(2, seal(FULL)), Prefill(3, b"\0"), Cancel(4), Abort(5), PING):
        assert decode_order(encode_order(order)) == order


@pytest.mark.parametrize("data", [encode_order(Cancel(4))[:-1], pickle.dumps(Cancel(4)), b"Pickle x", b""])
def test_damaged_or_foreign_order_is_refused_in_one_line(data):
    with pytest.raises(LaunchError, match=r"^an order of the driver cannot be read: .*same version of lp_runtime$"):
        decode_order(data)
