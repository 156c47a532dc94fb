"""The decoding loop: one request, step by step, on one replica in concert with its peers.

proposal = state.propose(budget.fit)                    equal on every replica
shares   = budget.shares(proposal.tree)                 equal on every replica
found    = model.forward(shares[rank])                  the only expensive thing
outcome  = exchange.all_gather(draw(found))             the only communication
run      = state.advance(proposal, outcome)             equal on every replica
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lp_runtime.config import LookaheadConfig, SamplingConfig
from lp_runtime.lookahead.best_first import compile_kernels
from lp_runtime.lookahead.drafts import Memory
from lp_runtime.lookahead.paper import PaperPolicy
from lp_runtime.lookahead.policy import Counts, Found
from lp_runtime.lookahead.pool import PoolStatistics
from lp_runtime.lookahead.sampling import GumbelNoise
from lp_runtime.lookahead.state import DecodingRules, DecodingState, Proposal, Stop
from lp_runtime.model.drawing import Drawing
from lp_runtime.model.generation import build_processors, defaults_of
from lp_runtime.model.processors import TreeProcessors
from lp_runtime.model.tree_model import TreeModel
from lp_runtime.parallel.budget import Learned, StepBudget, assumed_times
from lp_runtime.parallel.exchange import Exchange, Outcome
from lp_runtime.parallel.partition import Share, compile_partition, digest_of_shares, step_tokens
from lp_runtime.policies import make_policy
from lp_runtime.tuning import Tuning

MAX_NODES = 1 << 14  # of a tree, where nothing else limits it
CANCEL, TIME_IS_UP = 1, 2  # bits of the exchange's control word


@dataclass(frozen=True)
class Request:
    """One prompt to decode.

    Attributes:
        prompt_ids: token ids, at least one, all in the vocabulary.
        lookahead: what is proposed, and how much of it.
        max_new_tokens: tokens to generate at most, >= 1.
        eos_token_ids: where to stop; empty to go on to max_new_tokens.
        sampling: what overrides the model's own defaults; its seed is set where it samples.
        sample: which of several samples of the prompt, >= 0.
        stop: strings of new text after whose end to stop.
        max_time: seconds after which to stop, at the end of a step.
        logprobs: whether to report the log-probability of each token.
        processors: logits processors of the user's own, run after transformers' processors and before its warpers.
        trace: whether to report which replica has found each token.
        committed: new tokens that an earlier attempt has committed: decoding goes on behind them, and only what is new
            is yielded.
    """

    prompt_ids: tuple[int, ...]
    lookahead: LookaheadConfig
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sample: int = 0
    stop: tuple[str, ...] = ()
    max_time: float | None = None
    logprobs: bool = False
    processors: tuple[Any, ...] = ()
    trace: bool = False
    committed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """What one step committed: token ids, and for each, if the request asks for it, the model's log-probability and the
    rank that has found it."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    found_by: list[int] | None = None


@dataclass(frozen=True)
class StepTimes:
    """Where the time of a request's steps went on this replica, in seconds, the prefill's step excluded.

    Attributes:
        forward: making inputs, forward passes, drawing successors (on CUDA, until the device has finished them).
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
        num_steps: steps, the prefill's included; where a step takes several forward passes, each counts.
        finish_reason: "eos", "stop", "length", "time" or "cancelled".
        step_tokens: tokens fed a step, mean over replicas and steps, the prefill's excluded.
        seconds: from the request's start to its last token.
        prefill_seconds: of these, the prefill's step.
        times: of these, where the other steps' went.
        exchange_bytes: bytes that a replica sends in a step, mean.
        counts: tokens fed and accepted, by where they came from and how deep they stood.
        pool: the n-gram pool at the end; None where the policy has none.
        seed: of the sample; None if decoding was greedy.
        losses: replicas that were lost on the way; times, tokens and counts are then of what came after the last loss.
    """

    num_steps: int
    finish_reason: str
    step_tokens: float
    seconds: float
    prefill_seconds: float
    times: StepTimes
    exchange_bytes: float
    counts: Counts
    pool: PoolStatistics | None
    seed: int | None
    losses: int = 0


Event = Run | Report  # a run a step, and a report at the end

# Told of every committed run: the node that each token follows, the nodes whose rows this replica has, their logits
# and their processed scores, [n, V] each.
Observer = Callable[[list[int], list[int], torch.Tensor, torch.Tensor], None]


