"""Launcher of a single replica in this process."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Generator

import torch

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.errors import LaunchError, unforeseen_as
from lp_runtime.launchers.base import Launcher
from lp_runtime.replica.loaded_model import ReplicaInfo
from lp_runtime.replica.replica import Replica, start_replica
from lp_runtime.request.output import Event
from lp_runtime.request.request import Request
from lp_runtime.utils.owner import OwnerProcess


class LocalLauncher(Launcher):
    """launcher=local with one replica, which runs in this process."""

    outlives_failures = True
    works_after_fork = True

    def __init__(self, config: RuntimeConfig):
        super().__init__(gpus_per_replica=config.replica_gpus)
        _use_one_thread_after_fork()
        self._stack = contextlib.ExitStack()
        with unforeseen_as(LaunchError, "the replica failed at start"):
            replica = self._stack.enter_context(start_replica(config, ReplicaContext(owns_process=False)))
        self._replica: Replica | None = replica  # None once closed
        self._info = replica.info

    @property
    def info(self) -> ReplicaInfo:
        return self._info

    def _run(self, request: Request, should_cancel: Callable[[], bool]) -> Generator[Event, None, None]:
        assert self._replica is not None
        _use_one_thread_after_fork()
        yield from self._replica.decode(request, should_cancel)

    def _close(self) -> None:
        self._stack.close()
        self._replica = None
        gc.collect()  # references in cycles keep a model alive, which may fill the GPU
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _use_one_thread_after_fork() -> None:
    """Set torch to one thread in a process forked from one that has had a replica in it.

    A fork copies the state of OpenMP's thread pool without its threads: a pass with several threads would wait forever.
    """
    if not _first_process().is_current:
        torch.set_num_threads(1)


@functools.cache
def _first_process() -> OwnerProcess:
    return OwnerProcess()
