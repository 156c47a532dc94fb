"""A request led by its driver: by one group of replicas, or by several in turn, where replicas are lost or moved.

What one group has not finished, the next takes up behind the last token that any replica has committed.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lp_runtime.engine.output import Event, Report
from lp_runtime.engine.request import Request
from lp_runtime.errors import ReplicaError
from lp_runtime.launchers.inbox import Group, Inbox, Lost
from lp_runtime.launchers.lease import ReplicaLease
from lp_runtime.launchers.messages import (
    Broken,
    Cancel,
    Decode,
    Finished,
    Prefill,
    Prefilled,
    Progress,
    Refused,
    Streamed,
)

if TYPE_CHECKING:
    from lp_runtime.launchers.team import TeamLauncher

MOST_FRUITLESS = 2  # times that a request may lose all its replicas without a token in between
SHORTEST = 1e-3  # seconds that are left of a request's time at least


@dataclass(frozen=True)
class Attempt:
    """How far a group has come with a request.

    Attributes:
        progress: what each replica that is left has committed.
        report: if the group has not been broken.
        is_paused: whether it was told to stop, because other replicas were wanted.
    """

    progress: dict[int, Progress]
    report: Report | None
    is_paused: bool


class RequestDriver:
    """Leads one request.

    Args:
        team: the replicas.
        request: what they are to decode.
        lease: which of them.
    """

    def __init__(self, team: TeamLauncher, request: Request, lease: ReplicaLease):
        self._team = team
        self._request = request
        self._allotment = lease
        self._told: list[int] = []  # new tokens that were yielded
        self._started = time.monotonic()

    def run(self) -> Generator[Event, None, None]:
        """Decode it: the runs as they come, then the report. Closing the iterator early cancels it.

        Raises:
            ReplicaError: if all its replicas are lost, and it gets no others.
        """
        team, lease, told = self._team, self._allotment, self._told
        num_steps = num_lost = num_fruitless = 0
        is_whole = True
        while True:
            members = lease.settle() or lease.refill()
            group = team.form(members) or ()
            lease.lose(lost := members - set(group))
            num_lost += len(lost)
            if not group:
                if members:
                    continue
                raise self._all_lost()
            num_told = len(told)
            attempt = yield from self._attempt(self._rest(), group)
            lost = set(group) - set(attempt.progress)
            lease.lose(lost)
            num_lost += len(lost)
            report = attempt.report
            if report is not None and not (attempt.is_paused and report.finish_reason == "cancelled"):
                report = replace(report, num_steps=report.num_steps + num_steps, losses=num_lost)
                yield report if is_whole else replace(report, seconds=time.monotonic() - self._started)
                return
            is_whole = False
            # A request that ends every replica it meets is not to end them all.
            num_fruitless = 0 if attempt.progress or len(told) > num_told else num_fruitless + 1
            if num_fruitless == MOST_FRUITLESS:
                raise self._all_lost()
            num_steps += max((progress.num_steps for progress in attempt.progress.values()), default=0)

    def _all_lost(self) -> ReplicaError:
        return ReplicaError(
            f"all replicas were lost while decoding, after {len(self._told)} tokens ({self._team.why_lost()})"
        )

    def _rest(self) -> Request:
        """What is left to be done."""
        left = self._request.max_time
        if left is not None:
            left = max(SHORTEST, left - (time.monotonic() - self._started))
        return replace(self._request, committed=tuple(self._told), max_time=left)

    def _attempt(self, request: Request, group: Group) -> Generator[Event, None, Attempt]:
        """Have a group decode: to its end, to the loss of a replica, or until other replicas are wanted."""
        team = self._team
        done: dict[int, Finished] = {}
        broken: dict[int, Broken] = {}
        refusal: Refused | None = None
        is_paused = False
        with team.ordered(group) as inbox, _Joiners(team) as joiners:
            waiting = set(group)
            for index in group:
                team.order_one(inbox, index, Decode(inbox.order, request))
            try:
                with self._allotment.cancelling(lambda: self._tell_to_cancel(inbox, group)):
                    for index, message in team.answers(inbox, waiting):
                        if isinstance(message, Streamed):
                            self._told += message.run.token_ids
                            yield message.run
                            wanted = self._allotment.wanted
                            if is_paused or wanted == set(group):
                                continue
                            if joiners.are_warm(wanted - set(group), self._rest):
                                is_paused = True
                                self._tell_to_cancel(inbox, group[:1])
                        elif isinstance(message, Finished):
                            done[index] = message
                        elif isinstance(message, Broken):
                            broken[index] = message
                        elif isinstance(message, Refused):
                            refusal = message
            except (GeneratorExit, KeyboardInterrupt):  # the caller stopped early
                self._cancel(inbox, waiting)
                raise
        if broken or (refusal and len(group) > 1):
            team.disband(group)
        if refusal is not None:
            raise refusal.kind(refusal.message)
        self._drop_suspects(inbox, broken)
        progress = {index: message.progress for index, message in (done | broken).items()}
        if progress:
            yield from self._tell_rest(request, max(progress.values(), key=lambda each: len(each.token_ids)))
        report = next((done[index].report for index in group if index in done), None)
        return Attempt(progress, report, is_paused)

    def _tell_to_cancel(self, inbox: Inbox, members: Iterable[int]) -> None:
        for index in members:
            self._team.tell(index, Cancel(inbox.order))

    def _cancel(self, inbox: Inbox, waiting: set[int]) -> None:
        """End what members are decoding, and wait until they have."""
        team = self._team
        if team.is_closed:
            return
        self._tell_to_cancel(inbox, waiting)
        for _, message in team.answers(inbox, waiting):
            if not isinstance(message, Streamed | Finished) and len(inbox.members) > 1:
                team.disband(inbox.members)

    def _drop_suspects(self, inbox: Inbox, broken: dict[int, Broken]) -> None:
        """Where digests differ, most replicas are right, or, where there is no telling, the first of them."""
        digests = next((message.digests for message in broken.values() if message.digests), None)
        if digests is None:
            return
        right = max(digests, key=lambda digest: (digests.count(digest), -digests.index(digest)))
        for index, digest in zip(inbox.members, digests, strict=True):
            if digest != right and broken.pop(index, None):
                self._team.lose(index, "its state has parted from the others'", inbox.lives[index])

    def _tell_rest(self, request: Request, best: Progress) -> Generator[Event, None, None]:
        """What a replica has committed that the caller was not told: rank 0 was lost before it said so."""
        known = len(self._told) - len(request.committed)
        rest = best.token_ids[known:]
        if rest:
            self._told += rest
            yield StepOutput(rest, best.logprobs[known:] if request.logprobs else None)


class _Joiners:
    """Replicas that are to join a running request: they feed its text to their models while the others go on."""

    def __init__(self, team: TeamLauncher):
        self._team = team
        self._warming: dict[int, Inbox] = {}
        self._ended: set[int] = set()
        self._orders = ExitStack()

    def __enter__(self) -> _Joiners:
        return self

    def __exit__(self, *exc_info) -> None:
        for index in self._warming.keys() - self._ended:
            self._team.tell(index, Cancel(self._warming[index].order))
        self._orders.close()

    def are_warm(self, joiners: Iterable[int], rest) -> bool:
        """Whether they have the text, or are lost; asks those that have not been asked.

        Args:
            joiners: their indices.
            rest: makes the request as it is now.
        """
        joiners = set(joiners)
        for index in joiners - self._warming.keys():
            inbox = self._warming[index] = self._orders.enter_context(self._team.ordered((index,)))
            self._team.order_one(inbox, index, Prefill(inbox.order, rest()))
        for index in joiners - self._ended:
            messages = self._warming[index].messages
            while not messages.empty():
                if isinstance(messages.get()[1], Prefilled | Lost):
                    self._ended.add(index)
        return joiners <= self._ended
