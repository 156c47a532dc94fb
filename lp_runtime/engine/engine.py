"""The decoding loop of a replica: requests one after another in concert with its peers, or, where it has none, several
in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.distributed.exchange import compile_exchange
from lp_runtime.distributed.partition import compile_partition
from lp_runtime.engine.calibration import Calibration
from lp_runtime.engine.delivery import Delivery
from lp_runtime.engine.draft_pool import DraftPool
from lp_runtime.engine.drafter_factory import make_drafter
from lp_runtime.engine.output import Event
from lp_runtime.engine.request import Request
from lp_runtime.engine.sampler_factory import make_sampler
from lp_runtime.engine.sequence import Member, Observer, Sequence
from lp_runtime.errors import LookaheadError
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.drafters.best_first.drafter import compile_kernels
from lp_runtime.lookahead.state import DecodingRules, DecodingState, Stop
from lp_runtime.model.runner import ModelRunner, result_of
from lp_runtime.sampling.sampler import Sampler, compile_sampler
from lp_runtime.sizing.budget import LearnedCosts, StepBudget, compile_budget
from lp_runtime.sizing.cost_model import assumed_times

MAX_NODES = 1 << 14  # of a tree, where nothing else limits it


def never_cancel() -> bool:
    """No."""
    return False


@dataclass(frozen=True)
class Arrival:
    """A request to be decoded together with others.

    Attributes:
        key: tells it from the others.
        request: what to decode.
        stop: see DecodingState.
        should_cancel: asked once a step, and between chunks of the prompt.
    """

    key: Hashable
    request: Request
    stop: Stop | None = None
    should_cancel: Callable[[], bool] = never_cancel


class Begun(NamedTuple):
    """A request before its prefill; `draft_tables` is what its drafts are made from, where they are made from any."""

    state: DecodingState
    budget: StepBudget
    draft_tables: DraftTables | None


class Engine:
    """Decodes requests on one replica. All replicas must be given the same requests in the same order.

    Args:
        model: this replica's.
        rank, num_replicas: its place in the group.
        exchange_device: where the group's backend wants its tensors.
        calibration: what was measured of the model; by default measured when a request needs it, and not kept.
        draft_tables: what is kept between requests that ask for it.
        reports_times_late: see Member; by default as this replica alone would.
    """

    def __init__(
        self,
        model: ModelRunner,
        rank: int,
        num_replicas: int,
        exchange_device: torch.device,
        calibration: Calibration | None = None,
        draft_tables: DraftTables | None = None,
        reports_times_late: bool | None = None,
    ):
        self._model = model
        reports_times_late = model.timer is not None if reports_times_late is None else reports_times_late
        self._member = Member(rank, num_replicas, exchange_device, reports_times_late)
        self._calibration = calibration or Calibration(model, rank, num_replicas, exchange_device, cache_dir=None)
        self._draft_pool = DraftPool(draft_tables)
        self._plain_kinds: set[Hashable] = set()
        self._learned: dict[tuple[bool, bool], LearnedCosts] = {}  # by whether steps are sized, and decoding is greedy

    def prepare(self, settings: LookaheadConfig) -> None:
        """Measure now what a request with these settings would have measured."""
        compile_budget()
        compile_sampler()
        if self._member.num_replicas > 1:
            compile_partition()
            compile_exchange()
        if settings.drafter == "full":
            compile_kernels()
            with self._model.scratch():
                if settings.is_auto:
                    self._calibration.max_step_tokens()
                if settings.prior == "vocabulary":
                    self._calibration.vocabulary()
            self._draft_pool.find(settings.draft_tables != "request", settings.draft_tables_bytes)

    def begin(self, request: Request, drawing: Sampler, stop: Stop | None) -> Begun:
        """The state of a request before its prefill, and what decides the size of its steps."""
        settings = request.lookahead
        noise = None if drawing.noise is None else (drawing.noise.seed, drawing.noise.sample)
        num_replicas = self._member.num_replicas
        draft_pool = []

        def draft_tables() -> DraftTables:
            draft_pool.append(self._draft_pool.find(settings.draft_tables != "request", settings.draft_tables_bytes))
            return draft_pool[0]

        with self._model.scratch():  # something may have to be measured
            limit = settings.budget
            if settings.is_auto:
                limit = min(filter(None, (limit, self._calibration.max_step_tokens())))
            drafter = make_drafter(
                settings, noise, num_replicas * (limit or MAX_NODES), draft_tables, self._calibration.vocabulary
            )
            num_nodes = drafter.max_nodes + drafter.max_committed
            times = self._calibration.times(num_nodes) if settings.is_auto else assumed_times(num_replicas, num_nodes)
        rules = DecodingRules(
            max_new_tokens=request.max_new_tokens,
            eos_token_ids=request.eos_token_ids,
            drafting=repr(settings),
            drawing=repr((request.sampling, request.sample, request.stop, request.logprobs)),
        )
        kind = (settings.is_auto, noise is None)
        learned = self._learned.setdefault(kind, LearnedCosts.nothing(num_replicas))
        budget = StepBudget(times, settings.is_auto, limit, learned)
        state = DecodingState(request.prompt_ids, rules, drafter, stop, request.committed, num_replicas == 1)
        return Begun(state, budget, next(iter(draft_pool), None))

    def run(
        self,
        request: Request,
        drawing: Sampler | None = None,
        stop: Stop | None = None,
        should_cancel: Callable[[], bool] = never_cancel,
        observe: Observer | None = None,
    ) -> Iterator[Event]:
        """Decode one request.

        Args:
            request: what to decode.
            drawing: how successors are drawn; by default as the request and the model's own defaults say.
            stop: see DecodingState.
            should_cancel: asked once a step, and between chunks of the prompt; when any replica's says yes, all stop.
            observe: told of every step.

        Yields:
            The run that each step committed, then the report.
        """
        one = _Running(self, request, drawing, stop, should_cancel, observe)
        telling = Delivery()
        try:
            run = result_of(one.decoding.prefill())
            if run:
                telling.events.append(run)
            while not one.decoding.is_over:
                if not telling.is_behind:
                    yield from telling.tell()
                (run,) = yield from self._step([one.decoding], telling)
                if isinstance(run, LookaheadError):
                    yield from telling.tell()
                    raise run
                telling.events.append(run)
            yield from telling.tell()
            yield one.decoding.report()
        finally:
            one.end()

    def run_batch(self, arrivals: Callable[[], Iterable[Arrival]]) -> Iterator[tuple[Hashable, Event | LookaheadError]]:
        """Decode requests as they arrive, several in one forward pass; on a replica without peers. Ends with the last.
        Between two steps, about a chunk is fed of the prompts that have arrived, in turns: nobody waits for all of a
        long one.

        Args:
            arrivals: asked between two steps for those that have arrived.

        Yields:
            (key, event): of every request the runs that steps committed, then the report, or what went wrong with it.
        """
        assert self._member.num_replicas == 1
        coming: dict[
            Hashable, tuple[_Running, Generator[None, None, StepOutput | None]]
        ] = {}  # their prompts are being fed
        running: dict[Hashable, _Running] = {}
        telling = Delivery()

        def note(key: Hashable, what: StepOutput | LookaheadError | None) -> None:
            if what is not None:
                telling.events.append((key, what))
            if isinstance(what, LookaheadError):
                running.pop(key).end()
            elif running[key].decoding.is_over:
                one = running.pop(key)
                one.end()
                telling.events.append((key, one.decoding.report()))

        try:
            while True:
                if not (running and telling.is_behind):
                    yield from telling.tell()
                for arrival in arrivals():
                    try:
                        one = _Running(self, arrival.request, None, arrival.stop, arrival.should_cancel, None)
                    except LookaheadError as error:
                        telling.events.append((arrival.key, error))
                    else:
                        coming[arrival.key] = one, one.decoding.prefill()
                if coming or not (running and telling.is_behind):
                    yield from telling.tell()
                num_prefilled_tokens = self._model.num_prefilled_tokens
                while coming and self._model.num_prefilled_tokens - num_prefilled_tokens < self._model.prefill_chunk:
                    key = next(iter(coming))
                    one, chunks = coming[key] = coming.pop(key)  # the others are next
                    try:
                        next(chunks)
                    except (StopIteration, LookaheadError) as end:
                        del coming[key]
                        running[key] = one
                        note(key, end.value if isinstance(end, StopIteration) else end)
                        yield from telling.tell()
                if running:
                    keys = list(running)
                    runs = yield from self._step([running[key].decoding for key in keys], telling)
                    for key, run in zip(keys, runs, strict=True):
                        note(key, run)
                elif not coming:
                    return
        finally:
            for one in (*running.values(), *(one for one, _ in coming.values())):
                one.end()

    def _step(
        self, together: list[Sequence], telling: Delivery
    ) -> Generator[Any, None, list[StepOutput | LookaheadError]]:
        """A step of requests that share a forward pass: the run of each, or what went wrong with it alone.

        Yields:
            what is to be told of earlier steps, while the device is at this one.
        """
        timer, num = self._model.timer, len(together)
        try:
            errors = self._launch(together)
        except Exception:  # a device without memory, for one
            yield from telling.tell()
            raise
        fine = [number for number in range(num) if number not in errors]
        if timer is None:
            for number in fine:
                together[number].start_exchange()
        else:
            try:
                yield from telling.tell()
            except BaseException:  # whoever was told goes; what the pass reads and writes is for others then
                self._model.synchronize()
                raise
        told = together[0].clock.since_last_lap()
        for number in fine:
            together[number].finish_exchange()
        if timer is None:
            _lap(together, "exchange")
        elif fine:
            seconds = timer.seconds()
            for one in together:
                one.clock.lap_of_pass(seconds, told, num)
            telling.choose(seconds)
        runs: list[StepOutput | LookaheadError] = [errors.get(number) for number in range(num)]
        for number in fine:
            try:
                runs[number] = together[number].advance()
            except LookaheadError as error:
                runs[number] = error
        _lap(together, "other")
        return runs

    def _launch(self, together: list[Sequence]) -> dict[int, LookaheadError]:
        """Propose, and have the device begin with what is to be found out; a CPU is done with it then.

        Returns:
            what went wrong with one alone, by its number.
        """
        timer, num = self._model.timer, len(together)
        for one in together:
            one.clock.start()
        for one in together:
            one.propose(num)
        _lap(together, "other")
        if timer is not None:
            timer.start()
        logits = self._model.forward_batch([one.fed for one in together])
        errors: dict[int, LookaheadError] = {}
        for number, (one, rows) in enumerate(zip(together, logits, strict=True)):
            try:
                one.draw(rows)
            except LookaheadError as error:
                errors[number] = error
        if timer is None:
            _lap(together, "forward")
            return errors
        timer.stop()
        for number, one in enumerate(together):
            if number not in errors:
                one.start_exchange()
        return errors


class _Running:
    """A request on a loop, and what it has borrowed."""

    def __init__(
        self,
        loop: Engine,
        request: Request,
        drawing: Sampler | None,
        stop: Stop | None,
        should_cancel: Callable[[], bool],
        observe: Observer | None,
    ):
        model = loop._model
        drawing = drawing or make_sampler(model, request, loop._plain_kinds)
        begun = loop.begin(request, drawing, stop)
        self._loop, self._draft_tables = loop, begun.draft_tables
        self.decoding = Sequence(
            model, request, drawing, begun.state, begun.budget, loop._member, should_cancel, observe
        )
        if begun.draft_tables is not None:
            loop._draft_pool.lend(begun.draft_tables)

    def end(self) -> None:
        """Give back what was borrowed."""
        loop = self._loop
        if self._draft_tables is not None:
            loop._draft_pool.give(self._draft_tables)
        loop._model.texts.give(self.decoding.text)


def _lap(together: list[Sequence], what: str) -> None:
    for one in together:
        one.clock.lap(what, len(together))
