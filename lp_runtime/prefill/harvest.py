"""Prefill that also collects top-k candidates of prompt tokens, for the drafter's first steps.

The prefill computes the hidden states of all prompt tokens anyway; harvesting adds the head for the harvested tokens.
Each replica computes the head for its share of them, and one gather gives all candidates to all replicas.

Letters: P tokens of the prompt, n of them harvested, R replicas, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prompt_feeder import PromptFeeder
from lp_runtime.sampling.sampler import Sampler

MAX_LOGITS = 1 << 26  # numbers: logits of one chunk in memory


class PromptHarvest(PromptFeeder):
    """Feeds a prompt, and keeps the top-k candidates of its last n tokens.

    Args:
        num_prompt: P, those that are to be fed.
        num_harvested: n; P if that is less.
        group: the replicas that share the request's steps; rank p % R computes the candidates of token p.
    """

    def __init__(
        self,
        model: ModelRunner,
        slot: CacheSlot,
        num_prompt: int,
        num_harvested: int,
        sampler: Sampler,
        group: Group,
    ):
        super().__init__(model, slot)
        self._num_prompt, self._first = num_prompt, max(0, num_prompt - num_harvested)
        self._sampler, self._group = sampler, group
        self._num_fed = 0
        self._packed: list[torch.Tensor] = []  # candidates of this replica's tokens, on its device

    @property
    def chunk_tokens(self) -> int:
        max_tokens = max(1, MAX_LOGITS * self._group.size // self._model.vocabulary_size)
        return min(super().chunk_tokens, max_tokens)

    def feed(self, chunk: Sequence[int]) -> torch.Tensor:
        places = np.arange(self._num_fed, self._num_fed + len(chunk))
        mine = places[(places >= self._first) & (places % self._group.size == self._group.rank)] - self._num_fed
        logits = self._model.feed_prompt(self._slot, chunk, [*mine.tolist(), len(chunk) - 1])
        if len(mine):
            self._packed.append(self._sampler.pack_candidates(logits[:-1]))
        self._num_fed += len(chunk)
        return logits[-1:]

    def share(self) -> np.ndarray:
        """Gather the [n, ENTRY] int32 top-k candidates of the last n tokens; return them on every replica."""
        size, num = self._group.size, self._num_prompt - self._first
        width = self._sampler.width
        mine = torch.cat(self._packed).cpu().numpy() if self._packed else np.zeros((0, width), np.int64)
        sent = np.zeros((-(-num // size), width), np.int64)  # equal sizes on all replicas, as the gather needs
        sent[: len(mine)] = mine
        rows = gather_rows(sent.reshape(-1), self._group).reshape(size, -1, width)
        places = np.arange(self._first, self._num_prompt)
        order = np.zeros(num, np.int64)  # index of each token among its replica's tokens
        for rank in range(size):
            owned = places % size == rank
            order[owned] = np.arange(owned.sum())
        entries = self._sampler.unpack(rows[places % size, order])[2]
        assert entries is not None  # tokens are harvested only for a drafter that uses candidates
        return entries
