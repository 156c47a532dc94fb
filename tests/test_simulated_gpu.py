"""The runtime on a simulated GPU: the same tokens, one wait per step."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.batches import decode_alone, decode_batch
from support.constrained import WatchedGrammars
from support.ranks import CPU, run_ranks
from support.simulated_gpu import Event, Gpu, Graph, simulated_gpu
from support.small_models import DYNAMIC, FAMILIES, random_model
from support.versions import needs_rotary_by_length

from lp_runtime import LookaheadRuntime
from lp_runtime.bench.command import bench
from lp_runtime.calibration.calibration import Calibration, Measured, StepMeasurement
from lp_runtime.config import settings
from lp_runtime.config.commands import BenchConfig, GenerateConfig
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.serving import ServeConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.constraints.compiled import compile_constraint
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.distributed import devices
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Arrival, Engine
from lp_runtime.entrypoints.generate import generate_one
from lp_runtime.errors import ModelError
from lp_runtime.kernels import dispatch
from lp_runtime.model import runner
from lp_runtime.model.checks import self_check
from lp_runtime.model.forward import fixed_passes
from lp_runtime.model.kv_cache import slots
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.loading.loader import eos_token_ids, load_model, load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica import loading
from lp_runtime.replica.loaded_model import load_replica
from lp_runtime.replica.loading import prepare_model, ready_model
from lp_runtime.replica.replica import join_group
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request
from lp_runtime.server.status import StatusRoutes
from lp_runtime.utils.memory import HOST_ALLOCATOR

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
CUDA = torch.device("cuda", 0)
ALONE = Group.alone()
PROMPT = tuple(range(300, 312))
FIXED = LookaheadConfig(5, 4, 5, prior="none")  # each engine computes its own prior, which takes seconds
AUTO = LookaheadConfig(prior="none")


def without_every_seventh(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A caller's logits processor that forbids every seventh token id."""
    return scores.masked_fill(torch.arange(scores.shape[1], device=scores.device) % 7 == 0, -torch.inf)


without_every_seventh.prefix_only = True  # otherwise the host calls it once per committed token and waits

REQUESTS = {
    "greedy": Request(PROMPT, AUTO, 32),
    "fixed": Request(PROMPT[1:], FIXED, 32),
    "paper": Request(PROMPT[2:], LookaheadConfig(5, 4, 5, drafter="paper"), 16),
    "one token a step": Request(PROMPT[3:], LookaheadConfig(0, 2, 0, prior="none"), 8),
    "sampled": Request(PROMPT[4:], AUTO, 12, sampling=SamplingConfig(temperature=0.8, top_p=0.9, seed=5)),
    "penalized": Request(PROMPT[5:], FIXED, 12, sampling=SamplingConfig(repetition_penalty=1.2, seed=5)),
    "logprobs": Request(PROMPT[6:], LookaheadConfig(5, 4, 5), 12, logprobs=True),
    "a caller's processor": Request(PROMPT[7:], FIXED, 12, processors=(without_every_seventh,)),
}
SMOKE = ("greedy", "sampled", "a caller's processor")  # requests that are not marked as slow
POINTS = {  # assumed measurements of steps
    "tokens": np.array([1, 16, 32]),
    "nanoseconds": np.array([1_000_000, 1_050_000, 1_200_000]),
    "num_padded": np.array(0),
    "harvest_ns": np.array(0),
    "prefix_ns": np.array([0, 0]),
}
ONCE = (
    "hf_settings.py: build_processors",
    "cuda_graph.py: _capture",
    "cuda_graph.py: _refusing_waits",
    "harvest.py: share",
)  # places that wait once per request or per size
FEW = ("fixed", "sampled")
NOTHING: Counter = Counter()
GREEDY = ("greedy", "fixed", "one token a step")  # requests whose captured passes compute the samples
SAMPLING = ("sampler.py", "gumbel.py", "processors.py", "hf_settings.py", "step_logits.py")  # files that sample
SIZES = (1, 32, 64)  # of captured passes
NUM_LAYERS = 2  # of the demo model's 6


