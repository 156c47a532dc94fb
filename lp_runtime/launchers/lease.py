"""Which replicas a request may use: whoever allots them may change that while the request is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext


class ReplicaLease:
    """Replicas, by index, for one request.

    Attributes:
        wanted: those to be used; between two steps the request is moved to them if it is on others.
    """

    def __init__(self, wanted: Iterable[int]):
        self.wanted = frozenset(wanted)

    def lose(self, lost: Iterable[int]) -> None:
        """These are lost."""
        self.wanted -= frozenset(lost)

    def settle(self) -> frozenset[int]:
        """The request is on no replica at this moment: returns those that it is to go on with; others are free now."""
        return self.wanted

    def cancelling(self, cancel: Callable[[], None]) -> AbstractContextManager[None]:
        """Meanwhile, `cancel` is called as soon as the request is not wanted any more, by whoever says so."""
        return nullcontext()

    def refill(self) -> frozenset[int]:
        """None is left: waits for others, if there may be any; none if not."""
        return frozenset()
