"""Calibration: what a replica measures of its model before it drafts.

It measures how long a step of so many tokens takes (step_meter.py), and asks the model which tokens follow each token
of the vocabulary alone (vocabulary_prior.py). Both are kept on disk.

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

from lp_runtime.calibration.files import CalibrationFiles
from lp_runtime.calibration.step_meter import StepMeasurement, measure_steps, measurement_of, num_context_tokens, row_of
from lp_runtime.calibration.vocabulary_prior import Answers, VocabularyPrior
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.drafters.best_first.tables import K
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sizing.cost_model import interpolate, times_behind

SWEEP_SECONDS = 8.0  # that asking about the vocabulary at once may take, about; what is left of it is left out
START_SECONDS = 1.0  # that asking may take of a start, where the rest is asked between requests
FORMAT_VERSION = 7  # of the files, and of what passes do: one more where either changes


@dataclass
class Measured:
    """What a process has measured of a model.

    Attributes:
        steps: durations of steps; None before they were measured.
        vocabulary: what the model has said of tokens; None before it was asked.
        is_started: whether the process has taken its time at start to ask about the vocabulary.
        fingerprint: digest of the model; None before it was needed.
    """

    steps: StepMeasurement | None = None
    vocabulary: Answers | None = None
    is_started: bool = False
    fingerprint: str | None = None


class Calibration:
    """One replica's measurements, made when first asked for; every replica must ask for the same at the same time.

    Args:
        model: this replica's.
        group: the replicas that must agree on what was measured.
        cache_dir: folder that keeps what was measured; None to measure at every start.
        known: what was measured before in this process; filled in.
        is_gradual: whether `vocabulary` returns what is known so far, and somebody calls `ask_vocabulary` between
            requests; else the first call asks about the whole vocabulary.
    """

    def __init__(
        self,
        model: ModelRunner,
        group: Group,
        cache_dir: str | None,
        known: Measured | None = None,
        is_gradual: bool = False,
    ):
        self._model, self._group, self._is_gradual = model, group, is_gradual
        self._files = CalibrationFiles(cache_dir)
        self._known = Measured() if known is None else known
        self._steps: list[StepMeasurement] | None = None  # [R] of all replicas
        self._prior: VocabularyPrior | None = None

    def _all_steps(self) -> list[StepMeasurement]:
        """Return the measured steps of every replica, [R]."""
        if self._steps is None:
            name = f"steps-{self._fingerprint()}-{self._machine()}.npz"
            mine = self._known.steps
            if mine is None and (saved := self._files.load(name, StepMeasurement._fields)) is not None:
                mine = StepMeasurement(**saved)
            if mine is None:
                mine = measure_steps(self._model)
                self._files.store(name, mine._asdict())
            self._known.steps = mine
            rows = gather_rows(row_of(mine), self._group)
            self._steps = [measurement_of(row) for row in rows]
        return self._steps

    def times(self, num_tokens: int, num_committed: int = 0) -> np.ndarray:
        """Return [R, num_tokens + 1] nanoseconds of every replica's step of 0, 1, 2 ... tokens.

        Args:
            num_tokens: of the largest step.
            num_committed: tokens behind which steps are fed.
        """
        num_more = max(0, num_committed - num_context_tokens(self._model))
        found = []
        for steps in self._all_steps():
            points = steps.tokens.tolist(), steps.nanoseconds.tolist()
            times = interpolate(*points, num_tokens, int(steps.num_padded))
            found.append(times_behind(times, steps.prefix_ns, num_more))
        return np.stack(found)

    def max_step_tokens(self) -> int:
        """Return M, the tokens of the largest step that was measured on all replicas."""
        return min(int(steps.tokens[-1]) for steps in self._all_steps())

    def harvest_ns(self) -> int:
        """Return how many nanoseconds longer a prefill takes, on the slowest replica, for each token whose top-k
        candidates it finds."""
        return max(int(steps.harvest_ns) for steps in self._all_steps())

    def vocabulary(self) -> np.ndarray:
        """Return the vocabulary prior, [V, ENTRY] as draft tables store top-k candidates; equal on all replicas.

        Of tokens that the model was not asked about yet there are none. All replicas call this at the same request.
        """
        prior = self._vocabulary_prior()
        if self._is_gradual:
            prior.agree()
        elif not prior.is_settled:
            prior.agree()
            if not prior.is_complete:
                prior.ask(SWEEP_SECONDS)
                prior.agree(min_new=1)
                prior.save()
            prior.is_settled = True
        return prior.entries()

    def prepare_vocabulary(self, seconds: float | None = None) -> None:
        """Ask about the vocabulary for a while if it is asked gradually, else for as long as it takes.

        Args:
            seconds: how long, at least; by default START_SECONDS, once a process.
        """
        self.vocabulary()
        prior = self._vocabulary_prior()
        if self._is_gradual and not prior.is_complete:
            if seconds is not None or not self._known.is_started:
                prior.ask(START_SECONDS if seconds is None else seconds)
            self._known.is_started = True
            prior.agree(min_new=1)
            if prior.is_complete:
                prior.save()

    def ask_vocabulary(self) -> bool:
        """Ask about some tokens, between requests and on this replica alone; return whether there is more to ask.

        What is found takes effect when all replicas next call `vocabulary`.
        """
        return self._vocabulary_prior().ask_once()

    @property
    def has_vocabulary(self) -> bool:
        """Whether all replicas know of all tokens, so that nobody need ask."""
        return self._vocabulary_prior().is_complete

    def save_vocabulary(self) -> None:
        """Keep on disk what is known of the vocabulary, if that is more than is kept."""
        self._vocabulary_prior().save()

    def _vocabulary_prior(self) -> VocabularyPrior:
        if self._prior is None:
            width = Answers.width_of(K)
            if self._known.vocabulary is None:
                self._known.vocabulary = Answers.none(self._model.vocabulary_size, width)
            name = f"vocabulary-{self._fingerprint()}.npz"
            self._prior = VocabularyPrior(self._model, self._group, self._known.vocabulary, self._files, name)
        return self._prior

    def _fingerprint(self) -> str:
        """Return a digest of the model: its configuration, some of its weights, dtype, passes and library versions.

        It is computed once a process: every group that a replica joins needs it.
        """
        if self._known.fingerprint is None:
            self._known.fingerprint = self._digest_of_model()
        return self._known.fingerprint

    def _digest_of_model(self) -> str:
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


def _graphs(model: ModelRunner) -> dict[str, bool] | None:
    """Return how a model's trees are fed in passes of fixed sizes, as files have named it since version 1."""
    return None if model.graphs is None else model.graphs._asdict()
