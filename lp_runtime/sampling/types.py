"""Interfaces of sampling."""

from __future__ import annotations

from typing import Protocol

import torch


class LogitsProcessor(Protocol):
    """A logits processor in the sense of transformers."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores`, [B, V] float32, processed; `input_ids`, [B, L] int64, precede the next tokens."""
