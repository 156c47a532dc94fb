"""The n-gram pool: n-grams that recently followed a token (paper, section 3.1, "n-gram pool")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lp_runtime.lookahead.drafter import PoolStatistics


class NGramPool:
    """N-grams, N >= 2, by their first token, most recent first, at most G >= 0 per first token."""

    def __init__(self, ngram_size: int, max_guesses: int):
        self.ngram_size = ngram_size
        self.max_guesses = max_guesses
        # The keys of each inner dict are the n-grams without their first token, the most recent last.
        self._ngrams: dict[int, dict[tuple[int, ...], None]] = {}
        self._num_lookups = 0
        self._num_hits = 0
        self._num_accepted = 0

    def insert(self, ngram: Sequence[int]) -> None:
        """Make `ngram`, N token ids, the most recent one of its first token; drop the oldest beyond G."""
        if not self.max_guesses:
            return
        rest = tuple(ngram[1:])
        bucket = self._ngrams.setdefault(ngram[0], {})
        bucket.pop(rest, None)
        bucket[rest] = None
        if len(bucket) > self.max_guesses:
            del bucket[next(iter(bucket))]

    def insert_text(self, tokens: Sequence[int], first: int, first_end: int) -> None:
        """Insert the n-grams that begin at index `first` or later and end at `first_end` or later, in order."""
        size = self.ngram_size
        for end in range(max(first + size, first_end + 1), len(tokens) + 1):
            self.insert(tokens[end - size : end])

    def guesses(self, token: int) -> list[tuple[int, ...]]:
        """Return what may follow `token`: at most G tuples of N - 1 token ids, most recent first."""
        return list(reversed(self._ngrams.get(token, ())))

    def expect(self, token: int) -> int | None:
        """Return the token that most recently followed `token`, or None."""
        bucket = self._ngrams.get(token)
        return next(reversed(bucket))[0] if bucket else None

    def record_step(self, path: Iterable[int], guess_nodes: set[int]) -> None:
        """Count one step for the statistics, by its accepted nodes and the nodes that are part of a guess."""
        self._num_lookups += 1
        self._num_hits += bool(guess_nodes)
        self._num_accepted += sum(node in guess_nodes for node in path)

    def statistics(self) -> PoolStatistics:
        num_ngrams = sum(map(len, self._ngrams.values()))
        return PoolStatistics(
            num_keys=len(self._ngrams),
            num_ngrams=num_ngrams,
            fan_out=num_ngrams / len(self._ngrams) if self._ngrams else 0.0,
            hit_rate=self._num_hits / self._num_lookups if self._num_lookups else 0.0,
            accepted_length=self._num_accepted / self._num_hits if self._num_hits else 0.0,
        )
