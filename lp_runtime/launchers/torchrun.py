"""Launcher of replicas under torchrun: every rank runs the same program, decoding rank 0's requests."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterator

import torch

from lp_runtime import errors
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.shards import ShardPlace, meet_in_store, said_by_first
from lp_runtime.errors import (
    ConfigError,
    LaunchError,
    LookaheadError,
    ReplicaError,
    RequestError,
    ShardError,
    as_known_kind,
    unforeseen_as,
)
from lp_runtime.launchers.base import REQUEST_ERRORS, Launcher
from lp_runtime.launchers.split import choose_split, visible_on, with_parallelism
from lp_runtime.launchers.wire.sealed_request import open_request, seal
from lp_runtime.replica.loaded_model import ReplicaInfo, load_follower
from lp_runtime.replica.replica import start_replica
from lp_runtime.request.output import Event, Report, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.utils.callables import never

CLOSED = b"closed"  # broadcast in place of a request when rank 0 closes
STORE_SECONDS = 60.0  # for shards to meet before they load; short, since torchrun starts them at the same time
logger = logging.getLogger(__name__)


class TorchrunLauncher(Launcher):
    """launcher=torchrun on shard 0 of a replica.

    In a script every rank makes the same calls. If only rank 0 makes them (the command line), the other ranks call
    `close` at once, which serves rank 0's requests until rank 0 closes.
    """

    def __init__(self, config: RuntimeConfig, context: ReplicaContext, place: ShardPlace):
        super().__init__(context.num_replicas, context.rank == 0, place.num_shards)
        stack = contextlib.ExitStack()
        self._leave = weakref.finalize(self, stack.close)  # also at the end of the process, while modules still work
        with unforeseen_as(LaunchError, f"rank {context.rank * place.num_shards} failed at start"):
            self._replica = stack.enter_context(start_replica(config, context, place))
            self._tell(self._replica.info)
        self._is_open = True  # whether this rank may still take part in requests
        self._turn = threading.RLock()  # held during a call that the other ranks make, too
        self._events: Iterator[Event] = iter(())  # of the latest request
        self._is_cancelled = False

    @property
    def info(self) -> ReplicaInfo:
        return self._replica.info

    def _run(self, request: Request, should_cancel: Callable[[], bool]) -> Generator[Event, None, None]:
        with self._turn:
            if not self._is_open:  # another thread has closed meanwhile
                raise ReplicaError("the runtime is closed")
            shared = self._share(request)
            if shared is None:
                raise ReplicaError("rank 0 has closed while this rank asked for one more request")
            self._begin(shared, should_cancel)
        try:
            while (event := self._next_event()) is not None:
                yield event
        except GeneratorExit:  # the caller stopped early
            self._cancel()
            raise

    def _begin(self, request: Request, should_cancel: Callable[[], bool] = never) -> None:
        self._is_cancelled = False
        self._events = self._replica.decode(request, lambda: self._is_cancelled or should_cancel())

    def _next_event(self) -> Event | None:
        """Decode the latest request, in step with the other ranks, up to its next event; None after the last one."""
        with self._turn:
            try:
                event = next(self._events, None)
            except REQUEST_ERRORS as error:  # raised on all ranks
                self._tell(as_known_kind(error))
                raise
            except (Exception, KeyboardInterrupt):
                self._is_open = False  # the group is broken
                raise
            if event is not None:
                self._tell(event)
            return event

    def _cancel(self) -> None:
        """Cancel the latest request, unless it has ended."""
        self._is_cancelled = True
        self._end_request()

    def _end_request(self) -> None:
        with contextlib.suppress(*REQUEST_ERRORS):  # these end a request, too
            while self._next_event() is not None:
                pass

    def _tell(self, message: object) -> None:
        """Send an event or error to this replica's other shards, whose ranks run the same script."""
        if self._replica.leading is not None:
            self._replica.leading.tell(message)

    def _share(self, request: Request | None) -> Request | None:
        """Return rank 0's request on every rank; None when rank 0 closes. The other ranks wait without limit."""
        group = self._replica.group
        if group.is_alone:
            return request
        message = None
        if group.rank == 0:
            message = CLOSED if request is None else seal(request)
        message = group.connected.broadcast(message, is_patient=True)
        if message == CLOSED:
            self._is_open = False
            return None
        try:
            return open_request(message)  # on rank 0, too: all ranks have equal objects
        except RequestError as error:  # not on all ranks: those that could open it have begun
            self._is_open = False
            raise ReplicaError(str(error)) from error

    def _close(self) -> None:
        self._is_cancelled = True  # another thread may be decoding
        try:
            with self._turn:
                if self._is_open:
                    self._cancel()
                    while (request := self._share(None)) is not None:  # on rank 0 there is none
                        self._begin(request)
                        self._end_request()  # its errors are raised to the caller on rank 0
                    self._tell(None)
        finally:
            self._is_open = False
            self._leave()


