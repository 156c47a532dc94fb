"""The pure core of decoding: propose a step, verify what it found, advance. Equal on every replica.

    step      = decoder.propose()
    logits    = model.forward(step.inputs(rank, slot))            the only expensive thing
    values    = exchange(decoder.sample(step, rank, logits))      the only communication
    committed = decoder.advance(step, decoder.verify(step, values))

The engine, its batches, the drop-in, lp-bench's critical path and the drafting studies all call these methods.
Letters: T nodes in the tree, n nodes that a replica owns, R replicas, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lp_runtime.decoder.step import Step
from lp_runtime.distributed.partition.partition import Shares
from lp_runtime.lookahead.drafter import Drafter, VerificationResult
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.state import DecodingState, Proposal
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.request.output import Logprob
from lp_runtime.sampling.sampler import Sampler, Scores
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.chain_budget import ChainBudget


class Samples:
    """What one replica has sampled in a step.

    Args:
        values: [n, width] int64, packed for the exchange, of the nodes that this replica owns.
        found: what the forward pass found of these nodes.
        scores: returns the [n, V] float32 processed logits that the successors were chosen from.

    Attributes:
        values: as given.
    """

    def __init__(self, values: torch.Tensor, found: StepLogits, scores: Scores):
        self.values = values
        self._found, self._scores = found, scores

    @property
    def logits(self) -> torch.Tensor:
        """[n, V] float32, the model's logits; read before the next pass."""
        return self._found.logits

    @functools.cached_property
    def scores(self) -> torch.Tensor:
        """[n, V] float32, the processed logits that the successors were chosen from; read before the next pass."""
        return self._scores()


class Verified(NamedTuple):
    """What a step found, unpacked.

    Attributes:
        result: successors and top-k candidates of the tree's nodes.
        logprobs: [T] the model's log-probability of each node's successor, -1.0 before the root; None if not asked for.
        packed: [T, width] int64 what travelled of each node; `Decoder.logprobs_behind` reads more of it.
    """

    result: VerificationResult
    logprobs: list[float] | None
    packed: np.ndarray


class Committed(NamedTuple):
    """What a step commits.

    Attributes:
        token_ids: the tokens, at least one.
        nodes: the tree's node that each token follows.
    """

    token_ids: list[int]
    nodes: list[int]


