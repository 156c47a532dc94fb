"""Inputs of a forward pass of any size that feeds several sequences.

Letters: T tokens fed, of all sequences together, padding included; n wanted rows of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lp_runtime.model.attention.mask import MaskBuilder
from lp_runtime.model.forward.inputs import InputLayout, concatenated, rounding_of
from lp_runtime.model.kv_cache.batch import BatchedCache
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.utils.tensors import tensor_on


def batch_inputs(
    caches: Sequence[TreeCache], layouts: Sequence[InputLayout], masks: MaskBuilder, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, BatchedCache]:
    """Return the inputs that feed a share of each sequence, (ids [T], positions [T], rows [n], cache).

    Inputs are int64, on the device; on a CPU the tokens are padded (inputs.rounding_of). The cache stands in for those
    of the sequences, and its `mask` is the model's mask.
    """
    sizes = [len(layout.tokens) for layout in layouts]
    num_tokens = sum(sizes)
    num_padding = -num_tokens % rounding_of(num_tokens) if device.type == "cpu" else 0
    ids, positions, rows = (tensor_on(device, each) for each in concatenated(layouts, num_padding))
    made = [
        masks.build(layout.parents, tensor_on(device, layout.positions), cache.length)
        for layout, cache in zip(layouts, caches, strict=True)
    ]
    return ids, positions, rows, BatchedCache(caches, sizes, made, num_padding)
