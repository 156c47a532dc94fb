"""What a replica measures of its model before it drafts: how long a step of so many tokens takes, and what the model
says follows each token of the vocabulary alone. Both are kept on disk.

Letters: V vocabulary, K runners-up, M tokens that a replica's time is known for at most.
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
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lp_runtime.distributed.exchange import broadcast_object, gather_rows
from lp_runtime.lookahead.drafters.best_first.tables import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sizing.cost_model import interpolate
from lp_runtime.utils.files import write_whole

log = logging.getLogger(__name__)

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens of measured steps
MEASURED_CONTEXT = 256  # tokens in the cache while steps are measured
MEASURE_SECONDS = 2.0  # that measuring may take, about
LEAST_MEASURED = 16  # tokens that are measured whatever it takes
MAX_ROUNDS = 5
DEAREST = 12  # no step is measured that is this much dearer than one token's
SWEEP_SECONDS = 8.0  # that the vocabulary may take, about; what is left of it is left out
SWEEP_BATCH = 256  # tokens of the vocabulary at once, each a text of its own
VERSION = 2  # of what is kept
UNKNOWN = 0  # a digest of nothing


class Calibration:
    """One replica's measurements, made when first asked for; every replica must ask for the same at the same time.

    Args:
        model: this replica's.
        rank, num_replicas: its place in the group.
        device: where the group's backend wants its tensors.
        cache_dir: where to keep what was measured; None to measure it again every time.
        known: what was measured before in this process; filled in.
    """

    def __init__(
        self,
        model: ModelRunner,
        rank: int,
        num_replicas: int,
        device: torch.device,
        cache_dir: str | None,
        known: dict[str, Any] | None = None,
    ):
        self._model = model
        self._rank = rank
        self._num_replicas = num_replicas
        self._device = device
        self._folder: Path | None = None
        if cache_dir is not None:
            with contextlib.suppress(RuntimeError):  # there is no home folder
                self._folder = Path(cache_dir).expanduser()
        self._known = {} if known is None else known
        self._gathered: list[tuple[np.ndarray, np.ndarray]] | None = None
        self._vocabulary: np.ndarray | None = None

    def _points(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """[R] numbers of tokens, and nanoseconds of a step with so many."""
        if self._gathered is None:
            name = f"steps-{self._fingerprint()}-{self._machine()}.npz"
            found = self._known.get("points") or self._load(name, ("tokens", "nanoseconds"))
            if found is None:
                tokens, nanoseconds = measure_steps(self._model)
                found = {"tokens": np.array(tokens), "nanoseconds": np.array(nanoseconds)}
                self._store(name, found)
            self._known["points"] = found
            row = np.zeros(2 * len(GRID), dtype=np.int64)
            row[: len(found["tokens"])] = found["tokens"]
            row[len(GRID) : len(GRID) + len(found["tokens"])] = found["nanoseconds"]
            points = []
            for theirs in gather_rows(row, self._num_replicas, self._device):
                num_points = int((theirs[: len(GRID)] > 0).sum())
                points.append((theirs[:num_points], theirs[len(GRID) : len(GRID) + num_points]))
            self._gathered = points
        return self._gathered

    def times(self, num_tokens: int) -> np.ndarray:
        """[R, num_tokens + 1] nanoseconds of every replica's step."""
        return np.stack([interpolate(tokens, times, num_tokens) for tokens, times in self._points()])

    def max_step_tokens(self) -> int:
        """M: the largest step that was measured on all replicas."""
        return min(int(tokens[-1]) for tokens, _ in self._points())

    def vocabulary(self) -> np.ndarray:
        """[V, ENTRY] what follows each token alone, as tables.py stores it; the same on all replicas."""
        if self._vocabulary is None:
            # Replicas that were in different groups may have asked the model each in their own way.
            mine = np.array([_digest(self._known.get("vocabulary"))])
            digests = set(gather_rows(mine, self._num_replicas, self._device).flatten().tolist())
            if len(digests) > 1 or UNKNOWN in digests:
                self._ask_vocabulary()
            self._vocabulary = self._known["vocabulary"]
        return self._vocabulary

    def _ask_vocabulary(self) -> None:
        """What rank 0 knows, else what is on its disk, else what all replicas find out together."""
        name = f"vocabulary-{self._fingerprint()}.npz"
        found = None
        if self._rank == 0:
            found = self._known.get("vocabulary")
            if found is None and (saved := self._load(name, ("packed",))) is not None:
                found = self._unpack(saved["packed"])
        found = broadcast_object(found, self._rank, self._num_replicas, self._device)
        if found is None:
            packed = self._sweep()
            if self._rank == 0:
                self._store(name, {"packed": packed})
            found = self._unpack(packed)
        self._known["vocabulary"] = found

    def _unpack(self, packed: np.ndarray) -> np.ndarray:
        """[V, ENTRY] of [V, width] as Sampler packs them."""
        *_, vocabulary = _make_sampler(self._model).unpack(packed)
        return vocabulary

    def _sweep(self) -> np.ndarray:
        """[V, width] what follows each token; every replica asks the model about its part."""
        mine = np.arange(self._rank, self._model.vocabulary_size, self._num_replicas)
        packed, num_done = sweep_vocabulary(self._model, mine)
        whole = np.zeros((self._model.vocabulary_size, packed.shape[1]), dtype=np.int64)
        whole[mine[:num_done]] = packed
        rows = gather_rows(whole.reshape(-1), self._num_replicas, self._device)
        whole = rows.sum(axis=0).reshape(whole.shape)
        unknown = whole[:, 1:].any(axis=1) == 0
        whole[unknown, 1:] = -1  # no token
        if self._rank == 0 and unknown.any():
            log.info(
                "the vocabulary's first %d of %d tokens were asked about", len(unknown) - unknown.sum(), len(whole)
            )
        return whole

    def _fingerprint(self) -> str:
        """Which model this is, by its configuration and some of its weights, in which type, in which versions."""
        digest = hashlib.blake2b(digest_size=12)
        model = self._model.model
        versions = [metadata.version(name) for name in ("torch", "transformers")]
        parts = [VERSION, K, str(self._model.dtype), self._model.strict_tokens, self._model.fixed_sizes, *versions]
        digest.update(repr((parts, model.config.to_json_string())).encode())
        for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            with contextlib.suppress(Exception):  # what is on no device, or quantized, need not be readable like this
                sample = tensor.detach().flatten()[:: max(1, tensor.numel() // 64)][:64]
                digest.update(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _machine(self) -> str:
        """What steps are timed on."""
        device = self._model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {os.cpu_count()}"
        what = f"{name} {torch.get_num_threads()} {self._num_replicas}"
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
        np.savez_compressed(data, **arrays)
        try:
            write_whole(self._folder / name, data.getvalue())
        except OSError as error:
            log.warning("%s cannot be kept: %s", self._folder / name, error.strerror or error)


def _digest(array: np.ndarray | None) -> int:
    """63 bits of what an array holds; UNKNOWN of None."""
    if array is None:
        return UNKNOWN
    whole = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).digest()
    return max(1, int.from_bytes(whole, "big") >> 1)


def _make_sampler(model: ModelRunner) -> Sampler:
    return Sampler(TreeProcessors([], model.device), None, num_top_k=K)


def measure_steps(model: ModelRunner) -> tuple[list[int], list[int]]:
    """How long this replica takes to feed a tree, draw the successors and read them back.

    Returns:
        (tokens, nanoseconds): numbers of tokens, and the median of a step with so many.
    """
    drawing = _make_sampler(model)
    context = max(1, min(MEASURED_CONTEXT, (model.context_length or MEASURED_CONTEXT) // 4))
    # A step commits a token, and there are three of each size: positions stay within a short context, too.
    room = GRID[-1] if model.context_length is None else model.context_length - context - 3 * len(GRID) - 8
    most = max(1, min(GRID[-1], room))
    sizes = [size for size in GRID if size <= most]
    text = [i % model.vocabulary_size for i in range(context)]

    def step(size: int) -> int:
        # Branches of eight tokens under the root, as a drafted tree has about.
        places = np.arange(size)
        parents = np.where(places % 8 == 1, 0, places - 1)
        depths = np.where(places > 0, (places - 1) % 8 + 1, 0)
        tree = TokenTree.from_arrays(places % model.vocabulary_size, parents, depths, places, 0, max_depth=8)
        nodes = list(range(len(tree)))
        start = time.perf_counter_ns()
        logits = model.forward(tree, nodes, nodes)
        drawing.draw(logits, tree, nodes, text, drawn=model.text.drawn)[0].cpu()
        return time.perf_counter_ns() - start

    def begin() -> None:
        model.begin(context + 3 * len(sizes) + sizes[-1])
        model.prefill(text)

    started = time.perf_counter()
    begin()
    once: list[int] = []
    for size in sizes:
        try:
            warming_up = time.perf_counter()
            step(size)  # the first of each compiles and captures, whatever it takes
            started += time.perf_counter() - warming_up
            once.append(min(step(size), step(size)))  # one may be disturbed
        except torch.OutOfMemoryError:
            break
        is_late = time.perf_counter() - started > MEASURE_SECONDS and size >= LEAST_MEASURED
        if is_late or once[-1] > DEAREST * once[0]:
            break
    sizes = sizes[: len(once)]
    seen: list[list[int]] = [[] for _ in sizes]
    for _ in range(MAX_ROUNDS):
        if seen[0] and time.perf_counter() - started > MEASURE_SECONDS:
            break
        begin()
        for size, times in zip(sizes, seen, strict=True):
            times.append(step(size))
    return sizes, [int(statistics.median(times)) for times in seen]


def sweep_vocabulary(model: ModelRunner, tokens: np.ndarray) -> tuple[np.ndarray, int]:
    """What the model says follows each of some tokens, each of them alone: as many of the first as there is time for.

    Args:
        tokens: [m] token ids.

    Returns:
        (packed, num_done): [num_done, width] as Sampler packs them.
    """
    drawing = _make_sampler(model)
    started = time.perf_counter()
    packed = []
    num_done = 0
    for first in range(0, len(tokens), SWEEP_BATCH):
        batch = tokens[first : first + SWEEP_BATCH].tolist()
        model.begin(len(batch))
        logits = model.alone(batch)
        tree = TokenTree([0], max_depth=1)
        packed.append(drawing.draw(logits, tree, [0] * len(batch), [0])[0].cpu().numpy())
        num_done += len(batch)
        if time.perf_counter() - started > SWEEP_SECONDS:
            break
    return np.concatenate(packed), num_done
