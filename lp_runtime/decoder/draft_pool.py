"""Draft tables of an engine, each lent to one request at a time.

Tables of finished sequences are kept under a tag, which names all that they have learned from. A request continues with
those of the sequence that its prompt continues, or else with the latest of its scope, if it has one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from lp_runtime.lookahead.drafters.best_first.corpus import NO_CORPUS, CorpusIndex
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables

MAX_KEPT = 8  # tables of finished sequences; the least recently used are dropped first
STORED_TAG = 1  # of tables from a file; the tags of sequences are random numbers or hashes


@dataclass(frozen=True)
class _Kept:
    """Tables of a finished sequence, and the scope of requests that they serve; see `DraftPool.release`."""

    tables: DraftTables
    scope: str | None


class DraftPool:
    """Pool of draft tables that requests acquire and release.

    `stored` are tables from a file, which serve requests of the scope ""; None without a file. The `corpus` serves all
    requests.
    """

    def __init__(self, stored: DraftTables | None = None, corpus: CorpusIndex = NO_CORPUS):
        self.corpus = corpus
        self._free: list[DraftTables] = []  # their content is not used again
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by tag, least recently used first
        self._in_use: set[int] = set()  # ids of acquired tables
        if stored is not None:
            self._kept[STORED_TAG] = _Kept(stored, "")

    @property
    def num_in_use(self) -> int:
        return len(self._in_use)

    def find(self, tag: int, scope: str | None, num_bytes: int) -> int:
        """Return the tag of the kept tables to continue with; 0 if there are none of this size.

        Args:
            tag: of the sequence that the prompt continues; 0 if it continues none.
            scope: of the request; None to continue with no other sequence's tables.
        """
        if tag in self._kept and self._kept[tag].tables.num_bytes == num_bytes:
            return tag
        if scope is not None:
            for latest, kept in reversed(self._kept.items()):
                if kept.scope == scope and kept.tables.num_bytes == num_bytes:
                    return latest
        return 0

    def most_learned(self, scope: str) -> DraftTables | None:
        """Return the tables of a scope that have learned most; None if there are none, or all are in use."""
        of_scope = [kept.tables for kept in self._kept.values() if kept.scope == scope]
        return max(of_scope, key=lambda tables: tables.stamp, default=None)

    def acquire(self, num_bytes: int, tag: int = 0) -> DraftTables:
        """Return tables for one request: the kept ones of this tag, as they are, else empty ones of this size."""
        kept = self._kept.pop(tag, None)
        if kept is None:
            tables = self._acquire_free(num_bytes)
            tables.clear()
        else:
            tables = kept.tables
        self._in_use.add(id(tables))
        return tables

    def _acquire_free(self, num_bytes: int) -> DraftTables:
        for place, tables in enumerate(self._free):
            if tables.num_bytes == num_bytes:
                return self._free.pop(place)
        self._free = []  # of other sizes: free their memory
        return DraftTables(num_bytes)

    def release(self, tables: DraftTables, tag: int = 0, scope: str | None = None) -> None:
        """Take tables back from a finished request.

        Args:
            tag: name to keep them under; 0 to forget their content.
            scope: of the requests that may continue with them; None for those that continue the sequence only.
        """
        self._in_use.remove(id(tables))
        if not tag:
            self._free.append(tables)
            return
        self._kept[tag] = _Kept(tables, scope)
        if len(self._kept) > MAX_KEPT:
            _, oldest = self._kept.popitem(last=False)
            self._free.append(oldest.tables)
