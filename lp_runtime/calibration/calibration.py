"""Measurements that a replica makes of its model before it drafts.

They are the duration of a step of n tokens, and the vocabulary prior. Both are cached on disk.

Letters: V vocabulary, R replicas, M tokens of the largest measured step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from importlib import metadata

import numpy as np
import torch
from llvmlite import binding

from lp_runtime.calibration.files import CalibrationFiles
from lp_runtime.calibration.step_meter import (
    StepMeasurement,
    checked_measurement,
    make_greedy_sampler,
    measure_steps,
    measurement_of,
    num_context_tokens,
    row_of,
)
from lp_runtime.calibration.vocabulary_prior import Answers, agreed_answers
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.top_k import K, VocabularyPrior
from lp_runtime.model.hf.config import attention_of
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sizing.cost_model import interpolate, times_at_length

FORMAT_VERSION = 8  # of cached files; increment it when their layout or the work of a pass changes


@dataclass
class Measured:
    """Measurements of a model that a process keeps across groups; None until they are known."""

    steps: StepMeasurement | None = None
    vocabulary: Answers | None = None
    fingerprint: str | None = None


class Calibration:
    """Lazy measurements of one replica; all replicas must request the same measurement at the same time.

    Args:
        cache_dir: folder that caches measurements; None to measure at every start.
        known: earlier measurements of this process; updated in place.
    """

    def __init__(self, model: ModelRunner, group: Group, cache_dir: str | None, known: Measured | None = None):
        self._model = model
        self._group = group
        self._files = CalibrationFiles(cache_dir, reports=group.rank == 0)
        self._known = Measured() if known is None else known
        self._steps: list[StepMeasurement] | None = None  # [R] of all replicas
        self._vocabulary: VocabularyPrior | None = None

    def _all_steps(self) -> list[StepMeasurement]:
        if self._steps is None:
            name = f"steps-{self._fingerprint()}-{self._passes_digest()}.npz"
            mine = self._known.steps
            if mine is None:
                mine = self._files.load(name, StepMeasurement._fields, checked_measurement)
            if mine is None:
                mine = measure_steps(self._model)
                self._files.store(name, mine._asdict())
            self._known.steps = mine
            self._steps = [measurement_of(row) for row in gather_rows(row_of(mine), self._group)]
        return self._steps

    def times(self, num_tokens: int, num_committed: int = 0) -> np.ndarray:
        """Return [R, num_tokens + 1] int64 nanoseconds of each replica's step of 0, 1, 2 ... tokens.

        The steps follow a context of `num_committed` tokens.
        """
        num_more = max(0, num_committed - num_context_tokens(self._model))
        lines = []
        for steps in self._all_steps():
            points = steps.tokens.tolist(), steps.nanoseconds.tolist()
            times = interpolate(*points, num_tokens, int(steps.num_padded))
            lines.append(times_at_length(times, steps.prefix_ns, num_more))
        return np.stack(lines)

    def max_step_tokens(self) -> int:
        """Return M, the largest number of tokens of a step that all replicas have measured."""
        return min(int(steps.tokens[-1]) for steps in self._all_steps())

    def harvest_ns(self) -> int:
        """Return the prefill time of collecting one token's top-k candidates, in ns, on the slowest replica."""
        return max(int(steps.harvest_ns) for steps in self._all_steps())

    def vocabulary(self) -> VocabularyPrior:
        """Return the vocabulary prior; equal on all replicas.

        The first call queries the model for a few seconds. Rows that it does not reach are empty.
        """
        if self._vocabulary is None:
            known, name = self._known, self._vocabulary_name()
            known.vocabulary = agreed_answers(self._model, self._group, known.vocabulary, self._files, name)
            self._vocabulary = known.vocabulary.prior(make_greedy_sampler(self._model))
        return self._vocabulary

    def _vocabulary_name(self) -> str:
        """Return the name of the file of the vocabulary prior."""
        return f"vocabulary-{self._fingerprint()}.npz"

    def _fingerprint(self) -> str:
        """Return a digest of the model: configuration, sampled weights, dtype and library versions."""
        if self._known.fingerprint is not None:  # every group that a replica joins needs it
            return self._known.fingerprint
        digest = hashlib.blake2b(digest_size=12)
        model = self._model.model
        versions = [metadata.version(name) for name in ("torch", "transformers")]
        parts = [FORMAT_VERSION, K, str(self._model.dtype), *versions]
        digest.update(repr((parts, model.config.to_json_string())).encode())
        for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            with contextlib.suppress(Exception):  # meta and quantized tensors may not support this
                sample = tensor.detach().flatten()[:: max(1, tensor.numel() // 64)][:64]
                digest.update(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self._known.fingerprint = digest.hexdigest()
        return self._known.fingerprint

    def _passes_digest(self) -> str:
        """Return a digest of what decides the time of a step: the kind of its passes, hardware, threads, replicas."""
        model, device = self._model, self._model.device
        is_captured = model.graphs is not None and model.graphs.capture
        passes = attention_of(model.model.config.get_text_config()), model.strict_tokens, is_captured
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else binding.get_host_cpu_name()
        what = repr((passes, name, os.cpu_count(), torch.get_num_threads(), self._group.size))
        return hashlib.blake2b(what.encode(), digest_size=6).hexdigest()
