"""Replicas in processes of their own, led by the driver: it forms their group, and forms it anew when one is lost.

Every replica holds the whole model and the whole decoding state, so what a lost one knew is known to the others: they
form a smaller group and take the request up behind the last token that any of them has committed. The lost one is
started again and joins before the next request. The driver is never inside a step.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

from lp_runtime.config import RuntimeConfig
from lp_runtime.decoding import Event, Report, Request, Run
from lp_runtime.errors import LaunchError, ReplicaError
from lp_runtime.launchers.base import Launcher
from lp_runtime.launchers.messages import (
    CANCEL,
    PING,
    Broken,
    Decode,
    Failed,
    Finished,
    Join,
    Joined,
    Loaded,
    Progress,
    Refused,
    Streamed,
    first_cause,
)
from lp_runtime.parallel.group import ReplicaContext

log = logging.getLogger(__name__)

PATIENCE = 3.0  # seconds that a replica may take to answer a ping: a thread of its own answers
GRACE = 0.5  # seconds in which a failure's cause may arrive after its consequence
SHORTEST = 1e-3  # seconds that are left of a request's time at least


@dataclass(frozen=True)
class Place:
    """Where a replica is: which of the GPUs it sees is its own, and how many replicas share its machine."""

    device_index: int
    num_local: int


@dataclass(frozen=True)
class Lost:
    """A replica is lost, and why."""

    reason: str


class TeamLauncher(Launcher):
    """What launchers with processes of their own have in common. A subclass starts and reaches the processes.

    Replicas are known by an index, 0 <= index < num_replicas; one that is started again keeps it.
    """

    outlives_failures = True

    def _start(self, config: RuntimeConfig) -> None:
        """Start all replicas and form their group.

        Raises:
            LookaheadError: if any of them fails.
        """
        self._config = config
        self._order = 0
        self._group: list[int] = []  # members, rank 0 first
        self._loading: set[int] = set()
        self._ready: set[int] = set()  # loaded, and not known to be lost
        self._num_losses = 0
        self._losses: dict[int, str] = {}  # why each replica was lost last
        self._restarts = dict.fromkeys(range(self.num_replicas), 0)
        for index in range(self.num_replicas):
            self._loading.add(index)
            self._launch(index)
        timeout = config.launcher.start_timeout
        deadline = time.monotonic() + timeout
        while len(self._ready) < self.num_replicas:
            messages = self._receive(max(0.0, deadline - time.monotonic()))
            failures = {index: message for index, message in messages if isinstance(message, Failed)}
            if failures:
                raise self._start_failure(failures)
            for index, message in messages:
                self._note(index, message)
            if not messages:
                missing = min(set(range(self.num_replicas)) - self._ready)
                raise LaunchError(f"rank {missing} was not ready within launcher.start_timeout={timeout:g} seconds")
        self._form()
        if len(self._group) < self.num_replicas:
            index, reason = next(iter(self._losses.items()))
            raise LaunchError(f"rank {index} failed at start: {reason}")

    def _start_failure(self, failures: dict[int, Failed]) -> Exception:
        """Of all that fail within GRACE, the failure that explains the rest."""
        deadline = time.monotonic() + GRACE
        while (left := deadline - time.monotonic()) > 0 and len(failures) < self.num_replicas:
            failures |= {i: late for i, late in self._receive(left) if isinstance(late, Failed) and i not in failures}
        index = first_cause(failures)
        return (failures[index].kind or LaunchError)(f"rank {index} failed at start: {failures[index].message}")

    # What a subclass must have.

    @abstractmethod
    def _launch(self, index: int) -> None:
        """Start a replica's process; it says Loaded, or Failed, in its time."""

    @abstractmethod
    def _send(self, index: int, message: object) -> None:
        """Say something to a replica. That it is dead shows when it is listened to."""

    @abstractmethod
    def _receive(self, timeout: float | None) -> list[tuple[int, object]]:
        """(index, message) of everything that has been said within a time; waits for the first. A process that has
        ended says Failed, once."""

    @abstractmethod
    def _kill(self, index: int) -> None:
        """End a replica's process, whatever it is doing; it says nothing any more."""

    @abstractmethod
    def _meeting_place(self, leader: int) -> tuple[str, int] | None:
        """Host and port of a store for a group whose rank 0 is `leader`; None if that cannot be reached."""

    @abstractmethod
    def _place(self, index: int) -> Place:
        """Where a replica is."""

    # Replicas come and go.

    def _lose(self, index: int, reason: str) -> None:
        """A replica is lost: end it, and start it again if it may be."""
        self._num_losses += 1
        self._losses[index] = reason
        self._ready.discard(index)
        self._loading.discard(index)
        if index in self._group:
            self._group = []
        self._kill(index)
        again = self._restarts[index] < self._config.failure.restarts
        log.warning("replica %d was lost (%s)%s", index, reason, "; it is started again" if again else "")
        if again:
            self._restarts[index] += 1
            self._loading.add(index)
            self._launch(index)

    def _note(self, index: int, message: object) -> Lost | None:
        """Take what a replica says without being asked; tells whether it is lost."""
        if isinstance(message, Loaded):
            self._ready.add(index)
            self._loading.discard(index)
        elif isinstance(message, Failed):
            self._lose(index, message.message)
            return Lost(message.message)
        return None

    def _assemble(self) -> None:
        """Before a request: a group of all replicas that are there.

        Raises:
            ReplicaError: if there is none, and none comes.
        """
        deadline = time.monotonic() + self._config.launcher.start_timeout
        timeout = 0.0
        while True:
            for index, message in self._receive(timeout):
                self._note(index, message)
            if self._ready:
                break
            timeout = deadline - time.monotonic()
            if timeout <= 0 or not self._loading:
                raise ReplicaError(f"no replica is left ({self._why()})")
        if sorted(self._ready) != sorted(self._group):
            self._form()

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def tend(self) -> bool:
        for index, message in self._receive(0.0):
            self._note(index, message)
        return not self._is_closed and bool(self._ready)

    def _why(self) -> str:
        return "; ".join(f"replica {index}: {reason}" for index, reason in sorted(self._losses.items()))

    def _form(self, members: set[int] | None = None) -> None:
        """Form a group of replicas that are ready; those that are lost on the way are left out.

        Args:
            members: all that are ready if not given.

        Raises:
            LookaheadError: if the replicas refuse to, or none is left.
        """
        members = set(self._ready if members is None else members)
        self._group = []
        for _ in range(2 * self.num_replicas + 1):
            members &= self._ready
            if not members:
                break
            ranks = sorted(members)
            where = self._meeting_place(ranks[0])
            if where is None:
                self._lose(ranks[0], "it cannot be reached")
                continue
            self._order += 1
            for rank, index in enumerate(ranks):
                place = self._place(index)
                context = ReplicaContext(
                    rank, len(ranks), place.device_index, place.num_local, *where, attempt=self._order
                )
                self._send(index, Join(self._order, context))
            infos = {}
            for index, message in self._answers(ranks):
                if isinstance(message, Refused):
                    raise message.kind(message.message)
                if isinstance(message, Joined):
                    infos[index] = message.info
                elif isinstance(message, Lost):
                    break  # the others need not wait for it: the next order ends that
            if len(infos) == len(ranks):
                self._group, self.info = ranks, infos[ranks[0]]
                return
        raise ReplicaError(f"no group could be formed ({self._why() or 'the replicas do not reach one another'})")

    def _answers(self, members: list[int]) -> Iterator[tuple[int, object]]:
        """What members answer to the latest order, each until its last word, or Lost.

        Whoever keeps silent is asked for a sign of life: after failure.timeout, or as soon as something went wrong.
        From then on the others have failure.timeout to come to their end.
        """
        limit = self._config.failure.timeout
        waiting, asked = set(members), set()
        deadline = time.monotonic() + limit
        last = None  # when those must have ended that are left, once something went wrong
        while waiting:
            for index, message in self._receive(max(0.0, deadline - time.monotonic())):
                asked.discard(index)
                answer = self._note(index, message)
                if answer is None and getattr(message, "order", None) == self._order:
                    answer = message
                if answer is None or index not in waiting:
                    continue
                if not isinstance(answer, Streamed):
                    waiting.discard(index)
                if isinstance(answer, Lost | Broken | Refused):
                    if last is None:
                        last = time.monotonic() + limit
                        deadline = time.monotonic()
                elif last is None:
                    deadline = time.monotonic() + limit
                    asked.clear()
                yield index, answer
            now = time.monotonic()
            if now < deadline:
                continue
            silent = waiting & asked if last is None or now < last else waiting
            for index in sorted(silent):
                reason = "it did not answer" if index in asked else f"it did not end within {limit:g} s"
                waiting.discard(index)
                self._lose(index, reason)
                yield index, Lost(reason)
            asked = set(waiting)
            for index in asked:
                self._send(index, PING)
            deadline = now + PATIENCE

    # Requests.

    def _run(self, request: Request) -> Generator[Event, None, None]:
        started, num_lost = time.monotonic(), self._num_losses
        told: list[int] = []
        num_steps = 0
        self._assemble()
        while True:
            left = request.max_time
            if left is not None:
                left = max(SHORTEST, left - (time.monotonic() - started))
            part = replace(request, committed=tuple(told), max_time=left)
            survivors, report = yield from self._attempt(part, told)
            if report is not None:
                report = replace(report, num_steps=report.num_steps + num_steps, losses=self._num_losses - num_lost)
                if num_steps:
                    report = replace(report, seconds=time.monotonic() - started)
                yield report
                return
            if not survivors:
                raise ReplicaError(f"all replicas were lost while decoding, after {len(told)} tokens ({self._why()})")
            num_steps += max(progress.num_steps for progress in survivors.values())
            self._form(set(survivors))

    def _attempt(
        self, request: Request, told: list[int]
    ) -> Generator[Event, None, tuple[dict[int, Progress], Report | None]]:
        """Have the group decode a request, up to its end or to the loss of a replica.

        Args:
            told: new tokens that were yielded so far; what is yielded is added.

        Returns:
            (survivors, report): what each replica that is left has committed; the report if it is done.
        """
        self._order += 1
        members = self._group
        for index in members:
            self._send(index, Decode(self._order, request))
        answers = self._answers(members)
        done: dict[int, Finished] = {}
        broken: dict[int, Broken] = {}
        refusal: Refused | None = None
        try:
            for index, message in answers:
                if isinstance(message, Streamed):
                    told += message.run.token_ids
                    yield message.run
                elif isinstance(message, Finished):
                    done[index] = message
                elif isinstance(message, Broken):
                    broken[index] = message
                elif isinstance(message, Refused):
                    refusal = message
        except (GeneratorExit, KeyboardInterrupt):  # the caller stopped early
            if not self._is_closed:
                self._cancel([index for index in members if index not in done | broken and index in self._ready])
            raise
        if broken or refusal:
            self._group = []
        if refusal is not None:
            raise refusal.kind(refusal.message)
        self._drop_suspects(members, broken)
        progress = {index: message.progress for index, message in (done | broken).items()}
        if progress:
            yield from self._tell_rest(request, told, max(progress.values(), key=lambda each: len(each.token_ids)))
        report = next((done[index].report for index in members if index in done), None)
        return progress, report

    def _cancel(self, members: list[int]) -> None:
        """End what members are decoding, and wait until they have."""
        for index in members:
            self._send(index, CANCEL)
        for _, message in self._answers(members):
            if not isinstance(message, Streamed | Finished):
                self._group = []

    def _drop_suspects(self, members: list[int], broken: dict[int, Broken]) -> None:
        """Where digests differ, most replicas are right, or, where there is no telling, the first of them."""
        digests = next((message.digests for message in broken.values() if message.digests), None)
        if digests is None:
            return
        right = max(digests, key=lambda digest: (digests.count(digest), -digests.index(digest)))
        for index, digest in zip(members, digests, strict=True):
            if digest != right and broken.pop(index, None):
                self._lose(index, "its state has parted from the others'")

    @staticmethod
    def _tell_rest(request: Request, told: list[int], best: Progress) -> Generator[Event, None, None]:
        """What a replica has committed that the caller was not told: rank 0 was lost before it said so."""
        known = len(told) - len(request.committed)
        rest = best.token_ids[known:]
        if rest:
            told += rest
            yield Run(rest, best.logprobs[known:] if request.logprobs else None)
