"""What a step takes the host for, beside the forward pass: known from what steps took.

Every replica grows the whole tree, and learns from all that was found of it: a step takes the longer, the more nodes it
feeds. All is integer arithmetic on what all replicas share.
"""

from __future__ import annotations

SMOOTHING = 8  # steps that do not draft
REMEMBERED = 32  # steps that draft
ASSUMED_NODE = 1000  # nanoseconds
WEIGHT = 32**2  # of what is assumed of a node, beside the variance of the numbers of nodes
UNIT = 1 << 10  # fixed point
EXACT = 1 << 20


class HostPrice:
    """Nanoseconds of a step's work beside its forward pass: of one that does not draft, and of one that does, a line
    through what those of various sizes took.

    Attributes:
        plain: of a step that does not draft; 0 while unknown.
    """

    def __init__(self) -> None:
        self.plain = 0
        self._is_known = False
        # Of steps that draft, means: nodes, nanoseconds, nodes squared, nodes times nanoseconds; of EXACT.
        self._means = [0, 0, 0, 0]

    def observe_plain(self, nanoseconds: int) -> None:
        """Such a step did not draft."""
        self.plain += (nanoseconds - self.plain) // SMOOTHING if self.plain else nanoseconds

    def observe(self, num_nodes: int, nanoseconds: int) -> None:
        """Such a step drafted, and fed so many nodes below the root."""
        seen = [EXACT * each for each in (num_nodes, nanoseconds, num_nodes**2, num_nodes * nanoseconds)]
        if self._is_known:
            seen = [mean + (each - mean) // REMEMBERED for mean, each in zip(self._means, seen, strict=True)]
        self._means, self._is_known = seen, True

    def of_drafting(self) -> tuple[int, int]:
        """(nanoseconds of a step, more for each node of its tree in fixed point); (plain, 0) while nothing is known."""
        if not self._is_known:
            return self.plain, 0
        nodes, nanoseconds, squares, products = self._means
        variance = max(0, squares - nodes * nodes // EXACT)
        covariance = products - nodes * nanoseconds // EXACT
        per_node = UNIT * (covariance + WEIGHT * ASSUMED_NODE * EXACT) // (variance + WEIGHT * EXACT)
        # A step that drafts is not done sooner than one that does not.
        most = UNIT * max(0, nanoseconds - self.plain * EXACT) // nodes if nodes else 0
        per_node = min(max(0, per_node), most)
        return max(self.plain, (nanoseconds - per_node * nodes // UNIT) // EXACT), per_node
