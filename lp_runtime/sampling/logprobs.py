"""Packing of the likeliest tokens' log-probabilities into int64, in the layout of sampler.py."""

from __future__ import annotations

import numpy as np
import torch

from lp_runtime.sampling.packing import HALF_BITS, HALF_MASK


def pack_top_logprobs(logits: torch.Tensor, num: int) -> torch.Tensor:
    """Pack each row's `num` likeliest tokens: [n, num] int64, id << 32 | float32 log-probability's bits."""
    values, ids = (logits - logits.logsumexp(dim=-1, keepdim=True)).topk(num, dim=-1)
    return (ids << HALF_BITS) | (values.contiguous().view(torch.int32).long() & HALF_MASK)


def unpack_top_logprobs(packed: np.ndarray) -> list[tuple[tuple[int, float], ...]]:
    ids = (packed >> HALF_BITS).tolist()
    values = (packed & HALF_MASK).astype(np.uint32).view(np.float32).tolist()
    return [tuple(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
