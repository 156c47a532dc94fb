"""One step of one sequence, as every replica knows it before the forward pass.

Letters: T nodes in the tree, R replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lp_runtime.distributed.partition.partition import Shares
from lp_runtime.lookahead.state import Proposal
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot


@dataclass(frozen=True)
class Step:
    """What is fed in one step, and by whom: equal on every replica.

    Attributes:
        proposal: the token tree, T nodes, with the digest of the state that proposed the tree.
        shares: [R] what each replica feeds, and whose successors it reports.
        has_top_k: whether top-k candidates travel in the exchange; False in a step of the pending tokens alone.
    """

    proposal: Proposal
    shares: Shares
    has_top_k: bool = True

    @property
    def tree(self) -> TokenTree:
        """The step's token tree."""
        return self.proposal.tree

    @cached_property
    def digest(self) -> int:
        """56 bits that tell this step's state and partition from any other's; 0 for a replica without peers.

        Computed at the first use: beside a GPU that is after the forward pass was launched.
        """
        return 0 if len(self.shares) == 1 else self.proposal.digest ^ self.shares.digest()

    def inputs(self, rank: int, slot: CacheSlot) -> StepInputs:
        """Return what the replica `rank` feeds to the model, for the sequence in `slot`."""
        share = self.shares[rank]
        start = self.proposal.num_cached + int(share.nodes[0])
        return StepInputs(slot, self.tree, share.nodes, share.owned, start)
