"""Replicas that torchrun started: every rank runs the same program, and rank 0's requests count."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterator

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.exchange import broadcast_object
from lp_runtime.engine.output import Event
from lp_runtime.engine.replica import ReplicaInfo, start_replica
from lp_runtime.engine.request import Request
from lp_runtime.errors import LaunchError, ReplicaError, unforeseen_as
from lp_runtime.launchers.base import Launcher

logger = logging.getLogger(__name__)


class TorchrunLauncher(Launcher):
    """launcher=torchrun.

    In a script every rank makes the same calls. Where only rank 0 makes them (the command line), the other ranks
    call `close` at once: it serves rank 0's requests until rank 0 closes.

    Args:
        config: the runtime's settings; its `gpus` gives way to torchrun's WORLD_SIZE.

    Raises:
        LookaheadError: if this rank's replica cannot be started.
    """

    def __init__(self, config: RuntimeConfig):
        context = ReplicaContext.from_torchrun()
        super().__init__(context.num_replicas, is_leader=context.rank == 0)
        if config.gpus is not None and config.gpus != context.num_replicas:
            logger.warning("gpus=%d: under torchrun it is WORLD_SIZE, %d", config.gpus, context.num_replicas)
        self._stack = contextlib.ExitStack()
        with unforeseen_as(LaunchError, f"rank {context.rank} failed at start"):
            self._replica = self._stack.enter_context(start_replica(config, context))
        self._is_open = True
        self._events: Iterator[Event] = iter(())  # of the latest request
        self._is_cancelled = False

    @property
    def info(self) -> ReplicaInfo:
        return self._replica.info

    def _run(self, request: Request) -> Generator[Event, None, None]:
        shared = self._share(request)
        if shared is None:
            raise ReplicaError("rank 0 has closed while this rank asked for one more request")
        yield from self._decode(shared)

    def _decode(self, request: Request) -> Generator[Event, None, None]:
        self._is_cancelled = False
        self._events = self._replica.decode(request, lambda: self._is_cancelled)
        try:
            for event in self._events:  # noqa: UP028 (yield from would close them; they must be finished)
                yield event
        except GeneratorExit:  # the caller stopped early
            self._cancel()
            raise
        except (Exception, KeyboardInterrupt):
            self._is_open = False  # the group is broken
            raise

    def _cancel(self) -> None:
        """End what is being decoded, in step with the other ranks."""
        self._is_cancelled = True
        for _ in self._events:
            pass

    def _share(self, request: Request | None) -> Request | None:
        """Return rank 0's request on every rank; None if rank 0 closes."""
        return broadcast_object(request, self._replica.group, is_patient=True)

    def _close(self) -> None:
        try:
            if self._is_open:
                self._is_open = False
                self._cancel()
                if self.is_leader:
                    self._share(None)
                else:
                    while (request := self._share(None)) is not None:
                        for _ in self._decode(request):
                            pass
        finally:
            self._stack.close()
