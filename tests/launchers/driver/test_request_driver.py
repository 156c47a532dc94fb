"""What the driver makes of a group's last words, with replicas in name only, which answer as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue

import pytest

from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import FailureConfig, RuntimeConfig
from lp_runtime.errors import ReplicaError
from lp_runtime.launchers.team import TeamLauncher
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
from lp_runtime.launchers.worker.process_host import Placement, ProcessHost, Rendezvous
from lp_runtime.lookahead.drafter import Counts
from lp_runtime.replica.replica import ReplicaInfo
from lp_runtime.request.output import MODEL, Report, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.request.step_timer import StepTimes

INFO = ReplicaInfo(64, 256, frozenset(), {}, "cpu", "float32", 0.0, None)
REPORT = Report(1, "length", 1.0, 1.0, 1.0, StepTimes(0.0, 0.0, 0.0), 0.0, Counts(()), None, None)
REQUEST = Request((1, 2, 3), PLAIN, 8)
MANY = 10  # groups, more than a driver is to try

Answers = Callable[[int, int, int], Iterable[object]]  # of (number of the group, replica, number of the order)


class AnsweringHost(ProcessHost):
    """Replicas that join every group, and answer orders to decode as `answers` says."""

    def __init__(self, answers: Answers):
        self._answers = answers
        self._said: SimpleQueue[tuple[int, object]] = SimpleQueue()
        self.orders: list[int] = []  # to decode: one a group

    def start_process(self, index: int) -> None:
        self._said.put((index, ModelLoaded(INFO)))

    def send(self, index: int, message: object) -> None:
        if message == PING:
            self._said.put((index, PONG))
        elif isinstance(message, Join):
            self._said.put((index, Joined(message.order, INFO)))
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

    def rendezvous(self, members: Sequence[int]) -> Rendezvous:
        return Rendezvous(segment="none")

    def placement(self, index: int) -> Placement:
        return Placement(index, 2)

    def close(self) -> None:
        pass


@contextmanager
def launched(answers: Answers) -> Iterator[TeamLauncher]:
    """Two replicas, which are not started again."""
    config = RuntimeConfig(gpus=2, device="cpu", failure=FailureConfig(restarts=0))
    launcher = TeamLauncher(config, AnsweringHost(answers))
    yield launcher
    launcher.close()


def test_groups_that_break_again_and_again_without_a_loss():
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


def test_groups_that_break_behind_a_new_token_go_on():
    def answers(group: int, index: int, order: int) -> Iterator[object]:
        output = StepOutput([group])
        if index == 0:
            yield Streamed(order, output)
        progress = Progress().after(output)
        yield GroupBroken(order, progress, "for a while") if group < MANY else Finished(order, progress, REPORT)

    with launched(answers) as launcher:
        *outputs, report = launcher.run(REQUEST)
    assert [output.token_ids for output in outputs] == [[number] for number in range(MANY + 1)]
    assert report.num_steps == MANY + 1


@pytest.mark.parametrize("trace", [True, False])
def test_what_a_lost_replica_has_not_streamed_is_traced(trace):
    """The rest comes from a replica that is left, which knows as much of each token."""
    steps = [
        StepOutput([5, 6], [-1.0, -2.0], [1, 0], ["text", MODEL]),
        StepOutput([7], [-3.0], [1], [MODEL]),
        StepOutput([8], [-4.0], [0], [MODEL]),
    ]
    if not trace:
        steps = [replace(step, found_by=None, sources=None) for step in steps]

    def answers(group: int, index: int, order: int) -> list[object]:
        if group == 1:
            return [Streamed(order, steps[2]), Finished(order, Progress().after(steps[2]), REPORT)]
        if index == 0:
            return [Streamed(order, steps[0]), Failed("its process ended", None)]
        return [GroupBroken(order, Progress().after(steps[0]).after(steps[1]), "rank 0 is gone")]

    with launched(answers) as launcher:
        *outputs, report = launcher.run(replace(REQUEST, trace=trace, logprobs=True))
    assert outputs == steps
    assert report.losses == 1
