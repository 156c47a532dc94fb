"""What every launcher is: replicas that are up, and a way to have them decode a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

from lp_runtime.engine.output import Event
from lp_runtime.engine.replica import ReplicaInfo
from lp_runtime.engine.request import Request
from lp_runtime.errors import ReplicaError, RequestError, unforeseen_as
from lp_runtime.launchers.lease import ReplicaLease


class Launcher(ABC):
    """Replicas that are up. Construction starts them, or raises with everything cleaned up.

    Attributes:
        info: the model that the replicas hold.
        num_replicas: how many there are.
        is_leader: whether this process takes requests; under torchrun the others follow rank 0.
        outlives_failures: whether a request that failed or was interrupted leaves the replicas fit for the next.
    """

    info: ReplicaInfo
    num_replicas: int
    is_leader: bool = True
    outlives_failures: bool = False
    _is_busy = False
    _is_closed = False
    _failure_seen: str | None = None

    def run(self, request: Request) -> Generator[Event, None, None]:
        """Decode one request on all replicas. Closing the iterator early cancels the request.

        Raises:
            RequestError: if another request is being decoded.
            ReplicaError: if a replica fails or is lost, or the launcher is closed, or has failed before.
        """
        if self._is_closed:
            raise ReplicaError("the runtime is closed")
        if self._failure_seen:
            raise ReplicaError(f"the runtime is of no further use, make a new one ({self._failure_seen})")
        if self._is_busy:
            raise RequestError("another request is being decoded: finish or close its stream first")
        self._is_busy = True
        try:
            with unforeseen_as(ReplicaError, "decoding failed"):
                yield from self._run(request)
        except (Exception, KeyboardInterrupt) as error:
            if not self.outlives_failures:
                self._failure_seen = str(error) or "interrupted"
            raise
        finally:
            self._is_busy = False

    @property
    def num_ready(self) -> int:
        """Replicas that are there, as far as is known."""
        return self.num_replicas if not self._is_closed and self._failure_seen is None else 0

    @property
    def num_loading(self) -> int:
        """Replicas that are being started again."""
        return 0

    @property
    def ready(self) -> frozenset[int] | None:
        """Indices of the replicas that are there, where requests can be run on some of them (`run_on`); else None."""
        return None

    def run_on(self, request: Request, lease: ReplicaLease) -> Generator[Event, None, None]:
        """Decode a request on some of the replicas, where `ready` says which there are: see TeamLauncher."""
        raise NotImplementedError

    @abstractmethod
    def _run(self, request: Request) -> Generator[Event, None, None]:
        """See `run`. Is closed (GeneratorExit) to cancel; after anything else it raises, only `close` is called."""

    def close(self) -> None:
        """End every replica. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._close()

    @abstractmethod
    def _close(self) -> None:
        """See `close`; called once."""
