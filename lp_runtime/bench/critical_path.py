"""What lookahead parallelism would take on more replicas than there are devices.

A step of R replicas ends when the slowest of them is done and the exchange has happened. Nothing is communicated
inside a forward pass, so each replica's share can be run alone, one after the other, on one device:

    step = slowest share + exchange + what every replica does besides

The trees, the shares and so the number of steps are those of R replicas.
Letters: R replicas, T nodes in the tree.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from lp_runtime.engine.calibration import Calibration
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.request import Request
from lp_runtime.engine.sampler_factory import make_sampler
from lp_runtime.lookahead.drafters.base import VerificationResult
from lp_runtime.model.runner import ModelRunner


@dataclass(frozen=True)
class CriticalPath:
    """One request on R replicas, without what its exchanges take.

    Attributes:
        token_ids: what was generated.
        num_steps: the prefill's included.
        step_tokens: tokens that the busiest replica feeds, mean over the steps, the prefill's excluded.
        prefill_seconds: every replica's; they prefill at the same time.
        forward_seconds: of the slowest share, over all steps.
        other_seconds: proposing, partitioning, advancing, over all steps.
    """

    token_ids: list[int]
    num_steps: int
    step_tokens: float
    prefill_seconds: float
    forward_seconds: float
    other_seconds: float

    def seconds(self, exchange: float) -> float:
        """From start to end, with exchanges of so many seconds."""
        computing = self.prefill_seconds + self.forward_seconds + self.other_seconds
        return computing + exchange * self.num_steps


class _Alike(Calibration):
    """Replicas that are all as fast as this one."""

    def __init__(self, measured: Calibration, num_replicas: int):
        self._measured, self._alike = measured, num_replicas

    def times(self, num_tokens: int) -> np.ndarray:
        return np.tile(self._measured.times(num_tokens), (self._alike, 1))

    def max_step_tokens(self) -> int:
        return self._measured.max_step_tokens()

    def vocabulary(self) -> np.ndarray:
        return self._measured.vocabulary()


class CriticalPathRunner:
    """Runs requests as R replicas would, on one model.

    Args:
        model: the only one there is.
        calibration: what was measured of it.
        num_replicas: R.
    """

    def __init__(self, model: ModelRunner, calibration: Calibration, num_replicas: int):
        self._model = model
        self._num_replicas = num_replicas
        self._loop = Engine(model, 0, num_replicas, model.device, _Alike(calibration, num_replicas))

    def run(self, request: Request) -> CriticalPath:
        """Decode one request."""
        model = self._model
        drawing = make_sampler(model, request)
        state, budget, _ = self._loop.begin(request, drawing, None)
        drafter = state.drafter
        drawing.num_top_k = drafter.num_top_k
        model.begin(len(request.prompt_ids) + request.max_new_tokens + drafter.max_nodes + drafter.max_committed)

        started = time.perf_counter()
        proposal = state.propose_prefill()
        logits = model.prefill(request.prompt_ids)
        packed = drawing.draw(logits, proposal.tree, [0], state.tokens)[0].cpu().numpy()
        successors, _, top_k = drawing.unpack(packed)
        state.advance_prefill(proposal, VerificationResult(successors, top_k))
        prefill_seconds = time.perf_counter() - started

        num_fed, forward_seconds, other_seconds, other = 0, 0.0, 0.0, 0.0
        while state.finish_reason is None:
            started = time.perf_counter()
            is_resting = budget.is_resting
            proposal = state.propose_root() if is_resting else state.propose(budget.fit, budget.tree_size_hint)
            tree = proposal.tree
            shares = budget.shares(tree)
            values = np.full((len(tree), drawing.width), -1, dtype=np.int64)
            proposing = time.perf_counter() - started
            times = []
            for rank, share in enumerate(shares):
                started = time.perf_counter()
                is_last = rank == len(shares) - 1
                logits = model.forward(tree, share.nodes, share.owned, commit=is_last)
                packed, _ = drawing.draw(
                    logits[: len(share.owned)], tree, share.owned, state.tokens, not is_resting, model.text.drawn
                )
                values[share.owned] = packed.cpu().numpy()
                times.append(time.perf_counter() - started)
            started = time.perf_counter()
            successors, _, top_k = drawing.unpack(values[tree.root :], not is_resting)
            run, _ = state.advance(proposal, VerificationResult.from_root(tree.root, successors, top_k))
            budget.observe(shares, [int(1e9 * each) for each in times], [int(1e9 * other)] * len(shares), len(run) - 1)
            other = proposing + time.perf_counter() - started
            num_fed += max(shares.sizes)
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
