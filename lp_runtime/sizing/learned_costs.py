"""What steps have shown of replicas, of the host and of path probabilities.

Letters: R replicas, M tokens that a replica's time is known for at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lp_runtime.sizing.host_cost import HostCost
from lp_runtime.sizing.pass_times import FIXED_POINT_ONE, PassTimes
from lp_runtime.sizing.promises import Promises

NUM_TIMED = 4  # steps of the root alone that are timed before the first step that drafts
SMOOTHING_STEPS = 8  # of the mean over steps that do not draft
MAX_SCALE = FIXED_POINT_ONE << 10  # so that products stay within 64 bits


class TimedStep(NamedTuple):
    """A step whose times are of use.

    Attributes:
        measured: [R, M + 1] measured nanoseconds that the step was expected to follow, before scales.
        sizes: [R] number of tokens that each replica fed.
        is_plain: Whether the step fed the root alone without asking the drafter, and steps are sized.
        follows_plain: Whether that held for the step before, too.
    """

    measured: np.ndarray
    sizes: np.ndarray
    is_plain: bool
    follows_plain: bool


@dataclass
class LearnedCosts:
    """What steps have shown; carried from one request to the next of its kind.

    Attributes:
        passes: How long each replica takes beside what was measured, in steps that draft.
        plain_scales: [R] how much longer than that in steps that do not draft, fixed point of FIXED_POINT_ONE. A
            machine that slows down as a whole changes `passes` alone.
        num_plain: Number of steps that `plain_scales` were learned from.
        host: Host cost of a step.
        promises: What was accepted beside what path probabilities promised.
    """

    passes: PassTimes
    plain_scales: np.ndarray
    num_plain: int = 0
    host: HostCost = field(default_factory=HostCost)
    promises: Promises = field(default_factory=Promises)

    @classmethod
    def initial(cls, num_replicas: int, is_timed: bool = False) -> LearnedCosts:
        """Return what is assumed before the first step.

        Args:
            num_replicas: R.
            is_timed: Whether steps of the root alone count as timed already, so that the first step may draft.
        """
        plain_scales = np.full(num_replicas, FIXED_POINT_ONE, dtype=np.int64)
        return cls(PassTimes(num_replicas), plain_scales, NUM_TIMED if is_timed else 0)

    @property
    def is_timed(self) -> bool:
        """Whether enough steps of the root alone were timed to compare steps that draft with them."""
        return self.num_plain >= NUM_TIMED

    def observe_times(self, step: TimedStep, nanoseconds: np.ndarray) -> None:
        """Learn from how long forward passes took: `passes` from a step that drafts, else `plain_scales`.

        Args:
            step: What the replicas were expected to take.
            nanoseconds: [R] int64 time that each replica took.
        """
        if not step.is_plain:
            self.passes.observe(step.measured, step.sizes, nanoseconds)
        elif step.follows_plain or not self.is_timed:  # the first after a larger step is slow
            self.num_plain += 1
            times = np.empty_like(step.measured)
            self.passes.expect(step.measured, times)
            expected = times[np.arange(len(times)), step.sizes]
            ratios = np.minimum(nanoseconds * FIXED_POINT_ONE // expected, MAX_SCALE)
            self.plain_scales += (ratios - self.plain_scales) // min(self.num_plain, SMOOTHING_STEPS)
