"""One request on one replica, step by step, in concert with its peers.

proposal = state.propose(budget.fit, tree_size_hint)        equal on every replica
shares   = budget.shares(proposal.tree)                 equal on every replica
found    = draw(model.forward(shares[rank]))            the only expensive thing
outcome  = exchange(found)                              the only communication
run      = state.advance(proposal, outcome)             equal on every replica
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from lp_runtime.distributed.exchange import Exchange
from lp_runtime.engine.output import Report
from lp_runtime.engine.request import Request
from lp_runtime.engine.step_timer import StepTimer, StepTimes
from lp_runtime.lookahead.drafters.base import VerificationResult
from lp_runtime.lookahead.drafters.paper.drafter import PaperDrafter
from lp_runtime.lookahead.state import DecodingState, Proposal
from lp_runtime.model.runner import Fed, ModelRunner, result_of
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sizing.budget import StepBudget

CANCEL, TIME_IS_UP = 1, 2  # bits of the exchange's control word


# Told of every committed run: the node that each token follows, the nodes whose rows this replica has, their logits
# and their processed scores, [n, V] each.
Observer = Callable[[list[int], list[int], torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Member:
    """A replica as a member of its group.

    Attributes:
        rank, num_replicas: its place.
        exchange_device: where the group's backend wants its tensors.
        reports_times_late: whether all members tell how long a forward pass took a step late, as any must whose device works
            on its own.
    """

    rank: int
    num_replicas: int
    exchange_device: torch.device
    reports_times_late: bool


class Sequence:
    """A request that is being decoded. Whoever leads it (decoding_loop.py) calls, for every step,

        propose, draw, start_exchange, finish_exchange, advance

    and feeds the model between the first two; the clock's laps are theirs, too.

    Args:
        model: this replica's.
        request: what to decode.
        drawing: how successors are drawn.
        state: before its prefill, or taken up.
        budget: decides the size of steps.
        member: this replica.
        should_cancel: asked once a step, and between chunks of the prompt.
        observe: told of every step.

    Attributes:
        text: what of it the model was fed.
        fed: what the model is to be fed of it in this step.
        clock: where time goes.
        is_over: whether it has ended.
    """

    def __init__(
        self,
        model: ModelRunner,
        request: Request,
        drawing: Sampler,
        state: DecodingState,
        budget: StepBudget,
        member: Member,
        should_cancel: Callable[[], bool],
        observe: Observer | None,
    ):
        self._model, self._request, self._member = model, request, member
        self._state, self._budget, self._make_sampler = state, budget, drawing
        self._should_cancel, self._observe = should_cancel, observe
        self._started = time.perf_counter()
        drafter = state.drafter
        drawing.num_top_k = drafter.num_top_k
        capacity = min(drafter.max_nodes, budget.limit or drafter.max_nodes)
        self._exchange = Exchange(member.rank, member.num_replicas, capacity, member.exchange_device, drawing.width)
        self._most_tokens = len(request.prompt_ids) + request.max_new_tokens + capacity + drafter.max_committed
        text = (*request.prompt_ids, *request.committed) if request.committed else ()
        self.text = model.texts.take(model.capacity_for(self._most_tokens), text)
        self.clock = StepTimer()
        self._is_resting = False
        self._ended_by = 0  # bits of the control word
        self._num_fed, self._extra_passes = 0.0, 0
        self._prefill_seconds = 0.0

    @property
    def is_over(self) -> bool:
        return self._state.finish_reason is not None or self._ended_by != 0

    def prefill(self) -> Generator[None, None, StepOutput | None]:
        """Feed the prompt, and what is committed already; returns the first run, None if there was one before, or if
        the request was cancelled meanwhile.

        Yields:
            between chunks; the model may be fed other texts before the next one.
        """
        chunks = self._prefill()
        while True:
            started = time.perf_counter()
            with self._model.feeding(self.text):
                try:
                    next(chunks)
                except StopIteration as end:
                    run = end.value
                    break
                finally:
                    self._model.synchronize()  # what others are fed next is not to be charged for it
                    self._prefill_seconds += time.perf_counter() - started
            yield
        self.clock = StepTimer()
        return run

    def _prefill(self) -> Generator[None, None, StepOutput | None]:
        model, request = self._model, self._request
        if request.committed:
            for _ in model.resume(request.prompt_ids, request.committed, self._most_tokens):
                yield
                # Replicas may hold different parts of it already: they could not agree here.
                if self._member.num_replicas == 1 and self._should_cancel():
                    self._ended_by = CANCEL
                    break
            return None
        model.begin(self._most_tokens)
        self._set(self._state.propose_prefill())
        chunks = model.prefill_in_chunks(request.prompt_ids)
        for num_left in range(len(request.prompt_ids) - model.prefill_chunk, 0, -model.prefill_chunk):
            next(chunks)
            yield
            if self._agree_to_cancel(num_left):
                self._ended_by = CANCEL
                return None
        self.draw(result_of(chunks))
        self.start_exchange()
        self.finish_exchange()
        return self._committed(self._state.advance_prefill(self._proposal, self._unpack()), [0])

    def _agree_to_cancel(self, num_left: int) -> bool:
        """Whether any replica is to cancel, with so much of the prompt left; alike on all."""
        if self._member.num_replicas == 1:
            return self._should_cancel()
        # An exchange like the prefill's own, so that replicas at different places see that their digests differ.
        nothing = torch.zeros(
            len(self.fed.wanted), self._make_sampler.width, dtype=torch.int64, device=self._model.device
        )
        digest = self._make_digest() ^ num_left
        outcome = self._exchange.all_gather(self._shares, nothing, digest, CANCEL * self._should_cancel())
        return bool(outcome.control & CANCEL)

    def propose(self, batch_size: int = 1) -> None:
        """Make this step's tree.

        Args:
            batch_size: requests that this step's forward pass serves.
        """
        budget = self._budget
        budget.share(batch_size)
        self._is_resting = budget.is_resting
        if self._is_resting:
            self._set(self._state.propose_root())
        else:
            self._set(self._state.propose(budget.fit, budget.tree_size_hint))

    def _set(self, proposal: Proposal) -> None:
        self._proposal = proposal
        self._shares = self._budget.shares(proposal.tree)
        share = self._shares[self._member.rank]
        # Where the device works on its own there is time for it while it is at the pass.
        self._digest = self._make_digest() if self._model.timer is None else None
        self.fed = Fed(self.text, proposal.tree, share.nodes, share.owned)

    def _make_digest(self) -> int:
        """What tells this step from any other, 56 bits; 0 where nobody else has it."""
        if self._member.num_replicas == 1:
            return 0
        return self._proposal.digest ^ self._shares.digest()

    def draw(self, logits: torch.Tensor) -> None:
        """Draw the successors of the nodes that this replica owns.

        Args:
            logits: [n, V] theirs.
        """
        owned, tree = self.fed.wanted, self.fed.tree
        self._logits = logits[: len(owned)]
        self._values, self._scores = self._make_sampler.draw(
            self._logits, tree, owned, self._state.tokens, not self._is_resting, self.text.drawn
        )

    def start_exchange(self) -> None:
        """Begin to tell all replicas what each has drawn."""
        # A lone replica looks once the pass is done: until then more may become known.
        control = self._control() if self._member.num_replicas > 1 else 0
        digest = self._make_digest() if self._digest is None else self._digest
        clock = self.clock.packed(self._member.reports_times_late)
        self._exchange.start(self._shares, self._values, digest, control, clock)

    def _control(self) -> int:
        """Bits of what this replica alone knows."""
        max_time, member = self._request.max_time, self._member
        # One replica's clock decides, the first one's.
        is_late = max_time is not None and time.perf_counter() - self._started > max_time
        return CANCEL * self._should_cancel() | TIME_IS_UP * (is_late and member.rank == 0)

    def finish_exchange(self) -> None:
        """Wait for what all replicas have drawn."""
        outcome = self._exchange.finish()
        self._received, self._clocks = outcome.values, outcome.clocks
        self._control_bits = outcome.control if self._member.num_replicas > 1 else self._control()

    def _unpack(self) -> VerificationResult:
        """What was found of the step's nodes."""
        root = self._proposal.tree.root
        successors, logprobs, top_k = self._make_sampler.unpack(self._received[root:], not self._is_resting)
        self._logprobs = None if logprobs is None else [-1.0] * root + logprobs
        return VerificationResult.from_root(root, successors, top_k)

    def advance(self) -> StepOutput:
        """Commit what was accepted."""
        run, nodes = self._state.advance(self._proposal, self._unpack())
        clocks = StepTimer.unpacked(self._clocks)
        self._budget.observe(self._shares, *clocks, len(run) - 1, is_late=self._member.reports_times_late)
        sizes = self._shares.sizes
        self._num_fed += sum(sizes) / len(sizes)
        self._extra_passes += self._model.num_passes(max(sizes)) - 1
        return self._committed(run, nodes)

    def _committed(self, run: list[int], nodes: list[int]) -> StepOutput:
        self._ended_by = self._control_bits
        if self._observe:
            self._observe(nodes, self.fed.wanted.tolist(), self._logits, self._scores)
        return StepOutput(
            run,
            None if self._logprobs is None else [self._logprobs[node] for node in nodes],
            self._shares.owner[nodes].tolist() if self._request.trace else None,
        )

    def report(self) -> Report:
        """What it took; after its end."""
        state, exchange, drafter = self._state, self._exchange, self._state.drafter
        num_tree_steps = max(0, state.num_steps - 1)
        return Report(
            num_steps=state.num_steps + self._extra_passes,
            finish_reason=state.finish_reason or ("cancelled" if self._ended_by & CANCEL else "time"),
            step_tokens=self._num_fed / num_tree_steps if num_tree_steps else 0.0,
            seconds=time.perf_counter() - self._started,
            prefill_seconds=self._prefill_seconds,
            times=StepTimes(**self.clock.seconds),
            exchange_bytes=exchange.bytes_sent / max(1, state.num_steps) if self._member.num_replicas > 1 else 0.0,
            counts=drafter.counts,
            pool=drafter.pool.statistics() if isinstance(drafter, PaperDrafter) else None,
            seed=self._request.sampling.seed,
        )
