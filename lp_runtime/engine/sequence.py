"""A request being decoded on an engine, step by step, in concert with the other replicas of its group.

The engine (engine.py) calls, for every step,

    propose, sample, start_exchange, finish_exchange, advance

and runs the model between the first two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from lp_runtime.decoder.decoder import Committed, Decoder, Samples, Verified
from lp_runtime.decoder.prompt_harvest import PromptHarvest
from lp_runtime.decoder.shared_error import shared_error
from lp_runtime.decoder.step import Step
from lp_runtime.distributed.exchange import Exchange, Outcome
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import LookaheadError
from lp_runtime.lookahead.drafters.paper.drafter import PaperDrafter
from lp_runtime.model.forward.step_inputs import StepInputs, StepLogits
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.logprobs import SCORED_TOKENS, PromptScorer
from lp_runtime.prefill.prefix import PromptPrefix
from lp_runtime.prefill.resume import Resume
from lp_runtime.request.output import MODEL, Report, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.request.step_timer import StepTimer, StepTimes
from lp_runtime.utils.generators import result_of

CANCEL, TIME_IS_UP, FAILED = 1, 2, 4  # bits of the exchange's control word

# Called in every step, before the stop condition, with the nodes that the accepted tokens follow, the step, the rank of
# this replica, and what this replica sampled. What is committed may be less: of the last step.
Observer = Callable[[list[int], Step, int, Samples], None]
MakeExchange = Callable[[Group, int, int], Exchange]  # of the group, the capacity in nodes, the integers a node


@dataclass
class _Fed:
    """What a sequence's steps have fed.

    Attributes:
        tokens: mean over replicas, summed over steps, the prefill's excluded.
        extra_passes: forward passes beyond one a step.
    """

    tokens: float = 0.0
    extra_passes: int = 0


class Sequence:
    """A request being decoded.

    Args:
        model: this replica's.
        request: what to decode.
        decoder: the request's state, budget and sampler.
        slot: KV-cache slot that holds the sequence's keys and values; acquired and released by the engine.
        prefix: what of the prompt comes out of the prefix cache.
        group: the replicas that share the request's steps.
        make_exchange: makes the group's exchange.
        times_are_late: whether all replicas tell the duration of a forward pass one step late, as they must if any
            replica's device works asynchronously.
        should_cancel: asked once a step, and between chunks of the prompt.
        observe: called after every step; None for nobody.

    Attributes:
        decoder, slot: as given.
        timer: where the time of steps goes.
    """

    def __init__(
        self,
        model: ModelRunner,
        request: Request,
        decoder: Decoder,
        slot: CacheSlot,
        prefix: PromptPrefix,
        group: Group,
        make_exchange: MakeExchange,
        times_are_late: bool,
        should_cancel: Callable[[], bool],
        observe: Observer | None,
    ):
        self.decoder, self.slot, self.timer = decoder, slot, StepTimer()
        self._model, self._request, self._prefix, self._group = model, request, prefix, group
        self._times_are_late, self._should_cancel, self._observe = times_are_late, should_cancel, observe
        self._exchange = make_exchange(group, decoder.max_owned, decoder.sampler.width)
        self._started = time.perf_counter()
        self._ended_by = 0  # bits of the control word
        self._fed = _Fed()
        self._prefill_seconds = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.decoder.state.finish_reason is not None or self._ended_by != 0

    @property
    def capacity(self) -> int:
        """Tokens that the slot must hold: the prompt, the output and one step's."""
        return capacity_of(self._request, self.decoder)

    # Prefill.

    def prefill(self) -> Generator[None, None, StepOutput | None]:
        """Feed the prompt and what is committed already.

        Yields:
            None between chunks; other sequences may be fed before the next chunk.

        Returns:
            the prefill's output; None if there was one before, or if the request was cancelled meanwhile.
        """
        chunks = self._resume() if self._request.committed else self._prefill()
        while True:
            started = time.perf_counter()
            try:
                next(chunks)
            except StopIteration as end:
                output = end.value
                break
            finally:
                self._model.synchronize()  # what others are fed next is not to be charged to this sequence
                self._prefill_seconds += time.perf_counter() - started
            yield
        self.timer = StepTimer()
        return output

    def _resume(self) -> Generator[None, None, None]:
        """Feed the prompt and the tokens that an earlier attempt has committed, as far as the slot lacks them."""
        resume = Resume(self._model, self._request, self.slot, self.decoder.sampler, self._group)
        if not (yield from resume.in_step(self.capacity, self._should_cancel)):
            self._ended_by = CANCEL

    def _prefill(self) -> Generator[None, None, StepOutput | None]:
        """Feed the prompt, and agree on its first token."""
        model, prompt = self._model, self._request.prompt_ids
        model.begin(self.slot, self.capacity, prompt_length=len(prompt))
        prompt = prompt[self._prefix.read_into(self.slot) :]
        step = self.decoder.propose_prefill()
        scorer: PromptScorer | None = None
        harvest: PromptHarvest | None = None
        chunks, chunk_tokens = model.prefill_in_chunks(self.slot, prompt), model.prefill_chunk
        num_chunks = -(-len(prompt) // chunk_tokens)
        if self._request.prompt_logprobs:
            scorer = PromptScorer(model, self.slot, prompt, self._request.top_logprobs)
            chunks, num_chunks = scorer.prefill_in_chunks(), -(-len(prompt) // SCORED_TOKENS)
        elif self.decoder.num_harvested:
            sampler, num_harvested = self.decoder.sampler, min(self.decoder.num_harvested, len(prompt))
            harvest = PromptHarvest(model, self.slot, prompt, num_harvested, sampler, self._group)
            chunks, num_chunks = harvest.prefill_in_chunks(), -(-len(prompt) // harvest.chunk_tokens)
        elif num_before := self._prefix.num_to_point:
            chunks = self._prefill_past_point(prompt, num_before)
            num_chunks = -(-num_before // chunk_tokens) - (num_before - len(prompt)) // chunk_tokens
        for num_left in range(num_chunks - 1, 0, -1):
            next(chunks)
            yield
            if self._agree_to_cancel(step, num_left):
                self._ended_by = CANCEL
                return None
        samples = self.sample(step, StepLogits(result_of(chunks)))
        self.start_exchange(step, samples)
        outcome = self.finish_exchange()
        samples = self._agreed(samples, outcome)
        verified = self.decoder.verify(step, outcome.values)
        if self._observe:
            self._observe([0], step, self._group.rank, samples)
        output = self._output(step, verified, self.decoder.advance_prefill(step, verified), outcome.control)
        self._prefix.keep(self.slot)  # others with the same prompt may wait for it
        if harvest is not None and not self.is_finished:
            self.decoder.drafter.learn_prompt(self._request.prompt_ids, harvest.share())
        return output if scorer is None else scorer.attach(output)

    def _prefill_past_point(self, prompt: tuple[int, ...], num_before: int) -> Generator[None, None, torch.Tensor]:
        """Feed a prompt, and keep its prefix as it is behind its first `num_before` tokens; as `prefill_in_chunks`."""
        yield from self._model.prefill_in_chunks(self.slot, prompt[:num_before])
        self._prefix.keep(self.slot)
        yield
        return (yield from self._model.prefill_in_chunks(self.slot, prompt[num_before:]))

    def _agree_to_cancel(self, step: Step, num_left: int) -> bool:
        """Whether any replica is to cancel, with so many tokens of the prompt left; equal on all replicas."""
        if self._group.is_alone:
            return self._should_cancel()
        # An exchange like the prefill's own, so that replicas at different chunks see that their digests differ.
        control = CANCEL * self._should_cancel()
        outcome = self._exchange.all_gather(step.shares, self._no_values(step), step.digest ^ num_left, control)
        return bool(outcome.control & CANCEL)

    def _no_values(self, step: Step) -> torch.Tensor:
        """Return zeros in place of what this replica would exchange in a step."""
        num_owned = step.shares.num_owned[self._group.rank]
        return torch.zeros(num_owned, self.decoder.sampler.width, dtype=torch.int64, device=self._model.device)

    # Steps.

    def propose(self, batch_size: int = 1) -> Step:
        """Return the next step: its token tree, and who feeds what; equal on every replica.

        Args:
            batch_size: sequences that share the step's forward pass.
        """
        step = self.decoder.propose(batch_size)
        if self._model.timer is None:
            step.digest  # noqa: B018 (beside an asynchronous device there is time for it during the pass)
        return step

    def inputs(self, step: Step) -> StepInputs:
        """Return what this replica feeds to the model."""
        return step.inputs(self._group.rank, self.slot)

    def sample(self, step: Step, found: StepLogits) -> Samples | LookaheadError:
        """Choose the successors of the nodes that this replica owns; return the error if a processor fails."""
        try:
            return self.decoder.sample(step, self._group.rank, found)
        except LookaheadError as error:
            return error

    def start_exchange(self, step: Step, samples: Samples | LookaheadError) -> None:
        """Begin to tell all replicas what this one has sampled, or that sampling has failed here."""
        # A lone replica looks at cancellations once the pass is done: until then more may become known.
        control = 0 if self._group.is_alone else self._control()
        if isinstance(samples, LookaheadError):
            values, control = self._no_values(step), control | FAILED
        else:
            values = samples.values
        self._exchange.start(step.shares, values, step.digest, control, self.timer.packed(self._times_are_late))

    def finish_exchange(self) -> Outcome:
        """Wait for what all replicas have sampled."""
        outcome = self._exchange.finish()
        if self._group.is_alone:
            return Outcome(outcome.values, outcome.control | self._control(), outcome.clocks)
        return outcome

    def _control(self) -> int:
        """Bits of what this replica alone knows."""
        max_time, rank = self._request.max_time, self._group.rank
        # One replica's clock decides, the first one's.
        is_late = max_time is not None and time.perf_counter() - self._started > max_time
        return CANCEL * self._should_cancel() | TIME_IS_UP * (is_late and rank == 0)

    def _agreed(self, samples: Samples | LookaheadError, outcome: Outcome) -> Samples:
        """Return what this replica has sampled, if sampling has failed on no replica.

        Raises:
            LookaheadError: else, equal on every replica.
        """
        error = samples if isinstance(samples, LookaheadError) else None
        if outcome.control & FAILED:
            raise shared_error(error, self._group)
        assert not isinstance(samples, LookaheadError)
        return samples

    def advance(self, step: Step, samples: Samples | LookaheadError, outcome: Outcome) -> StepOutput:
        """Accept, commit and learn from a step; equal on every replica.

        Args:
            step: the step.
            samples: what this replica has sampled, or why it could not.
            outcome: what all replicas have sampled.

        Raises:
            LookaheadError: if the request has failed; equal on every replica, which are in step then.
        """
        samples = self._agreed(samples, outcome)
        verified = self.decoder.verify(step, outcome.values)
        times = StepTimer.unpacked(outcome.clocks)
        if self._observe:
            self._observe(self.decoder.accepted_nodes(step, verified), step, self._group.rank, samples)
        committed = self.decoder.advance(step, verified, *times, self._times_are_late)
        sizes = step.shares.sizes
        self._fed.tokens += sum(sizes) / len(sizes)
        self._fed.extra_passes += self._model.num_passes(max(sizes)) - 1
        return self._output(step, verified, committed, outcome.control)

    def _output(self, step: Step, verified: Verified, committed: Committed, control: int) -> StepOutput:
        """Return what a step committed, as the request wants to be told."""
        self._ended_by = control
        token_ids, nodes = committed
        logprobs = self.decoder.logprobs_behind(verified, nodes)
        if not self._request.trace:
            return StepOutput(token_ids, logprobs)
        sources = [*self.decoder.drafter.counts.latest_sources(), MODEL][: len(token_ids)]
        return StepOutput(token_ids, logprobs, step.shares.owner[nodes].tolist(), sources)

    def report(self) -> Report:
        """Return what the request took, after its end."""
        state, drafter = self.decoder.state, self.decoder.drafter
        num_tree_steps = max(0, state.num_steps - 1)
        num_bytes = 0 if self._group.is_alone else self._exchange.bytes_sent
        return Report(
            num_steps=state.num_steps + self._fed.extra_passes,
            finish_reason=state.finish_reason or ("cancelled" if self._ended_by & CANCEL else "time"),
            step_tokens=self._fed.tokens / num_tree_steps if num_tree_steps else 0.0,
            seconds=time.perf_counter() - self._started,
            prefill_seconds=self._prefill_seconds,
            times=StepTimes(**self.timer.seconds),
            exchange_bytes=num_bytes / max(1, state.num_steps),
            counts=drafter.counts,
            pool=drafter.pool.statistics() if isinstance(drafter, PaperDrafter) else None,
            seed=self._request.sampling.seed,
            cached_tokens=self._prefix.num_read,
        )

    def keep_prefix(self) -> int:
        """Keep the keys and values of a sequence that has ended, for others to begin with; nothing of one that failed.

        Returns:
            the tag under which the sequence's draft tables are to be kept; 0 for not at all.
        """
        settings, state = self._request.lookahead, self.decoder.state
        if not self.is_finished:
            return 0
        has_tables = self.decoder.draft_tables is not None and settings.draft_tables == "request"
        tag = self._prefix.next_tag(state.digest) if has_tables else 0
        self._prefix.keep(self.slot, tag)
        return tag


def capacity_of(request: Request, decoder: Decoder) -> int:
    """Return the tokens that a request's slot must hold: prompt, output and one step's."""
    one_step = decoder.max_owned + decoder.drafter.max_committed
    return len(request.prompt_ids) + request.max_new_tokens + one_step