class Decoder:
    """One sequence's state, step budget and sampler.

    Args:
        state: before its prefill, or resumed.
        budget: decides how many nodes a step feeds.
        sampler: chooses successors.
        draft_tables: what the drafter remembers; None for a drafter without tables.
        num_followers: replicas beside those of the budget, which own no node: an ordered sampler's processors are
            called on one replica.
        num_harvested: the drafter learns the top-k candidates behind so many of the prompt's last tokens.

    Attributes:
        state, budget, sampler, draft_tables, num_harvested: as given.
    """

    def __init__(
        self,
        state: DecodingState,
        budget: StepBudget,
        sampler: Sampler,
        draft_tables: DraftTables | None = None,
        num_followers: int = 0,
        num_harvested: int = 0,
    ):
        self._num_followers, self.num_harvested = num_followers, num_harvested
        self.state, self.budget, self.sampler, self.draft_tables = state, budget, sampler, draft_tables

    @property
    def drafter(self) -> Drafter:
        """The state's drafter."""
        return self.state.drafter

    @property
    def max_owned(self) -> int:
        """Largest number of nodes that a replica may own in a step."""
        return min(self.drafter.max_nodes, self.budget.limit or self.drafter.max_nodes)

    def propose_prefill(self) -> Step:
        """Return the prefill's step: a tree of the prompt's last token alone."""
        return self._step(self.state.propose_prefill())

    def propose(self, batch_size: int = 1) -> Step:
        """Return the next step.

        Args:
            batch_size: sequences that share the step's forward pass.
        """
        budget, state = self.budget, self.state
        budget.set_batch_size(batch_size)
        if budget.is_resting and not state.has_forced:
            return self._step(state.propose_root(), has_top_k=False)
        if budget.selects:
            return self._step(state.propose(None, budget.tree_size_hint, budget.select))
        return self._step(state.propose(budget.fit, budget.tree_size_hint))

    def _step(self, proposal: Proposal, has_top_k: bool = True) -> Step:
        shares = self.budget.shares(proposal.tree)
        if self._num_followers:
            shares = shares.with_followers(self._num_followers, proposal.tree.root)
        return Step(proposal, shares, has_top_k)

    def sample(self, step: Step, rank: int, found: StepLogits) -> Samples:
        """Choose the successors of the nodes that a replica owns.

        Args:
            step: the step.
            rank: the replica.
            found: logits of the nodes that it owns, and what the forward pass has sampled already.
        """
        owned = step.shares[rank].owned
        found = found.first(len(owned))
        tree, tokens = step.tree, self.state.tokens
        masks = self.state.masks(tree, owned)  # beside an asynchronous device, while the forward pass runs
        if self.sampler.is_ordered and len(owned):
            values, scores = self.sampler.sample_in_order(
                found, tree, owned, tokens, step.has_top_k, functools.partial(self._may_follow, tree), masks
            )
        else:
            values, scores = self.sampler.sample(found, tree, owned, tokens, step.has_top_k, masks)
        return Samples(values, found, scores)

    def _may_follow(self, tree: TokenTree, node: int) -> bool:
        """Whether the accepted path may go on to a node: not behind the end of the sequence."""
        return node == tree.root or (
            self.drafter.may_accept(node) and tree.tokens[node] not in self.state.rules.eos_token_ids
        )

    def verify(self, step: Step, values: np.ndarray) -> Verified:
        """Unpack what all replicas have sampled.

        Args:
            step: the step.
            values: [T, width] int64, by node of the tree; rows before the root are not read.
        """
        root = step.tree.root
        successors, logprobs, top_k = self.sampler.unpack(values[root:], step.has_top_k)
        logprobs = None if logprobs is None else [-1.0] * root + logprobs
        return Verified(VerificationResult.from_root(root, successors, top_k), logprobs, values)

    def logprobs_behind(self, verified: Verified, nodes: Sequence[int]) -> list[float] | None:
        """Return the log-probability of the successor of each of some nodes, a Logprob where the likeliest tokens are
        asked for, too; None if log-probabilities are not asked for."""
        if verified.logprobs is None:
            return None
        values = [verified.logprobs[node] for node in nodes]
        top = self.sampler.unpack_top_logprobs(verified.packed[nodes])
        return values if top is None else [Logprob(value, each) for value, each in zip(values, top, strict=True)]

    def accepted_nodes(self, step: Step, verified: Verified) -> list[int]:
        """Return the nodes that a step's accepted tokens follow, from the root on."""
        _, path = self.drafter.accept(step.tree, verified.result)
        return [step.tree.root, *path]

    def advance_prefill(self, step: Step, verified: Verified) -> Committed:
        """Commit the prefill's token: the whole prompt is cached from now on."""
        return Committed(self.state.advance_prefill(step.proposal, verified.result), [0])

    def advance(
        self,
        step: Step,
        verified: Verified,
        forward_ns: Sequence[int],
        overhead_ns: Sequence[int],
        times_are_late: bool = False,
    ) -> Committed:
        """Accept, commit, and learn from a step.

        Args:
            step: the step.
            verified: what it found.
            forward_ns: [R] nanoseconds of each replica's forward pass; 0 where unknown.
            overhead_ns: [R] nanoseconds of what else the step before took; 0 where unknown.
            times_are_late: whether `forward_ns` is of the step before, too.
        """
        shares, budget = step.shares, self.budget
        follows_chains = isinstance(budget, ChainBudget)
        token_ids, nodes = self.state.advance(step.proposal, verified.result, caches_pending=not follows_chains)
        if isinstance(budget, ChainBudget):
            self.state.count_cached(budget.settle(shares, nodes, step.tree.root + 1))
        if self._num_followers:  # the budget knows nothing of them
            shares = Shares.of_one(len(step.tree), step.tree.root)
            forward_ns, overhead_ns = forward_ns[:1], overhead_ns[:1]
        self.budget.observe(step.tree, shares, forward_ns, overhead_ns, nodes[1:], is_late=times_are_late)
        return Committed(token_ids, nodes)
