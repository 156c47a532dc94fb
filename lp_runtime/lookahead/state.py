"""The decoding state, which every replica holds alike: propose a tree, then advance by what the step decided.

Both are functions of the state and of integers that all replicas share, so equal states stay equal.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lp_runtime.lookahead.pool import NGramPool
from lp_runtime.lookahead.tree import TokenTree, accept
from lp_runtime.lookahead.window import Slots, Window


@dataclass(frozen=True)
class DecodingRules:
    """What fixes a request's decoding besides its prompt.

    Attributes:
        W, N, G: window columns, n-gram size, largest number of guesses (the paper's letters).
        pool_from_prompt: insert the prompt's n-grams into the pool.
        window_seed: seed of the tokens that slots of the window start from.
        max_new_tokens: commit at most this many tokens, >= 1.
        eos_token_ids: stop after any of these; empty to go on to max_new_tokens.
        drawing: whatever else decides which successors are drawn, as text; part of the digest.
    """

    W: int
    N: int
    G: int
    pool_from_prompt: bool
    window_seed: int
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    drawing: str = ""


# Given a run that is about to be committed: how many of its tokens to keep if it stops within them, else None.
Stop = Callable[[Sequence[int]], int | None]


@dataclass(frozen=True)
class Proposal:
    """One step's tree and what stands where in it.

    Attributes:
        tree: the token tree, T nodes.
        slots: the window's nodes; empty without a window.
        guess_nodes: nodes that some guess contains.
        digest: digest of the state that proposed this tree; equal on all replicas, or they have parted.
    """

    tree: TokenTree
    slots: Slots
    guess_nodes: set[int] = field(repr=False)
    digest: int


class DecodingState:
    """Committed tokens, window and pool of one request.

    Args:
        prompt: token ids, at least one.
        rules: see DecodingRules.
        stop: a condition beyond the rules'; asked once a step about what is left of the run after them. It must
            answer alike on all replicas.

    Attributes:
        tokens: prompt and committed tokens.
        num_cached: leading tokens whose keys and values every replica has cached; the rest are pending.
        num_steps: steps so far, the prefill's included.
        finish_reason: None while unfinished, then "eos", "stop" or "length".
    """

    def __init__(self, prompt: Sequence[int], rules: DecodingRules, stop: Stop | None = None):
        assert prompt and rules.max_new_tokens >= 1
        self.rules = rules
        self._stop = stop
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self.num_cached = 0
        self.num_steps = 0
        self.finish_reason: str | None = None
        self._digest = 0
        self._random = random.Random(rules.window_seed)
        self.pool = NGramPool(rules.N, rules.G)
        self._pool_first = 0 if rules.pool_from_prompt else len(prompt)
        self.pool.insert_text(self.tokens, self._pool_first, 0)
        self.window = Window(rules.W, rules.N, self._refill) if rules.W else None

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.num_cached :]

    def _refill(self, previous: int | None) -> int:
        """First guess for a window slot: what followed the token before it, else a token of the prompt."""
        expected = None if previous is None else self.pool.expect(previous)
        return self.tokens[self._random.randrange(self.prompt_length)] if expected is None else expected

    def propose(self) -> Proposal:
        """The tree of the next step. Nothing in it stands where its successor could not be committed."""
        num_left = self.rules.max_new_tokens - (len(self.tokens) - self.prompt_length)
        tree = TokenTree(self.pending, max_depth=num_left - 1)
        slots = self.window.place(tree) if self.window else []
        guess_nodes: set[int] = set()
        for guess in self.pool.guesses(self.tokens[-1]):
            guess_nodes.update(tree.add_branch(guess))
        content = array("q", [self.num_cached, *tree.tokens, *tree.parents]).tobytes()
        digest = hashlib.blake2b(content, digest_size=7, key=self._digest.to_bytes(8, "big")).digest()
        return Proposal(tree, slots, guess_nodes, int.from_bytes(digest, "big"))

    def propose_prefill(self) -> Proposal:
        """The prefill's step as a tree: its one node is the prompt's last token. The digest covers the request."""
        rules = replace(self.rules, eos_token_ids=frozenset())
        content = repr((self.tokens, rules, sorted(self.rules.eos_token_ids))).encode()
        digest = hashlib.blake2b(content, digest_size=7).digest()
        return Proposal(TokenTree(self.tokens[-1:], max_depth=0), [], set(), int.from_bytes(digest, "big"))

    def advance_prefill(self, proposal: Proposal, successors: Sequence[int]) -> list[int]:
        """Take the prefill's step: the whole prompt is cached and its successor committed. Returns the run."""
        self._digest = proposal.digest
        self.num_cached = self.prompt_length
        run = self._commit([successors[0]])
        self.pool.insert_text(self.tokens, self._pool_first, self.prompt_length)
        return run

    def advance(self, proposal: Proposal, successors: Sequence[int]) -> tuple[list[int], list[int]]:
        """Take one step: accept, cut, commit, then move window and pool on.

        Args:
            proposal: what `propose` returned for this step.
            successors: [T] the token that follows each node of the tree, from the root on.

        Returns:
            (run, nodes): the committed run, 1 token or more, and the node that each of its tokens follows.
        """
        tree, slots = proposal.tree, proposal.slots
        run, path = accept(tree, successors)
        self._digest = proposal.digest
        self.num_cached += tree.root + 1
        ngrams = self.window.ngrams(tree, slots, successors) if self.window else []
        run = self._commit(run)
        for ngram in ngrams:
            self.pool.insert(ngram)
        self.pool.insert_text(self.tokens, self._pool_first, len(self.tokens) - len(run))
        self.pool.record_step(path[: len(run)], proposal.guess_nodes)
        if self.window:
            self.window.advance(slots, successors, len(run))
        return run, [tree.root, *path][: len(run)]

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
