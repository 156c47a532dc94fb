"""Who uses which draft_tables: one is for one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables


class DraftPool:
    """The draft_pool of a replica.

    Args:
        kept: one that lives for many requests, if there is one already.

    Attributes:
        lent: those that requests are using.
    """

    def __init__(self, kept: DraftTables | None = None):
        self._kept = kept
        self._forgetful: list[DraftTables] = []  # of requests that forget; used again by the next ones
        self.lent: list[DraftTables] = []

    def find(self, is_kept: bool, num_bytes: int) -> DraftTables:
        """One that no request is using.

        Args:
            is_kept: whether it is to be the one that lives for many requests; an empty one if that is lent.
            num_bytes: of one that has to be made.
        """
        if is_kept:
            self._kept = self._kept or DraftTables(num_bytes)
            if not _has(self.lent, self._kept):
                return self._kept
        free = [each for each in self._forgetful if not _has(self.lent, each)]
        draft_tables = next((each for each in free if each.num_bytes == num_bytes), None)
        if draft_tables is None:
            draft_tables = DraftTables(num_bytes)
            self._forgetful = [each for each in self._forgetful if not _has(free, each)] + [draft_tables]
        draft_tables.clear()
        return draft_tables

    def lend(self, draft_tables: DraftTables) -> None:
        """A request uses it from now on."""
        self.lent.append(draft_tables)

    def give(self, draft_tables: DraftTables) -> None:
        """A request uses it no more."""
        self.lent = [each for each in self.lent if each is not draft_tables]


def _has(draft_pool: Sequence[DraftTables], draft_tables: DraftTables) -> bool:
    return any(each is draft_tables for each in draft_pool)
