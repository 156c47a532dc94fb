"""Interfaces of sampling."""

from __future__ import annotations

from typing import Protocol

import torch


class LogitsProcessor(Protocol):
    """A logits processor in the sense of transformers."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return processed `scores`, [B, V] float32; `input_ids`, [B, L] int64, are the tokens before each next one."""
