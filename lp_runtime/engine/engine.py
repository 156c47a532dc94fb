"""The engine of a replica: the loop over steps.

Decodes requests one after another in concert with the other replicas of its group, or, on a replica alone, several in
one forward pass. A step, without what is measured, overlapped and delivered around it:

    steps   = [sequence.propose() for sequence in batch]              token trees and shares: pure, equal everywhere
    logits  = model.forward_batch([sequence.inputs(step) ...])        the only expensive thing
    outcome = exchange(sequence.sample(step, logits))                 the only communication
    output  = sequence.advance(step, samples, outcome)                accept, commit, learn: pure, equal everywhere
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.decoder.decoder import Decoder, Samples
from lp_runtime.decoder.decoder_factory import DecoderFactory
from lp_runtime.decoder.draft_pool import DraftPool
from lp_runtime.decoder.sampler_factory import SamplerSpec, make_sampler_spec
from lp_runtime.decoder.step import Step
from lp_runtime.distributed.exchange import Exchange, Outcome, compile_exchange
from lp_runtime.distributed.partition.chains import compile_chains
from lp_runtime.distributed.partition.partition import compile_partition
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.batch import Arrival, Batch, never_cancel
from lp_runtime.engine.delivery import Delivery
from lp_runtime.engine.sequence import MakeExchange, Observer, Sequence, capacity_of
from lp_runtime.errors import LookaheadError
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.drafters.best_first.drafter import compile_drafter, compile_growth, compile_learning
from lp_runtime.lookahead.state import Stop
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import PromptPrefix
from lp_runtime.request.output import Event, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.sampling.packing import compile_sampler
from lp_runtime.sizing.budget import compile_budget, compile_capacity
from lp_runtime.utils.generators import result_of
from lp_runtime.utils.jit import compile_in_turns


class _Launched(NamedTuple):
    """A sequence's part of a step whose forward pass was launched.

    Attributes:
        sequence: the sequence.
        step: its step.
        samples: what this replica samples, or why sampling failed.
    """

    sequence: Sequence
    step: Step
    samples: Samples | LookaheadError


class Engine:
    """Decodes requests on one replica. All replicas of a group must be given the same requests in the same order.

    Args:
        model: this replica's.
        group: the replicas that share the steps of a request.
        calibration: what was measured of the model; by default measured when a request needs it, and not kept.
        draft_tables: tables that outlive requests, for requests that ask for them; made when needed by default.
        times_are_late: see Sequence; by default as this replica alone would.
        make_exchange: makes the exchange of a sequence's steps.
        grammars: makes the state of requests' constraints; None where no request has one.
    """

    def __init__(
        self,
        model: ModelRunner,
        group: Group,
        calibration: Calibration | None = None,
        draft_tables: DraftTables | None = None,
        times_are_late: bool | None = None,
        make_exchange: MakeExchange = Exchange,
        grammars: Grammars | None = None,
    ):
        self._model, self._group, self._make_exchange = model, group, make_exchange
        self._times_are_late = model.timer is not None if times_are_late is None else times_are_late
        self._calibration = calibration or Calibration(model, group, cache_dir=None)
        self._draft_pool = DraftPool(draft_tables)
        self._decoders = DecoderFactory(model, group, self._calibration, self._draft_pool, grammars)
        self._plain_kinds: set[Hashable] = set()

    @property
    def draft_pool(self) -> DraftPool:
        """The draft tables of this engine's requests."""
        return self._draft_pool

    def prepare(self, settings: LookaheadConfig) -> None:
        """Measure and compile now what a request with these settings would have to wait for."""
        compilers = [compile_budget, compile_sampler]
        if self._model.feeds_chains:
            compilers.append(compile_chains)
        if not self._group.is_alone:
            compilers += [compile_capacity, compile_partition, compile_exchange]
        if settings.drafter == "full":
            compilers = [compile_growth, compile_learning, *compilers, compile_drafter]
        compile_in_turns(compilers)
        if settings.drafter == "full":
            if settings.is_auto:
                self._calibration.max_step_tokens()
            if settings.has_vocabulary_prior:
                self._calibration.prepare_vocabulary()
            pool = self._draft_pool
            pool.release(pool.acquire(settings.draft_tables != "request", settings.draft_tables_bytes))

    # Opening and closing: the only places where slots and draft tables are acquired and released.

    def open_decoder(self, request: Request, spec: SamplerSpec, stop: Stop | None = None, tag: int = 0) -> Decoder:
        """Return the pure core of a request, before its prefill: see `DecoderFactory.make`."""
        return self._decoders.make(request, spec, stop, tag)

    def close_decoder(self, decoder: Decoder, tag: int = 0) -> None:
        """Release the draft tables of a decoder; under a tag they are kept for a request that goes on from there."""
        if decoder.draft_tables is not None:
            self._draft_pool.release(decoder.draft_tables, tag)

    def _open(
        self,
        request: Request,
        spec: SamplerSpec | None,
        stop: Stop | None,
        should_cancel: Callable[[], bool],
        observe: Observer | None,
    ) -> Sequence:
        model = self._model
        spec = spec or make_sampler_spec(model, request, self._plain_kinds)
        prefix = PromptPrefix(model.slots.prefixes, request, self._group, self._draft_pool)
        decoder = self.open_decoder(request, spec, stop, prefix.tag)
        text = (*request.prompt_ids, *request.committed) if request.committed else ()
        slot = model.slots.acquire(capacity_of(request, decoder), text)
        group, make_exchange, are_late = self._group, self._make_exchange, self._times_are_late
        return Sequence(model, request, decoder, slot, prefix, group, make_exchange, are_late, should_cancel, observe)

    def _close(self, sequence: Sequence) -> None:
        self.close_decoder(sequence.decoder, sequence.keep_prefix())
        self._model.slots.release(sequence.slot)

    # Decoding.

    def run(
        self,
        request: Request,
        spec: SamplerSpec | None = None,
        stop: Stop | None = None,
        should_cancel: Callable[[], bool] = never_cancel,
        observe: Observer | None = None,
    ) -> Iterator[Event]:
        """Decode one request.

        Args:
            request: what to decode.
            spec: how successors are sampled; by default as the request and the model's own defaults say.
            stop: a condition beyond the request's own, see DecodingState; None for none.
            should_cancel: asked once a step, and between chunks of the prompt; when any replica's says yes, all stop.
            observe: called after every step; None for nobody.

        Yields:
            A StepOutput a step, then a Report.
        """
        sequence = self._open(request, spec, stop, should_cancel, observe)
        delivery: Delivery[Event] = Delivery()
        try:
            prefilled = result_of(sequence.prefill())
            if prefilled is not None:
                delivery.add(prefilled)
            while not sequence.is_finished:
                if not delivery.is_deferred:
                    yield from delivery.deliver()
                (output,) = yield from self._step([sequence], delivery)
                if isinstance(output, LookaheadError):
                    yield from delivery.deliver()
                    raise output
                delivery.add(output)
            yield from delivery.deliver()
            yield sequence.report()
        finally:
            self._close(sequence)

    def run_batch(self, arrivals: Callable[[], Iterable[Arrival]]) -> Iterator[tuple[Hashable, Event | LookaheadError]]:
        """Decode requests as they arrive, several in one forward pass, on a replica alone. Ends with the last one.

        Between two steps, about one chunk of the prompts that have arrived is fed, in turns: nobody waits for all of a
        long prompt.

        Args:
            arrivals: asked between two steps for the requests that have arrived.

        Yields:
            (key, event) for every request: a StepOutput a step, then a Report, or the error that ended the request.
        """
        assert self._group.is_alone
        batch = Batch(self._close)
        delivery, running = batch.delivery, batch.running
        try:
            while True:
                if not (running and delivery.is_deferred):
                    yield from delivery.deliver()
                for arrival in arrivals():
                    self._admit(batch, arrival)
                if batch.prefilling or not (running and delivery.is_deferred):
                    yield from delivery.deliver()
                yield from self._prefill_some(batch)
                if running:
                    keys = list(running)
                    outputs = yield from self._step(list(running.values()), delivery)
                    for key, output in zip(keys, outputs, strict=True):
                        batch.take(key, output)
                elif not batch.prefilling:
                    return
        finally:
            batch.close()

    def _admit(self, batch: Batch, arrival: Arrival) -> None:
        try:
            sequence = self._open(arrival.request, None, arrival.stop, arrival.should_cancel, None)
        except LookaheadError as error:
            batch.delivery.add((arrival.key, error))
        else:
            batch.prefilling[arrival.key] = sequence, sequence.prefill()

    def _prefill_some(self, batch: Batch) -> Iterator[Any]:
        """Feed about one chunk of the prompts that have arrived; yield what is to be delivered meanwhile."""
        model = self._model
        num_before = model.num_prefilled_tokens
        while batch.prefilling and model.num_prefilled_tokens - num_before < model.prefill_chunk:
            if batch.prefill_chunk():
                yield from batch.delivery.deliver()

    def _step(
        self, batch: list[Sequence], delivery: Delivery[Any]
    ) -> Generator[Any, None, list[StepOutput | LookaheadError]]:
        """Run one step of sequences that share a forward pass.

        Yields:
            earlier steps' outputs, while the device works on this one.

        Returns:
            for each sequence its output, or the error that ended this sequence alone.
        """
        try:
            launched = self._launch(batch)
        except Exception:  # a device without memory, for one
            yield from delivery.deliver()
            raise
        if self._model.timer is not None:
            try:
                yield from delivery.deliver()
            except BaseException:  # the caller goes; what the pass reads and writes will be others' then
                self._model.synchronize()
                raise
        return self._finish(batch, launched, delivery)

    def _finish(
        self, batch: list[Sequence], launched: list[_Launched], delivery: Delivery[Any]
    ) -> list[StepOutput | LookaheadError]:
        """Wait for a step's exchange, and advance; return each sequence's output, or its error."""
        timer = self._model.timer
        delivered_after = batch[0].timer.since_last_lap()
        # The last one first: once that has arrived, none of the others is waited for.
        outcomes = [part.sequence.finish_exchange() for part in reversed(launched)][::-1]
        if timer is None:
            _lap(batch, "exchange")
        else:
            seconds = timer.seconds()
            for sequence in batch:
                sequence.timer.lap_of_pass(seconds, delivered_after, len(batch))
            delivery.plan(seconds)
        outputs = [_advance(part, outcome) for part, outcome in zip(launched, outcomes, strict=True)]
        _lap(batch, "other")
        return outputs

    def _launch(self, batch: list[Sequence]) -> list[_Launched]:
        """Propose, launch the forward pass, sample, begin to exchange. A CPU has ended the pass when this returns."""
        timer = self._model.timer
        for sequence in batch:
            sequence.timer.start()
        steps = [sequence.propose(len(batch)) for sequence in batch]
        _lap(batch, "other")
        if timer is not None:
            timer.start()
        inputs = [sequence.inputs(step) for sequence, step in zip(batch, steps, strict=True)]
        launched = []
        for sequence, step, found in zip(batch, steps, self._model.forward_batch(inputs), strict=True):
            launched.append(_Launched(sequence, step, sequence.sample(step, found)))
        if timer is None:
            _lap(batch, "forward")
        else:
            timer.stop()
        for part in launched:
            part.sequence.start_exchange(part.step, part.samples)
        return launched


def _advance(part: _Launched, outcome: Outcome) -> StepOutput | LookaheadError:
    """Advance a sequence; return its output, or the error that ended the sequence."""
    try:
        return part.sequence.advance(part.step, part.samples, outcome)
    except LookaheadError as error:
        return error


def _lap(batch: list[Sequence], what: str) -> None:
    for sequence in batch:
        sequence.timer.lap(what, len(batch))
