"""Inputs of a pass of a fixed size, in one int64 block that a single copy moves to the device.

The block: token ids [B], positions [B], wanted rows [B], owners [B], the lowest position that each token may see
[kinds, B], the table of the sequences [P, 4 + 2 layers], and mask words [B, ceil(B / 64)]. kernels/triton_attention.py
defines owners, table and words. With exactness=strict the tokens' paths (kernels/triton_strict.py) take the place of
the mask words.

Letters: B tokens of a pass, padding included; P rows of the table, one more than sequences; T tokens fed of a sequence,
L its committed tokens, n its wanted rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lp_runtime.model.attention.mask import LayerMasks
from lp_runtime.model.forward.inputs import InputLayout
from lp_runtime.model.kv_cache.batch import DeviceInputs
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.utils.jit import bound, compiled, compiles

HEADER = 4  # integers in a row of the table before the addresses
MASK_WORD_BITS = 64
IDS, POSITIONS, WANTED, OWNERS, LOWEST = range(5)  # rows of `columns`; from LOWEST on, one row per kind of layer

NO_PATHS = np.zeros((0, 1), np.int64)


class Part(NamedTuple):
    """The tokens of one sequence that a pass feeds."""

    cache: TreeCache
    layout: InputLayout  # T tokens; its rows and parents are indices among them
    place: int  # index in the cache at which the first of them is written
    paths: np.ndarray = NO_PATHS  # [T, columns] the tokens' paths, with exactness=strict; otherwise without rows

    @classmethod
    def whole(cls, cache: TreeCache, layout: InputLayout) -> Part:
        return cls(cache, layout, cache.place)


class _HostBlock:
    """A 1-D int64 block in host memory, pinned for a GPU, and the event that marks its last copy's end."""

    def __init__(self, num_columns: int, size: int, shape: tuple[int, int], num_words: int, device: torch.device):
        on_gpu = device.type == "cuda"
        start, end = num_columns * size, num_columns * size + shape[0] * shape[1]
        self._device = device
        self._copied = torch.cuda.Event() if on_gpu else None
        self.block = torch.zeros(end + size * num_words, dtype=torch.int64, pin_memory=on_gpu)
        array = self.block.numpy()
        self.columns = array[:start].reshape(num_columns, size)  # a view, as are the next two
        self.table, self.words = array[start:end].reshape(shape), array[end:].reshape(size, num_words)

    @property
    def is_free(self) -> bool:
        """Whether the last copy has finished, so that the block may be overwritten."""
        return self._copied is None or self._copied.query()

    def copy_to(self, target: torch.Tensor) -> None:
        """Queue a copy of the block to the device; does not wait."""
        target.copy_(self.block, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))


