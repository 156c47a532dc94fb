"""A replica: one process's model, its place in the group, and the engine over both."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.group import Group
from lp_runtime.distributed.process_group import GroupOptions, address_of, process_group
from lp_runtime.engine.batch import Arrival, never_cancel
from lp_runtime.engine.calibration import Calibration, Measured
from lp_runtime.engine.draft_store import DraftStore
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.output import Event, Report
from lp_runtime.engine.profiler import check_folder, profiled
from lp_runtime.engine.request import Request
from lp_runtime.engine.sampler_factory import make_sampler_spec
from lp_runtime.errors import ConfigError, LookaheadError, ModelError
from lp_runtime.model.cuda_graph import can_capture
from lp_runtime.model.kv_cache.capacity import capacity_in_tokens, exchange_bytes
from lp_runtime.model.loader import eos_token_ids, load_model, load_tokenizer
from lp_runtime.model.optimize.fusing import fuse_blocks
from lp_runtime.model.optimize.packing import pack_if_faster, pack_linears
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.self_check import check_model_or_disable_graphs
from lp_runtime.model.tokenizer import StopStrings
from lp_runtime.model.types import CausalLM
from lp_runtime.sampling.hf_settings import defaults_of

log = logging.getLogger(__name__)

UNLIMITED_TOKENS = 1 << 40  # stands for an unknown capacity in the exchange


@dataclass(frozen=True)
class ReplicaInfo:
    """What a driver must know of the model that its replicas hold.

    Attributes:
        vocabulary_size: token ids are below it.
        context_length: tokens of prompt and output together at most; None if the model sets no limit.
        eos_token_ids: the model's end-of-sequence ids.
        defaults: what the model's generation_config.json sets of sampling.hf_settings.APPLIED_DEFAULTS.
        device: device of the model, as torch names it.
        dtype: dtype of the model, as torch names it, without "torch.".
        self_check: largest relative difference that the start-up self-check saw.
        capacity: tokens of prompts and outputs together that fit into every replica's memory at start; None if unknown.
        supports_batching: whether several requests can be decoded in one forward pass.
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


@dataclass(frozen=True)
class LoadedModel:
    """A model that is loaded and checked, and what this process has measured of it.

    Attributes:
        model: runs it.
        info: what a driver must know of it.
        known: what was measured; filled in when it is.
    """

    model: ModelRunner
    info: ReplicaInfo
    known: Measured


class Replica:
    """A loaded, checked and connected model. Made by `join_group`.

    Args:
        config: the runtime's.
        loaded: this replica's model.
        group: the replicas that share the steps of a request.
        times_are_late: see Sequence.

    Attributes:
        group: as given.
        info: what a driver must know of the model.
    """

    def __init__(self, config: RuntimeConfig, loaded: LoadedModel, group: Group, times_are_late: bool):
        model = loaded.model
        self.group, self.info = group, loaded.info
        self._config = config.model
        self._device = model.device
        self._profile_dir = config.profile_dir if config.profile else None
        self._draft_store = DraftStore.of(config.lookahead, model.vocabulary_size)
        self._draft_tables = self._draft_store.load(group) if self._draft_store else None
        calibration = Calibration(model, group, config.cache_dir, loaded.known)
        self._engine = Engine(model, group, calibration, self._draft_tables, times_are_late)
        self._engine.prepare(config.lookahead)

    def decode(self, request: Request, should_cancel: Callable[[], bool] = never_cancel) -> Iterator[Event]:
        """Decode one request, in concert with the other replicas of the group; see Engine.run."""
        events = self._engine.run(request, stop=self._stop(request), should_cancel=should_cancel)
        if self._profile_dir is not None:
            events = profiled(events, self._profile_dir, self.group.rank, self._device)
        for event in events:
            self._note(event, request)
            yield event

    @property
    def supports_batching(self) -> bool:
        """Whether requests can be decoded in one forward pass, by `decode_batch`."""
        return self.group.is_alone and self._profile_dir is None

    def decode_batch(
        self, arrivals: Callable[[], Iterable[tuple[Hashable, Request, Callable[[], bool]]]]
    ) -> Iterator[tuple[Hashable, Event | LookaheadError]]:
        """Decode requests as they arrive, several in one forward pass; see Engine.run_batch.

        Args:
            arrivals: asked between two steps for (key, request, should_cancel) of the requests that have arrived.

        Yields:
            (key, event) for every request.
        """
        requests: dict[Hashable, Request] = {}

        def arrived() -> Iterator[Arrival]:
            for key, request, should_cancel in arrivals():
                requests[key] = request  # until it has ended
                yield Arrival(key, request, self._stop(request), should_cancel)

        for key, event in self._engine.run_batch(arrived):
            is_end = isinstance(event, Report | LookaheadError)
            self._note(event, requests.pop(key) if is_end else requests[key])
            yield key, event

    def _stop(self, request: Request) -> StopStrings | None:
        return StopStrings(self._tokenizer, request.stop) if request.stop else None

    def _note(self, event: Event | LookaheadError, request: Request) -> None:
        """Store the draft tables after a request that has used the stored ones."""
        if not isinstance(event, Report) or self._draft_store is None or self.group.rank != 0:
            return
        assert self._draft_tables is not None  # loaded from the store
        if request.lookahead.draft_tables != "request" and request.lookahead.drafter == "full":
            self._draft_store.save(self._draft_tables)

    @cached_property
    def _tokenizer(self):
        return load_tokenizer(self._config)


