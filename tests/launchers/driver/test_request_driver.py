"""Tests of how the driver handles a group's last messages; replicas are simulated, answers scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue

import pytest

from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import FailureConfig, RuntimeConfig
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.errors import LaunchError, ReplicaError
from lp_runtime.launchers.team import TeamLauncher
from lp_runtime.launchers.wire.lease import ReplicaLease
from lp_runtime.launchers.wire.messages import (
    PING,
    PONG,
    Decode,
    Failed,
    Finished,
    GroupBroken,
    Join,
    Joined,
    ModelLoaded,
    Progress,
    Streamed,
)
from lp_runtime.launchers.worker.process_host import ProcessHost
from lp_runtime.lookahead.drafter import DraftCounts
from lp_runtime.replica.loaded_model import ReplicaInfo
from lp_runtime.request.output import MODEL, Report, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.request.step_timer import StepTimes

INFO = ReplicaInfo(64, 256, frozenset(), {}, "cpu", "float32", 0.0, None)
REPORT = Report(1, "length", 1.0, 1.0, 1.0, StepTimes(0.0, 0.0, 0.0), 0.0, DraftCounts(), None, None)
REQUEST = Request((1, 2, 3), PLAIN, 8)
FAILURE_TIMEOUT = 7.0  # seconds; no test waits for it
MANY = 10  # groups; more than the driver tries without progress

Answers = Callable[[int, int, int], Iterable[object]]  # (group number, replica, order number) -> messages


def progress_of(*steps: StepOutput) -> Progress:
    progress = Progress()
    for step in steps:
        progress.add(step)
    return progress


class AnsweringHost(ProcessHost):
    """Simulated replicas that answer orders to decode by calling `answers`, and join groups.

    `presence` simulates a network that is cut after the first group: a group of all replicas no longer forms, and each
    replica reports whether it was present, by its index. With None, all groups form.
    """

    def __init__(self, answers: Answers, presence: dict[int, bool] | None = None):
        self._answers, self._presence = answers, presence
        self._has_formed: set[int] = set()
        self._said: SimpleQueue[tuple[int, object]] = SimpleQueue()
        self.orders: list[int] = []  # orders to decode, one per group

    def start_process(self, index: int) -> None:
        self._said.put((index, ModelLoaded()))

    def send(self, index: int, message: object) -> None:
        if message == PING:
            self._said.put((index, PONG))
        elif isinstance(message, Join):
            is_cut = self._presence is not None and message.context.num_replicas == len(self._presence)
            if not is_cut or index not in self._has_formed:
                self._has_formed.add(index)
                self._said.put((index, Joined(message.order, INFO)))
            else:
                assert message.timeout == FAILURE_TIMEOUT, "shorter than a start may take"
                broken = GroupBroken(message.order, Progress(), "cut", was_present=self._presence[index])
                self._said.put((index, broken))
        elif isinstance(message, Decode):
            if message.order not in self.orders:
                self.orders.append(message.order)
            for answer in self._answers(len(self.orders) - 1, index, message.order):
                self._said.put((index, answer))

    def receive(self, timeout: float) -> list[tuple[int, object]]:
        try:
            return [self._said.get(timeout=timeout)]
        except Empty:
            return []

    def kill(self, index: int) -> Callable[[], None]:
        return lambda: None

    def rendezvous(self, members: Sequence[int]) -> ReplicaContext:
        return ReplicaContext(segment="none")

    def close(self) -> None:
        pass


@contextmanager
def launched(answers: Answers, gpus: int = 2, presence: dict[int, bool] | None = None) -> Iterator[TeamLauncher]:
    """Launch simulated replicas that are not restarted."""
    config = RuntimeConfig(gpus=gpus, device="cpu", failure=FailureConfig(FAILURE_TIMEOUT, restarts=0))
    launcher = TeamLauncher(config, AnsweringHost(answers, presence))
    yield launcher
    launcher.close()


def test_request_fails_after_three_groups_break_without_progress():
    def answers(group: int, index: int, order: int) -> list[object]:
        if group < MANY:
            return [GroupBroken(order, Progress(), "rank 0: no answer within 60 s")]
        return [Finished(order, Progress(), REPORT)]

    with launched(answers) as launcher:
        with pytest.raises(ReplicaError) as caught:
            list(launcher.run(REQUEST))
        assert (
            str(caught.value)
            == "3 groups in a row broke while decoding, after 0 tokens (rank 0: no answer within 60 s)"
        )
        assert launcher.ready == {0, 1} and not launcher.pool.losses


def test_request_continues_if_each_broken_group_adds_a_token():
    def answers(group: int, index: int, order: int) -> Iterator[object]:
        output = StepOutput([group])
        if index == 0:
            yield Streamed(order, output)
        progress = progress_of(output)
        yield GroupBroken(order, progress, "for a while") if group < MANY else Finished(order, progress, REPORT)

    with launched(answers) as launcher:
        *outputs, report = launcher.run(REQUEST)
    assert [output.token_ids for output in outputs] == [[number] for number in range(MANY + 1)]
    assert report.num_steps == MANY + 1


@pytest.mark.parametrize("trace", [True, False])
def test_unstreamed_steps_of_a_lost_replica_are_recovered(trace):
    """A remaining replica supplies the steps that the lost one did not stream, with the same trace."""
    steps = [
        StepOutput([5, 6], [-1.0, -2.0], [1, 0], ["text", MODEL], cached_tokens=2),
        StepOutput([7], [-3.0], [1], [MODEL]),
        StepOutput([8], [-4.0], [0], [MODEL]),
    ]
    if not trace:
        steps = [replace(step, found_by=None, sources=None) for step in steps]

    def answers(group: int, index: int, order: int) -> list[object]:
        if group == 1:
            return [Streamed(order, steps[2]), Finished(order, progress_of(steps[2]), REPORT)]
        if index == 0:
            return [Streamed(order, steps[0]), Failed("its process ended", None)]
        return [GroupBroken(order, progress_of(steps[0], steps[1]), "rank 0 is gone")]

    with launched(answers) as launcher:
        *outputs, report = launcher.run(replace(REQUEST, trace=trace, logprobs=True))
    assert outputs == steps
    assert report.losses == 1
    assert report.cached_tokens == 2, "of the attempt that fed the prompt"


def test_cached_tokens_are_reported_if_no_step_was_streamed():
    """Rank 0 is lost before it streams; the other replica has committed the prefill's step."""
    step = StepOutput([5], cached_tokens=2)

    def answers(group: int, index: int, order: int) -> list[object]:
        if group == 1:
            return [Finished(order, Progress(), REPORT)]
        if index == 0:
            return [Failed("its process ended", None)]
        return [GroupBroken(order, progress_of(step), "rank 0 is gone")]

    with launched(answers) as launcher:
        *outputs, report = launcher.run(REQUEST)
    assert outputs == [step] and report.cached_tokens == 2


