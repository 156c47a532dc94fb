"""Which replicas a request may use. The scheduler may change that while the request is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext


class ReplicaLease:
    """The replicas that one request may use. Replicas are given by their indices.

    Args:
        wanted: the replicas to be used at first.

    Attributes:
        wanted: the replicas to be used; between two steps the request is moved to them if it is on others.
    """

    def __init__(self, wanted: Iterable[int]):
        self.wanted = frozenset(wanted)

    def lose(self, lost: Iterable[int]) -> None:
        """Take replicas that were lost out of the lease."""
        self.wanted -= frozenset(lost)

    def settle(self) -> frozenset[int]:
        """Return the replicas that the request goes on with. Called while it is on no replica: all others are free."""
        return self.wanted

    def cancelling(self, cancel: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which `cancel` is called, by any thread, once the request is not wanted any more."""
        return nullcontext()

    def refill(self) -> frozenset[int]:
        """Wait for other replicas after the last one was lost, and return them; empty if none may come."""
        return frozenset()
