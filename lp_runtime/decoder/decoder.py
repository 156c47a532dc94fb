"""Decoder of a request: state, step budget and sampler. Equal on all replicas without communication.

A step (`Engine._step` in engine/engine.py) calls `propose`, `sample`, `learn_costs`, `unpack` and `advance`, in this
order.

Letters: T nodes in the tree, n nodes that a replica owns, R replicas, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch

from lp_runtime.decoder.step import Step
from lp_runtime.distributed.partition.partition import Shares
from lp_runtime.lookahead.drafter import Drafter, VerificationResult
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.state import DecodingState, Proposal
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.request.output import MODEL, Logprob, StepOutput
from lp_runtime.sampling.sampler import Sampler, Scores
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.sizing.budget import StepBudget


class Samples:
    """Samples of one replica in a step, for the n nodes that it owns.

    Args:
        values: [n, width] int64 successors and top-k candidates, packed for the exchange.
        scores: returns the [n, V] float32 processed logits that the successors were chosen from.
    """

    def __init__(self, values: torch.Tensor, logits: StepLogits, scores: Scores):
        self.values = values
        self._logits, self._scores = logits, scores

    @property
    def logits(self) -> torch.Tensor:
        """[n, V] float32, the model's logits; read before the next pass."""
        return self._logits.logits

    @cached_property
    def scores(self) -> torch.Tensor:
        """[n, V] float32, the processed logits that successors were chosen from; read before the next pass."""
        return self._scores()


class Gathered(NamedTuple):
    """Samples of all replicas in a step, unpacked.

    Times are nanoseconds by replica, [R], 0 where unknown; empty if none are known.

    Attributes:
        logprobs: [T] the model's log-probability of each node's successor, valid from the root on; None if the request
            does not ask for them.
        packed: [T, width] int64 the gathered integers of each node.
        forward_ns: of each replica's forward pass; of the step before if times are late (StepBudget).
        overhead_ns: that each replica spent between the passes of this step and the previous one.
    """

    result: VerificationResult
    logprobs: list[float] | None
    packed: np.ndarray
    forward_ns: Sequence[int] = ()
    overhead_ns: Sequence[int] = ()


class DrafterSetup(NamedTuple):
    """A drafter, and what a decoder needs with it; draft tables only of the drafter `full`."""

    drafter: Drafter
    budget: StepBudget
    draft_tables: DraftTables | None


