"""Draft tables of an engine, each lent to one request at a time.

Samples of one prompt are similar, so a sample starts with the tables of an earlier, finished sample. A repeated request
(same prompt, same sample) starts with empty tables, so that its steps repeat as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables

MAX_KEPT = 8  # tables of finished sequences, for requests that continue their text


class DraftPool:
    """Pool of draft tables that requests acquire and release.

    `shared` are tables that outlive requests; None to create them on first use.
    """

    def __init__(self, shared: DraftTables | None = None):
        self._shared = shared
        self._free: list[DraftTables] = []  # released without a tag; reused by later requests
        self._kept: OrderedDict[int, DraftTables] = OrderedDict()  # by tag, oldest first
        self._in_use: set[int] = set()  # ids of acquired tables
        self._decoded: dict[int, tuple[Hashable, set[int]]] = {}  # by id of tables: their prompt and its samples

    @property
    def num_in_use(self) -> int:
        """Number of tables that requests are using."""
        return len(self._in_use)

    def acquire(
        self, is_shared: bool, num_bytes: int, prompt: Hashable = None, sample: int = 0, tag: int = 0
    ) -> DraftTables:
        """Return tables for one request. They are in use until `release`.

        Args:
            is_shared: whether to use the tables that outlive requests; if another request has them, others are used.
            num_bytes: size of the tables; ignored for existing shared tables.
            prompt: key that samples of one prompt have in common; None to share nothing with other samples.
            sample: index of the request among the samples of its prompt.
            tag: names kept tables of a finished sequence, which are returned as they are; 0 for none.
        """
        tables = self._acquire_shared(num_bytes) if is_shared else self._acquire_kept(num_bytes, tag)
        if tables is None:
            tables = self._acquire_known(num_bytes, prompt, sample)
        if tables is None:
            tables = self._acquire_free(num_bytes)
            tables.clear()
            self._decoded[id(tables)] = prompt, {sample}
        self._in_use.add(id(tables))
        return tables

    def _acquire_known(self, num_bytes: int, prompt: Hashable, sample: int) -> DraftTables | None:
        """Return free tables that know other samples of a prompt, but not this one; None if none exist."""
        for place, tables in enumerate(self._free):
            known, samples = self._decoded[id(tables)]
            if prompt is not None and known == prompt and sample not in samples and tables.num_bytes == num_bytes:
                samples.add(sample)
                return self._free.pop(place)
        return None

    def _acquire_shared(self, num_bytes: int) -> DraftTables | None:
        self._shared = self._shared or DraftTables(num_bytes)
        return None if id(self._shared) in self._in_use else self._shared

    def _acquire_kept(self, num_bytes: int, tag: int) -> DraftTables | None:
        tables = self._kept.get(tag)
        return self._kept.pop(tag) if tables is not None and tables.num_bytes == num_bytes else None

    def has(self, tag: int, num_bytes: int) -> bool:
        """Whether tables of this tag and size are kept."""
        return tag in self._kept and self._kept[tag].num_bytes == num_bytes

    def _acquire_free(self, num_bytes: int) -> DraftTables:
        for place, tables in enumerate(self._free):
            if tables.num_bytes == num_bytes:
                return self._free.pop(place)
        for tables in self._free:  # of other sizes: free their memory
            del self._decoded[id(tables)]
        self._free = []
        return DraftTables(num_bytes)

    def release(self, tables: DraftTables, tag: int = 0) -> None:
        """Take tables back from a finished request.

        With a tag, they are kept under this name for a request that continues the text. Without (0), any request may
        reuse them.
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
