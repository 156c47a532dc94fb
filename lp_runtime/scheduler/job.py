"""What is submitted to a scheduler, where it runs, and what came of all."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lp_runtime.engine.generation import Delta, Generation
from lp_runtime.engine.request import Request
from lp_runtime.errors import LookaheadError
from lp_runtime.launchers.lease import ReplicaLease

TEND_SECONDS = 0.2  # between looks whether replicas have come or gone, and whether anybody has waited for too long


class Job:
    """A request that was submitted. Iterate over its pieces, or wait for its result; from any one thread.

    Attributes:
        request: what is decoded.
        gpus: replicas that it wants at most; None for what the scheduler's policy says.
        limit: replicas that are of use to it at most, once that has been decided.
        generation: the whole, once all pieces have been read; None before.
    """

    def __init__(self, request: Request, deadline: float | None, gpus: int | None = None):
        self.request = request
        self.gpus = gpus
        self.limit: int | None = None
        self.generation: Generation | None = None
        self.deadline = deadline  # on time.monotonic's clock
        self.is_cancelled = False
        self.on_cancel: Callable[[], None] | None = None  # tells replicas that are decoding it
        self._items: queue.SimpleQueue[Delta | Generation | LookaheadError] = queue.SimpleQueue()
        self._listener = None

    def cancel(self) -> None:
        """Give it up: it ends before its next step or chunk of its prompt, or before it begins. Safe to call at any
        time, from any thread."""
        self.is_cancelled = True
        if (tell := self.on_cancel) is not None:
            tell()

    def __iter__(self) -> Iterator[Delta]:
        """The pieces as they come.

        Raises:
            LookaheadError: as `LookaheadRuntime.generate` does; DeadlineError if it has not begun in time.
        """
        while True:
            piece = self._take(self._items.get())
            if piece is None:
                return
            yield piece

    def result(self) -> Generation:
        """The whole; waits for it. Raises as iterating does."""
        for _ in self:
            pass
        return self.generation

    async def pieces(self) -> AsyncIterator[Delta]:
        """The pieces as they come, for asyncio; instead of iterating. Ending the iteration early cancels the job."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._listener = lambda: loop.call_soon_threadsafe(arrived.set)
        try:
            while True:
                try:
                    item = self._items.get_nowait()
                except queue.Empty:
                    await arrived.wait()
                    arrived.clear()
                    continue
                piece = self._take(item)
                if piece is None:
                    return
                yield piece
        finally:
            self._listener = None
            if self.generation is None:
                self.cancel()

    def _take(self, item: Delta | Generation | LookaheadError) -> Delta | None:
        if isinstance(item, LookaheadError):
            raise item
        if isinstance(item, Generation):
            self.generation = item
            return None
        return item

    def put(self, item: Delta | Generation | LookaheadError) -> None:
        """For the scheduler."""
        self._items.put(item)
        listener = self._listener
        if listener is not None:
            try:
                listener()
            except RuntimeError:  # its event loop has ended
                self.cancel()


@dataclass
class Totals:
    """What a scheduler has done since it began. Read by others while it changes.

    Attributes:
        requests: by how they ended: a finish_reason, "cancelled", "expired" or "failed".
        prompt_tokens, new_tokens, steps, losses: of all that were decoded.
        fed, accepted: tokens by source, where policies count them.
        seconds: that steps took, by part (forward, exchange, other), and the prefills'.
    """

    requests: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    losses: int = 0
    fed: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, request: Request, done: Generation) -> None:
        """Count what a request took."""
        self.prompt_tokens += len(request.prompt_ids)
        self.new_tokens += done.num_tokens
        self.steps += done.steps
        self.losses += done.losses
        for name, fed, accepted in zip(
            done.counts.sources, done.counts.fed.sum(1).tolist(), done.counts.accepted.sum(1).tolist(), strict=True
        ):
            self.fed[name] = self.fed.get(name, 0) + fed
            self.accepted[name] = self.accepted.get(name, 0) + accepted
        for name, value in {**vars(done.times), "prefill": done.prefill_seconds}.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def count(self, outcome: str) -> None:
        """Count that a request has ended."""
        self.requests[outcome] = self.requests.get(outcome, 0) + 1


class Share(ReplicaLease):
    """The replicas of a running job. All of it is guarded by the scheduler's condition.

    Attributes:
        current: what the job is on.
        num_told: tokens that have come.
    """

    def __init__(
        self,
        job: Job,
        members: Iterable[int],
        changed: threading.Condition,
        patience: float,
        may_come: Callable[[], bool],
    ):
        super().__init__(members)
        self.job = job
        self._may_come = may_come
        self.current: frozenset[int] = frozenset()
        self.num_told = 0
        self._changed = changed
        self._patience = patience

    @property
    def held(self) -> frozenset[int]:
        """What nobody else may have all of: where the job is to be, and where it is until it has left."""
        return self.wanted | self.current

    @property
    def num_left(self) -> int:
        """Tokens that are still to come at most."""
        return self.job.request.max_new_tokens - self.num_told

    @property
    def is_settled(self) -> bool:
        """Whether it is where it should be."""
        return self.current == self.wanted

    def take(self, more: Iterable[int]) -> None:
        """The job may use these, too."""
        self.wanted |= frozenset(more)

    def shrink(self, size: int) -> None:
        """The job is to use only so many; those that it is on stay first, and of these rank 0."""
        staying = sorted(self.wanted & self.current) + sorted(self.wanted - self.current)
        self.wanted = frozenset(staying[:size])

    def move_to(self, members: Iterable[int]) -> None:
        """The job is to use these."""
        self.wanted = frozenset(members)

    @contextmanager
    def cancelling(self, cancel: Callable[[], None]) -> Iterator[None]:
        self.job.on_cancel = cancel
        if self.job.is_cancelled:  # before it could be told
            cancel()
        try:
            yield
        finally:
            self.job.on_cancel = None

    def lose(self, lost: Iterable[int]) -> None:
        with self._changed:
            super().lose(lost)
            self.current -= frozenset(lost)
            self._changed.notify_all()

    def settle(self) -> frozenset[int]:
        with self._changed:
            self.current = self.wanted
            self._changed.notify_all()
            return self.wanted

    def refill(self) -> frozenset[int]:
        deadline = time.monotonic() + self._patience
        with self._changed:
            while not self.wanted and not self.job.is_cancelled and time.monotonic() < deadline and self._may_come():
                self._changed.wait(TEND_SECONDS)
            self.current = self.wanted
            return self.wanted
