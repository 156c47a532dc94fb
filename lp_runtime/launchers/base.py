"""What every launcher is: replicas that are up, and a way to have them decode a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

from lp_runtime.decoding import Event, Request
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

    @abstractmethod
    def run(self, request: Request) -> Generator[Event, None, None]:
        """Decode one request on all replicas; one at a time. Closing the iterator early cancels the request.

        Raises:
            ReplicaError: if a replica fails or is lost. The launcher is of no use then and must be closed.
        """

    @abstractmethod
    def close(self) -> None:
        """End every replica. Safe to call twice."""
