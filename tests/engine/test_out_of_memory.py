"""Running out of memory at any point of a request ends it on all replicas; the next request is right."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.batches import FIXED, decode_batch
from support.engines import engine_of
from support.ranks import run_ranks
from support.small_models import random_model

from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.batch import Arrival
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import RequestMemoryError
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.prefix_cache import PrefixCache
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request
from lp_runtime.sampling.sampler import Sampler

CHUNK = 8
# Three chunks; ten steps, the last of them with several tokens each.
PROMPT = (17, 31, 8, 22, 36, 13, 27, 41, 18, 32, 9, 23, 37, 14, 28, 42, 19, 33, 10)
REQUEST = Request(PROMPT, FIXED, 24)
STARTED = replace(REQUEST, committed=(18, 19))  # with the first tokens of its output
HARVESTED = replace(REQUEST, lookahead=replace(FIXED, prompt_top_k=True))
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def load(strict_tokens: int | None = None) -> ModelRunner:
    weights = random_model(seed=5, initializer_range=0.3)
    return ModelRunner(view_of(weights), CHUNK, strict_tokens, own_attention=True)


def tokens_of(engine: Engine, request: Request) -> list[int]:
    *outputs, report = engine.run(request)
    assert isinstance(report, Report)
    return [token for output in outputs for token in output.token_ids]


@contextmanager
def failing(owner: type, name: str, number: int, error: Exception = NO_MEMORY) -> Iterator[None]:
    """Let the call with this number of a method, counted from 0, and all later calls raise an error."""
    method, calls = getattr(owner, name), iter(range(1 << 20))

    def call(*args, **options):
        if next(calls) >= number:
            raise error
        return method(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


FAULTS = {
    "first chunk of what was committed": (STARTED, ModelRunner, "feed_prompt", 0),
    "first chunk": (REQUEST, ModelRunner, "feed_prompt", 0),
    "last chunk": (REQUEST, ModelRunner, "feed_prompt", 2),
    "harvest": (HARVESTED, Sampler, "pack_candidates", 1),
    "first token": (REQUEST, Sampler, "sample", 0),
    "step": (REQUEST, ModelRunner, "forward", 2),
    "sampling": (REQUEST, Sampler, "sample", 2),
}


def run_into_fault(
    model: ModelRunner, engine: Engine, name: str, fails_here: bool = True
) -> tuple[list[int], str, list[int]]:
    """Return (tokens before a fault, message of the error, tokens of the next request)."""
    request, owner, method, number = FAULTS[name]
    model.free_memory()  # cached tokens would not be fed in chunks
    events = []
    with failing(owner, method, number if fails_here else 1 << 20), pytest.raises(RequestMemoryError) as caught:
        events.extend(engine.run(request))
    tokens = [*request.committed, *(token for event in events for token in event.token_ids)]
    return tokens, str(caught.value), tokens_of(engine, REQUEST)


@pytest.fixture(scope="module")
def model() -> ModelRunner:
    return load()


@pytest.fixture(scope="module")
def expected(model) -> list[int]:
    return tokens_of(engine_of(model), REQUEST)


@pytest.mark.parametrize("name", FAULTS)
def test_out_of_memory_ends_request_and_next_one_succeeds(model, expected, name):
    engine = engine_of(model)
    tokens, message, rest = run_into_fault(model, engine, name)
    assert tokens == expected[: len(tokens)] and rest == expected
    assert message.startswith(f"not enough memory on cpu for this request: a prompt of 19 tokens and {len(tokens)} new")
    assert not engine.draft_pool.num_in_use


@pytest.mark.parametrize(
    "error", [MemoryError("of numpy's"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_lack_of_host_memory_ends_request_and_next_one_succeeds(model, expected, error):
    with failing(ModelRunner, "forward", 2, error), pytest.raises(RequestMemoryError):
        tokens_of(engine_of(model), REQUEST)
    assert tokens_of(engine_of(model), REQUEST) == expected


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("an illegal memory access was encountered"), RuntimeError("x")]
)
def test_other_errors_are_not_reported_as_lack_of_memory(model, error):
    with failing(ModelRunner, "forward", 2, error), pytest.raises(type(error)):
        tokens_of(engine_of(model), REQUEST)


def test_failed_request_frees_slots_prefixes_and_pass_results(model):
    """A failure frees the request's slot, free slots, cached prefixes, and the results of the failed pass."""
    model.slots.prefixes = PrefixCache(1 << 24, 1 << 28, model.cache_bytes_per_token or 1)
    engine = engine_of(model)
    tokens_of(engine, REQUEST)
    assert model.slots.prefixes.num_bytes and model.slots.capacity
    computed: list[weakref.ref] = []
    forward = ModelRunner.forward

    def fail(self, *args, **options):
        actual = forward(self, *args, **options)
        computed.append(weakref.ref(actual.rows))
        raise NO_MEMORY

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "forward", fail)
        with pytest.raises(RequestMemoryError) as caught:
            tokens_of(engine, REQUEST)
    NO_MEMORY.__traceback__ = None
    assert caught.value is not None and computed and not any(reference() is not None for reference in computed)
    assert (model.slots.prefixes.num_bytes, model.slots.capacity) == (0, 0)
    model.slots.prefixes = None


