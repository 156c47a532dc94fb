"""Estimated time of lookahead parallelism on more replicas than there are devices.

A step of R replicas ends when the slowest of them is done and the exchange has happened. Replicas do not communicate
inside a forward pass, so their shares can run one after another on one device:

    step = slowest share + exchange + work that every replica does itself

The engine runs its own step (`Engine._step`) as rank 0. Its request computes the shares of the other ranks, too. The
trees, the shares and so the number of steps are those of R replicas.
Letters: R replicas, T nodes in the tree.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.decoder.decoder import Decoder, Gathered, Samples
from lp_runtime.decoder.step import Step
from lp_runtime.distributed.exchange import Outcome
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.running_request import Callbacks, RunningRequest, capacity_of
from lp_runtime.errors import LookaheadError
from lp_runtime.lookahead.top_k import VocabularyPrior
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.harvest import PromptHarvest
from lp_runtime.prefill.prefix import PromptPrefix
from lp_runtime.request.output import Report, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.request.step_timer import pack_clock


@dataclass(frozen=True)
class CriticalPath:
    """Times of one request on R replicas, without its exchanges; sums over all steps."""

    token_ids: list[int]
    num_steps: int  # the prefill's included
    step_tokens: float  # that the busiest replica feeds in a step, mean, the prefill excluded
    prefill_seconds: float
    forward_seconds: float  # of the slowest shares
    other_seconds: float  # of proposing, partitioning and advancing

    def seconds(self, exchange: float) -> float:
        computing = self.prefill_seconds + self.forward_seconds + self.other_seconds
        return computing + exchange * self.num_steps


class _EqualReplicas(Calibration):
    """Calibration of R replicas that are all as fast as the measured one."""

    def __init__(self, measured: Calibration, num_replicas: int):
        self._measured, self._num_replicas = measured, num_replicas

    def times(self, num_tokens: int, num_committed: int = 0) -> np.ndarray:
        return np.tile(self._measured.times(num_tokens, num_committed), (self._num_replicas, 1))

    def max_step_tokens(self) -> int:
        return self._measured.max_step_tokens()

    def harvest_ns(self) -> int:
        return self._measured.harvest_ns()

    def vocabulary(self) -> VocabularyPrior:
        return self._measured.vocabulary()


class LocalRequest(RunningRequest):
    """A request of rank 0 without other ranks: no exchange happens, and rank 0 knows all results.

    Subclasses write the results of a step to `values`, [T, width], before `finish_exchange`, and may set `clocks`, the
    [R] packed times of the step.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.values = np.zeros((0, 0), np.int64)
        self.clocks: list[int] = [0] * self._group.size

    def harvest(self, num_prompt: int) -> PromptHarvest:
        """Return what collects all candidates here. Real replicas each collect a part, in less time."""
        decoder = self.decoder
        return PromptHarvest(self._model, self.slot, num_prompt, decoder.num_harvested, decoder.sampler, Group.alone())

    def agree_to_cancel(self, step: Step, num_left: int, error: LookaheadError | None) -> bool:
        if error is not None:
            raise error
        return False  # no other replica can cancel

    def inputs(self, step: Step) -> StepInputs:
        self.values = np.full((len(step.tree), self.decoder.sampler.width), -1, dtype=np.int64)
        return super().inputs(step)

    def start_exchange(self, step: Step, samples: Samples | LookaheadError) -> None:
        if isinstance(samples, LookaheadError):
            raise samples
        if step.is_prefill:
            self.values = np.full((1, self.decoder.sampler.width), -1, dtype=np.int64)
        self.values[step.shares[0].owned] = samples.values.cpu().numpy()

    def finish_exchange(self, step: Step, samples: Samples | LookaheadError) -> Gathered | LookaheadError:
        assert not isinstance(samples, LookaheadError)
        return self.unpack(step, samples, Outcome(self.values, 0, self.clocks))


class _SharesInTurn(LocalRequest):
    """A request whose shares one device computes one after another.

    `num_fed` sums the tokens of each step's busiest rank, `forward_seconds` the times of the slowest shares.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.num_fed, self.forward_seconds = 0, 0.0
        self._open = ExitStack()
        self._other_slots: list[CacheSlot] = []  # of models with states: each rank has fed another chain
        self._times: list[float] = []  # of the step's shares, the ranks' from 1 on first
        self._started = 0.0

    def prefill(self) -> Generator[None, None, StepOutput | None]:
        """Feed the prompt; with chains also to the other ranks' slots, which is not timed."""
        model = self._model
        if model.feeds_chains:
            for _ in range(1, self._group.size):
                slot = self._open.enter_context(model.slots.borrowed())
                model.begin(slot, capacity_of(self.request, self.decoder), prompt_length=len(self.request.prompt_ids))
                model.prefill(slot, self.request.prompt_ids)
                self._other_slots.append(slot)
        return (yield from super().prefill())

    def inputs(self, step: Step) -> StepInputs:
        """Compute the other ranks' shares, then return rank 0's inputs."""
        inputs, self._times = super().inputs(step), []
        for rank in range(1, len(step.shares)):
            started = time.perf_counter()
            # With trees all ranks hold the same keys and values; rank 0, the last one, commits the pending tokens.
            slot = self._other_slots[rank - 1] if self._other_slots else self.slot
            logits = self._model.forward(step.inputs(rank, slot), commit=bool(self._other_slots))
            samples = self.decoder.sample(step, rank, logits)
            self.values[step.shares[rank].owned] = samples.values.cpu().numpy()
            self._times.append(time.perf_counter() - started)
        self._started = time.perf_counter()
        return inputs

    def start_exchange(self, step: Step, samples: Samples | LookaheadError) -> None:
        super().start_exchange(step, samples)
        if step.is_prefill:
            return
        times = [time.perf_counter() - self._started, *self._times]
        self.clocks = [pack_clock(seconds, self.timer.overhead_seconds) for seconds in times]
        self.num_fed += max(step.shares.sizes)
        self.forward_seconds += max(times)

    def release_other_slots(self) -> None:
        self._open.close()


class _InTurnEngine(Engine):
    """An engine that computes all shares of its requests, and remembers the latest request."""

    latest: _SharesInTurn | None = None

    def make_running(
        self, request: Request, decoder: Decoder, slot: CacheSlot, prefix: PromptPrefix, callbacks: Callbacks
    ) -> RunningRequest:
        self.latest = _SharesInTurn(self._model, self._peers, request, decoder, slot, prefix, callbacks)
        return self.latest


class CriticalPathRunner:
    """Runner of requests as on R replicas, with one model on one device."""

    def __init__(self, model: ModelRunner, calibration: Calibration, num_replicas: int):
        group = Group(0, num_replicas)
        self._engine = _InTurnEngine(model, group, _EqualReplicas(calibration, num_replicas), times_are_late=False)

    def run(self, request: Request) -> CriticalPath:
        self._engine.prepare(request.lookahead)  # compile now: inside a step it would count as the host's time
        try:
            *_, report = self._engine.run(request)
        finally:
            running = self._engine.latest
            assert running is not None
            running.release_other_slots()
        assert isinstance(report, Report)
        state = running.decoder.state
        return CriticalPath(
            token_ids=state.new_tokens,
            num_steps=state.num_steps,
            step_tokens=running.num_fed / max(1, state.num_steps - 1),
            prefill_seconds=report.prefill_seconds,
            forward_seconds=running.forward_seconds,
            other_seconds=report.times.other,
        )
