"""Estimated time of lookahead parallelism on more replicas than there are devices.

A step of R replicas ends when the slowest of them is done and the exchange has happened. Replicas do not communicate
inside a forward pass, so their shares can run one after another on one device:

    step = slowest share + exchange + work that every replica does itself

The trees, the shares and so the number of steps are those of R replicas.
Letters: R replicas, T nodes in the tree.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.decoder.decoder import Decoder
from lp_runtime.decoder.prompt_harvest import PromptHarvest
from lp_runtime.decoder.sampler_factory import make_sampler_spec
from lp_runtime.decoder.step import Step
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.running_request import capacity_of
from lp_runtime.model.forward.step_inputs import StepLogits
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.utils.generators import result_of


@dataclass(frozen=True)
class CriticalPath:
    """Times of one request on R replicas, without its exchanges.

    Attributes:
        num_steps: number of steps, the prefill's included.
        step_tokens: tokens that the busiest replica feeds in a step, mean over steps, the prefill excluded.
        prefill_seconds: time of the prefill, which all replicas run at the same time.
        forward_seconds: time of the slowest shares, summed over all steps.
        other_seconds: time of proposing, partitioning and advancing, summed over all steps.
    """

    token_ids: list[int]
    num_steps: int
    step_tokens: float
    prefill_seconds: float
    forward_seconds: float
    other_seconds: float

    def seconds(self, exchange: float) -> float:
        """Return the total seconds if each exchange takes `exchange` seconds."""
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

    def vocabulary(self) -> np.ndarray:
        return self._measured.vocabulary()

    def prepare_vocabulary(self, seconds: float | None = None) -> None:
        self._measured.prepare_vocabulary(seconds)


class CriticalPathRunner:
    """Runner of requests as on R replicas, with one model on one device."""

    def __init__(self, model: ModelRunner, calibration: Calibration, num_replicas: int):
        self._model, self._num_replicas = model, num_replicas
        group = Group(0, num_replicas, model.device)
        self._engine = Engine(model, group, _EqualReplicas(calibration, num_replicas))

    def run(self, request: Request) -> CriticalPath:
        """Decode one request, and measure its critical path."""
        self._engine.prepare(request.lookahead)  # compile now: inside a step it would count as the host's time
        decoder = self._engine.open_decoder(request, make_sampler_spec(self._model, request))
        try:
            # With chains each replica holds a different state; with trees all hold the same keys and values.
            num_slots = self._num_replicas if self._model.feeds_chains else 1
            with contextlib.ExitStack() as stack:
                slots = [stack.enter_context(self._model.slots.borrowed()) for _ in range(num_slots)]
                return self._run(request, decoder, slots)
        finally:
            self._engine.close_decoder(decoder)

    def _run(self, request: Request, decoder: Decoder, slots: Sequence[CacheSlot]) -> CriticalPath:
        state, model = decoder.state, self._model
        for slot in slots:
            model.begin(slot, capacity_of(request, decoder), prompt_length=len(request.prompt_ids))
        for slot in slots[1:]:
            model.prefill(slot, request.prompt_ids)
        started = time.perf_counter()
        step = decoder.propose_prefill()
        # Replicas would each harvest a part of the prompt; all of it is harvested here, so the prefill takes longer.
        harvest = PromptHarvest(
            model, slots[0], request.prompt_ids, decoder.num_harvested, decoder.sampler, Group(0, 1, model.device)
        )
        samples = decoder.sample(step, 0, StepLogits(result_of(harvest.prefill_in_chunks())))
        decoder.advance(step, decoder.unpack(step, samples.values.cpu().numpy()))
        if decoder.num_harvested:
            decoder.drafter.learn_prompt(request.prompt_ids, harvest.share())
        prefill_seconds = time.perf_counter() - started

        num_fed, forward_seconds, other_seconds, other = 0, 0.0, 0.0, 0.0
        while state.finish_reason is None:
            started = time.perf_counter()
            step = decoder.propose()
            values = np.full((len(step.tree), decoder.sampler.width), -1, dtype=np.int64)
            proposing = time.perf_counter() - started
            times = [self._run_share(decoder, step, rank, slots, values) for rank in range(len(step.shares))]
            started = time.perf_counter()
            forward_ns = [int(1e9 * each) for each in times]
            decoder.advance(step, decoder.unpack(step, values), forward_ns, [int(1e9 * other)] * len(times))
            other = proposing + time.perf_counter() - started
            num_fed += max(step.shares.sizes)
            forward_seconds += max(times)
            other_seconds += other
        return CriticalPath(
            token_ids=state.new_tokens,
            num_steps=state.num_steps,
            step_tokens=num_fed / max(1, state.num_steps - 1),
            prefill_seconds=prefill_seconds,
            forward_seconds=forward_seconds,
            other_seconds=other_seconds,
        )

    def _run_share(
        self, decoder: Decoder, step: Step, rank: int, slots: Sequence[CacheSlot], values: np.ndarray
    ) -> float:
        """Run one replica's share of a step, write its samples to `values` [T, width], and return its seconds."""
        started = time.perf_counter()
        is_last_of_slot = len(slots) > 1 or rank == len(step.shares) - 1
        found = self._model.forward(step.inputs(rank, slots[rank % len(slots)]), commit=is_last_of_slot)
        samples = decoder.sample(step, rank, found)
        values[step.shares[rank].owned] = samples.values.cpu().numpy()
        return time.perf_counter() - started