@pytest.mark.parametrize(
    ("presence", "kept"),
    [
        ({0: True, 1: False}, {0}),
        ({0: False, 1: True}, {1}),
        ({0: True, 1: True, 2: False}, {0, 1}),
        ({0: False, 1: False, 2: False}, {0}),  # it is unclear which of them are cut off
        ({0: True, 1: True}, {0}),
    ],
)
def test_request_continues_without_unreachable_replicas(presence, kept):
    """The network between the replicas is cut, but the driver still reaches all of them."""

    def answers(group: int, index: int, order: int) -> list[object]:
        if group == 0:
            return [GroupBroken(order, Progress(), "no answer within 7 s")]
        output = StepOutput([5])
        finished = Finished(order, progress_of(output), REPORT)
        return [Streamed(order, output), finished] if index == min(kept) else [finished]

    with launched(answers, len(presence), presence) as launcher:
        *outputs, report = launcher.run(REQUEST)
        assert outputs == [StepOutput([5])]
        assert launcher.ready == kept and report.losses == len(presence) - len(kept)
        assert set(launcher.pool.losses.values()) == {"it cannot reach the others: cut"}


FULL = "launcher.backend=shared: /dev/shm: No space left on device"


def test_replicas_of_a_machine_that_cannot_exchange_go_on_alone(caplog, monkeypatch):
    """The file system of the shared memory is full: no replica is lost, and one decodes the request."""

    def answers(group: int, index: int, order: int) -> list[object]:
        if group == 0:
            return [GroupBroken(order, Progress(), "no answer within 7 s")]
        output = StepOutput([5])
        return [Streamed(order, output), Finished(order, progress_of(output), REPORT)]

    def refuse(host: AnsweringHost, members: Sequence[int]) -> ReplicaContext:
        raise LaunchError(FULL)

    with launched(answers) as launcher:
        monkeypatch.setattr(AnsweringHost, "rendezvous", refuse)
        for _ in range(2):
            *outputs, report = launcher.run(REQUEST)
            assert outputs == [StepOutput([5])] and report.losses == 0
        assert launcher.ready == {0, 1} and not launcher.pool.losses
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"replicas cannot exchange, so each request is decoded by one of them: {FULL}"]


def test_replicas_that_cannot_exchange_do_not_start(monkeypatch):
    def refuse(host: AnsweringHost, members: Sequence[int]) -> ReplicaContext:
        raise LaunchError(FULL)

    monkeypatch.setattr(AnsweringHost, "rendezvous", refuse)
    with pytest.raises(LaunchError, match=f"^{FULL}$"), launched(lambda group, index, order: []):
        pass


class ClosingLease(ReplicaLease):
    """Closes the launcher just before its request asks for a group, as another thread may."""

    def __init__(self, launcher: TeamLauncher, wanted: Iterable[int]):
        super().__init__(wanted)
        self._launcher = launcher

    def settle(self) -> frozenset[int]:
        self._launcher.close()
        return self.wanted


@pytest.mark.parametrize("wanted", [{0, 1}, {0}])
def test_request_that_begins_while_the_runtime_closes_loses_no_replica(wanted):
    """The group of both exists already; that of one does not."""
    with launched(lambda group, index, order: [Finished(order, Progress(), REPORT)]) as launcher:
        with pytest.raises(ReplicaError, match="^the runtime is closed$"):
            list(launcher.run_on(REQUEST, ClosingLease(launcher, wanted)))
        assert not launcher.pool.losses and not launcher.ready


def test_lone_replica_that_ignores_a_cancel_is_lost():
    """The replica answers pings, but its step never ends."""
    output = StepOutput([5])
    config = RuntimeConfig(device="cpu", failure=FailureConfig(timeout=0.01, heartbeat=1.0, restarts=0))
    launcher = TeamLauncher(config, AnsweringHost(lambda group, index, order: [Streamed(order, output)]))
    events = launcher.run(REQUEST)
    assert next(events) == output
    events.close()  # returns
    assert launcher.pool.losses == {0: "it did not end within 0.1 s"}
    launcher.close()
