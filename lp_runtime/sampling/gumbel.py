"""Noise that every replica can compute: a hash of (seed, sample, position, token id), by which sampling is an arg max.

The token drawn from softmax(scores) is argmax(scores + Gumbel noise). The noise belongs to the position, not to the
step or the replica that draws, so one seed gives one output however the work is shared, a guess is accepted exactly
when it equals what is drawn, and what will be drawn at a position can be guessed with that position's noise beforehand.

The hash is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a counter-based
generator, in int64 tensor operations: CPUs and GPUs agree on every bit of the uniforms.

Letters: n nodes, V vocabulary, m positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lp_runtime.utils.tensors import tensor_on

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what the two key words grow by each round
NUM_ROUNDS = 10
WORD = 0xFFFFFFFF
MAX_SAMPLE = 2**32 - 1


def philox(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Philox4x32-10.

    Args:
        counter: [4, ...] int64, words of 32 bits.
        key: two words of 32 bits.

    Returns:
        [4, ...] int64 words of 32 random bits.
    """
    shape = (2, *[1] * (counter.dim() - 1))

    def column(words: Sequence[int]) -> torch.Tensor:
        return tensor_on(counter.device, words).view(shape)

    multipliers, keys, weyl = column(MULTIPLIERS), column(key), column(WEYL)
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for _ in range(NUM_ROUNDS):
        product = even * multipliers  # wraps around at 64 bits; all of them count
        even = ((product >> 32) & WORD).flip(0) ^ odd ^ keys
        odd = (product & WORD).flip(0)
        keys = (keys + weyl) & WORD
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(seed: int, sample: int, positions: Sequence[int], vocabulary_size: int, device: torch.device):
    """Uniform numbers in (0, 1) of 52 bits, equal on every device.

    Args:
        seed: 0 to 2**64 - 1.
        sample: which of several samples of a prompt, 0 to MAX_SAMPLE.
        positions: [m] absolute positions of the tokens to be drawn.

    Returns:
        [m, V] float64.
    """
    num_pairs = (vocabulary_size + 1) // 2  # one counter makes the bits of two neighbouring token ids
    counter = torch.zeros((4, len(positions), num_pairs), dtype=torch.int64, device=device)
    counter[0] = torch.arange(num_pairs, device=device)
    counter[1] = tensor_on(device, positions)[:, None]
    counter[2] = sample
    words = philox(counter, (seed & WORD, seed >> 32))
    bits = ((words[0::2] >> 6) << 26) | (words[1::2] >> 6)  # [2, m, V / 2]
    return ((bits.double() + 0.5) * 2.0**-52).permute(1, 2, 0).flatten(1)[:, :vocabulary_size]


class GumbelNoise:
    """The noise of one sample, by absolute position, kept while it is in use.

    Args:
        seed, sample, vocabulary_size, device: see `uniforms`.
    """

    def __init__(self, seed: int, sample: int, vocabulary_size: int, device: torch.device):
        self.seed, self.sample = seed, sample
        self._vocabulary_size, self._device = vocabulary_size, device
        self._slots: dict[int, int] = {}  # row of `_rows` by position
        self._rows = torch.empty((0, vocabulary_size), dtype=torch.float32, device=device)

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """[n, V] float32: standard Gumbel noise of the tokens drawn at `positions` [n]."""
        if missing := sorted(set(positions) - self._slots.keys()):
            made = -(-uniforms(self.seed, self.sample, missing, self._vocabulary_size, self._device).log()).log()
            # What stands before this step's positions will not be asked for again.
            kept = [position for position in self._slots if position >= min(positions)]
            rows = self._rows.index_select(0, tensor_on(self._device, [self._slots[position] for position in kept]))
            self._rows = torch.cat([rows, made.float()])
            self._slots = {position: row for row, position in enumerate([*kept, *missing])}
        return self._rows.index_select(0, tensor_on(self._device, [self._slots[position] for position in positions]))


def draw(scores: torch.Tensor, positions: Sequence[int], noise: GumbelNoise | None) -> torch.Tensor:
    """The successors of n nodes.

    Args:
        scores: [n, V] float32: logits, processed; -inf for what must not be drawn.
        positions: [n] absolute positions of the tokens to be drawn.
        noise: of the sample; None for greedy decoding: the most likely token, the lowest id of equals, which is what
            `generate(do_sample=False)` picks.

    Returns:
        [n] int64 token ids.
    """
    return largest(scores if noise is None or not positions else scores + noise.at(positions))


def largest(scores: torch.Tensor) -> torch.Tensor:
    """[n] int64: the first of the largest of each row, [n, V] float32. On a CPU by numpy, several times faster."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)