@contextmanager
def gpu_of_few_sizes(demo_model: Path) -> Iterator[Gpu]:
    """A simulated GPU that captures passes of few sizes of a small demo model, since each capture takes a while."""
    with simulated_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "DEMO_MODEL", demo_model)
        patch.setattr(fixed_passes, "SIZES", SIZES)
        patch.setattr(fixed_passes, "MIN_LARGEST", SIZES[-1])
        yield gpu


@pytest.fixture(scope="module")
def last_layers(shallow_demo) -> Path:
    return shallow_demo(NUM_LAYERS)


@pytest.fixture(scope="module")
def gpu(last_layers) -> Iterator[Gpu]:
    with gpu_of_few_sizes(last_layers) as gpu:
        yield gpu


@pytest.fixture(scope="module")
def model(gpu) -> ModelRunner:
    """A model whose passes are captured."""
    return ready_model(RuntimeConfig(dtype="float32"), CUDA)[0]


class Expected(dict[str, list[int]]):
    """Tokens of each request by name, decoded at first use on the CPU, one token per step."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._model = ModelRunner(load_model(ModelConfig(str(path)), CPU, "float32"), 512, own_attention=True)

    def __missing__(self, name: str) -> list[int]:
        self[name] = decode_alone(self._model, replace(REQUESTS[name], lookahead=PLAIN))[0]
        return self[name]


@pytest.fixture(scope="module")
def expected(last_layers) -> Expected:
    return Expected(last_layers)


def loop_of(model: ModelRunner, group: Group = ALONE) -> Engine:
    """Return an engine with assumed step times, since measuring them takes seconds."""
    known = Measured(StepMeasurement(**{name: values.copy() for name, values in POINTS.items()}))
    return Engine(model, group, Calibration(model, group, None, known))


class Counts(NamedTuple):
    """Tokens, steps, waits and launches of a request.

    Attributes:
        tokens: the output.
        num_steps: number of steps, including the prefill's.
        waits: waits of the host by place, except for those in ONCE.
        launches: launches outside of graphs by place, in the steps after the prefill.
    """

    tokens: list[int]
    num_steps: int
    waits: Counter
    launches: Counter


def counts_of(gpu: Gpu, loop: Engine, request: Request) -> Counts:
    """Decode a request twice, first a single token, then all; check that nothing is captured meanwhile."""
    num_captures, launches = len(Graph.captured), []
    loop.prepare(request.lookahead)
    for num_tokens in (1, request.max_new_tokens):
        gpu.waits.clear()
        gpu.launch_places.clear()
        *runs, _ = loop.run(replace(request, max_new_tokens=num_tokens))
        launches.append(gpu.launch_places.copy())
    assert len(Graph.captured) == num_captures, "all was captured at start"
    waits = Counter(each for each in gpu.waits if each not in ONCE)
    tokens = [token for run in runs for token in run.token_ids]
    return Counts(tokens, len(runs), waits, launches[1] - launches[0])


def check(
    result: Counts, expected: list[int], name: str, place: str = "exchange.py: finish", exchange: Counter = NOTHING
) -> None:
    """Check the counts of a request: the host waits at `place`, and the exchange launches `exchange`."""
    assert result.tokens == expected and result.num_steps > 2
    assert result.waits == {place: result.num_steps}  # also in the step of the prefill
    launches = result.launches - exchange
    assert all(each.startswith(SAMPLING) for each in launches)  # sampling outside of captured passes
    if name in GREEDY:
        assert not launches


@pytest.mark.slow
def test_slot_growth_between_captured_passes_keeps_output(gpu, model, expected, monkeypatch):
    """The pass after a slot has grown writes to the new addresses, and nothing waits for the copy."""
    growths: list[int] = []
    grow = TreeCache.grow
    monkeypatch.setattr(TreeCache, "grow", lambda cache, capacity: growths.append(capacity) or grow(cache, capacity))
    monkeypatch.setattr(slots, "GROWTH_TOKENS", 3)
    monkeypatch.setattr(runner, "GROWTH_TOKENS", 3)
    monkeypatch.setattr(runner, "CAPACITY_UNIT", 8)
    model.slots.clear()
    actual = counts_of(gpu, loop_of(model), replace(REQUESTS["one token a step"], max_new_tokens=32))
    assert growths and actual.waits == {"exchange.py: finish": actual.num_steps}
    model.slots.clear()
    assert actual.tokens[:8] == expected["one token a step"]
    monkeypatch.undo()
    assert actual.tokens == decode_alone(model, replace(REQUESTS["one token a step"], max_new_tokens=32))[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SMOKE else pytest.mark.slow) for name in REQUESTS]
)
def test_host_waits_once_per_step(gpu, model, expected, name):
    assert model.graphs.capture
    check(counts_of(gpu, loop_of(model), REQUESTS[name]), expected[name], name)


def test_host_waits_once_per_step_with_measured_step_times(gpu, model, expected):
    """On a busy machine, trees may become larger than any captured pass."""
    actual = counts_of(gpu, Engine(model, ALONE), REQUESTS["greedy"])
    assert actual.tokens == expected["greedy"] and actual.num_steps > 2
    assert actual.waits == {"exchange.py: finish": actual.num_steps}


def test_constraint_masks_are_filled_while_pass_runs(gpu, model):
    """Masks of a constraint are filled after the launch of the step's pass and before the host waits."""
    grammars = Grammars(lambda: load_tokenizer(ModelConfig()), model.vocabulary_size, eos_token_ids(model.model))
    schema = {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 4, "maxItems": 4}
    constraint = compile_constraint(ConstraintConfig(json_schema=schema), grammars.vocabulary(False).info)
    request = replace(
        REQUESTS["paper"], constraint=constraint, eos_token_ids=eos_token_ids(model.model), max_new_tokens=24
    )
    seen = []

    def watch(nodes):
        seen.append((gpu.launches["graph"], sum(each not in ONCE for each in gpu.waits)))

    watched = WatchedGrammars(grammars, watch)
    known = Measured(StepMeasurement(**{name: values.copy() for name, values in POINTS.items()}))
    loop = Engine(model, ALONE, Calibration(model, ALONE, None, known), grammars=watched)
    loop.prepare(request.lookahead)
    gpu.waits.clear()
    gpu.launches.clear()
    *_, report = loop.run(request)
    assert seen == [(step, step) for step in range(report.num_steps)]  # the prefill's pass is not a graph
    assert report.num_steps > 3


