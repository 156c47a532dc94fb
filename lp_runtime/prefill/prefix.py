"""What of a request's prompt comes out of the prefix cache, as all replicas have agreed.

Replicas may hold different prefixes. How much is read is the least that any of them has, so that all feed the same
chunks of the prompt. Draft tables come along where all replicas hold the same ones: those of the sequence that the
prompt goes on from, as a tag that is a function of that sequence's whole history tells.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

from lp_runtime.decoder.draft_pool import DraftPool
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.model.capacity import STEP_TOKENS
from lp_runtime.model.kv_cache.prefix_cache import MIN_TOKENS, Prefix, PrefixCache
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request

TAG_BITS = 62
MAX_POINTS = 16  # of a prefix that ends where states are kept: replicas tell each other of so many such places
CPU_FRACTION = 0.25  # of a CPU's free memory that may hold prefixes: other programs want the rest


def make_prefix_cache(model: ModelRunner, max_bytes: int | None, capacity: int | None) -> PrefixCache | None:
    """Return a replica's prefix cache; None for none.

    Args:
        model: this replica's; has fed something.
        max_bytes: of the settings: 0 for none, None for what is free, on a CPU CPU_FRACTION of that.
        capacity: tokens that fit into the replica's memory; None if that is unknown, and then nothing is kept unless
            `max_bytes` says how much.
    """
    if max_bytes == 0:
        return None
    token_bytes = model.cache_bytes_per_token
    free = max_bytes or 0 if capacity is None else (capacity + STEP_TOKENS) * token_bytes
    usable = free if model.device.type == "cuda" else int(free * CPU_FRACTION)
    chunk = None if model.strict_tokens is None else model.prefill_chunk
    kept = usable if max_bytes is None else max_bytes
    return PrefixCache(kept, free, token_bytes, chunk, model.feeds_chains, model.rotary_lengths)


def read_for_resume(model: ModelRunner, slot: CacheSlot, request: Request, capacity: int) -> None:
    """Have a slot hold the longest prefix of a prompt that the cache or the slot has, for `ModelRunner.resume`.

    Args:
        model: this replica's.
        slot: may hold anything.
        request: the request; replicas may read different parts of it, since they exchange nothing meanwhile.
        capacity: tokens that must fit.
    """
    if model.slots.prefixes is not None:
        prompt, lengths = list(request.prompt_ids), model.rotary_lengths
        length = lengths.prompt_length(len(prompt), len(prompt) + len(request.committed))
        prefix = model.slots.prefixes.find(prompt, request.cache_salt, length)
        if prefix.num_tokens > slot.num_known(prompt, length, lengths):
            model.begin(slot, capacity, prompt_length=length)
            slot.restore(prefix)


class PromptPrefix:
    """A request's prefix in a replica's cache.

    Args:
        cache: the replica's; None if it keeps nothing.
        request: the request.
        group: the replicas that share the request's steps.
        pool: the replica's draft tables.

    Attributes:
        tag: names the draft tables that come along; 0 for none.
        num_read: tokens of the prompt that were read.
        num_shared: tokens of the prompt that all replicas have of other sequences, whether they can be read or not.

    Raises:
        ReplicaError: if a peer is gone.
    """

    def __init__(self, cache: PrefixCache | None, request: Request, group: Group, pool: DraftPool):
        self.tag = self.num_read = self.num_shared = 0
        self._cache, self._request, self._is_alone = cache, request, group.is_alone
        self._agreed = Prefix()
        # A prompt whose log-probabilities are wanted is fed whole; what resumes, each replica reads as far as it can.
        if cache is None or request.prompt_logprobs or request.committed:
            return
        found = cache.find(request.prompt_ids, request.cache_salt, len(request.prompt_ids))
        tag = found.tag if pool.has(found.tag, request.lookahead.draft_tables_bytes) else 0
        row = np.zeros(2 + (MAX_POINTS if cache.keeps_states else 1), np.int64)
        lengths = found.lengths[: len(row) - 2]
        row[:2], row[2 : 2 + len(lengths)] = (tag, found.num_shared), lengths
        tags, shared, *lengths = gather_rows(row, group).T.tolist()
        if cache.keeps_states:
            self._agreed = found.cut(max(set.intersection(*map(set, zip(*lengths, strict=True))), default=0))
        else:
            self._agreed = found.cut(min(lengths[0]))
        self.num_shared = min(shared)
        self.tag = tag if len(set(tags)) == 1 else 0

    def read_into(self, slot: CacheSlot) -> int:
        """Commit the prefix to a slot that is empty; return how many tokens it has."""
        if self._cache is None or self._request.prompt_logprobs:
            return 0
        prefix = self._agreed
        if self._is_alone:  # nobody else counts on it, and others may have ended since
            prompt = self._request.prompt_ids
            prefix = self._cache.find(prompt, self._request.cache_salt, len(prompt))
            self.num_shared = prefix.num_shared
        slot.restore(prefix)
        self.num_read = prefix.num_tokens
        return self.num_read

    @property
    def num_to_point(self) -> int:
        """Tokens behind those that were read up to where states are to be kept, for the next prompt; 0 for nowhere.

        That is where the prompt parts from what is kept: so a third prompt with the same beginning finds them.
        """
        if self._cache is None or not self._cache.keeps_states:
            return 0
        num_tokens = self.num_shared - self.num_read
        return num_tokens if num_tokens >= MIN_TOKENS else 0

    def keep(self, slot: CacheSlot, tag: int = 0) -> None:
        """Keep what a slot holds of the sequence.

        Args:
            slot: the sequence's.
            tag: as `next_tag` returns it, once the sequence has ended; 0 before.
        """
        if self._cache is not None:
            salt = self._request.cache_salt
            self._cache.store(slot.cache, slot.tokens, slot.num_prefilled, salt, tag, slot.prompt_length)

    def next_tag(self, digest: int) -> int:
        """Return the tag of the sequence's draft tables; 0 if nothing is kept.

        Args:
            digest: of the sequence's state at its end; replicas with equal digests, and tables that were equal before,
                have equal tables.
        """
        if self._cache is None:
            return 0
        if self._is_alone:  # digests are not chained then
            return secrets.randbits(TAG_BITS) | 1
        history = hashlib.blake2b(b"%d %d" % (self.tag, digest), digest_size=8).digest()
        return int.from_bytes(history, "big") >> (64 - TAG_BITS) | 1