class TorchrunFollower(Launcher):
    """launcher=torchrun on a shard other than 0: yields the same events as shard 0 of its replica."""

    def __init__(self, config: RuntimeConfig, context: ReplicaContext, place: ShardPlace):
        super().__init__(context.num_replicas, False, place.num_shards)
        with unforeseen_as(LaunchError, f"rank {context.rank * place.num_shards + place.shard} failed at start"):
            self._follower = load_follower(config, context.device_index, context.num_local, place)
            self._messages = self._follower.messages()
            info = next(self._messages)
        assert isinstance(info, ReplicaInfo)
        self._info = info
        self._has_ended = False  # whether shard 0 has closed
        self._turn = threading.Lock()  # held while a message is read

    @property
    def info(self) -> ReplicaInfo:
        return self._info

    def _run(self, request: Request, should_cancel: Callable[[], bool]) -> Generator[Event, None, None]:
        for event in self._until_end():
            try:
                yield event
            except GeneratorExit:  # the caller stopped early: skip the rest, which shard 0 still sends
                with contextlib.suppress(ShardError, *REQUEST_ERRORS):
                    for _ in self._until_end() if isinstance(event, StepOutput) else ():
                        pass
                raise
        if self._has_ended:
            raise ReplicaError("rank 0 has closed while this rank asked for one more request")

    def _until_end(self) -> Iterator[Event]:
        """Yield shard 0's events up to the end of a request or of the runtime; raise shard 0's error."""
        while (event := self._next_event()) is not None:
            yield event
            if isinstance(event, Report):
                return

    def _next_event(self) -> Event | None:
        with self._turn:
            if self._has_ended:
                return None
            event = next(self._messages, None)
            self._has_ended = event is None
        if isinstance(event, REQUEST_ERRORS):
            raise event
        assert event is None or isinstance(event, StepOutput | Report)
        return event

    def _close(self) -> None:
        with contextlib.suppress(ShardError):  # shard 0 ended without closing
            while not self._has_ended:
                with contextlib.suppress(*REQUEST_ERRORS):
                    for _ in self._until_end():
                        pass
        self._has_ended = True
        self._follower.close()


def with_split(config: RuntimeConfig, world: ReplicaContext) -> RuntimeConfig:
    """Return settings whose gpus_per_replica is a number; if not given, rank 0 chooses it for all ranks.

    Rank 0 knows the free memory of its GPU, and the speeds in its cache folder. All ranks raise its error.
    """
    if config.model.parallelism == "pipeline" and config.gpus_per_replica != 1:
        raise ConfigError("model.parallelism=pipeline: not under torchrun, which starts a process for each GPU")
    if config.is_split_chosen:
        return with_parallelism(config, "tensor")
    is_alone = world.num_replicas == 1 or not visible_on(config.device)
    if config.gpus_per_replica == "auto" and is_alone:
        return dataclasses.replace(with_parallelism(config, "tensor"), gpus_per_replica=1)
    given = dataclasses.replace(config, gpus=world.num_replicas)

    def free() -> list[int]:
        return [torch.cuda.mem_get_info(world.device_index)[0]]

    def chosen() -> str:
        try:
            with unforeseen_as(LaunchError, f"gpus_per_replica={config.gpus_per_replica}"):
                return str(choose_split(given, world.num_replicas, free, world.num_local, False).num_shards)
        except LookaheadError as error:
            return f"{type(error).__name__} {error}"

    answer = said_by_first(world, "split", chosen, STORE_SECONDS, world.rank, world.num_replicas)
    kind, _, message = answer.partition(" ")
    if message:
        raise getattr(errors, kind)(message)
    return with_parallelism(dataclasses.replace(given, gpus_per_replica=int(answer)), "tensor")


def launch_under_torchrun(config: RuntimeConfig) -> Launcher:
    """Start this rank's shard of its replica; consecutive ranks are the shards of one replica."""
    world = ReplicaContext.from_torchrun()
    if config.gpus is not None and config.gpus != world.num_replicas:
        logger.warning("gpus=%d is ignored: torchrun sets it to WORLD_SIZE=%d", config.gpus, world.num_replicas)
    config = with_split(config, world)
    num_shards = config.num_shards
    context, shard = world.divided(num_shards)
    if num_shards == 1:
        return TorchrunLauncher(config, context, ShardPlace())
    place = meet_in_store(context, shard, num_shards, STORE_SECONDS, config.failure.timeout)
    return (TorchrunLauncher if place.is_leader else TorchrunFollower)(config, context, place)
