"""Base of launchers with replicas in separate processes, whose groups the driver forms and re-forms.

Every replica holds the whole model, and every member of a group the whole decoding state. So if one is lost, the others
form a smaller group and resume the request after the last token that any of them has committed. The lost replica is
restarted. A request moves to more or fewer replicas the same way: it is paused between two steps and resumed by another
group. The driver is not involved in a step.

One thread receives from all replicas (replica_pool.py); each request is driven by its caller's thread
(request_driver.py).
"""

from __future__ import annotations

import _thread
import weakref
from collections.abc import Callable, Generator

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.errors import LaunchError, ReplicaError, unforeseen_as
from lp_runtime.launchers.base import Launcher
from lp_runtime.launchers.driver.group_former import GroupFormer
from lp_runtime.launchers.driver.replica_pool import ReplicaPool
from lp_runtime.launchers.driver.request_driver import RequestDriver
from lp_runtime.launchers.wire.lease import ReplicaLease
from lp_runtime.launchers.worker.process_host import ProcessHost
from lp_runtime.replica.loaded_model import ReplicaInfo
from lp_runtime.request.output import Event
from lp_runtime.request.request import Request
from lp_runtime.utils.owner import OwnerProcess


class TeamLauncher(Launcher):
    """Base class of launchers with separate replica processes. Closes the host, also if the start fails."""

    outlives_failures = True

    def __init__(self, config: RuntimeConfig, host: ProcessHost):
        super().__init__(config.num_replicas, gpus_per_replica=config.replica_gpus)
        self._start_timeout = config.launcher.start_timeout
        self.pool = ReplicaPool(host, self.num_replicas, config.failure)
        self._groups = GroupFormer(self.pool, host)
        self._dropping = weakref.finalize(self, _close_in_thread, self.pool, self._owner)
        self._dropping.atexit = False  # the replicas end with this process
        try:
            with unforeseen_as(LaunchError, "the replicas failed at start"):
                self.pool.start(self._start_timeout)
                group = self._groups.form(self.pool.ready)
            if group is None or len(group) < self.num_replicas:
                index, reason = next(iter(self.pool.losses.items()))
                raise LaunchError(f"rank {index} failed at start: {reason}")
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> ReplicaInfo:
        return self._groups.info

    @property
    def ready(self) -> frozenset[int]:
        return self.pool.ready

    @property
    def num_ready(self) -> int:
        return len(self.pool.ready)

    @property
    def num_loading(self) -> int:
        return self.pool.num_loading

    @property
    def why_lost(self) -> str:
        return self.pool.why_lost()

    def _run(self, request: Request, should_cancel: Callable[[], bool]) -> Generator[Event, None, None]:
        ready = self.pool.wait_until_ready(self._start_timeout, should_cancel)
        if not ready:
            self._check_open()
            if should_cancel():
                raise ReplicaError("the request was cancelled before a replica was ready")
            raise ReplicaError(f"no replica is left ({self.pool.why_lost()})")
        yield from RequestDriver(self.pool, self._groups, request, ReplicaLease(ready, should_cancel)).run()

    def run_on(self, request: Request, lease: ReplicaLease) -> Generator[Event, None, None]:
        """Decode a request on the replicas of a lease. Closing the iterator early cancels the request.

        Several requests may be decoded at once, on the same or on different replicas, each in a separate thread.
        """
        self._check_open()
        with unforeseen_as(ReplicaError, "decoding failed"):
            yield from RequestDriver(self.pool, self._groups, request, lease).run()

    def _close(self) -> None:
        self._dropping.detach()
        self.pool.close()


def _close_in_thread(pool: ReplicaPool, owner: OwnerProcess) -> None:
    """Close the pool of a launcher that was dropped without `close`.

    The garbage collector may call this inside any lock, those of the pool and of `threading` included.
    """
    if owner.is_current:
        _thread.start_new_thread(pool.close, ())
