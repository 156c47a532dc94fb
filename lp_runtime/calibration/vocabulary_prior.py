"""The vocabulary prior: which tokens a model says follow each token, asked bit by bit and equal on all replicas.

A model says little of use behind the first token of a text: attention rests on that place, whatever stands there
(attention sinks, arXiv 2309.17453). So every token is asked about behind a common one. On SmolLM2-135M-Instruct 34 to
38% of a text's tokens are then among the eight candidates behind the token before, and 18% without.

Each replica asks its model about a part of the vocabulary, in slices of a tenth of a second, whenever it has time. What
it finds takes effect once all replicas have it: they share it when they agree, at a request's start.

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

SLICE_SECONDS = 0.1  # that a request waits at most, about, for a slice that has begun
MAX_ASKING_SECONDS = 120.0  # of a process; what is left of the vocabulary then is left out
FIRST_SLICE_TOKENS = 64
MIN_SLICE_TOKENS = 8
MAX_SLICE_TOKENS = {"cpu": 256, "cuda": 1024}  # a GPU is busy with so many
MAX_SLICE_LOGITS = 1 << 28  # numbers
MIN_NEW_PART = 8  # replicas share what is new once it is one part of so many of the vocabulary, or all that is left
NUM_SPACED = 64  # tokens, evenly spaced in the vocabulary, of which the likeliest successors tell a common token
NO_CANDIDATES = -1  # packed: a token that nothing is known to follow


@dataclass
class Answers:
    """What a model has said of tokens.

    Attributes:
        packed: [V, width] int64 as a Sampler packs results; 0 where nothing is known.
        is_known: [V] bool.
    """

    packed: np.ndarray
    is_known: np.ndarray

    @staticmethod
    def width_of(num_top_k: int) -> int:
        """Return the integers of a token with so many top-k candidates."""
        return 1 + -(-num_top_k // 2)

    @classmethod
    def none(cls, vocabulary_size: int, width: int) -> Answers:
        """Return what is known before anything was asked."""
        return cls(np.zeros((vocabulary_size, width), np.int64), np.zeros(vocabulary_size, np.bool_))

    @property
    def num_known(self) -> int:
        """Tokens that the model was asked about."""
        return int(self.is_known.sum())

    def add(self, tokens: np.ndarray, packed: np.ndarray) -> None:
        """Learn of tokens, [m]; of a token that stands there twice the last row of `packed`, [m, width], counts."""
        self.packed[tokens] = packed
        self.is_known[tokens] = True

    def digest(self) -> int:
        """Return 63 bits of what is known."""
        whole = hashlib.blake2b(self.packed.tobytes() + self.is_known.tobytes(), digest_size=8).digest()
        return int.from_bytes(whole, "big") >> 1


class VocabularyPrior:
    """Asks a model about the vocabulary, and shares what is found with the other replicas.

    Args:
        model: this replica's.
        group: the replicas that must agree.
        known: what this process knows; filled in.
        files: where what is known is kept, by rank 0.
        name: of the file.

    Attributes:
        is_settled: whether nobody will ask further; kept by the owner.
    """

    def __init__(self, model: ModelRunner, group: Group, known: Answers, files: CalibrationFiles, name: str):
        self._model, self._group, self._known = model, group, known
        self._files, self._name = files, name
        self._sampler = make_greedy_sampler(model)
        self._agreed = Answers.none(*known.packed.shape)
        self._has_begun = False
        self._entries: np.ndarray | None = None  # of what is agreed
        self._num_saved = 0
        self._common_token: int | None = None
        self._max_tokens = min(MAX_SLICE_TOKENS[model.device.type], max(1, MAX_SLICE_LOGITS // model.vocabulary_size))
        # Of the next slice. A model that is fed chains computes each text by itself, from its first token on.
        first_tokens = MIN_SLICE_TOKENS if model.feeds_chains else FIRST_SLICE_TOKENS
        self._num_tokens = min(first_tokens, self._max_tokens)
        self._seconds_left = MAX_ASKING_SECONDS
        self.is_settled = False

    @property
    def is_complete(self) -> bool:
        """Whether all replicas know of all tokens."""
        return bool(self._agreed.is_known.all())

    def entries(self) -> np.ndarray:
        """Return [V, ENTRY] int32 entries of what is agreed, as draft tables store top-k candidates."""
        if self._entries is None:
            packed = self._agreed.packed.copy()
            packed[~self._agreed.is_known, 1:] = NO_CANDIDATES
            *_, entries = self._sampler.unpack(packed)
            assert entries is not None  # the sampler reports top-k candidates
            self._entries = entries
        return self._entries

    # Asking, on this replica alone.

    def ask(self, seconds: float) -> None:
        """Ask about this replica's part of what is not known, for so long, but at least one slice."""
        end = time.perf_counter() + seconds
        while self.ask_once() and time.perf_counter() < end:
            pass

    def ask_once(self) -> bool:
        """Ask about one slice of this replica's part of what is not known; return whether some of it is left."""
        unknown = np.flatnonzero(~self._known.is_known)
        mine = unknown[unknown % self._group.size == self._group.rank]
        tokens = mine[: self._num_tokens]
        if not len(tokens) or self._seconds_left <= 0:
            return False
        started = time.perf_counter()
        try:
            self._known.add(tokens, self._ask_about(tokens))
        except torch.OutOfMemoryError:  # what is asked for is less the next time, and then nothing
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
        """Return [m, width] packed top-k candidates after each of tokens, [m], behind a common token."""
        if self._common_token is None:
            size = self._model.vocabulary_size
            num_spaced = min(NUM_SPACED, self._num_tokens)
            packed = self._ask_behind(size // 2, np.arange(num_spaced) * size // num_spaced)
            self._common_token = int(np.bincount(self._sampler.unpack(packed)[0]).argmax())
        return self._ask_behind(self._common_token, tokens)

    def _ask_behind(self, first: int, tokens: np.ndarray) -> np.ndarray:
        """Return [m, width] packed top-k candidates after each of tokens, [m], in a text of `first` and this token."""
        with self._model.slots.borrowed() as slot:
            self._model.begin(slot, 1 + len(tokens))
            found = self._model.logits_after_each(slot, tokens.tolist(), [first])
            packed, _ = self._sampler.sample(found, TokenTree([0], max_depth=1), [0] * len(tokens), [0])
            return packed.cpu().numpy()

    # Agreeing, on all replicas at once.

    def agree(self, min_new: int | None = None) -> None:
        """Share what replicas have found since the last time, if that is enough to be worth it.

        Args:
            min_new: tokens that are enough; None for one part of MIN_NEW_PART of the vocabulary. All that is left is
                enough, too, and on a replica alone anything is.

        Raises:
            ReplicaError: if a peer is gone.
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
        rows = gather_rows(block.reshape(-1), group).reshape(-1, block.shape[1])[::-1]  # rank 0's last, which count
        rows = rows[rows[:, 0] >= 0]
        self._take(rows[:, 0], rows[:, 1:])

    def _begin(self) -> None:
        """Begin with what all replicas know alike, else with what rank 0 or its disk knows."""
        known, group = self._known, self._group
        # Replicas that were in different groups may have asked the model each in their own way.
        digests = gather_rows(np.array([known.digest()]), group)
        if (digests == digests[0]).all() and known.is_known.all():
            self._take(np.arange(len(known.packed)), known.packed)
        else:
            if group.rank == 0:
                self._load()
            tokens = np.flatnonzero(known.is_known)
            self._take(*broadcast_object((tokens, known.packed[tokens]), group))
        self._has_begun = True

    def _take(self, tokens: np.ndarray, packed: np.ndarray) -> None:
        """Learn what all replicas know from now on."""
        self._agreed.add(tokens, packed)
        self._known.add(tokens, packed)
        self._entries = None

    # Keeping.

    def _load(self) -> None:
        """Add what the file knows to what this process knows."""
        saved = self._files.load(self._name, ("packed", "is_known"))
        if saved is None or saved["packed"].shape != self._known.packed.shape:
            return
        tokens = np.flatnonzero(saved["is_known"] & ~self._known.is_known)
        self._known.add(tokens, saved["packed"][tokens])
        self._num_saved = int(saved["is_known"].sum())

    def save(self) -> None:
        """Write what is known to the file, on rank 0, if that is more than the file has."""
        answers = self._known if self._group.is_alone else self._agreed
        if self._group.rank == 0 and answers.num_known > self._num_saved:
            self._files.store(self._name, {"packed": answers.packed, "is_known": answers.is_known})
            self._num_saved = answers.num_known
            if not answers.is_known.all():
                log.info("%d of the vocabulary's %d tokens were asked about", answers.num_known, len(answers.is_known))