@pytest.mark.parametrize("name", FAULTS)
def test_slot_memory_is_freed_while_error_is_referenced(model, name):
    """On an H200 the error kept the slot alive: its traceback refers to frames, and they to the slot."""
    request, owner, method, number = FAULTS[name]
    caches: list[weakref.ref] = []
    make_cache = ModelRunner._make_cache

    def make(self, capacity):
        cache = make_cache(self, capacity)
        caches.append(weakref.ref(cache))
        return cache

    model.free_memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "_make_cache", make)
        with failing(owner, method, number), pytest.raises(RequestMemoryError) as caught:
            tokens_of(engine_of(model), request)
    NO_MEMORY.__traceback__ = None
    assert caught.value is not None and len(caches) == 1 and caches[0]() is None


def test_lack_of_memory_ends_request_on_prefix_read_but_not_on_store(model, expected):
    """A lack of memory ends a request if it reads a prefix, but not if it stores one."""
    cache = model.slots.prefixes = PrefixCache(1 << 24, 1 << 28, model.cache_bytes_per_token or 1)
    engine = engine_of(model)
    with failing(TreeCache, "committed", 0):
        assert tokens_of(engine, REQUEST) == expected
    assert cache.num_bytes == 0
    assert tokens_of(engine, REQUEST) == expected and cache.num_bytes
    with failing(CacheSlot, "restore", 0), pytest.raises(RequestMemoryError):
        tokens_of(engine, REQUEST)
    assert cache.num_bytes == 0 and tokens_of(engine, REQUEST) == expected
    model.slots.prefixes = None


def batch_of(model: ModelRunner, *names: str) -> dict[str, tuple]:
    return decode_batch(engine_of(model), {1: [Arrival(name, REQUEST) for name in names]})


@pytest.mark.parametrize("strict_tokens", [None, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("most", [1, 2])
def test_youngest_requests_leave_batch_when_memory_runs_out(strict_tokens, most):
    """The youngest requests leave the batch; the others get their texts."""
    model = load(strict_tokens)
    expected = tokens_of(engine_of(model), REQUEST)
    forward = ModelRunner.forward_batch

    def limited(self, inputs, *args):
        if len(inputs) > most:
            raise NO_MEMORY
        return forward(self, inputs, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "forward_batch", limited)
        actual = batch_of(model, "a", "b", "c")
    ended = {key: isinstance(end, RequestMemoryError) for key, (_, _, end) in actual.items()}
    num_fed = 3 if strict_tokens else most  # without captured passes, strict sequences are fed one by one
    assert ended == {"a": False, "b": num_fed < 2, "c": num_fed < 3}
    for tokens, _, end in actual.values():
        assert tokens == (expected[: len(tokens)] if isinstance(end, RequestMemoryError) else expected)


def on_a_rank(group: Group, who: str) -> list[tuple[list[int], str, list[int]]]:
    """Return the results of every fault, on one rank or on all."""
    model = load()
    model.slots.prefixes = PrefixCache(1 << 24, 1 << 28, 4096)
    engine = engine_of(model, group)
    return [run_into_fault(model, engine, name, who == "all" or group.rank == group.size - 1) for name in FAULTS]


@pytest.mark.parametrize(
    ("size", "who", "backend"),
    [
        (2, "one", "shared"),
        pytest.param(3, "all", "shared", marks=pytest.mark.slow),
        pytest.param(3, "one", "two machines", marks=pytest.mark.slow),
        pytest.param(2, "all", "gloo", marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_ends_request_on_all_ranks_of_group(expected, size, who, backend):
    first, *others = run_ranks(on_a_rank, size, who, backend=backend)
    assert others == [first] * (size - 1)
    for tokens, message, rest in first:
        assert tokens == expected[: len(tokens)] and rest == expected
        assert message.startswith("not enough memory on cpu for this request: a prompt of 19 tokens and ")
