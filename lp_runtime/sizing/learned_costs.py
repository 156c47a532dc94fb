"""Costs learned from steps: pass times, host time, and corrections of path probabilities.

Letters: R replicas, M tokens of the largest pass with a known time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lp_runtime.sizing.acceptance import AcceptanceCalibration
from lp_runtime.sizing.host_cost import HostCost
from lp_runtime.sizing.pass_times import FIXED_POINT_ONE, PassTimes

NUM_TIMED = 4  # steps of the root alone to time before the first step that drafts
SMOOTHING_STEPS = 8  # of the mean over steps that do not draft
MAX_SCALE = FIXED_POINT_ONE << 10  # so that products stay within 64 bits


class TimedStep(NamedTuple):
    """A step whose times are worth learning from.

    Attributes:
        measured: [R, M + 1] measured nanoseconds that predicted the step, before corrections.
        sizes: [R] number of tokens that each replica fed.
        is_plain, follows_plain: whether this step, and the previous one, fed the root alone without the drafter.
    """

    measured: np.ndarray
    sizes: np.ndarray
    is_plain: bool
    follows_plain: bool


@dataclass
class LearnedCosts:
    """Costs learned from steps; carried from one request to the next of its kind.

    Attributes:
        passes: corrections of measured pass times, from steps that draft.
        plain_scales: [R] how much longer passes of steps that do not draft take than `passes` predicts, fixed point of
            FIXED_POINT_ONE. A machine that slows down as a whole changes `passes` alone.
        num_plain: number of steps that `plain_scales` was learned from.
    """

    passes: PassTimes
    plain_scales: np.ndarray
    num_plain: int = 0
    host: HostCost = field(default_factory=HostCost)
    acceptance: AcceptanceCalibration = field(default_factory=AcceptanceCalibration)

    @classmethod
    def initial(cls, num_replicas: int, is_timed: bool = False) -> LearnedCosts:
        """Return the costs assumed before the first step.

        With `is_timed`, steps of the root alone count as timed already, so that the first step may draft.
        """
        plain_scales = np.full(num_replicas, FIXED_POINT_ONE, dtype=np.int64)
        return cls(PassTimes(num_replicas), plain_scales, NUM_TIMED if is_timed else 0)

    @property
    def is_timed(self) -> bool:
        """Whether enough steps of the root alone were timed to compare steps that draft with them."""
        return self.num_plain >= NUM_TIMED

    def observe_times(self, step: TimedStep, nanoseconds: np.ndarray) -> None:
        """Learn from [R] int64 ns of forward passes: `passes` if the step drafted, else `plain_scales`."""
        if not step.is_plain:
            self.passes.observe(step.measured, step.sizes, nanoseconds)
        elif step.follows_plain or not self.is_timed:  # the first plain step after a larger step is slow: skip it
            self.num_plain += 1
            times = np.empty_like(step.measured)
            self.passes.expect(step.measured, times)
            expected = times[np.arange(len(times)), step.sizes]
            ratios = np.minimum(nanoseconds * FIXED_POINT_ONE // expected, MAX_SCALE)
            self.plain_scales += (ratios - self.plain_scales) // min(self.num_plain, SMOOTHING_STEPS)
            if not self.passes.num_steps:  # nothing else is known: steps that draft have changed by the same factor
                self.passes.assume(self.plain_scales)
                self.plain_scales[:] = FIXED_POINT_ONE
