"""Passes that all have the same number of tokens, for exactness=strict (see attention/strict.py).

Letters: T tokens fed, B tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from lp_runtime.model.attention.mask import LayerMasks, MaskBuilder
from lp_runtime.model.attention.strict import BLOCK, KEYS, POSITION, WINDOW, tail_table
from lp_runtime.model.forward.inputs import InputLayout
from lp_runtime.utils.tensors import tensor_on


def strict_passes(
    layout: InputLayout, size: int, num_cached: int, masks: MaskBuilder, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, LayerMasks]]:
    """Yield (ids [B], positions [B], masks) of passes of `size` tokens, B, each; the last one is padded.

    Masks are tables from `tail_table` for strict_attention, by kind of layer if the model has several.
    """
    # Padding is at position 0 and sees the first committed token, so that its results are finite.
    num_padding = -len(layout.tokens) % size
    tables: dict[int, torch.Tensor] = {}  # by window
    for window in set(masks.windows_by_kind.values()):
        table = tail_table(num_cached, layout.parents, window)
        padding = np.full((num_padding, table.shape[1]), -1, dtype=np.int64)
        padding[:, [POSITION, WINDOW, KEYS + BLOCK]] = 0
        tables[window] = tensor_on(device, np.concatenate([table, padding]))
    inputs = np.pad(np.stack([layout.tokens, layout.positions]), ((0, 0), (0, num_padding)))
    ids, positions = tensor_on(device, inputs)
    for start in range(0, len(ids), size):
        rows = slice(start, start + size)
        by_kind = {kind: tables[window][rows][None, None] for kind, window in masks.windows_by_kind.items()}
        yield ids[rows], positions[rows], by_kind if masks.by_kind else next(iter(by_kind.values()))
