"""Chunked scans of state-space layers (Mamba 2, arXiv 2405.21060), as long as what is fed.

Without CUDA kernels transformers fills a text up to whole chunks, of 256 tokens for most models, and computes matrices
of chunk x chunk for every head: 26 ms a layer for 8 tokens of a step, and 1 ms in a chunk of 8 (32 heads, 2 cores of an
AMD EPYC). How a text is cut into chunks changes its result by rounding alone.

Letters: T tokens fed.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from lp_runtime.model.hf.view import view_of

MAX_CHUNK = 64  # for prompts: 512 tokens take 35 ms a layer so, 53 ms in chunks of 256 and 83 ms in chunks of 16


class FittedScans:
    """Chooses, for each pass, the view of a model whose chunks are as long as what is fed.

    On a GPU, where kernels choose how they work, and for models without such layers, it is always the model itself.

    Args:
        model: in eval mode; only read.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        sizes = [module.chunk_size for module in _scanning(model)] if model.device.type == "cpu" else []
        self._own_chunk = max(sizes, default=0)
        self._views: dict[int, PreTrainedModel] = {}

    def model_for(self, num_tokens: int) -> PreTrainedModel:
        """Return what runs T tokens of each text."""
        chunk = min(MAX_CHUNK, 1 << (num_tokens - 1).bit_length())
        if chunk >= self._own_chunk:
            return self._model
        if chunk not in self._views:
            view = view_of(self._model)
            for module in _scanning(view):
                module.chunk_size = min(chunk, module.chunk_size)
            self._views[chunk] = view
        return self._views[chunk]


def _scanning(model: PreTrainedModel) -> list[Any]:
    """Return the layers, modules with a chunk_size, that scan in chunks."""
    return [module for module in model.modules() if type(getattr(module, "chunk_size", None)) is int]
