"""Driver side of one request: has it decoded by a group of replicas, or by several in turn.

If replicas are lost, or the request moves to others, the next group resumes after the last token that any replica has
committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from lp_runtime.errors import ReplicaError
from lp_runtime.launchers.driver.answers import AnswerReader
from lp_runtime.launchers.driver.group_former import GroupFormer
from lp_runtime.launchers.driver.replica_pool import ReplicaPool
from lp_runtime.launchers.wire.inbox import Inbox, Members, ReplicaLost
from lp_runtime.launchers.wire.lease import ReplicaLease
from lp_runtime.launchers.wire.messages import (
    Cancel,
    Decode,
    Finished,
    GroupBroken,
    Prefill,
    Prefilled,
    Progress,
    Refused,
    Streamed,
)
from lp_runtime.request.output import Event, Report, StepOutput
from lp_runtime.request.request import Request

log = logging.getLogger(__name__)

MAX_FRUITLESS_ATTEMPTS = 2  # consecutive groups whose replicas are all lost without a new token
MAX_BROKEN_ATTEMPTS = 3  # consecutive groups that break without progress or a lost replica: the cause is permanent


@dataclass
class Attempt:
    """One group's work on a request: the final answers of its members, by index, except of lost ones."""

    done: dict[int, Finished] = field(default_factory=dict)
    broken: dict[int, GroupBroken] = field(default_factory=dict)  # of members that left the group because it broke
    refusal: Refused | None = None  # of a member, if the request cannot be decoded
    is_paused: bool = False  # whether the group was stopped because the request moves to other replicas
    why_broken: str | None = None  # reason that a member gave for leaving the group
    progress: dict[int, Progress] = field(default_factory=dict)  # what each replica that was not lost has committed

    def add(self, index: int, message: object) -> None:
        """Record a member's final answer; a ReplicaLost is ignored."""
        if isinstance(message, Finished):
            self.done[index] = message
        elif isinstance(message, GroupBroken):
            self.broken[index] = message
            self.why_broken = self.why_broken or message.reason
        elif isinstance(message, Refused):
            self.refusal = message

    @property
    def report(self) -> Report | None:
        """Report of the lowest rank that has finished; None if the group broke first."""
        return self.done[min(self.done)].report if self.done else None


