"""A replica: one process's model, its place in the group, and the decoding loop over both."""

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
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.process_group import address_of, process_group
from lp_runtime.engine.calibration import Calibration
from lp_runtime.engine.draft_store import DraftStore
from lp_runtime.engine.engine import Arrival, Engine, never_cancel
from lp_runtime.engine.output import Event, Report
from lp_runtime.engine.profiler import check_folder, profiled
from lp_runtime.engine.request import Request
from lp_runtime.engine.sampler_factory import make_sampler
from lp_runtime.errors import ConfigError, LookaheadError, ModelError
from lp_runtime.model.cuda_graph import can_capture
from lp_runtime.model.kv_cache.capacity import capacity_in_tokens
from lp_runtime.model.loader import eos_token_ids, load_model, load_tokenizer
from lp_runtime.model.optimize.fusing import fuse_blocks
from lp_runtime.model.optimize.packing import pack_if_faster, pack_linears
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.self_check import check_model
from lp_runtime.model.tokenizer import StopStrings
from lp_runtime.sampling.hf_settings import defaults_of

log = logging.getLogger(__name__)

MUCH_ROOM = 1 << 40  # tokens


@dataclass(frozen=True)
class ReplicaInfo:
    """What a driver must know of the model that its replicas hold.

    Attributes:
        vocabulary_size: token ids are below it.
        context_length: tokens of prompt and output together at most; None if the model sets no limit.
        eos_token_ids: the model's end-of-sequence ids.
        defaults: what the model's generation_config.json sets of lp_runtime.sampling.hf_settings.APPLIED_DEFAULTS.
        device, dtype: as torch names them.
        self_check: largest relative difference that the start-up self-check saw.
        capacity: tokens of prompts and outputs together that every replica's memory had room for at start; None if that
            could not be told.
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


class Replica:
    """A loaded, checked and connected model. Made by `join_group`."""

    def __init__(
        self,
        config: RuntimeConfig,
        context: ReplicaContext,
        loaded: LoadedModel,
        exchange_device: torch.device,
        reports_times_late: bool,
    ):
        model = loaded.model
        self.context = context
        self.exchange_device = exchange_device
        self.info = loaded.info
        self._config = config.model
        self._model = model
        place = (context.rank, context.num_replicas, exchange_device)
        self._memory_file = DraftStore.of(config.lookahead, model.vocabulary_size)
        self._draft_tables = self._memory_file.load(*place) if self._memory_file else None
        calibration = Calibration(model, *place, config.cache_dir, loaded.known)
        self._loop = Engine(model, *place, calibration, self._draft_tables, reports_times_late)
        self._loop.prepare(config.lookahead)
        self._device = model.device
        self._profile_dir = config.profile_dir if config.profile else None

    def decode(self, request: Request, should_cancel: Callable[[], bool] = never_cancel) -> Iterator[Event]:
        """See Engine.run."""
        events = self._loop.run(request, stop=self._stop(request), should_cancel=should_cancel)
        if self._profile_dir is not None:
            events = profiled(events, self._profile_dir, self.context.rank, self._device)
        for event in events:
            self._note(event, request)
            yield event

    @property
    def supports_batching(self) -> bool:
        """Whether requests may be decoded together."""
        return self.context.num_replicas == 1 and self._profile_dir is None

    def decode_batch(
        self, arrivals: Callable[[], Iterable[tuple[Hashable, Request, Callable[[], bool]]]]
    ) -> Iterator[tuple[Hashable, Event | LookaheadError]]:
        """See Engine.run_batch.

        Args:
            arrivals: (key, request, should_cancel) of those that have arrived.
        """
        requests = {}

        def arrived() -> Iterator[Arrival]:
            for key, request, should_cancel in arrivals():
                requests[key] = request  # until it has ended
                yield Arrival(key, request, self._stop(request), should_cancel)

        for key, event in self._loop.run_batch(arrived):
            is_end = isinstance(event, Report | LookaheadError)
            self._note(event, requests.pop(key) if is_end else requests[key])
            yield key, event

    def _stop(self, request: Request) -> StopStrings | None:
        return StopStrings(self._tokenizer, request.stop) if request.stop else None

    def _note(self, event: Event | LookaheadError, request: Request) -> None:
        settings = request.lookahead
        is_kept = self._memory_file and settings.draft_tables != "request" and settings.drafter == "full"
        if isinstance(event, Report) and is_kept and self.context.rank == 0:
            self._memory_file.save(self._draft_tables)

    @cached_property
    def _tokenizer(self):
        return load_tokenizer(self._config)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is loaded and checked, and what this process has measured of it."""

    model: ModelRunner
    info: ReplicaInfo
    known: dict[str, Any]


