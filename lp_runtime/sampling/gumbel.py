"""Gumbel noise that every replica can compute: a hash of (seed, sample, position, token id).

argmax(scores + Gumbel noise) is a sample of softmax(scores). The noise belongs to the position, not to a step or
replica. So one seed gives one output however the work is shared, a guess is accepted exactly if it equals the sampled
token, and drafters can predict what will be sampled at a position from that position's noise.

The hash is Philox4x32-10 (lp_runtime/lookahead/philox.py) in int64 tensor operations. CPUs and GPUs compute bitwise
equal uniform numbers.

Letters: n nodes, V vocabulary, m positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lp_runtime.lookahead.philox import (
    KEY_INCREMENTS,
    MULTIPLIERS,
    NUM_ROUNDS,
    UNIFORM_HALF_BITS,
    UNIFORM_UNIT,
    WORD_BITS,
    WORD_MASK,
)
from lp_runtime.utils.tensors import tensor_on

MAX_SAMPLE = WORD_MASK  # a sample's index is one 32-bit word of the counter


def philox(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Return Philox4x32-10 of a counter, [4, ...] int64 words of 32 bits, with a key of two such words."""
    shape = (2, *[1] * (counter.dim() - 1))

    def column(words: Sequence[int]) -> torch.Tensor:
        return tensor_on(counter.device, words).view(shape)

    multipliers, keys, increments = column(MULTIPLIERS), column(key), column(KEY_INCREMENTS)
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for _ in range(NUM_ROUNDS):
        product = even * multipliers  # wraps around at 64 bits; the sign bit is used, too
        even = ((product >> WORD_BITS) & WORD_MASK).flip(0) ^ odd ^ keys
        odd = (product & WORD_MASK).flip(0)
        keys = (keys + increments) & WORD_MASK
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(
    seed: int, sample: int, positions: Sequence[int], vocabulary_size: int, device: torch.device, first: int = 0
) -> torch.Tensor:
    """Return [m, V] float64 uniform numbers in (0, 1) with 52 bits, bitwise equal on every device."""
    # One counter yields the bits of two neighbouring token ids.
    pairs = torch.arange(first // 2, (first + vocabulary_size + 1) // 2, device=device)
    counter = torch.zeros((4, len(positions), len(pairs)), dtype=torch.int64, device=device)
    counter[0] = pairs
    counter[1] = tensor_on(device, positions)[:, None]
    counter[2] = sample
    words = philox(counter, (seed & WORD_MASK, seed >> WORD_BITS))
    unused = WORD_BITS - UNIFORM_HALF_BITS
    bits = ((words[0::2] >> unused) << UNIFORM_HALF_BITS) | (words[1::2] >> unused)  # [2, m, V / 2]
    return ((bits.double() + 0.5) * UNIFORM_UNIT).permute(1, 2, 0).flatten(1)[:, first % 2 :][:, :vocabulary_size]


class GumbelNoise:
    """The noise of one sample by absolute position, for token ids from `first` on; recent rows are cached."""

    def __init__(self, seed: int, sample: int, vocabulary_size: int, device: torch.device, first: int = 0):
        self.seed, self.sample = seed, sample
        self._vocabulary_size = vocabulary_size
        self._device = device
        self._first = first
        self._row_of: dict[int, int] = {}  # by position
        self._rows = torch.empty((0, vocabulary_size), dtype=torch.float32, device=device)

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """Return [n, V] float32 standard Gumbel noise of the tokens to be sampled at `positions`, [n]."""
        if missing := sorted(set(positions) - self._row_of.keys()):
            uniform = uniforms(self.seed, self.sample, missing, self._vocabulary_size, self._device, self._first)
            new = -(-uniform.log()).log()
            # Positions before this step's are not needed again.
            kept = [position for position in self._row_of if position >= min(positions)]
            rows = self._rows.index_select(0, tensor_on(self._device, [self._row_of[position] for position in kept]))
            self._rows = torch.cat([rows, new.float()])
            self._row_of = {position: row for row, position in enumerate([*kept, *missing])}
        return self._rows.index_select(0, tensor_on(self._device, [self._row_of[position] for position in positions]))


def sample_successors(scores: torch.Tensor, positions: Sequence[int], noise: GumbelNoise | None) -> torch.Tensor:
    """Sample n nodes' successors at absolute `positions` from `scores`, [n, V] float32; return [n] int64.

    Without noise the choice is greedy: the likeliest token, on ties the lowest id, like `generate(do_sample=False)`.
    """
    return largest(scores if noise is None or not positions else scores + noise.at(positions))


def largest(scores: torch.Tensor) -> torch.Tensor:
    """Return [n] int64 indices of each row's largest score, on ties the first; scores are [n, V] float32."""
    if scores.device.type == "cpu":  # numpy does this several times faster than torch
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)
