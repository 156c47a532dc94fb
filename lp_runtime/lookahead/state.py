"""The decoding state, equal on every replica: propose a tree, then advance by the step's result.

Both are functions of the state and of integers that all replicas share, so equal states stay equal. The drafter
(drafter.py) chooses the nodes of a tree. This never changes what is committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lp_runtime.lookahead.drafter import Drafter, VerificationResult
from lp_runtime.lookahead.guide import Guide
from lp_runtime.lookahead.tree import TokenTree

DIGEST_BYTES = 7  # 56 bits, so that a digest fits an int64 of the exchange as a non-negative number


@dataclass(frozen=True)
class DecodingRules:
    """Everything besides the prompt that determines a request's decoding.

    Attributes:
        max_new_tokens: >= 1.
        drafting: settings of the drafter as text; part of the digest.
        sampling: all other settings that affect which successors are sampled, as text; part of the digest.
        refed_at: text length after which the model recomputes the whole text: no tree may cross from a shorter text to
            a longer one. None for models that never do.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    drafting: str = ""
    sampling: str = ""
    refed_at: int | None = None


Stop = Callable[[Sequence[int]], int | None]
"""Maps the tokens about to be committed to how many of them to keep if decoding stops there, else to None."""

Choose = Callable[[TokenTree], int | np.ndarray]
"""Maps a tree to the number of leading nodes to feed, or to the ascending indices of nodes; see `TokenTree.part`."""


@dataclass(frozen=True)
class Proposal:
    """One step's tree and digest.

    Attributes:
        digested_before: bytes to digest before the tree: the request, or the previous step's digest.
        num_cached: number of the sequence's tokens before the tree's first one.
    """

    tree: TokenTree
    digested_before: bytes
    num_cached: int = 0

    @cached_property
    def digest(self) -> int:
        """Digest of the proposing state, 0 to 2**56 - 1; if digests differ, replicas have diverged."""
        # First read after the launch of the forward pass, so that a GPU does not wait for it.
        content = self.digested_before + self.tree.content()
        return int.from_bytes(hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest(), "big")


