"""The draft tables of an engine: each serves one request at a time.

Samples of one prompt find much alike: a sample goes on with the tables of an earlier one that has ended. A request that
was decoded before, sample for sample, begins with empty tables again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables

MAX_KEPT = 8  # tables of ended sequences, for requests that go on from them


class DraftPool:
    """Hands out draft tables to requests.

    Args:
        shared: tables that outlive requests; made when first asked for if not given.
    """

    def __init__(self, shared: DraftTables | None = None):
        self._shared = shared
        self._free: list[DraftTables] = []  # of requests that start empty; reused by the next ones
        self._kept: OrderedDict[int, DraftTables] = OrderedDict()  # by tag, the oldest first
        self._in_use: set[int] = set()  # ids of acquired tables
        self._decoded: dict[int, tuple[Hashable, set[int]]] = {}  # by id of tables: prompt and samples that they know

    @property
    def num_in_use(self) -> int:
        """Tables that requests are using."""
        return len(self._in_use)

    def acquire(
        self, is_shared: bool, num_bytes: int, prompt: Hashable = None, sample: int = 0, tag: int = 0
    ) -> DraftTables:
        """Take tables for one request.

        Args:
            is_shared: whether the request wants the tables that outlive requests; it gets empty ones while another
                request uses them.
            num_bytes: size of the tables; those that outlive requests have theirs already.
            prompt: what samples of one prompt have in common; None for a request that shares nothing.
            sample: which of them the request is.
            tag: names the tables of an ended sequence, which the request gets as they are, if they are kept.
        """
        tables = self._take_shared(num_bytes) if is_shared else self._take_kept(num_bytes, tag)
        if tables is None:
            tables = self._take_known(num_bytes, prompt, sample)
        if tables is None:
            tables = self._take_free(num_bytes)
            tables.clear()
            self._decoded[id(tables)] = prompt, {sample}
        self._in_use.add(id(tables))
        return tables

    def _take_known(self, num_bytes: int, prompt: Hashable, sample: int) -> DraftTables | None:
        """Return free tables that know other samples of a prompt, but not this one; None if there are none."""
        for place, tables in enumerate(self._free):
            known, samples = self._decoded[id(tables)]
            if prompt is not None and known == prompt and sample not in samples and tables.num_bytes == num_bytes:
                samples.add(sample)
                return self._free.pop(place)
        return None

    def _take_shared(self, num_bytes: int) -> DraftTables | None:
        self._shared = self._shared or DraftTables(num_bytes)
        return None if id(self._shared) in self._in_use else self._shared

    def _take_kept(self, num_bytes: int, tag: int) -> DraftTables | None:
        tables = self._kept.get(tag)
        return self._kept.pop(tag) if tables is not None and tables.num_bytes == num_bytes else None

    def has(self, tag: int, num_bytes: int) -> bool:
        """Whether tables of an ended sequence are kept, of a size."""
        return tag in self._kept and self._kept[tag].num_bytes == num_bytes

    def _take_free(self, num_bytes: int) -> DraftTables:
        for place, tables in enumerate(self._free):
            if tables.num_bytes == num_bytes:
                return self._free.pop(place)
        for tables in self._free:  # of other sizes: their memory is needed
            del self._decoded[id(tables)]
        self._free = []
        return DraftTables(num_bytes)

    def release(self, tables: DraftTables, tag: int = 0) -> None:
        """Take tables back from a request that has ended.

        Args:
            tables: the tables.
            tag: under which they are kept for a request that goes on from there; 0 to keep nothing of them.
        """
        self._in_use.remove(id(tables))
        if tables is self._shared:
            return
        if not tag:
            self._free.append(tables)
            return
        self._kept[tag] = tables
        if len(self._kept) > MAX_KEPT:
            self._free.append(self._kept.popitem(last=False)[1])
