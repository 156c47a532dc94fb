"""Masks of a constraint on scores: forbidden tokens cannot be chosen.

The mask is applied after all processors and before the warpers: no later processor can allow a token again, and warpers
choose among allowed tokens only. If the processors have excluded every allowed token, the constraint wins, and the
allowed tokens get equal scores.

Letters: n rows, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np
import torch
from transformers.generation import logits_process as library

from lp_runtime.lookahead.guide import TOKENS_PER_WORD
from lp_runtime.sampling.types import LogitsProcessor
from lp_runtime.utils.jit import bound, compiled
from lp_runtime.utils.tensors import tensor_on

WARPERS = (
    library.TemperatureLogitsWarper,
    library.TopKLogitsWarper,
    library.TopPLogitsWarper,
    library.TopHLogitsWarper,
    library.MinPLogitsWarper,
    library.TypicalLogitsWarper,
    library.EpsilonLogitsWarper,
    library.EtaLogitsWarper,
)


class GrammarMask:
    """Placeholder among a request's processors for its constraint's mask, applied by TreeProcessors."""

    prefix_only = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores unchanged: a node's mask cannot be computed from its prefix alone."""
        return scores


def with_grammar_mask(processors: Iterable[LogitsProcessor]) -> list[LogitsProcessor]:
    masked = list(processors)
    place = next((place for place, each in enumerate(masked) if isinstance(each, WARPERS)), len(masked))
    masked.insert(place, GrammarMask())
    return masked


def apply_masks(scores: torch.Tensor, masks: np.ndarray | None) -> torch.Tensor:
    """Set the scores, [n, V] float32, of forbidden tokens to -inf, perhaps in place, and return them.

    `masks` are [n, ceil(V / 32)] int32 bits: 1 allows a token.
    """
    assert masks is not None, "a request with a constraint has masks"
    if scores.device.type == "cpu":
        scores = scores.contiguous()
        _mask_kernel()(scores.numpy(), np.ascontiguousarray(masks))
        return scores
    bits = torch.arange(TOKENS_PER_WORD, dtype=torch.int32, device=scores.device)
    words = tensor_on(scores.device, masks)
    allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, : scores.shape[1]]
    scores.masked_fill_(~allowed, -torch.inf)
    is_empty = (scores == -torch.inf).all(dim=1, keepdim=True)
    return scores.masked_fill_(allowed & is_empty, 0.0)


@functools.cache
def _mask_kernel() -> Callable[[np.ndarray, np.ndarray], None]:
    return bound(_mask, np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int32))


@compiled
def _mask(scores: np.ndarray, masks: np.ndarray) -> None:
    size = scores.shape[1]
    for row in range(scores.shape[0]):
        is_empty = True
        for word in range(masks.shape[1]):
            bits = masks[row, word]
            first, last = 32 * word, min(32 * word + 32, size)
            if bits == -1 and not is_empty:  # all are allowed, and one is known to have a score
                continue
            for token in range(first, last):
                if (bits >> (token - first)) & 1 == 0:
                    scores[row, token] = -np.inf
                elif scores[row, token] != -np.inf:
                    is_empty = False
        if is_empty:
            for token in range(size):
                if (masks[row, token >> 5] >> (token & 31)) & 1 != 0:
                    scores[row, token] = 0.0
