"""Calibration: what a replica measures of its model before it drafts.

It measures how long a step of so many tokens takes, and asks the model which tokens follow each token of the vocabulary
alone (the vocabulary prior). Both are kept on disk.

Letters: V vocabulary, K top-k candidates, R replicas, M tokens of the largest measured step.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lp_runtime.distributed.exchange import broadcast_object, gather_rows
from lp_runtime.distributed.group import Group
from lp_runtime.lookahead.drafters.best_first.tables import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.step_inputs import StepInputs
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.sizing.cost_model import interpolate
from lp_runtime.utils.files import write_whole

log = logging.getLogger(__name__)

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens of measured steps
CONTEXT_TOKENS = 256  # cached while steps are measured
MEASURE_SECONDS = 2.0  # that measuring may take, about
MIN_MEASURED_TOKENS = 16  # steps of so many tokens are measured whatever it takes
MAX_ROUNDS = 5
MAX_COST_MULTIPLE = 12  # no step is measured that costs this multiple of one token's: none so large ever pays
BRANCH_TOKENS = 8  # of a measured tree's branches, as drafted trees have about
SWEEP_SECONDS = 8.0  # that asking about the vocabulary may take, about; what is left of it is left out
SWEEP_BATCH_TOKENS = 256  # of the vocabulary asked about at once, each as a text of its own
FORMAT_VERSION = 2  # of the files
UNKNOWN_DIGEST = 0  # of nothing


class StepMeasurement(NamedTuple):
    """Measured steps of one replica.

    Attributes:
        tokens: [points] tokens of each measured step, ascending.
        nanoseconds: [points] the median duration of each.
    """

    tokens: np.ndarray
    nanoseconds: np.ndarray


@dataclass
class Measured:
    """What a process has measured of a model.

    Attributes:
        steps: durations of steps; None before they were measured.
        vocabulary: [V, ENTRY] the vocabulary prior; None before the model was asked.
    """

    steps: StepMeasurement | None = None
    vocabulary: np.ndarray | None = None


class Calibration:
    """One replica's measurements, made when first asked for; every replica must ask for the same at the same time.

    Args:
        model: this replica's.
        group: the replicas that must agree on what was measured.
        cache_dir: folder that keeps what was measured; None to measure at every start.
        known: what was measured before in this process; filled in.
    """

    def __init__(
        self,
        model: ModelRunner,
        group: Group,
        cache_dir: str | None,
        known: Measured | None = None,
    ):
        self._model = model
        self._group = group
        self._folder: Path | None = None
        if cache_dir is not None:
            with contextlib.suppress(RuntimeError):  # there is no home folder
                self._folder = Path(cache_dir).expanduser()
        self._known = Measured() if known is None else known
        self._steps: list[StepMeasurement] | None = None  # [R] of all replicas
        self._vocabulary: np.ndarray | None = None

    def _all_steps(self) -> list[StepMeasurement]:
        """Return the measured steps of every replica, [R]."""
        if self._steps is None:
            name = f"steps-{self._fingerprint()}-{self._machine()}.npz"
            mine = self._known.steps
            if mine is None and (saved := self._load(name, StepMeasurement._fields)) is not None:
                mine = StepMeasurement(**saved)
            if mine is None:
                mine = measure_steps(self._model)
                self._store(name, mine._asdict())
            self._known.steps = mine
            row = np.zeros(2 * len(GRID), dtype=np.int64)
            num_points = len(mine.tokens)
            row[:num_points], row[len(GRID) : len(GRID) + num_points] = mine
            self._steps = []
            for theirs in gather_rows(row, self._group):
                tokens, nanoseconds = theirs[: len(GRID)], theirs[len(GRID) :]
                num_points = int((tokens > 0).sum())
                self._steps.append(StepMeasurement(tokens[:num_points], nanoseconds[:num_points]))
        return self._steps

    def times(self, num_tokens: int) -> np.ndarray:
        """Return [R, num_tokens + 1] nanoseconds of every replica's step of 0, 1, 2 ... tokens."""
        return np.stack(
            [interpolate(tokens.tolist(), times.tolist(), num_tokens) for tokens, times in self._all_steps()]
        )

    def max_step_tokens(self) -> int:
        """Return M, the tokens of the largest step that was measured on all replicas."""
        return min(int(tokens[-1]) for tokens, _ in self._all_steps())

    def vocabulary(self) -> np.ndarray:
        """Return the vocabulary prior, [V, ENTRY] as draft tables store top-k candidates; equal on all replicas."""
        if self._vocabulary is None:
            # Replicas that were in different groups may have asked the model each in their own way.
            mine = np.array([_digest(self._known.vocabulary)])
            digests = set(gather_rows(mine, self._group).flatten().tolist())
            if len(digests) > 1 or UNKNOWN_DIGEST in digests:
                self._ask_vocabulary()
            self._vocabulary = self._known.vocabulary
            assert self._vocabulary is not None
        return self._vocabulary

    def _ask_vocabulary(self) -> None:
        """Take what rank 0 knows, else what is on rank 0's disk, else what all replicas find out together."""
        name = f"vocabulary-{self._fingerprint()}.npz"
        found = None
        if self._group.rank == 0:
            found = self._known.vocabulary
            if found is None and (saved := self._load(name, ("packed",))) is not None:
                found = self._unpack(saved["packed"])
        found = broadcast_object(found, self._group)
        if found is None:
            packed = self._sweep()
            if self._group.rank == 0:
                self._store(name, {"packed": packed})
            found = self._unpack(packed)
        self._known.vocabulary = found

    def _unpack(self, packed: np.ndarray) -> np.ndarray:
        """Return [V, ENTRY] of [V, width], as a Sampler packs them."""
        *_, vocabulary = _make_sampler(self._model).unpack(packed)
        assert vocabulary is not None  # the sampler reports top-k candidates
        return vocabulary

    def _sweep(self) -> np.ndarray:
        """Return [V, width] top-k candidates after each token; every replica asks its model about a part."""
        mine = np.arange(self._group.rank, self._model.vocabulary_size, self._group.size)
        packed, num_done = sweep_vocabulary(self._model, mine)
        whole = np.zeros((self._model.vocabulary_size, packed.shape[1]), dtype=np.int64)
        whole[mine[:num_done]] = packed
        rows = gather_rows(whole.reshape(-1), self._group)
        whole = rows.sum(axis=0).reshape(whole.shape)
        unknown = whole[:, 1:].any(axis=1) == 0
        whole[unknown, 1:] = -1  # no token
        if self._group.rank == 0 and unknown.any():
            log.info(
                "the vocabulary's first %d of %d tokens were asked about", len(unknown) - unknown.sum(), len(whole)
            )
        return whole

    def _fingerprint(self) -> str:
        """Return a digest of the model: its configuration, some of its weights, dtype, passes and library versions."""
        digest = hashlib.blake2b(digest_size=12)
        model = self._model.model
        versions = [metadata.version(name) for name in ("torch", "transformers")]
        parts = [FORMAT_VERSION, K, str(self._model.dtype), self._model.strict_tokens, _graphs(self._model), *versions]
        digest.update(repr((parts, model.config.to_json_string())).encode())
        for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            with contextlib.suppress(Exception):  # what is on no device, or quantized, need not be readable like this
                sample = tensor.detach().flatten()[:: max(1, tensor.numel() // 64)][:64]
                digest.update(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _machine(self) -> str:
        """Return a digest of what steps are timed on."""
        device = self._model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {os.cpu_count()}"
        what = f"{name} {torch.get_num_threads()} {self._group.size}"
        return hashlib.blake2b(what.encode(), digest_size=6).hexdigest()

    def _load(self, name: str, keys: Sequence[str]) -> dict[str, np.ndarray] | None:
        if self._folder is None:
            return None
        try:
            with np.load(self._folder / name, allow_pickle=False) as saved:
                return {key: saved[key] for key in keys}
        except (OSError, ValueError, KeyError, EOFError):
            return None
        except Exception:  # a damaged archive
            log.warning("%s is damaged and will be made again", self._folder / name)
            return None

    def _store(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        if self._folder is None:
            return
        data = io.BytesIO()
        np.savez_compressed(data, **arrays)  # type: ignore[arg-type]  # numpy's own allow_pickle is not among them
        try:
            write_whole(self._folder / name, data.getvalue())
        except OSError as error:
            log.warning("%s cannot be kept: %s", self._folder / name, error.strerror or error)


def _digest(array: np.ndarray | None) -> int:
    """Return 63 bits of what an array holds; UNKNOWN_DIGEST for None."""
    if array is None:
        return UNKNOWN_DIGEST
    whole = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).digest()
    return max(1, int.from_bytes(whole, "big") >> 1)


def _graphs(model: ModelRunner) -> dict[str, bool] | None:
    """Return how a model's trees are fed in passes of fixed sizes, as files have named it since version 1."""
    return None if model.graphs is None else model.graphs._asdict()


def _make_sampler(model: ModelRunner) -> Sampler:
    return Sampler(TreeProcessors([], model.device), None, num_top_k=K)


def measure_steps(model: ModelRunner) -> StepMeasurement:
    """Measure how long this replica takes to feed a tree, sample the successors and read them back."""
    with model.slots.borrowed() as slot:
        return _StepMeter(model, slot).measure()


class _StepMeter:
    """Times steps of various sizes behind a short context.

    Args:
        model: this replica's.
        slot: is fed; its content is lost.
    """

    def __init__(self, model: ModelRunner, slot: CacheSlot):
        self._model, self._slot, self._sampler = model, slot, _make_sampler(model)
        num_context = max(1, min(CONTEXT_TOKENS, (model.context_length or CONTEXT_TOKENS) // 4))
        self._context = [i % model.vocabulary_size for i in range(num_context)]
        # A step commits a token, and there are three of each size: positions stay within a short context, too.
        length = model.context_length
        max_tokens = GRID[-1] if length is None else length - num_context - 3 * len(GRID) - 8
        self._sizes = [size for size in GRID if size <= max(1, min(GRID[-1], max_tokens))]

    def measure(self) -> StepMeasurement:
        """Return the median durations of steps, as many as there is time for."""
        started = time.perf_counter()
        self._begin()
        once: list[int] = []
        for size in self._sizes:
            try:
                warming_up = time.perf_counter()
                self._step(size)  # the first of each size compiles and captures, whatever that takes
                started += time.perf_counter() - warming_up
                once.append(min(self._step(size), self._step(size)))  # one may be disturbed
            except torch.OutOfMemoryError:
                break
            is_late = time.perf_counter() - started > MEASURE_SECONDS and size >= MIN_MEASURED_TOKENS
            if is_late or once[-1] > MAX_COST_MULTIPLE * once[0]:
                break
        sizes = self._sizes[: len(once)]
        durations: list[list[int]] = [[] for _ in sizes]
        for _ in range(MAX_ROUNDS):
            if durations[0] and time.perf_counter() - started > MEASURE_SECONDS:
                break
            self._begin()
            for size, times in zip(sizes, durations, strict=True):
                times.append(self._step(size))
        return StepMeasurement(np.array(sizes), np.array([int(statistics.median(times)) for times in durations]))

    def _begin(self) -> None:
        self._model.begin(self._slot, len(self._context) + 3 * len(self._sizes) + self._sizes[-1])
        self._model.prefill(self._slot, self._context)

    def _step(self, size: int) -> int:
        """Run a step of so many tokens; return its nanoseconds."""
        model = self._model
        nodes = np.arange(size)
        parents = np.where(nodes % BRANCH_TOKENS == 1, 0, nodes - 1)
        depths = np.where(nodes > 0, (nodes - 1) % BRANCH_TOKENS + 1, 0)
        tree = TokenTree.from_arrays(nodes % model.vocabulary_size, parents, depths, nodes, 0, max_depth=BRANCH_TOKENS)
        inputs = StepInputs(self._slot, tree, nodes.tolist(), nodes.tolist())
        start = time.perf_counter_ns()
        found = model.forward(inputs)
        self._sampler.sample(found, tree, inputs.nodes, self._context)[0].cpu()
        return time.perf_counter_ns() - start


def sweep_vocabulary(model: ModelRunner, tokens: np.ndarray) -> tuple[np.ndarray, int]:
    """Ask the model for the top-k candidates after each of some tokens, as many of the first as there is time for.

    Args:
        model: this replica's.
        tokens: [m] token ids; each is fed as a text of its own.

    Returns:
        (packed, num_done): [num_done, width] as a Sampler packs them.
    """
    sampler = _make_sampler(model)
    tree = TokenTree([0], max_depth=1)
    started = time.perf_counter()
    packed = []
    num_done = 0
    with model.slots.borrowed() as slot:
        for first in range(0, len(tokens), SWEEP_BATCH_TOKENS):
            batch = tokens[first : first + SWEEP_BATCH_TOKENS].tolist()
            model.begin(slot, len(batch))
            logits = model.logits_after_each(slot, batch)
            packed.append(sampler.sample(StepLogits(logits), tree, [0] * len(batch), [0])[0].cpu().numpy())
            num_done += len(batch)
            if time.perf_counter() - started > SWEEP_SECONDS:
                break
    return np.concatenate(packed), num_done
