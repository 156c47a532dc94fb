"""The host cost: time of a step outside its forward pass, learned from steps.

Every replica grows the whole tree and learns from the results of all its nodes, so host time grows with the number of
nodes. All arithmetic is on integers that all replicas share.
"""

from __future__ import annotations

from lp_runtime.sizing.pass_times import FIXED_POINT_ONE

FIRST_STEPS = 4  # the shortest of the first steps that do not draft counts: first calls are slow
SMOOTHING_STEPS = 8  # of the mean over steps that do not draft
MEMORY_STEPS = 32  # approximate number of steps that draft over which the line is fitted
ASSUMED_NODE_NS = 1000  # host time of a node while trees of one size do not show it
ASSUMED_NODE_WEIGHT = 32**2  # weight of that assumption, as a variance of tree sizes
MAX_OUTLIER = 4  # a step's host time is clipped to this multiple of its estimate; the excess is other processes' load
MEAN_ONE = 1 << 20  # 1.0 of the running means


class HostCost:
    """Host time of a step: a mean for steps that do not draft, a line over nodes for steps that do.

    Attributes:
        drafting_ns: nanoseconds of a step that drafts a tree without nodes below the root.
        per_node_ns: nanoseconds of each node below the root, fixed point of FIXED_POINT_ONE.
    """

    def __init__(self) -> None:
        self.drafting_ns = self.per_node_ns = 0
        self._plain_ns = 0  # of steps that do not draft: the shortest of the first few, then a mean; 0 if unknown
        self._num_plain = 0  # steps that did not draft
        # For steps that draft: their number, and running means, fixed point of MEAN_ONE, of nodes, nanoseconds, nodes
        # squared, and nodes times nanoseconds.
        self._num_steps = self._nodes = self._nanoseconds = self._squares = self._products = 0

    @property
    def plain_ns(self) -> int:
        """Nanoseconds of a step that does not draft; until one was seen, of a step that drafts."""
        return self._plain_ns or self.drafting_ns

    def observe_plain(self, nanoseconds: int) -> None:
        """Learn from the host time, > 0 ns, of a step that did not draft."""
        self._num_plain += 1
        if self._num_plain <= FIRST_STEPS:
            self._plain_ns = min(self._plain_ns or nanoseconds, nanoseconds)
        else:
            self._plain_ns += (min(nanoseconds, MAX_OUTLIER * self._plain_ns) - self._plain_ns) // SMOOTHING_STEPS
        if not self._num_steps:
            self.drafting_ns, self.per_node_ns = self._plain_ns, ASSUMED_NODE_NS * FIXED_POINT_ONE

    def observe(self, num_nodes: int, nanoseconds: int) -> None:
        """Learn from the host time, > 0 ns, of a step that fed `num_nodes` nodes below the root."""
        if self._num_plain < FIRST_STEPS:  # a step that does not draft takes no longer
            self._plain_ns = min(self._plain_ns, nanoseconds)
            self.drafting_ns = min(self.drafting_ns, nanoseconds)
        if estimate := self.drafting_ns + self.per_node_ns * num_nodes // FIXED_POINT_ONE:
            nanoseconds = min(nanoseconds, MAX_OUTLIER * estimate)
        self._num_steps = num_steps = min(self._num_steps + 1, MEMORY_STEPS)
        self._nodes += (MEAN_ONE * num_nodes - self._nodes) // num_steps
        self._nanoseconds += (MEAN_ONE * nanoseconds - self._nanoseconds) // num_steps
        self._squares += (MEAN_ONE * num_nodes * num_nodes - self._squares) // num_steps
        self._products += (MEAN_ONE * num_nodes * nanoseconds - self._products) // num_steps
        variance = max(0, self._squares - self._nodes * self._nodes // MEAN_ONE)
        covariance = self._products - self._nodes * self._nanoseconds // MEAN_ONE
        weight = ASSUMED_NODE_WEIGHT * MEAN_ONE
        slope_ns = FIXED_POINT_ONE * (covariance + weight * ASSUMED_NODE_NS) // (variance + weight)
        # A step that drafts is assumed not to be faster than one that does not.
        excess = max(0, self._nanoseconds - self._plain_ns * MEAN_ONE)
        max_slope_ns = FIXED_POINT_ONE * excess // self._nodes if self._nodes else 0
        self.per_node_ns = min(max(0, slope_ns), max_slope_ns)
        nodes_ns = self.per_node_ns * self._nodes // FIXED_POINT_ONE
        self.drafting_ns = max(self._plain_ns, (self._nanoseconds - nodes_ns) // MEAN_ONE)
