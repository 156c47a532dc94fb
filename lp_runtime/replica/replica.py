"""A replica: one process's model, its membership in the group, and its engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch.distributed as dist

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.decoder.draft_pool import DraftPool
from lp_runtime.distributed.devices import check_one_each, gpu_number
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.exchange import Exchange, gather_rows
from lp_runtime.distributed.process_group import GroupOptions, process_group
from lp_runtime.distributed.shards import ShardPlace
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.batch import Arrival, KeyedEvent
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import LookaheadError, RequestMemoryError
from lp_runtime.model.loading.loader import WHOLE, load_tokenizer
from lp_runtime.replica.corpus_store import open_corpus
from lp_runtime.replica.draft_store import DraftStore
from lp_runtime.replica.loaded_model import MAY_SHARE_GPUS, LoadedModel, load_replica
from lp_runtime.replica.loading import group_not_captured
from lp_runtime.replica.profiler import profiled
from lp_runtime.replica.retries import RetriedBatch, RetriedRequest
from lp_runtime.request.output import Event, Report
from lp_runtime.request.request import Request
from lp_runtime.text.stop_strings import StopStrings
from lp_runtime.utils.callables import never

log = logging.getLogger(__name__)

UNLIMITED_TOKENS = 1 << 40  # encodes an unknown capacity in the gather; above any real one


class Replica:
    """A loaded and checked model that is connected to its peers. Created by `join_group`."""

    def __init__(
        self,
        config: RuntimeConfig,
        loaded: LoadedModel,
        group: Group,
        times_are_late: bool,
        is_compiling: Callable[[], bool] | None,
    ):
        model = loaded.model
        self.group = group
        self.info = loaded.info
        self.leading = model.leading
        self._config = config.model
        self._device = model.device
        self._profile_dir = config.profile_dir if config.profile else None
        self._draft_store = DraftStore.of(config.lookahead, model.vocabulary_size)
        draft_tables = self._draft_store.load(group, loaded.is_start) if self._draft_store else None
        calibration = Calibration(model, group, config.cache_dir, loaded.known)
        corpus = open_corpus(
            config, lambda: self._tokenizer, model.vocabulary_size, group, loaded.corpus, loaded.is_start
        )
        draft_pool = DraftPool(draft_tables, corpus)
        grammars = Grammars(lambda: self._tokenizer, model.vocabulary_size, self.info.eos_token_ids)
        exchange = partial(Exchange, sleeps=loaded.sleeps)
        self._engine = Engine(model, group, calibration, draft_pool, times_are_late, exchange, grammars)
        loaded.progress.begin("measuring step times and the vocabulary prior")
        self._engine.prepare(config.lookahead, is_compiling)

    def decode(self, request: Request, should_cancel: Callable[[], bool] = never) -> Iterator[Event]:
        """Decode one request in step with the other replicas of the group; see Engine.run.

        If memory runs out on any replica, all of them free some and decode the rest of the request again.
        """
        retried = RetriedRequest(request)
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
        events = self._engine.run(request, stop=self._stop(request), should_cancel=should_cancel)
        if self._profile_dir is None:
            return events
        return profiled(events, self._profile_dir, self.group.rank, self._device)

    @property
    def supports_batching(self) -> bool:
        """Whether requests can be decoded in one forward pass, by `decode_batch`."""
        return self.group.is_alone and self._profile_dir is None

    def decode_batch(self, arrivals: Callable[[], Iterable[Arrival]]) -> Iterator[KeyedEvent]:
        """Decode requests as they arrive, several per forward pass; yield (key, event); see Engine.run_batch.

        `arrivals`, called between two steps, returns the requests that have arrived; their stop strings are added here.
        A request for which memory runs out is decoded again once another one has ended.
        """
        batch = RetriedBatch()

        def arrived() -> Iterator[Arrival]:
            for arrival in batch.arrive(arrivals()):
                yield replace(arrival, stop=self._stop(arrival.request))

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
        return StopStrings(self._tokenizer, request.stop, request.text_context, request.reasoning, request.stop_after)

    def _save_draft_tables(self, event: Event | LookaheadError, request: Request) -> None:
        """Write the draft tables to the draft store if the event ends a request of its scope."""
        is_end = isinstance(event, Report) and request.draft_scope == ""
        if not is_end or self._draft_store is None or self.group.rank != 0:
            return
        draft_tables = self._engine.draft_pool.most_learned("")
        if draft_tables is not None and draft_tables.num_bytes == self._draft_store.num_bytes:
            self._draft_store.save(draft_tables)

    @cached_property
    def _tokenizer(self):
        return load_tokenizer(self._config)


@contextmanager
def join_group(
    config: RuntimeConfig,
    loaded: LoadedModel,
    context: ReplicaContext,
    store: dist.Store | None = None,  # type: ignore[name-defined]  # torch does not re-export it for type checkers
    is_abandoned: Callable[[], bool] = never,
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
        is_compiling = never if loaded.early_start is None else loaded.early_start.is_compiling
        known = np.array([capacity, model.timer is not None, model.graphs is not None, gpu, is_compiling()])
        capacities, are_late, are_captured, gpus, are_compiling = gather_rows(known, group).T
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
            not_captured=group_not_captured(model, are_late, are_captured),
        )
        awaited = is_compiling if are_compiling.any() else None
        yield Replica(config, replace(loaded, info=info), group, bool(are_late.any()), awaited)


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
