"""The engine of a replica: the loop over steps.

It decodes one request at a time in step with the other replicas of its group, or, on a lone replica, several requests
in one forward pass. `Engine._step` is the step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.decoder.decoder import Decoder, Gathered, Samples
from lp_runtime.decoder.decoder_factory import DecoderFactory
from lp_runtime.decoder.draft_pool import DraftPool
from lp_runtime.decoder.sampler_factory import make_sampler
from lp_runtime.decoder.step import Step
from lp_runtime.distributed.exchange import Exchange
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.batch import Arrival, Batch, KeyedEvent
from lp_runtime.engine.delivery import Delivery
from lp_runtime.engine.memory import unshared_error
from lp_runtime.engine.preparation import Preparation
from lp_runtime.engine.running_request import (
    Callbacks,
    MakeExchange,
    Observer,
    Peers,
    RunningRequest,
    capacity_of,
)
from lp_runtime.errors import LookaheadError, RequestMemoryError, first_line
from lp_runtime.lookahead.state import Stop
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import PromptPrefix
from lp_runtime.request.output import Event, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.utils.callables import never, result_of
from lp_runtime.utils.memory import is_out_of_memory, out_of_memory_as


class Engine:
    """Decodes requests on one replica. All replicas of a group must get the same ones in the same order.

    Args:
        calibration: what was measured of the model; None to measure when a request needs it, and keep nothing.
        draft_pool: draft tables of earlier runtimes, and a corpus; None without any. Equal on all replicas.
        times_are_late: see StepBudget; True on all replicas if any of them runs on a GPU. None for what this replica
            alone would need.
        grammars: makes the state of requests' constraints; None if no request has one.
    """

    def __init__(
        self,
        model: ModelRunner,
        group: Group,
        calibration: Calibration | None = None,
        draft_pool: DraftPool | None = None,
        times_are_late: bool | None = None,
        make_exchange: MakeExchange = Exchange,
        grammars: Grammars | None = None,
    ):
        self._model, self._group = model, group
        self._peers = Peers(group, make_exchange)
        self._calibration = calibration or Calibration(model, group, cache_dir=None)
        self.draft_pool = draft_pool or DraftPool()
        are_late = model.timer is not None if times_are_late is None else times_are_late
        self._decoders = DecoderFactory(model, group, self._calibration, self.draft_pool, grammars, are_late)
        self._plain_kinds: set[Hashable] = set()
        self._preparation = Preparation(model, group, self._calibration, self.draft_pool)

    def prepare(self, settings: LookaheadConfig, is_compiling: Callable[[], bool] | None = None) -> None:
        """Measure and compile now what a request with these settings would have to wait for.

        With `is_compiling`, which all replicas must give or none, requests are decoded without the drafter `full`, one
        token per step, until it is false on all replicas. It is true while another process compiles the drafter.
        """
        self._peers = replace(self._peers, is_compiling=is_compiling or never)
        self._preparation.begin(settings, is_later=is_compiling is not None)

    # Opening and closing: the only places where slots and draft tables are acquired and released.

    def open_decoder(self, request: Request, sampler: Sampler, stop: Stop | None = None, tag: int = 0) -> Decoder:
        """Return the decoder of a request, before its prefill: see `DecoderFactory.make`."""
        lacks_drafter = self._preparation.lacks_drafter(request, self._peers.is_compiling)
        return self._decoders.make(request, sampler, stop, tag, lacks_drafter)

    def close_decoder(self, decoder: Decoder, tag: int, scope: str | None) -> None:
        """Release a decoder's draft tables; see `DraftPool.release`."""
        if decoder.draft_tables is not None:
            self.draft_pool.release(decoder.draft_tables, tag, scope)

    def _open(
        self, request: Request, callbacks: Callbacks, sampler: Sampler | None = None, stop: Stop | None = None
    ) -> RunningRequest:
        model, group = self._model, self._group
        with out_of_memory_as(lambda reason: unshared_error(model, request, group, reason)), ExitStack() as opened:
            sampler = sampler or make_sampler(model, request, self._plain_kinds)
            prefix = PromptPrefix(model.slots.prefixes, request, group, self.draft_pool)
            decoder = self.open_decoder(request, sampler, stop, prefix.tag)
            opened.callback(self.close_decoder, decoder, prefix.tag, request.draft_scope)
            text = (*request.prompt_ids, *request.committed) if request.committed else ()
            slot = model.slots.acquire(capacity_of(request, decoder), text)
            opened.callback(model.slots.release, slot)
            running = self.make_running(request, decoder, slot, prefix, callbacks)
            opened.pop_all()  # closed by `_close` from here on
        return running

    def make_running(
        self, request: Request, decoder: Decoder, slot: CacheSlot, prefix: PromptPrefix, callbacks: Callbacks
    ) -> RunningRequest:
        """Return a request to decode. Engines that measure override it to compute its steps in another way."""
        return RunningRequest(self._model, self._peers, request, decoder, slot, prefix, callbacks)

    def _close(self, running: RunningRequest, frees_memory: bool = False) -> None:
        """Release what a request holds; with `frees_memory` also free what no running request needs."""
        running.decoder.learn_costs()
        self.close_decoder(running.decoder, running.keep_prefix(), running.request.draft_scope)
        self._model.slots.release(running.slot)
        if frees_memory:
            self._model.free_memory()

    # Decoding.

    def run(
        self,
        request: Request,
        sampler: Sampler | None = None,
        stop: Stop | None = None,
        should_cancel: Callable[[], bool] = never,
        observe: Observer | None = None,
    ) -> Iterator[Event]:
        """Decode one request; yield a StepOutput per step, then a Report.

        If memory runs out on any replica, all of them raise RequestMemoryError, and can decode the next request.

        Args:
            sampler: how successors are sampled; None for what the request and the model's own defaults say.
            stop: a stop condition in addition to the request's, see DecodingState; None for none.
            should_cancel: asked once a step, and between chunks of the prompt; if it is true on any replica, all stop.
        """
        running = self._open(request, Callbacks(should_cancel, observe), sampler, stop)
        delivery: Delivery[Event] = Delivery()
        lacks_memory = False
        try:
            prefilled = result_of(running.prefill())
            if prefilled is not None:
                delivery.add(prefilled)
            while not running.is_finished:
                if not delivery.is_deferred:
                    yield from delivery.deliver()
                (output,) = yield from self._try_step([running], delivery)
                if isinstance(output, LookaheadError):
                    raise output
                delivery.add(output)
            yield from delivery.deliver()
        except Exception as error:
            lacks_memory = isinstance(error, RequestMemoryError)
            yield from delivery.deliver()  # what was committed before the failure
            raise
        finally:
            self._close(running, lacks_memory)
        yield running.report()

    def run_batch(self, arrivals: Callable[[], Iterable[Arrival]]) -> Iterator[KeyedEvent]:
        """Decode requests as they arrive, several per forward pass, on a lone replica, until none is left.

        Between two steps, `arrivals` returns new requests, and about one chunk of the prompts that have arrived is fed,
        in turns, so that no request waits for the whole of another one's long prompt. Yields (key, event) of every
        request: a StepOutput per step, then a Report, or the error that ended the request.
        """
        assert self._group.is_alone
        batch = Batch(self._model, self._open, self._close)
        try:
            while True:
                yield from batch.admit(arrivals)
                yield from batch.prefill_some()
                if batch.running:
                    keys = list(batch.running)
                    outputs = yield from self._try_step(list(batch.running.values()), batch.delivery)
                    for key, output in zip(keys, outputs, strict=True):
                        batch.handle_output(key, output)
                elif not batch.prefilling:
                    return
        except Exception:
            yield from batch.delivery.deliver()
            raise
        finally:
            batch.close()

    # The step.

    def _try_step(
        self, batch: list[RunningRequest], delivery: Delivery[Any]
    ) -> Generator[Any, None, list[StepOutput | LookaheadError]]:
        """Run `_step`; if memory runs out and it cannot tell whose step failed, all requests get an error."""
        try:
            return (yield from self._step(batch, delivery))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        return self._unshared_errors(batch, reason)

    def _step(
        self, batch: list[RunningRequest], delivery: Delivery[Any]
    ) -> Generator[Any, None, list[StepOutput | LookaheadError]]:
        """Run a step of requests that share a pass; return each one's output, or the error that ended it.

        Yields outputs of earlier steps while the device works on this one.
        """
        self._give_drafters(batch)  # only while drafters are being compiled
        steps = self._propose(batch)  # token trees and who feeds what: pure, equal on every replica
        logits = self._forward(batch, steps)  # the only expensive call
        samples = self._sample(batch, steps, logits)
        self._start_exchange(batch, steps, samples)  # the only communication
        self._learn_costs(batch)  # of the previous step
        yield from self._deliver_previous(delivery)
        gathered = self._finish_exchange(batch, steps, samples, delivery)
        return self._advance(batch, steps, gathered)  # accept, commit, learn: pure, equal on every replica

    def _give_drafters(self, batch: list[RunningRequest]) -> None:
        """Give requests that began without a drafter theirs, once it is compiled; see `prepare`."""
        for running in batch:
            if running.may_draft:
                self._preparation.finish()
                running.use(self._decoders.set_up_drafter(running.request, running.decoder.sampler, running.tag))

    def _propose(self, batch: list[RunningRequest]) -> list[Step]:
        for running in batch:
            running.timer.start()
        steps = [running.decoder.propose(len(batch)) for running in batch]
        if self._model.timer is None:
            for step in steps:
                step.digest  # noqa: B018 (a GPU's host computes it later, during the pass)
        _lap(batch, "other")
        return steps

    def _forward(self, batch: list[RunningRequest], steps: list[Step]) -> list[StepLogits | LookaheadError]:
        """Run the forward pass; on a GPU, only launch it. A request for which memory ran out gets an error."""
        if self._model.timer is not None:
            self._model.timer.start()
        inputs = [running.inputs(step) for running, step in zip(batch, steps, strict=True)]
        if len(batch) == 1 or self._model.supports_batching:
            return self._feed(batch, inputs)
        return [  # copies: the next pass may overwrite the results of this one
            running.attempt(lambda each=each: self._model.forward(each).copy())  # type: ignore[misc]
            for running, each in zip(batch, inputs, strict=True)
        ]

    def _unshared_errors(self, batch: list[RunningRequest], reason: str) -> list[Any]:
        return [unshared_error(self._model, running.request, self._group, reason) for running in batch]

    def _feed(self, batch: list[RunningRequest], inputs: list[StepInputs]) -> list[StepLogits | LookaheadError]:
        """Feed requests' shares in one pass; while memory does not suffice, leave out the last (youngest) one."""
        lengths = [len(each.slot.tokens) for each in inputs]
        logits = batch[-1].attempt(lambda: self._model.forward_batch(inputs))
        if not isinstance(logits, LookaheadError):
            return list(logits)
        if len(batch) > 1 and lengths != [len(each.slot.tokens) for each in inputs]:  # re-fed, and committed in part
            return self._unshared_errors(batch, "its batch lacks memory")
        self._model.slots.drop(inputs[-1].slot)
        if len(batch) == 1:
            return [logits]
        for each in inputs[:-1]:
            each.slot.cache.truncate(each.slot.cache.length)  # a strict step may have written parts of its tree
        return [*self._feed(batch[:-1], inputs[:-1]), logits]

    def _sample(
        self, batch: list[RunningRequest], steps: list[Step], logits: list[StepLogits | LookaheadError]
    ) -> list[Samples | LookaheadError]:
        samples = [running.sample(step, each) for running, step, each in zip(batch, steps, logits, strict=True)]
        if self._model.timer is None:
            _lap(batch, "forward")
        else:
            self._model.timer.stop()
        return samples

    def _start_exchange(
        self, batch: list[RunningRequest], steps: list[Step], samples: Sequence[Samples | LookaheadError]
    ) -> None:
        for running, step, each in zip(batch, steps, samples, strict=True):
            running.start_exchange(step, each)

    def _learn_costs(self, batch: list[RunningRequest]) -> None:
        for running in batch:
            running.decoder.learn_costs()
        if self._model.timer is None:  # with a GPU this is within the time of the pass
            _lap(batch, "other")

    def _deliver_previous(self, delivery: Delivery[Any]) -> Iterator[Any]:
        if self._model.timer is None:  # a CPU has finished the pass by now
            return
        try:
            yield from delivery.deliver()
        except BaseException:
            self._model.synchronize()  # the caller gave up: let the GPU finish before its buffers are reused
            raise

    def _finish_exchange(
        self,
        batch: list[RunningRequest],
        steps: list[Step],
        samples: Sequence[Samples | LookaheadError],
        delivery: Delivery[Any],
    ) -> list[Gathered | LookaheadError]:
        timer = self._model.timer
        delivered_after = batch[0].timer.since_last_lap()
        # The last one first: once it has arrived, none of the others is waited for.
        parts = list(zip(batch, steps, samples, strict=True))
        gathered = [running.finish_exchange(step, each) for running, step, each in reversed(parts)][::-1]
        if timer is None:
            _lap(batch, "exchange")
        else:
            seconds = timer.seconds()
            for running in batch:
                running.timer.lap_of_pass(seconds, delivered_after, len(batch))
            delivery.plan(seconds)
        return gathered

    def _advance(
        self, batch: list[RunningRequest], steps: list[Step], gathered: Sequence[Gathered | LookaheadError]
    ) -> list[StepOutput | LookaheadError]:
        outputs: list[StepOutput | LookaheadError] = []
        for running, step, each in zip(batch, steps, gathered, strict=True):
            try:
                outputs.append(each if isinstance(each, LookaheadError) else running.advance(step, each))
            except LookaheadError as error:
                outputs.append(error)
        _lap(batch, "other")
        return outputs


def _lap(batch: list[RunningRequest], part: str) -> None:
    """Charge the time since the last lap to a part of the step, in equal shares to all requests."""
    for running in batch:
        running.timer.lap(part, len(batch))