def load_replica(config: RuntimeConfig, device_index: int, num_local: int, owns_process: bool) -> LoadedModel:
    """Load and check the model of a replica.

    Args:
        config: the runtime's.
        device_index: which of the GPUs that this process sees is the replica's.
        num_local: replicas on this machine.
        owns_process: whether the process is there for this replica alone, which then sets its thread count.

    Raises:
        ConfigError: if a setting cannot be met on this machine.
        ModelError: if the model cannot be loaded, or fails the self-check.
    """
    if config.launcher.interface is not None:
        address_of(config.launcher.interface)  # refused before a model is loaded
    is_shared = config.launcher.backend == "gloo" and torch.cuda.is_available()
    index = device_index % torch.cuda.device_count() if is_shared else device_index
    device = choose_device(config.device, index)
    if config.profile:
        check_folder(config.profile_dir)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif owns_process:  # replicas that share a machine share its cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_local))
    model, self_check = ready_model(config, device)
    any_request = Request((0,), PLAIN, max_new_tokens=1, sampling=SamplingConfig(seed=0))
    make_sampler_spec(model, any_request)  # refuses model defaults that cannot be kept
    num_sharing = num_local if device.type == "cpu" else -(-num_local // torch.cuda.device_count())
    may_use_nccl = config.launcher.backend in ("auto", "nccl")
    num_bytes = exchange_bytes(num_local, may_use_nccl) if device.type == "cuda" else 0
    info = ReplicaInfo(
        vocabulary_size=model.vocabulary_size,
        context_length=model.context_length,
        eos_token_ids=eos_token_ids(model.model),
        defaults=defaults_of(model.model),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        self_check=self_check,
        capacity=capacity_in_tokens(model, num_sharing, num_bytes),
        supports_batching=model.supports_batching and not config.profile,
    )
    return LoadedModel(model, info, Measured())


@contextmanager
def join_group(
    config: RuntimeConfig,
    loaded: LoadedModel,
    context: ReplicaContext,
    store: dist.Store | None = None,  # type: ignore[name-defined]  # which torch does not re-export for type checkers
    is_abandoned: Callable[[], bool] = never_cancel,
) -> Iterator[Replica]:
    """Join the group of all replicas, and leave it at the end of the `with` block.

    Args:
        config: the runtime's.
        loaded: this replica's model.
        context: who this replica is.
        store: where the replicas meet, if it is open in this process.
        is_abandoned: see process_group.

    Yields:
        the replica.

    Raises:
        ConfigError: if a setting cannot be met.
        LaunchError: if the group does not form.
    """
    launcher, info = config.launcher, loaded.info
    options = GroupOptions(launcher.timeout, config.failure.timeout, launcher.backend, launcher.interface)
    with process_group(context, loaded.model.device, options, store, is_abandoned) as group:
        capacity = UNLIMITED_TOKENS if info.capacity is None else min(info.capacity, UNLIMITED_TOKENS)
        capacities, are_late = gather_rows(np.array([capacity, loaded.model.timer is not None]), group).T
        smallest = int(capacities.min())
        info = replace(info, capacity=None if smallest == UNLIMITED_TOKENS else smallest)
        yield Replica(config, replace(loaded, info=info), group, bool(are_late.any()))


@contextmanager
def start_replica(config: RuntimeConfig, context: ReplicaContext) -> Iterator[Replica]:
    """Load the model, check it and join the group: `load_replica` and `join_group` in one."""
    loaded = load_replica(config, context.device_index, context.num_local, context.owns_process)
    with join_group(config, loaded, context) as replica:
        yield replica


def ready_model(config: RuntimeConfig, device: torch.device) -> tuple[ModelRunner, float]:
    """Load a model and check it.

    Returns:
        (model, difference): the largest relative difference that the self-check saw.

    Raises:
        ModelError: if it cannot be loaded, or failed.
    """
    return prepare_model(load_model(config.model, device, config.dtype), config, device)


def prepare_model(loaded: CausalLM, config: RuntimeConfig, device: torch.device) -> tuple[ModelRunner, float]:
    """Fuse, pack and check a Hugging Face causal LM that is on its device already.

    Returns:
        (model, difference): the largest relative difference that the self-check saw.

    Raises:
        ModelError: if the model failed the self-check.
    """
    strict_tokens = config.strict_tokens if config.exactness == "strict" else None
    changes = _optimize(loaded, config, device)
    model = ModelRunner(loaded, config.model.prefill_chunk, strict_tokens, own_attention=True)
    if config.compile != "off" and strict_tokens is None and can_capture(loaded):
        model.enable_graphs(capture=True, compiled=config.compile == "full")
    try:
        return model, check_model_or_disable_graphs(model)
    except ModelError as error:
        hint = f" (with layers of our own: try {' '.join(changes)})" if changes else ""
        raise ModelError(f"{error}{hint}") from error


def _optimize(loaded: CausalLM, config: RuntimeConfig, device: torch.device) -> list[str]:
    """Fuse and pack a model's layers, as the settings say; return the settings that would undo what was done."""
    undo = []
    if config.model.fusing == "auto" and config.model.device_map is None and fuse_blocks(loaded):
        undo.append("model.fusing=off")
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what was freed, for others that share the GPU
    if config.model.packing == "auto":
        # With exactness=strict all replicas must compute alike, whatever each of them would measure.
        pack = pack_linears if config.exactness == "strict" else pack_if_faster
        if pack(loaded):
            undo.append("model.packing=off")
    return undo


def choose_device(device: str, index: int) -> torch.device:
    """Return the device of a replica.

    Args:
        device: "auto", "cpu" or "cuda".
        index: which of the GPUs that this process sees is the replica's.

    Raises:
        ConfigError: if CUDA is wanted and this process does not see that many GPUs.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device=cuda: replica needs GPU {index}, but this process sees {torch.cuda.device_count()}")
    return torch.device("cuda", index)
