"""A replica: one process's model, its membership in the group, and its engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lp_runtime.calibration.background_prior import BackgroundPrior
from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.calibration.step_meter import measure_steps
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.decoder.draft_pool import DraftPool
from lp_runtime.decoder.sampler_factory import make_sampler_spec
from lp_runtime.distributed.context import ReplicaContext, use_expandable_segments
from lp_runtime.distributed.devices import check_one_each, gpu_number, must_sleep, warn_of_few_cores
from lp_runtime.distributed.exchange import Exchange, gather_rows
from lp_runtime.distributed.precision import turn_off_tf32
from lp_runtime.distributed.process_group import GroupOptions, process_group
from lp_runtime.distributed.shards import ShardPlace
from lp_runtime.distributed.store import address_of
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.batch import Arrival
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.running_request import never_cancel
from lp_runtime.errors import LookaheadError, RequestMemoryError
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.capacity import capacity_in_tokens, exchange_bytes, num_sharing
from lp_runtime.model.forward.following import Follower
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import OVERHEAD_TOKENS
from lp_runtime.model.loading.loader import WHOLE, eos_token_ids, load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import make_prefix_cache, scope_of
from lp_runtime.replica.compile_ahead import compile_steps
from lp_runtime.replica.corpus_store import open_corpus
from lp_runtime.replica.draft_store import DraftStore
from lp_runtime.replica.loading import choose_device, not_captured, ready_follower, ready_model
from lp_runtime.replica.pass_memory import measure_pass_bytes
from lp_runtime.replica.profiler import check_folder, profiled
from lp_runtime.replica.retries import BatchedRequest, RetriedBatch, RetriedRequest
from lp_runtime.request.output import Event, Report
from lp_runtime.request.request import Request
from lp_runtime.sampling.hf_settings import defaults_of
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.text.stop_strings import StopStrings
from lp_runtime.utils.progress import Progress

log = logging.getLogger(__name__)

MAY_SHARE_GPUS = ("gloo", "shared")  # backends with which replicas may share a GPU
UNLIMITED_TOKENS = 1 << 40  # encodes an unknown capacity in the gather; above any real one


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
    """A loaded and checked model, with the measurements that this process made of it.

    Measurements are added to `known` as they are made, and reused when the replica joins another group. `sleeps` is
    whether the process sleeps while it waits for its GPU; see `must_sleep`.
    """

    model: ModelRunner
    info: ReplicaInfo
    known: Measured
    progress: Progress = field(default_factory=lambda: Progress(is_shown=False))
    sleeps: bool = False


class Replica:
    """A loaded and checked model that is connected to its peers. Created by `join_group`.

    `leading` makes the replica's other shards run this shard's passes; None for a replica of one shard.
    """

    def __init__(self, config: RuntimeConfig, loaded: LoadedModel, group: Group, times_are_late: bool):
        model = loaded.model
        self.group = group
        self.info = loaded.info
        self.leading = model.leading
        self._config = config.model
        self._device = model.device
        self._profile_dir = config.profile_dir if config.profile else None
        self._draft_store = DraftStore.of(config.lookahead, model.vocabulary_size)
        draft_tables = self._draft_store.load(group) if self._draft_store else None
        calibration = Calibration(model, group, config.cache_dir, loaded.known, is_gradual=True)
        corpus = open_corpus(config, lambda: self._tokenizer, model.vocabulary_size, group)
        draft_pool = DraftPool(draft_tables, corpus)
        grammars = Grammars(lambda: self._tokenizer, model.vocabulary_size, self.info.eos_token_ids)
        exchange = partial(Exchange, sleeps=loaded.sleeps)
        self._engine = Engine(model, group, calibration, draft_pool, times_are_late, exchange, grammars)
        is_restarted = loaded.known.is_started
        loaded.progress.begin("measuring step times and the vocabulary prior")
        self._engine.prepare(config.lookahead)
        self._background = BackgroundPrior(calibration, group, config.lookahead, after_use=is_restarted)

    def close(self) -> None:
        """Stop the background work that runs between requests."""
        self._background.close()

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context in which background work is paused; only one thread at a time may enter it."""
        return self._background.paused()

    def decode(self, request: Request, should_cancel: Callable[[], bool] = never_cancel) -> Iterator[Event]:
        """Decode one request in step with the other replicas of the group; see Engine.run.

        If memory runs out on any replica, all of them free some and decode the rest of the request again.
        """
        retried = RetriedRequest(request)
        with self.in_use():
            while True:
                try:
                    for event in self._events(retried.rest, should_cancel):
                        self._save_draft_tables(event, request)
                        yield retried.handle(event)
                    return
                except RequestMemoryError:
                    if not retried.begin_again():
                        raise

    def _events(self, request: Request, should_cancel: Callable[[], bool]) -> Iterator[Event]:
        """Return the events of one attempt at a request."""
        events = self._engine.run(request, stop=self._stop(request), should_cancel=should_cancel)
        if self._profile_dir is None:
            return events
        return profiled(events, self._profile_dir, self.group.rank, self._device)

    @property
    def supports_batching(self) -> bool:
        """Whether requests can be decoded in one forward pass, by `decode_batch`."""
        return self.group.is_alone and self._profile_dir is None

    def decode_batch(
        self, arrivals: Callable[[], Iterable[BatchedRequest]]
    ) -> Iterator[tuple[Hashable, Event | LookaheadError]]:
        """Decode requests as they arrive, several in one forward pass, and yield (key, event); see Engine.run_batch.

        `arrivals`, called between two steps, returns (key, request, should_cancel) of the requests that have arrived. A
        request for which memory runs out is decoded again once another one has ended.
        """
        batch = RetriedBatch()

        def arrived() -> Iterator[Arrival]:
            for key, request, should_cancel in batch.arrive(arrivals()):
                yield Arrival(key, request, self._stop(request), should_cancel)

        with self.in_use():
            while True:
                for key, event in self._engine.run_batch(arrived):
                    self._save_draft_tables(event, batch.request(key))
                    if (reported := batch.handle(key, event)) is not None:
                        yield key, reported
                if not batch.is_waiting:
                    return

    def _stop(self, request: Request) -> StopStrings | None:
        if not request.stop:
            return None
        return StopStrings(self._tokenizer, request.stop, request.text_context, request.reasoning)

    def _save_draft_tables(self, event: Event | LookaheadError, request: Request) -> None:
        """Write the draft tables to the draft store if the event ends a request of its scope."""
        if not isinstance(event, Report) or self._draft_store is None or self.group.rank != 0:
            return
        if scope_of(request) != "":
            return
        draft_tables = self._engine.draft_pool.latest("")
        if draft_tables is not None and draft_tables.num_bytes == self._draft_store.num_bytes:
            self._draft_store.save(draft_tables)

    @cached_property
    def _tokenizer(self):
        return load_tokenizer(self._config)


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
        device_index: index of the GPU among those that this process sees.
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
    if config.lookahead.drafter == "full":
        compile_steps(is_shared=config.num_replicas > 1)
    model, self_check = ready_model(config, device, progress, place, batches)
    end = eos_token_ids(model.model)
    any_request = Request((0,), PLAIN, max_new_tokens=1, sampling=SamplingConfig(seed=0), eos_token_ids=end)
    spec = make_sampler_spec(model, any_request)  # refuses model defaults that are not supported
    _sample_once(model, spec.build(K))
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
    # Compiling takes minutes, and not equally long on all replicas. Run all passes once here, before the replicas meet:
    # afterwards a replica waits at most failure.timeout for a peer.
    is_compiled = model.graphs is not None and model.graphs.compiled
    known = Measured(steps=measure_steps(model) if is_compiled else None)
    return LoadedModel(model, info, known, progress, must_sleep(num_local, owns_device))


