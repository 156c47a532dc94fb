"""Lease: the replicas that a request may use. The scheduler may change it during the request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from lp_runtime.utils.callables import never


class ReplicaLease:
    """Indices of the replicas that one request may use, and whether it is to be cancelled."""

    def __init__(self, wanted: Iterable[int], should_cancel: Callable[[], bool] = never):
        self.wanted = frozenset(wanted)  # a request that runs on others moves to these between two steps
        self.should_cancel = should_cancel  # asked by the thread that drives the request

    def lose(self, lost: Iterable[int]) -> None:
        self.wanted -= frozenset(lost)

    def settle(self) -> frozenset[int]:
        """Return the replicas for the request's next group; called while no replica decodes it."""
        return self.wanted

    def cancelling(self, cancel: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which any thread may call `cancel` to cancel the request."""
        return nullcontext()

    def refill(self) -> frozenset[int]:
        """Wait for new replicas after all were lost, and return them; empty if there will be none."""
        return frozenset()