def load_replica(config: RuntimeConfig, device_index: int, num_local: int, owns_process: bool) -> LoadedModel:
    """Load and check the model of a replica.

    Args:
        config: the runtime's.
        device_index, num_local, owns_process: see ReplicaContext.

    Raises:
        ConfigError, ModelError: as the parts do.
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
    make_sampler(model, Request((0,), PLAIN, max_new_tokens=1))  # the model's own defaults must be ones we can keep
    num_sharing = num_local if device.type == "cpu" else -(-num_local // torch.cuda.device_count())
    info = ReplicaInfo(
        vocabulary_size=model.vocabulary_size,
        context_length=model.context_length,
        eos_token_ids=eos_token_ids(model.model),
        defaults=defaults_of(model.model),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        self_check=self_check,
        capacity=capacity_in_tokens(model, num_sharing),
        supports_batching=model.supports_batching and not config.profile,
    )
    return LoadedModel(model, info, {})


@contextmanager
def join_group(
    config: RuntimeConfig,
    loaded: LoadedModel,
    context: ReplicaContext,
    store: dist.Store | None = None,
    is_abandoned: Callable[[], bool] = lambda: False,
) -> Iterator[Replica]:
    """Join the group of all replicas, for as long as it is.

    Args:
        config: the runtime's.
        loaded: this replica's model.
        context: who this replica is.
        store: where the replicas meet, if it is open in this process.
        is_abandoned: see process_group.

    Raises:
        ConfigError, LaunchError: as the parts do.
    """
    device, launcher, info = loaded.model.device, config.launcher, loaded.info
    with process_group(
        context,
        device,
        launcher.timeout,
        store,
        launcher.backend,
        config.failure.timeout,
        is_abandoned,
        launcher.interface,
    ) as exchange_device:
        mine = np.array(
            [MUCH_ROOM if info.capacity is None else min(info.capacity, MUCH_ROOM), loaded.model.timer is not None]
        )
        rooms, late = gather_rows(mine, context.num_replicas, exchange_device).T
        info = replace(info, capacity=None if rooms.min() == MUCH_ROOM else int(rooms.min()))
        yield Replica(config, context, replace(loaded, info=info), exchange_device, bool(late.any()))


@contextmanager
def start_replica(config: RuntimeConfig, context: ReplicaContext) -> Iterator[Replica]:
    """Load the model, check it, join the group: see `load_replica` and `join_group`."""
    loaded = load_replica(config, context.device_index, context.num_local, context.owns_process)
    with join_group(config, loaded, context) as replica:
        yield replica


def ready_model(config: RuntimeConfig, device: torch.device) -> tuple[ModelRunner, float]:
    """Load a model and check it; returns it, and the largest relative difference that the self-check saw.

    Raises:
        ModelError: if it cannot be loaded, or failed.
    """
    return made_ready(load_model(config.model, device, config.dtype), config, device)


def made_ready(loaded, config: RuntimeConfig, device: torch.device) -> tuple[ModelRunner, float]:
    """The same with a Hugging Face causal LM that is on the device already."""
    strict_tokens = config.strict_tokens if config.exactness == "strict" else None
    num_fused = num_packed = 0
    if config.model.fusing == "auto" and config.model.device_map is None:
        num_fused = fuse_blocks(loaded)
        if num_fused and device.type == "cuda":
            torch.cuda.empty_cache()  # what was freed, for others that share the GPU
    if config.model.packing == "auto":
        # With exactness=strict all replicas must compute alike, whatever each of them would measure.
        num_packed = (pack_if_faster if strict_tokens is None else pack_linears)(loaded)
    model = ModelRunner(loaded, config.model.prefill_chunk, strict_tokens, own_attention=True)
    if config.compile != "off" and strict_tokens is None and can_capture(loaded):
        model.fix_sizes(capture=True, compiled=config.compile == "full")
        try:
            return model, check_model(model)
        except ModelError as error:
            log.warning("compile=%s: %s; going on with compile=off", config.compile, error)
            model.free_sizes()
    try:
        return model, check_model(model)
    except ModelError as error:
        changed = {"model.fusing=off": num_fused, "model.packing=off": num_packed}
        without = " ".join(setting for setting, count in changed.items() if count)
        raise ModelError(f"{error}{f' (with layers of our own: try {without})' if without else ''}") from error


def choose_device(device: str, index: int) -> torch.device:
    """The replica's device. `index` is among the GPUs this process sees.

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
