"""Costs learned from steps: pass times, host time, and corrections of path probabilities."""

from __future__ import annotations

from lp_runtime.sizing.acceptance import AcceptanceCalibration
from lp_runtime.sizing.host_cost import HostCost
from lp_runtime.sizing.pass_times import PassTimes


class LearnedCosts:
    """Costs learned from steps; carried from one request to the next of its kind."""

    def __init__(self, num_replicas: int):
        self.passes = PassTimes(num_replicas)
        self.host = HostCost()
        self.acceptance = AcceptanceCalibration()
