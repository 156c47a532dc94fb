"""The decoding loop: one request, step by step, on one replica in concert with its peers.

proposal = state.propose()                              equal on every replica
shares   = partition(proposal.tree, speeds)             equal on every replica
found    = model.forward(shares[rank])                  the only expensive thing
outcome  = exchange.all_gather(found)                   the only communication
run      = state.advance(proposal, outcome.successors)  equal on every replica
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lp_runtime.config import LookaheadConfig
from lp_runtime.lookahead.pool import PoolStatistics
from lp_runtime.lookahead.sampling import greedy
from lp_runtime.lookahead.state import DecodingRules, DecodingState, Proposal
from lp_runtime.model.tree_model import TreeModel, successors_of
from lp_runtime.parallel.exchange import Exchange, Outcome
from lp_runtime.parallel.partition import Share, partition, step_tokens


@dataclass(frozen=True)
class Request:
    """One prompt to decode.

    Attributes:
        prompt_ids: token ids, at least one, all in the vocabulary.
        lookahead: W, N, G and the pool's settings.
        max_new_tokens: tokens to generate at most, >= 1.
        eos_token_ids: where to stop; empty to go on to max_new_tokens.
    """

    prompt_ids: tuple[int, ...]
    lookahead: LookaheadConfig
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepTimes:
    """Where the time of a request's steps went on this replica, in seconds, the prefill's step excluded.

    Attributes:
        forward: making inputs, forward passes, picking successors (on CUDA, until the device has finished them).
        exchange: the collective, waiting for slower replicas included.
        other: proposing, partitioning, advancing.
    """

    forward: float
    exchange: float
    other: float


@dataclass(frozen=True)
class Report:
    """What a finished request took.

    Attributes:
        num_steps: steps, the prefill's included.
        finish_reason: "eos", "length" or "cancelled".
        step_tokens: tokens fed a step, mean over replicas and steps, the prefill's excluded.
        seconds: from the request's start to its last token.
        prefill_seconds: of these, the prefill's step.
        times: of these, where the other steps' went.
        exchange_bytes: bytes that a replica sends in a step.
        pool: the n-gram pool at the end.
    """

    num_steps: int
    finish_reason: str
    step_tokens: float
    seconds: float
    prefill_seconds: float
    times: StepTimes
    exchange_bytes: int
    pool: PoolStatistics


Event = list[int] | Report  # a run of committed tokens a step, and a report at the end


class DecodingLoop:
    """Decodes requests on one replica. All replicas must be given the same requests in the same order.

    Args:
        model: this replica's.
        rank, num_replicas: its place in the group.
        exchange_device: where the group's backend wants its tensors.
    """

    def __init__(self, model: TreeModel, rank: int, num_replicas: int, exchange_device: torch.device):
        self._model = model
        self._rank = rank
        self._num_replicas = num_replicas
        self._exchange_device = exchange_device

    def run(self, request: Request, should_cancel: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Decode one request.

        Args:
            request: what to decode.
            should_cancel: asked once a step; when any replica's says yes, all stop after that step.

        Yields:
            The run of tokens that each step committed, then the report.
        """
        started = time.perf_counter()
        settings = request.lookahead
        state = DecodingState(
            request.prompt_ids,
            DecodingRules(
                W=settings.W,
                N=settings.N,
                G=settings.G,
                pool_from_prompt=settings.pool_from_prompt,
                window_seed=settings.window_seed,
                max_new_tokens=request.max_new_tokens,
                eos_token_ids=request.eos_token_ids,
            ),
        )
        capacity = 1 + settings.max_guess_tokens
        exchange = Exchange(self._rank, self._num_replicas, capacity, self._exchange_device)
        self._model.begin(len(request.prompt_ids) + request.max_new_tokens + capacity + settings.max_run)
        speeds = [1.0] * self._num_replicas
        clock = _Clock()

        proposal = state.propose_prefill()
        shares = partition(proposal.tree, speeds)
        logits = self._model.prefill(request.prompt_ids)
        outcome = self._agree(exchange, proposal, shares, logits, len(request.prompt_ids) - 1, should_cancel)
        yield state.advance_prefill(proposal, outcome.successors)
        prefill_seconds = time.perf_counter() - started

        tokens_fed = 0.0
        while state.finish_reason is None and not outcome.cancelled:
            clock.start()
            proposal = state.propose()
            shares = partition(proposal.tree, speeds)
            clock.lap("other")
            share = shares[self._rank]
            logits = self._model.forward(proposal.tree, share.nodes, share.owned)
            first_position = len(state.tokens) - 1 - proposal.tree.root
            outcome = self._agree(exchange, proposal, shares, logits, first_position, should_cancel, clock)
            run = state.advance(proposal, outcome.successors)
            tokens_fed += step_tokens(shares)
            clock.lap("other")
            yield run

        num_tree_steps = state.num_steps - 1
        yield Report(
            num_steps=state.num_steps,
            finish_reason=state.finish_reason or "cancelled",
            step_tokens=tokens_fed / num_tree_steps if num_tree_steps else 0.0,
            seconds=time.perf_counter() - started,
            prefill_seconds=prefill_seconds,
            times=StepTimes(**clock.seconds),
            exchange_bytes=exchange.bytes_sent if self._num_replicas > 1 else 0,
            pool=state.pool.statistics(),
        )

    def _agree(
        self,
        exchange: Exchange,
        proposal: Proposal,
        shares: Sequence[Share],
        logits: torch.Tensor,
        first_position: int,
        should_cancel: Callable[[], bool],
        clock: _Clock | None = None,
    ) -> Outcome:
        """Pick the successors of the nodes this replica owns and exchange them.

        Args:
            logits: [n, V] of the owned nodes; a replica that owns none may pass more.
            first_position: absolute position of the tree's first token.
        """
        tree, owned = proposal.tree, shares[self._rank].owned
        positions = [first_position + tree.root + tree.depths[node] for node in owned]
        successors = successors_of(logits[: len(owned)], positions, greedy)
        if successors.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if clock:
            clock.lap("forward")
        outcome = exchange.all_gather(shares, len(tree), successors, proposal.digest, should_cancel())
        if clock:
            clock.lap("exchange")
        return outcome


class _Clock:
    """Adds up the time between laps by what was done in it."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "exchange": 0.0, "other": 0.0}
        self._last = 0.0

    def start(self) -> None:
        self._last = time.perf_counter()

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        self.seconds[what] += now - self._last
        self._last = now