class DecodingState:
    """Committed tokens of one request, and the drafter that proposes what may follow.

    Args:
        drafter: has not begun another request.
        stop: a further stop condition, called once per step with the tokens that the rules leave. Its results must be
            equal on all replicas.
        committed: new tokens committed by an earlier attempt. If there are any, the state starts after them, with all
            tokens but the last one cached, and without a prefill.
        is_alone: whether no other replica holds this state; its digests are then not chained from step to step.
        guide: constraint of the new text, in its state before the first of `committed`; None without one.

    Attributes:
        num_cached: leading tokens whose keys and values every replica has cached; the rest are pending.
        num_steps: steps so far, including the prefill.
        finish_reason: None while unfinished, then "eos", "stop" or "length".
        digest: covers the steps so far, equal on all replicas; 0 if no other replica holds this state.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        rules: DecodingRules,
        drafter: Drafter,
        stop: Stop | None = None,
        committed: Sequence[int] = (),
        is_alone: bool = False,
        guide: Guide | None = None,
    ):
        assert prompt and rules.max_new_tokens >= 1
        self.rules = rules
        self.drafter = drafter
        self._stop = stop
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self.num_cached = 0
        self.num_steps = 0
        self.finish_reason: str | None = None
        self.digest = 0
        self._is_alone = is_alone
        self._guide = guide
        if committed:
            self._resume(committed)
        else:
            drafter.begin(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> list[int]:
        """Committed tokens whose keys and values are not cached yet."""
        return self.tokens[self.num_cached :]

    def propose(self, choose: Choose = len, tree_size_hint: int | None = None) -> Proposal:
        """Return the tree of the next step; every node's successor could still be committed.

        `choose` must return equal results on all replicas. `tree_size_hint` is the largest useful number of nodes; None
        for the drafter's own limit.
        """
        depth = self.rules.max_new_tokens - (len(self.tokens) - self.prompt_length) - 1
        if self.rules.refed_at is not None and len(self.tokens) <= self.rules.refed_at:
            depth = min(depth, self.rules.refed_at - len(self.tokens))
        tree = self.drafter.propose(self.tokens, self.num_cached, depth, tree_size_hint, self._guide)
        nodes = choose(tree)
        if isinstance(nodes, int):
            tree.truncate(nodes)
        elif len(nodes) < len(tree):
            tree = self.drafter.keep(tree, nodes)
        return self._proposal(tree)

    def propose_root(self) -> Proposal:
        """Return the tree of a step without guesses: the pending tokens alone."""
        return self._proposal(TokenTree(self.pending, max_depth=0))

    def masks(self, tree: TokenTree, nodes: np.ndarray) -> np.ndarray | None:
        """Return [m, words] masks of the tokens that may follow `nodes`, see Guide; None without a constraint."""
        if self._guide is None:
            return None
        tokens, parents, _ = tree.arrays()
        return self._guide.masks(tokens, parents, tree.root, nodes)

    @property
    def has_forced(self) -> bool:
        return self._guide is not None and bool(self._guide.forced(1))

    def _proposal(self, tree: TokenTree) -> Proposal:
        return Proposal(tree, b"%d %d " % (self.digest, self.num_cached), self.num_cached)

    def propose_prefill(self) -> Proposal:
        """Return the prefill's step, a tree of the prompt's last token; its digest covers the request."""
        rules = replace(self.rules, eos_token_ids=frozenset())
        request = repr((self.tokens, rules, sorted(self.rules.eos_token_ids)))
        return Proposal(TokenTree(self.tokens[-1:], max_depth=0), request.encode())

    def use(self, drafter: Drafter) -> None:
        """Draft with another drafter, which has not begun a request, from the next step on."""
        drafter.begin(self.tokens[:-1])
        drafter.advance_prefill(self.tokens)
        self.drafter = drafter

    def _resume(self, committed: Sequence[int]) -> None:
        """Commit tokens of an earlier attempt, and count all but the last as cached."""
        for token in committed:
            self._commit([token])
        assert len(self.new_tokens) == len(committed)
        self.use(self.drafter)
        self.num_steps = 1  # the forward pass that caches the tokens again
        self.num_cached = len(self.tokens) - 1
        self._chain(self.propose_prefill())

    def advance_prefill(self, proposal: Proposal, result: VerificationResult) -> list[int]:
        """Count the prompt as cached; commit and return its successor, as a list of one token.

        `proposal` is from `propose_prefill`; `result` is the verification result of the prompt's last token.
        """
        self._chain(proposal)
        self.num_cached = self.prompt_length
        committed = self._commit([int(result.successors[0])])
        self.drafter.advance_prefill(self.tokens)
        return committed

    def advance(self, proposal: Proposal, result: VerificationResult) -> tuple[list[int], list[int]]:
        """Advance by one step: accept tokens, cut them by the rules, commit the rest, advance the drafter.

        Returns the committed tokens, at least one, and the node that each of them follows. The caller adds to
        `num_cached`, because which nodes every replica has fed depends on their shares.
        """
        tree = proposal.tree
        accepted, path = self.accept(tree, result)
        self._chain(proposal)
        committed = self._commit(accepted)
        self.drafter.advance(self.tokens, tree, result, committed, path[: len(committed)])
        return committed, [tree.root, *path][: len(committed)]

    def check_dead_end(self) -> None:
        """Raise ConstraintError if the constraint allows no token to follow the committed ones."""
        if self._guide is not None:
            self._guide.check_dead_end()

    def accept(self, tree: TokenTree, result: VerificationResult) -> tuple[list[int], list[int]]:
        """Return (accepted, path) of the tree proposed last, without a last node that has no successor."""
        accepted, path = self.drafter.accept(tree, result)
        return (accepted, path) if accepted[-1] >= 0 else (accepted[:-1], path[:-1])

    def _chain(self, proposal: Proposal) -> None:
        """Include a proposal's digest in the next one's."""
        self.digest = 0 if self._is_alone else proposal.digest

    def _commit(self, accepted: list[int]) -> list[int]:
        """Commit tokens up to max_new_tokens, the first EOS token and the stop condition; return them."""
        num_left = self.rules.max_new_tokens - (len(self.tokens) - self.prompt_length)
        committed = accepted[:num_left]
        for i, token in enumerate(committed):
            if token in self.rules.eos_token_ids:
                committed = committed[: i + 1]
                self.finish_reason = "eos"
                break
        num_kept = self._stop(committed) if self._stop else None
        if num_kept is not None and (num_kept < len(committed) or self.finish_reason is None):
            committed = committed[:num_kept]
            self.finish_reason = "stop"
        self.tokens += committed
        if self._guide is not None:
            self._guide.advance(committed)
        self.num_steps += 1
        if self.finish_reason is None and len(committed) == num_left:
            self.finish_reason = "length"
        return committed