class Decoder:
    """The state, drafter, step budget and sampler of one request.

    Args:
        setup: its drafter is the state's.
        num_followers: replicas that own no node, in addition to those of the budget. Processors of an ordered sampler
            are called on one replica only.
        num_harvested: number of trailing prompt tokens whose top-k candidates the drafter learns.
        is_traced: whether outputs name the rank and the source of each token.
        lacks_drafter: whether `use` will be called with the request's own drafter.
    """

    def __init__(
        self,
        state: DecodingState,
        setup: DrafterSetup,
        sampler: Sampler,
        num_followers: int = 0,
        num_harvested: int = 0,
        is_traced: bool = False,
        lacks_drafter: bool = False,
    ):
        self.state = state
        self.drafter, self.budget = setup.drafter, setup.budget
        self.draft_tables = setup.draft_tables
        self.sampler = replace(sampler, num_top_k=setup.drafter.num_top_k)
        self.num_harvested = num_harvested
        self.lacks_drafter = lacks_drafter
        self._num_without = 0  # steps before the state had the request's own drafter
        self._num_followers = num_followers
        self._is_traced = is_traced
        self._observe_last: Callable[[], None] | None = None  # `StepBudget.observe` of the last step; None once called

    def use(self, setup: DrafterSetup) -> None:
        """Draft in the way given from the next step on."""
        self.learn_costs()
        self.drafter, self.budget = setup.drafter, setup.budget
        self.draft_tables = setup.draft_tables
        self.sampler = replace(self.sampler, num_top_k=setup.drafter.num_top_k)
        self.state.use(setup.drafter)
        self._num_without, self.lacks_drafter = self.state.num_steps, False

    @property
    def num_steps_without_drafter(self) -> int:
        """Steps of a request that lacked its drafter; 0 if it had it from the start."""
        return self.state.num_steps if self.lacks_drafter else self._num_without

    @property
    def max_owned(self) -> int:
        return min(self.drafter.max_nodes, self.budget.limit)

    def propose_prefill(self) -> Step:
        return self._step(self.state.propose_prefill(), is_prefill=True)

    def propose(self, batch_size: int = 1) -> Step:
        """Return the next step; `batch_size` sequences share its forward pass."""
        budget, state = self.budget, self.state
        budget.set_batch_size(batch_size)
        if budget.is_resting and not state.has_forced:
            return self._step(state.propose_root(), has_top_k=False)
        return self._step(state.propose(budget.choose, budget.tree_size_hint))

    def _step(self, proposal: Proposal, has_top_k: bool = True, is_prefill: bool = False) -> Step:
        shares = self.budget.shares(proposal.tree)
        if self._num_followers:
            shares = shares.with_followers(self._num_followers, proposal.tree.root)
        return Step(proposal, shares, has_top_k, is_prefill)

    def sample(self, step: Step, rank: int, logits: StepLogits) -> Samples:
        """Choose the successors of the nodes that a replica owns, from the logits of those nodes."""
        owned = step.shares[rank].owned
        logits = logits.first(len(owned))
        tree, tokens = step.tree, self.state.tokens
        masks = self.state.masks(tree, owned)  # a GPU runs the forward pass meanwhile
        if self.sampler.is_ordered and len(owned):
            values, scores = self.sampler.sample_in_order(
                logits, tree, owned, tokens, step.has_top_k, partial(self._may_follow, tree), masks
            )
        else:
            values, scores = self.sampler.sample(logits, tree, owned, tokens, step.has_top_k, masks)
        return Samples(values, logits, scores)

    def _may_follow(self, tree: TokenTree, node: int) -> bool:
        """Whether the accepted path may continue to a node: not after the end of the sequence."""
        return node == tree.root or (
            self.drafter.may_accept(node) and tree.tokens[node] not in self.state.rules.eos_token_ids
        )

    def unpack(
        self,
        step: Step,
        values: np.ndarray,
        forward_ns: Sequence[int] = (),
        overhead_ns: Sequence[int] = (),
    ) -> Gathered:
        """Unpack the integers that all replicas gathered, [T, width] int64; rows before the root have no meaning."""
        successors, logprobs, top_k = self.sampler.unpack(values, step.has_top_k)
        result = VerificationResult(successors, None if top_k is None else top_k[step.tree.root :])
        return Gathered(result, logprobs, values, forward_ns, overhead_ns)

    def accepted_nodes(self, step: Step, gathered: Gathered) -> list[int]:
        """Return the nodes that the accepted tokens follow, from the root on."""
        _, path = self.state.accept(step.tree, gathered.result)
        return [step.tree.root, *path]

    def advance(self, step: Step, gathered: Gathered) -> StepOutput:
        """Accept, commit, and learn drafts from a step. Times are not read for the prefill's step."""
        self.learn_costs()  # of the step before, unless that has been done during this one
        if step.is_prefill:
            return self._output(step, gathered, self.state.advance_prefill(step.proposal, gathered.result), [0])
        shares, budget = step.shares, self.budget
        token_ids, nodes = self.state.advance(step.proposal, gathered.result)
        self.state.num_cached += budget.settle(shares, nodes, step.tree.root + 1)
        forward_ns, overhead_ns = gathered.forward_ns, gathered.overhead_ns
        if self._num_followers:  # the budget does not include them
            shares = Shares.of_one(len(step.tree), step.tree.root)
            forward_ns, overhead_ns = forward_ns[:1], overhead_ns[:1]
        budget.end_step()
        self._observe_last = partial(budget.observe, step.tree, shares, forward_ns, overhead_ns, nodes[1:])
        return self._output(step, gathered, token_ids, nodes)

    def learn_costs(self) -> None:
        """Learn what the last step cost. The next tree does not wait for it: a GPU can run the next pass meanwhile."""
        if self._observe_last is not None:
            self._observe_last()
            self._observe_last = None

    def _output(self, step: Step, gathered: Gathered, token_ids: list[int], nodes: list[int]) -> StepOutput:
        """Return the output of a step that commits tokens; `nodes` are the tree's nodes that they follow."""
        logprobs: list[float] | None = None
        if gathered.logprobs is not None:
            logprobs = [gathered.logprobs[node] for node in nodes]
            if (top := self.sampler.unpack_top_logprobs(gathered.packed[nodes])) is not None:
                logprobs = [Logprob(value, each) for value, each in zip(logprobs, top, strict=True)]
        if not self._is_traced:
            return StepOutput(token_ids, logprobs)
        sources = [*self.drafter.counts.latest_sources(), MODEL][: len(token_ids)]
        return StepOutput(token_ids, logprobs, step.shares.owner[nodes].tolist(), sources)
