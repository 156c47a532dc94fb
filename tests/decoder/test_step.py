"""Replicas must agree on the tree and its shares before they exchange a step's results."""

from __future__ import annotations

from lp_runtime.decoder.step import Step
from lp_runtime.distributed.partition.partition import partition
from lp_runtime.lookahead.state import Proposal
from lp_runtime.lookahead.tree import TokenTree


def test_step_digest_depends_on_partition_of_tree():
    tree = TokenTree([1], max_depth=3)
    for branch in ([2, 3], [4, 5], [6], [7]):
        tree.add_branch(branch)
    proposal = Proposal(tree, b"request")
    even, uneven = (Step(proposal, partition(tree, speeds)) for speeds in ([1.0, 1.0], [3.0, 1.0]))
    assert even.digest == Step(proposal, partition(tree, [1.0, 1.0])).digest
    assert even.digest != uneven.digest
