"""Who uses which memory: one is for one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

from lp_runtime.lookahead.drafts import Memory


class Memories:
    """The memories of a replica.

    Args:
        kept: one that lives for many requests, if there is one already.

    Attributes:
        lent: those that requests are using.
    """

    def __init__(self, kept: Memory | None = None):
        self._kept = kept
        self._forgetful: list[Memory] = []  # of requests that forget; used again by the next ones
        self.lent: list[Memory] = []

    def find(self, is_kept: bool, num_bytes: int) -> Memory:
        """One that no request is using.

        Args:
            is_kept: whether it is to be the one that lives for many requests; an empty one if that is lent.
            num_bytes: of one that has to be made.
        """
        if is_kept:
            self._kept = self._kept or Memory(num_bytes)
            if not _has(self.lent, self._kept):
                return self._kept
        free = [each for each in self._forgetful if not _has(self.lent, each)]
        memory = next((each for each in free if each.num_bytes == num_bytes), None)
        if memory is None:
            memory = Memory(num_bytes)
            self._forgetful = [each for each in self._forgetful if not _has(free, each)] + [memory]
        memory.clear()
        return memory

    def lend(self, memory: Memory) -> None:
        """A request uses it from now on."""
        self.lent.append(memory)

    def give(self, memory: Memory) -> None:
        """A request uses it no more."""
        self.lent = [each for each in self.lent if each is not memory]


def _has(memories: Sequence[Memory], memory: Memory) -> bool:
    return any(each is memory for each in memories)
