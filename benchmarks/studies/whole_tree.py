"""Decodes a request on one model as R replicas would, with one pass of the whole tree per step.

Trees, shares and therefore the number of steps are those of R replicas; only the time of a forward pass is not. The
loop is the engine's own (`Engine._step`).
Letters: R replicas, T nodes in the tree, n of them from the root on, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lp_runtime.bench.critical_path import LocalRequest
from lp_runtime.decoder.decoder import Decoder, Gathered, Samples
from lp_runtime.decoder.step import Step
from lp_runtime.distributed.partition.partition import Shares
from lp_runtime.engine.running_request import Callbacks, RunningRequest
from lp_runtime.errors import LookaheadError
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.prefill.prefix import PromptPrefix
from lp_runtime.request.request import Request
from lp_runtime.sampling.step_logits import StepLogits
from studies.replay import SettledEngine

# Returns the times that all replicas report in the exchange of a step with these shares: [R] integers of pack_clock.
Clocks = Callable[[Shares], list[int]]


class WholeTree(LocalRequest):
    """Request whose trees rank 0 feeds whole, and whose nodes it samples for all ranks.

    Attributes:
        steps: [T, width] samples of all ranks, by step, the prefill's first; -1 before the root.
    """

    def __init__(self, report_times: Clocks, *args: Any):
        super().__init__(*args)
        self.steps: list[np.ndarray] = []
        self._report_times = report_times

    def inputs(self, step: Step) -> StepInputs:
        super().inputs(step)
        return StepInputs.whole(self.slot, step.tree)

    def sample(self, step: Step, logits: StepLogits | LookaheadError) -> Samples | LookaheadError:
        if step.is_prefill or isinstance(logits, LookaheadError):
            return super().sample(step, logits)
        rows = [torch.from_numpy(share.owned - step.tree.root).to(logits.logits.device) for share in step.shares]
        samples = [self.decoder.sample(step, i, StepLogits(logits.logits[each])) for i, each in enumerate(rows)]
        for share, each in zip(step.shares, samples, strict=True):
            self.values[share.owned] = each.values.cpu().numpy()
        return samples[0]

    def finish_exchange(self, step: Step, samples: Samples | LookaheadError) -> Gathered | LookaheadError:
        self.clocks = self._report_times(step.shares)
        self.steps.append(self.values)
        return super().finish_exchange(step, samples)


class WholeTreeEngine(SettledEngine):
    """Engine that feeds whole trees, with assumed times; it keeps its requests."""

    def __init__(self, make_times: Callable[[], Clocks], *args: Any):
        super().__init__(*args)
        self._make_times = make_times
        self.decoded: list[WholeTree] = []

    def make_running(
        self, request: Request, decoder: Decoder, slot: CacheSlot, prefix: PromptPrefix, callbacks: Callbacks
    ) -> RunningRequest:
        parts = (self._model, self._peers, request, decoder, slot, prefix, callbacks)
        self.decoded.append(WholeTree(self._make_times(), *parts))
        return self.decoded[-1]
