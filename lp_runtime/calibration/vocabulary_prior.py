"""The vocabulary prior: which tokens a model predicts after each token, equal on all replicas.

A model predicts little of use after the first token of a text: attention concentrates on that position, whatever the
token is (attention sinks, arXiv 2309.17453). So every token is queried after a common first token. On
SmolLM2-135M-Instruct, 34 to 38% of a text's tokens are then among the eight candidates of the token before; without the
first token it is 18%.

A start queries the model for ASKING_SECONDS, each replica about its part of the vocabulary. The cache on disk keeps the
results, and the next start continues with the tokens that are still unknown. The lowest ids come first: byte-pair
encodings give them to the most frequent tokens.

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
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.sampler import Sampler

log = logging.getLogger(__name__)

ASKING_SECONDS = 3.0  # of a start; a GPU answers for 150,000 tokens in this time
SLICE_SECONDS = 0.1  # slices grow to about this duration, so that the last one ends soon after ASKING_SECONDS
FIRST_SLICE_TOKENS = 64
MIN_SLICE_TOKENS = 8
MAX_SLICE_TOKENS = {"cpu": 256, "cuda": 1024}  # enough to keep the device busy
MAX_SLICE_LOGITS = 1 << 28  # largest number of logits (tokens x V) of a slice
NUM_SPACED = 64  # evenly spaced tokens; the most frequent of their likeliest successors is the common token
NO_CANDIDATES = -1  # packed candidates of a token that was not queried
WIDTH = 1 + -(-K // 2)  # int64 of a packed successor with K candidates


@dataclass
class Answers:
    """The model's predictions after single tokens.

    Attributes:
        packed: [V, WIDTH] int64 as packed by a Sampler; 0 if unknown.
        is_known: [V] bool, whether each token was queried.
    """

    packed: np.ndarray
    is_known: np.ndarray

    @classmethod
    def none(cls, vocabulary_size: int) -> Answers:
        """Return answers in which no token is known."""
        return cls(np.zeros((vocabulary_size, WIDTH), np.int64), np.zeros(vocabulary_size, np.bool_))

    def add(self, tokens: np.ndarray, packed: np.ndarray) -> None:
        """Store the rows `packed`, [m, WIDTH], of `tokens`, [m]; the last row of a repeated token counts."""
        self.packed[tokens] = packed
        self.is_known[tokens] = True

    def digest(self) -> int:
        """Return a 63-bit digest of the content."""
        whole = hashlib.blake2b(self.packed.tobytes() + self.is_known.tobytes(), digest_size=8).digest()
        return int.from_bytes(whole, "big") >> 1

    def entries(self, sampler: Sampler) -> np.ndarray:
        """Return [V, ENTRY] int32 entries of the draft tables; those of unknown tokens are empty."""
        packed = self.packed.copy()
        packed[~self.is_known, 1:] = NO_CANDIDATES
        *_, entries = sampler.unpack(packed)
        assert entries is not None  # the sampler reports top-k candidates
        return entries


def agreed_answers(
    model: ModelRunner, group: Group, known: Answers | None, files: CalibrationFiles, name: str
) -> Answers:
    """Return the model's predictions after single tokens, equal on all replicas of the group.

    `known` are those of an earlier group of this process, updated in place. If any replica has some, the model is not
    queried: a replica that joins others does not delay them. Rank 0 reads and writes the file `name`.

    Raises:
        ReplicaError: if a peer is gone.
    """
    answers = known or Answers.none(model.vocabulary_size)
    # Replicas from different groups may have queried the model with different common tokens or slices.
    rows = gather_rows(np.array([known is not None, answers.digest()]), group)
    have_asked = rows[:, 0] > 0
    if have_asked.all() and (rows == rows[0]).all():
        return answers
    num_saved = 0
    if group.rank == 0 and known is None:
        num_saved = _load(answers, files, name)
    _share(answers, np.flatnonzero(answers.is_known), group)
    unknown = np.flatnonzero(~answers.is_known)
    if len(unknown) and not have_asked.any():
        mine = unknown[group.rank :: group.size]
        _ask(model, answers, mine)
        _share(answers, mine[answers.is_known[mine]], group)
        num_known = int(answers.is_known.sum())
        if group.rank == 0 and num_known > num_saved:
            files.store(name, {"packed": answers.packed, "is_known": answers.is_known})
            if num_known < len(answers.is_known):
                log.info("%d of the vocabulary's %d tokens were queried", num_known, len(answers.is_known))
    return answers


def _load(answers: Answers, files: CalibrationFiles, name: str) -> int:
    """Add the results of a cache file; return their number."""
    saved = files.load(name, ("packed", "is_known"))
    if saved is None or saved["packed"].shape != answers.packed.shape:
        return 0
    tokens = np.flatnonzero(saved["is_known"])
    answers.add(tokens, saved["packed"][tokens])
    return len(tokens)


def _share(answers: Answers, tokens: np.ndarray, group: Group) -> None:
    """Add all replicas' rows of their `tokens`; if several have a token, the lowest rank's row counts."""
    num_rows = int(gather_rows(np.array([len(tokens)]), group).max())
    if group.is_alone or not num_rows:
        return
    block = np.full((num_rows, 1 + WIDTH), -1, dtype=np.int64)
    block[: len(tokens), 0], block[: len(tokens), 1:] = tokens, answers.packed[tokens]
    rows = gather_rows(block.reshape(-1), group).reshape(-1, 1 + WIDTH)[::-1]  # rank 0 last: its rows win
    rows = rows[rows[:, 0] >= 0]
    answers.add(rows[:, 0], rows[:, 1:])


def _ask(model: ModelRunner, answers: Answers, tokens: np.ndarray) -> None:
    """Query the model about `tokens`, [m], slice by slice, for ASKING_SECONDS; at least about one slice."""
    deadline = time.perf_counter() + ASKING_SECONDS
    sampler = make_greedy_sampler(model)
    max_tokens = min(MAX_SLICE_TOKENS[model.device.type], max(1, MAX_SLICE_LOGITS // model.vocabulary_size))
    # A model fed with chains computes each text separately, from its first token.
    num_tokens = min(MIN_SLICE_TOKENS if model.feeds_chains else FIRST_SLICE_TOKENS, max_tokens)
    common_token: int | None = None
    while len(tokens):
        started, asked = time.perf_counter(), tokens[:num_tokens]
        try:
            if common_token is None:
                common_token = _common_token(model, sampler, num_tokens)
            answers.add(asked, _candidates_after(model, sampler, common_token, asked))
        except torch.OutOfMemoryError:
            if num_tokens <= MIN_SLICE_TOKENS:
                return
            num_tokens = max_tokens = MIN_SLICE_TOKENS
            continue
        tokens, ended = tokens[len(asked) :], time.perf_counter()
        if ended > deadline:
            return
        if ended - started < SLICE_SECONDS / 2:
            num_tokens = min(max_tokens, 2 * num_tokens)


def _common_token(model: ModelRunner, sampler: Sampler, num_tokens: int) -> int:
    """Return the token to query others after, from a pass of up to `num_tokens` tokens."""
    size, num_spaced = model.vocabulary_size, min(NUM_SPACED, num_tokens)
    packed = _candidates_after(model, sampler, size // 2, np.arange(num_spaced) * size // num_spaced)
    return int(np.bincount(sampler.unpack(packed)[0]).argmax())


def _candidates_after(model: ModelRunner, sampler: Sampler, first: int, tokens: np.ndarray) -> np.ndarray:
    """Return [m, WIDTH] packed top-k candidates after each two-token text (`first`, token)."""
    with model.slots.borrowed() as slot:
        model.begin(slot, 1 + len(tokens))
        logits = model.logits_after_each(slot, tokens.tolist(), [first])
        packed, _ = sampler.sample(logits, TokenTree([0], max_depth=1), [0] * len(tokens), [0])
        return packed.cpu().numpy()
