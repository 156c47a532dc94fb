"""Interface of every launcher: running replicas, and a method that decodes a request on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import closing

from lp_runtime.errors import ConfigError, ReplicaError, RequestError, unforeseen_as
from lp_runtime.launchers.wire.lease import ReplicaLease
from lp_runtime.replica.loaded_model import ReplicaInfo
from lp_runtime.request.output import Event
from lp_runtime.request.request import Request
from lp_runtime.utils.callables import never
from lp_runtime.utils.owner import OwnerProcess

# Errors caused by the request itself. All replicas raise them at the same point (decoder/shared_error.py), or before
# they exchange anything, so they stay in step for the next request.
REQUEST_ERRORS = (RequestError, ConfigError)


class Launcher(ABC):
    """Running replicas. Constructing a subclass starts them, or raises with everything cleaned up."""

    # Whether the replicas can decode another request after one was interrupted or failed. After one of REQUEST_ERRORS
    # they always can.
    outlives_failures: bool = False
    works_after_fork: bool = False  # also in a process forked from its owner

    def __init__(self, num_replicas: int = 1, is_leader: bool = True, gpus_per_replica: int = 1):
        self.num_replicas = num_replicas
        self.gpus_per_replica = gpus_per_replica  # on CPUs: processes
        self.is_leader = is_leader  # whether this process accepts requests; under torchrun only rank 0's does
        self._owner = OwnerProcess()
        self._is_busy = False
        self._is_closed = False
        self._failure_seen: str | None = None

    @property
    @abstractmethod
    def info(self) -> ReplicaInfo:
        """The model that the replicas hold."""

    def run(self, request: Request, should_cancel: Callable[[], bool] = never) -> Generator[Event, None, None]:
        """Decode one request on all replicas. Closing the iterator early cancels the request.

        `should_cancel` is asked between steps; by launchers that decode in this process, also between chunks of the
        prompt, and by those with replicas in others several times a second.

        Raises:
            RequestError: if another request is being decoded, or this one cannot be.
            ConfigError: if a setting of the request is refused.
            ReplicaError: if a replica fails or is lost, or the launcher is closed, has failed before, or belongs to
                the process from which this one was forked.
        """
        self._check_open()
        if self._failure_seen:
            raise ReplicaError(f"the runtime cannot be used any more, create a new one ({self._failure_seen})")
        if self._is_busy:
            raise RequestError("another request is being decoded: finish or close its stream first")
        self._is_busy = True
        try:
            with unforeseen_as(ReplicaError, "decoding failed"), closing(self._run(request, should_cancel)) as events:
                for event in events:
                    yield event
                    self._check_open()
                self._check_open()  # another thread may have ended the request
        except (Exception, KeyboardInterrupt) as error:
            if not self.outlives_failures and not isinstance(error, REQUEST_ERRORS):  # only `close` is called from now
                self._failure_seen = str(error) or "interrupted"
            raise
        finally:
            self._is_busy = False

    @property
    def num_ready(self) -> int:
        """Number of replicas that are loaded and not known to be lost."""
        return self.num_replicas if not self._is_closed and self._failure_seen is None else 0

    @property
    def num_loading(self) -> int:
        """Number of replicas that are being restarted."""
        return 0

    @property
    def has_replicas(self) -> bool:
        """Whether any replica is up or being started."""
        # Twice: a replica may become ready between the first two reads.
        return self.num_ready > 0 or self.num_loading > 0 or self.num_ready > 0

    @property
    def why_lost(self) -> str:
        """Reasons of the replicas' losses in one line; empty if none was lost."""
        return self._failure_seen or ""

    @property
    def ready(self) -> frozenset[int] | None:
        """Indices of the loaded replicas that are not known to be lost; None if this launcher has no `run_on`."""
        return None

    @property
    def process_ids(self) -> dict[int, int]:
        """Process ids by replica index (of shard 0), for replicas that are child processes on this machine."""
        return {}

    def run_on(self, request: Request, lease: ReplicaLease) -> Generator[Event, None, None]:
        """Decode a request on the replicas of a lease. Only launchers whose `ready` is not None implement it."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if not self.works_after_fork:
            self._owner.check("the runtime")
        if self._is_closed:
            raise ReplicaError("the runtime is closed")

    @abstractmethod
    def _run(self, request: Request, should_cancel: Callable[[], bool]) -> Generator[Event, None, None]:
        """Decode one request for `run`, which closes the generator (GeneratorExit) to cancel the request."""

    def close(self) -> None:
        """Stop every replica. Safe to call twice. In a forked process, replicas in other processes go on."""
        if not self._is_closed:
            self._is_closed = True
            if self.works_after_fork or self._owner.is_current:
                self._close()

    @abstractmethod
    def _close(self) -> None:
        """Stop every replica. Called once, by `close`."""
