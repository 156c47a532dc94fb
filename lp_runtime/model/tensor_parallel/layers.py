"""Modules of a sliced model that combine the outputs of a replica's shards.

Letters: P shards, T tokens, V vocabulary, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lp_runtime.distributed.reducers import Reducer


class SliceModule(nn.Module):
    """Base class of modules that hold this shard's slice but return the output of the whole module."""

    def __init__(self, sliced: nn.Module, reducer: Reducer):
        super().__init__()
        self.sliced, self._reducer = sliced, reducer

    @property
    def weight(self) -> torch.Tensor:
        return self.sliced.weight  # type: ignore[return-value]  # torch declares it as Tensor | Module


class SummedOutputs(SliceModule):
    """Module whose output on each shard is a part of a sum: a mixture's experts, with slices of every expert."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._reducer.all_reduce(self.sliced(*args, **kwargs))


class RowwiseLinear(SliceModule):
    """Linear layer whose weights are split by input features; the shards' outputs are summed.

    Every shard has the bias; it is added once, to the sum. With `splits_input`, `forward` receives the whole input, and
    selects this shard's part, from feature `first` on.
    """

    def __init__(self, linear: nn.Linear, reducer: Reducer, splits_input: bool = False, first: int = 0):
        super().__init__(linear, reducer)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        linear.bias = None  # type: ignore[assignment]  # torch's value for a layer without bias
        self._first = first if splits_input else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._first is not None:
            x = x[..., self._first : self._first + self.in_features]
        total = self._reducer.all_reduce(self.sliced(x))
        return total if self.bias is None else total + self.bias


@dataclass
class OutputMode:
    """Whether a GatheredLinear returns its whole output or this shard's part; shared with its views."""

    is_whole: bool = True


class GatheredLinear(SliceModule):
    """Linear layer whose weights are split by output features, and whose output is gathered: the LM head."""

    def __init__(self, linear: nn.Linear, reducer: Reducer, sizes: list[int], shard: int):
        super().__init__(linear, reducer)
        self.in_features, self.out_features = linear.in_features, sum(sizes)
        self.sizes = sizes  # [P] output features of each shard, the largest first
        self.shard = shard
        self.mode = OutputMode()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole layer's output, [..., out_features], or this shard's part of it; see `mode`."""
        part = self.sliced(x)
        return self.put_together(part) if self.mode.is_whole else part

    def put_together(self, part: torch.Tensor) -> torch.Tensor:
        parts = self.gather(nn.functional.pad(part, (0, self.sizes[0] - part.shape[-1])))
        return torch.cat([each[..., :size] for each, size in zip(parts, self.sizes, strict=True)], -1)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather the tensors of all shards, which must have the same shape, into [P, ...]."""
        return self._reducer.all_gather(tensor)


class VocabularyEmbedding(SliceModule):
    """Embedding split by vocabulary, here from id `first`; shards without a token add zeros for it."""

    def __init__(self, embedding: nn.Embedding, reducer: Reducer, first: int):
        super().__init__(embedding, reducer)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self._first = first

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        place = ids - self._first
        is_here = (place >= 0) & (place < self.num_embeddings)
        rows = self.sliced(place.clamp(0, self.num_embeddings - 1))
        return self._reducer.all_reduce(rows.masked_fill(~is_here[..., None], 0.0))


def is_sliced(model: nn.Module) -> bool:
    return any(isinstance(module, SliceModule) for module in model.modules())
