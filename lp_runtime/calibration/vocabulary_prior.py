"""The vocabulary prior: which tokens a model predicts after each token, equal on all replicas.

A model predicts little of use after the first token of a text: attention concentrates on that position, whatever the
token is (attention sinks, arXiv 2309.17453). So every token is queried after a common first token. On
SmolLM2-135M-Instruct, 34 to 38% of a text's tokens are then among the eight candidates of the token before; without the
first token it is 18%.

Each replica queries its model about a part of the vocabulary, in slices of a tenth of a second, when it is idle. The
results take effect once all replicas have them: they are shared at the start of a request.

Letters: V vocabulary, R replicas, K top-k candidates.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass

import numpy as np
import torch

from lp_runtime.calibration.files import CalibrationFiles
from lp_runtime.calibration.step_meter import make_greedy_sampler
from lp_runtime.distributed.exchange import broadcast_object, gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.runner import ModelRunner

log = logging.getLogger(__name__)

SLICE_SECONDS = 0.1  # target duration of a slice: about the longest that a request waits for one
MAX_ASKING_SECONDS = 120.0  # total query time of a process; after that the rest of the vocabulary is left out
FIRST_SLICE_TOKENS = 64
MIN_SLICE_TOKENS = 8
MAX_SLICE_TOKENS = {"cpu": 256, "cuda": 1024}  # enough to keep the device busy
MAX_SLICE_LOGITS = 1 << 28  # largest number of logits (tokens x V) of a slice
MIN_NEW_PART = 8  # replicas share new results once they are 1/8 of the vocabulary, or all that was missing
NUM_SPACED = 64  # evenly spaced tokens; the most frequent of their likeliest successors is the common token
NO_CANDIDATES = -1  # packed candidates of a token that was not queried


@dataclass
class Answers:
    """The model's predictions after single tokens.

    Attributes:
        packed: [V, width] int64 as packed by a Sampler; 0 if unknown.
        is_known: [V] bool, whether each token was queried.
    """

    packed: np.ndarray
    is_known: np.ndarray

    @staticmethod
    def width_of(num_top_k: int) -> int:
        """Return the packed width, in int64, of a token with `num_top_k` candidates."""
        return 1 + -(-num_top_k // 2)

    @classmethod
    def none(cls, vocabulary_size: int, width: int) -> Answers:
        """Return answers in which no token is known."""
        return cls(np.zeros((vocabulary_size, width), np.int64), np.zeros(vocabulary_size, np.bool_))

    @property
    def num_known(self) -> int:
        """Number of tokens queried so far."""
        return int(self.is_known.sum())

    def add(self, tokens: np.ndarray, packed: np.ndarray) -> None:
        """Store the rows `packed`, [m, width], of `tokens`, [m]; the last row of a repeated token counts."""
        self.packed[tokens] = packed
        self.is_known[tokens] = True

    def digest(self) -> int:
        """Return a 63-bit digest of the content."""
        whole = hashlib.blake2b(self.packed.tobytes() + self.is_known.tobytes(), digest_size=8).digest()
        return int.from_bytes(whole, "big") >> 1


class VocabularyPrior:
    """Queries a model about the vocabulary and shares the results with the other replicas.

    Args:
        known: results of this process; updated in place.
        files: cache on disk, written by rank 0.

    Attributes:
        is_settled: set by the owner once no more queries will follow.
    """

    def __init__(self, model: ModelRunner, group: Group, known: Answers, files: CalibrationFiles, name: str):
        self._model = model
        self._group = group
        self._known = known
        self._files, self._name = files, name
        self._sampler = make_greedy_sampler(model)
        self._agreed = Answers.none(*known.packed.shape)
        self._has_begun = False
        self._entries: np.ndarray | None = None  # cached result of `entries`
        self._num_saved = 0
        self._common_token: int | None = None
        self._max_tokens = min(MAX_SLICE_TOKENS[model.device.type], max(1, MAX_SLICE_LOGITS // model.vocabulary_size))
        # Size of the next slice. A model fed with chains computes each text separately, from its first token.
        first_tokens = MIN_SLICE_TOKENS if model.feeds_chains else FIRST_SLICE_TOKENS
        self._num_tokens = min(first_tokens, self._max_tokens)
        self._seconds_left = MAX_ASKING_SECONDS
        self.is_settled = False

    @property
    def is_complete(self) -> bool:
        """Whether all replicas have the predictions of all tokens."""
        return bool(self._agreed.is_known.all())

    def entries(self) -> np.ndarray:
        """Return the shared results, [V, ENTRY] int32 entries of the draft tables."""
        if self._entries is None:
            packed = self._agreed.packed.copy()
            packed[~self._agreed.is_known, 1:] = NO_CANDIDATES
            *_, entries = self._sampler.unpack(packed)
            assert entries is not None  # the sampler reports top-k candidates
            self._entries = entries
        return self._entries

    # Queries, on this replica alone.

    def ask(self, seconds: float) -> None:
        """Query this replica's part of the unknown tokens for `seconds`, at least one slice."""
        end = time.perf_counter() + seconds
        while self.ask_once() and time.perf_counter() < end:
            pass

    def ask_once(self) -> bool:
        """Query one slice of this replica's part of the unknown tokens; return whether more is left."""
        unknown = np.flatnonzero(~self._known.is_known)
        mine = unknown[unknown % self._group.size == self._group.rank]
        tokens = mine[: self._num_tokens]
        if not len(tokens) or self._seconds_left <= 0:
            return False
        started = time.perf_counter()
        try:
            self._known.add(tokens, self._ask_about(tokens))
        except torch.OutOfMemoryError:  # retry with the smallest slices; give up if those fail, too
            self._seconds_left = 0.0 if self._num_tokens == MIN_SLICE_TOKENS else self._seconds_left
            self._num_tokens = self._max_tokens = MIN_SLICE_TOKENS
            return self._seconds_left > 0
        seconds = time.perf_counter() - started
        self._seconds_left -= seconds
        if seconds > SLICE_SECONDS:
            self._num_tokens = max(min(MIN_SLICE_TOKENS, self._max_tokens), self._num_tokens // 2)
        elif seconds < SLICE_SECONDS / 2:
            self._num_tokens = min(self._max_tokens, self._num_tokens * 2)
        return len(mine) > len(tokens) and self._seconds_left > 0

    def _ask_about(self, tokens: np.ndarray) -> np.ndarray:
        """Return [m, width] packed top-k candidates after each of `tokens`, [m], preceded by a common token."""
        if self._common_token is None:
            size = self._model.vocabulary_size
            num_spaced = min(NUM_SPACED, self._num_tokens)
            packed = self._candidates_after(size // 2, np.arange(num_spaced) * size // num_spaced)
            self._common_token = int(np.bincount(self._sampler.unpack(packed)[0]).argmax())
        return self._candidates_after(self._common_token, tokens)

    def _candidates_after(self, first: int, tokens: np.ndarray) -> np.ndarray:
        """Return [m, width] packed top-k candidates after each two-token text (`first`, token)."""
        with self._model.slots.borrowed() as slot:
            self._model.begin(slot, 1 + len(tokens))
            found = self._model.logits_after_each(slot, tokens.tolist(), [first])
            packed, _ = self._sampler.sample(found, TokenTree([0], max_depth=1), [0] * len(tokens), [0])
            return packed.cpu().numpy()

    # Agreement, on all replicas at once.

    def agree(self, min_new: int | None = None) -> None:
        """Share the replicas' new results if there are at least `min_new`, or all that were missing.

        None stands for 1 / MIN_NEW_PART of the vocabulary, or for any number on a replica without peers. Raises
        ReplicaError if a peer is gone.
        """
        if not self._has_begun:
            self._begin()
        agreed, group = self._agreed, self._group
        if self.is_complete:
            return
        new = np.flatnonzero(self._known.is_known & ~agreed.is_known)
        counts = gather_rows(np.array([len(new)]), group)[:, 0]
        num_new, size = int(counts.sum()), len(agreed.is_known)
        if min_new is None:
            min_new = 1 if group.is_alone else max(1, size // MIN_NEW_PART)
        if num_new == 0 or num_new < min(min_new, size - agreed.num_known):
            return
        block = np.full((counts.max(), 1 + agreed.packed.shape[1]), -1, dtype=np.int64)
        block[: len(new), 0], block[: len(new), 1:] = new, self._known.packed[new]
        rows = gather_rows(block.reshape(-1), group).reshape(-1, block.shape[1])[::-1]  # rank 0 last: its rows win
        rows = rows[rows[:, 0] >= 0]
        self._adopt(rows[:, 0], rows[:, 1:])

    def _begin(self) -> None:
        """Start from what all replicas equally know, else from what rank 0 or its cache file knows."""
        known, group = self._known, self._group
        # Replicas from different groups may have queried the model with different common tokens or slices.
        digests = gather_rows(np.array([known.digest()]), group)
        if (digests == digests[0]).all() and known.is_known.all():
            self._adopt(np.arange(len(known.packed)), known.packed)
        else:
            if group.rank == 0:
                self._load()
            tokens = np.flatnonzero(known.is_known)
            self._adopt(*broadcast_object((tokens, known.packed[tokens]), group))
        self._has_begun = True

    def _adopt(self, tokens: np.ndarray, packed: np.ndarray) -> None:
        """Store results that all replicas have from now on."""
        self._agreed.add(tokens, packed)
        self._known.add(tokens, packed)
        self._entries = None

    # Cache on disk.

    def _load(self) -> None:
        """Add the cache file's results to those of this process."""
        saved = self._files.load(self._name, ("packed", "is_known"))
        if saved is None or saved["packed"].shape != self._known.packed.shape:
            return
        tokens = np.flatnonzero(saved["is_known"] & ~self._known.is_known)
        self._known.add(tokens, saved["packed"][tokens])
        self._num_saved = int(saved["is_known"].sum())

    def save(self) -> None:
        """Write the results to the cache file, on rank 0, if they have grown."""
        answers = self._known if self._group.is_alone else self._agreed
        if self._group.rank == 0 and answers.num_known > self._num_saved:
            self._files.store(self._name, {"packed": answers.packed, "is_known": answers.is_known})
            self._num_saved = answers.num_known
            if not answers.is_known.all():
                log.info("%d of the vocabulary's %d tokens were queried", answers.num_known, len(answers.is_known))
