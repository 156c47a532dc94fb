"""The vocabulary prior: which tokens a model predicts after one token and after two, equal on all replicas.

A model predicts little of use after the first token of a text: attention concentrates on that position, whatever the
token is (attention sinks, arXiv 2309.17453). So every token is queried after a common first token. On
SmolLM2-135M-Instruct, 34 to 38% of a text's tokens are then among the eight candidates of the token before; without the
first token it is 18%. After the last two tokens it is 52%. Pairs are asked about if the first token is one of the
NUM_PAIRED lowest ids and the second one of its K likeliest successors.

A start queries the model for ASKING_SECONDS, each replica about its part of the vocabulary, first after single tokens,
then after pairs. The cache on disk keeps the results, and the next start continues with what is still unknown. The
lowest ids come first: byte-pair encodings give them to the most frequent tokens.

Letters: V vocabulary, R replicas, K top-k candidates.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, field

import numpy as np

from lp_runtime.calibration.files import CalibrationFiles
from lp_runtime.calibration.step_meter import make_greedy_sampler
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.kernels.types import NO_TOKEN
from lp_runtime.lookahead.top_k import MARGIN_BITS, K, VocabularyPrior
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.utils.memory import is_out_of_memory

log = logging.getLogger(__name__)

ASKING_SECONDS = 3.0  # of a start
SLICE_SECONDS = 0.1  # slices grow to about this duration, so that the last one ends soon after ASKING_SECONDS
FIRST_SLICE_TEXTS = 64
MIN_SLICE_TEXTS = 8
MAX_SLICE_TEXTS = {"cpu": 256, "cuda": 1024}  # enough to keep the device busy
MAX_SLICE_LOGITS = 1 << 28  # largest number of logits (texts x V) of a slice
NUM_SPACED = 64  # evenly spaced tokens; the most frequent of their likeliest successors is the common token
SHARED_TOKENS = 1 << 14  # of a gather; replicas need memory for R times their rows
NO_CANDIDATES = -1  # packed candidates of an unknown row
WIDTH = 1 + -(-K // 2)  # int64 of a packed successor with K candidates
NUM_PAIRED = 1 << 15  # tokens whose pairs are asked about: 93% of Qwen2.5-Coder's texts, 98% of SmolLM2's
NOTHING, ALONE, PAIRED = 0, 1, 2  # what is known of a token, each including the one before
SAVED = ("known", "after_token", "after_pair")  # arrays of a file


@dataclass
class Answers:
    """The model's predictions after one token and after two.

    Attributes:
        after_token: [V, WIDTH] int64 as packed by a Sampler; 0 if unknown.
        after_pair: [P, K, WIDTH] int64 after each of the first P tokens and each of its K likeliest successors.
        known: [V] uint8 what is known of each token: NOTHING, what follows it (ALONE), or its pairs, too (PAIRED).
    """

    after_token: np.ndarray
    after_pair: np.ndarray
    known: np.ndarray
    _digest: int | None = field(default=None, init=False, repr=False, compare=False)  # None after a change
    _prior: VocabularyPrior | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def none(cls, vocabulary_size: int) -> Answers:
        """Return answers in which nothing is known."""
        num_paired = min(vocabulary_size, NUM_PAIRED)
        after_token, after_pair = (
            np.zeros((vocabulary_size, WIDTH), np.int64),
            np.zeros((num_paired, K, WIDTH), np.int64),
        )
        return cls(after_token, after_pair, np.zeros(vocabulary_size, np.uint8))

    @property
    def is_missing(self) -> np.ndarray:
        """[V] bool, whether anything is unknown of each token."""
        return self.known < np.where(np.arange(len(self.known)) < len(self.after_pair), PAIRED, ALONE)

    def add(
        self,
        tokens: np.ndarray,
        known: int,
        after_token: np.ndarray | None = None,
        after_pair: np.ndarray | None = None,
    ) -> None:
        """Store what is `known` of m tokens: rows, [m, WIDTH] and [m, K, WIDTH]; the last of equal tokens counts."""
        if after_token is not None:
            self.after_token[tokens] = after_token
        if after_pair is not None:
            self.after_pair[tokens] = after_pair
        self.known[tokens] = known
        self._digest = self._prior = None

    def digest(self) -> int:
        """Return a 63-bit digest of what is known."""
        if self._digest is None:
            whole = hashlib.blake2b(digest_size=8)
            for array in self.arrays().values():
                whole.update(array.data)
            self._digest = int.from_bytes(whole.digest(), "big") >> 1
        return self._digest

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what is known as arrays to save, named as in SAVED."""
        parts = self.known, self.after_token[self.known >= ALONE], self.after_pair[self._is_paired(self.known)]
        return dict(zip(SAVED, parts, strict=True))

    def load(self, saved: dict[str, np.ndarray]) -> None:
        """Add what `arrays` returned; ValueError if it does not fit."""
        known, after_token, after_pair = (saved[name] for name in SAVED)
        if known.shape != self.known.shape or known.dtype != self.known.dtype:
            raise ValueError("another vocabulary")
        tokens, paired = np.flatnonzero(known >= ALONE), np.flatnonzero(self._is_paired(known))
        if after_token.shape != (len(tokens), WIDTH) or after_pair.shape != (len(paired), K, WIDTH):
            raise ValueError("rows are missing")
        if not (_has_candidates(after_token, len(known)) and _has_candidates(after_pair, len(known))):
            raise ValueError("tokens are unknown")
        self.add(tokens, ALONE, after_token=after_token)
        self.add(paired, PAIRED, after_pair=after_pair)

    def _is_paired(self, known: np.ndarray) -> np.ndarray:
        return known[: len(self.after_pair)] == PAIRED

    def prior(self, sampler: Sampler) -> VocabularyPrior:
        """Return the draft tables' entries of what is known."""
        if self._prior is None:
            after_token, after_pair = self.after_token.copy(), self.after_pair.copy()
            after_token[self.known == NOTHING, 1:] = NO_CANDIDATES
            after_pair[~self._is_paired(self.known), :, 1:] = NO_CANDIDATES
            self._prior = VocabularyPrior(_unpacked(sampler, after_token), _unpacked(sampler, after_pair))
        return self._prior


