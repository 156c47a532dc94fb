"""Costs learned from steps: pass times, host time, and corrections of path probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from lp_runtime.sizing.acceptance import AcceptanceCalibration
from lp_runtime.sizing.host_cost import HostCost
from lp_runtime.sizing.pass_times import PassTimes


@dataclass
class LearnedCosts:
    """Costs learned from steps; carried from one request to the next of its kind."""

    passes: PassTimes
    host: HostCost = field(default_factory=HostCost)
    acceptance: AcceptanceCalibration = field(default_factory=AcceptanceCalibration)

    @classmethod
    def initial(cls, num_replicas: int) -> LearnedCosts:
        """Return the costs assumed before the first step."""
        return cls(PassTimes(num_replicas))