@pytest.mark.slow
def test_host_waits_once_per_step_without_captured_passes(gpu, expected):
    model, _ = ready_model(RuntimeConfig(dtype="float32", compile="off"), CUDA)
    assert model.graphs is None
    for name in FEW:
        actual = counts_of(gpu, loop_of(model), REQUESTS[name])
        assert actual.tokens == expected[name] and actual.waits == {"exchange.py: finish": actual.num_steps}


@pytest.mark.slow
def test_reason_for_uncaptured_passes_is_reported(gpu, tmp_path, capsys):
    """lp-generate, lp-bench and the server's /health show why passes are not captured."""
    prompts, options = tmp_path / "prompts.jsonl", {"compile": "off", "dtype": "float32", "cache_dir": None}
    prompts.write_text('{"text": "def f():"}')
    options |= {"max_new_tokens": 2, "lookahead": LookaheadConfig(0, 2, 0, prior="none")}
    measured = BenchConfig(prompts=f"{prompts}:text", output=str(tmp_path), methods=["plain"], rounds=1, **options)
    with LookaheadRuntime.from_config(measured) as runtime:
        generate_one(runtime, GenerateConfig(prompt="def f():", **options), "def f():")
        bench(runtime, measured)
        routes = StatusRoutes(ServeConfig(), runtime, SimpleNamespace(is_healthy=True), None)
        body = json.loads(asyncio.run(routes.health()).body)
    assert "; passes are not captured: compile=off\n" in capsys.readouterr().err
    assert ", passes not captured (compile=off), " in (tmp_path / "bench.md").read_text()
    assert body == {"status": "ok", "replicas": 1, "not_captured": "compile=off"}


