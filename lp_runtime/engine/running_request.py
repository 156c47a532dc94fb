"""A request on an engine: its slot, and its exchange with the other replicas of the group.

A step (`Engine._step` in engine.py) calls in this order `inputs`, `sample`, `start_exchange`, `finish_exchange` and
`advance`. The prefill ends with a step of the same methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from lp_runtime.decoder.decoder import Decoder, DrafterSetup, Gathered, Samples
from lp_runtime.decoder.shared_error import shared_error
from lp_runtime.decoder.step import Step
from lp_runtime.distributed.exchange import Exchange, Outcome
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.memory import memory_error, unshared_error
from lp_runtime.errors import LookaheadError, RequestError, RequestMemoryError, first_line
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot, initial_text_tokens
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.harvest import PromptHarvest
from lp_runtime.prefill.logprobs import PromptScorer
from lp_runtime.prefill.prefix import PromptPrefix
from lp_runtime.prefill.prompt_feeder import PromptFeeder
from lp_runtime.prefill.resume import Resume
from lp_runtime.request.output import Report, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.request.step_timer import StepTimer, StepTimes
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.utils.callables import never
from lp_runtime.utils.memory import is_out_of_memory, out_of_memory_as

CANCEL, TIME_IS_UP, FAILED, COMPILING = 1, 2, 4, 8  # bits of the exchange's control word

# Called in every step, before the stop condition: (nodes that the accepted tokens follow, step, rank of this replica,
# what this replica sampled). The last step may commit fewer tokens than it accepted.
Observer = Callable[[list[int], Step, int, Samples], None]
MakeExchange = Callable[[Group, int, int], Exchange]  # arguments: group, capacity in nodes, integers per node
T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """The replicas that share the steps of requests, and how they exchange results.

    Attributes:
        is_compiling: whether another process still compiles the drafter `full` for this replica.
    """

    group: Group
    make_exchange: MakeExchange
    is_compiling: Callable[[], bool] = never


@dataclass(frozen=True)
class Callbacks:
    """Functions that the engine calls in each step, and `should_cancel` also between chunks of the prompt."""

    should_cancel: Callable[[], bool] = never
    observe: Observer | None = None


class RunningRequest:
    """A request that is being decoded: feeds, samples and exchanges the steps of its decoder.

    The engine acquires and releases `slot`, which holds the request's keys and values.
    """

    def __init__(
        self,
        model: ModelRunner,
        peers: Peers,
        request: Request,
        decoder: Decoder,
        slot: CacheSlot,
        prefix: PromptPrefix,
        callbacks: Callbacks,
    ):
        self.request = request
        self.decoder = decoder
        self.slot = slot
        self.timer = StepTimer()
        self._model = model
        self._peers, self._group = peers, peers.group
        self._prefix = prefix
        self._callbacks = callbacks
        self._exchange = self._make_exchange()
        self._started = time.perf_counter()
        self._agreed = COMPILING if decoder.lacks_drafter else 0  # control word of the last exchange
        self._num_fed = 0.0  # tokens, mean over replicas, summed over the steps after the prefill
        self._num_extra_passes = 0  # forward passes beyond one per step
        self._prefill_seconds = 0.0

    def _make_exchange(self) -> Exchange:
        return self._peers.make_exchange(self._group, self.decoder.max_owned, self.decoder.sampler.width)

    def use(self, setup: DrafterSetup) -> None:
        """Draft in the way given from the next step on."""
        self.decoder.use(setup)
        bytes_sent, self._exchange = self._exchange.bytes_sent, self._make_exchange()
        self._exchange.bytes_sent = bytes_sent

    @property
    def may_draft(self) -> bool:
        """Whether the request lacks its drafter, and all replicas have agreed in the last step that it is compiled."""
        return self.decoder.lacks_drafter and not self._agreed & COMPILING

    @property
    def tag(self) -> int:
        """Tag of the kept draft tables that the request continues with; 0 for none."""
        return self._prefix.tag

    @property
    def is_finished(self) -> bool:
        return self.decoder.state.finish_reason is not None or self._agreed & (CANCEL | TIME_IS_UP) != 0

    # Out of memory.

    def attempt(self, work: Callable[[], T]) -> T | RequestMemoryError:
        """Call `work`; if memory runs out, free what can be freed, and return the error that ends the request.

        The replica must report that error in the next exchange, so that all replicas end the request with it.
        """
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        # Not in the handler: there, the exception still holds the tensors of the failed pass.
        return memory_error(self._model, self.request, self.decoder.state.new_tokens, reason)

    # Prefill.

    def prefill(self) -> Generator[None, None, StepOutput | None]:
        """Feed the prompt and the tokens that are committed already; return the prefill's output.

        Yields between chunks, when other requests may be fed. Returns None if an earlier attempt delivered the output,
        or if the request was cancelled.
        """
        with out_of_memory_as(lambda reason: unshared_error(self._model, self.request, self._group, reason)):
            output = yield from self._timed(self._resume() if self.request.committed else self._prefill())
        self.timer = StepTimer()
        return output

    def _timed(self, chunks: Generator[None, None, StepOutput | None]) -> Generator[None, None, StepOutput | None]:
        while True:
            started = time.perf_counter()
            try:
                next(chunks)
            except StopIteration as end:
                output: StepOutput | None = end.value
                return output
            finally:
                self._model.synchronize()  # or the next request would be charged for the end of this one's chunk
                self._prefill_seconds += time.perf_counter() - started
            yield

    def _resume(self) -> Generator[None, None, StepOutput | None]:
        """Feed those tokens of the prompt and of an earlier attempt that are not in the slot."""
        resume = Resume(self._model, self.request, self.slot, self.decoder.sampler, self._group)
        capacity = capacity_of(self.request, self.decoder)
        if not (yield from resume.in_step(capacity, self._callbacks.should_cancel, self.attempt)):
            self._agreed = CANCEL
        return None

    def _prefill(self) -> Generator[None, None, StepOutput | None]:
        """Feed the prompt, and agree on the first new token."""
        step = self.decoder.propose_prefill()
        error = _error_of(self.attempt(self._begin))
        prompt = self.request.prompt_ids[self._prefix.num_read :]
        feeder = self.make_feeder(prompt)
        *first, last = feeder.cut(prompt, point=self._prefix.num_to_point)
        for num_left, chunk in zip(range(len(first), 0, -1), first, strict=True):
            error = error or _error_of(self.attempt(partial(self._feed, feeder, chunk)))
            yield
            if self.agree_to_cancel(step, num_left, error):
                self._agreed = CANCEL
                return None
        logits = self.attempt(lambda: StepLogits(feeder.feed(last))) if error is None else error
        samples = self.sample(step, logits)
        self.start_exchange(step, samples)
        gathered = self.finish_exchange(step, samples)
        if isinstance(gathered, LookaheadError):
            raise gathered
        output = replace(self.advance(step, gathered), cached_tokens=self._prefix.num_read)
        self._prefix.keep(self.slot)  # requests with the same prompt may be waiting for it
        if isinstance(feeder, PromptHarvest) and not self.is_finished:
            self.decoder.drafter.learn_prompt(self.request.prompt_ids, feeder.share())
        return feeder.attach(output) if isinstance(feeder, PromptScorer) else output

    def _begin(self) -> None:
        """Prepare the slot, and read the prompt's cached prefix into it."""
        capacity = capacity_of(self.request, self.decoder)
        self._model.begin(self.slot, capacity, prompt_length=len(self.request.prompt_ids))
        self._prefix.read_into(self.slot)

    def make_feeder(self, prompt: tuple[int, ...]) -> PromptFeeder:
        """Return what feeds the prompt's uncached tokens, and keeps what the request needs of them."""
        if self.request.prompt_logprobs:
            return PromptScorer(self._model, self.slot, prompt, self.request.top_logprobs)
        return self.harvest(len(prompt)) if self.decoder.num_harvested else PromptFeeder(self._model, self.slot)

    def harvest(self, num_prompt: int) -> PromptHarvest:
        decoder = self.decoder
        return PromptHarvest(self._model, self.slot, num_prompt, decoder.num_harvested, decoder.sampler, self._group)

    def _feed(self, feeder: PromptFeeder, chunk: Sequence[int]) -> None:
        feeder.feed(chunk)
        if len(self.slot.tokens) == self._prefix.num_read + self._prefix.num_to_point:
            self._prefix.keep(self.slot)

    def agree_to_cancel(self, step: Step, num_left: int, error: LookaheadError | None) -> bool:
        """Whether any replica cancels with `num_left` chunks of the prompt left; equal on all replicas.

        `error` is of this replica's chunk. An error of any replica is raised on all of them.
        """
        control = CANCEL * self._callbacks.should_cancel() | FAILED * (error is not None)
        if not self._group.is_alone:
            # An exchange like the prefill's own, so that replicas at different chunks see that their digests differ.
            digest = step.digest ^ num_left
            control = self._exchange.all_gather(step.shares, self._no_values(step), digest, control).control
        if control & FAILED:
            raise shared_error(error, self._group)
        return bool(control & CANCEL)

    def _no_values(self, step: Step) -> torch.Tensor:
        num_owned = step.shares.num_owned[self._group.rank]
        return torch.zeros(num_owned, self.decoder.sampler.width, dtype=torch.int64, device=self._model.device)

    # Steps.

    def inputs(self, step: Step) -> StepInputs:
        return step.inputs(self._group.rank, self.slot)

    def sample(self, step: Step, logits: StepLogits | LookaheadError) -> Samples | LookaheadError:
        """Choose the successors of the nodes that this replica owns.

        Return the error if the forward pass has failed, which is then given as `logits`, or if sampling fails.
        """
        if isinstance(logits, LookaheadError):
            return logits
        try:
            return self.attempt(lambda: self.decoder.sample(step, self._group.rank, logits))
        except LookaheadError as error:
            return error

    def start_exchange(self, step: Step, samples: Samples | LookaheadError) -> None:
        """Begin to send this replica's samples, or that sampling failed here, to all replicas."""
        # A lone replica asks for cancellations after the pass, when more may be known.
        control = 0 if self._group.is_alone else self._control()
        if isinstance(samples, LookaheadError):
            values, control = self._no_values(step), control | FAILED
        else:
            values = samples.values
        clock = self.timer.packed(self.decoder.budget.times_are_late)
        self._exchange.start(step.shares, values, step.digest, control, clock)

    def finish_exchange(self, step: Step, samples: Samples | LookaheadError) -> Gathered | LookaheadError:
        """Wait for the samples of all replicas; if any replica has failed, return the same error on all.

        `samples` are this replica's, or why its pass or sampling failed.
        """
        outcome = self._exchange.finish()
        if isinstance(samples, LookaheadError) or outcome.control & FAILED:
            return shared_error(samples if isinstance(samples, LookaheadError) else None, self._group)
        # A lone replica asks only now: see `start_exchange`.
        self._agreed = outcome.control | (self._control() if self._group.is_alone else 0)
        return self.unpack(step, samples, outcome)

    def advance(self, step: Step, gathered: Gathered) -> StepOutput:
        """Accept, commit, and learn from a step; commit the cells of accepted tokens that need not be fed again.

        Raises RequestError, equal on all replicas, if no token can follow the committed ones.
        """
        state, slot = self.decoder.state, self.slot
        if gathered.result.successors[step.tree.root] < 0:
            state.check_dead_end()
            num_new = len(state.new_tokens)
            raise RequestError(
                f"sampling: no token can follow {num_new} new tokens: logits processors left all scores at -inf, or NaN"
            )
        output = self.decoder.advance(step, gathered)
        if not self._model.feeds_chains and len(slot.tokens) < state.num_cached:
            slot.commit(state.tokens[len(slot.tokens) : state.num_cached])
        return output

    def unpack(self, step: Step, samples: Samples, outcome: Outcome) -> Gathered:
        """Unpack an exchange's outcome, show the step to the observer, and count what was fed."""
        times = StepTimer.unpacked(outcome.clocks)
        gathered = self.decoder.unpack(step, outcome.values, *times)
        if self._callbacks.observe:
            self._callbacks.observe(self.decoder.accepted_nodes(step, gathered), step, self._group.rank, samples)
        if not step.is_prefill:
            sizes = step.shares.sizes
            self._num_fed += sum(sizes) / len(sizes)
            self._num_extra_passes += self._model.num_passes(max(sizes)) - 1
        return gathered

    def _control(self) -> int:
        max_time, rank = self.request.max_time, self._group.rank
        # Only rank 0's clock decides, so that all replicas stop at the same step.
        is_late = max_time is not None and time.perf_counter() - self._started > max_time
        is_compiling = self.decoder.lacks_drafter and self._peers.is_compiling()
        return (
            CANCEL * self._callbacks.should_cancel() | TIME_IS_UP * (is_late and rank == 0) | COMPILING * is_compiling
        )

    def report(self) -> Report:
        state, drafter = self.decoder.state, self.decoder.drafter
        num_tree_steps = max(0, state.num_steps - 1)
        num_bytes = 0 if self._group.is_alone else self._exchange.bytes_sent
        return Report(
            num_steps=state.num_steps + self._num_extra_passes,
            finish_reason=state.finish_reason or ("cancelled" if self._agreed & CANCEL else "time"),
            step_tokens=self._num_fed / num_tree_steps if num_tree_steps else 0.0,
            seconds=time.perf_counter() - self._started,
            prefill_seconds=self._prefill_seconds,
            times=StepTimes(**self.timer.seconds),
            exchange_bytes=num_bytes / max(1, state.num_steps),
            counts=drafter.counts.so_far(),
            pool=drafter.pool_statistics(),
            seed=self.request.sampling.seed,
            cached_tokens=self._prefix.num_read,
            steps_without_drafter=self.decoder.num_steps_without_drafter,
        )

    def keep_prefix(self) -> int:
        """Store the keys and values of a finished request in the prefix cache; nothing of one that failed.

        Return the tag under which to store the request's draft tables; 0 to drop them, also if they have learned
        nothing. If the request failed, only requests of its scope may continue with them.
        """
        if not self.is_finished and self.request.draft_scope is None:
            return 0
        tables = self.decoder.draft_tables
        tag = self._prefix.next_tag(self.decoder.state.digest) if tables is not None and tables.stamp else 0
        if self.is_finished:
            self._prefix.keep(self.slot, tag)
        return tag


def _error_of(result: object) -> RequestMemoryError | None:
    return result if isinstance(result, RequestMemoryError) else None


def capacity_of(request: Request, decoder: Decoder) -> int:
    """Return how many tokens a slot must hold at first: prompt, committed, some output, one step's."""
    text = initial_text_tokens(len(request.prompt_ids), len(request.committed), request.max_new_tokens)
    return text + decoder.max_owned + decoder.drafter.max_committed
