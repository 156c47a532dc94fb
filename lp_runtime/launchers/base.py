"""What every launcher is: replicas that are up, and a way to have them decode a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

from lp_runtime.decoding import Event, Request
from lp_runtime.errors import ReplicaError, RequestError
from lp_runtime.worker import ReplicaInfo


class Launcher(ABC):
    """Replicas that are up. Construction starts them, or raises with everything cleaned up.

    Attributes:
        info: the model that the replicas hold.
        num_replicas: how many there are.
        is_leader: whether this process takes requests; under torchrun the others follow rank 0.
    """

    info: ReplicaInfo
    num_replicas: int
    is_leader: bool = True
    _is_busy = False
    _is_closed = False

    def run(self, request: Request) -> Generator[Event, None, None]:
        """Decode one request on all replicas. Closing the iterator early cancels the request.

        Raises:
            RequestError: if another request is being decoded.
            ReplicaError: if a replica fails or is lost, or the launcher is closed. It is of no use then.
        """
        if self._is_closed:
            raise ReplicaError("the runtime is closed")
        if self._is_busy:
            raise RequestError("another request is being decoded: finish or close its stream first")
        self._is_busy = True
        try:
            yield from self._run(request)
        finally:
            self._is_busy = False

    @abstractmethod
    def _run(self, request: Request) -> Generator[Event, None, None]:
        """See `run`."""

    def close(self) -> None:
        """End every replica. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._close()

    @abstractmethod
    def _close(self) -> None:
        """See `close`; called once."""