@pytest.mark.slow
def test_kernel_failure_is_reason_for_uncaptured_passes(gpu, monkeypatch):
    def fail(states):
        raise RuntimeError("Failed to find C compiler.")

    dispatch.why_no_kernels.cache_clear()
    monkeypatch.setattr(dispatch.triton_gpu(), "gate", fail)
    try:
        model, _ = ready_model(RuntimeConfig(dtype="float32"), CUDA)
    finally:
        dispatch.why_no_kernels.cache_clear()
    assert model.why_no_graphs == "Triton does not run on cuda:0: Failed to find C compiler."


@pytest.mark.slow
def test_strict_passes_of_any_size_replay_one_graph(gpu, expected, monkeypatch):
    """One graph serves batches and trees of any size; a tree larger than a pass takes several replays."""
    monkeypatch.setattr(self_check, "STRICT_LENGTHS", (20,))
    monkeypatch.setattr(self_check, "LONG_STRICT_LENGTHS", ())
    num_captures = len(Graph.captured)
    model, _ = ready_model(RuntimeConfig(dtype="float32", exactness="strict", strict_tokens=40), CUDA)
    assert model.graphs.capture and model.supports_batching and len(Graph.captured) == num_captures + 1
    loop = loop_of(model)
    for name in FEW:
        check(counts_of(gpu, loop, REQUESTS[name]), expected[name], name)
    requests = {
        size: replace(REQUESTS["fixed"], lookahead=LookaheadConfig(size, 4, size, prior="none")) for size in (2, 8)
    }
    num_replays = 0
    for size, request in requests.items():
        gpu.launches.clear()
        *outputs, report = loop.run(request)
        assert gpu.launches["graph"] == report.num_steps - 1 and (report.num_steps > len(outputs)) == (size == 8)
        num_replays += gpu.launches["graph"]
    gpu.launches.clear()
    actual = decode_batch(loop, {1: [Arrival(*each) for each in requests.items()]})
    assert [actual[size][0] for size in requests] == [expected["fixed"]] * 2
    assert gpu.launches["graph"] < num_replays  # sequences share passes
    assert len(Graph.captured) == num_captures + 1


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("greedy", {"copy_": 1, "graph": 1}),  # one copy to the device: the inputs
        pytest.param("fixed", {"copy_": 1, "graph": 1}, marks=pytest.mark.slow),
        ("sampled", {"copy_": 2, "graph": 1, "find_cut": 1, "sample_and_pack": 1}),  # and the noise's positions
    ],
)
def test_captured_step_launches_only_copies_graph_and_sampling(gpu, model, expected, name, launches):
    """A step of a captured size launches nothing else; `sample_and_pack` is two launches on a real GPU."""
    loop, counts = loop_of(model), []
    loop.prepare(REQUESTS[name].lookahead)
    list(loop.run(REQUESTS[name]))  # captures
    outputs = list(loop.run(REQUESTS[name], observe=lambda *args: counts.append(gpu.launches.copy())))[:-1]
    assert [token for output in outputs for token in output.token_ids] == expected[name]
    steps = [later - earlier for earlier, later in itertools.pairwise(counts)]  # without the prefill's
    assert len(steps) == len(outputs) - 1 and all(step == launches for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kernel"), [pytest.param("float32", "efficient", marks=pytest.mark.slow), ("bfloat16", "flash")]
)
def test_prompt_chunks_are_attended_without_mask(gpu, dtype, kernel):
    """A layer makes one call for the first chunk, then two per chunk: the prefix, and the chunk, causally."""
    chunked, whole = (
        ready_model(RuntimeConfig(dtype=dtype, compile="off", model=ModelConfig(prefill_chunk=chunk)), CUDA)[0]
        for chunk in (20, 512)
    )
    logits = []
    for model in (chunked, whole):
        with model.slots.borrowed() as slot:
            model.begin(slot, 100)
            gpu.launches.clear()
            logits.append(model.prefill(slot, range(60)).cpu())
            counts = gpu.launches.copy()
        num_layers = model.model.config.num_hidden_layers
        num_later = 2 if model is chunked else 0
        assert counts[f"_scaled_dot_product_{kernel}_attention"] == (1 + 2 * num_later) * num_layers
        assert counts["scaled_dot_product_attention"] == 0  # may choose a kernel that is planned for every length
    tolerance = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(*logits, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_batched_requests_wait_only_for_exchange_and_keep_outputs(gpu, model, expected):
    assert model.supports_batching
    arrivals = {number + 1: [Arrival(name, request)] for number, (name, request) in enumerate(REQUESTS.items())}
    loop = loop_of(model)
    for request in REQUESTS.values():
        loop.prepare(request.lookahead)
    gpu.waits.clear()
    actual = decode_batch(loop, arrivals)
    assert set(gpu.waits) <= {"exchange.py: finish", *ONCE}
    assert {name: tokens for name, (tokens, _, _) in actual.items()} == {name: expected[name] for name in REQUESTS}


class OnGpu(Group):
    device = CUDA  # of the exchanged tensors, whatever the transport's own is


def on_a_rank(group: Group, device: torch.device, demo_model: Path) -> dict[str, Counts]:
    """Return the counts of a few requests, with exchanged tensors on `device`."""
    if device == CUDA:
        group = OnGpu(group.rank, group.size, group.transport)
    with gpu_of_few_sizes(demo_model) as gpu:
        model, _ = ready_model(RuntimeConfig(dtype="float32"), CUDA)
        return {name: counts_of(gpu, loop_of(model, group), REQUESTS[name]) for name in FEW}


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, device, place", [("shared", CPU, "group.py: wait"), ("gloo", CUDA, "collectives.py: wait")]
)
def test_ranks_exchange_results_with_one_wait_per_step(expected, last_layers, backend, device, place):
    """Ranks exchange over the host, or on the device: gloo receives GPU tensors, as NCCL would."""
    for actual in run_ranks(on_a_rank, 2, device, last_layers, backend=backend):
        for name in FEW:
            on_device = {"exchange.py: start": actual[name].num_steps - 1} if backend == "gloo" else {}
            check(actual[name], expected[name], name, place, Counter(on_device))


