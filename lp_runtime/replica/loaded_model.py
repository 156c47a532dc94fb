"""Loading of a replica: all that its process does before it meets the others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lp_runtime.calibration.calibration import Measured
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.decoder.sampler_factory import make_sampler
from lp_runtime.distributed.devices import must_sleep, warn_of_few_cores
from lp_runtime.distributed.environment import use_expandable_segments
from lp_runtime.distributed.precision import turn_off_tf32
from lp_runtime.distributed.shards import ShardPlace
from lp_runtime.distributed.store import address_of
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.capacity import capacity_in_tokens, exchange_bytes, num_sharing
from lp_runtime.model.forward.following import Follower
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import OVERHEAD_TOKENS
from lp_runtime.model.loading.loader import WHOLE, eos_token_ids
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import make_prefix_cache
from lp_runtime.replica.compile_ahead import compile_steps
from lp_runtime.replica.corpus_store import KnownCorpus
from lp_runtime.replica.early_start import EarlyStart
from lp_runtime.replica.loading import choose_device, ready_follower, ready_model
from lp_runtime.replica.pass_memory import measure_pass_bytes
from lp_runtime.replica.profiler import check_folder
from lp_runtime.request.request import Request
from lp_runtime.sampling.hf_settings import defaults_of, warn_of_ignored_defaults
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.utils.jit import UNSAVED
from lp_runtime.utils.limits import num_cores
from lp_runtime.utils.startup import Progress

MAY_SHARE_GPUS = ("gloo", "shared")  # backends with which replicas may share a GPU
# What clients of servers often ask for, next to the model's defaults.
SERVED_SAMPLING = tuple(SamplingConfig(temperature=1.0, top_p=top_p, seed=0) for top_p in (None, 0.95))


@dataclass(frozen=True)
class ReplicaInfo:
    """Facts about the replicas' model that the driver needs.

    Attributes:
        vocabulary_size: token ids are below it.
        context_length: upper bound on prompt and output tokens together; None if the model sets no limit.
        defaults: those sampling.hf_settings.APPLIED_DEFAULTS that the model's generation_config.json sets.
        dtype: torch's name of the model's dtype, without "torch.".
        self_check: largest relative difference that the start-up self-check saw.
        capacity: tokens of prompts and outputs together that fit into every replica's memory at start; None if unknown.
        cache_bytes_per_token: bytes of a token's keys and values on a replica's first GPU; 0 if unknown.
        not_captured: why passes are not captured on some replica's GPU; None if all capture them, and on CPUs.
    """

    vocabulary_size: int
    context_length: int | None
    eos_token_ids: frozenset[int]
    defaults: dict[str, Any]
    device: str
    dtype: str
    self_check: float
    capacity: int | None
    supports_batching: bool = False
    not_captured: str | None = None
    cache_bytes_per_token: int = 0


@dataclass(frozen=True)
class LoadedModel:
    """A loaded and checked model, with what this process found out for it.

    Measurements are added to `known` as they are made, and reused when the replica joins another group, as is `corpus`.
    `sleeps` is whether the process sleeps while it waits for its GPU; see `must_sleep`. `is_start` is whether the
    runtime starts; False when the replica joins a later group, also if its process has just been restarted.
    """

    model: ModelRunner
    info: ReplicaInfo
    known: Measured
    progress: Progress = field(default_factory=lambda: Progress(is_shown=False))
    sleeps: bool = False
    corpus: KnownCorpus = field(default_factory=KnownCorpus)
    is_start: bool = True
    early_start: EarlyStart | None = None


def load_replica(
    config: RuntimeConfig,
    device_index: int,
    num_local: int,
    owns_process: bool,
    owns_device: bool = False,
    place: ShardPlace = WHOLE,
    batches: bool = False,
) -> LoadedModel:
    """Load and check the model of a replica, or its shard 0, which leads the other shards.

    Args:
        num_local: processes on this machine: the shards of all its replicas.
        owns_process: whether the process serves only this replica, which then sets the thread count.
        owns_device: whether a GPU is booked for this replica, which may then use all of its memory.
        batches: whether several requests may be decoded in one forward pass, so that such passes are captured now.
    """
    device = _prepare_process(config, device_index, num_local, owns_process)
    if device.type == "cuda" and device_index == 0 and not owns_device:  # booked GPUs may come with booked cores
        warn_of_few_cores(num_local)
    progress = Progress(config.show_progress and device_index == 0)  # one per machine reports
    progress.begin("compiling code that is not cached")  # before passes are timed: compiling would slow them down
    early_start = EarlyStart.of(config, owns_process)
    if config.lookahead.drafter == "full" and early_start is None:
        compile_steps(is_shared=config.num_replicas > 1)
    model, self_check = ready_model(config, device, progress, place, batches)
    if device_index == 0:  # one per machine reports
        warn_of_ignored_defaults(model.model)
    end = eos_token_ids(model.model)
    any_request = Request((0,), PLAIN, max_new_tokens=1, sampling=SamplingConfig(seed=0), eos_token_ids=end)
    make_sampler(model, any_request)  # refuses model defaults that are not supported
    for sampling in (any_request.sampling, *(SERVED_SAMPLING if batches else ())):
        _sample_once(model, make_sampler(model, replace(any_request, sampling=sampling)))
    num_bytes = _exchange_bytes(config, num_local) if device.type == "cuda" else 0
    pass_bytes = measure_pass_bytes(model)
    model.slots.clear()
    capacity = capacity_in_tokens(model, num_sharing(device, num_local, owns_device), num_bytes, pass_bytes)
    model.slots.prefixes = make_prefix_cache(model, config.prefix_cache_bytes, capacity)
    model.slots.limit = None if capacity is None else capacity + OVERHEAD_TOKENS
    info = ReplicaInfo(
        vocabulary_size=model.vocabulary_size,
        context_length=model.context_length,
        eos_token_ids=end,
        defaults=defaults_of(model.model),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        self_check=self_check,
        capacity=capacity,
        supports_batching=model.supports_batching and not config.profile,
        cache_bytes_per_token=model.cache_bytes_per_token,
    )
    sleeps = must_sleep(num_local, owns_device)
    return LoadedModel(model, info, Measured(), progress, sleeps, early_start=early_start)


def _sample_once(model: ModelRunner, sampler: Sampler) -> None:
    """Feed and sample a token on a GPU, so that no request waits for the sampler's kernels to compile."""
    if model.device.type != "cuda" or model.feeds_chains:
        return
    sampler, tree = replace(sampler, num_top_k=K), TokenTree([0], max_depth=0)
    with model.slots.borrowed() as slot:
        model.begin(slot, 2)
        model.prefill(slot, [0])
        sampler.sample(model.forward(StepInputs.whole(slot, tree)), tree, [0], [0, 0])


