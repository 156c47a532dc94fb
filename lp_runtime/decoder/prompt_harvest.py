"""The top-k candidates behind a prompt's tokens, from the prefill: what a drafter knows before its first step.

The model computes hidden states of all tokens of a prompt anyway; what is added is its head, for the tokens that are
harvested. Each replica computes it for its part of them, and one gather makes all replicas know all.

Letters: P tokens of the prompt, n of them harvested, R replicas, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.drafter import Drafter
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sizing.prompt_rows import num_paying

MAX_HARVESTED = 1 << 13  # tokens: draft tables of the default size hold what so many leave
MAX_LOGITS = 1 << 26  # numbers that a chunk keeps at once


def num_to_harvest(
    request: Request, drafter: Drafter, model: ModelRunner, calibration: Calibration, num_replicas: int
) -> int:
    """Return of how many of a prompt's last tokens the top-k candidates are worth what they cost.

    Args:
        request: the request.
        drafter: the request's.
        model: this replica's. With exactness=strict nothing is harvested: a head that is computed for other tokens,
            too, may round otherwise.
        calibration: what was measured of the model; asked, on all replicas alike, if steps are sized.
        num_replicas: R.
    """
    num_tokens = min(len(request.prompt_ids), MAX_HARVESTED) if request.lookahead.prompt_top_k else 0
    if not num_tokens or not drafter.learns_prompt or model.strict_tokens is not None or request.committed:
        return 0
    if not request.lookahead.is_auto:
        return num_tokens
    step_ns = int(calibration.times(1)[:, 1].min())
    return num_paying(num_tokens, request.max_new_tokens, step_ns, calibration.harvest_ns(), num_replicas)


class PromptHarvest:
    """Feeds a prompt and keeps the top-k candidates behind its last n tokens.

    Args:
        model: this replica's.
        slot: has begun, and is empty.
        prompt: [P] token ids, at least one.
        num_harvested: n, 0 to P.
        sampler: the request's.
        group: the replicas that share the request's steps; token p of the prompt is that of rank p % R.

    Attributes:
        chunk_tokens: tokens of the prompt that are fed at once.
    """

    def __init__(
        self,
        model: ModelRunner,
        slot: CacheSlot,
        prompt: Sequence[int],
        num_harvested: int,
        sampler: Sampler,
        group: Group,
    ):
        self._model, self._slot, self._prompt = model, slot, prompt
        self._first = len(prompt) - num_harvested
        self._sampler, self._group = sampler, group
        self._packed: list[torch.Tensor] = []  # of this replica's tokens, on its device
        max_tokens = max(1, MAX_LOGITS * group.size // model.vocabulary_size)
        self.chunk_tokens = min(model.prefill_chunk, max_tokens)

    def prefill_in_chunks(self) -> Generator[None, None, torch.Tensor]:
        """Feed and commit the prompt, `chunk_tokens` tokens at a time.

        Yields:
            None between chunks; other slots may be fed meanwhile.

        Returns:
            [1, V] float32 logits of the last token.
        """
        prompt, size = self._prompt, self._group.size
        for start in range(0, len(prompt), self.chunk_tokens):
            if start:
                yield
            chunk = prompt[start : start + self.chunk_tokens]
            places = np.arange(start, start + len(chunk))
            mine = places[(places >= self._first) & (places % size == self._group.rank)] - start
            logits = self._model.feed_prompt(self._slot, chunk, [*mine.tolist(), len(chunk) - 1])
            if len(mine):
                self._packed.append(self._sampler.pack_candidates(logits[:-1]))
        return logits[-1:]

    def share(self) -> np.ndarray:
        """Return the [n, ENTRY] int32 top-k candidates behind the prompt's last n tokens, on every replica.

        Raises:
            ReplicaError: if a peer is gone.
        """
        size, num = self._group.size, len(self._prompt) - self._first
        width = self._sampler.width
        mine = torch.cat(self._packed).cpu().numpy() if self._packed else np.zeros((0, width), np.int64)
        sent = np.zeros((-(-num // size), width), np.int64)  # as many rows on every replica
        sent[: len(mine)] = mine
        rows = gather_rows(sent.reshape(-1), self._group).reshape(size, -1, width)
        places = np.arange(self._first, len(self._prompt))
        order = np.zeros(num, np.int64)  # of each place among those of its replica
        for rank in range(size):
            owned = places % size == rank
            order[owned] = np.arange(owned.sum())
        entries = self._sampler.unpack(rows[places % size, order])[2]
        assert entries is not None  # whoever harvests wants top-k candidates
        return entries
