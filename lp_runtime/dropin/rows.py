"""The rows of a call of `generate`, decoded one after another, each as if alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.constraints.compiled import CompiledConstraint
from lp_runtime.decoder.decoder import Samples
from lp_runtime.decoder.sampler_factory import sampler_of
from lp_runtime.decoder.step import Step
from lp_runtime.distributed.exchange import broadcast_object, merge_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.dropin.callers_cache import CacheCopy
from lp_runtime.dropin.generate_call import GenerateCall
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import RequestError, RequestMemoryError, class_and_first_line
from lp_runtime.lookahead.state import Stop
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request


class NewTokens(NamedTuple):
    """New tokens of one row."""

    tokens: list[int]
    # Per token, the [V] processed and raw logits that it was chosen from; empty if not requested.
    scores: list[torch.Tensor]
    logits: list[torch.Tensor]
    # Keys, values and states of the row's tokens except the last; None if the call fills no cache.
    held: CacheCopy | None = None


class Recorder:
    """Recorder of the logits and scores that accepted tokens were chosen from; an engine's Observer."""

    def __init__(self, vocabulary_size: int, group: Group):
        self._size, self._group = vocabulary_size, group
        self._num_merged = 0
        self.scores: list[torch.Tensor] = []  # processed, [V] for each accepted token
        self.logits: list[torch.Tensor] = []  # the model's own, likewise

    def __call__(self, nodes: list[int], step: Step, rank: int, samples: Samples) -> None:
        """Record the accepted nodes of a step. Rows of nodes that another rank owns are -inf until `merge`."""
        row_of = {node: row for row, node in enumerate(step.shares[rank].owned.tolist())}
        for node in nodes:
            for recorded, values in ((self.scores, samples.scores), (self.logits, samples.logits)):
                row = row_of.get(node)
                missing = values.new_full((self._size,), float("-inf"))
                recorded.append(missing if row is None else values[row].clone())

    def merge(self) -> None:
        """Fill in other ranks' rows recorded since the last call. A collective: all ranks must call it."""
        first, self._num_merged = self._num_merged, len(self.scores)
        if not self._group.is_alone and first < self._num_merged:
            for recorded in (self.scores, self.logits):
                recorded[first:] = merge_rows(torch.stack(recorded[first:]), self._group).unbind()


@dataclass
class Rows:
    """The rows of a call, decoded one after another."""

    call: GenerateCall
    model: ModelRunner
    group: Group
    engine: Engine
    lookahead: LookaheadConfig
    sampling: SamplingConfig
    constraint: CompiledConstraint | None

    def decode(self) -> torch.Tensor | object:
        call = self.call
        try:
            rows = self._decode_rows()
        except RequestMemoryError as error:
            raise torch.OutOfMemoryError(str(error)) from error  # as `generate` does
        if call.streamer is not None:
            call.streamer.end()
        if call.cache is not None:
            call.fill_cache([each.held for each in rows if each.held is not None])
        scores = [torch.stack(each.scores).to(call.device) for each in rows] if call.wants_scores else None
        logits = [torch.stack(each.logits).to(call.device) for each in rows] if call.wants_logits else None
        return call.output([each.tokens for each in rows], scores, logits)

    def _decode_rows(self) -> list[NewTokens]:
        """Return the new tokens of all rows, each as long as `generate` would make it."""
        rows = [self._with_cache(row, self._decode_row(row)) for row in range(len(self.call.rows))]
        length = max(len(each.tokens) for each in rows)
        for row, each in enumerate(rows):
            if len(each.tokens) < length and not self.call.pads_rows:
                rest = self._decode_row(row, tuple(each.tokens), length)
                scores, logits = each.scores + rest.scores, each.logits + rest.logits
                rows[row] = self._with_cache(row, NewTokens(each.tokens + rest.tokens, scores, logits))
        return rows

    def _with_cache(self, row: int, new: NewTokens) -> NewTokens:
        if self.call.cache is None:
            return new
        model, prompt = self.model, self.call.rows[row]
        tokens = [*prompt, *new.tokens]
        slot = model.slots.acquire(len(tokens), tokens)
        for _ in model.resume(slot, prompt, new.tokens, len(tokens)):
            pass
        held = CacheCopy.of(slot.cache)
        model.slots.release(slot)
        return new._replace(held=held)

    def _decode_row(self, row: int, committed: tuple[int, ...] = (), length: int | None = None) -> NewTokens:
        """Decode one row and return its new tokens, without those that an earlier call committed.

        With a length, the row continues to that many new tokens, committed ones included; None to use the criteria.
        """
        call, model = self.call, self.model
        recorder = Recorder(model.vocabulary_size, self.group)
        prompt = call.rows[row]
        call.check_length(row, model.context_length)
        request = Request(
            prompt_ids=prompt,
            lookahead=self.lookahead,
            max_new_tokens=length or call.max_new_tokens,
            eos_token_ids=call.eos_token_ids,
            sampling=self.sampling,
            sample=call.samples[row],
            max_time=call.time_left(),
            committed=committed,
            constraint=self.constraint,
        )
        sampler = sampler_of(call.processors(row), model, request, call.do_sample)
        observe = recorder if call.wants_scores or call.wants_logits else None
        new_tokens: list[int] = []
        stop = self._stop(prompt, recorder) if length is None else None
        for event in self.engine.run(request, sampler, stop, observe=observe):
            if not isinstance(event, Report):
                new_tokens += event.token_ids
                if call.streamer is not None:
                    for token in event.token_ids:
                        call.streamer.put(torch.tensor([token]))
        recorder.merge()
        count = len(new_tokens)
        return NewTokens(new_tokens, recorder.scores[:count], recorder.logits[:count])

    def _stop(self, prompt: Sequence[int], recorder: Recorder) -> Stop | None:
        """Return the caller's other criteria as a stop condition, checked after every token; None without any.

        If ranks share the work, rank 0 checks the criteria and broadcasts the result. It cannot wait for the next
        step's exchange, because this step's tokens must not be streamed before the result is known.
        """
        if not self.call.criteria:
            return None
        text = list(prompt)
        group = self.group

        def ask(committed: Sequence[int]) -> int | None:
            for i, token in enumerate(committed, start=1):
                text.append(token)
                scores = None
                if self.call.wants_scores:
                    recorded = recorder.scores[: len(text) - len(prompt)]
                    scores = tuple(each[None].to(self.call.device) for each in recorded)
                if self.call.is_done(text, scores):
                    return i
            return None

        def stop(committed: Sequence[int]) -> int | None:
            answer: int | Exception | None = None
            recorder.merge()
            if group.rank == 0:
                try:
                    answer = ask(committed)
                except Exception as error:
                    if group.is_alone:
                        raise
                    answer = RequestError(f"a stopping criterion failed: {class_and_first_line(error)}")
            answer = broadcast_object(answer, group)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return stop
