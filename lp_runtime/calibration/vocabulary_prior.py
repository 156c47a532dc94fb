"""The vocabulary prior: which tokens a model predicts after one token and after two, equal on all replicas.

A model predicts little of use after the first token of a text: attention concentrates on that position, whatever the
token is (attention sinks, arXiv 2309.17453). So every token is queried after a common first token. On
SmolLM2-135M-Instruct, 34 to 38% of a text's tokens are then among the eight candidates of the token before; without the
first token it is 18%. After the two tokens before it is 52%; those are known if the second one is among the K
likeliest successors of the first.

A start queries the model for ASKING_SECONDS, each replica about its part of the vocabulary, first after single tokens,
then after pairs. The cache on disk keeps the results, and the next start continues with what is still unknown. The
lowest ids come first: byte-pair encodings give them to the most frequent tokens.

Letters: V vocabulary, R replicas, K top-k candidates.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lp_runtime.calibration.files import CalibrationFiles
from lp_runtime.calibration.step_meter import make_greedy_sampler
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.top_k import PRIOR_ROWS, K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.sampler import Sampler

log = logging.getLogger(__name__)

ASKING_SECONDS = 3.0  # of a start; a GPU answers for 150,000 tokens in this time
SLICE_SECONDS = 0.1  # slices grow to about this duration, so that the last one ends soon after ASKING_SECONDS
FIRST_SLICE_TEXTS = 64
MIN_SLICE_TEXTS = 8
MAX_SLICE_TEXTS = {"cpu": 256, "cuda": 1024}  # enough to keep the device busy
MAX_SLICE_LOGITS = 1 << 28  # largest number of logits (texts x V) of a slice
NUM_SPACED = 64  # evenly spaced tokens; the most frequent of their likeliest successors is the common token
SHARED_TOKENS = 1 << 14  # of a gather; replicas need memory for R times their rows
NO_CANDIDATES = -1  # packed candidates of an unknown row
WIDTH = 1 + -(-K // 2)  # int64 of a packed successor with K candidates
FIRST_ROW, OTHER_ROWS, ALL_ROWS = slice(1), slice(1, None), slice(None)  # of a token


@dataclass
class Answers:
    """The model's predictions after one token and after two.

    Attributes:
        packed: [V, PRIOR_ROWS, WIDTH] int64 as packed by a Sampler; 0 if unknown.
        known: [V] int64 how many of a token's rows are known: none, the first one, or all.
    """

    packed: np.ndarray
    known: np.ndarray
    _digest: int | None = None  # of the content; None after a change
    _entries: np.ndarray | None = None

    @classmethod
    def none(cls, vocabulary_size: int) -> Answers:
        """Return answers in which no row is known."""
        return cls(np.zeros((vocabulary_size, PRIOR_ROWS, WIDTH), np.int64), np.zeros(vocabulary_size, np.int64))

    def add(self, tokens: np.ndarray, rows: slice, packed: np.ndarray, known: np.ndarray | int) -> None:
        """Store `rows` of m tokens, [m, rows, WIDTH], and how many are `known`; the last of equal tokens counts."""
        self.packed[tokens, rows] = packed
        self.known[tokens] = known
        self._digest = self._entries = None

    def digest(self) -> int:
        """Return a 63-bit digest of what is known."""
        if self._digest is None:
            whole = hashlib.blake2b(digest_size=8)
            for array in self.arrays().values():
                whole.update(array.tobytes())
            self._digest = int.from_bytes(whole.digest(), "big") >> 1
        return self._digest

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what is known as arrays to save; see `load`."""
        return {
            "known": self.known,
            "after_token": self.packed[self.known > 0, 0],
            "after_pair": self.packed[self.known == PRIOR_ROWS, 1:],
        }

    def load(self, known: np.ndarray, after_token: np.ndarray, after_pair: np.ndarray) -> None:
        """Add what `arrays` returned; ValueError if it does not fit."""
        if known.shape != self.known.shape:
            raise ValueError("another vocabulary")
        self.add(np.flatnonzero(known > 0), FIRST_ROW, after_token[:, None], 1)
        self.add(np.flatnonzero(known == PRIOR_ROWS), OTHER_ROWS, after_pair, PRIOR_ROWS)

    def entries(self, sampler: Sampler) -> np.ndarray:
        """Return [n, ENTRY] int32 entries, PRIOR_ROWS a token up to the last known one; unknown rows are empty."""
        if self._entries is None:
            num_tokens = int(np.flatnonzero(self.known).max(initial=-1)) + 1
            packed = self.packed[:num_tokens].copy()
            packed[np.arange(PRIOR_ROWS) >= self.known[:num_tokens, None], 1:] = NO_CANDIDATES
            self._entries = _entries(sampler, packed.reshape(-1, WIDTH))
        return self._entries


def _entries(sampler: Sampler, packed: np.ndarray) -> np.ndarray:
    *_, entries = sampler.unpack(packed)
    assert entries is not None  # the sampler reports top-k candidates
    return entries


def agreed_answers(
    model: ModelRunner, group: Group, known: Answers | None, files: CalibrationFiles, name: str
) -> Answers:
    """Return the model's predictions after one token and two, equal on all replicas of the group.

    `known` are those of an earlier group of this process, updated in place; a replica without any reads the file
    `name`. If any replica has some, the model is not queried: a replica that joins others does not delay them. Rank 0
    writes the file.

    Raises:
        ReplicaError: if a peer is gone.
    """
    answers = known or Answers.none(model.vocabulary_size)
    if known is None:
        _load(answers, files, name)
    # Replicas from different groups may have queried the model with different common tokens or slices.
    rows = gather_rows(np.array([known is not None, answers.digest()]), group)
    if (rows[:, 1] != rows[0, 1]).any():
        _share(answers, answers.known > 0, group)
    if rows[:, 0].any() or answers.known.min() == PRIOR_ROWS:
        return answers
    mine, before = np.arange(group.rank, len(answers.known), group.size), answers.known.copy()
    _ask(model, answers, mine)
    _share(answers, answers.known > before, group)
    if group.rank == 0 and (answers.known > before).any():
        files.store(name, answers.arrays())
        log.info(
            "%d of the vocabulary's %d tokens were queried, %d of them with their likeliest successors",
            (answers.known > 0).sum(),
            len(answers.known),
            (answers.known == PRIOR_ROWS).sum(),
        )
    return answers