def _sample_once(model: ModelRunner, sampler: Sampler) -> None:
    """Feed and sample a token on a GPU, so that no request has to wait until the sampler's kernels are compiled."""
    if model.device.type != "cuda" or model.feeds_chains:
        return
    tree = TokenTree([0], max_depth=0)
    with model.slots.borrowed() as slot:
        model.begin(slot, 2)
        model.prefill(slot, [0])
        sampler.sample(model.forward(StepInputs.whole(slot, tree)), tree, [0], [0, 0])


def load_follower(config: RuntimeConfig, device_index: int, num_local: int, place: ShardPlace) -> Follower:
    """Load a shard other than 0. Arguments and errors as in `load_replica`."""
    device = _prepare_process(config, device_index, num_local, owns_process=True)
    return ready_follower(config, device, place)


def _prepare_process(config: RuntimeConfig, device_index: int, num_local: int, owns_process: bool) -> torch.device:
    """Choose this process's device and configure torch for it. Arguments and errors as in `load_replica`."""
    if config.launcher.interface is not None:
        address_of(config.launcher.interface)  # refuse a wrong name before the model is loaded
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
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_local))
    return device


def _exchange_bytes(config: RuntimeConfig, num_local: int) -> int:
    """Return the bytes of GPU memory that the exchange with the other replicas needs."""
    # Replicas of one machine use shared memory. Across machines they use gloo if any machine has several replicas.
    may_use_nccl = config.launcher.backend == "nccl" or (config.launcher.backend == "auto" and num_local == 1)
    return exchange_bytes(max(num_local, config.num_replicas), may_use_nccl)


