"""What drafts are made from: the tables of runners-up and of text, and how often what they said came true.

A draft_tables lives for one request, or for many; either way it is bounded in bytes, and forgets what is oldest.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np

from lp_runtime.lookahead.drafters.best_first import tables
from lp_runtime.lookahead.drafters.best_first.candidates import (
    MAX_AGREEING,
    NUM_FEATURES,
    NUM_LENGTHS,
    NUM_NOISE_BINS,
    NUM_PROMISES,
    ONE,
    PRIOR_WEIGHT,
    Rates,
)
from lp_runtime.lookahead.drafters.best_first.tables import EMPTY_HASH, NUM_HASHES, NUM_ORDERS, WAYS, K

LINE = 64  # bytes
SLOT_BYTES = 8 + 4 * tables.ENTRY
TEXT_BYTES = 4 + 16 * 2 * tables.MAX_GRAM  # a token and its n-grams, half of whose slots are in use
FORMAT = 2  # of saved draft tables
SHAPE = (NUM_ORDERS, NUM_FEATURES, K, NUM_PROMISES)

# Prior estimates of acceptance: of an entry's first token by its margin, from wide to narrow; of the others by their
# gap, from none to wide, and by rank; times a factor by order, the vocabulary last.
PRIOR_FIRST = (0.9, 0.85, 0.75, 0.6, 0.45, 0.35, 0.3, 0.3, 0.3)
PRIOR_OTHERS = (0.4, 0.38, 0.35, 0.3, 0.2, 0.12, 0.06, 0.02, 0.01)
PRIOR_BY_RANK = (1.0, 1.0, 0.7, 0.4)
PRIOR_BY_ORDER = (0.55, 0.7, 0.8, 0.85, 0.2)
LEAST_PRIOR = 0.003


def prior_rates() -> np.ndarray:
    """[F] estimates of acceptance before anything was seen, of ONE."""
    by_gap = np.multiply.outer(PRIOR_BY_RANK, PRIOR_OTHERS)
    by_gap[0] = PRIOR_FIRST
    top_k = np.maximum(np.multiply.outer(PRIOR_BY_ORDER, by_gap), LEAST_PRIOR)
    text = np.repeat(np.minimum(0.4 + 0.1 * np.arange(NUM_LENGTHS), 0.9), NUM_NOISE_BINS)
    drawn = np.concatenate([0.15 / (1 + np.arange(K)), 0.4 / (1 + np.arange(K))])
    return (np.concatenate([text, top_k.ravel(), drawn]) * ONE).astype(np.int64)


def _power_of_two(limit: int) -> int:
    """The largest power of two within a limit, at least one bucket."""
    return max(WAYS, 1 << (max(1, limit).bit_length() - 1))


def _make_zeros(*kinds: tuple[tuple[int, ...], type]) -> list[np.ndarray]:
    """Arrays of zeros that begin with a line of the caches, in one block, so that large pages can hold them."""
    sizes = [-(-math.prod(shape) * np.dtype(dtype).itemsize // LINE) * LINE for shape, dtype in kinds]
    block = np.zeros(sum(sizes) + LINE, np.uint8)
    start = -block.ctypes.data % LINE
    made = []
    for (shape, dtype), size in zip(kinds, sizes, strict=True):
        made.append(block[start : start + math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape))
        start += size
    return made


class DraftTables:
    """The tables, bounded in bytes.

    Args:
        num_bytes: of all tables, about.

    Attributes:
        drafts, rates: for the tables.
    """

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        slots = _power_of_two(num_bytes * 3 // 4 // SLOT_BYTES)
        places = _power_of_two(num_bytes // 4 // TEXT_BYTES)
        grams = _power_of_two(2 * tables.MAX_GRAM * places)
        made = _make_zeros(
            ((slots, tables.ENTRY), np.int32),
            ((slots,), np.int64),
            ((grams,), np.int64),
            ((grams, 1), np.int64),
            ((max(places, 64),), np.int32),
        )
        entries, keys, gram_keys, gram_places, buffer = made
        self._top_k = tables.TopKTable(keys, entries)
        self._text = tables.Text(
            buffer=buffer,
            span=np.zeros(2, np.int64),
            hashes=np.zeros((1, NUM_HASHES), np.int64),
            keys=gram_keys,
            places=gram_places,
        )
        counted = [np.zeros(NUM_FEATURES, np.int64) for _ in range(3)]
        promises = [np.zeros(NUM_PROMISES, np.int64) for _ in range(2)]
        kept = np.zeros((MAX_AGREEING, NUM_FEATURES), np.int64)
        self.rates = Rates(*counted, prior_rates(), *promises, kept, np.zeros(NUM_FEATURES, np.int64))
        self._stamp = 0
        self.estimate()

    def drafts(self, vocabulary: np.ndarray) -> tables.DraftArrays:
        """The tables, with a vocabulary's, [V, ENTRY]."""
        return tables.DraftArrays(self._top_k, self._text, vocabulary)

    def clear(self) -> None:
        """Forget everything; the draft_tables stays."""
        self._top_k.keys[:] = 0
        self._text.keys[:] = 0
        self._text.span[:] = 0
        self._text.buffer[:] = 0
        for counted in self._counted().values():
            counted[:] = 0
        self._stamp = 0
        self.estimate()

    def begin_text(self, tokens: Sequence[int]) -> None:
        """Begin a text: no n-gram reaches back across here."""
        self._text.span[0] = self._text.span[1]
        self._text.hashes[:] = 0
        self._text.hashes[0, 0] = EMPTY_HASH
        self.append_text(tokens)

    def append_text(self, tokens: Sequence[int]) -> None:
        """Append committed tokens to the text."""
        tables.append_text(self._text, np.array(tokens, dtype=np.int64))

    def next_stamp(self) -> int:
        """The age of what is stored from now on."""
        self._stamp += 1
        return self._stamp

    def estimate(self) -> None:
        """Bring the estimates up to what was counted."""
        rates = self.rates
        np.floor_divide(rates.taken * ONE + rates.prior * PRIOR_WEIGHT, rates.tried + PRIOR_WEIGHT, out=rates.rate)

    def _counted(self) -> dict[str, np.ndarray]:
        return {name: getattr(self.rates, name) for name in ("tried", "taken", "promised", "came")}

    def dump(self, vocabulary_size: int) -> bytes:
        """Everything, for `load`."""
        file = io.BytesIO()
        np.savez(
            file,
            format=FORMAT,
            num_bytes=self.num_bytes,
            vocabulary_size=vocabulary_size,
            shape=SHAPE,
            stamp=self._stamp,
            **self._counted(),
            **{f"top_k_{name}": value for name, value in self._top_k._asdict().items()},
            **{f"text_{name}": value for name, value in self._text._asdict().items()},
        )
        return file.getvalue()

    @classmethod
    def load(cls, data: bytes, num_bytes: int, vocabulary_size: int) -> DraftTables:
        """A draft_tables from what `dump` returned.

        Raises:
            ValueError: if it is not that, or of another size, version or vocabulary.
        """
        draft_tables = cls(num_bytes)
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as saved:
                arrays = {name: saved[name] for name in saved.files}
            version = (int(arrays["format"]), tuple(arrays["shape"].tolist()))
            size, vocabulary, stamp = (int(arrays[name]) for name in ("num_bytes", "vocabulary_size", "stamp"))
        except Exception as error:  # whatever a broken archive raises
            raise ValueError("it is not saved draft tables") from error
        if version != (FORMAT, SHAPE):
            raise ValueError("it was saved by another version")
        if size != num_bytes:
            raise ValueError(f"it was saved with draft_tables_bytes={size}")
        if vocabulary != vocabulary_size:
            raise ValueError(f"it is of a model with {vocabulary} tokens, not {vocabulary_size}")
        targets = {f"top_k_{name}": value for name, value in draft_tables._top_k._asdict().items()}
        targets |= {f"text_{name}": value for name, value in draft_tables._text._asdict().items()}
        targets |= draft_tables._counted()
        for name, target in targets.items():
            value = arrays.get(name)
            if value is None or value.shape != target.shape or value.dtype != target.dtype:
                raise ValueError("it is damaged")
            target[:] = value
        tokens = draft_tables._top_k.entries[:, :K]
        if max(tokens.max(), draft_tables._text.buffer.max()) >= vocabulary_size or draft_tables._text.buffer.min() < 0:
            raise ValueError("it is damaged")
        draft_tables._stamp = stamp
        draft_tables.estimate()
        return draft_tables