class DecodingLoop:
    """Decodes requests on one replica. All replicas must be given the same requests in the same order.

    Args:
        model: this replica's.
        rank, num_replicas: its place in the group.
        exchange_device: where the group's backend wants its tensors.
        tuning: what was measured of the model; by default measured when a request needs it, and not kept.
        memory: what is kept between requests that ask for it.
    """

    def __init__(
        self,
        model: TreeModel,
        rank: int,
        num_replicas: int,
        exchange_device: torch.device,
        tuning: Tuning | None = None,
        memory: Memory | None = None,
    ):
        self._model = model
        self._rank = rank
        self._num_replicas = num_replicas
        self._exchange_device = exchange_device
        self._tuning = tuning or Tuning(model, rank, num_replicas, exchange_device, cache_dir=None)
        self._kept = memory
        self._learned: dict[tuple[bool, bool], Learned] = {}  # by whether steps are sized, and decoding is greedy
        self._cleared: Memory | None = None  # used again by the next request that forgets

    def prepare(self, settings: LookaheadConfig) -> None:
        """Measure now what a request with these settings would have measured."""
        if self._num_replicas > 1:
            compile_partition()
        if settings.policy == "full":
            compile_kernels()
            if settings.is_auto:
                self._tuning.most_tokens()
            if settings.prior == "vocabulary":
                self._tuning.vocabulary()
            self._memory(settings)

    def _memory(self, settings: LookaheadConfig) -> Memory:
        if settings.memory != "request":
            self._kept = self._kept or Memory(settings.memory_bytes)
            return self._kept
        if self._cleared is None or self._cleared.num_bytes != settings.memory_bytes:
            self._cleared = Memory(settings.memory_bytes)
        self._cleared.clear()
        return self._cleared

    def begin(self, request: Request, drawing: Drawing, stop: Stop | None) -> tuple[DecodingState, StepBudget]:
        """The state of a request before its prefill, and what decides the size of its steps."""
        settings = request.lookahead
        noise = None if drawing.noise is None else (drawing.noise.seed, drawing.noise.sample)
        limit = settings.budget
        if settings.is_auto:
            limit = min(filter(None, (limit, self._tuning.most_tokens())))
        most = self._num_replicas * (limit or MAX_NODES)
        policy = make_policy(settings, noise, most, lambda: self._memory(settings), self._tuning.vocabulary)
        rules = DecodingRules(
            max_new_tokens=request.max_new_tokens,
            eos_token_ids=request.eos_token_ids,
            drafting=repr(settings),
            drawing=repr((request.sampling, request.sample, request.stop, request.logprobs)),
        )
        num_nodes = policy.max_nodes + policy.max_run
        times = self._tuning.times(num_nodes) if settings.is_auto else assumed_times(self._num_replicas, num_nodes)
        kind = (settings.is_auto, noise is None)
        learned = self._learned.setdefault(kind, Learned.nothing(self._num_replicas))
        budget = StepBudget(times, settings.is_auto, limit, learned)
        return DecodingState(request.prompt_ids, rules, policy, stop, request.committed), budget

    def run(
        self,
        request: Request,
        drawing: Drawing | None = None,
        stop: Stop | None = None,
        should_cancel: Callable[[], bool] = lambda: False,
        observe: Observer | None = None,
    ) -> Iterator[Event]:
        """Decode one request.

        Args:
            request: what to decode.
            drawing: how successors are drawn; by default as the request and the model's own defaults say.
            stop: see DecodingState.
            should_cancel: asked once a step; when any replica's says yes, all stop after that step.
            observe: told of every step.

        Yields:
            The run that each step committed, then the report.
        """
        drawing = drawing or make_drawing(self._model, request)
        state, budget = self.begin(request, drawing, stop)
        started = time.perf_counter()
        policy = state.policy
        drawing.num_runners_up = policy.num_runners_up
        capacity = min(policy.max_nodes, budget.limit or policy.max_nodes)
        exchange = Exchange(self._rank, self._num_replicas, capacity, self._exchange_device, drawing.width)
        most_fed = capacity + policy.max_run
        most_tokens = len(request.prompt_ids) + request.max_new_tokens + most_fed
        clock = _Clock()
        is_resting = False

        def control() -> int:
            # One replica's clock decides, the first one's.
            late = request.max_time is not None and time.perf_counter() - started > request.max_time
            return CANCEL * should_cancel() | TIME_IS_UP * (late and self._rank == 0)

        def agree(proposal: Proposal, shares: Sequence[Share], logits: torch.Tensor) -> tuple[Outcome, torch.Tensor]:
            """Draw the successors of the nodes this replica owns and exchange them; also its processed scores."""
            owned = shares[self._rank].owned
            values, scores = drawing.draw(logits[: len(owned)], proposal.tree, owned, state.tokens, not is_resting)
            if values.device.type == "cuda":
                torch.cuda.current_stream(values.device).synchronize()
            clock.lap("forward")
            digest = proposal.digest ^ digest_of_shares(shares)
            outcome = exchange.all_gather(shares, len(proposal.tree), values, digest, control(), clock.packed())
            clock.lap("exchange")
            return outcome, scores

        def report_run(nodes: list[int], run: list[int], logprobs: list[float] | None, shares, logits, scores) -> Run:
            if observe:
                observe(nodes, shares[self._rank].owned, logits, scores)
            owners = {node: rank for rank, share in enumerate(shares) for node in share.owned} if request.trace else {}
            return Run(
                run,
                None if logprobs is None else [logprobs[node] for node in nodes],
                [owners[node] for node in nodes] if request.trace else None,
            )

        def unpack(proposal: Proposal, outcome: Outcome) -> tuple[Found, list[float] | None]:
            root = proposal.tree.root
            successors, logprobs, runners_up = drawing.unpack(outcome.values[root:], not is_resting)
            unknown = [-1] * root
            return Found(unknown + successors, runners_up), None if logprobs is None else unknown + logprobs

        is_over = 0
        if request.committed:
            self._model.take_up(request.prompt_ids, request.committed, most_tokens)
        else:
            self._model.begin(most_tokens)
            proposal = state.propose_prefill()
            shares = budget.shares(proposal.tree)
            logits = self._model.prefill(request.prompt_ids)
            outcome, scores = agree(proposal, shares, logits)
            found, logprobs = unpack(proposal, outcome)
            run = state.advance_prefill(proposal, found)
            is_over = outcome.control
            yield report_run([0], run, logprobs, shares, logits, scores)
        prefill_seconds = time.perf_counter() - started

        tokens_fed, extra_passes = 0.0, 0
        clock = _Clock()
        while state.finish_reason is None and not is_over:
            clock.start()
            is_resting = budget.is_resting
            proposal = state.propose_root() if is_resting else state.propose(budget.fit, budget.num_wanted)
            shares = budget.shares(proposal.tree)
            clock.lap("other")
            share = shares[self._rank]
            logits = self._model.forward(proposal.tree, share.nodes, share.owned)
            outcome, scores = agree(proposal, shares, logits)
            found, logprobs = unpack(proposal, outcome)
            run, nodes = state.advance(proposal, found)
            budget.observe(shares, *_Clock.unpacked(outcome.clocks), len(run) - 1)
            tokens_fed += step_tokens(shares)
            extra_passes += max(self._model.num_passes(len(each.nodes)) for each in shares) - 1
            clock.lap("other")
            is_over = outcome.control
            yield report_run(nodes, run, logprobs, shares, logits, scores)

        num_tree_steps = state.num_steps - 1
        yield Report(
            num_steps=state.num_steps + extra_passes,
            finish_reason=state.finish_reason or ("cancelled" if is_over & CANCEL else "time"),
            step_tokens=tokens_fed / num_tree_steps if num_tree_steps else 0.0,
            seconds=time.perf_counter() - started,
            prefill_seconds=prefill_seconds,
            times=StepTimes(**clock.seconds),
            exchange_bytes=exchange.bytes_sent / state.num_steps if self._num_replicas > 1 else 0.0,
            counts=policy.counts,
            pool=policy.pool.statistics() if isinstance(policy, PaperPolicy) else None,
            seed=request.sampling.seed,
        )