class PassInputs:
    """Device inputs of the passes of one size."""

    def __init__(
        self,
        size: int,  # B
        num_sequences: int,  # P - 1, the largest number of sequences
        num_layers: int,
        limits: Mapping[str, tuple[int, int]],  # (sliding window, chunk) in tokens for each kind of layer; 0 for none
        by_kind: bool,
        device: torch.device,
        num_path_columns: int = 0,  # columns of a path, with exactness=strict; 0 for mask words
    ):
        num_columns, shape = OWNERS + 1 + len(limits), (num_sequences + 1, HEADER + 2 * num_layers)
        num_words = num_path_columns or -(-size // MASK_WORD_BITS)
        self._limits = np.array(list(limits.values()), np.int64)
        self._make_host = functools.partial(_HostBlock, num_columns, size, shape, num_words, device)
        self._hosts = [self._make_host()]
        self.block = torch.zeros(len(self._hosts[0].block), dtype=torch.int64, device=device)
        start, end = num_columns * size, num_columns * size + shape[0] * shape[1]
        columns = self.block[:start].view(num_columns, size)
        table, words = self.block[start:end].view(shape), self.block[end:].view(size, -1)
        ids, positions, wanted, owners = columns[: OWNERS + 1]
        self.ids = ids  # a [B] view, like the next two
        self.positions = positions
        self.wanted = wanted  # rows whose logits are wanted, sequence by sequence, then zeros
        by_name = {name: columns[LOWEST + i].view(1, 1, 1, size) for i, name in enumerate(limits)}
        # Passed to the model as its mask, or masks by kind of layer: [1, 1, 1, B] views.
        self.masks: LayerMasks = by_name if by_kind else next(iter(by_name.values()))
        self.device_inputs = DeviceInputs(self.positions, owners, table, words)

    def fill(self, parts: Sequence[Part]) -> None:
        """Write the parts, each to follow the tokens in its cache, and queue the copy to the device.

        Without parts the pass consists of padding only, and touches no cache.
        """
        host = next((each for each in self._hosts if each.is_free), None)  # a queued copy may still read the others
        if host is None:
            host = self._make_host()
            self._hosts.append(host)
        clear, fill = _kernels()
        clear(sum(len(part.layout.tokens) for part in parts), host.columns, host.table)
        first = first_row = 0
        for row, (cache, layout, place, paths) in enumerate(parts):
            capacity = cache.capacity
            assert place + len(layout.tokens) <= capacity
            fill(
                *layout, paths, cache.addresses, self._limits, row, first, first_row, place, capacity,
                host.columns, host.table, host.words,
            )  # fmt: skip
            first, first_row = first + len(layout.tokens), first_row + len(layout.rows)
        host.copy_to(self.block)


@functools.cache
def _kernels() -> tuple[Callable, Callable]:
    integers, rows = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    return bound(_clear, 0, rows, rows), bound(_fill, *[integers] * 4, *[rows] * 3, *[0] * 5, *[rows] * 3)


@compiles
def compile_pass_inputs() -> None:
    _kernels()


@compiled
def _clear(num_tokens, columns, table):
    """Write the padding after the `num_tokens` tokens of all sequences, and empty rows of the table."""
    size, last = columns.shape[1], table.shape[0] - 1
    for token in range(size):
        columns[WANTED, token] = 0
    for token in range(num_tokens, size):
        for row in range(columns.shape[0]):
            columns[row, token] = 0
        columns[OWNERS, token] = last
    for row in range(table.shape[0]):
        for column in range(HEADER):
            table[row, column] = 0
    table[last, 0], table[last, 1] = num_tokens, size - num_tokens


@compiled
def _fill(
    tokens, positions, parents, wanted, paths, addresses, limits, row, first, first_row, place, capacity,
    columns, table, words,
):  # fmt: skip
    """Write one sequence's tokens to `columns`, [4 + kinds, B], a row of `table`, and `words`, [B, words].

    They begin at index `first` of the pass, `first_row` of its wanted rows, and `place` of the cache. If `paths`,
    [T, words], has no rows, `words` become masks of ancestors. `limits`: [kinds, 2] window and chunk; 0 for none.
    """
    for i in range(len(tokens)):
        token, position, parent = first + i, positions[i], parents[i]
        columns[IDS, token], columns[POSITIONS, token], columns[OWNERS, token] = tokens[i], position, row
        for kind in range(limits.shape[0]):
            lowest = max(0, position - limits[kind, 0] + 1) if limits[kind, 0] > 0 else 0
            if limits[kind, 1] > 0:
                lowest = max(lowest, position // limits[kind, 1] * limits[kind, 1])
            columns[LOWEST + kind, token] = lowest
        if len(paths) > 0:
            for word in range(words.shape[1]):
                words[token, word] = paths[i, word]
        else:
            for word in range(words.shape[1]):
                words[token, word] = words[first + parent, word] if parent >= 0 else 0
            words[token, i // MASK_WORD_BITS] |= np.int64(1) << (i % MASK_WORD_BITS)
    for i in range(len(wanted)):
        columns[WANTED, first_row + i] = first + wanted[i]
    table[row, 0], table[row, 1], table[row, 2], table[row, 3] = first, len(tokens), place, capacity
    for layer in range(addresses.shape[0]):
        table[row, HEADER + 2 * layer], table[row, HEADER + 2 * layer + 1] = addresses[layer, 0], addresses[layer, 1]