@pytest.mark.slow
def test_replica_that_owns_gpu_uses_all_its_memory(gpu):
    """One of eight replicas on a machine uses all memory of a GPU that only it sees, as booked by Ray."""
    config = RuntimeConfig(dtype="float32", compile="off")
    alone, booked, sharing = (
        load_replica(config, 0, num_local, True, owns_device).info.capacity
        for num_local, owns_device in ((1, False), (8, True), (8, False))
    )
    assert alone >= booked > 7 * sharing  # minus the memory that an exchange with the others may take


@pytest.mark.slow
@pytest.mark.parametrize("num_cores", [1, 2])
def test_gpu_wait_uses_blocking_event_if_cores_are_few(gpu, num_cores, monkeypatch):
    options: list[dict] = []
    monkeypatch.setattr(devices, "num_cores", lambda: num_cores)
    monkeypatch.setattr(torch.cuda, "Event", lambda **given: options.append(given) or Event(**given))
    config = RuntimeConfig(dtype="float32", compile="off", cache_dir=None)
    loaded = load_replica(config, 0, 1, owns_process=False)
    with join_group(config, loaded, ReplicaContext(owns_process=False)) as replica:
        list(replica.decode(Request(PROMPT, PLAIN, 2)))
    assert [each for each in options if "blocking" in each] == [{"blocking": num_cores < 2}]


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("load_model", RuntimeError(HOST_ALLOCATOR)),
        ("pack_fastest", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        ("check_runner", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    ],
)
def test_out_of_memory_at_start_reports_free_memory(gpu, place, error, monkeypatch):
    """Out of memory while weights load, layers change or passes are captured: one line says what was free."""

    def full(*args, **options):
        raise error

    monkeypatch.setattr(loading, place, full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (3 << 29, 1 << 34))
    with pytest.raises(ModelError) as caught:
        ready_model(RuntimeConfig(dtype="float32", cache_dir=None), CUDA)
    assert str(caught.value).endswith(
        ": not enough memory on cuda:0: the weights take 0.0 GiB, 1.5 GiB were free before loading"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("mistral", marks=pytest.mark.slow),
        pytest.param("gemma3", marks=pytest.mark.slow),
        "gpt_oss",
        pytest.param("dynamic", marks=needs_rotary_by_length),
    ],
)
def test_texts_beyond_window_or_rope_length_launch_only_graphs(gpu, family):
    """Texts beyond a window (with sinks, too) or a RoPE length wait once a step and launch only graphs."""
    name, settings = ("Llama", DYNAMIC) if family == "dynamic" else FAMILIES[family]
    request = Request(tuple(range(20, 32)), FIXED, 24)
    free = ModelRunner(random_model(name, seed=1, initializer_range=0.3, **settings), 512, own_attention=True)
    expected, _, _ = decode_alone(free, request)
    on_gpu = random_model(name, seed=1, initializer_range=0.3, **settings).to(CUDA)
    model, _ = prepare_model(on_gpu, RuntimeConfig(dtype="float32"), CUDA)
    assert model.graphs.capture and len(expected) == 24
    check(counts_of(gpu, loop_of(model), request), expected, "fixed")