def _has_candidates(packed: np.ndarray, vocabulary_size: int) -> bool:
    """Return whether all candidates of packed rows are tokens of the vocabulary."""
    if packed.dtype != np.int64:
        return False
    ids = np.ascontiguousarray(packed[..., 1:]).view(np.uint32) >> MARGIN_BITS
    return bool(((ids < vocabulary_size) | (ids == NO_TOKEN)).all())


def _unpacked(sampler: Sampler, packed: np.ndarray) -> np.ndarray:
    """Return [n, ENTRY] entries of n packed rows."""
    *_, entries = sampler.unpack(packed.reshape(-1, WIDTH))
    assert entries is not None  # the sampler reports top-k candidates
    return entries


def agreed_answers(
    model: ModelRunner, group: Group, known: Answers | None, files: CalibrationFiles, name: str
) -> Answers:
    """Return the model's predictions after one token and two, equal on all replicas of the group.

    `known` are those of an earlier group of this process, updated in place; a replica without any reads the file
    `name`. If any replica has some, the model is not queried: a replica that joins others does not delay them. What is
    new is written to the file on each machine.

    Raises:
        ReplicaError: if a peer is gone.
    """
    answers = known or _load(files, name, model.vocabulary_size)
    # Replicas from different groups may have queried the model with different common tokens or slices.
    digest = 0 if group.is_alone else answers.digest()
    rows = gather_rows(np.array([known is not None, digest]), group)
    is_new = bool((rows[:, 1] != rows[0, 1]).any())
    if is_new:
        _share(answers, answers.known > NOTHING, group)
    if not rows[:, 0].any() and answers.is_missing.any():
        is_new, agreed = True, answers.known.copy()
        ask(model, answers, np.arange(group.rank, len(agreed), group.size), ASKING_SECONDS)
        _share(answers, answers.known > agreed, group)
    if is_new:
        _store(answers, group, files, name)
    return answers


def _load(files: CalibrationFiles, name: str, vocabulary_size: int) -> Answers:
    """Return the answers in a file; none if it is missing or does not fit."""

    def read(saved: dict[str, np.ndarray]) -> Answers:
        answers = Answers.none(vocabulary_size)
        answers.load(saved)
        return answers

    return files.load(name, SAVED, read) or Answers.none(vocabulary_size)


def _store(answers: Answers, group: Group, files: CalibrationFiles, name: str) -> None:
    """Write the file: rank 0, and then replicas whose file is another one, on another machine."""
    if group.rank == 0 and (num_missing := int(answers.is_missing.sum())):
        log.info("the vocabulary prior lacks %d of %d tokens, or their pairs", num_missing, len(answers.known))
    for is_turn in (group.rank == 0, group.rank > 0):
        if is_turn:
            with files.locked(name):
                saved = _load(files, name, len(answers.known))
                # Another group may have asked for more meanwhile.
                if saved.digest() != answers.digest() and saved.known.sum() <= answers.known.sum():
                    files.store(name, answers.arrays())
        gather_rows(np.zeros(1, np.int64), group)  # the turns follow each other


def _share(answers: Answers, is_shared: np.ndarray, group: Group) -> None:
    """Give other replicas the rows of some tokens, [V] bool, and add theirs.

    If several have a token, the one that knows most of it counts, of several the lowest rank.
    """
    if group.is_alone:
        return
    for is_paired in (True, False):  # a token that is paired anywhere is then paired everywhere
        chosen = is_shared & ((answers.known == PAIRED) == is_paired)
        parts = [
            start + np.flatnonzero(chosen[start:][:SHARED_TOKENS]) for start in range(0, len(chosen), SHARED_TOKENS)
        ]
        num_rows = gather_rows(np.array([len(tokens) for tokens in parts]), group).max(axis=0)
        for tokens, num in zip(parts, num_rows.tolist(), strict=True):
            if num:
                _share_part(answers, tokens, num, is_paired, group)


