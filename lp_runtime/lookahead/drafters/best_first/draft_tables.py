"""The draft tables: top-k candidates by context, committed text, and acceptance counts of candidates.

Draft tables live for one request or for many, which share the text and the counts, and top-k candidates within a
conversation. Their size is bounded, and they overwrite the oldest content.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lp_runtime.lookahead.drafters.best_first import tables
from lp_runtime.lookahead.drafters.best_first.corpus import CorpusIndex
from lp_runtime.lookahead.drafters.best_first.estimates import (
    OCTAVE,
    ONE,
    PRIOR_WEIGHT,
    SLOPE_BITS,
    make_rates,
)
from lp_runtime.lookahead.drafters.best_first.features import NUM_FEATURES, PART_OF
from lp_runtime.lookahead.drafters.best_first.starting_rates import (
    CORPUS,
    CORPUS_SLOPE,
    CORPUS_WEIGHT,
    GREEDY,
    UNIT,
    StartingRates,
)
from lp_runtime.lookahead.drafters.best_first.tables import EMPTY_HASH, NUM_HASHES, WAYS
from lp_runtime.lookahead.top_k import ENTRY, VocabularyPrior

LINE_BYTES = 64  # of a CPU cache line
SLOT_BYTES = 8 + 4 * ENTRY
TOKEN_BYTES = 12 + 16 * 2 * tables.MAX_GRAM  # of the text: a token, its fork, two slots for each n-gram (half full)
MIN_TEXT_TOKENS = 64  # minimum length of the text buffer
FORMAT = 13  # version of saved draft tables


def _power_of_two(limit: int) -> int:
    """Return the largest power of two up to `limit`, but at least WAYS."""
    return max(WAYS, 1 << (max(1, limit).bit_length() - 1))


def _make_text(num_tokens: int) -> tables.TextIndex:
    """Return an empty text index that holds `num_tokens`, a power of two."""
    num_ngrams = _power_of_two(2 * tables.MAX_GRAM * num_tokens)
    keys, places, forks, buffer = _make_zeros(
        ((num_ngrams,), np.int64), ((num_ngrams, 1), np.int64), ((num_tokens,), np.int64), ((num_tokens,), np.int32)
    )
    span, hashes = np.zeros(2, np.int64), np.zeros((1, NUM_HASHES), np.int64)
    return tables.TextIndex(buffer, span, hashes, keys, places, forks)


def _make_zeros(*kinds: tuple[tuple[int, ...], type]) -> list[np.ndarray]:
    """Return zero arrays of the (shape, dtype), aligned to cache lines in one block, for large pages."""
    sizes = [-(-math.prod(shape) * np.dtype(dtype).itemsize // LINE_BYTES) * LINE_BYTES for shape, dtype in kinds]
    block = np.zeros(sum(sizes) + LINE_BYTES, np.uint8)
    start = -block.ctypes.data % LINE_BYTES
    arrays: list[np.ndarray] = []
    for (shape, dtype), size in zip(kinds, sizes, strict=True):
        arrays.append(block[start : start + math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape))
        start += size
    return arrays


class DraftTables:
    """The best-first drafter's memory, of approximately `num_bytes`; more while it holds a longer text."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        num_slots = _power_of_two(num_bytes * 3 // 4 // SLOT_BYTES)
        entries, keys = _make_zeros(((num_slots, ENTRY), np.int32), ((num_slots,), np.int64))
        self.top_k = tables.TopKTable(keys, entries)
        self._num_text_tokens = max(_power_of_two(num_bytes // 4 // TOKEN_BYTES), MIN_TEXT_TOKENS)
        self.text = _make_text(self._num_text_tokens)
        self.rates = make_rates()
        self._stamp = 0
        self._begins = True  # whether the next text is the first one of a request
        self._temperature = 1.0  # of the stored margins
        self.start(GREEDY)

    def drafts(self, vocabulary: VocabularyPrior, corpus: CorpusIndex) -> tables.DraftArrays:
        """Return the tables' arrays together with a vocabulary prior and a corpus."""
        return tables.DraftArrays(self.top_k, self.text, vocabulary, corpus)

    def clear(self) -> None:
        """Forget all stored content and counts, without reallocating arrays, except those of a long text."""
        self.top_k.keys[:] = 0
        if len(self.text.buffer) > self._num_text_tokens:
            self.text = _make_text(self._num_text_tokens)
        self.text.keys[:] = 0
        self.text.span[:] = 0
        self.text.buffer[:] = 0
        self.text.forks[:] = 0
        for counted in self._counted().values():
            counted[:] = 0
        self._stamp = 0
        self.estimate()

    def start(self, starting: StartingRates, temperature: float = 1.0) -> None:
        """Begin a request with these starting rates; earlier counts still apply.

        `temperature` is the divisor of the request's logits. Top-k candidates of another one are forgotten.
        """
        self._begins = True
        if temperature != self._temperature:
            self.top_k.keys[:] = 0
        self._temperature = temperature
        self.rates.prior[:] = np.array(starting.rates + CORPUS) * ONE // UNIT
        self.rates.slope[:] = np.rint(np.array((*starting.slopes, CORPUS_SLOPE)) * (1 << SLOPE_BITS))[PART_OF]
        self.rates.weight[:] = np.rint(np.array((*starting.weights, CORPUS_WEIGHT)) * OCTAVE / math.log(2))[PART_OF]
        self.rates.bias[:] = np.rint(np.array(starting.bias) * OCTAVE / math.log(2))
        self.estimate()

    def begin_text(self, tokens: Sequence[int]) -> None:
        """Begin a new text with `tokens`; n-grams do not extend into the previous text.

        Top-k candidates are forgotten unless the text continues the previous one, as the next turn of a conversation
        does. Those of another text mislead: they came after the same few tokens only.
        """
        if self._begins and not self._continues(tokens):
            self.top_k.keys[:] = 0
        num_left = self._num_text_tokens - len(tokens) - tables.MAX_MATCH - 1
        if self._begins and len(self.text.buffer) > self._num_text_tokens and num_left >= 0:
            self._shrink(num_left)
        self._begins = False
        self.ensure_capacity(len(tokens))  # next to the previous text
        self._begin_text(np.array(tokens, dtype=np.int64))

    def _continues(self, tokens: Sequence[int]) -> bool:
        """Return whether a text begins like the previous one, for at least half of that one's length."""
        first, end = self.text.span.tolist()
        num_needed = (end - first + 1) // 2
        if len(tokens) < num_needed:
            return False
        places = np.arange(first, first + num_needed) & (len(self.text.buffer) - 1)
        return bool((self.text.buffer[places] == np.array(tokens[:num_needed])).all())

    def _shrink(self, num_kept: int) -> None:
        """Give back the memory of an earlier long text, but keep its last tokens."""
        old, (_, end) = self.text, self.text.span.tolist()
        start = max(0, end - min(num_kept, len(old.buffer)))
        held = old.buffer[np.arange(start, end) & (len(old.buffer) - 1)].astype(np.int64)
        self.text = _make_text(self._num_text_tokens)
        self.text.span[:] = start
        self._begin_text(held)

    def append_text(self, tokens: Sequence[int]) -> None:
        self.ensure_capacity(len(tokens))
        tables.append_text(self.text, np.array(tokens, dtype=np.int64))

    def _begin_text(self, tokens: np.ndarray) -> None:
        self.text.span[0] = self.text.span[1]
        self.text.hashes[:] = 0
        self.text.hashes[0, 0] = EMPTY_HASH
        tables.append_text(self.text, tokens)

    def ensure_capacity(self, num_tokens: int) -> None:
        """Replace `text` by a larger copy if its latest text would not fit with `num_tokens` more.

        The tokens of a request's text cost a fraction of their keys and values, so none of them is dropped.
        """
        old = self.text
        first, end = old.span.tolist()
        capacity = len(old.buffer)
        oldest = max(0, end - capacity)
        num_needed = end - max(first, oldest) + num_tokens + tables.MAX_MATCH + 1
        if num_needed <= capacity:
            return
        held = old.buffer[np.arange(oldest, end) & (capacity - 1)].astype(np.int64)
        self.text = _make_text(1 << (num_needed - 1).bit_length())
        self.text.span[:] = oldest
        latest = max(first - oldest, 0)
        self._begin_text(held[:latest])
        self._begin_text(held[latest:])

    @property
    def stamp(self) -> int:
        """The latest stamp: how many steps the tables have learned from."""
        return self._stamp

    def next_stamp(self) -> int:
        """Return a new stamp, an increasing number that tells the age of stored entries."""
        self._stamp += 1
        return self._stamp

    def estimate(self) -> None:
        rates = self.rates
        np.floor_divide(rates.accepted * ONE + rates.prior * PRIOR_WEIGHT, rates.tried + PRIOR_WEIGHT, out=rates.rate)

    def _counted(self) -> dict[str, np.ndarray]:
        rates = self.rates
        return {
            "tried": rates.tried,
            "accepted": rates.accepted,
            "copies": rates.copies,
        }

    def _saved(self) -> dict[str, np.ndarray]:
        return {
            "text_buffer": self.text.buffer,
            "text_span": self.text.span,
            "text_hashes": self.text.hashes,
            "text_keys": self.text.keys,
            "text_places": self.text.places,
            "text_forks": self.text.forks,
            **self._counted(),
        }

    def dump(self, vocabulary_size: int) -> bytes:
        """Serialize everything for `load`; `vocabulary_size` identifies the model."""
        file = io.BytesIO()
        np.savez(
            file,
            format=FORMAT,
            num_bytes=self.num_bytes,
            vocabulary_size=vocabulary_size,
            num_features=NUM_FEATURES,
            stamp=self._stamp,
            **self._saved(),  # type: ignore[arg-type]  # no array is named allow_pickle, numpy's keyword
        )
        return file.getvalue()

    @classmethod
    def load(cls, data: bytes, num_bytes: int, vocabulary_size: int) -> DraftTables:
        """Return draft tables from the bytes that `dump` returned.

        Raises ValueError if they are something else, damaged, or of another size, version or vocabulary.
        """
        draft_tables = cls(num_bytes)
        draft_tables.restore(_read_arrays(data, num_bytes, vocabulary_size), vocabulary_size)
        return draft_tables

    def restore(self, arrays: Mapping[str, np.ndarray], vocabulary_size: int) -> None:
        """Replace the content by the arrays saved by `dump`; all token ids must be below `vocabulary_size`.

        Raises ValueError if an array is missing, has another shape or dtype, or contains an unknown token id.
        """
        num_tokens = np.size(arrays.get("text_buffer", ()))
        if num_tokens > self._num_text_tokens and num_tokens == _power_of_two(num_tokens):
            self.text = _make_text(num_tokens)
        for name, target in self._saved().items():
            value = arrays.get(name)
            if value is None or value.shape != target.shape or value.dtype != target.dtype:
                raise ValueError("it is damaged")
            target[:] = value
        has_known_tokens = self.text.buffer.min() >= 0 and self.text.buffer.max() < vocabulary_size
        counts = np.array([self.rates.accepted, self.rates.tried - self.rates.accepted])
        has_possible_counts = counts.min() >= 0 and self.rates.copies.min() >= 0
        if not (has_known_tokens and has_possible_counts):
            raise ValueError("it is damaged")
        self._stamp = int(arrays["stamp"])
        self.estimate()


def stored_stamp(path: Path) -> int:
    """Return the stamp of saved draft tables; -1 if the file is something else, or does not exist."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            return int(saved["stamp"])
    except Exception:  # a broken archive may raise anything
        return -1


def _read_arrays(data: bytes, num_bytes: int, vocabulary_size: int) -> dict[str, np.ndarray]:
    """Return the arrays of saved draft tables by name; ValueError if they do not match the arguments."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as saved:
            arrays = {name: saved[name] for name in saved.files}
        version = (int(arrays["format"]), int(arrays.get("num_features", 0)))
        size, vocabulary, _ = (int(arrays[name]) for name in ("num_bytes", "vocabulary_size", "stamp"))
    except Exception as error:  # a broken archive may raise anything
        raise ValueError("it is not saved draft tables") from error
    if version != (FORMAT, NUM_FEATURES):
        raise ValueError("it was saved by another version")
    if size != num_bytes:
        raise ValueError(f"it was saved with draft_tables_bytes={size}")
    if vocabulary != vocabulary_size:
        raise ValueError(f"it is of a model with {vocabulary} tokens, not {vocabulary_size}")
    return arrays
