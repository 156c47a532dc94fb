"""The n-gram pool: n-grams that followed a token recently (paper, section 3.1, "n-gram pool")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolStatistics:
    """How much an n-gram pool holds, and how useful its guesses were.

    Attributes:
        num_keys: first tokens that have at least one n-gram.
        num_ngrams: n-grams in the pool.
        fan_out: n-grams per key, mean.
        hit_rate: fraction of the steps that had a guess to verify.
        accepted_length: accepted tokens that stood in a guess, mean over the steps that had guesses.
    """

    num_keys: int
    num_ngrams: int
    fan_out: float
    hit_rate: float
    accepted_length: float


class NGramPool:
    """n-grams of N tokens by their first token, the most recent first, at most G per first token.

    Args:
        ngram_size: N, >= 2.
        max_guesses: G, >= 0; with 0 the pool stays empty.

    Attributes:
        ngram_size: N.
        max_guesses: G.
    """

    def __init__(self, ngram_size: int, max_guesses: int):
        self.ngram_size = ngram_size
        self.max_guesses = max_guesses
        # The keys of each inner dict are the n-grams without their first token, the most recent last.
        self._ngrams: dict[int, dict[tuple[int, ...], None]] = {}
        self._num_lookups = 0
        self._num_hits = 0
        self._num_accepted = 0

    def insert(self, ngram: Sequence[int]) -> None:
        """Make `ngram`, N token ids, the most recent n-gram of its first token, and drop the oldest one beyond G."""
        if not self.max_guesses:
            return
        rest = tuple(ngram[1:])
        bucket = self._ngrams.setdefault(ngram[0], {})
        bucket.pop(rest, None)
        bucket[rest] = None
        if len(bucket) > self.max_guesses:
            del bucket[next(iter(bucket))]

    def insert_text(self, tokens: Sequence[int], first: int, first_end: int) -> None:
        """Insert, in order, the n-grams of `tokens` within two bounds.

        Args:
            tokens: token ids.
            first: index of the first token that an n-gram may begin with.
            first_end: index of the first token that an n-gram may end with.
        """
        size = self.ngram_size
        for end in range(max(first + size, first_end + 1), len(tokens) + 1):
            self.insert(tokens[end - size : end])

    def guesses(self, token: int) -> list[tuple[int, ...]]:
        """Return what may follow `token`: at most G tuples of N - 1 token ids, the most recent first."""
        return list(reversed(self._ngrams.get(token, ())))

    def expect(self, token: int) -> int | None:
        """Return the token that followed `token` most recently, or None."""
        bucket = self._ngrams.get(token)
        return next(reversed(bucket))[0] if bucket else None

    def record_step(self, path: Iterable[int], guess_nodes: set[int]) -> None:
        """Count one step for the statistics.

        Args:
            path: the accepted nodes.
            guess_nodes: the nodes of the tree that stand in a guess.
        """
        self._num_lookups += 1
        self._num_hits += bool(guess_nodes)
        self._num_accepted += sum(node in guess_nodes for node in path)

    def statistics(self) -> PoolStatistics:
        """Return how much the pool holds, and how useful its guesses were so far."""
        num_ngrams = sum(map(len, self._ngrams.values()))
        return PoolStatistics(
            num_keys=len(self._ngrams),
            num_ngrams=num_ngrams,
            fan_out=num_ngrams / len(self._ngrams) if self._ngrams else 0.0,
            hit_rate=self._num_hits / self._num_lookups if self._num_lookups else 0.0,
            accepted_length=self._num_accepted / self._num_hits if self._num_hits else 0.0,
        )