class RequestDriver:
    """Has one request decoded on the replicas of its lease, in the caller's thread."""

    def __init__(self, pool: ReplicaPool, groups: GroupFormer, request: Request, lease: ReplicaLease):
        self._pool = pool
        self._groups = groups
        self._request = request
        self._lease = lease
        self._delivered: list[int] = []  # token ids that were yielded
        self._cached_tokens = 0  # as the first attempt with an output has reported
        self._num_lost = self._num_fruitless = self._num_broken = 0
        self._started = time.monotonic()

    def run(self) -> Generator[Event, None, None]:
        """Yield step outputs as they arrive, then the report. Closing the iterator early cancels the request."""
        num_steps = 0
        is_whole = True
        while True:
            group = self._form_group()
            num_before = len(self._delivered)
            attempt = Attempt()
            yield from self._decode(attempt, group)
            self._check_open()
            self._note_losses(set(group) - set(attempt.progress))
            report = attempt.report
            if report is not None and not (attempt.is_paused and report.finish_reason == "cancelled"):
                cached_tokens = max(report.cached_tokens, self._cached_tokens)
                report = replace(
                    report,
                    num_steps=report.num_steps + num_steps,
                    losses=self._num_lost,
                    cached_tokens=cached_tokens,
                )
                yield report if is_whole else replace(report, seconds=time.monotonic() - self._started)
                return
            is_whole = False
            self._check(attempt, len(group), len(self._delivered) > num_before)
            num_steps += max((progress.num_steps for progress in attempt.progress.values()), default=0)

    def _check(self, attempt: Attempt, group_size: int, has_tokens: bool) -> None:
        """Count consecutive attempts without progress; raise ReplicaError if there are too many."""
        # Stop retrying a request that kills every replica it runs on.
        self._num_fruitless = 0 if attempt.progress or has_tokens else self._num_fruitless + 1
        if self._num_fruitless == MAX_FRUITLESS_ATTEMPTS:
            raise self._all_lost()
        is_broken = attempt.why_broken is not None and len(attempt.progress) == group_size
        self._num_broken = self._num_broken + 1 if is_broken and not has_tokens else 0
        if self._num_broken == MAX_BROKEN_ATTEMPTS:
            raise ReplicaError(
                f"{self._num_broken} groups in a row broke while decoding, after {len(self._delivered)} tokens"
                f" ({attempt.why_broken})"
            )

    def _form_group(self) -> Members:
        """Form a group of the lease's replicas; wait for others if all of them are lost."""
        while True:
            members = self._lease.settle() or self._lease.refill()
            group = self._groups.form(members) or ()
            self._check_open()
            left_out = members - set(group)
            self._lease.lose(left_out)
            self._note_losses(left_out - self._pool.ready)
            if group:
                return group
            if not members:
                raise self._all_lost()

    def _check_open(self) -> None:
        if self._pool.is_closed:
            raise ReplicaError("the runtime is closed")

    def _note_losses(self, lost: Iterable[int]) -> None:
        lost = set(lost)
        if lost:
            name, num_tokens = self._request.request_id or "without an id", len(self._delivered)
            log.warning("request %s: replicas %s were lost after %d tokens", name, sorted(lost), num_tokens)
        self._lease.lose(lost)
        self._num_lost += len(lost)

    def _all_lost(self) -> ReplicaError:
        return ReplicaError(
            f"all replicas were lost while decoding, after {len(self._delivered)} tokens ({self._pool.why_lost()})"
        )

    def _rest(self) -> Request:
        return self._request.after(self._delivered, time.monotonic() - self._started)

    def _decode(self, attempt: Attempt, group: Members) -> Generator[Event, None, None]:
        """Decode on a group until the request ends, a replica is lost, or the request must move."""
        pool, request = self._pool, self._rest()
        with pool.open_inbox(group) as inbox, _JoiningReplicas(pool) as joining:
            waiting = set(group)
            sealed = pool.sealed(request)
            for index in group:
                pool.send_order(inbox, index, Decode(inbox.order, sealed))
            reader = AnswerReader(pool, inbox, waiting)
            try:
                with self._lease.cancelling(lambda: self._cancel(inbox, reader, group)):
                    yield from self._stream(inbox, reader, joining, attempt)
            except (GeneratorExit, KeyboardInterrupt):  # the caller stopped early
                self._cancel_and_wait(inbox, reader, waiting)
                raise
        refusal, broken = attempt.refusal, attempt.broken
        if broken or (refusal and len(group) > 1):
            pool.disband(group)
        if refusal is not None:
            raise refusal.kind(refusal.message)
        self._drop_suspects(inbox, broken)
        attempt.progress = {index: message.progress for index, message in (attempt.done | broken).items()}
        attempt.progress |= dict.fromkeys(waiting, Progress())  # `_stream` did not wait for these: nothing is known
        best = max(attempt.progress.values(), key=lambda each: len(each.token_ids), default=Progress())
        # Tokens that a replica has committed but rank 0 did not stream before it was lost.
        rest = best.output_after(len(self._delivered) - len(request.committed), request)
        if rest is not None:
            yield self._noted(rest)

    def _noted(self, output: StepOutput) -> StepOutput:
        self._delivered += output.token_ids
        self._cached_tokens += output.cached_tokens
        return output

    def _stream(
        self, inbox: Inbox, reader: AnswerReader, joining: _JoiningReplicas, attempt: Attempt
    ) -> Generator[Event, None, None]:
        """Yield what a group's rank 0 streams until every member has sent its final answer.

        If the request must move to other replicas, let those prefill, then cancel the group's order. A single replica
        that has not sent a token yet is not waited for: it may be in a long step of another request, which cannot be
        interrupted. `attempt` receives the final answers.
        """
        group, is_cancelled = inbox.members, False
        for index, message in reader.read():
            if not is_cancelled and self._lease.should_cancel():
                is_cancelled = True
                self._cancel(inbox, reader, group)
            if message is None:
                if self._may_leave(group):
                    attempt.is_paused = True
                    self._cancel(inbox, reader, group)
                    return
                continue
            if not isinstance(message, Streamed):
                attempt.add(index, message)
                continue
            yield self._noted(message.output)
            wanted = self._lease.wanted
            if attempt.is_paused or wanted == set(group):
                continue
            if joining.are_prefilled(wanted - set(group), self._rest):
                attempt.is_paused = True
                self._cancel(inbox, reader, group[:1])

    def _may_leave(self, group: Members) -> bool:
        """Whether the request moves from one replica to others before its first token, and starts over there."""
        wanted = self._lease.wanted
        return bool(wanted) and len(group) == 1 and wanted.isdisjoint(group) and not self._delivered

    def _cancel(self, inbox: Inbox, reader: AnswerReader, members: Iterable[int]) -> None:
        for index in members:
            self._pool.send(index, Cancel(inbox.order))
        reader.note_cancel()

    def _cancel_and_wait(self, inbox: Inbox, reader: AnswerReader, waiting: set[int]) -> None:
        pool = self._pool
        if pool.is_closed:
            return
        self._cancel(inbox, reader, list(waiting))
        for _, message in reader.read():
            if not isinstance(message, Streamed | Finished | None) and len(inbox.members) > 1:
                pool.disband(inbox.members)

    def _drop_suspects(self, inbox: Inbox, broken: dict[int, GroupBroken]) -> None:
        """Declare replicas lost whose state digest differs from the majority's, and remove them from `broken`.

        Without a majority the most common digest counts, and of equally common ones the lowest rank's.
        """
        digests = next((message.digests for message in broken.values() if message.digests), None)
        if digests is None:
            return
        right = max(digests, key=lambda digest: (digests.count(digest), -digests.index(digest)))
        for index, digest in zip(inbox.members, digests, strict=True):
            if digest != right and index in broken:
                del broken[index]
                self._pool.lose(index, "its state diverged from the others'", inbox.incarnations[index])


class _JoiningReplicas:
    """Replicas that will join a running request: they run its prefill while the current group goes on."""

    def __init__(self, pool: ReplicaPool):
        self._pool = pool
        self._inboxes: dict[int, Inbox] = {}  # of the order to prefill, by replica index
        self._ended: set[int] = set()
        self._open = ExitStack()  # holds the inboxes open

    def __enter__(self) -> _JoiningReplicas:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for index in self._inboxes.keys() - self._ended:
            self._pool.send(index, Cancel(self._inboxes[index].order))
        self._open.close()

    def are_prefilled(self, indices: Iterable[int], rest: Callable[[], Request]) -> bool:
        """Whether the given replicas have run the prefill or are lost; orders it if that was not done yet.

        `rest` returns the request with the tokens committed so far.
        """
        joiners = set(indices)
        for index in joiners - self._inboxes.keys():
            inbox = self._inboxes[index] = self._open.enter_context(self._pool.open_inbox((index,)))
            self._pool.send_order(inbox, index, Prefill(inbox.order, self._pool.sealed(rest())))
        for index in joiners - self._ended:
            messages = self._inboxes[index].messages
            while not messages.empty():
                if isinstance(messages.get()[1], Prefilled | ReplicaLost):
                    self._ended.add(index)
        return joiners <= self._ended
