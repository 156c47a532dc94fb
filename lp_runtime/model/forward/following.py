"""How the shards of a replica run the same passes: shard 0 announces each, the others follow.

A follower knows nothing of requests, trees and samples. It is told what every pass feeds, how full the caches are and
which of them are gone; its own caches hold the keys and values of its heads.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lp_runtime.distributed.shards import ShardLink
from lp_runtime.errors import ModelError, ShardError, first_line
from lp_runtime.model.forward.passes import Passes
from lp_runtime.model.kv_cache.cache import TreeCache

log = logging.getLogger(__name__)


class CacheState(NamedTuple):
    """How a cache of shard 0 is before a pass.

    Attributes:
        key: tells it from all other caches that there have been.
        capacity: tokens that fit.
        length: committed tokens.
        written: tokens that earlier passes of the step have written behind them.
    """

    key: int
    capacity: int
    length: int
    written: int


class Pass(NamedTuple):
    """An announcement of a forward pass.

    Attributes:
        kind: name of a method of Passes.
        caches: of each sequence.
        what: the method's further arguments.
        gone: keys of caches that are used no more.
        may_fail: whether the shards tell one another if it has worked; where other passes fail, the replica is lost.
    """

    kind: str
    caches: list[CacheState]
    what: Sequence[object]
    gone: list[int]
    may_fail: bool = False


class LeadingShard:
    """Shard 0's side: has all shards run a pass.

    Args:
        link: between the shards.

    Attributes:
        can_capture: whether passes, with the sums inside, can be captured as CUDA graphs.
    """

    def __init__(self, link: ShardLink):
        self._link = link
        self._keys: weakref.WeakKeyDictionary[TreeCache, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self.can_capture = link.reducer.can_capture
        self._gone: list[int] = []  # keys of caches that were freed since the last pass
        self._lock = threading.Lock()  # an idle replica's worker runs passes while others tell

    def run(self, passes: Passes, kind: str, caches: Sequence[TreeCache], what: Sequence[object]) -> torch.Tensor:
        """Run a pass on all shards; arguments and result as those of Passes.run.

        Raises:
            ShardError: if a shard is gone, or the pass fails on this one: the others wait inside it then.
        """
        with self._lock:
            self._link.announce(self._order(kind, caches, what))
            try:
                return passes.run(kind, caches, what)
            except ShardError:
                raise
            except Exception as error:
                self._link.close()
                raise ShardError(f"a pass failed on shard 0: {first_line(error)}") from error

    def attempt(self, passes: Passes, kind: str, caches: Sequence[TreeCache], what: Sequence[object]) -> None:
        """Do on all shards what may fail on some of them, which does not end the replica.

        Where it fails on one, what the others have done stays with them.

        Args:
            passes: of this shard.
            kind: what is done; where it fails it fails behind its sums, or before them on all shards.
            caches: that it uses.
            what: its further arguments.

        Raises:
            ShardError: if a shard is gone.
            ModelError: if it has failed on another shard alone. What fails on shard 0 is raised as it is.
        """
        with self._lock:
            self._link.announce(self._order(kind, caches, what, may_fail=True))
            try:
                passes.run(kind, caches, what)
            except ShardError:
                raise
            except Exception:
                self._link.smallest(False)
                raise
            if not self._link.smallest(True):
                raise ModelError("it has failed on another GPU of the replica")

    def _order(self, kind: str, caches: Sequence[TreeCache], what: Sequence[object], may_fail: bool = False) -> Pass:
        gone = [self._gone.pop() for _ in range(len(self._gone))]
        states = [CacheState(self._key(each), each.capacity, each.length, each.place - each.length) for each in caches]
        return Pass(kind, states, what, gone, may_fail)

    def _key(self, cache: TreeCache) -> int:
        key = self._keys.get(cache)
        if key is None:
            key = self._keys[cache] = next(self._numbers)
            weakref.finalize(cache, self._gone.append, key)
        return key

    def tell(self, message: object) -> None:
        """Announce what is no pass: `Follower.messages` yields it. Any thread may call this, and `run`."""
        with self._lock:
            self._link.announce(message)

    def close(self) -> None:
        """End the replica: its followers' `messages` end."""
        self._link.close()


class Follower:
    """Another shard's side: runs what shard 0 announces.

    Args:
        passes: of this shard's slice.
        num_layers: decoder layers of the model.
        link: between the shards.
    """

    def __init__(self, passes: Passes, num_layers: int, link: ShardLink):
        self._passes, self._num_layers, self._link = passes, num_layers, link
        self._caches: dict[int, TreeCache] = {}

    def messages(self) -> Iterator[object]:
        """Run announced passes, and yield what else is announced.

        Raises:
            ShardError: when shard 0, or another follower, is gone.
        """
        while True:
            message = self._link.listen()
            if isinstance(message, Pass):
                self._run(message)
            else:
                yield message

    def close(self) -> None:
        """Leave; the replica is lost then, unless it has ended."""
        self._link.close()

    def _run(self, order: Pass) -> None:
        for key in order.gone:
            self._caches.pop(key, None)
        caches = [self._cache(state) for state in order.caches]
        if not order.may_fail:
            self._passes.run(order.kind, caches, order.what)
            return
        try:
            self._passes.run(order.kind, caches, order.what)
            is_done = True
        except ShardError:
            raise
        except Exception as error:
            log.warning("%s", first_line(error))
            is_done = False
        self._link.smallest(is_done)

    def _cache(self, state: CacheState) -> TreeCache:
        """Return the cache that goes with one of shard 0's, as full as that one."""
        cache = self._caches.get(state.key)
        if cache is None:
            cache = self._caches[state.key] = TreeCache(self._num_layers, state.capacity)
        cache.place_at(state.length, state.written)
        if cache.capacity < state.capacity:
            cache.grow(state.capacity)
        return cache
