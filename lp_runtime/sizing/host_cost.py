"""What a step takes the host for, beside the forward pass: known from what steps took.

Every replica grows the whole tree, and learns from all that was found of it: a step takes the longer, the more nodes it
feeds. All is integer arithmetic on what all replicas share.
"""

from __future__ import annotations

from lp_runtime.sizing.cost_model import UNIT

SMOOTHING = 8  # steps that do not draft
REMEMBERED = 32  # steps that draft
ASSUMED_NODE = 1000  # nanoseconds
WEIGHT = 32**2  # of what is assumed of a node, beside the variance of the numbers of nodes
MOST_TIMES = 4  # what a step is known to take, that one is taken to have taken: the rest was something else's
EXACT = 1 << 20


class HostCost:
    """Nanoseconds of a step's work beside its forward pass: of one that does not draft, and of one that does, a line
    through what those of various sizes took.

    Attributes:
        plain: of a step that does not draft; 0 while unknown.
        drafting: of a step that drafts, as if it fed no nodes.
        per_node: and for each node of its tree, fixed point of UNIT.
    """

    def __init__(self) -> None:
        self.plain = self.drafting = self.per_node = 0
        # Of steps that draft: how many are remembered; means of EXACT, nodes, nanoseconds, nodes squared, the product.
        self._num_seen = self._nodes = self._nanoseconds = self._squares = self._products = 0

    def observe_plain(self, nanoseconds: int) -> None:
        """Such a step did not draft."""
        self.plain += (nanoseconds - self.plain) // SMOOTHING if self.plain else nanoseconds
        if not self._num_seen:
            self.drafting, self.per_node = self.plain, ASSUMED_NODE * UNIT

    def observe(self, num_nodes: int, nanoseconds: int) -> None:
        """Such a step drafted, and fed so many nodes below the root."""
        if expected := self.drafting + self.per_node * num_nodes // UNIT:
            nanoseconds = min(nanoseconds, MOST_TIMES * expected)
        self._num_seen = seen = min(self._num_seen + 1, REMEMBERED)
        self._nodes += (EXACT * num_nodes - self._nodes) // seen
        self._nanoseconds += (EXACT * nanoseconds - self._nanoseconds) // seen
        self._squares += (EXACT * num_nodes * num_nodes - self._squares) // seen
        self._products += (EXACT * num_nodes * nanoseconds - self._products) // seen
        variance = max(0, self._squares - self._nodes * self._nodes // EXACT)
        covariance = self._products - self._nodes * self._nanoseconds // EXACT
        per_node = UNIT * (covariance + WEIGHT * ASSUMED_NODE * EXACT) // (variance + WEIGHT * EXACT)
        # A step that drafts is not done sooner than one that does not.
        most = UNIT * max(0, self._nanoseconds - self.plain * EXACT) // self._nodes if self._nodes else 0
        self.per_node = min(max(0, per_node), most)
        self.drafting = max(self.plain, (self._nanoseconds - self.per_node * self._nodes // UNIT) // EXACT)
