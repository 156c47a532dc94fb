"""Requests that are retried after memory has run out: their outputs are those of a single attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from support.batches import FIXED

from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.engine.batch import Arrival
from lp_runtime.errors import RequestMemoryError
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import make_prefix_cache
from lp_runtime.replica.loaded_model import LoadedModel, load_replica
from lp_runtime.replica.replica import Replica, join_group
from lp_runtime.request.output import Event, Report
from lp_runtime.request.request import Request

NUM_TOKENS = {"a": 24, "b": 24, "c": 12, "d": 24}
PROMPT = tuple(3 + 7 * i % 53 for i in range(30))


@pytest.fixture(scope="module")
def config(make_model_dir) -> RuntimeConfig:
    model = ModelConfig(path=str(make_model_dir(seed=5, initializer_range=0.3)))
    return RuntimeConfig(model=model, device="cpu", dtype="float32", lookahead=FIXED, cache_dir=None)


@pytest.fixture(scope="module")
def loaded(config) -> LoadedModel:
    return load_replica(config, 0, 1, owns_process=False)


@pytest.fixture(scope="module")
def replica(config, loaded) -> Iterator[Replica]:
    with join_group(config, loaded, ReplicaContext(owns_process=False)) as actual:
        yield actual


@pytest.fixture(scope="module")
def requests() -> dict[str, Request]:
    return {key: Request(PROMPT, FIXED, number) for key, number in NUM_TOKENS.items()}


def joined(events: list[Event]) -> tuple[list[int], Report]:
    *outputs, report = events
    return [token for output in outputs for token in output.token_ids], report


@pytest.fixture(scope="module")
def expected(replica, requests) -> dict[str, list[int]]:
    return {key: joined(list(replica.decode(request)))[0] for key, request in requests.items()}


def limit(monkeypatch, has_memory: Callable[[int, int], bool]) -> list[int]:
    """Let pass n fail unless `has_memory(n, its sequences)`; return the sequences of each pass."""
    forward, sizes = ModelRunner.forward_batch, []

    def limited(self, inputs, *args):
        sizes.append(len(inputs))
        if not has_memory(len(sizes) - 1, len(inputs)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, inputs, *args)

    monkeypatch.setattr(ModelRunner, "forward_batch", limited)
    return sizes


def test_report_covers_all_attempts(replica, requests, expected, monkeypatch):
    whole = joined(list(replica.decode(requests["a"])))[1]
    limit(monkeypatch, lambda number, _: number not in (1, 4))  # two attempts fail, with tokens between them
    tokens, report = joined(list(replica.decode(requests["a"])))
    assert tokens == expected["a"] and report.finish_reason == "length"
    assert whole.num_steps <= report.num_steps <= len(tokens) + 2  # each attempt begins with a step of the prefill


def test_report_has_the_cached_tokens_of_the_first_attempt(loaded, replica, requests, monkeypatch):
    """Running out of memory empties the prefix cache."""
    monkeypatch.setattr(loaded.model.slots, "prefixes", make_prefix_cache(loaded.model, 1 << 26, None))
    list(replica.decode(requests["a"]))
    sizes = limit(monkeypatch, lambda number, _: number > 0)
    _, report = joined(list(replica.decode(requests["a"])))
    assert report.cached_tokens == len(PROMPT) - 1 and len(sizes) > 1


def test_request_fails_after_attempt_without_new_token(replica, requests, expected, monkeypatch):
    sizes = limit(monkeypatch, lambda number, _: number < 2)
    tokens = []
    with pytest.raises(RequestMemoryError):
        for event in replica.decode(requests["a"]):
            tokens += event.token_ids
    assert tokens == expected["a"][: len(tokens)] and len(sizes) == 4


@pytest.mark.parametrize("most", [1, 2])
def test_batched_requests_wait_for_memory_until_others_end(replica, requests, expected, monkeypatch, most):
    """A request that arrives meanwhile waits, too."""
    sizes = limit(monkeypatch, lambda _, num_sequences: num_sequences <= most)
    arriving = iter([["a", "b", "c"], [], ["d"]])
    actual: dict[str, list[Event]] = {key: [] for key in requests}
    for key, event in replica.decode_batch(lambda: [Arrival(name, requests[name]) for name in next(arriving, [])]):
        actual[key].append(event)
    assert {key: joined(events)[0] for key, events in actual.items()} == expected
    assert max(sizes) > most


def test_requests_whose_slots_do_not_fit_together_all_complete(loaded, replica, requests, expected, monkeypatch):
    """Requests are decoded together as long as memory suffices; all get their texts."""
    monkeypatch.setattr(loaded.model.slots, "limit", 300)  # tokens; a slot of this request has more than 100
    arriving = iter([list(requests)])
    actual: dict[str, list[Event]] = {key: [] for key in requests}
    for key, event in replica.decode_batch(lambda: [Arrival(name, requests[name]) for name in next(arriving, [])]):
        actual[key].append(event)
    assert {key: joined(events)[0] for key, events in actual.items()} == expected


@pytest.mark.parametrize("reason", ["cancelled", "time"])
def test_request_that_waits_for_memory_can_end(loaded, replica, requests, expected, monkeypatch, reason):
    """The waiting request ends while the one that has the memory continues; the next one still waits for that."""
    monkeypatch.setattr(loaded.model.slots, "limit", 150)  # tokens; a slot of this request has more than 100
    waiting = requests["b"] if reason == "cancelled" else replace(requests["b"], max_time=1e-9)
    events: list[tuple[str, Event]] = []
    should_cancel = {"b": lambda: bool(events) and reason == "cancelled"}
    asked = requests | {"b": waiting}
    arriving = iter([[Arrival(key, asked[key], should_cancel=should_cancel.get(key, bool)) for key in ("a", "b", "d")]])
    for each in replica.decode_batch(lambda: next(arriving, [])):
        events.append(each)  # `should_cancel` looks at it meanwhile
    ((place, report),) = [(place, event) for place, (key, event) in enumerate(events) if key == "b"]
    assert report.finish_reason == reason and any(key == "a" for key, _ in events[place:])
    for key in ("a", "d"):
        assert joined([event for name, event in events if name == key])[0] == expected[key]