def _load(answers: Answers, files: CalibrationFiles, name: str) -> None:
    """Load what a cache file has."""
    saved = files.load(name, list(answers.arrays()))
    if saved is not None:
        with contextlib.suppress(ValueError):
            answers.load(**saved)


def _share(answers: Answers, is_shared: np.ndarray, group: Group) -> None:
    """Give other replicas the rows of some tokens, [V] bool, and add theirs.

    If several have a token, the one with the most rows counts, of several the lowest rank.
    """
    if group.is_alone:
        return
    parts = [np.flatnonzero(part) + start for start, part in _parts(is_shared)]
    num_rows = gather_rows(np.array([len(tokens) for tokens in parts]), group).max(axis=0)
    for tokens, num in zip(parts, num_rows.tolist(), strict=True):
        if not num:
            continue
        block = np.zeros((num, 2 + PRIOR_ROWS * WIDTH), np.int64)
        block[: len(tokens), 0], block[: len(tokens), 1] = tokens, answers.known[tokens]
        block[: len(tokens), 2:] = answers.packed.reshape(-1, PRIOR_ROWS * WIDTH)[tokens]
        rows = gather_rows(block.reshape(-1), group).reshape(-1, block.shape[1])[::-1]  # rank 0 last: its rows win
        rows = rows[np.argsort(rows[:, 1], kind="stable")]
        rows = rows[rows[:, 1] > 0]
        answers.add(rows[:, 0], ALL_ROWS, rows[:, 2:].reshape(len(rows), PRIOR_ROWS, WIDTH), rows[:, 1])


def _parts(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (start, part) of parts of SHARED_TOKENS elements."""
    for start in range(0, len(values), SHARED_TOKENS):
        yield start, values[start : start + SHARED_TOKENS]


def _ask(model: ModelRunner, answers: Answers, tokens: np.ndarray) -> None:
    """Query the model about what is unknown of `tokens`, [m], slice by slice, for ASKING_SECONDS, at least once."""
    deadline = time.perf_counter() + ASKING_SECONDS
    sampler = make_greedy_sampler(model)
    max_texts = min(MAX_SLICE_TEXTS[model.device.type], max(1, MAX_SLICE_LOGITS // model.vocabulary_size))
    # A model fed with chains computes each text separately, from its first token.
    num_texts = min(MIN_SLICE_TEXTS if model.feeds_chains else FIRST_SLICE_TEXTS, max_texts)
    common_token: int | None = None
    while len(unknown := tokens[answers.known[tokens] < PRIOR_ROWS]):
        # Single tokens first: the successors of the pairs are then known.
        fewest = answers.known[unknown].min()
        asked = unknown[answers.known[unknown] == fewest][: num_texts if fewest == 0 else max(1, num_texts // K)]
        started = time.perf_counter()
        try:
            if common_token is None:
                common_token = _common_token(model, sampler, num_texts)
            _ask_about(model, sampler, common_token, answers, asked)
        except torch.OutOfMemoryError:
            if num_texts <= MIN_SLICE_TEXTS:
                return
            num_texts = max_texts = MIN_SLICE_TEXTS
            continue
        ended = time.perf_counter()
        if ended > deadline:
            return
        if ended - started < SLICE_SECONDS / 2:
            num_texts = min(max_texts, 2 * num_texts)


def _ask_about(model: ModelRunner, sampler: Sampler, common_token: int, answers: Answers, tokens: np.ndarray) -> None:
    """Query the model about m tokens, alone if nothing is known of them yet, else with their likeliest successors."""
    if answers.known[tokens[0]] == 0:
        after_token = _candidates_after(model, sampler, common_token, tokens[:, None])
        answers.add(tokens, FIRST_ROW, after_token[:, None], 1)
    else:
        successors = _entries(sampler, answers.packed[tokens, 0])[:, :K]
        pairs = np.stack([np.repeat(tokens, K), np.maximum(successors, 0).ravel()], axis=1)
        after_pair = _candidates_after(model, sampler, common_token, pairs)
        answers.add(tokens, OTHER_ROWS, after_pair.reshape(len(tokens), K, WIDTH), PRIOR_ROWS)


def _common_token(model: ModelRunner, sampler: Sampler, num_texts: int) -> int:
    """Return the token to query others after, from a pass of up to `num_texts` tokens."""
    size, num_spaced = model.vocabulary_size, min(NUM_SPACED, num_texts)
    spaced = np.arange(num_spaced) * size // num_spaced
    packed = _candidates_after(model, sampler, size // 2, spaced[:, None])
    return int(np.bincount(sampler.unpack(packed)[0]).argmax())


def _candidates_after(model: ModelRunner, sampler: Sampler, first: int, branches: np.ndarray) -> np.ndarray:
    """Return [m, WIDTH] packed top-k candidates after each text of a `first` token and a branch, [m, length]."""
    with model.slots.borrowed() as slot:
        model.begin(slot, 1 + branches.size)
        logits = model.logits_after_each(slot, branches.tolist(), [first])
        packed, _ = sampler.sample(logits, TokenTree([0], max_depth=1), [0] * len(branches), [0])
        return packed.cpu().numpy()