@pytest.mark.slow
def test_batch_of_eight_waits_once_per_step_and_launches_only_graphs(gpu, model, expected):
    """Eight requests share a pass: the host waits once per exchange and launches only graphs."""
    loop, settings = loop_of(model), LookaheadConfig(1, 3, 1)  # eight of these fit into the largest pass
    loop.prepare(settings)
    request = replace(REQUESTS["fixed"], lookahead=settings)
    arrivals = [Arrival(number, replace(request, max_new_tokens=20 + number)) for number in range(8)]
    launches = []
    for requests in ([Arrival(each.key, replace(each.request, max_new_tokens=1)) for each in arrivals], arrivals):
        gpu.launch_places.clear()
        gpu.waits.clear()
        actual = decode_batch(loop, {1: requests})
        launches.append(gpu.launch_places.copy())
    assert all(place.startswith("hf_settings.py") for place in launches[1] - launches[0])  # once per request
    for number, (tokens, _, _) in actual.items():
        assert tokens == expected["fixed"][: 20 + number]
    waits = [each for each in gpu.waits if each not in ONCE]
    assert set(waits) == {"exchange.py: finish"}
    num_steps = max(report.num_steps for _, _, report in actual.values())
    assert len(waits) <= num_steps + 8  # and one for each prompt


@pytest.mark.slow
def test_mixed_server_load_captures_no_further_graphs(gpu, model):
    """Requests of many lengths and kinds, growing slots and batches of any size cause no further capture."""
    rng = random.Random(0)
    loop = loop_of(model)
    loop.prepare(FIXED)
    num_captures, arrivals = len(Graph.captured), {}
    for number in range(1, 20):
        tokens = tuple(rng.randrange(300, 400) for _ in range(rng.choice((3, 40, 600))))
        sampling = SamplingConfig(temperature=0.7, top_p=0.9, seed=number) if number % 3 == 0 else SamplingConfig()
        arrivals[number] = [Arrival(number, Request(tokens, FIXED, rng.choice((0, 1, 50)) + 1, sampling=sampling))]
    gpu.waits.clear()
    actual = decode_batch(loop, arrivals)
    assert all(len(tokens) > 0 and isinstance(report, Report) for tokens, _, report in actual.values())
    assert len(Graph.captured) == num_captures
    assert set(gpu.waits) <= {"exchange.py: finish", *ONCE}
