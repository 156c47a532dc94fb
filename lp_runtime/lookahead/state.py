"""The decoding state, which every replica holds alike: propose a tree, then advance by what the step decided.

Both are functions of the state and of integers that all replicas share, so equal states stay equal. What stands in the
tree is a drafter's choice (base.py); it never changes what is committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lp_runtime.lookahead.drafters.base import Drafter, VerificationResult
from lp_runtime.lookahead.tree import TokenTree


@dataclass(frozen=True)
class DecodingRules:
    """What fixes a request's decoding besides its prompt.

    Attributes:
        max_new_tokens: commit at most this many tokens, >= 1.
        eos_token_ids: stop after any of these; empty to go on to max_new_tokens.
        drafting: how trees are made, as text; part of the digest.
        drawing: whatever else decides which successors are drawn, as text; part of the digest.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    drafting: str = ""
    drawing: str = ""


# Given a run that is about to be committed: how many of its tokens to keep if it stops within them, else None.
Stop = Callable[[Sequence[int]], int | None]
# Given a tree whose nodes stand in order of their estimated worth, and the estimates: how many of its nodes to feed.
Fit = Callable[[TokenTree, np.ndarray], int]


@dataclass(frozen=True)
class Proposal:
    """One step's tree.

    Attributes:
        tree: the token tree, T nodes; nothing is added to it any more.
        before: what is digested with it: the request, or the step before's digest.
    """

    tree: TokenTree
    before: bytes

    @cached_property
    def digest(self) -> int:
        """Digest of the state that proposed this tree, 56 bits; equal on all replicas, or they have parted. Made when
        it is asked for: by then a GPU has been given the tree."""
        return int.from_bytes(hashlib.blake2b(self.before + self.tree.content(), digest_size=7).digest(), "big")


class DecodingState:
    """Committed tokens of one request, and the drafter that proposes what may follow.

    Args:
        prompt: token ids, at least one.
        rules: see DecodingRules.
        drafter: proposes trees; has not begun another request.
        committed: new tokens that an earlier attempt at the request has committed. The state is then one whose every
            token but the last is cached, and there is no prefill to advance by.
        stop: a condition beyond the rules'; asked once a step about what is left of the run after them. It must
            answer alike on all replicas.
        is_alone: whether no other replica holds this state: its steps have no digest then.

    Attributes:
        tokens: prompt and committed tokens.
        num_cached: leading tokens whose keys and values every replica has cached; the rest are pending.
        num_steps: steps so far, the prefill's included.
        finish_reason: None while unfinished, then "eos", "stop" or "length".
    """

    def __init__(
        self,
        prompt: Sequence[int],
        rules: DecodingRules,
        drafter: Drafter,
        stop: Stop | None = None,
        committed: Sequence[int] = (),
        is_alone: bool = False,
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
        self._digest = 0
        self._is_alone = is_alone
        if committed:
            self._resume(committed)
        else:
            drafter.begin(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.num_cached :]

    def propose(self, fit: Fit | None = None, tree_size_hint: int | None = None) -> Proposal:
        """The tree of the next step. Nothing in it stands where its successor could not be committed.

        Args:
            fit: asked, where the drafter estimates what its nodes are worth, how many of them to feed; it must answer
                alike on all replicas.
            tree_size_hint: nodes that the tree should have at most, where the drafter can choose.
        """
        num_left = self.rules.max_new_tokens - (len(self.tokens) - self.prompt_length)
        tree = self.drafter.propose(self.tokens, self.num_cached, num_left - 1, tree_size_hint)
        if fit is not None and tree.path_probabilities is not None:
            tree.truncate(fit(tree, tree.path_probabilities))
        return self._proposal(tree)

    def propose_root(self) -> Proposal:
        """A step that guesses nothing: the pending tokens alone."""
        return self._proposal(TokenTree(self.pending, max_depth=0))

    def _proposal(self, tree: TokenTree) -> Proposal:
        return Proposal(tree, b"%d %d " % (self._digest, self.num_cached))

    def propose_prefill(self) -> Proposal:
        """The prefill's step as a tree: its one node is the prompt's last token. The digest covers the request."""
        rules = replace(self.rules, eos_token_ids=frozenset())
        request = repr((self.tokens, rules, sorted(self.rules.eos_token_ids)))
        return Proposal(TokenTree(self.tokens[-1:], max_depth=0), request.encode())

    def _resume(self, committed: Sequence[int]) -> None:
        for token in committed:
            self._commit([token])
        assert len(self.new_tokens) == len(committed)
        self.drafter.begin(self.tokens[:-1])
        self.drafter.advance_prefill(self.tokens, VerificationResult(self.tokens[-1:]))
        self.num_steps = 1  # what it takes to cache them again
        self.num_cached = len(self.tokens) - 1
        self._follow(self.propose_prefill())

    def advance_prefill(self, proposal: Proposal, found: VerificationResult) -> list[int]:
        """Take the prefill's step: the whole prompt is cached and its successor committed. Returns the run."""
        self._follow(proposal)
        self.num_cached = self.prompt_length
        run = self._commit([int(found.successors[0])])
        self.drafter.advance_prefill(self.tokens, found)
        return run

    def advance(self, proposal: Proposal, found: VerificationResult) -> tuple[list[int], list[int]]:
        """Take one step: accept, cut, commit, then move the drafter on.

        Args:
            proposal: what `propose` returned for this step.
            found: what the step found about every node of the tree.

        Returns:
            (run, nodes): the committed run, 1 token or more, and the node that each of its tokens follows.
        """
        tree = proposal.tree
        run, path = self.drafter.accept(tree, found)
        self._follow(proposal)
        self.num_cached += tree.root + 1
        run = self._commit(run)
        self.drafter.advance(self.tokens, tree, found, run, path[: len(run)])
        return run, [tree.root, *path][: len(run)]

    def _follow(self, proposal: Proposal) -> None:
        """What comes next is digested with this."""
        self._digest = 0 if self._is_alone else proposal.digest

    def _commit(self, run: list[int]) -> list[int]:
        """Commit a run, cut at max_new_tokens, after the first end-of-sequence token and where it is to stop."""
        num_left = self.rules.max_new_tokens - (len(self.tokens) - self.prompt_length)
        run = run[:num_left]
        for i, token in enumerate(run):
            if token in self.rules.eos_token_ids:
                run = run[: i + 1]
                self.finish_reason = "eos"
                break
        num_kept = self._stop(run) if self._stop else None
        if num_kept is not None and (num_kept < len(run) or self.finish_reason is None):
            run = run[:num_kept]
            self.finish_reason = "stop"
        self.tokens += run
        self.num_steps += 1
        if self.finish_reason is None and len(run) == num_left:
            self.finish_reason = "length"
        return run