def _share_part(answers: Answers, tokens: np.ndarray, num_rows: int, is_paired: bool, group: Group) -> None:
    """Share the rows of some tokens, at most `num_rows` on each replica; see `_share`."""
    block = np.full((num_rows, 1 + (1 + K * is_paired) * WIDTH), -1, np.int64)
    block[: len(tokens), 0], block[: len(tokens), 1 : 1 + WIDTH] = tokens, answers.after_token[tokens]
    if is_paired:
        block[: len(tokens), 1 + WIDTH :] = answers.after_pair.reshape(-1, K * WIDTH)[tokens]
    rows = gather_rows(block.reshape(-1), group).reshape(-1, block.shape[1])[::-1]  # rank 0 last: its rows win
    rows = rows[rows[:, 0] >= 0]
    after_pair = rows[:, 1 + WIDTH :].reshape(len(rows), K, WIDTH) if is_paired else None
    answers.add(rows[:, 0], PAIRED if is_paired else ALONE, rows[:, 1 : 1 + WIDTH], after_pair)


def ask(model: ModelRunner, answers: Answers, tokens: np.ndarray, seconds: float) -> None:
    """Query the model about what is unknown of `tokens`, [m], slice by slice, for `seconds`, at least once."""
    deadline = time.perf_counter() + seconds
    sampler = make_greedy_sampler(model)
    max_texts = min(MAX_SLICE_TEXTS[model.device.type], max(1, MAX_SLICE_LOGITS // model.vocabulary_size))
    # A model fed with chains computes each text separately, from its first token.
    num_texts = min(MIN_SLICE_TEXTS if model.feeds_chains else FIRST_SLICE_TEXTS, max_texts)
    common_token: int | None = None
    while len(missing := tokens[answers.is_missing[tokens]]):
        # Single tokens first: the successors of the pairs are then known.
        alone = missing[answers.known[missing] == NOTHING]
        asked = alone[:num_texts] if len(alone) else missing[: max(1, num_texts // (1 + K))]
        started = time.perf_counter()
        try:
            if common_token is None:
                common_token = _common_token(model, sampler, num_texts)
            _ask_about(model, sampler, common_token, answers, asked)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if num_texts <= MIN_SLICE_TEXTS:
                return
            num_texts = max_texts = max(MIN_SLICE_TEXTS, num_texts // 2)
            continue
        ended = time.perf_counter()
        if ended > deadline:
            return
        if ended - started < SLICE_SECONDS / 2:
            num_texts = min(max_texts, 2 * num_texts)


def _ask_about(model: ModelRunner, sampler: Sampler, common_token: int, answers: Answers, tokens: np.ndarray) -> None:
    """Query the model about m tokens, alone if nothing is known of them yet, else with their likeliest successors."""
    if answers.known[tokens[0]] == NOTHING:
        answers.add(tokens, ALONE, after_token=_candidates_after(model, sampler, common_token, tokens[:, None]))
    else:
        successors = np.maximum(_unpacked(sampler, answers.after_token[tokens])[:, :K], 0)  # -1 in a tiny vocabulary
        pairs = np.stack([np.repeat(tokens, K), successors.ravel()], axis=1)
        after_pair = _candidates_after(model, sampler, common_token, pairs)
        answers.add(tokens, PAIRED, after_pair=after_pair.reshape(len(tokens), K, WIDTH))


def _common_token(model: ModelRunner, sampler: Sampler, num_texts: int) -> int:
    """Return the token to query others after, from a pass of up to `num_texts` tokens."""
    size, num_spaced = model.vocabulary_size, min(NUM_SPACED, num_texts)
    spaced = np.arange(num_spaced) * size // num_spaced
    packed = _candidates_after(model, sampler, size // 2, spaced[:, None])
    return int(np.bincount(sampler.unpack(packed)[0]).argmax())


def _candidates_after(model: ModelRunner, sampler: Sampler, first: int, branches: np.ndarray) -> np.ndarray:
    """Return [m, WIDTH] packed top-k candidates after each text of a `first` token and a branch, [m, length]."""
    branches, rows = np.unique(branches, axis=0, return_inverse=True)  # a tiny vocabulary repeats some
    num_fed = 1 + len(np.unique(branches[:, :-1], axis=0)) * (branches.shape[1] - 1) + len(branches)
    with model.slots.borrowed() as slot:
        model.begin(slot, num_fed)
        logits = model.logits_after_each(slot, branches.tolist(), [first])
        packed, _ = sampler.sample(logits, TokenTree([0], max_depth=1), [0] * len(branches), [0])
        return packed.cpu().numpy()[rows.reshape(-1)]
