"""The draft tables of an engine: each serves one request at a time."""

from __future__ import annotations

from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables


class DraftPool:
    """Hands out draft tables to requests.

    Args:
        shared: tables that outlive requests; made when first asked for if not given.
    """

    def __init__(self, shared: DraftTables | None = None):
        self._shared = shared
        self._free: list[DraftTables] = []  # of requests that start empty; reused by the next ones
        self._in_use: set[int] = set()  # ids of acquired tables

    @property
    def num_in_use(self) -> int:
        """Tables that requests are using."""
        return len(self._in_use)

    def acquire(self, is_shared: bool, num_bytes: int) -> DraftTables:
        """Take tables for one request.

        Args:
            is_shared: whether the request wants the tables that outlive requests; it gets empty ones while another
                request uses them.
            num_bytes: size of tables that have to be made.
        """
        tables = self._take_shared(num_bytes) if is_shared else None
        if tables is None:
            tables = self._take_free(num_bytes)
            tables.clear()
        self._in_use.add(id(tables))
        return tables

    def _take_shared(self, num_bytes: int) -> DraftTables | None:
        self._shared = self._shared or DraftTables(num_bytes)
        return None if id(self._shared) in self._in_use else self._shared

    def _take_free(self, num_bytes: int) -> DraftTables:
        for place, tables in enumerate(self._free):
            if tables.num_bytes == num_bytes:
                return self._free.pop(place)
        self._free = []  # of other sizes: their memory is needed
        return DraftTables(num_bytes)

    def release(self, tables: DraftTables) -> None:
        """Take tables back from a request that has ended."""
        self._in_use.remove(id(tables))
        if tables is not self._shared:
            self._free.append(tables)
