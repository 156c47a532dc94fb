"""Agrees across replicas how many prompt tokens are read from the prefix cache.

Replicas may hold different prefixes. All read the longest length that every replica has, so that all feed the same
chunks of the prompt. Draft tables of earlier sequences are reused if all replicas hold the same ones. A tag, derived
from all that they have learned from, identifies them.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

from lp_runtime.decoder.draft_pool import DraftPool
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.model.kv_cache.prefix_cache import MIN_TOKENS, Prefix, PrefixCache
from lp_runtime.model.kv_cache.slots import STEP_TOKENS, CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request

TAG_BITS = 62  # a tag travels in a signed 64-bit integer
MAX_POINTS = 16  # lengths that each replica offers in the gather, if a prefix can only end where states are kept
CPU_FRACTION = 0.25  # of the free memory of a CPU that may hold prefixes; the rest is for other programs


def make_prefix_cache(model: ModelRunner, max_bytes: int | None, capacity: int | None) -> PrefixCache | None:
    """Return a replica's prefix cache; None if the settings turn it off. The model must have run a pass.

    `max_bytes` is 0 for no cache, None for all free memory (on a CPU, CPU_FRACTION of it). `capacity` are the tokens
    that fit into the replica's memory; if unknown, nothing is kept without `max_bytes`, and slots take nothing of it.
    """
    if max_bytes == 0:
        return None
    token_bytes = model.cache_bytes_per_token
    free = None if capacity is None else (capacity + STEP_TOKENS) * token_bytes
    if max_bytes is None:
        max_bytes = int((free or 0) * (1 if model.device.type == "cuda" else CPU_FRACTION))
    unit, lengths, min_rest = model.prefix_unit, model.rotary_lengths, model.min_rest
    return PrefixCache(max_bytes, free, token_bytes, unit, model.feeds_chains, lengths, min_rest)


def read_for_resume(model: ModelRunner, slot: CacheSlot, request: Request, capacity: int) -> None:
    """Copy a prompt's cached prefix into a slot before `ModelRunner.resume`, if the slot holds less.

    The slot may hold any tokens; `capacity` tokens must fit into it. Replicas may read different lengths: a resume only
    exchanges whether each replica is done.
    """
    if model.slots.prefixes is not None:
        prompt, lengths = list(request.prompt_ids), model.rotary_lengths
        length = lengths.prompt_length(len(prompt), len(prompt) + len(request.committed))
        prefix = model.slots.prefixes.find(prompt, request.cache_salt, length)
        if prefix.num_tokens > slot.num_known(prompt, length, lengths):
            model.begin(slot, capacity, prompt_length=length)
            slot.restore(prefix)


class PromptPrefix:
    """The part of a request's prompt that all replicas read from their prefix caches.

    Creating one runs a gather, unless there is neither a cache nor a draft table to agree on.
    """

    def __init__(self, cache: PrefixCache | None, request: Request, group: Group, pool: DraftPool):
        self.tag = self.num_read = self.num_shared = 0  # `num_read` is 0 before `read_into`
        self._cache = cache
        self._request = request
        self._is_alone = group.is_alone
        self._agreed, scope = Prefix(), request.draft_scope
        self._keeps_tables = cache is not None or scope is not None
        if not self._keeps_tables:
            return
        known = Prefix()
        # Log-probabilities need the whole prompt fed, and a resumed request reads its prefix in `read_for_resume`.
        if cache is not None and not request.prompt_logprobs and not request.committed:
            known = cache.find(request.prompt_ids, request.cache_salt, len(request.prompt_ids))
        tag = pool.find(known.tag, scope, request.lookahead.draft_tables_bytes)
        keeps_states = cache is not None and cache.keeps_states
        row = np.zeros(2 + (MAX_POINTS if keeps_states else 1), np.int64)
        lengths = known.lengths[: len(row) - 2]
        row[:2], row[2 : 2 + len(lengths)] = (tag, known.num_shared), lengths
        tags, shared, *lengths = gather_rows(row, group).T.tolist()
        if keeps_states:
            self._agreed = known.cut(max(set.intersection(*map(set, zip(*lengths, strict=True))), default=0))
        else:
            self._agreed = known.cut(min(lengths[0]))
        self.num_shared = min(shared)  # prompt tokens that all replicas have from other sequences, readable or not
        self.tag = tag if len(set(tags)) == 1 else 0  # names the draft tables to continue with; 0 for none

    def read_into(self, slot: CacheSlot) -> None:
        if self._cache is None or self._request.prompt_logprobs:
            return
        prefix, self._agreed = self._agreed, Prefix()  # what is evicted while the request goes on frees its memory
        if self._is_alone:  # look again: other requests may have stored more since, and no peer relies on the length
            prompt = self._request.prompt_ids
            prefix = self._cache.find(prompt, self._request.cache_salt, len(prompt))
            self.num_shared = prefix.num_shared
        self.num_read = prefix.num_tokens  # set even if memory runs out: peers expect this replica to read as much
        slot.restore(prefix)

    @property
    def num_to_point(self) -> int:
        """Tokens to feed after the read ones before storing layer states for later prompts; 0 for never.

        That is the end of what the prompt shares with cached sequences. A later prompt with the same beginning can then
        resume there.
        """
        if self._cache is None or not self._cache.keeps_states:
            return 0
        num_tokens = self.num_shared - self.num_read
        return num_tokens if num_tokens >= MIN_TOKENS else 0

    def keep(self, slot: CacheSlot, tag: int = 0) -> None:
        if self._cache is not None:
            salt = self._request.cache_salt
            self._cache.store(slot.cache, slot.tokens, slot.num_prefilled, salt, tag, slot.prompt_length)

    def next_tag(self, digest: int) -> int:
        """Return the tag for the finished sequence's draft tables; 0 if no later request can use them.

        `digest` is that of the sequence's final state. Replicas with equal earlier tags and digests have equal tables.
        """
        if not self._keeps_tables:
            return 0
        if self._is_alone:  # a lone replica computes no digests; a random tag is unique
            return secrets.randbits(TAG_BITS) | 1
        history = hashlib.blake2b(b"%d %d" % (self.tag, digest), digest_size=8).digest()
        return int.from_bytes(history, "big") >> (64 - TAG_BITS) | 1