def make_drawing(model: TreeModel, request: Request) -> Drawing:
    """How a request's successors are drawn from this model's logits; alike on all replicas.

    Raises:
        ConfigError: if transformers refuses a setting.
    """
    sampling = request.sampling
    processors = build_processors(
        model.model, request.prompt_ids, sampling, request.max_new_tokens, request.eos_token_ids, request.processors
    )
    noise = None
    if sampling.draws(defaults_of(model.model)):
        noise = GumbelNoise(sampling.seed, request.sample, model.vocabulary_size, model.device)
    return Drawing(TreeProcessors(processors, model.device), noise, request.logprobs)


MAX_MICROSECONDS = (1 << 31) - 1


class _Clock:
    """Adds up the time between laps by what was done in it."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "exchange": 0.0, "other": 0.0}
        self._step = dict.fromkeys(self.seconds, 0.0)  # the last one's
        self._last = 0.0
        self._other = 0.0  # of the last whole step

    def start(self) -> None:
        self._last = time.perf_counter()
        self._other, self._step = self._step["other"], dict.fromkeys(self.seconds, 0.0)

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        self.seconds[what] += now - self._last
        self._step[what] += now - self._last
        self._last = now

    def packed(self) -> int:
        """Microseconds of this step's forward pass and of the last step's other work, for the exchange."""
        forward, other = (min(int(1e6 * seconds), MAX_MICROSECONDS) for seconds in (self._step["forward"], self._other))
        return forward << 31 | other

    @staticmethod
    def unpacked(clocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Nanoseconds of forward passes and of other work, by replica."""
        return [1000 * (clock >> 31) for clock in clocks], [1000 * (clock & MAX_MICROSECONDS) for clock in clocks]