@contextmanager
def join_group(
    config: RuntimeConfig,
    loaded: LoadedModel,
    context: ReplicaContext,
    store: dist.Store | None = None,  # type: ignore[name-defined]  # torch does not re-export it for type checkers
    is_abandoned: Callable[[], bool] = never_cancel,
    on_formed: Callable[[Group], None] | None = None,
    timeout: float | None = None,
) -> Iterator[Replica]:
    """Join the group of all replicas, and leave it at the end of the `with` block.

    Args:
        store: rendezvous store, if it is already open in this process.
        is_abandoned: polled while waiting for peers; true ends the wait.
        on_formed: called with the group before anything is exchanged in it.
        timeout: seconds within which all replicas must join; None for launcher.timeout.

    Raises:
        LaunchError: if the group does not form in time.
    """
    launcher, info = config.launcher, loaded.info
    options = GroupOptions(timeout or launcher.timeout, config.failure.timeout, launcher.backend, launcher.interface)
    with process_group(context, loaded.model.device, options, store, is_abandoned) as group:
        if on_formed is not None:
            on_formed(group)
        capacity = UNLIMITED_TOKENS if info.capacity is None else min(info.capacity, UNLIMITED_TOKENS)
        model = loaded.model
        gpu = gpu_number(model.device) if context.owns_device and model.device.type == "cuda" else 0
        known = np.array([capacity, model.timer is not None, model.graphs is not None, gpu])
        capacities, are_late, are_captured, gpus = gather_rows(known, group).T
        check_one_each(gpus.tolist())
        if config.exactness == "strict" and model.graphs is not None and not are_captured.all():
            reason = "another replica cannot capture its passes"
            log.warning("exactness=strict: continuing with compile=off, because %s", reason)
            model.disable_graphs(reason)  # other kernels round differently
        smallest = int(capacities.min())
        supports_batching = info.supports_batching and model.supports_batching
        info = replace(
            info,
            capacity=None if smallest == UNLIMITED_TOKENS else smallest,
            supports_batching=supports_batching,
            not_captured=not_captured(model, are_late, are_captured),
        )
        with closing(Replica(config, replace(loaded, info=info), group, bool(are_late.any()))) as replica:
            yield replica


@contextmanager
def start_replica(config: RuntimeConfig, context: ReplicaContext, place: ShardPlace = WHOLE) -> Iterator[Replica]:
    """Load the model, check it and join the group: `load_replica` and `join_group` in one.

    The peers load, compile and check at the same time. They have max(launcher.timeout, launcher.start_timeout) for it.
    """
    if context.owns_device:
        # Replicas may share a GPU with these backends. Every process sees its GPU as index 0, so rank 0 shows progress.
        context = replace(context, owns_device=config.launcher.backend not in MAY_SHARE_GPUS)
        config = replace(config, show_progress=config.show_progress and context.rank == 0)
    loaded = load_replica(
        config, context.device_index, context.num_local, context.owns_process, context.owns_device, place
    )
    timeout = max(config.launcher.timeout, config.launcher.start_timeout)
    with ExitStack() as stack:
        if loaded.model.leading is not None:
            stack.callback(loaded.model.leading.close)
        yield stack.enter_context(join_group(config, loaded, context, timeout=timeout))
