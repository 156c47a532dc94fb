"""Prefill of a request that continues an earlier attempt: feeds its prompt and its committed tokens.

Replicas may lack different parts of the text. After every chunk all replicas report whether they are done, so that no
replica waits for another longer than one chunk takes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import numpy as np

from lp_runtime.decoder.shared_error import shared_error
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import LookaheadError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import read_for_resume
from lp_runtime.request.request import Request
from lp_runtime.sampling.sampler import Sampler

REPLAYED_TOKENS = 64  # per pass: bounds the [n, V] logits, which are needed for every token


@dataclass
class Resume:
    """Prefill of a slot with a prompt and the tokens, at least one, that an earlier attempt committed."""

    model: ModelRunner
    request: Request
    slot: CacheSlot
    sampler: Sampler
    group: Group

    def in_step(
        self,
        capacity: int,  # tokens that must fit into the slot
        should_cancel: Callable[[], bool],  # asked after each chunk; if it is true on any replica, all stop
        # Calls a function that feeds a chunk; returns its result, or the error that ends the request on all replicas.
        attempt: Callable[[Callable[[], bool | None]], bool | LookaheadError | None],
    ) -> Generator[None, None, bool]:
        """Feed the tokens that the slot lacks, in chunks, in step with the other replicas.

        Yields between chunks, when other slots may be fed. Returns True once all replicas are done; False if they
        stopped early.
        """
        chunks = self._chunks(capacity)
        while True:
            outcome = attempt(lambda: next(chunks, True))
            is_done, error = outcome is True, outcome if isinstance(outcome, LookaheadError) else None
            if not is_done:
                yield
            row = np.array([is_done, should_cancel(), error is not None], np.int64)
            are_done, are_cancelled, have_failed = gather_rows(row, self.group).T.astype(np.bool_)
            if have_failed.any():
                raise shared_error(error, self.group)
            if are_done.all():
                return True
            if are_cancelled.any():
                return False

    def _chunks(self, capacity: int) -> Iterator[None]:
        request, model = self.request, self.model
        read_for_resume(model, self.slot, request, capacity)
        if self.sampler.is_ordered and self.group.rank == 0:
            yield from self._replay(capacity)
        else:
            yield from model.resume(self.slot, request.prompt_ids, request.committed, capacity)

    def _replay(self, capacity: int) -> Generator[None, None, None]:
        """Feed prompt and committed tokens, and repeat the earlier attempt's calls of ordered processors."""
        request, model, sampler, slot = self.request, self.model, self.sampler, self.slot
        model.begin(slot, capacity, prompt_length=len(request.prompt_ids))
        logits = yield from model.prefill_in_chunks(slot, request.prompt_ids)
        prefix = list(request.prompt_ids)
        sampler.replay(logits, prefix)
        rest = request.committed[:-1]
        while rest:
            yield
            num_fed = model.rotary_lengths.num_together(len(slot.tokens), min(len(rest), REPLAYED_TOKENS))
            chain, rest = TokenTree(rest[:num_fed], max_depth=0), rest[num_fed:]
            nodes = range(len(chain))
            for row in model.forward(StepInputs(slot, chain, nodes, nodes)).logits.split(1):
                prefix.append(request.committed[len(prefix) - len(request.prompt_ids)])
                sampler.replay(row, prefix)
