"""Chunk size of state-space layers (Mamba 2, arXiv 2405.21060) fitted to the number of tokens fed.

Without CUDA kernels transformers pads a text to whole chunks, of 256 tokens for most models, and computes matrices of
chunk x chunk for every head: 26 ms per layer for a step of 8 tokens, compared with 1 ms in a chunk of 8 (32 heads, 2
cores of an AMD EPYC). The chunk size changes the result by rounding only.

Letters: T tokens fed.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from lp_runtime.model.hf.view import view_of

MAX_CHUNK = 64  # tokens; a prompt of 512 takes 35 ms per layer in these, 53 ms in chunks of 256, 83 ms in chunks of 16


class FittedScans:
    """Views of a model with smaller chunks; each pass uses the one that fits its number of tokens.

    On a GPU, where the kernels choose their own chunks, and for models without such layers, this is the model itself.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        sizes = [module.chunk_size for module in _scanning(model)] if model.device.type == "cpu" else []
        self._own_chunk = max(sizes, default=0)
        self._views: dict[int, PreTrainedModel] = {}

    def model_for(self, num_tokens: int) -> PreTrainedModel:
        """Return the view that runs passes of T tokens per text, or the model itself."""
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
    """Return the layers that scan in chunks: modules with a chunk_size."""
    return [module for module in model.modules() if type(getattr(module, "chunk_size", None)) is int]
