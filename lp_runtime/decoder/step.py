"""One step of one request, as every replica knows it before the forward pass.

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
    """A step's token tree, and which replica feeds which of its nodes; equal on every replica.

    Attributes:
        shares: [R] nodes that each replica feeds, and those whose successors it reports.
        has_top_k: whether top-k candidates are exchanged; False in a step of the pending tokens alone.
        is_prefill: whether this step ends the prefill.
    """

    proposal: Proposal
    shares: Shares
    has_top_k: bool = True
    is_prefill: bool = False

    @property
    def tree(self) -> TokenTree:
        return self.proposal.tree

    @cached_property
    def digest(self) -> int:
        """56-bit digest of the state and the partition; 0 for a lone replica.

        Computed on first use, which on a GPU is after the launch of the forward pass.
        """
        return 0 if len(self.shares) == 1 else self.proposal.digest ^ self.shares.digest()

    def inputs(self, rank: int, slot: CacheSlot) -> StepInputs:
        """Return what the replica `rank` feeds to the model, for the request in `slot`."""
        share = self.shares[rank]
        start = self.proposal.num_cached + int(share.nodes[0])
        return StepInputs(slot, self.tree, share.nodes, share.owned, start)
