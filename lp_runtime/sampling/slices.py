"""Sampling from a vocabulary that is divided into slices, one on each shard.

Each shard finds the best tokens of its slice; these few integers per node are then merged. The result equals sampling
from all logits, bit for bit.

Letters: n nodes, V vocabulary, P slices, v tokens of one of them, K top-k candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lp_runtime.kernels.dispatch import kernels_for, on
from lp_runtime.kernels.types import Noise, Packing
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.packing import HALF_BITS, HALF_MASK, find_top_k, pack_candidates
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.sampling.truncation import Truncation
from lp_runtime.utils.jit import compiles
from lp_runtime.utils.tensors import tensor_on

MAX_NOISES = 64  # cached noises: at least one for each request that is decoded at the same time


class SampleRequest(NamedTuple):
    """Sampling parameters for the successors of n nodes; can be sent to another process."""

    packing: Packing
    truncation: Truncation  # its temperature scales the logits; it has no cutoffs
    key: tuple[int, int] | None  # (seed, sample) of the noise; None for greedy decoding
    positions: Sequence[int]  # [n] absolute positions of the tokens to be sampled


class VocabularySlice:
    """Samples from one slice of a vocabulary, and merges the results of all slices.

    `sizes` are [P] tokens of each slice, the largest first, in the order of token ids.
    """

    def __init__(self, index: int, sizes: Sequence[int], device: torch.device):
        self._first = sum(sizes[:index])
        self._size = sizes[index]
        self.device = device
        self._vocabulary_size, self._largest_size = sum(sizes), sizes[0]
        self._noises: dict[tuple[int, int], GumbelNoise] = {}  # by last use, the latest at the end
        compile_slices()

    @property
    def can_find(self) -> bool:
        """Whether `find` and `pack` support the device; if not, all logits must be gathered."""
        return self.device.type == "cpu" or kernels_for(self.device) is not None

    def find(self, logits: torch.Tensor, wanted: SampleRequest) -> torch.Tensor:
        """Find the slice's token that would be sampled, and its top-k candidates.

        The logits are [n, v], in the model's dtype. Returns [n, width] int64 with the same width on all slices: token
        ids and their scores, half an integer each.
        """
        if kernels := kernels_for(self.device):
            if not kernels.can_cut(logits.dtype, None):
                logits = logits.float()
            inverse = wanted.truncation.inverse_temperature
            with on(self.device):
                noise = self._kernel_noise(wanted)
                return kernels.find_in_slice(logits, wanted.packing, noise, inverse, self._first, self._largest_size)
        scores, num = logits.float().numpy(), wanted.packing.num
        if wanted.truncation.temperature != 1.0:
            scores = scores / np.float32(wanted.truncation.temperature)
        ids = np.zeros((len(scores), 1 + num), np.int64)
        values = np.full(ids.shape, -np.inf, np.float32)
        if self._size:
            noisy = scores if wanted.key is None else scores + self._noise(wanted.key).at(wanted.positions).numpy()
            ids[:, 0] = noisy.argmax(axis=-1)
            values[:, 0] = np.take_along_axis(noisy, ids[:, :1], axis=-1)[:, 0]
        if num:
            top_k = np.empty((len(scores), num), np.int64), np.empty((len(scores), num), np.float32)
            find_top_k(np.ascontiguousarray(scores), num, *top_k)
            ids[:, 1:], values[:, 1:] = top_k
        return torch.from_numpy((values.view(np.int32).astype(np.int64) << HALF_BITS) | (ids + self._first))

    def pack(self, candidates: torch.Tensor, wanted: SampleRequest) -> torch.Tensor:
        """Merge results of `find` for all slices, [P, n, width], into packed ones without log-probabilities."""
        if kernels := kernels_for(self.device):
            with on(self.device):
                return kernels.pack_candidates(
                    candidates, wanted.packing, self._kernel_noise(wanted), self._vocabulary_size
                )
        words, num = candidates.transpose(0, 1).numpy(), wanted.packing.num  # [n, P, width]
        ids, values = words & HALF_MASK, (words >> HALF_BITS).astype(np.int32).view(np.float32)
        packed = np.zeros((len(words), wanted.packing.width), np.int64)
        winners = values[:, :, 0].argmax(axis=-1)  # on ties the first slice, which has the lowest ids
        packed[:, 0] = ids[np.arange(len(words)), winners, 0]
        if num:
            flat = (len(words), num * words.shape[1])
            pack_candidates(ids[:, :, 1:].reshape(flat), values[:, :, 1:].reshape(flat), num, packed)
        return torch.from_numpy(packed)

    def _noise(self, key: tuple[int, int]) -> GumbelNoise:
        noise = self._noises.pop(key, None) or GumbelNoise(*key, self._size, self.device, self._first)
        self._noises[key] = noise
        if len(self._noises) > MAX_NOISES:
            del self._noises[next(iter(self._noises))]
        return noise

    def _kernel_noise(self, wanted: SampleRequest) -> Noise | None:
        return None if wanted.key is None else Noise(*wanted.key, tensor_on(self.device, wanted.positions))


@compiles
def compile_slices() -> None:
    ids, values = np.zeros((1, 2), np.int64), np.zeros((1, 2), np.float32)
    find_top_k(np.zeros((1, 3), np.float32), 2, ids, values)
    pack_candidates(ids, values, 2, np.zeros((1, 2), np.int64))


class SlicedLogits(StepLogits):
    """Logits that stay on the shards, a slice on each, until all of them are needed."""

    def __init__(
        self,
        vocabulary: VocabularySlice,
        # Gathers the logits of rows `start` to `stop` of the shards' last pass, [n, V].
        read: Callable[[int, int], torch.Tensor],
        # Runs `VocabularySlice.find` on all shards for rows `start` to `stop` of their last pass, [P, n, width].
        find: Callable[[int, int, SampleRequest], torch.Tensor],
        rows_of_pass: range,  # the rows of the n nodes
        presampled: torch.Tensor | None = None,
    ):
        super().__init__(torch.empty(0), presampled)
        self._vocabulary = vocabulary
        self._read = read
        self._find = find
        self._rows_of_pass = rows_of_pass

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """[n, V] logits in the model's dtype, gathered at first use."""
        return self._read(self._rows_of_pass.start, self._rows_of_pass.stop)

    @property
    def device(self) -> torch.device:
        return self._vocabulary.device

    def __len__(self) -> int:
        return len(self._rows_of_pass)

    def sample(self, wanted: SampleRequest) -> torch.Tensor:
        """Sample the n nodes' successors without gathering logits; see `VocabularySlice.pack`."""
        if not len(self):  # a replica may own no nodes of a step
            return torch.zeros((0, wanted.packing.width), dtype=torch.int64, device=self.device)
        candidates = self._find(self._rows_of_pass.start, self._rows_of_pass.stop, wanted)
        return self._vocabulary.pack(candidates, wanted)

    def part(self, start: int, stop: int) -> SlicedLogits:
        presampled = None if self.presampled is None else self.presampled[start:stop]
        return SlicedLogits(self._vocabulary, self._read, self._find, self._rows_of_pass[start:stop], presampled)
