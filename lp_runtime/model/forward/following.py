"""Leader and followers of a replica: shard 0 announces each forward pass, and all shards run it.

A follower does not know requests, trees or samples. Each announcement says what the pass feeds, how full the caches are
and which of them were freed. A follower's caches hold the keys and values of its slice of the heads.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from lp_runtime.distributed.shards import ShardLink
from lp_runtime.errors import ModelError, PassFailedError, ShardError, first_line
from lp_runtime.model.forward.passes import FeedFixed, Pass, Passes
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.utils.memory import is_out_of_memory

log = logging.getLogger(__name__)


class CacheState(NamedTuple):
    """State of one of shard 0's caches before a pass."""

    key: int  # identifies the cache; never reused
    capacity: int
    length: int  # committed tokens
    written: int  # tokens that earlier passes of the step have written after the committed ones


class Announcement(NamedTuple):
    """An announcement of a forward pass."""

    work: Pass
    caches: list[CacheState]
    gone: list[int]  # keys of caches that shard 0 has freed
    # Whether the pass is a captured one, which needs no memory; if it fails, the replica is lost.
    is_captured: bool = False
    # Whether the replica outlives any failure of the pass. It always outlives that memory runs out.
    may_fail: bool = False


def run_agreed(link: ShardLink, order: Announcement, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run a shard's part of a pass that all shards run; if it fails on some, all leave it.

    Raises the error of this shard; PassFailedError if only others have one; ShardError if they cannot leave the pass.
    """
    try:
        logits = run()
    except (ShardError, PassFailedError):
        raise
    except Exception as error:
        if not order.is_captured and (order.may_fail or is_out_of_memory(error)):
            link.fail_pass()
        raise
    if not order.is_captured:
        link.end_pass()
    return logits


class LeadingShard:
    """Shard 0's side of the link: runs each pass on all shards."""

    def __init__(self, link: ShardLink):
        self._link = link
        self._keys: weakref.WeakKeyDictionary[TreeCache, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self.can_capture = link.reducer.can_capture  # whether passes can be captured as CUDA graphs
        self._gone: list[int] = []  # keys of caches that were freed since the last pass
        self._lock = threading.Lock()  # an idle replica's worker thread runs passes while other threads call `tell`

    def run(self, passes: Passes, work: Pass, caches: Sequence[TreeCache]) -> torch.Tensor:
        """Run a pass on all shards.

        If memory runs out on some shards, all of them leave the pass, and this one raises torch.OutOfMemoryError.
        Raises ShardError if they cannot leave it, if a shard is gone, or if the pass fails otherwise on this one.
        """
        with self._lock:
            order = self._order(work, caches, is_captured=isinstance(work, FeedFixed) and passes.are_captured)
            try:
                return self._run(passes, order, caches)
            except PassFailedError:
                pass  # raise outside: the frames of this error hold the pass's tensors, and would be kept as context
            except ShardError:
                raise
            except Exception as error:
                if is_out_of_memory(error) and not order.is_captured:
                    raise
                self._link.close()
                raise ShardError(f"a pass failed on shard 0: {first_line(error)}") from error
        raise torch.OutOfMemoryError("memory has run out on another GPU of the replica")

    def attempt(self, passes: Passes, work: Pass) -> None:
        """Run a pass without caches on all shards; if it fails on some, report that but keep the replica.

        It must fail after its all-reduces, or before them on all shards. A failure does not undo the work of the shards
        on which it succeeded. It is a ModelError if it was on other shards only; an error on shard 0 is raised
        unchanged.
        """
        with self._lock:
            try:
                self._run(passes, self._order(work, (), may_fail=True), ())
            except PassFailedError as error:
                raise ModelError("it has failed on another GPU of the replica") from error

    def _run(self, passes: Passes, order: Announcement, caches: Sequence[TreeCache]) -> torch.Tensor:
        self._link.announce(order)
        return run_agreed(self._link, order, lambda: passes.run(order.work, caches))

    def _order(
        self, work: Pass, caches: Sequence[TreeCache], is_captured: bool = False, may_fail: bool = False
    ) -> Announcement:
        gone = [self._gone.pop() for _ in range(len(self._gone))]  # finalizers may append meanwhile
        states = [CacheState(self._key(each), each.capacity, each.length, each.place - each.length) for each in caches]
        return Announcement(work, states, gone, is_captured, may_fail)

    def _key(self, cache: TreeCache) -> int:
        key = self._keys.get(cache)
        if key is None:
            key = self._keys[cache] = next(self._numbers)
            weakref.finalize(cache, self._gone.append, key)
        return key

    def tell(self, message: object) -> None:
        """Announce any other message; `Follower.messages` yields it. Thread-safe, as is `run`."""
        with self._lock:
            self._link.announce(message)

    def close(self) -> None:
        """End the replica: its followers' `messages` raise ShardError."""
        self._link.close()


class Follower:
    """Another shard's side of the link: runs the passes that shard 0 announces."""

    def __init__(self, passes: Passes, num_layers: int, link: ShardLink):
        self._passes = passes
        self._num_layers = num_layers
        self._link = link
        self._caches: dict[int, TreeCache] = {}

    def messages(self) -> Iterator[object]:
        """Run announced passes; yield other messages. ShardError when shard 0, or a follower, is gone."""
        while True:
            message = self._link.listen()
            if isinstance(message, Announcement):
                self._run(message)
            else:
                yield message

    def close(self) -> None:
        """Leave the link; unless the replica has ended already, this loses it."""
        self._link.close()

    def _run(self, order: Announcement) -> None:
        """Run an announced pass; return if it has failed on some shards and all have left it."""
        for key in order.gone:
            self._caches.pop(key, None)
        try:
            run_agreed(self._link, order, lambda: self._passes.run(order.work, list(map(self._cache, order.caches))))
        except PassFailedError:
            return
        except ShardError:
            raise
        except Exception as error:
            if order.is_captured or not (order.may_fail or is_out_of_memory(error)):
                raise
            log.warning("%s", first_line(error))

    def _cache(self, state: CacheState) -> TreeCache:
        cache = self._caches.get(state.key)
        if cache is None:
            cache = self._caches[state.key] = TreeCache(self._num_layers, state.capacity)
        cache.place_at(state.length, state.written)
        if cache.capacity < state.capacity:
            cache.grow(state.capacity)
        return cache