def load_follower(config: RuntimeConfig, device_index: int, num_local: int, place: ShardPlace) -> Follower:
    """Load a shard other than 0; see `load_replica`."""
    device = _prepare_process(config, device_index, num_local, owns_process=True)
    return ready_follower(config, device, place)


def _prepare_process(config: RuntimeConfig, device_index: int, num_local: int, owns_process: bool) -> torch.device:
    """Choose this process's device and configure torch for it; see `load_replica`."""
    if config.launcher.interface is not None:
        address_of(config.launcher.interface)  # refuse a wrong name before the model is loaded
    UNSAVED.is_silent = device_index > 0  # one per machine reports
    is_shared = config.launcher.backend in MAY_SHARE_GPUS and torch.cuda.is_available()
    index = device_index % torch.cuda.device_count() if is_shared else device_index
    device = choose_device(config.device, index)
    if config.profile:
        check_folder(config.profile_dir)
    if owns_process:
        turn_off_tf32()
    if device.type == "cuda":
        if not torch.cuda.is_initialized():  # torch's allocator reads its settings when it starts
            use_expandable_segments()
        torch.cuda.set_device(device)
    elif owns_process:  # the processes of a machine share its cores equally
        torch.set_num_threads(max(1, num_cores() // num_local))
    return device


def _exchange_bytes(config: RuntimeConfig, num_local: int) -> int:
    # Replicas of one machine use shared memory. Across machines they use gloo if any machine has several replicas.
    may_use_nccl = config.launcher.backend == "nccl" or (config.launcher.backend == "auto" and num_local == 1)
    return exchange_bytes(max(num_local, config.num_replicas), may_use_nccl)
