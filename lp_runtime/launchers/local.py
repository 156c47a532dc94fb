"""Launcher of a single replica in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.errors import LaunchError, unforeseen_as
from lp_runtime.launchers.base import Launcher
from lp_runtime.replica.loaded_model import ReplicaInfo
from lp_runtime.replica.replica import start_replica
from lp_runtime.request.output import Event
from lp_runtime.request.request import Request


class LocalLauncher(Launcher):
    """launcher=local with one replica, which runs in this process."""

    outlives_failures = True

    def __init__(self, config: RuntimeConfig):
        super().__init__(gpus_per_replica=config.replica_gpus)
        self._stack = contextlib.ExitStack()
        with unforeseen_as(LaunchError, "the replica failed at start"):
            self._replica = self._stack.enter_context(start_replica(config, ReplicaContext(owns_process=False)))

    @property
    def info(self) -> ReplicaInfo:
        return self._replica.info

    def _run(self, request: Request) -> Generator[Event, None, None]:
        yield from self._replica.decode(request)

    def _close(self) -> None:
        self._stack.close()
